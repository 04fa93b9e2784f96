"""Cut a student from its teacher: keep some layers and, on request, the strongest units of each MLP."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from teachercache.console import local_path
from teachercache.errors import UsageError
from trainer import hub
from trainer.model import Model, cut_config
from trainer.model.student import check_folder, decoder, layer_stack, load_whole, tokenizer_files, write_files

SAME = 1e-5
"""Largest difference of a float32 logit between a student in memory and the one that its folder gives."""


def teacher_folder(name: str) -> Path:
    """Return a folder as it is, or the snapshot of a Hub id (owner/model, owner/model@revision); UsageError for neither."""
    folder = local_path(name).expanduser()
    return hub.snapshot(name) if hub.is_hub_id(name) else folder


def choose_layers(rule: str, num_layers: int) -> list[int]:
    """Return the teacher's layers that a student keeps, in the teacher's order.

    "every-2" keeps 0, 2, 4, …; "first-8" the first eight; "0,3-5,9" those. Raises UsageError for a layer not there.
    """
    try:
        if rule.startswith("every-"):
            layers = list(range(0, num_layers, int(rule.removeprefix("every-"))))
        elif rule.startswith("first-"):
            layers = list(range(int(rule.removeprefix("first-"))))
        else:
            layers = []
            for part in rule.split(","):
                low, _, high = part.partition("-")
                layers.extend(range(int(low), int(high or low) + 1))
    except ValueError as error:
        raise UsageError(f"expected layers as every-2, first-8 or 0,3-5,9; found {rule!r}") from error
    layers = sorted(set(layers))
    if not layers or layers[-1] >= num_layers:
        raise UsageError(f"--layers {rule} means {layers}, but the teacher has layers 0 to {num_layers - 1}")
    return layers


def init_student(
    teacher: Path, out: Path, *, layers: str = "every-2", mlp: int | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Cut a student from its teacher, save it at `out`, and return what was made, for printing.

    Embeddings, head, norms and tokenizer are copied. Reads the whole teacher into memory, and the student a second time:
    its logits must be those of the cut model. `out` appears whole or not at all.
    Raises UsageError when `out` is not empty, when the teacher's files are not whole, and for a configuration that cannot
    say what the kept layers are, by the key's name and before a weight is read.
    """
    check_folder(teacher)
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: choose another --out, or remove it")
    config = AutoConfig.from_pretrained(teacher, trust_remote_code=trust_remote_code)
    kept = choose_layers(layers, config.get_text_config().num_hidden_layers)
    cut_config.check_same(config, kept, trust_remote_code=trust_remote_code)
    model = load_whole(teacher, dtype="auto", trust_remote_code=trust_remote_code)
    name, stack = layer_stack(model)
    cut: Any = torch.nn.ModuleList(stack[index] for index in kept)
    setattr(decoder(model), name, cut)
    cut_config.map_layers(model.config, kept)
    cut_config.renumber(cut, kept)
    text = model.config.get_text_config()
    if mlp is not None:
        _cut_mlps(cut, text, mlp)
    with _whole_or_nothing(out) as folder:
        model.save_pretrained(folder)
        write_files(tokenizer_files(teacher), folder)
        found = load_whole(folder, dtype="auto", trust_remote_code=trust_remote_code)
        if (gap := _largest_gap(model, found)) > SAME:
            raise UsageError(
                f"the student that was written for {out} has other logits than the cut teacher, by {gap:.1e}: its configuration "
                f"does not say all that transformers needs of {type(model).__name__}. Nothing was kept; this model cannot be cut"
            )
    return {
        "student": str(out),
        "teacher": str(teacher),
        "layers": kept,
        "intermediate_size": getattr(text, "intermediate_size", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    """Give a new folder next to `out`; without an error it becomes `out`, else nothing of it stays."""
    made = not out.parent.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temp:
            folder = Path(temp) / out.name
            folder.mkdir()
            yield folder
            folder.replace(out)  # an empty folder may be there
    except BaseException:
        if made and not any(out.parent.iterdir()):
            out.parent.rmdir()
        raise


@torch.no_grad()
def _largest_gap(ours: Model, theirs: Model) -> float:
    """Return the largest difference of logits on 64 tokens: in the models' dtype, or in float32 where that differs."""
    vocab = ours.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocab, (1, 64), generator=torch.Generator().manual_seed(0))

    def gap() -> float:
        a, b = (model.eval()(input_ids=ids, use_cache=False).logits.float() for model in (ours, theirs))
        return float((a - b).abs().nan_to_num(torch.inf).max())

    found = gap()
    if found > SAME and ours.dtype != torch.float32:
        ours.float(), theirs.float()
        found = gap()
    return found


@torch.no_grad()
def _cut_mlps(layers: Any, config: Any, width: int) -> None:
    """Keep the units of each gated MLP whose three weight vectors have the largest product of norms."""
    if not 0 < width <= config.intermediate_size:
        raise UsageError(f"--mlp {width}: expected 1 to {config.intermediate_size}, the teacher's own width")
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
            raise UsageError(f"--mlp needs gated MLPs (gate_proj, up_proj, down_proj); found {type(mlp).__name__}")
        gate, up, down = (getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
        strength = gate.weight.float().norm(dim=1) * up.weight.float().norm(dim=1) * down.weight.float().norm(dim=0)
        keep = strength.topk(width).indices.sort().values
        for linear in (gate, up):
            linear.weight = torch.nn.Parameter(linear.weight[keep].clone())
            if linear.bias is not None:
                linear.bias = torch.nn.Parameter(linear.bias[keep].clone())
            linear.out_features = width
        down.weight = torch.nn.Parameter(down.weight[:, keep].clone())
        down.in_features = width
    config.intermediate_size = width
