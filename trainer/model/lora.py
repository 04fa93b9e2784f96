"""Low-rank adapters through peft: for students whose gradients and optimiser state do not fit next to their weights."""

from __future__ import annotations

import copy
from pathlib import Path

from teachercache.errors import UsageError
from teachercache.fingerprint import check_model_files
from trainer.config import LoraConfig
from trainer.model import Model, student


def add(model: Model, config: LoraConfig, *, saved: Path | None) -> Model:
    """Freeze the model and give its layers adapters: new ones, or those in folder `saved`.

    Raises UsageError where peft is not installed, for layers that the model lacks and for adapters on the head.
    """
    try:
        import peft
    except ImportError as error:
        raise UsageError("lora needs the package peft (pip install peft)") from error
    model.requires_grad_(False)
    if saved is not None:
        check_model_files(saved)
        wrapped = peft.PeftModel.from_pretrained(model, str(saved), is_trainable=True)
    else:
        names = config.target_modules
        settings = peft.LoraConfig(
            r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=names
        )
        try:
            wrapped = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise UsageError(f"lora.target_modules = {names}: {' '.join(str(error).split())}") from error
        if hasattr(student.base(wrapped).get_output_embeddings(), "base_layer"):
            raise UsageError(
                f"lora.target_modules = {names} adapts the head, whose plain weight the loss multiplies with, so that adapter "
                "would never train; leave the head out"
            )
    # The embedding is frozen, so a checkpointed first layer would see an input without a gradient.
    wrapped.enable_input_require_grads()
    return wrapped


def merge_saved(model: Model, adapters: Path) -> Model:
    """Return a plain model with the adapters of a folder folded into its weights."""
    import peft

    return peft.PeftModel.from_pretrained(model, str(adapters)).merge_and_unload()


def merged(model: Model) -> Model:
    """Return a copy of the model with its adapters folded into its weights: it loads without peft."""
    return copy.deepcopy(model).merge_and_unload()
