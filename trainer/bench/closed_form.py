"""The paper's fused loss in plain torch: closed-form gradient, chunked, logits recomputed in the backward pass.

The forward pass keeps one logsumexp a row; the backward pass forms each chunk's logits again, its softmax q in
float32, and dL/dz = M q - p (tail "none"); the head's gradient is summed in float32. Four products a chunk with the
forward's, and float32 elementwise passes over it. This is the yardstick that `trainer.losses` is timed against.

`lean=True` is the same with less memory, written as tightly as plain torch allows: the softmax in place of the
logits, and the head's gradient summed in its own dtype, which rounds after every chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.losses.products import weight_grad
from trainer.losses.rows import TeacherRows


class _ClosedFormKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, rows: TeacherRows, chunk_size: int, lean: bool
    ) -> Tensor:
        topk_ids, topk_logprobs = rows.topk_ids.long(), rows.topk_logprobs
        probs = topk_logprobs.exp()
        lse = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            logits = (hidden[part] @ head_weight.t()).float()
            lse[part] = torch.logsumexp(logits, dim=1)
            log_q = logits.gather(1, topk_ids[part]) - lse[part, None]
            total += (probs[part] * (topk_logprobs[part] - log_q)).sum()
            del logits
        ctx.save_for_backward(hidden, head_weight, topk_ids, probs, lse)
        ctx.chunk_size, ctx.lean = chunk_size, lean
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, topk_ids, probs, lse = ctx.saved_tensors
        scale = grads[0] / hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        sum_dtype = head_weight.dtype if ctx.lean or not hidden.is_cuda else torch.float32
        grad_weight = torch.zeros_like(head_weight, dtype=sum_dtype)
        mass = probs.sum(dim=1, keepdim=True)
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            logits = (hidden[part] @ head_weight.t()).float()
            q = logits.sub_(lse[part, None]).exp_() if ctx.lean else torch.softmax(logits, dim=1)
            del logits
            grad = q.mul_(mass[part] * scale).scatter_add_(1, topk_ids[part], -probs[part] * scale).to(hidden.dtype)
            del q
            torch.mm(grad, head_weight, out=grad_hidden[part])
            weight_grad(grad, hidden[part], grad_weight, accumulate=True)
            del grad
        return grad_hidden, grad_weight.to(head_weight.dtype), None, None, None


def closed_form_loss(
    hidden: Tensor, head_weight: Tensor, rows: TeacherRows, chunk_size: int = 4096, lean: bool = False
) -> Tensor:
    """Return the mean over rows of sum_S p (log p - log q): a float32 scalar, of hidden [N, d] and head_weight [V, d]."""
    loss: Tensor = _ClosedFormKL.apply(hidden, head_weight, rows, chunk_size, lean)  # type: ignore[no-untyped-call]
    return loss
