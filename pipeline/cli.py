"""`python -m pipeline plan|run|status|quarantine|config|doctor`, and `teachercache plan|run|status|quarantine`.

Exit status: 0 = done, 1 = something is missing or wrong (quarantined shards, budget reached, stopped), 2 = misused.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pipeline.config import JobConfig, load_job
from teachercache.configfile import commented_yaml
from teachercache.console import print_json, run_cli, text_console
from teachercache.errors import UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run a teacher over a corpus once and keep its top-K log-probabilities as a teachercache.",
)

Job = Annotated[
    str, typer.Argument(help="Job file (YAML); `python -m pipeline config` prints every key.", show_default=False)
]
Target = Annotated[str, typer.Argument(help="Job file, or URL of a cache.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides, for example run.actors=4.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def _cache_of(target: str, overrides: list[str] | None) -> str:
    if target.endswith((".yaml", ".yml", ".json")):
        return load_job(target, overrides).cache
    if overrides:
        raise UsageError(f"{', '.join(overrides)}: overrides go with a job file, found the URL of a cache, {target}")
    return target


@app.command()
def plan(
    job: Job,
    overrides: Overrides = None,
    as_json: AsJson = False,
    show: Annotated[int, typer.Option(help="Print this many documents as the teacher will see them, with masks.")] = 0,
    rate: Annotated[
        float | None, typer.Option(help="Tokens/s of one teacher; by default as measured in this cache.")
    ] = None,
) -> None:
    """Show documents, tokens, drops, shards, storage and GPU-hours before anything is spent. Writes nothing.

    Example: teachercache plan job.yaml --rate 36500 --show 2
    """
    from pipeline.running.job import prepare
    from pipeline.watching.progress import show_plan
    from pipeline.watching.status import measured_rate

    config = load_job(job, overrides)
    prepared = prepare(config)
    console, planned = text_console(stderr=as_json), prepared.planned
    if as_json:
        sources = []
        for e in planned.estimates:
            counts = {f"estimated_{name}": round(getattr(e, name)) for name in ("documents", "tokens", "rows")}
            exact = {name: getattr(e, name) for name in ("source", "files", "bytes", "shards")}
            sources.append({**exact, **counts, "estimated_drops": dict(e.drops)})
        head = {"plan": planned.plan.digest, "spec": prepared.spec.digest, "shards": len(planned.plan.shards)}
        print_json({**head, "sources": sources, "warnings": planned.warnings}, indent=None)
    else:
        gpus = float(config.teacher.gpus_per_actor or config.teacher.tensor_parallel)
        show_plan(console, planned, config.rows.spec, rate or measured_rate(config.cache), gpus)
        console.print(f"plan {planned.plan.digest[:16]} for cache {config.cache}")
    if show:
        from pipeline.watching.preview import show_documents

        show_documents(console, prepared, show)


@app.command()
def run(
    job: Job,
    overrides: Overrides = None,
    as_json: AsJson = False,
    events: Annotated[
        Path | None, typer.Option(help="Append every event to this file, one JSON object a line.")
    ] = None,
) -> None:
    """Plan, run and publish. Running the same command again resumes where it stopped.

    Example: teachercache run job.yaml

    On a Ray cluster: ray job submit --address http://HEAD:8265 --working-dir . -- python -m pipeline run job.yaml
    """
    from pipeline.running.job import Prepared, run_job
    from pipeline.running.tasks import failures
    from pipeline.watching.metrics import ActorMetrics, with_job_metrics
    from pipeline.watching.progress import Progress, human, say, show_outcome

    config = load_job(job, overrides)
    console = text_console(stderr=as_json)
    progress, tell = Progress(console), partial(say, console)

    def planned(prepared: Prepared) -> None:
        tokens = sum(e.tokens for e in prepared.planned.estimates)
        count = len(prepared.planned.plan.shards)
        tell(f"{count} shard{'s' * (count != 1)}, about {human(tokens)} tokens (estimate) → {config.cache}")
        for warning in prepared.planned.warnings:
            tell(f"warning: {warning}")

    def event(name: str, details: dict[str, Any]) -> None:
        progress.event(name, details)
        if events is not None:
            with events.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": round(time.time(), 3), "event": name, **details}) + "\n")

    with_ray = config.run.executor == "ray"
    on_progress = with_job_metrics(progress) if with_ray else progress
    observe = ActorMetrics if with_ray else None
    try:
        result = run_job(config, on_planned=planned, on_progress=on_progress, on_event=event, observe=observe, say=tell)
    finally:
        progress.close()
    outcome = result.outcome
    show_outcome(console, outcome)
    lost = failures(outcome.tally.drops)
    if lost > config.run.max_drop_share * (seen := lost + outcome.tally.documents):
        tell(f"warning: {lost:,} of {seen:,} documents could not be used; see the reasons above")
    if result.manifest is not None:
        m = result.manifest
        state = "complete" if m.complete else "PARTIAL"
        what = "published" if result.published else "nothing is new:"
        tell(
            f"{what} manifest {m.number} ({state}): {m.documents:,} documents, {m.rows:,} rows, {len(m.files):,} files"
        )
        if config.teacher.engine == "noop":
            tell(
                "note: the engine noop makes rows up: this cache tests a pipeline, and there is nothing to learn from it"
            )
    if as_json:
        report = {
            "reason": outcome.reason,
            **{name: getattr(outcome.tally, name) for name in ("committed", "found", "drops", "tokens", "rows")},
            "quarantined": outcome.quarantined,
            "seconds": round(outcome.seconds, 2),
            "gpu_hours": round(outcome.gpu_hours, 6),
            "manifest": result.manifest.number if result.manifest else None,
            "complete": bool(result.manifest and result.manifest.complete),
        }
        print_json(report, indent=None)
    if outcome.reason == "budget":
        tell(
            f"the budget of {config.run.budget_gpu_hours:g} GPU-hours is spent ({outcome.gpu_hours:.4g} in all; shards that "
            "were in progress are finished); run the same command to go on with a fresh budget, or with a larger one"
        )
    elif outcome.reason == "stopped":
        tell("stopped; run the same command to go on")
    elif outcome.quarantined and result.manifest is None:
        tell(
            "not published: shards are quarantined; fix their inputs, or publish without them by run.allow_partial=true"
        )
    if outcome.reason != "done" or result.manifest is None:
        raise typer.Exit(1)


@app.command()
def status(
    target: Target,
    overrides: Overrides = None,
    as_json: AsJson = False,
    watch: Annotated[
        float | None, typer.Option(help="Repeat after this many seconds, until the cache is complete.")
    ] = None,
) -> None:
    """Show what is in the cache: shards, documents, tokens, drops by reason. Needs read access alone.

    Example: teachercache status s3://bucket/cache --watch 30
    """
    from pipeline.watching.status import read_status, show_status

    url = _cache_of(target, overrides)
    console = text_console(stderr=as_json)
    before = None
    while True:
        report = read_status(url)
        if as_json:
            print_json(report, indent=None)
        else:
            show_status(console, report, before)
        if watch is None or report["complete"]:
            return
        before = report
        time.sleep(watch)


@app.command()
def quarantine(target: Target, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List shards and documents that were given up, with their reasons. Exit status 1 where a shard is quarantined.

    Example: teachercache quarantine s3://bucket/cache
    """
    from pipeline.watching.progress import say
    from pipeline.watching.status import read_quarantine

    url = _cache_of(target, overrides)
    entries = read_quarantine(url)
    if as_json:
        print_json(entries, indent=None)
    else:
        console = text_console()
        for entry in entries:
            named = f"  [{', '.join(entry['documents'][:5])}]" if entry["documents"] else ""
            say(console, f"{entry['scope']} {entry['shard_id']}  {entry['reason']}: {entry['message']}{named}")
        if not entries:
            console.print("nothing is quarantined")
        elif any(e["scope"] == "shard" for e in entries):
            console.print("to try them again: teachercache run JOB run.retry_quarantined=true")
    if any(e["scope"] == "shard" for e in entries):
        raise typer.Exit(1)


@app.command()
def doctor(
    target: Annotated[str | None, typer.Argument(help="Job file or URL whose store is checked as well.")] = None,
    overrides: Overrides = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Do not probe conditional writes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine: Python, GPU, disk, the store, torch, Ray, vLLM and its fast path. Exit status 1 where it cannot work.

    Example: python -m pipeline doctor job.yaml
    """
    from pipeline.watching.doctor import examine_pipeline
    from teachercache.doctor import print_findings

    findings = examine_pipeline(_cache_of(target, overrides) if target is not None else None, write=not read_only)
    raise typer.Exit(print_findings(findings, as_json=as_json, indent=None))


@app.command()
def config() -> None:
    """Print every key of a job file with its default and meaning, as commented YAML.

    Example: python -m pipeline config > job.yaml
    """
    print(commented_yaml(JobConfig), end="")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit; an error that a user can understand is one line on standard error."""
    logging.basicConfig(
        level=os.environ.get("PIPELINE_LOG", "WARNING"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    run_cli(app, arguments, name="python -m pipeline")
