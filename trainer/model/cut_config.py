"""What a configuration says about single layers, carried over to those that a student keeps.

Every list with an entry a layer is taken apart; lists of layers, and numbers that choose layers by their place, are
translated; what cannot be said of the kept layers is refused by the key's name. `check_same` then builds both models
without memory and compares each kept layer with the one that its configuration gives.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from teachercache.errors import UsageError
from trainer.model import Model
from trainer.model.student import layer_stack

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Kinds of layers that keep packed documents apart; others (mamba, conv, linear attention) carry a state over them."""
LAYERS_BY_NUMBER = re.compile(
    r"(mlp_only|moe|full_attn|full_attention|attn|attention|sparse|dense)_(layers|layer_ids|idxs|indices|layer_indices)"
)
UNTIL = ("first_k_dense_replace", "num_dense_layers", "num_first_full_attention_layers")
"""Numbers of leading layers of another kind."""
GONE = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Layers behind the stack, for speculative decoding, which no causal LM of transformers loads."""
REFUSED = ("num_kv_shared_layers", "scale_attn_by_inverse_layer_idx", "cross_attention_layers")
NO_LAYER_LISTS = re.compile(r".*token_ids?|architectures|mrope_section|.*labels?")
PLACES = re.compile(r"layer|interval|pattern|period|offset|step|every|dense|sparse|window")


def refuse_states(model: type | Any, text: Any) -> None:
    """Raise UsageError, naming the key, for a model with layers that mix tokens without attention."""
    for key in ("layer_types", "layers_block_type"):
        other = sorted(set(map(str, getattr(text, key, None) or [])) - ATTENTION)
        if other:
            raise UsageError(
                f"{type(model).__name__} has {key} of {', '.join(other)}: such layers carry a state from one packed document "
                "into the next; choose a teacher with attention in every layer"
            )
    if getattr(model, "_is_stateful", False):
        raise UsageError(
            f"{type(model).__name__} (model_type {text.model_type}) keeps a state next to attention, which would go from one "
            "packed document into the next; choose a teacher with attention in every layer"
        )


def map_layers(config: Any, kept: Sequence[int]) -> None:
    """Make a configuration, in place, that of the kept layers. Raises UsageError with the key that stops it."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    stored = {key: value for key, value in text.to_dict().items() if key not in ("quantization_config",)}
    changed: dict[str, Any] = {}
    for key, value in stored.items():
        if key in REFUSED and value:
            raise UsageError(f"the configuration's {key} = {value} ties layers to their places: they cannot be cut")
        if key in GONE and value:
            changed[key] = 0
        elif key in UNTIL and value is not None:
            changed[key] = sum(layer < value for layer in kept)
        elif isinstance(value, (list, tuple)) and not NO_LAYER_LISTS.fullmatch(key):
            if LAYERS_BY_NUMBER.fullmatch(key) and all(type(entry) is int for entry in value):
                if key != "mlp_only_layers":  # below, with the step
                    changed[key] = [new for new, layer in enumerate(kept) if layer in value]
            elif len(value) == count:
                changed[key] = [value[layer] for layer in kept]
        elif (
            isinstance(value, dict)
            and value
            and not NO_LAYER_LISTS.fullmatch(key)
            and {str(layer) for layer in range(count)} >= set(map(str, value))
        ):  # of every layer, or of those that differ
            by_layer = {str(layer): entry for layer, entry in value.items()}
            number = type(next(iter(value)))
            changed[key] = {
                number(new): by_layer[str(layer)] for new, layer in enumerate(kept) if str(layer) in by_layer
            }
    if stored.get("decoder_sparse_step"):
        only, step = stored.get("mlp_only_layers") or [], stored["decoder_sparse_step"]
        dense = [layer in only or (layer + 1) % step != 0 for layer in kept]
        changed |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [new for new, is_dense in enumerate(dense) if is_dense],
        }
    if stored.get("moe_layer_interval"):
        changed |= _moe_range(stored, kept)
    if (stored.get("moe_layer_freq") or 1) != 1 and not isinstance(stored["moe_layer_freq"], (list, tuple)):
        raise UsageError(
            f"the configuration's moe_layer_freq = {stored['moe_layer_freq']} is not supported: expected 1"
        )
    for key, value in changed.items():
        setattr(text, key, value)
    text.num_hidden_layers = len(kept)


def _moe_range(stored: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return first, last and interval that choose the kept layers with experts. Raises UsageError where none does."""
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    first, last, every = (stored[name] for name in names)
    last = stored["num_hidden_layers"] - 1 if last == -1 else last

    def experts(layer: int, first: int, last: int, every: int) -> bool:
        return first <= layer <= last and (layer + 1) % every == 0

    wanted = [experts(layer, first, last, every) for layer in kept]
    if not any(wanted):
        return {names[0]: len(kept), names[1]: len(kept)}
    ends = wanted.index(True), len(wanted) - 1 - wanted[::-1].index(True)
    for interval in range(1, len(kept) + 1):
        if [experts(layer, *ends, interval) for layer in range(len(kept))] == wanted:
            return dict(zip(names, (*ends, interval), strict=True))
    raise UsageError(
        f"the configuration's {', '.join(names)} cannot choose the layers with experts among {list(kept)}: keep others"
    )


def check_same(config: Any, kept: Sequence[int], *, trust_remote_code: bool = False) -> Any:
    """Return the student's configuration, once its layers are those of the teacher's that are kept.

    Both models are built on the meta device, without weights. Compared are names and shapes of all parameters, and
    the plain attributes of every module (`use_rope`, `sliding_window`, `is_moe_layer`).
    Raises UsageError that names what differs and the keys that choose by place.
    """
    theirs = _on_meta(config, trust_remote_code)
    refuse_states(theirs, config.get_text_config())
    fresh = copy.deepcopy(config)
    map_layers(fresh, kept)
    try:
        cut = type(fresh).from_dict(fresh.to_dict())  # as a reader of config.json makes it
        ours = _on_meta(cut, trust_remote_code)
    except Exception as error:  # each model checks its configuration in its own way
        raise UsageError(
            f"{type(theirs).__name__}: transformers refuses its configuration cut to the layers {list(kept)} "
            f"({' '.join(str(error).split())[:300]}). This model cannot be cut"
        ) from error
    (name, old), (_, new) = layer_stack(theirs), layer_stack(ours)
    stored = config.get_text_config().to_dict()
    suspects = [
        key
        for key, value in stored.items()
        if PLACES.search(key) and isinstance(value, (int, str, list)) and value and key != "num_hidden_layers"
    ]

    def refuse(what: str) -> None:
        raise UsageError(
            f"{type(theirs).__name__}: cut to the layers {list(kept)} its configuration gives another {what}; the keys that may "
            f"choose it by a layer's place are {', '.join(suspects) or 'not known'}. This model cannot be cut"
        )

    was_outside, now_outside = _tensors(theirs, skip=old), _tensors(ours, skip=new)
    for tensor in sorted(was_outside.keys() | now_outside.keys()):
        if was_outside.get(tensor) != now_outside.get(tensor):
            refuse(f"{tensor} outside of the layers ({was_outside.get(tensor)} and {now_outside.get(tensor)})")
    if len(new) != len(kept):
        refuse(f"number of layers in {name} ({len(new)})")
    numbers: dict[tuple[str, str], bool] = {}
    for place, layer in enumerate(kept):
        was, now = _features(old[layer]), _features(new[place])
        for key in was.keys() | now.keys():
            if was.get(key) != now.get(key):
                numbers[key] = numbers.get(key, True) and was.get(key) == layer and now.get(key) == place
    if wrong := sorted(key for key, is_number in numbers.items() if not is_number):
        refuse(f"{wrong[0][1]} of {wrong[0][0] or 'the layer'}")
    return cut


def renumber(layers: Sequence[Any], kept: Sequence[int]) -> None:
    """Give each module of the kept layers its new number, wherever it has the old one."""
    for place, layer in enumerate(kept):
        for module in layers[place].modules():
            for name, value in vars(module).items():
                if type(value) is int and value == layer and re.search(r"layer_?(idx|id|index|number|num)$", name):
                    setattr(module, name, place)


def _on_meta(config: Any, trust_remote_code: bool) -> Model:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def _tensors(model: Model, *, skip: Any) -> dict[str, Any]:
    """Return the shape of each parameter of a model, those of the layers to skip left out."""
    inside = {id(parameter) for parameter in skip.parameters()}
    return {name: tuple(p.shape) for name, p in model.named_parameters() if id(p) not in inside}


def _features(layer: Any) -> dict[tuple[str, str], Any]:
    """Return by (module, name) what a layer is: its modules' classes and plain attributes, its tensors' shapes."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        found[path, "class"] = type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, type(None))) or (
                isinstance(value, (list, tuple)) and all(isinstance(part, (bool, int, float, str)) for part in value)
            ):
                found[path, name] = value
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[path, name] = tuple(tensor.shape)
    return found
