"""AdamW for float32 and for bf16 weights, its learning-rate schedule, and gradients that accumulate in float32.

bf16 weights lose updates: a weight of 1 does not move by less than 0.004. Three remedies, by configuration:
  split       float32 weight = bf16 weight + 16 low bits kept next to it: exact, 2 bytes a parameter (the default)
  float32     a float32 copy: exact, 4 bytes a parameter (what split is tested against, bit for bit)
  stochastic  no copy: round up or down with the right probability; unbiased, not exact

Bytes a parameter with float32 moments: split 2 + 2 + 8 = 12, float32 copy 14, stochastic 10; bfloat16 moments save 4.
On CUDA the update is compiled into one pass over the parameter's state (26 bytes of traffic a parameter with split).

state=offload keeps all of that but the bf16 weights in pinned CPU memory and streams it through the GPU, a parameter
ahead: the same arithmetic, so the same weights bit for bit, for 10 bytes a parameter over the bus each way and step.
Not torchao's CPUOffloadOptimizer: it takes each gradient away during the backward pass, before the norm that clips it
is known, and rounds bf16 weights to nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from teachercache.console import missing_module
from teachercache.errors import UsageError
from trainer.config import OptimConfig
from trainer.model import Model
from trainer.model.parallel import count, local, summed


def lr_factor(config: OptimConfig, step: int, progress: float) -> float:
    """Return what the peak learning rate is multiplied by at step `step` (from 0) and share `progress` of the run."""
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    progress = min(max(progress, 0.0), 1.0)
    if config.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.schedule == "wsd":
        shape = min(1.0, (1 - progress) / config.decay_fraction)
    else:
        shape = 1.0
    return warmup * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def parameter_groups(model: Model, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters: matrices decay, vectors (norms, biases) do not; shared ones appear once.

    Of a sharded one it is this rank's share, so that no optimiser needs to know of the others.
    """
    trained = [_share(parameter) for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _share(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if local(parameter) is parameter:
        return parameter
    share = torch.nn.Parameter(local(parameter.detach()))
    share.sharded = parameter  # type: ignore[attr-defined]
    return share


def build_optimizer(model: Model, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimiser that is configured. Raises UsageError for what does not go together or is not installed."""
    groups = parameter_groups(model, config.weight_decay)
    parameters = [parameter for group in groups for parameter in group["params"]]
    bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    common: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.state == "8bit":
        if config.master not in ("auto", "stochastic"):
            raise UsageError(f"optim.state=8bit rounds bf16 weights stochastically, found master={config.master}")
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            missing = ModuleNotFoundError(str(error), name="torchao")
            raise UsageError(missing_module(missing, needs="optim.state=8bit needs")) from error
        eight_bit: torch.optim.Optimizer = AdamW8bit(groups, **common, bf16_stochastic_round=bf16)
        return eight_bit
    offload = config.state == "offload"
    if offload and not all(parameter.is_cuda for parameter in parameters):
        raise UsageError("optim.state=offload moves states from a GPU to the CPU, and there is no GPU")
    if not bf16 and config.master not in ("auto", "float32"):
        raise UsageError(f"optim.master={config.master} is for bf16 weights; these are float32 already")
    if not bf16 and config.state == "float32":
        return torch.optim.AdamW(groups, **common, fused=True)
    master = "split" if config.master == "auto" else config.master
    moments = torch.bfloat16 if config.state == "bfloat16" else torch.float32
    return MixedAdamW(groups, **common, master=master, state_dtype=moments, offload=offload)


class MixedAdamW(torch.optim.Optimizer):
    """AdamW whose arithmetic is float32 while weights and moments may be held in bf16.

    master       split | float32 | stochastic: where the bits of a float32 weight are that bf16 lacks (module docstring)
    state_dtype  float32 or bfloat16 moments; bf16 moments are rounded stochastically, or the second one would never move
    offload      keep the state in pinned CPU memory; two parameters' worth of it is on the GPU at a time
    defaults     of a group: lr, betas, eps and, if not 0, weight_decay
    `grad_scale` (a 0-d tensor or None) multiplies gradients on the way in: clipping without another pass.
    A parameter's gradient is `main_grad` where it has one (float32), else `grad`.
    """

    def __init__(
        self, params: Iterable[Any], *, master: str, state_dtype: torch.dtype, offload: bool = False, **defaults: Any
    ) -> None:
        super().__init__(params, {"weight_decay": 0.0, **defaults})
        self.master, self.state_dtype, self.offload = master, state_dtype, offload
        self.grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("MixedAdamW takes no closure")
        updates = [
            (parameter, grad, group)
            for group in self.param_groups
            for parameter in group["params"]
            if (grad := gradient(parameter)) is not None
        ]
        for parameter, _, _ in updates:
            if not self.state[parameter]:
                self.state[parameter].update(self._new_state(parameter))
        states = [self.state[parameter] for parameter, _, _ in updates]
        # The stream comes first: zip asks it for one more at the end, and the last state is written back.
        for state, (parameter, grad, group) in zip(_streamed(states) if self.offload else states, updates, strict=True):
            self._update(parameter, grad, group, state)

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        zeros = torch.zeros_like(parameter, dtype=self.state_dtype)  # `_placed` copies it for each moment
        state: dict[str, Any] = {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros}
        if parameter.dtype == torch.bfloat16 and self.master == "split":
            state["low"] = torch.zeros_like(parameter, dtype=torch.int16)
        elif parameter.dtype == torch.bfloat16 and self.master == "float32":
            state["master"] = parameter.float()
        return {key: self._placed(value, parameter) for key, value in state.items()}

    def _placed(self, value: Any, parameter: Tensor) -> Any:
        """Return a piece of state where it is kept between steps."""
        if not isinstance(value, Tensor):
            return value
        return value.cpu().pin_memory() if self.offload else value.to(parameter.device, copy=True)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] += 1
        (beta1, beta2), lr = group["betas"], group["lr"]
        numbers = [lr, lr * group["weight_decay"], 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]]
        # Numbers that change from step to step travel as a tensor: as Python floats each value would be recompiled.
        scalars = torch.tensor(numbers, dtype=torch.float32).to(parameter.device, non_blocking=True)
        scale = self.grad_scale if self.grad_scale is not None else torch.ones((), device=parameter.device)
        kept = state.get("low", state.get("master"))
        tensors = (parameter.detach(), grad.contiguous(), state["exp_avg"], state["exp_avg_sq"], kept)
        flat = [None if tensor is None else tensor.view(-1) for tensor in tensors]
        update: Callable[..., None] = _compiled(adamw_update) if parameter.is_cuda else adamw_update
        update(*flat, scalars, scale, beta1, beta2, group["eps"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state as it was saved: torch's own would cast every moment to the parameter's dtype, on the GPU."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                self.state[parameter][key] = self._placed(value, parameter)


def _streamed(states: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each state as a copy on the GPU that is written back once the caller asks for the next one.

    The next state travels up while one is being updated and the last one travels down. What is on the way is bounded:
    nothing is fetched before the state two places earlier has left.
    """
    compute, up, down = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    left: list[torch.cuda.Event] = []

    def fetch(state: dict[str, Any]) -> dict[str, Any]:
        if len(left) >= 2:
            left[-2].synchronize()
        with torch.cuda.stream(up):
            return {k: v.cuda(non_blocking=True) if isinstance(v, Tensor) else v for k, v in state.items()}

    ahead = fetch(states[0]) if states else None
    for index, state in enumerate(states):
        here = ahead
        assert here is not None
        compute.wait_stream(up)
        ahead = fetch(states[index + 1]) if index + 1 < len(states) else None
        yield here
        down.wait_stream(compute)
        with torch.cuda.stream(down):
            for key, value in here.items():
                if isinstance(value, Tensor):
                    state[key].copy_(value, non_blocking=True)
                    value.record_stream(compute)
                    value.record_stream(down)
                else:
                    state[key] = value
        left.append(down.record_event())
    down.synchronize()  # the next step, or a checkpoint, reads what came down


def adamw_update(
    parameter: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    kept: Tensor | None,
    scalars: Tensor,
    grad_scale: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Take one AdamW step in place over flat tensors [n].

    kept     what a bf16 parameter lacks: int16 low bits, a float32 copy, or None
    scalars  float32 [4]: lr, lr · weight decay, 1 - β₁ᵗ, 1 - β₂ᵗ
    """
    lr, decay, correction1, correction2 = scalars.unbind()
    if kept is None:
        weight = parameter.float()
    else:
        weight = kept if kept.dtype == torch.float32 else join_float32(parameter, kept)
    g = grad.float() * grad_scale
    m = exp_avg.float() * beta1 + g * (1 - beta1)
    v = exp_avg_sq.float() * beta2 + g * g * (1 - beta2)
    weight = weight * (1 - decay) - lr * (m / correction1) / ((v / correction2).sqrt() + eps)
    if exp_avg.dtype == torch.bfloat16:
        m, v = stochastic_round(m), stochastic_round(v)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if kept is not None:
        high, low = split_float32(weight)
        parameter.copy_(high)
        kept.copy_(weight if kept.dtype == torch.float32 else low)
    else:
        parameter.copy_(stochastic_round(weight) if parameter.dtype == torch.bfloat16 else weight)


def split_float32(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into (bf16 nearest to it, int16 rest); join_float32 returns the same bits.

    Halves are rounded away from zero: rounding to even would need a rest of +32,768, which int16 lacks.
    """
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), low


def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """Join (bf16, int16 rest) to the float32 that split_float32 took apart."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def stochastic_round(value: Tensor) -> Tensor:
    """Round float32 to bf16, up or down with the probability that makes the mean exact."""
    noise = torch.randint(0, 1 << 16, value.shape, device=value.device, dtype=torch.int32)
    bits = (value.view(torch.int32) + noise) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def gradient(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient, wherever it accumulates: `main_grad` or `grad`. Of a share it is the share's."""
    parameter = getattr(parameter, "sharded", parameter)
    main: Tensor | None = getattr(parameter, "main_grad", None)
    found = main if main is not None else parameter.grad
    return None if found is None else local(found)


def accumulate_in_float32(model: Model) -> None:
    """Give every trained parameter a float32 `main_grad` that micro-batches add to; `grad` is freed at once.

    The fused loss adds to the head's `main_grad` directly, without rounding to bf16 in between. 4 bytes a parameter.
    """

    def fold(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
            parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.register_post_accumulate_grad_hook(fold)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimiser make its state, as it does in its first step: one of zero gradients and no learning rate."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(0.0)
        else:
            group["lr"] = 0.0
        for parameter in group["params"]:
            whole = getattr(parameter, "sharded", parameter)
            if gradient(parameter) is None:
                whole.grad = torch.zeros_like(whole)
    parameters = [getattr(p, "sharded", p) for group in optimizer.param_groups for p in group["params"]]
    apply_step(optimizer, torch.zeros((), device=parameters[0].device), None)
    clear_gradients(parameters)


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Drop `grad` and zero `main_grad`."""
    for parameter in parameters:
        parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm over all gradients, summed in float32: a 0-d tensor. ValueError where there is none.

    Of several ranks each adds the squares of its shares.
    """
    grads = [grad for grad in map(gradient, parameters) if grad is not None]
    if not grads:
        raise ValueError("no parameter has a gradient: is anything trained?")
    # The same device and order every time, so the sum is reproducible.
    norms = torch._foreach_norm(grads, 2, dtype=torch.promote_types(grads[0].dtype, torch.float32))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm if count() == 1 else summed(norm.square()).sqrt()


@torch.no_grad()
def apply_step(optimizer: torch.optim.Optimizer, norm: Tensor, clip_norm: float | None) -> None:
    """Clip to `clip_norm` and take the step, whichever optimiser it is."""
    scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0) if clip_norm is not None else torch.ones_like(norm)
    if isinstance(optimizer, MixedAdamW):
        optimizer.grad_scale = scale
    else:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            grad = gradient(parameter)
            parameter.grad = None if grad is None else (grad * scale).to(parameter.dtype)
    optimizer.step()
    if count() > 1:
        optimizer.zero_grad()  # of the shares; those of the model's parameters go before the next step
