"""Teacher rows: the cached top-K next-token log-probabilities that a batch learns from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The cache rounds log-probabilities to float16, so a row's mass may exceed one by this much.
MASS_TOLERANCE = 1e-2


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's K most probable next tokens at each of N positions, and the mass outside them.

    topk_ids       [N, K] int32 or int64; distinct in a row, each below the student's vocabulary
    topk_logprobs  [N, K] float; natural log, temperature 1, of the full softmax (not renormalised)
    tail_logprob   [N]    float; log of the mass outside the K
    valid          [N]    bool, or None for all; an invalid row is never read and has no loss

    Raises ValueError when shapes or dtypes disagree. Values are checked by `check_values`, which
    synchronises with a GPU; `kl_loss(validate=True)` calls it.
    """

    topk_ids: Tensor
    topk_logprobs: Tensor
    tail_logprob: Tensor
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        if self.topk_ids.dim() != 2:
            raise ValueError(f"topk_ids must be [N, K], found shape {tuple(self.topk_ids.shape)}")
        if self.topk_ids.shape[1] == 0:
            raise ValueError("topk_ids must hold at least one id a row, found K = 0")
        if self.topk_logprobs.shape != self.topk_ids.shape:
            raise ValueError(
                f"topk_ids and topk_logprobs must have the same shape [N, K], found "
                f"{tuple(self.topk_ids.shape)} and {tuple(self.topk_logprobs.shape)}"
            )
        n = self.topk_ids.shape[0]
        if self.tail_logprob.shape != (n,):
            raise ValueError(
                f"tail_logprob must be [{n}], one value a row of topk_ids, found {tuple(self.tail_logprob.shape)}"
            )
        if self.valid is not None and (self.valid.shape != (n,) or self.valid.dtype != torch.bool):
            raise ValueError(f"valid must be bool [{n}], found {self.valid.dtype} {tuple(self.valid.shape)}")
        if self.topk_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids must be int32 or int64, found {self.topk_ids.dtype}")
        if not (self.topk_logprobs.is_floating_point() and self.tail_logprob.is_floating_point()):
            raise ValueError(
                f"topk_logprobs and tail_logprob must be floating point, found {self.topk_logprobs.dtype} "
                f"and {self.tail_logprob.dtype}"
            )
        if self.topk_logprobs.requires_grad or self.tail_logprob.requires_grad:
            raise ValueError("teacher rows are constants: detach topk_logprobs and tail_logprob first")

    def __len__(self) -> int:
        return self.topk_ids.shape[0]

    @property
    def k(self) -> int:
        return self.topk_ids.shape[1]

    def __getitem__(self, index: slice) -> TeacherRows:
        """The rows of a slice, as views."""
        valid = None if self.valid is None else self.valid[index]
        return TeacherRows(self.topk_ids[index], self.topk_logprobs[index], self.tail_logprob[index], valid)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TeacherRows:
        """The same rows on another device."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        valid = None if self.valid is None else move(self.valid)
        return TeacherRows(move(self.topk_ids), move(self.topk_logprobs), move(self.tail_logprob), valid)

    def truncate(self, k: int) -> TeacherRows:
        """Keep the first k entries of each row and move the mass of the others into the tail."""
        if not 1 <= k <= self.k:
            raise ValueError(f"cannot keep {k} of K = {self.k} entries: expected 1 to {self.k}")
        if k == self.k:
            return self
        dropped = torch.logsumexp(self.topk_logprobs[:, k:].float(), dim=1)
        tail = torch.logaddexp(self.tail_logprob.float(), dropped)
        return TeacherRows(self.topk_ids[:, :k], self.topk_logprobs[:, :k], tail, self.valid)

    @classmethod
    def from_logits(cls, logits: Tensor, k: int, valid: Tensor | None = None) -> TeacherRows:
        """The top k of full teacher logits [N, V], with the tail summed outside the k (no cancellation)."""
        if not 1 <= k <= logits.shape[1]:
            raise ValueError(f"cannot keep k = {k} of {logits.shape[1]} logits: expected 1 to {logits.shape[1]}")
        with torch.no_grad():
            logits = logits if logits.dtype == torch.float64 else logits.float()
            values, ids = logits.topk(k, dim=1)
            outside = torch.logsumexp(logits.scatter(1, ids, -math.inf), dim=1)
            total = torch.logsumexp(logits, dim=1)
            tail = (outside - total).clamp_min(math.log(2.0**-23))
            return cls(ids, values - total[:, None], tail, valid)

    def check_values(self, vocab_size: int) -> None:
        """Raise ValueError for NaN, positive or infinite log-probabilities, and ids repeated or outside the vocabulary.

        Invalid rows are not looked at. Sorts the ids of every row; on a GPU it waits for the device once.
        """
        ids, logprobs, tail = self.topk_ids, self.topk_logprobs, self.tail_logprob
        outside = ((ids < 0) | (ids >= vocab_size)).any(dim=1)
        ordered = ids.sort(dim=1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
        not_finite = ~(logprobs.isfinite().all(dim=1) & tail.isfinite())
        mass = logprobs.double().exp().sum(dim=1)
        too_heavy = (mass > 1 + MASS_TOLERANCE) | (tail > MASS_TOLERANCE)
        problems = torch.stack([outside, repeated, not_finite, too_heavy])
        if self.valid is not None:
            problems = problems & self.valid
        counts = problems.sum(dim=1).tolist()
        if not any(counts):
            return
        meanings = [
            f"hold an id outside [0, {vocab_size})",
            "hold an id twice",
            "hold a NaN or infinite log-probability",
            f"hold more probability than 1 + {MASS_TOLERANCE}: are these logits instead of log-probabilities?",
        ]
        which = next(i for i, count in enumerate(counts) if count)
        first = int(problems[which].nonzero()[0])
        raise ValueError(
            f"{counts[which]} of {len(self)} teacher rows {meanings[which]} (the first is row {first}); "
            f"drop or repair these rows, or mark them invalid"
        )
