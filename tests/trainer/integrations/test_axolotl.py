"""The axolotl plugin through axolotl's own PluginManager and trainer: fit's losses on the same batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from teachercache.errors import UsageError
from tests.trainer.integrations.conftest import LR, PER_STEP, ROOT, SEQ_LEN, STEPS
from tests.trainer.integrations.two_ranks import arguments_of, losses

try:
    from trainer.integrations.axolotl import CacheArguments
except UsageError as error:
    pytest.skip(f"{error} (alone, with addict)", allow_module_level=True)
from axolotl.core.training_args_base import AxolotlTrainingMixins
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault


@dataclass
class AxolotlTrainingArguments(AxolotlTrainingMixins, TrainingArguments):
    """As axolotl makes it, in a module that needs its own version of TRL."""


@pytest.fixture
def plugins():
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    manager.register(yaml.safe_load((ROOT / "examples/axolotl_cache.yaml").read_text())["plugins"][0])
    yield manager
    manager.plugins.clear()


def config(url: str, **changes) -> DictDefault:
    """The example's file on a small cache."""
    file = yaml.safe_load((ROOT / "examples/axolotl_cache.yaml").read_text())
    settings = {**file["teachercache"], "url": url, **changes.pop("teachercache", {})}
    return DictDefault({**file, "sequence_len": SEQ_LEN, "max_steps": STEPS, "teachercache": settings, **changes})


def trainer_of(plugins, cfg, student, output, **options):
    model = AutoModelForCausalLM.from_pretrained(student)
    plugins.post_model_load(cfg, model)
    meta = plugins.load_datasets(cfg)
    arguments = arguments_of(output, AxolotlTrainingArguments, max_steps=meta.total_num_steps, **options)
    return plugins.get_trainer_cls(cfg)(
        model=model, args=arguments, train_dataset=meta.train_dataset, eval_dataset=meta.eval_dataset,
        processing_class=AutoTokenizer.from_pretrained(student), dataset_tags=["unused"],
    )  # fmt: skip


@pytest.mark.parametrize("rows", ["top_k", "sampled"])
def test_losses_are_those_of_fit(rows, plugins, student, caches, fit_losses, tmp_path):
    cfg = config(caches[rows], teachercache={"objective": {}})
    trainer = trainer_of(plugins, cfg, student, tmp_path, gradient_accumulation_steps=PER_STEP, learning_rate=LR)
    trainer.train()
    assert losses(trainer) == pytest.approx(fit_losses(rows), abs=1e-5)


def test_the_example_learns(plugins, student, cache_url, tmp_path):
    trainer = trainer_of(plugins, config(cache_url, max_steps=30), student, tmp_path, learning_rate=1e-2)
    before = trainer.evaluate()["eval_heldout_kl"]
    trainer.train()
    assert trainer.evaluate()["eval_heldout_kl"] < 0.8 * before


def test_the_plugins_keys_are_checked(plugins, cache_url):
    assert plugins.get_input_args() == [f"{CacheArguments.__module__}.CacheArguments"]
    with pytest.raises(ValueError, match="heldut"):
        plugins.load_datasets(config(cache_url, teachercache={"heldut": "heldout"}))
    with pytest.raises(UsageError, match="val_set_size splits no cache"):
        plugins.load_datasets(config(cache_url, val_set_size=0.1))
    with pytest.raises(UsageError, match=r"whole number, found 1\.5"):
        plugins.load_datasets(config(cache_url, num_epochs=1.5))
    with pytest.raises(UsageError, match="needs max_steps"):
        plugins.load_datasets(config(cache_url, max_steps=None))
    with pytest.raises(ValueError, match="divergence='reverse' needs tail='bucket'"):
        plugins.get_trainer_cls(
            config(cache_url, teachercache={"objective": {"tail": "none", "divergence": "reverse"}})
        )
