"""The plan: which ranges of which input files are shards. Deterministic, made without a teacher or a cluster.

A shard's id is a hash of (input file's digest, range, row recipe), so the same input is the same shard whatever else
the corpus holds: adding a file adds shards, changing the number of actors changes nothing. The cut of a file depends
on that file and the recipe alone. Token counts come from a sample of each file and are called estimates.

    shape → sample (sample.py) → estimate (sample.py) → cut (ranges.py) → shards
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from pipeline.config import JobConfig
from pipeline.corpus.encode import Encoder
from pipeline.corpus.inputs import InputFile, expand, fingerprint_all
from pipeline.corpus.readers import OPEN_END
from pipeline.planning.dedup import Marked, mark_duplicates
from pipeline.planning.prior_plans import PriorPlans
from pipeline.planning.ranges import LARGE_WHOLE_FILE, cut, shard_id
from pipeline.planning.recipe import recipe_digest, recipe_of
from pipeline.planning.sample import (
    ENOUGH_TO_JUDGE,
    Sample,
    SourceEstimate,
    check_sample,
    check_source,
    column_warnings,
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


EXACT_BYTES = 8 << 20  # of all inputs: then a plan finds repeated ids by reading them, else its samples say "likely"


def _repeats(job: JobConfig, marked: Marked) -> list[str]:
    """Return warnings of ids that repeat. Raises UsageError where more than run.max_drop_share of a source's do."""
    notes = []
    for place, count in marked.repeated.items():
        said = repeated_ids(job, place, count, marked.documents[place], marked.first[place])
        if count > job.run.max_drop_share * marked.documents[place] and marked.documents[place] >= ENOUGH_TO_JUDGE:
            raise UsageError(said)
        notes.append(f"{said}; they are left out (duplicate_id)")
    return notes


def _likely_repeats(job: JobConfig, place: int, samples: Sequence[tuple[InputFile, Sample]]) -> list[str]:
    seen: set[bytes] = set()
    again, first, total = 0, "", 0
    for file, sample in samples:
        ours = [key for key in sample.ids if key in seen]
        again, total = again + len(ours) + len(sample.ids) - len(set(sample.ids)), total + len(sample.ids)
        first = first or (file.url if again else "")
        seen.update(sample.ids)
    return [f"likely: {repeated_ids(job, place, again, total, first)} (of a sample)"] if again else []


def repeated_ids(job: JobConfig, place: int, count: int, of: int, first: str) -> str:
    """Return the sentence about ids that repeat, with the way out."""
    return (
        f"source {job.corpora[place].source!r}: {count} of {of} documents have an id that an earlier one has (first: {first}; "
        "a number and the same digits as text are one id); where ids count from 0 in every file, set "
        f"corpora.{place}.id_scope=file"
    )


def make_plan(
    job: JobConfig, encoder: Encoder, spec_digest: str, prior: PriorPlans | None = None, *, exact: bool = False
) -> Planned:
    """Plan a whole job. Cost: one HEAD (or local hash) and a sample of 32 KiB of every file.

    exact: where documents have ids, read all inputs once to find those that repeat; small inputs are always read.

    prior: what the cache holds. Inputs that have committed shards keep their cut, and, in corpus-wide de-duplication,
    their copy of a document. Raises UsageError where an input is cached under another recipe already, where no input
    holds data, or where the job file does not fit the files.
    """
    prior = prior or PriorPlans()
    shards: list[PlanShard] = []
    estimates: list[SourceEstimate] = []
    warnings = job.without_effect
    if encoder.chat is not None:
        warnings += encoder.chat.unread(job.recipe.chat.template_args)
    likely: list[str] = []
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
        warnings += column_warnings(corpus, samples)
        warnings += template_warnings(corpus, samples)
        if corpus.fields.id is not None:
            likely += _likely_repeats(job, place, samples)
        warnings += share_warning(corpus, samples, job.run.max_drop_share)
        estimates.append(total)
        stored["corpora"].append(corpus.model_dump(mode="json"))
        stored["recipes"].append(tree["recipe"])
        stored["recipe_digests"].append(recipe)
    if not shards:
        raise UsageError("the corpora hold no data: every input file is empty")
    with_ids = job.run.check_ids and any(corpus.fields.id is not None for corpus in job.corpora)
    small = sum(found.bytes for found in estimates) <= EXACT_BYTES
    if job.recipe.filters.dedup == "corpus" or (with_ids and (exact or small)):
        known = [plan for plan in prior.shards if all(shard.shard_id in plan for shard in shards)]
        if known and job.recipe.filters.dedup != "corpus":  # an earlier run of this job has read the inputs
            shards = [known[-1][shard.shard_id] for shard in shards]
        else:
            marked = mark_duplicates(job, shards, prior.committed)
            shards = marked.shards
            warnings += _repeats(job, marked)
    else:
        warnings += likely
    return Planned(Plan(spec_digest=spec_digest, created=utc_now(), job=stored, shards=shards), estimates, warnings)
