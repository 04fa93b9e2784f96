"""Options: which combinations are accepted, and that their names are spelled in one place."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest
import torch

import trainer.losses
import trainer.step
from tests.trainer.losses.cases import accepted_kd, exact, make_case, run
from trainer.config import LossConfig
from trainer.losses import kl_loss
from trainer.losses.fused import fused_kl
from trainer.losses.options import OPTION_NAMES, LossOptions, Objective


def signatures() -> Iterator[tuple[str, inspect.Signature]]:
    """Every function and method that trainer.losses and trainer.step define outside options.py.

    Triton's kernels are left out: they take numbers alone.
    """
    modules = [trainer.step]
    for found in pkgutil.iter_modules(trainer.losses.__path__):
        if found.name not in ("options", "row_triton"):
            modules.append(importlib.import_module(f"trainer.losses.{found.name}"))
    for module in modules:
        for name, value in vars(module).items():
            members = vars(value).items() if inspect.isclass(value) else [("", value)]
            for member, function in members:
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    yield f"{module.__name__}.{name} {member}", inspect.signature(function)


def test_the_options_names_are_spelled_in_one_place() -> None:
    seen = dict(signatures())
    assert "trainer.losses.kl.kl_loss " in seen
    assert "trainer.step.Step loss" in seen
    spelled = {where: set(OPTION_NAMES) & set(signature.parameters) for where, signature in seen.items()}
    assert {where: names for where, names in spelled.items() if names} == {}
    schema = [argument.name for argument in fused_kl._opoverload._schema.arguments]
    assert schema[-len(OPTION_NAMES) :] == list(OPTION_NAMES)


def test_the_configuration_takes_the_options_fields_and_their_validation() -> None:
    fields = [field.name for field in dataclasses.fields(Objective)]
    assert list(OPTION_NAMES) == [*fields, "softcap"]
    assert set(LossConfig.model_fields) == {*fields, "method", "chunk_size", "recompute", "rows"}
    assert "softcap" not in LossConfig.model_fields  # the student's head has it
    for name in fields:
        assert LossConfig.model_fields[name].description
        assert LossConfig.model_fields[name].default == getattr(LossOptions(), name)
    config = LossConfig.model_validate({"divergence": "jsd", "jsd_beta": 0.2, "temperature": 2})
    assert config.for_head(30.0) == LossOptions(divergence="jsd", jsd_beta=0.2, temperature=2.0, softcap=30.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        LossConfig.model_validate({"temperature": 0})


def test_options_and_keywords_are_one_call() -> None:
    case = make_case()
    options = {"divergence": "reverse", "temperature": 2.0, "softcap": 5.0}
    truth = exact(case, options)
    for call in (
        options,
        {"options": LossOptions(**options)},
        {"options": LossOptions(divergence="reverse", softcap=5.0), "temperature": 2.0},
    ):
        assert run(case, call).relative_error(truth) <= 5e-6
    assert torch.equal(run(case, {}).loss, run(case, {"options": LossOptions()}).loss)
    with pytest.raises(TypeError, match="temprature"):
        kl_loss(case.hidden, case.head_weight, case.rows, temprature=2.0)
    with pytest.raises(ValueError, match="online_kl_loss"):
        kl_loss(case.hidden, case.head_weight, case.rows, tail=None)


def test_options_survive_the_operators_flat_arguments() -> None:
    for kd in accepted_kd():
        options = LossOptions(**kd, softcap=3.0)
        assert LossOptions(*options.to_scalars()) == options


def test_the_table_of_accepted_combinations_is_complete() -> None:
    accepted = {(kd["divergence"], kd["tail"], kd["temperature"] != 1.0) for kd in accepted_kd()}
    assert accepted == {
        ("forward", "bucket", False),
        ("forward", "bucket", True),
        ("reverse", "bucket", False),
        ("reverse", "bucket", True),
        ("jsd", "bucket", False),
        ("jsd", "bucket", True),
        ("forward", "none", False),
        ("forward", "renormalize", False),
        ("forward", "renormalize", True),
        ("forward", "sampled", False),
    }
