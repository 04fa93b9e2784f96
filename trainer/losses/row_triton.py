"""The row kernel in Triton: a chunk of logits becomes its own gradient, in place. Twin of row_torch.py.

Algorithm, one program per row at a time:
1. Gather the logits of the K cached ids (and of the label), then overwrite the K places with -inf, so that a plain
   sum over the row is the sum *outside* the K and nothing cancels.
2. First pass: sum exp(z - o) with o the largest of the K logits. The offset is known before the pass, so there is no
   running maximum: one exponential per element. Where that sum leaves the range of float32 (a student far from its
   teacher), the row is summed again around its true maximum.
3. The K+1 numbers of row_math.py give the loss, K gradients, and the one scalar that multiplies
   softmax_outside(v) = exp(z_v - logsumexp_outside).
4. Second pass: write that product; then put the K gradients (and the label's) at their places.

Numerics: logits are read in the product's dtype and everything else is float32.
Memory: a row is read twice and written once, the second read from L2 as far as it holds the rows in flight: with
V = 128,256 in bf16 a row is 256 KB, hence the persistent grid of few programs, the second pass backwards, and stores
that leave L2 first. Measured on an H200, 2,816 rows: 0.60 ms, where a copy of the same bytes takes 0.35.
"""

# Triton's kernels are another language: their arguments have no Python types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.losses.options import LossOptions
from trainer.losses.products import on_device_of
from trainer.losses.rows import TeacherRows

# The K cached entries of a row are one vector of the kernel; beyond this the torch twin runs.
MAX_K = 4096

_TAIL: dict[str | None, int] = {"bucket": 0, "none": 1, "sampled": 1, "renormalize": 2}
_DIVERGENCE = {"forward": 0, "reverse": 1, "jsd": 2}


@dataclass(frozen=True)
class LaunchConfig:
    """Columns per step, warps per program, programs per multiprocessor (a row each), steps of loads in flight.

    store_policy is what the gradient's stores tell the cache.
    """

    block: int = 8192
    num_warps: int = 8
    programs_per_sm: float = 2
    stages: int = 4
    store_policy: str = "evict_first"


DEFAULT_CONFIG = LaunchConfig()


# A helper's `transform` is (bias_ptr, softcap, logit_scale), done to raw logits in this order; None is left out of the
# compiled kernel.


@triton.jit
def _bias_cap_scale(raw, cols, in_row, transform):
    """Bias, soft-cap and scale on raw logits; -inf stays -inf. float32."""
    bias_ptr, softcap, logit_scale = transform
    z = raw.to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    if softcap is not None:
        stashed = z == -float("inf")
        ratio = z / softcap
        small = tl.exp(-2.0 * tl.abs(ratio))
        magnitude = softcap * (1.0 - small) / (1.0 + small)
        z = tl.where(stashed, z, tl.where(ratio < 0, -magnitude, magnitude))
    if logit_scale is not None:
        z *= logit_scale
    return z


@triton.jit
def _load_logits(base, cols, row_stride, vocab, transform, MASKED: tl.constexpr):
    """Logits of some columns in float32; with MASKED, -inf beyond the vocabulary.

    The masked load runs to the padded row stride, a multiple of 16 bytes, so that it stays wide for an odd vocabulary.
    """
    if MASKED:
        raw = tl.load(base + cols, mask=cols < row_stride, other=-float("inf"))
        z = _bias_cap_scale(raw, cols, cols < vocab, transform)
        z = tl.where(cols < vocab, z, -float("inf"))
    else:
        raw = tl.load(base + cols)
        z = _bias_cap_scale(raw, cols, cols < vocab, transform)
    return z


@triton.jit
def _log_softmax(y, y_t, HAS_T: tl.constexpr):
    """log_softmax over the vector y and the scalar y_t."""
    top = tl.max(y, axis=0)
    if HAS_T:
        top = tl.maximum(top, y_t)
    total = tl.sum(tl.exp(y - top), axis=0)
    if HAS_T:
        total += tl.exp(y_t - top)
    lse = top + tl.log(total)
    return y - lse, y_t - lse, lse


@triton.jit
def _logaddexp(a, b):
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def _kd(
    y, y_t, logprobs, tail, in_k, inv_t, mixture, TAIL: tl.constexpr, DIVERGENCE: tl.constexpr, HAS_T: tl.constexpr
):
    """KD loss (without T^2) and its gradient (without T) at the K and at the tail; see row_math.py."""
    beta, log_beta, log_rest = mixture
    grad_t = 0.0
    if TAIL == 0:
        log_s, log_s_t, _ = _log_softmax(logprobs * inv_t, tail * inv_t, HAS_T)
        log_r, log_r_t, _ = _log_softmax(y * inv_t, y_t * inv_t, HAS_T)
        s = tl.exp(log_s)
        r = tl.exp(log_r)
        s_t = tl.exp(log_s_t)
        r_t = tl.exp(log_r_t)
        if DIVERGENCE == 0:
            kd = tl.sum(tl.where(in_k, s * (log_s - log_r), 0.0), axis=0)
            grad = r - s
            if HAS_T:
                kd += s_t * (log_s_t - log_r_t)
                grad_t = r_t - s_t
        else:
            # The gaps are measured from the likeliest outcome's: see row_math.py.
            gap = tl.where(in_k, log_r - log_s, 0.0)
            gap_t = log_r_t - log_s_t
            teacher = 0.0
            if DIVERGENCE == 2:
                below, below_t = gap, gap_t
                gap = tl.where(in_k, -_logaddexp(log_beta - below, log_rest), 0.0)
                gap_t = -_logaddexp(log_beta - below_t, log_rest)
                teacher = tl.sum(tl.where(in_k, s * (gap - below), 0.0), axis=0)
                if HAS_T:
                    teacher += s_t * (gap_t - below_t)
            top = tl.max(r, axis=0)
            anchor = tl.max(tl.where(in_k & (r == top), gap, -float("inf")), axis=0)
            if HAS_T:
                anchor = tl.where(r_t > top, gap_t, anchor)
                gap_t -= anchor
            gap -= anchor
            mean = tl.sum(r * gap, axis=0)
            if HAS_T:
                mean += r_t * gap_t
                grad_t = r_t * (gap_t - mean)
            grad = r * (gap - mean)
            kd = mean + anchor
            if DIVERGENCE == 2:
                kd = beta * teacher + (1.0 - beta) * kd
                grad *= 1.0 - beta
                grad_t *= 1.0 - beta
    else:
        if TAIL == 1:
            log_s = logprobs
        else:
            log_s, _, _ = _log_softmax(logprobs * inv_t, tail, False)
        log_q, log_q_t, _ = _log_softmax(y, y_t, HAS_T)
        s = tl.where(in_k, tl.exp(log_s), 0.0)
        mass = tl.sum(s, axis=0)
        kd = tl.sum(tl.where(in_k, s * (log_s - log_q), 0.0), axis=0)
        grad = mass * tl.exp(log_q) - s
        if HAS_T:
            grad_t = mass * tl.exp(log_q_t)
    return kd, grad, grad_t


@triton.jit
def _soft_cap_slope(z, transform):
    """Return d z / d raw of the soft-cap, from the z behind it."""
    _, softcap, logit_scale = transform
    if logit_scale is not None:
        softcap *= logit_scale
    ratio = z / softcap
    return 1.0 - ratio * ratio


@triton.jit
def _outside_grad(z, coefficient, y_t2, transform):
    """coefficient * softmax_outside(z), with the soft-cap's own derivative; y_t2 is the outside's lse * log2(e)."""
    LOG2E: tl.constexpr = 1.4426950408889634
    g = coefficient * tl.exp2(z * LOG2E - y_t2)
    if transform[1] is not None:
        g = tl.where(z == -float("inf"), 0.0, g * _soft_cap_slope(z, transform))
    return g


@triton.jit
def _row_kernel(
    logits_ptr,
    row_stride,
    bias_ptr,
    ids_ptr,
    ids_stride,
    logprobs_ptr,
    logprobs_stride,
    tail_ptr,
    label_ptr,
    scale_ptr,
    loss_ptr,
    rows,
    vocab,
    top_k,
    temperature,
    logit_scale,
    softcap,
    beta,
    log_beta,
    log_rest,
    ce_weight,
    z_loss,
    TAIL: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    HAS_T: tl.constexpr,
    HAS_CE: tl.constexpr,
    WRITE_GRAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    POLICY: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    k = tl.arange(0, BLOCK_K)
    in_k = k < top_k
    lanes = tl.arange(0, BLOCK_V)
    transform = (bias_ptr, softcap, logit_scale)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row64 = tl.full([], 0, tl.int64) + row  # also where the interpreter loops over Python integers
        base = logits_ptr + row64 * row_stride
        scale = tl.load(scale_ptr + row)
        if scale == 0.0:
            tl.store(loss_ptr + row, 0.0)
            if WRITE_GRAD:
                for start in range(0, row_stride, BLOCK_V):
                    cols = start + lanes
                    zero = tl.zeros([BLOCK_V], dtype=tl.float32).to(logits_ptr.dtype.element_ty)
                    tl.store(base + cols, zero, mask=cols < row_stride)
        else:
            # 1. The K logits, the label's, and -inf at the K places.
            ids = tl.load(ids_ptr + row64 * ids_stride + k, mask=in_k, other=0).to(tl.int64)
            logprobs = tl.load(logprobs_ptr + row64 * logprobs_stride + k, mask=in_k, other=-float("inf")).to(
                tl.float32
            )
            tail = tl.load(tail_ptr + row).to(tl.float32)
            raw = tl.load(base + ids, mask=in_k, other=-float("inf"))
            y = _bias_cap_scale(raw, ids, in_k, transform)
            label = 0
            z_label = 0.0
            if HAS_CE:
                label = tl.load(label_ptr + row).to(tl.int64)
                raw_label = tl.load(base + label)
                z_label = _bias_cap_scale(raw_label, label, True, transform)
            tl.debug_barrier()
            minus_inf = tl.full([BLOCK_K], -float("inf"), dtype=tl.float32).to(logits_ptr.dtype.element_ty)
            tl.store(base + ids, minus_inf, mask=in_k)
            tl.debug_barrier()

            # 2. logsumexp outside the K. z * LOG2E - offset * LOG2E is one fused multiply-add.
            full = vocab // BLOCK_V * BLOCK_V
            offset = tl.max(y, axis=0)
            offset2 = offset * LOG2E
            sums = tl.zeros([BLOCK_V], dtype=tl.float32)
            for start in tl.range(0, full, BLOCK_V, num_stages=STAGES):
                z = _load_logits(base, start + lanes, row_stride, vocab, transform, False)
                sums += tl.exp2(z * LOG2E - offset2)
            z = _load_logits(base, full + lanes, row_stride, vocab, transform, True)
            sums += tl.exp2(z * LOG2E - offset2)
            total = tl.sum(sums, axis=0)
            if HAS_T:  # noqa: SIM102  (one is decided when compiling, the other when running)
                if (total < 1e-25) | (total > 1e30):
                    tops = tl.full([BLOCK_V], -float("inf"), dtype=tl.float32)
                    for start in range(0, row_stride, BLOCK_V):
                        z = _load_logits(base, start + lanes, row_stride, vocab, transform, True)
                        tops = tl.maximum(tops, z)
                    offset = tl.max(tops, axis=0)
                    sums = tl.zeros([BLOCK_V], dtype=tl.float32)
                    for start in range(0, row_stride, BLOCK_V):
                        z = _load_logits(base, start + lanes, row_stride, vocab, transform, True)
                        sums += tl.exp2((z - offset) * LOG2E)
                    total = tl.sum(sums, axis=0)
            y_t = offset
            if HAS_T:
                y_t = offset + tl.log(total)

            # 3. Loss and gradients from K+1 numbers.
            mixture = (beta, log_beta, log_rest)
            kd, grad, grad_t = _kd(y, y_t, logprobs, tail, in_k, 1.0 / temperature, mixture, TAIL, DIVERGENCE, HAS_T)
            log_q, log_q_t, lse = _log_softmax(y, y_t, HAS_T)
            kd_weight = 1.0 - ce_weight
            on_q = ce_weight + 2.0 * z_loss * lse
            loss = kd_weight * temperature * temperature * kd + z_loss * lse * lse
            if HAS_CE:
                loss += ce_weight * (lse - z_label)
            tl.store(loss_ptr + row, loss)

            if WRITE_GRAD:
                # 4. One scalar times an exponential everywhere, then the K places.
                grad = kd_weight * temperature * grad + on_q * tl.exp(log_q)
                coefficient = 0.0
                if HAS_T:
                    coefficient = scale * (kd_weight * temperature * grad_t + on_q * tl.exp(log_q_t))
                label_in_k = 0
                if HAS_CE:
                    is_label = (ids == label) & in_k
                    label_in_k = tl.max(is_label.to(tl.int32), axis=0)
                    grad = tl.where(is_label, grad - ce_weight, grad)
                grad = grad * scale
                label_grad = coefficient * tl.exp2((z_label - y_t) * LOG2E) - ce_weight * scale
                if softcap is not None:
                    grad = grad * _soft_cap_slope(y, transform)
                    label_grad = label_grad * _soft_cap_slope(z_label, transform)
                # Backwards: the end of the row is what the first pass left in L2.
                y_t2 = y_t * LOG2E
                cols = full + lanes
                z = _load_logits(base, cols, row_stride, vocab, transform, True)
                g = _outside_grad(z, coefficient, y_t2, transform)
                tl.store(base + cols, g.to(logits_ptr.dtype.element_ty), mask=cols < row_stride, eviction_policy=POLICY)
                for back in tl.range(BLOCK_V, full + BLOCK_V, BLOCK_V, num_stages=STAGES):
                    cols = full - back + lanes
                    z = _load_logits(base, cols, row_stride, vocab, transform, False)
                    g = _outside_grad(z, coefficient, y_t2, transform)
                    tl.store(base + cols, g.to(logits_ptr.dtype.element_ty), eviction_policy=POLICY)
                tl.debug_barrier()
                tl.store(base + ids, grad.to(logits_ptr.dtype.element_ty), mask=in_k)
                if HAS_CE:  # noqa: SIM102
                    if label_in_k == 0:
                        tl.store(base + label, label_grad.to(logits_ptr.dtype.element_ty))


def loss_and_grad_in_place(
    logits: Tensor,
    bias: Tensor | None,
    rows: TeacherRows,
    labels: Tensor | None,
    row_scale: Tensor,
    options: LossOptions,
    write_grad: bool,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Do as row_torch.loss_and_grad_in_place, in one launch. Columns between V and the row stride are scratch.

    logits must be [n, V] with stride (row_stride, 1); without write_grad its K places are left at -inf.
    """
    n, vocab = logits.shape
    k = rows.top_k
    loss = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n == 0:
        return loss
    config = config or DEFAULT_CONFIG
    ids, logprobs = (x if x.stride(1) == 1 else x.contiguous() for x in (rows.topk_ids, rows.topk_logprobs))
    bias = None if bias is None else bias.contiguous()  # one column of something wider: the kernel steps by one
    row_stride = logits.stride(0) if n > 1 else max(vocab, logits.stride(0))
    programs = n
    if logits.is_cuda:
        processors = torch.cuda.get_device_properties(logits.device).multi_processor_count
        programs = min(n, round(config.programs_per_sm * processors))
    beta = options.jsd_beta
    with on_device_of(logits):
        _row_kernel[(programs,)](
            logits,
            row_stride,
            bias,
            ids,
            ids.stride(0),
            logprobs,
            logprobs.stride(0),
            rows.tail_logprob.contiguous(),
            None if labels is None else labels.contiguous(),
            row_scale.contiguous(),
            loss,
            n,
            vocab,
            k,
            options.temperature,
            None if options.logit_scale == 1.0 else options.logit_scale,
            options.softcap,
            beta,
            math.log(beta) if 0 < beta < 1 else 0.0,
            math.log1p(-beta) if 0 < beta < 1 else 0.0,
            options.ce_weight,
            options.z_loss,
            TAIL=_TAIL[options.tail],
            DIVERGENCE=_DIVERGENCE[options.effective_divergence],
            HAS_T=k < vocab,
            HAS_CE=options.ce_weight > 0,
            WRITE_GRAD=write_grad,
            BLOCK_V=min(config.block, triton.next_power_of_2(max(row_stride, 16))),
            BLOCK_K=triton.next_power_of_2(max(k, 2)),
            STAGES=config.stages,
            POLICY=config.store_policy,
            num_warps=config.num_warps,
        )
    return loss
