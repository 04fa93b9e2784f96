"""Several ranks, one process a GPU: who this process is, what the ranks tell one another, and models in shards.

`torchrun --nproc-per-node N -m trainer fit …` starts N processes on one machine, which `joined` connects. Without it
there is one rank, and everything here does nothing. Nothing else in the trainer needs the number of ranks.

FSDP2 (torch's `fully_shard`) holds an N-th of every weight, gradient and moment on each rank. The units that are gathered
whole for their turn are the layers, the embedding and the head; tied, the last two are one unit. Weights keep their
dtype; gradients of half precision are summed in float32 over the ranks, undivided, since the loss is divided already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from teachercache.errors import TeacherCacheError, UsageError
from trainer.model import Model

PATIENCE = timedelta(hours=1)
"""How long ranks wait for one another: rank 0 may be uploading a checkpoint. torchrun sees a rank that died at once."""
HALF = (torch.bfloat16, torch.float16)
T = TypeVar("T")


class RankLost(TeacherCacheError):
    """Another rank of this run ended; the reason is in its lines, or torchrun's."""

    code = "TC-T106"
    remedy = "Look at the line of the rank that ended first; the same command continues from the newest checkpoint."


class _Ranks:
    """This process among the others; rank 0 of 1 until `joined`."""

    rank, count = 0, 1
    mesh: DeviceMesh | None = None
    cpu: dist.ProcessGroup | None = None
    """Carries Python objects, whatever carries the tensors."""


_ranks = _Ranks()


def rank() -> int:
    """Return which of the ranks this process is; 0 logs and writes."""
    return _ranks.rank


def count() -> int:
    """Return the number of ranks."""
    return _ranks.count


def refuse_several(what: str) -> None:
    """Raise UsageError where torchrun started several processes of a command that is one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(f"{what} is one process: start it without torchrun")


@contextmanager
def joined(device: torch.device) -> Iterator[torch.device]:
    """Connect the processes that torchrun started, and yield this one's device; one process alone is left as it is.

    Raises UsageError for ranks on several machines or for more ranks than GPUs. torchrun ends all ranks when one fails,
    so an error that every rank has alike (its class says `alike`) is left to rank 0, and another one names its rank.
    Where a rank waits for one that died, the error is RankLost.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield device
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if here != world:
        raise UsageError(
            f"torchrun started {world} ranks, {here} of them here; a run has one machine: use --standalone"
        )
    on_gpu = device.type == "cuda"
    if on_gpu:
        if torch.cuda.device_count() < world:
            raise UsageError(f"torchrun started {world} ranks, and torch finds {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE, device_id=device if on_gpu else None)
    _ranks.rank, _ranks.count = dist.get_rank(), world
    _ranks.cpu = dist.new_group(backend="gloo", timeout=PATIENCE) if on_gpu else dist.group.WORLD
    _ranks.mesh = init_device_mesh(device.type, (world,))
    try:
        yield device
        gathered(None)
    except TeacherCacheError as error:
        if _ranks.rank and getattr(error, "alike", False):
            _end_after_rank_0(error.exit_code)
        if _ranks.rank:
            error.args = (f"rank {_ranks.rank}: {error}",)
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        said = " ".join(str(error).split())[:200]
        raise RankLost(f"rank {_ranks.rank} of {world} lost another rank, whose own line says why ({said})") from error
    finally:
        _ranks.__dict__.clear()
    dist.destroy_process_group()


def _end_after_rank_0(status: int) -> NoReturn:
    """End without a word once rank 0 has said why; torchrun would cut it short."""
    with suppress(RuntimeError):
        gathered(None)
    raise SystemExit(status)


def cpu_group() -> dist.ProcessGroup | None:
    """Return the group that carries Python objects; None for one rank."""
    return _ranks.cpu


def gathered(value: T) -> list[T]:
    """Return what each rank gives, in their order; all of them must call it. About a millisecond; values are pickled."""
    if _ranks.count == 1:
        return [value]
    values: list[Any] = [None] * _ranks.count
    dist.all_gather_object(values, value, group=_ranks.cpu)
    return values


def first(function: Callable[[], T]) -> T:
    """Return on every rank what rank 0 gets from `function`; where that raises, the others end without a word."""
    if _ranks.rank:
        ended, result = cast("tuple[int | None, T]", gathered(None)[0])
        if ended is not None:
            _end_after_rank_0(ended)
        return result
    try:
        result = function()
    except BaseException as error:
        with suppress(RuntimeError):  # of a rank that died: this error is the one to tell
            gathered((getattr(error, "exit_code", 1), None))
        raise
    gathered((None, result))
    return result


def with_all(act: Callable[[Callable[[T], None]], None], work: Callable[[T], None]) -> None:
    """Let rank 0 `act`, which is given a function to call at most once; the call runs `work` on every rank."""
    called = False

    def everywhere(value: T) -> None:
        nonlocal called
        called = True
        gathered((value,))
        work(value)

    if _ranks.rank == 0:
        act(everywhere)
        if not called:
            gathered(None)
    elif (given := gathered(cast("Any", None))[0]) is not None:
        work(given[0])
    gathered(None)


def summed(tensor: Tensor) -> Tensor:
    """Return the sum over the ranks of a tensor that each has; in place."""
    if _ranks.count > 1:
        dist.all_reduce(tensor)
    return tensor


# ---- models in shards ------------------------------------------------------------------------------------------------


def shard(model: Model, layers: Iterable[Any], embedding: Any, head: Any) -> None:
    """Let each rank hold its share of a model, in place; the model then computes through `inside` alone.

    The model may be in CPU memory: one unit at a time is whole on the GPU.
    """
    if _ranks.mesh is None:
        return
    half = next(model.parameters()).dtype in HALF
    options: dict[str, Any] = {
        "mesh": _ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False),
    }
    for layer in layers:
        fully_shard(layer, **options)
    if embedding.weight is head.weight:
        fully_shard([embedding, head], **options, reshard_after_forward=False)
    else:
        fully_shard(embedding, **options).set_unshard_in_backward(False)
        fully_shard(head, **options, reshard_after_forward=False)
    fully_shard(model, **options)
    head.forward, model.forward = partial(_call_head, head), _call
    for part in _sharded(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def inside(module: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function where the weights of a module, a model or its head, are whole; those of layers come in their turn."""
    if not isinstance(module, FSDPModule):
        return function(*arguments)
    whole: Any = module
    return cast("T", whole(function, *arguments))


def _call(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def _call_head(head: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of the head, which is whole now; its gradient leaves it in the dtype that it is summed in."""
    weight = head.weight
    if weight.requires_grad and weight.dtype in HALF and hasattr(weight, "grad_dtype"):
        weight.grad_dtype = torch.float32
    return function(*arguments)


def _sharded(model: Model) -> list[FSDPModule]:
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def settle(model: Model) -> None:
    """Let go of weights that a pass without a backward pass left whole."""
    for part in _sharded(model):
        part.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a sharded tensor; any other is itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_of(whole: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this rank holds of it, as a view."""
    if _ranks.count == 1:
        return whole
    rows = -(-whole.shape[0] // _ranks.count)
    return whole[rows * _ranks.rank : rows * (_ranks.rank + 1)]


def as_sharded(share: Tensor, like: Tensor) -> Tensor:
    """Return this rank's share as the sharded tensor that it is of, with the global shape of `like`."""
    if not isinstance(like, DTensor):
        return share
    mesh = like.device_mesh
    if share.device.type != mesh.device_type:  # offloaded
        mesh = DeviceMesh.from_group(cast("dist.ProcessGroup", _ranks.cpu), share.device.type)
    return DTensor.from_local(share, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())


def whole_tensors(model: Model, *, trained_alone: bool) -> dict[str, Tensor]:
    """Return a model's tensors by name, whole, on rank 0 in CPU memory; on the others nothing.

    One at a time is gathered, so no GPU holds the model; tied ones are one tensor.
    """
    settle(model)
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if trained_alone and not value.requires_grad:
            continue
        if id(value) not in seen:
            tensor = value.detach()
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            seen[id(value)] = tensor.cpu() if _ranks.rank == 0 else tensor.new_empty(0)
        found[name] = seen[id(value)]
    return found if _ranks.rank == 0 else {}
