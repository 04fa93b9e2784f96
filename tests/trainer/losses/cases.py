"""Random cases of the loss, every accepted combination, and the comparison with the float64 twin."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.losses import TeacherRows, kl_loss
from trainer.losses.options import DIVERGENCES, TAILS, LossOptions
from trainer.losses.reference import reference_loss


@dataclass(frozen=True)
class Case:
    """Inputs of one call. hidden [N, d], head_weight [V, d], bias [V] or None."""

    hidden: Tensor
    head_weight: Tensor
    rows: TeacherRows
    labels: Tensor
    bias: Tensor | None
    vocab_size: int | None


def accepted_kd() -> list[dict]:
    """Divergence, tail and temperature of every accepted line."""
    found = []
    for tail, divergence, temperature in itertools.product(TAILS, DIVERGENCES, (1.0, 2.5)):
        options = {"tail": tail, "divergence": divergence, "temperature": temperature, "jsd_beta": 0.3}
        try:
            LossOptions(**options)
        except ValueError:
            continue
        found.append(options)
    return found


def accepted_with_mix(kd: dict) -> Iterator[dict]:
    """`kd` with every accepted mix of cross-entropy, z-loss and soft-cap."""
    for ce_weight, z_loss, softcap in itertools.product((0.0, 0.3), (0.0, 1e-3), (None, 5.0)):
        options = kd | {"ce_weight": ce_weight, "z_loss": z_loss, "softcap": softcap}
        try:
            LossOptions(**options)
        except ValueError:
            continue
        yield options


def kd_name(kd: dict) -> str:
    return f"{kd['divergence']}-{kd['tail']}-T{kd['temperature']:g}"


def make_case(
    *,
    n: int = 13,
    d: int = 24,
    v: int = 101,
    k: int = 7,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    with_bias: bool = False,
    vocab_size: int | None = None,
    with_invalid: bool = False,
    labels_in_topk: bool = False,
    logit_std: float = 1.5,
    seed: int = 0,
) -> Case:
    """Random inputs, made on the CPU; invalid rows hold garbage everywhere, as padding may."""
    g = torch.Generator().manual_seed(seed)
    real = vocab_size or v
    hidden = torch.randn(n, d, generator=g)
    head_weight = torch.randn(v, d, generator=g) * logit_std * d**-0.5
    bias = torch.randn(v, generator=g) * 0.5 if with_bias else None
    rows = TeacherRows.from_logits(torch.randn(n, real, generator=g) * 2, k)
    labels = torch.randint(0, real, (n,), generator=g)
    if labels_in_topk:
        labels = rows.topk_ids[torch.arange(n), torch.randint(0, k, (n,), generator=g)]
    hidden = hidden.to(dtype)
    if with_invalid:
        valid = torch.rand(n, generator=g) > 0.3
        if n > 1:
            valid[0], valid[-1] = False, True
        ids = torch.where(valid[:, None], rows.topk_ids, v + 5)
        logprobs = torch.where(valid[:, None], rows.topk_logprobs, torch.nan)
        rows = TeacherRows(ids, logprobs, rows.tail_logprob, valid)
        labels = torch.where(valid, labels, -100)
        hidden[~valid] = torch.nan
    bias = None if bias is None else bias.to(dtype)
    to = [x if x is None else x.to(device) for x in (hidden, head_weight.to(dtype), labels, bias)]
    return Case(to[0], to[1], rows.to(device), to[2], to[3], vocab_size)  # type: ignore[arg-type]


MODE_SEEKING: tuple[dict, ...] = (
    {"divergence": "reverse"},
    *({"divergence": "jsd", "jsd_beta": beta} for beta in (0.1, 0.5, 0.9)),
)


def one_sided_case(*, on_cached: bool = False, seed: int = 0, device: str = "cpu", dtype: torch.dtype) -> Case:
    """A student with nearly all its mass on one outcome: an untrained one outside the K, or a sure one on a cached id.

    The other outcomes hold 1e-4 to 1e-2 of it: their gradients are what float32 must not lose.
    """
    g = torch.Generator().manual_seed(seed)
    n, d, v = 5, 24, 50_257
    hidden, head_weight = torch.randn(n, d, generator=g) * 2, torch.randn(v, d, generator=g) * 0.5
    rows = TeacherRows.from_logits(torch.randn(n, v, generator=g) * 3, 100)
    if on_cached:
        first = rows.topk_ids[:, 0]
        head_weight[first] = hidden * (24.0 / hidden.square().sum(dim=1, keepdim=True))
    labels = torch.zeros(n, dtype=torch.long, device=device)
    return Case(hidden.to(device, dtype), head_weight.to(device, dtype), rows.to(device), labels, None, None)


def rows_for(case: Case, options: dict) -> TeacherRows:
    """The case's rows, as sampled ones where the tail asks for these: from 1 to K of the entries are exact."""
    rows = case.rows
    if options.get("tail") != "sampled":
        return rows
    index = torch.arange(len(rows), device=rows.topk_ids.device)
    exact = 1 + index % rows.top_k
    outside = torch.arange(rows.top_k, device=index.device) >= exact[:, None]
    tail = torch.cat([rows.tail_logprob[:, None], rows.topk_logprobs.masked_fill(~outside, -torch.inf)], dim=1)
    return replace(rows, tail_logprob=tail.logsumexp(dim=1), exact=exact, entropy=1.5 + 0.1 * index)


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients, all float64 on the CPU; the bias's is None where there is none."""

    loss: Tensor
    hidden: Tensor
    head_weight: Tensor
    bias: Tensor | None

    def relative_error(self, exact: Outcome, scale: Outcome | None = None) -> float:
        """The largest of: loss error over max(1, |loss|), norm-wise relative error of each gradient.

        With `scale`, a gradient's error is relative to the larger of its norm and that of `scale`: a student
        that is one-hot to rounding has a reverse KL whose gradient is far below the rounding of its logits.
        """
        scale = scale or exact
        worst = float((self.loss - exact.loss).abs() / exact.loss.abs().clamp_min(1.0))
        for name in ("hidden", "head_weight", "bias"):
            ours, theirs, size = getattr(self, name), getattr(exact, name), getattr(scale, name)
            if theirs is None:
                assert ours is None
                continue
            error = float((ours - theirs).norm() / torch.maximum(theirs.norm(), size.norm()).clamp_min(1e-30))
            worst = max(worst, error) if error == error else float("nan")
        return worst


def _leaf(x: Tensor | None, dtype: torch.dtype | None = None, device: str | None = None) -> Tensor | None:
    return None if x is None else x.detach().to(device=device, dtype=dtype).clone().requires_grad_()


def _outcome(loss: Tensor, leaves: list[Tensor | None], upstream: float) -> Outcome:
    (loss * upstream).backward()
    grads = [None if x is None else x.grad.double().cpu() for x in leaves]  # type: ignore[union-attr]
    return Outcome(loss.detach().double().cpu(), grads[0], grads[1], grads[2])  # type: ignore[arg-type]


def run(case: Case, options: dict, *, upstream: float = 3.0, **call: object) -> Outcome:
    """kl_loss, backward with `upstream` as the incoming gradient."""
    leaves = [_leaf(case.hidden), _leaf(case.head_weight), _leaf(case.bias)]
    loss = kl_loss(
        leaves[0],  # type: ignore[arg-type]
        leaves[1],  # type: ignore[arg-type]
        rows_for(case, options),
        labels=case.labels,
        bias=leaves[2],
        vocab_size=case.vocab_size,
        **(options | call),  # type: ignore[arg-type]
    )
    return _outcome(loss, leaves, upstream)


def exact(case: Case, options: dict, *, upstream: float = 3.0, num_valid: float | None = None) -> Outcome:
    """The float64 twin on the CPU, starting from the same rounded inputs."""
    leaves = [_leaf(x, torch.float64, "cpu") for x in (case.hidden, case.head_weight, case.bias)]
    rows, labels = rows_for(case, options).to("cpu"), case.labels.cpu()
    hidden = leaves[0]
    assert hidden is not None
    if rows.valid is not None:
        hidden = hidden.masked_fill(~rows.valid[:, None], 0.0)
        rows = replace(rows, topk_ids=torch.where(rows.valid[:, None], rows.topk_ids, 0))
    loss = reference_loss(
        hidden,
        leaves[1],  # type: ignore[arg-type]
        rows,
        LossOptions(**options),
        labels=labels,
        num_valid=num_valid,
        vocab_size=case.vocab_size,
        bias=leaves[2],
    )
    return _outcome(loss, leaves, upstream)


def input_variants() -> Iterator[dict]:
    """Bias, vocabulary mask, invalid rows, label inside or outside the cached ids."""
    for bias, mask, invalid in itertools.product((False, True), (None, 97), (False, True)):
        yield {
            "with_bias": bias,
            "vocab_size": mask,
            "with_invalid": invalid,
            "labels_in_topk": bias != invalid,
        }
