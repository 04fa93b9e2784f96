"""What a run needs of memory and disk, and one line where there is not enough: what it needs, what there is, what to try."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from teachercache.errors import TeacherCacheError, UsageError
from trainer.config import OptimConfig, TrainerConfig

POLICIES = ("none", "keep-matmuls", "keep-attention", "full", "offload")
"""Of train.checkpointing, from the fastest to the smallest."""
MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "8bit": 2, "offload": 8}
LOW_BYTES = {"auto": 2, "split": 2, "float32": 4, "stochastic": 0}


class OutOfMemory(TeacherCacheError):
    """A step, or an evaluation, does not fit the GPU's memory; the newest checkpoint is whole."""

    code = "TC-T104"
    remedy = "Try the settings that the message names, in their order."


class DiskFull(TeacherCacheError):
    """The disk of a run's output, or of TMPDIR, is full; nothing half-written counts, the newest checkpoint is whole."""

    code = "TC-T105"
    remedy = "Free space on the disk that the message names, and run the same command."


def state_bytes(optim: OptimConfig, dtype: torch.dtype) -> int:
    """Return the bytes of optimiser state for each trained parameter, wherever it is kept."""
    master = dtype == torch.bfloat16 and optim.state != "8bit"  # which rounds stochastically
    return MOMENT_BYTES[optim.state] + (LOW_BYTES[optim.master] if master else 0)


def checkpoint_bytes(model: torch.nn.Module, optim: OptimConfig, *, adapters: bool, ranks: int = 1) -> int:
    """Estimate the bytes of a checkpoint: weights (of adapters alone where there are some) and optimiser state."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    weights = sum(parameter.numel() * parameter.itemsize for parameter in (trained if adapters else parameters))
    if optim.state == "8bit":
        return weights + sum(_eight_bit_bytes(parameter, ranks) for parameter in trained)
    return weights + sum(parameter.numel() * state_bytes(optim, parameter.dtype) for parameter in trained)


def _eight_bit_bytes(parameter: torch.nn.Parameter, ranks: int) -> int:
    """Return the bytes of a parameter's two moments of torchao in a checkpoint; several ranks write them in float32."""
    whole, rows = parameter.numel(), max(1, parameter.shape[0] if parameter.dim() else 1)
    share = -(-rows // ranks) * (whole // rows)
    if share < 4096 or share % 256:  # torchao leaves them in the parameter's dtype
        return 2 * whole * parameter.itemsize
    return 8 * whole if ranks > 1 else 2 * (whole + whole // 256 * 4 + 1024)  # codes, scales, a table


def check_room(place: Path, needed: int) -> None:
    """Raise UsageError unless the disk of a folder has room for two checkpoints: a new one is whole before one goes."""
    free = _free(place)
    if free < 2 * needed:
        raise UsageError(
            f"{place} has {_size(free)} free, and two checkpoints of {_size(needed)} must fit before the first step: free space "
            "there, choose another output (or TMPDIR for one on an object store), or make them smaller (optim.state=bfloat16)"
        )


@contextmanager
def explained(config: TrainerConfig, place: Path, needed: int) -> Iterator[None]:
    """Turn a lack of GPU memory or of disk space into an error of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(_memory_line(str(error), next_settings(config))) from error
    except TeacherCacheError:
        raise
    except Exception as error:
        if not _is_full(error, place, needed):
            raise
        raise DiskFull(
            f"the disk of {place} is full ({_size(_free(place))} free, a checkpoint has about {_size(needed)}): nothing "
            "half-written was kept and the newest checkpoint is whole; free space and run the same command to go on from there"
        ) from error


@contextmanager
def evaluation_explained(config: TrainerConfig) -> Iterator[None]:
    """Turn a lack of GPU memory in an evaluation into an error of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        tries = ["no teacher="] if config.teacher else []
        tries += [f"data.seq_len={max(2, config.data.seq_len // 2)}", "no other process on this GPU", "a larger GPU"]
        raise OutOfMemory(_memory_line(str(error), tries)) from error


def _is_full(error: BaseException | None, place: Path, needed: int) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # torch's and safetensors' writers are no OSError; torch's does not say why it fails.
        if "No space left" in str(error) or ("inline_container" in str(error) and _free(place) < needed):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free(place: Path) -> int:
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _size(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _memory_line(said: str, tries: list[str]) -> str:
    asked = re.search(r"allocate ([\d.]+ \w+)", said)
    total = re.search(r"capacity of ([\d.]+ \w+)", said)
    free = re.search(r"of which ([\d.]+ \w+) is free", said)
    have = f", with {free[1]} free of {total[1]}" if free and total else ""
    need = f"{asked[1]} more were needed{have}" if asked else "torch names no size"
    return f"out of GPU memory: {need}; try, in this order: {'; '.join(tries[:3])}"


def next_settings(config: TrainerConfig) -> list[str]:
    """Return the settings that need less memory, cheapest first; a run may be continued with the ones before `lora`."""
    train, seq_len = config.train, config.data.seq_len
    order = (
        POLICIES[POLICIES.index(train.checkpointing) + 1 :] if train.checkpointing in POLICIES else ("full", "offload")
    )
    tries = [f"train.checkpointing={policy}" for policy in order[:1]]
    tile = (train.mlp_tile or seq_len) // 4
    tries += [f"train.mlp_tile={tile}"] if tile >= 1024 else []
    tries += ["optim.state=offload"] if config.optim.state == "float32" else []
    tries += [f"train.checkpointing={policy}" for policy in order[1:2]]
    tries += ["lora.rank=16 (a new output)"] if config.lora is None else []
    return [*tries, f"data.seq_len={max(2, seq_len // 2)} (a new output)", "a smaller student", "a larger GPU"]
