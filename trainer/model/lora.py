"""Low-rank adapters through peft: for students whose gradients and optimiser state do not fit next to their weights."""

from __future__ import annotations

import copy
from pathlib import Path

from teachercache.errors import UsageError
from trainer.model import Model


def add(model: Model, *, rank: int, alpha: int, saved: Path | None) -> Model:
    """Freeze the model and give all its linear layers but the LM head adapters: new ones, or those in folder `saved`.

    Raises UsageError where peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise UsageError("lora needs the package peft (pip install peft)") from error
    model.requires_grad_(False)
    if saved is not None:
        wrapped = peft.PeftModel.from_pretrained(model, str(saved), is_trainable=True)
    else:
        # peft's "all-linear" leaves out the head, whose plain weight the loss multiplies with.
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"))
    # The embedding is frozen, so a checkpointed first layer would see an input without a gradient.
    wrapped.enable_input_require_grads()
    return wrapped


def merged(model: Model) -> Model:
    """Return a copy of the model with its adapters folded into its weights: it loads without peft."""
    return copy.deepcopy(model).merge_and_unload()
