"""What a cache holds of a job's inputs already, by the plans of earlier jobs: cuts are kept, contradictions refused.

Two things would otherwise show only at publishing, when everything is paid for: the same file cut at other places
(another `shard_tokens`, a version of this software that estimates otherwise), and the same file of the same source
under another recipe. Both put documents into the cache twice.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from pipeline.planning.ranges import Cut
from teachercache import Ledger
from teachercache.errors import UsageError
from teachercache.format.layout import PLANS
from teachercache.format.objects import Plan, PlanShard
from teachercache.store.ledger import read_sealed


@dataclass(slots=True)
class Use:
    """How an input is used: the splits that its documents may come into, and the recipe as a tree (recipe_of)."""

    splits: set[str]
    tree: dict[str, Any]


@dataclass(slots=True)
class PriorPlans:
    """Committed shards, and how the inputs that have some were cut, by which recipe, for which source and splits.

    date: the day that chat templates print, by the first plan that has one (YYYY-MM-DD).
    """

    committed: Set[str] = frozenset()
    cuts: dict[tuple[str, str], list[Cut]] = field(default_factory=dict)  # (input digest, recipe digest)
    shards: list[dict[str, PlanShard]] = field(default_factory=list)  # of each plan, by id
    uses: dict[tuple[str, str], dict[str, Use]] = field(default_factory=dict)  # (source, input digest) → recipe digest
    date: str | None = None

    def use(self, url: str, input_digest: str, recipe: str, tree: dict[str, Any]) -> None:
        """Note that a job uses an input. Raises UsageError where its source and split have it under another recipe."""
        corpus = tree["corpus"]
        uses, ours = self.uses.setdefault((corpus["source"], input_digest), {}), splits_of(corpus)
        for other, use in uses.items():
            both = use.splits & ours
            if other != recipe and both:
                raise UsageError(
                    f"{url} is already in this cache or job as source {corpus['source']!r}, split {sorted(both)[0]!r} with "
                    f"another recipe ({'; '.join(differences(use.tree, tree)) or 'of another version'}); committing both "
                    "would duplicate its documents. Use another `source`, another cache, or the old recipe"
                )
        uses.setdefault(recipe, Use(set(), tree)).splits.update(ours)


def splits_of(corpus: dict[str, Any]) -> set[str]:
    """Return the splits that documents of a corpus entry may come into."""
    return set(corpus.get("splits") or [corpus.get("split", "train")])


def differences(then: Any, now: Any, name: str = "") -> list[str]:
    """Return `key was A, is B` for every leaf that differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = sorted({*then, *now} - {"files", "storage"})
        parts = (differences(then.get(k), now.get(k), f"{name}.{k}" if name else k) for k in keys)
        return [line for part in parts for line in part]
    return [] if then == now else [f"{name} was {then!r}, is {now!r}"]


def read_prior_plans(ledger: Ledger) -> PriorPlans:
    """Read the plans of a cache, one in memory at a time; none where nothing is committed."""
    prior = PriorPlans(ledger.committed())
    dates: list[tuple[str, str]] = []
    for found in ledger.store.list(PLANS) if prior.committed else ():
        plan = read_sealed(ledger.store, Plan, found.path)
        prior.shards.append({shard.shard_id: shard for shard in plan.shards})
        digests = plan.job.get("recipe_digests", [])
        ranges: dict[tuple[str, str], list[Cut]] = {}
        begun: set[tuple[str, str]] = set()
        for shard in plan.shards:
            if shard.corpus >= len(digests):  # a plan that something else wrote
                continue
            key = (shard.input_digest, digests[shard.corpus])
            ranges.setdefault(key, []).append((shard.unit, shard.start, shard.stop))
            if shard.shard_id in prior.committed:
                begun.add(key)
                tree = {"recipe": plan.job["recipes"][shard.corpus], "corpus": plan.job["corpora"][shard.corpus]}
                uses = prior.uses.setdefault((shard.source, shard.input_digest), {})
                uses.setdefault(key[1], Use(set(), tree)).splits.update(splits_of(tree["corpus"]))
        for key in begun:
            prior.cuts.setdefault(key, ranges[key])
        dates += [
            (plan.created, date) for recipe in plan.job.get("recipes", []) if (date := recipe["chat"].get("date"))
        ]
    prior.date = min(dates)[1] if dates else None
    return prior
