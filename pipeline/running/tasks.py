"""What travels between the driver and its actors: tasks, receipts, failures. A leaf: no engine, tokenizer or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pipeline.corpus.dropped import BY_WISH
from pipeline.errors import EngineDied, InputChanged, InputDamaged
from teachercache.errors import StoreUnavailable, TeacherCacheError, UsageError
from teachercache.format.objects import PlanShard

Kind = Literal["input", "error", "died", "timeout", "store", "usage", "drops"]


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard and what earlier attempts found: documents to leave out, documents to score alone (by ordinal).

    trial: score a first document and commit nothing. max_drop_share: commit nothing where more documents cannot be used.
    """

    shard: PlanShard
    attempt: int = 0
    exclude: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    trial: bool = False
    max_drop_share: float = 1.0


@dataclass(slots=True)
class Receipt:
    """The result of a shard: the counts of its commit, a few hundred bytes."""

    shard_id: str
    won: bool = False  # false: another attempt had committed the shard first
    documents: int = 0
    tokens: int = 0
    rows: int = 0
    bytes: int = 0
    reused_rows: int = 0  # of `rows`: copied from commits of other plans
    drops: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)  # of the first drop of each reason
    seconds: float = 0.0


@dataclass(slots=True)
class Finished:
    """A task that ended with a receipt."""

    task: ShardTask
    receipt: Receipt


@dataclass(slots=True)
class Failed:
    """A task without a result.

    suspects: ordinals of the documents that were inside a dead engine, if known.
    """

    task: ShardTask
    kind: Kind
    message: str
    suspects: tuple[int, ...] = ()
    exit_code: int = 1
    receipt: Receipt | None = None  # of a shard with too many drops: what it would have committed

    @classmethod
    def of(cls, task: ShardTask, error: BaseException) -> Failed:
        """Classify what a shard raised."""
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, TooManyDrops):
            return cls(task, "drops", message, receipt=error.receipt)
        if isinstance(error, (InputDamaged, InputChanged)):
            return cls(task, "input", message)
        if isinstance(error, EngineDied):
            return cls(task, "died", message, error.suspects)
        if isinstance(error, StoreUnavailable):
            return cls(task, "store", message)
        if isinstance(error, UsageError):
            return cls(task, "usage", message, exit_code=error.exit_code)
        known = isinstance(error, TeacherCacheError)
        return cls(task, "error", message if known else f"{type(error).__name__}: {message}")


@dataclass(slots=True)
class PoolState:
    """Counts of actors, for the live view and the budget."""

    wanted: int = 0
    ready: int = 0
    starting: int = 0
    deaths: int = 0
    gpu_seconds: float = 0.0
    workers: list[dict[str, Any]] = field(default_factory=list)


class Pool(Protocol):
    """What the driver knows of actors; Ray, one process, or a simulation implement it."""

    def free_slots(self) -> int:
        """Return how many tasks can be submitted now."""

    def submit(self, task: ShardTask, solo: bool = False) -> bool:
        """Start a task; `solo` on an actor that does nothing else. False where no such actor is free now."""

    def wait(self, timeout_s: float) -> list[Finished | Failed]:
        """Block until something happens or the time is over. Raises TeacherCacheError where no actor can start."""

    def state(self) -> PoolState:
        """Return the counts; cheap."""

    def worker_states(self) -> list[dict[str, Any]]:
        """Return what each actor reports of itself, without those that do not answer."""

    def close(self) -> None:
        """End all actors."""


class TooManyDrops(Exception):
    """A shard was not committed, because more of its documents cannot be used than its task allows."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(said(receipt.drops, receipt.details))
        self.receipt = receipt

    def __reduce__(self) -> tuple[type[TooManyDrops], tuple[Receipt]]:
        return TooManyDrops, (self.receipt,)


ENOUGH_TO_JUDGE = 50  # documents; of fewer, a share says nothing


def failures(drops: Mapping[str, int]) -> int:
    """Return how many documents were dropped although the job did not ask for it."""
    return sum(count for reason, count in drops.items() if reason not in BY_WISH)


def too_many(documents: int, drops: Mapping[str, int], share: float, least: int = ENOUGH_TO_JUDGE) -> bool:
    """Return whether more than a share of the documents cannot be used; never of fewer than `least`."""
    lost = failures(drops)
    return documents + lost >= least and lost > share * (documents + lost)


def said(drops: Mapping[str, int], details: Mapping[str, str], most: int = 4) -> str:
    """Return reasons with counts, the most frequent first, and what is known of the first document of each."""
    ranked = sorted(drops.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{r} {n}" + (f" (first: {details[r]})" if details.get(r) else "") for r, n in ranked)


def merge_suspects(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Return the documents that may have killed an engine: those of both deaths where they agree, else the newer."""
    both = sorted(set(old) & set(new))
    return tuple(both) if both else tuple(new)
