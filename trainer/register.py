"""Name a finished run in the cache that it read, so that its team sees which students it made and how good they are."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from teachercache import Cache
from teachercache.console import say
from teachercache.errors import Exists
from teachercache.format import layout
from teachercache.format.objects import Run
from teachercache.format.sealed import seal, utc_now
from trainer import hub
from trainer.checkpoint import CheckpointFolder, wait_for_store
from trainer.config import TrainerConfig

RUN_ID = "run_id"


def register(config: TrainerConfig, caches: Sequence[Cache], folder: CheckpointFolder, summary: dict[str, Any]) -> None:
    """Create the run's entry in the `runs/` of each cache, unless it is there; needs the right to create below it.

    The entry says what the summary says; of several caches each entry has the held-out KL to that cache.
    Of a student that is no Hub id it has the last part of the name alone: paths, hosts and users stay here.
    """
    run = folder.kept_id(RUN_ID) or uuid.uuid4().hex
    folder.put(RUN_ID, run.encode())
    name = config.student if hub.is_hub_id(config.student) else PurePosixPath(config.student.rstrip("/")).name
    for part, cache in zip(config.caches, caches, strict=True):
        entry = Run(
            spec_digest=cache.spec.digest,
            run=run,
            manifest=cache.manifest.number,
            student=name[:200].encode(errors="replace").decode(),
            parameters=summary["parameters"],
            steps=summary["steps"],
            rows=summary["rows"],
            heldout_kl=summary.get(f"heldout_kl{part.suffix}"),
            created=utc_now(),
        )
        path = layout.run_path(run, entry.steps)
        with suppress(Exists):  # an earlier process got this far and was killed
            wait_for_store(partial(cache.store.create, path, seal(entry)), f"registering in {cache.url}")
        say(f"registered as {path} of {cache.url}")
