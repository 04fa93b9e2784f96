"""What a cache holds of a job's inputs already, by the plans of earlier jobs: their cuts are kept, contradictions refused.

Two things would otherwise be found out at publishing, when everything is paid for: the same file cut at other places
(another `shard_tokens`, a version of this software that estimates otherwise), and the same file of the same source
under another recipe. Both put documents into the cache twice.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any, Literal

from teachercache import Plan, Store
from teachercache.errors import UsageError
from teachercache.format.layout import PLANS
from teachercache.store.ledger import read_sealed

Cut = tuple[Literal["bytes", "row_groups", "rows", "file"], int, int]  # unit, start, stop


@dataclass(slots=True)
class Use:
    """How an input is used: the splits that its documents may come into, and the recipe as a tree (plan.recipe_of)."""

    splits: set[str]
    tree: dict[str, Any]


@dataclass(slots=True)
class Earlier:
    """Committed shards, and how the inputs that have some were cut, by which recipe, for which source and splits."""

    committed: Set[str] = frozenset()
    cuts: dict[tuple[str, str], list[Cut]] = field(default_factory=dict)  # (input digest, recipe digest)
    uses: dict[tuple[str, str], dict[str, Use]] = field(default_factory=dict)  # (source, input digest) → recipe digest

    def cut_of(self, input_digest: str, recipe: str) -> list[Cut] | None:
        """The ranges that this input had when some of it was committed under this recipe."""
        return self.cuts.get((input_digest, recipe))

    def use(self, url: str, input_digest: str, recipe: str, tree: dict[str, Any]) -> None:
        """Notes that a job uses an input. Raises UsageError where its source and split have it under another recipe."""
        corpus = tree["corpus"]
        uses, own = self.uses.setdefault((corpus["source"], input_digest), {}), splits_of(corpus)
        for other, use in uses.items():
            both = use.splits & own
            if other != recipe and both:
                raise UsageError(
                    f"{url}: source {corpus['source']!r}, split {sorted(both)[0]!r} of this cache or job has it under another "
                    f"recipe ({'; '.join(differences(use.tree, tree)) or 'of another version'}), and its documents would "
                    "stand there twice; give the new rows a `source` of their own or another cache, or go back"
                )
        uses.setdefault(recipe, Use(set(), tree)).splits.update(own)


def splits_of(corpus: dict[str, Any]) -> set[str]:
    """Splits that documents of a corpus entry may come into."""
    return set(corpus.get("splits") or [corpus.get("split", "train")])


def differences(then: Any, now: Any, name: str = "") -> list[str]:
    """`key was A, is B` for every leaf that differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = sorted({*then, *now} - {"files"})
        parts = (differences(then.get(k), now.get(k), f"{name}.{k}" if name else k) for k in keys)
        return [line for part in parts for line in part]
    return [] if then == now else [f"{name} was {then!r}, is {now!r}"]


def read_earlier(store: Store, committed: Set[str]) -> Earlier:
    """One small read per plan, one plan in memory at a time; nothing is read where nothing is committed."""
    earlier = Earlier(committed)
    for found in store.list(PLANS) if committed else ():
        plan = read_sealed(store, Plan, found.path)
        digests = plan.job.get("recipe_digests", [])
        ranges: dict[tuple[str, str], list[Cut]] = {}
        begun: set[tuple[str, str]] = set()
        for shard in plan.shards:
            place = int(shard.detail.get("corpus", 0))
            if place >= len(digests):  # a plan that something else wrote
                continue
            key = (shard.input_digest, digests[place])
            ranges.setdefault(key, []).append((shard.unit, shard.start, shard.stop))
            if shard.shard_id in committed:
                begun.add(key)
                tree = {"recipe": plan.job["recipes"][place], "corpus": plan.job["corpora"][place]}
                uses = earlier.uses.setdefault((shard.source, shard.input_digest), {})
                uses.setdefault(key[1], Use(set(), tree)).splits.update(splits_of(tree["corpus"]))
        for key in begun:
            earlier.cuts.setdefault(key, ranges[key])
    return earlier
