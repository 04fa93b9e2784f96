"""The optimiser's state of several ranks in a checkpoint: each rank writes its share, any number of ranks reads it.

torch.distributed.checkpoint writes and reads safetensors, which run nothing when they are read: its own format is a
pickle. A checkpoint's folder has them as `optimizer-00001.shard`, a name that no program takes for weights. Numbers
(steps, settings, random state) are in optimizer.pt as always. Eight-bit moments are kept in float32, since their blocks
follow the shares.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from trainer.model import parallel

SUFFIX = ".shard"
FILE_BYTES = 2 << 30
"""About how much of a rank's share is in one file: a file is built in memory."""


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, torch.nn.Parameter, Tensor]]:
    """Yield (number of the parameter, key, parameter, value) of each piece of state that has the parameter's shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                yield number, key, parameter, value


def save(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write every rank's share of the state's tensors; all ranks call it with the same folder."""
    shares, files, size = {}, {}, 0
    for number, key, parameter, value in state_tensors(optimizer):
        name, share = f"{number}.{key}", _plain(value)
        shares[name] = parallel.as_sharded(share, getattr(parameter, "sharded", parameter))
        files[name] = size // FILE_BYTES + 1
        size += share.nbytes
    files = parallel.gathered(files)[0]  # a rank may have less than the first
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    with _one_error():
        write(shares, storage_writer=writer, process_group=parallel.cpu_group())
    if parallel.rank() == 0:
        for number, path in enumerate(sorted(folder.glob("shard-*.safetensors")), start=1):
            path.rename(folder / f"optimizer-{number:05d}{SUFFIX}")


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimiser's state_dict without the tensors that `save` writes."""
    whole = optimizer.state_dict()
    written = {(number, key) for number, key, _, _ in state_tensors(optimizer)}
    state = {n: {k: v for k, v in held.items() if (n, k) not in written} for n, held in whole["state"].items()}
    return {**whole, "state": state}


def load(optimizer: torch.optim.Optimizer, folder: Path, saved: dict[str, Any]) -> None:
    """Fill an optimiser's state, which exists (`trainer.optim.make_state`), from a checkpoint of any number of ranks.

    saved  the optimiser's part of optimizer.pt, with whole tensors where one rank wrote it
    Raises ValueError and what torch raises for files that do not fit the parameters.
    """
    sharded = sorted(folder.glob(f"*{SUFFIX}"))
    wanted: dict[str, Tensor] = {}
    fill: list[tuple[Tensor, Tensor]] = []
    for number, key, parameter, value in state_tensors(optimizer):
        held = saved["state"][number].get(key)
        if held is not None:
            value.copy_(parallel.share_of(_plain(held)))
            continue
        target = _plain(value)
        wanted[f"{number}.{key}"] = parallel.as_sharded(target, getattr(parameter, "sharded", parameter))
        if target is not value:
            fill.append((value, target))
    if wanted:
        _read(wanted, sharded)
    for value, target in fill:
        value.copy_(target)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        if state := optimizer.state.get(parameter):
            step = saved["state"][number]["step"]
            state["step"] = state["step"].fill_(float(step)) if isinstance(state["step"], Tensor) else int(step)


def _read(wanted: dict[str, Tensor], files: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            with safe_open(file, framework="pt"):  # a damaged one is found before torch logs a traceback of it
                (Path(folder) / f"{file.stem}.safetensors").symlink_to(file.resolve())
        group = parallel.cpu_group()
        with _one_error(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process reads alone
            read(wanted, storage_reader=HuggingFaceStorageReader(folder), process_group=group, no_dist=group is None)


@contextmanager
def _one_error() -> Iterator[None]:
    """Raise the error of the first rank that has one: torch's, which has all of them, is no Exception."""
    try:
        yield
    except CheckpointException as errors:
        raise min(errors.failures.items())[1][0] from errors


def _plain(value: Tensor) -> Tensor:
    """Return a moment as a plain tensor: torchao's eight bits in float32."""
    found: Tensor = value.dequantize() if hasattr(value, "codes") else value
    return found
