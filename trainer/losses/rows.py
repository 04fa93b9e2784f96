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
        """Raise ValueError for a shape or dtype that does not fit."""
        ids, logprobs, tail, valid = self.topk_ids, self.topk_logprobs, self.tail_logprob, self.valid
        if ids.dim() != 2:
            raise ValueError(f"topk_ids must be [N, K], found shape {tuple(ids.shape)}")
        if ids.shape[1] == 0:
            raise ValueError("topk_ids must hold at least one id a row, found K = 0")
        if logprobs.shape != ids.shape:
            raise ValueError(
                f"topk_ids and topk_logprobs must have the same shape [N, K], found {tuple(ids.shape)} and "
                f"{tuple(logprobs.shape)}"
            )
        n = ids.shape[0]
        if tail.shape != (n,):
            raise ValueError(f"tail_logprob must be [{n}], one value a row of topk_ids, found {tuple(tail.shape)}")
        if valid is not None and (valid.shape != (n,) or valid.dtype != torch.bool):
            raise ValueError(f"valid must be bool [{n}], found {valid.dtype} {tuple(valid.shape)}")
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids must be int32 or int64, found {ids.dtype}")
        if not (logprobs.is_floating_point() and tail.is_floating_point()):
            raise ValueError(
                f"topk_logprobs and tail_logprob must be floating point, found {logprobs.dtype} and {tail.dtype}"
            )
        if logprobs.requires_grad or tail.requires_grad:
            raise ValueError("teacher rows are constants: detach topk_logprobs and tail_logprob first")

    def __len__(self) -> int:
        """Return N."""
        return self.topk_ids.shape[0]

    @property
    def top_k(self) -> int:
        """Return K."""
        return self.topk_ids.shape[1]

    def __getitem__(self, index: slice) -> TeacherRows:
        """Return the rows of a slice, as views."""
        valid = None if self.valid is None else self.valid[index]
        return TeacherRows(self.topk_ids[index], self.topk_logprobs[index], self.tail_logprob[index], valid)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TeacherRows:
        """Return the same rows on another device."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        valid = None if self.valid is None else move(self.valid)
        return TeacherRows(move(self.topk_ids), move(self.topk_logprobs), move(self.tail_logprob), valid)

    def where_valid(self, x: Tensor, otherwise: Tensor | float) -> Tensor:
        """Return x [N, ...] with `otherwise` at the invalid rows."""
        if self.valid is None:
            return x
        return torch.where(self.valid.reshape(-1, *(1,) * (x.dim() - 1)), x, otherwise)

    def prepared(self, dtype: torch.dtype) -> TeacherRows:
        """Return the rows as torch computes with them: int64 ids, log-probabilities in `dtype`.

        An invalid row may hold anything: its ids become 0 to K-1, its log-probabilities those of K+1 equal outcomes.
        """
        harmless_ids = torch.arange(self.top_k, device=self.topk_ids.device)
        uniform = -math.log(self.top_k + 1)
        return TeacherRows(
            self.where_valid(self.topk_ids.long(), harmless_ids),
            self.where_valid(self.topk_logprobs.to(dtype), uniform),
            self.where_valid(self.tail_logprob.to(dtype), uniform),
            self.valid,
        )

    def truncate(self, top_k: int) -> TeacherRows:
        """Keep the first `top_k` entries and move the others' mass into the tail. ValueError unless 1 <= top_k <= K."""
        if not 1 <= top_k <= self.top_k:
            raise ValueError(f"cannot keep {top_k} of K = {self.top_k} entries: expected 1 to {self.top_k}")
        if top_k == self.top_k:
            return self
        dropped = torch.logsumexp(self.topk_logprobs[:, top_k:].float(), dim=1)
        tail = torch.logaddexp(self.tail_logprob.float(), dropped)
        return TeacherRows(self.topk_ids[:, :top_k], self.topk_logprobs[:, :top_k], tail, self.valid)

    @classmethod
    def from_logits(cls, logits: Tensor, top_k: int, valid: Tensor | None = None) -> TeacherRows:
        """Return the `top_k` largest of teacher logits [N, V], with the tail summed outside them (no cancellation).

        Raises ValueError unless 1 <= top_k <= V. Takes float32 copies of the logits (float64 of float64 ones).
        """
        if not 1 <= top_k <= logits.shape[1]:
            raise ValueError(f"cannot keep {top_k} of {logits.shape[1]} logits: expected 1 to {logits.shape[1]}")
        with torch.no_grad():
            logits = logits if logits.dtype == torch.float64 else logits.float()
            values, ids = logits.topk(top_k, dim=1)
            outside = torch.logsumexp(logits.scatter(1, ids, -math.inf), dim=1)
            total = torch.logsumexp(logits, dim=1)
            tail = (outside - total).clamp_min(math.log(2.0**-23))
            return cls(ids, values - total[:, None], tail, valid)

    def check_values(self, vocab_size: int) -> None:
        """Raise ValueError for NaN, positive or infinite log-probabilities, and ids repeated or outside the vocabulary.

        Invalid rows are not looked at. Sorts the ids of every row; on a GPU it waits for the device once.
        """
        ids, logprobs, tail = self.topk_ids, self.topk_logprobs, self.tail_logprob
        ordered = ids.sort(dim=1).values
        too_heavy = (logprobs.double().exp().sum(dim=1) > 1 + MASS_TOLERANCE) | (tail > MASS_TOLERANCE)
        problems = {
            f"hold an id outside [0, {vocab_size})": ((ids < 0) | (ids >= vocab_size)).any(dim=1),
            "hold an id twice": (ordered[:, 1:] == ordered[:, :-1]).any(dim=1),
            "hold a NaN or infinite log-probability": ~(logprobs.isfinite().all(dim=1) & tail.isfinite()),
            f"hold more probability than 1 + {MASS_TOLERANCE}: are these logits instead of log-probabilities?": too_heavy,
        }
        found = self.where_valid(torch.stack(list(problems.values()), dim=1), False)  # [N, problems]
        for index, (problem, count) in enumerate(zip(problems, found.sum(dim=0).tolist(), strict=True)):
            if count:
                raise ValueError(
                    f"{count} of {len(self)} teacher rows {problem} (the first is row {int(found[:, index].nonzero()[0])}); "
                    "drop or repair these rows, or mark them invalid"
                )
