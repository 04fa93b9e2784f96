"""Which commits are part of the cache: neither void, nor replaced, nor a replacement that lost. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from teachercache.format.objects import Commit, Plan, PlanShard
from teachercache.store.store import ObjectInfo


def is_void(
    commit: Commit, created: datetime, data: Mapping[str, ObjectInfo], settled: Collection[str], grace_seconds: float
) -> bool:
    """Return whether a commit came so late after its upload that the collector may already have taken its files.

    A writer checks its own age before it commits, but it can be suspended between the check and the request. Both
    timestamps come from the store, so publishers and collectors agree whatever the writers' clocks say. A file that a
    manifest names (`settled`) is never void.
    """
    limit = timedelta(seconds=grace_seconds / 2)
    return any(
        entry.path not in settled and entry.path in data and created - data[entry.path].modified > limit
        for entry in commit.files
    )


def resolve_replacements(
    commits: Iterable[Commit], settled: Mapping[str, str], remembered: Collection[str] = ()
) -> dict[str, str]:
    """Map each replaced shard to its replacement. An earlier manifest's choice stays; then the first by name wins.

    `remembered` are shards that the newest manifest settled, whose commits need not be among `commits`.

    Two optimisers may have replaced overlapping sets. The second one's commit is void as a whole: applying half of it
    would repeat or lose documents.
    """
    by_shard = {commit.shard_id: commit for commit in commits}
    replaced = dict(settled)
    winners = set(settled.values())
    for shard_id in sorted(by_shard):
        commit = by_shard[shard_id]
        if not commit.replaces or shard_id in winners:
            continue
        if all((old in by_shard or old in remembered) and old not in replaced for old in commit.replaces):
            replaced |= dict.fromkeys(commit.replaces, shard_id)
    return replaced


def live_commits(commits: Iterable[Commit], replaced: Mapping[str, str]) -> list[Commit]:
    """Return the commits whose files are the cache: neither replaced, nor a replacement that lost."""
    winners = set(replaced.values())
    return [c for c in commits if c.shard_id not in replaced and (not c.replaces or c.shard_id in winners)]


def is_dead(commit: Commit, replaced: Mapping[str, str]) -> bool:
    """Return whether what a manifest settled as replaced leaves a commit's files no part of the cache, now or later."""
    if commit.shard_id in replaced:
        return True
    return any(replaced.get(old, commit.shard_id) != commit.shard_id for old in commit.replaces)


def planned_shards(plans: Iterable[Plan], committed: Collection[str]) -> dict[str, PlanShard]:
    """Return the shards that a cache waits for or has, by id: those of all plans, without what was planned anew.

    An input that was corrected, or that got another recipe, has other shards in a later plan. The newest plan that names
    an input of a source decides; older shards of it count only where they are committed.
    """
    decided: dict[tuple[str, str], set[str]] = {}
    found: dict[str, PlanShard] = {}
    for plan in sorted(plans, key=lambda plan: (plan.created, plan.digest), reverse=True):
        ours: dict[tuple[str, str], set[str]] = {}
        for shard in plan.shards:
            ours.setdefault((shard.source, shard.input), set()).add(shard.shard_id)
        for shard in plan.shards:
            newer = decided.get((shard.source, shard.input))
            if newer is None or shard.shard_id in newer or shard.shard_id in committed:
                found.setdefault(shard.shard_id, shard)
        for where, ids in ours.items():
            decided.setdefault(where, ids)
    return found
