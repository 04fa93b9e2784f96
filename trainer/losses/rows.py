"""Teacher rows: the cached next-token log-probabilities that a batch learns from, of either kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The cache rounds log-probabilities to float16, so a row's mass may exceed one by this much.
MASS_TOLERANCE = 1e-2


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's K most probable next tokens at each of N positions, and the mass outside them; or sampled rows.

    topk_ids       [N, K] int32 or int64; distinct in a row, each below the student's vocabulary
    topk_logprobs  [N, K] float; natural log, temperature 1, of the full softmax (not renormalised)
    tail_logprob   [N]    float; log of the mass outside the K
    valid          [N]    bool, or None for all; an invalid row is never read and has no loss
    exact          [N]    integer, or None for top-K rows. Sampled rows: the first `exact` entries are top-K ones, the
                   other K - exact were drawn, each counts exp(tail_logprob) / (K - exact), and tail_logprob is the log
                   of the mass outside the exact ones. The weights are an unbiased estimate of the teacher's softmax
    entropy        [N]    float, or None: the teacher's -sum p log p in nats, of the full softmax

    Raises ValueError when shapes or dtypes disagree. Values are checked by `check_values`, which
    synchronises with a GPU; `kl_loss(validate=True)` calls it.
    """

    topk_ids: Tensor
    topk_logprobs: Tensor
    tail_logprob: Tensor
    valid: Tensor | None = None
    exact: Tensor | None = None
    entropy: Tensor | None = None

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
        for name, x in (("exact", self.exact), ("entropy", self.entropy)):
            if x is not None and (x.shape != (n,) or x.is_floating_point() != (name == "entropy")):
                kind = "floating point" if name == "entropy" else "integer"
                raise ValueError(f"{name} must be {kind} [{n}], found {x.dtype} {tuple(x.shape)}")
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

    def __getitem__(self, index: slice | Tensor) -> TeacherRows:
        """Return the rows of a slice, as views, or of a tensor of indices."""
        return self._map(lambda x: x[index])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TeacherRows:
        """Return the same rows on another device."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def _map(self, function: Callable[[Tensor], Tensor]) -> TeacherRows:
        return replace(self, **{name: function(x) for name, x in vars(self).items() if x is not None})

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

    def estimate(self, dtype: torch.dtype) -> tuple[TeacherRows, Tensor]:
        """Return sampled rows as plain weights, and the log-probabilities' share of the loss that no student moves.

        Rows: topk_logprobs [N, K] in `dtype` are log p^ with sum p^ = 1. tail_logprob, which no codec rounds, says what
        the drawn entries count together and what is left for the exact ones. Constant [N]: -H(p) + H(p^), so that
        KL(p^ || q) plus it is -H(p) - sum p^ log q; without `entropy` it is H(p^), and the sum the cross-entropy.
        Invalid rows are uniform, their constant 0.
        """
        assert self.exact is not None
        tail, exact = self.tail_logprob.to(dtype), self.exact.long()
        drawn = torch.arange(self.top_k, device=exact.device) >= exact[:, None]
        all_exact = exact == self.top_k
        each = tail - (self.top_k - exact).clamp_min(1).to(dtype).log()
        kept = self.topk_logprobs.to(dtype).masked_fill(drawn, -math.inf)
        kept_mass = torch.where(all_exact, 0.0, (-torch.expm1(tail)).log())
        kept = kept.log_softmax(dim=1) + kept_mass[:, None]
        logprobs = torch.where(drawn, each[:, None], kept)
        logprobs = self.where_valid(logprobs, -math.log(self.top_k))
        constant = -(logprobs.exp() * logprobs).sum(dim=1)
        if self.entropy is not None:
            constant = constant - self.entropy.to(dtype)
        return TeacherRows(self.topk_ids, logprobs, tail, self.valid), self.where_valid(constant, 0.0)

    def truncate(self, top_k: int) -> TeacherRows:
        """Return top-K rows of the first `top_k` entries, all other mass in the tail.

        Sampled rows keep exact entries alone. Raises ValueError unless 1 <= top_k <= K and, for rows on the CPU, where
        looking costs no wait, no valid row has fewer exact entries.
        """
        if not 1 <= top_k <= self.top_k:
            raise ValueError(f"cannot keep {top_k} of K = {self.top_k} entries: expected 1 to {self.top_k}")
        dropped = self.topk_logprobs[:, top_k:].float()
        if self.exact is not None:
            least = self.where_valid(self.exact, top_k)
            if least.device.type == "cpu" and bool((least < top_k).any()):
                raise ValueError(
                    f"cannot keep {top_k} entries of sampled rows with as few as {int(least.min())} exact ones: the others "
                    "were drawn and are no top K"
                )
            dropped = dropped.masked_fill(
                torch.arange(top_k, self.top_k, device=dropped.device) >= self.exact[:, None], -math.inf
            )
        elif top_k == self.top_k:
            return self
        tail = torch.cat([self.tail_logprob.float()[:, None], dropped], dim=1).logsumexp(dim=1)
        ids, logprobs = self.topk_ids[:, :top_k], self.topk_logprobs[:, :top_k]
        return TeacherRows(ids, logprobs, tail, self.valid, None, self.entropy)

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
        if self.exact is not None:
            problems[f"have a number of exact entries outside [1, {self.top_k}]"] = (self.exact < 1) | (
                self.exact > self.top_k
            )
            if self.entropy is not None:
                problems["have an entropy that is NaN, infinite or negative"] = ~(
                    self.entropy.isfinite() & (self.entropy >= -MASS_TOLERANCE)
                )
        found = self.where_valid(torch.stack(list(problems.values()), dim=1), False)  # [N, problems]
        for index, (problem, count) in enumerate(zip(problems, found.sum(dim=0).tolist(), strict=True)):
            if count:
                raise ValueError(
                    f"{count} of {len(self)} teacher rows {problem} (the first is row {int(found[:, index].nonzero()[0])}); "
                    "drop or repair these rows, or mark them invalid"
                )
