"""Fused layers from liger-kernel, where the package, the architecture and a CUDA device are there."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from teachercache.console import missing_module
from teachercache.errors import UsageError
from trainer.model import Model
from trainer.model.student import decoder


def apply_liger(model: Model, wanted: str, device: torch.device) -> bool:
    """Replace norms, rotary embeddings and gated MLPs of a loaded model in place; return whether it happened.

    wanted  auto | on | off. Liger's loss is never used: ours takes hidden states.
    Raises UsageError for `on` where it cannot be done.
    """
    patch, reason = _patch(model, wanted, device)
    if patch is None:
        if wanted == "on":
            raise UsageError(f"train.liger=on: {reason}; use auto")
        return False
    accepted = inspect.signature(patch).parameters
    losses_off = {name: False for name in ("cross_entropy", "fused_linear_cross_entropy") if name in accepted}
    patch(model=model, **losses_off)
    rotate_copies(model)
    return True


def describe_liger(model: Model, wanted: str, device: torch.device) -> str:
    """Return what the layers are: liger-kernel's, or plain and why."""
    patch, reason = _patch(model, wanted, device)
    return "liger-kernel (norms, rotary embedding, MLP)" if patch is not None else f"plain ({reason})"


def _patch(model: Model, wanted: str, device: torch.device) -> tuple[Any, str]:
    """Return liger's function for a model, or None and the reason why it is not used."""
    if wanted == "off":
        return None, "train.liger=off"
    if device.type != "cuda":
        return None, "liger-kernel has layers for a GPU alone"
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        return None, missing_module(ModuleNotFoundError(str(error), name="liger_kernel"), needs="fused layers need")
    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.get_text_config().model_type)
    return patch, f"liger-kernel has none for {model.config.model_type}"


def rotate_copies(model: Model) -> None:
    """Let liger's rotary embedding work on copies of queries and keys.

    It writes into its arguments, the very outputs of the projections, behind autograd's back. Checkpointing that keeps
    matrix products (`keep-matmuls`) would find them rotated already and rotate them again. The copies cost a read and
    a write of q and k.
    """
    module = sys.modules[type(decoder(model)).__module__]
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None or not rotate.__module__.startswith("liger_kernel"):
        return

    @functools.wraps(rotate)
    def on_copies(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return rotate(q.clone(), k.clone(), *rest, **options)

    on_copies.__module__ = __name__  # so that a second call wraps nothing twice
    module.apply_rotary_pos_emb = on_copies  # type: ignore[attr-defined]
