"""bf16 weights train like float32 ones: the split is exact, the rounding unbiased, the schedule as drawn."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachercache.errors import UsageError
from trainer.config import OptimConfig
from trainer.optim import (
    MixedAdamW,
    apply_step,
    build_optimizer,
    join_float32,
    lr_factor,
    split_float32,
    stochastic_round,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)


@settings(max_examples=300, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=50))
def test_a_split_float32_comes_back_bit_for_bit(values: list[float]) -> None:
    value = torch.tensor(values, dtype=torch.float32)
    high, low = split_float32(value)
    assert torch.equal(join_float32(high, low).view(torch.int32), value.view(torch.int32))


def test_the_high_half_is_the_nearest_bf16() -> None:
    value = torch.randn(100_000) * torch.logspace(-20, 20, 100_000)
    high, _ = split_float32(value)
    nearest = value.to(torch.bfloat16)
    assert ((high.float() - value).abs() <= (nearest.float() - value).abs()).all()


def test_stochastic_rounding_is_unbiased() -> None:
    torch.manual_seed(0)
    value = torch.full((200_000,), 1.0 + 0.3 / 128)  # between 1 and the next bf16, 1 + 1/128
    rounded = stochastic_round(value).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 1 / 128}
    assert rounded.double().mean().item() == pytest.approx(1.0 + 0.3 / 128, abs=4e-5)


def model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(dtype)


def train(master: str, state: str, steps: int = 300, lr: float = 1e-3) -> tuple[torch.nn.Module, float]:
    """Fit a fixed random function in bf16 with tiny steps; returns the model and the last mean loss."""
    torch.manual_seed(1)
    x, y = torch.randn(256, 32), torch.randn(256, 8)
    trained = model(torch.bfloat16)
    config = OptimConfig(lr=lr, master=master, state=state, weight_decay=0.01)
    optimizer = build_optimizer(trained, config)
    losses = []
    for _ in range(steps):
        loss = (trained(x.bfloat16()).float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        apply_step(optimizer, torch.tensor(1.0), None)
        losses.append(loss.item())
    return trained, sum(losses[-20:]) / 20


def test_split_weights_train_bit_for_bit_like_a_float32_copy() -> None:
    split, copied = train("split", "float32", 50)[0], train("float32", "float32", 50)[0]
    assert all(torch.equal(a, b) for a, b in zip(split.parameters(), copied.parameters(), strict=True))


def test_a_float32_copy_trains_like_torchs_own_adamw() -> None:
    ours, theirs = model(torch.float32), model(torch.float32)
    a = MixedAdamW(
        [{"params": list(ours.parameters()), "weight_decay": 0.01}],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8, master="float32", state_dtype=torch.float32,
    )  # fmt: skip
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    x = torch.randn(16, 32)
    for _ in range(20):
        for network, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            network(x).square().sum().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rounded_states_converge_like_the_float32_copy_and_plain_bf16_does_not() -> None:
    exact = train("float32", "float32", lr=2e-4)[1]
    found = {
        "split, bfloat16 moments": train("split", "bfloat16", lr=2e-4)[1],
        "stochastic, float32 moments": train("stochastic", "float32", lr=2e-4)[1],
        "stochastic, bfloat16 moments": train("stochastic", "bfloat16", lr=2e-4)[1],
    }
    torch.manual_seed(1)
    x, y = torch.randn(256, 32), torch.randn(256, 8)
    plain = model(torch.bfloat16)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(300):
        loss = (plain(x.bfloat16()).float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"float32 copy {exact:.4f}, {found}, plain bf16 {loss.item():.4f}")
    for value in found.values():
        assert value == pytest.approx(exact, rel=0.01)
    assert loss.item() > exact * 1.01


@pytest.mark.parametrize("master", ["split", "float32", "stochastic"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_a_saved_optimizer_continues_bit_for_bit(master: str, state: str, tmp_path) -> None:
    config = OptimConfig(lr=1e-2, master=master, state=state)
    first = model(torch.bfloat16)
    optimizer = build_optimizer(first, config)
    x = torch.randn(4, 32).bfloat16()

    def step(network: torch.nn.Module, by: torch.optim.Optimizer) -> None:
        by.zero_grad()
        network(x).float().square().sum().backward()
        by.step()

    for _ in range(3):
        step(first, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    second = copy.deepcopy(first)
    resumed = build_optimizer(second, config)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for network, by in ((first, optimizer), (second, resumed)):
        torch.manual_seed(7)
        for _ in range(3):
            step(network, by)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    for a, b in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert {key: getattr(value, "dtype", None) for key, value in a.items()} == {
            key: getattr(value, "dtype", None) for key, value in b.items()
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_adamw_takes_the_configured_betas_and_eps(dtype: torch.dtype) -> None:
    groups = build_optimizer(model(dtype), OptimConfig(betas=(0.8, 0.9), eps=1e-3)).param_groups
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.8, 0.9, 1e-3)}


def test_clipping_scales_the_gradient_once_for_every_optimizer() -> None:
    for dtype, config in ((torch.float32, OptimConfig()), (torch.bfloat16, OptimConfig())):
        a, b = model(dtype), model(dtype)
        for network, factor, norm, clip in ((a, 10.0, 100.0, 10.0), (b, 1.0, 1.0, None)):
            optimizer = build_optimizer(network, config)
            for parameter in network.parameters():
                parameter.grad = torch.full_like(parameter, factor)
            apply_step(optimizer, torch.tensor(norm), clip)
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-3)


def test_eight_bit_moments_come_from_torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: it is part of the CUDA environment only")
    network = model(torch.bfloat16)
    optimizer = build_optimizer(network, OptimConfig(state="8bit"))
    assert type(optimizer).__module__.startswith("torchao")
    with pytest.raises(UsageError, match="rounds bf16 weights stochastically"):
        build_optimizer(network, OptimConfig(state="8bit", master="split"))


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_schedules_warm_up_and_end_where_they_should(schedule: str) -> None:
    config = OptimConfig(warmup_steps=9, schedule=schedule, min_lr_ratio=0.1, decay_fraction=0.2)
    warm = [lr_factor(config, step, 0.0) for step in range(10)]
    assert warm == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert lr_factor(config, 100, 1.0) == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert lr_factor(config, 100, 0.7) == pytest.approx(
        {"cosine": 0.2855, "wsd": 1.0, "constant": 1.0}[schedule], abs=1e-3
    )
    assert lr_factor(config, 100, 0.9) == pytest.approx(
        {"cosine": 0.122, "wsd": 0.55, "constant": 1.0}[schedule], abs=1e-3
    )
