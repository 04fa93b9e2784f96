"""The paper's fused loss in plain torch: closed-form gradient, chunked, logits recomputed in the backward pass.

The forward pass keeps one logsumexp a row; the backward pass forms each chunk's logits again and writes
dL/dz = M q - p (tail "none"). Four products a chunk with the forward's, and float32 elementwise passes over it.
This is the yardstick that `trainer.losses` is timed against, so it is written to be quick within plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ClosedFormKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, topk_ids: Tensor, topk_logprobs: Tensor, chunk_size: int
    ) -> Tensor:
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
        ctx.chunk_size = chunk_size
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, topk_ids, probs, lse = ctx.saved_tensors
        scale = grads[0] / hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(head_weight)
        mass = probs.sum(dim=1, keepdim=True)
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            grad = (hidden[part] @ head_weight.t()).float()
            grad = grad.sub_(lse[part, None]).exp_().mul_(mass[part] * scale)
            grad.scatter_add_(1, topk_ids[part], -probs[part] * scale)
            grad = grad.to(hidden.dtype)
            torch.mm(grad, head_weight, out=grad_hidden[part])
            grad_weight.addmm_(grad.t(), hidden[part])
            del grad
        return grad_hidden, grad_weight, None, None, None


def closed_form_loss(
    hidden: Tensor, head_weight: Tensor, topk_ids: Tensor, topk_logprobs: Tensor, chunk_size: int = 4096
) -> Tensor:
    """Mean over rows of sum_S p (log p - log q). hidden [N, d], head_weight [V, d], topk_* [N, K]; scalar float32."""
    loss: Tensor = _ClosedFormKL.apply(hidden, head_weight, topk_ids.long(), topk_logprobs, chunk_size)
    return loss
