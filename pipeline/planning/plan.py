"""The plan: which ranges of which input files are shards. Deterministic, made without a teacher or a cluster.

A shard's id is a hash of (input file's digest, range, row recipe), so the same input is the same shard whatever else
the corpus holds: adding a file adds shards, changing the number of actors changes nothing. The cut of a file depends
on that file and the recipe alone. Token counts come from a sample of each file and are called estimates.

    shape → sample (sample.py) → estimate (sample.py) → cut (ranges.py) → shards
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from pipeline.config import JobConfig
from pipeline.corpus.encode import Encoder
from pipeline.corpus.inputs import InputFile, expand, fingerprint_all
from pipeline.corpus.readers import OPEN_END
from pipeline.planning.dedup import mark_duplicates
from pipeline.planning.prior_plans import PriorPlans
from pipeline.planning.ranges import LARGE_WHOLE_FILE, cut, shard_id
from pipeline.planning.recipe import recipe_digest, recipe_of
from pipeline.planning.sample import (
    Sample,
    SourceEstimate,
    check_sample,
    check_source,
    estimate,
    shape_of,
    share_warning,
    take_sample,
    template_warnings,
    text_units,
)
from teachercache.errors import UsageError
from teachercache.format.objects import Plan, PlanShard
from teachercache.format.sealed import utc_now


@dataclass(slots=True)
class Planned:
    """A plan with what a person wants to know before paying for it."""

    plan: Plan
    estimates: list[SourceEstimate]
    warnings: list[str]


def _plan_file(
    job: JobConfig, place: int, recipe: str, encoder: Encoder, prior: PriorPlans, file: InputFile
) -> tuple[list[PlanShard], SourceEstimate, list[str], Sample]:
    """Return a file's shards, its estimate, warnings and its sample; of the corpus at `place`, of this recipe digest."""
    corpus = job.corpora[place]
    shape = shape_of(file, corpus)
    sample = take_sample(file, shape, corpus, job, encoder)
    warning = check_sample(file, corpus, sample, lenient=job.run.max_drop_share >= 1)
    warnings = [warning] if warning else []
    units = text_units(file, shape, corpus, sample)
    found = estimate(file, shape, corpus, sample, units)
    cuts = cut(shape, corpus, job.run, sample.tokens_per_unit, units)
    if [c[0] for c in cuts] == ["file"] and shape.total > LARGE_WHOLE_FILE and shape.compression != "none":
        size = f"{file.size / 2**20:.0f} MiB"
        warnings.append(f"{file.url}: {size} without seek points is one shard; split it to share it")
    cuts = prior.cuts.get((file.digest, recipe), cuts)  # the cut that an earlier job began is kept
    extent = max(1, round(units) if cuts and cuts[-1][2] == OPEN_END else shape.total)
    shards = [
        PlanShard(
            shard_id=shard_id(file.digest, start, stop, unit, recipe),
            source=corpus.source,
            corpus=place,
            input=file.url,
            input_digest=file.digest,
            start=start,
            stop=stop,
            unit=unit,
            estimated_tokens=round(found.tokens * max(0, min(stop, extent) - start) / extent),
        )
        for unit, start, stop in cuts
    ]
    found.shards = len(shards)
    return shards, found, warnings, sample


def make_plan(job: JobConfig, encoder: Encoder, spec_digest: str, prior: PriorPlans | None = None) -> Planned:
    """Plan a whole job. Cost: one HEAD (or local hash) and a sample of 32 KiB of every file.

    prior: what the cache holds. Inputs that have committed shards keep their cut, and, in corpus-wide de-duplication,
    their copy of a document. Raises UsageError where an input is cached under another recipe already, where no input
    holds data, or where the job file does not fit the files.
    """
    prior = prior or PriorPlans()
    shards: list[PlanShard] = []
    estimates: list[SourceEstimate] = []
    warnings: list[str] = []
    seen: dict[str, str] = {}
    stored: dict[str, list[object]] = {"corpora": [], "recipes": [], "recipe_digests": []}
    for place, corpus in enumerate(job.corpora):
        recipe = recipe_digest(job, corpus, encoder.chat_template)
        tree = recipe_of(job, corpus, encoder.chat_template)
        tree.pop("version")
        files, twice = [], False
        for file in fingerprint_all(expand(job.patterns(corpus), corpus.storage), corpus.storage):
            first = seen.setdefault(f"{file.digest}:{recipe}", file.url)
            if first != file.url:
                warnings.append(f"{file.url} has the same content as {first}; it is cached once")
                twice = True
            elif not file.size:
                warnings.append(f"{file.url} is empty")
            else:
                prior.use(file.url, file.digest, recipe, tree)
                files.append(file)

        total = SourceEstimate(corpus.source)
        with ThreadPoolExecutor(max_workers=8) as pool:
            planned = list(pool.map(partial(_plan_file, job, place, recipe, encoder, prior), files))
        for part, found, notes, _ in planned:
            shards += part
            warnings += notes
            total.add(found)
        samples = [(file, entry[3]) for file, entry in zip(files, planned, strict=True)]
        if files or not twice:
            check_source(corpus, samples, lenient=job.run.max_drop_share >= 1)
        warnings += template_warnings(corpus, samples)
        warnings += share_warning(corpus, samples, job.run.max_drop_share)
        estimates.append(total)
        stored["corpora"].append(corpus.model_dump(mode="json"))
        stored["recipes"].append(tree["recipe"])
        stored["recipe_digests"].append(recipe)
    if not shards:
        raise UsageError("the corpora hold no data: every input file is empty")
    if job.recipe.filters.dedup == "corpus":
        shards = mark_duplicates(job, shards, prior.committed)
    return Planned(Plan(spec_digest=spec_digest, created=utc_now(), job=stored, shards=shards), estimates, warnings)
