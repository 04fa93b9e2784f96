"""A run over a top-K and a sampled cache: exact resumption, figures for each cache, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import teachercache
from teachercache.errors import UsageError
from teachercache.format.spec import SampledRows
from teachercache.store.ledger import Ledger
from teachercache.testing import synthetic_records, synthetic_spec
from tests.trainer import runs, tiny
from trainer import setup
from trainer.config import TrainerConfig, load_config
from trainer.data import PackedCache
from trainer.evaluate import evaluate_cache
from trainer.model import student as students
from trainer.optim import build_optimizer
from trainer.step import Step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sampled_url(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> str:
    return tiny.make_cache(
        str(tmp_path_factory.mktemp("sampled") / "drawn"), teacher, rows=SampledRows(entries=12, exact=3), seed=7
    )


@pytest.fixture
def settings(cache_url: str, sampled_url: str, student: Path, tmp_path: Path) -> dict[str, Any]:
    entries = [{"url": cache_url, "weight": 0.6, "name": "top"}, {"url": sampled_url, "weight": 0.4}]
    return {
        "student": str(student),
        "output": str(tmp_path / "run"),
        "data": {"seq_len": 128, "batch_tokens": 384, "caches": entries},
        "optim": {"lr": 3e-3, "warmup_steps": 2, "schedule": "constant"},
        "train": {"max_steps": 9, "threads": 1, "deterministic": True},
        "eval": {"every_steps": 9, "max_rows": 200},
        "log": {"tensorboard": False},
    }


def test_a_run_over_both_kinds_resumes_bit_for_bit_and_says_how_each_does(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.write_config(tmp_path / "train.yaml", **settings)
    summary = runs.fit_here(config)
    said = capsys.readouterr().err
    assert "mixture: top 60.0% (100% read), drawn 40.0% (" in said
    assert "step 9, drawn: held-out KL" in said
    for stop in (4, 7):
        runs.fit_here(config, f"output={tmp_path / 'again'}", f"train.max_steps={stop}", "eval.every_steps=null")
    assert runs.fit_here(config, f"output={tmp_path / 'again'}")["heldout_kl"] == summary["heldout_kl"]
    whole, again = (load_file(tmp_path / name / "final/model.safetensors") for name in ("run", "again"))
    assert all(again[key].equal(value) for key, value in whole.items())
    log = runs.metrics(tmp_path / "run")
    timing = ("seconds", "data_wait_s", "tokens_per_s", "tflops", "progress")
    for a, b in zip(log, runs.metrics(tmp_path / "again"), strict=True):
        assert {k: v for k, v in a.items() if k not in timing} == {k: v for k, v in b.items() if k not in timing}
    for line in log:
        parts = [(line.get(f"loss/{name}", 0.0), line.get(f"rows/{name}", 0)) for name in ("top", "drawn")]
        assert sum(n for _, n in parts) == line["rows"]
        assert sum(loss * n for loss, n in parts) / line["rows"] == pytest.approx(line["loss"], rel=1e-5)
    (found,) = runs.metrics(tmp_path / "run", "eval")
    assert found["heldout_kl"] == pytest.approx(0.6 * found["heldout_kl/top"] + 0.4 * found["heldout_kl/drawn"])
    assert "heldout_kl_standard_error/drawn" in found
    assert "heldout_kl_standard_error/top" not in found
    evaluated = evaluate_cache(load_config(config, [f"student={tmp_path / 'run'}"]), "heldout")
    assert evaluated["heldout_kl/drawn"] == found["heldout_kl/drawn"]
    state = json.loads(next((tmp_path / "run").glob("step-*/trainer_state.json")).read_text())
    digests = [teachercache.open(entry["url"]).manifest.digest for entry in settings["data"]["caches"]]
    assert [part["manifest"] for part in state["data"]["caches"]] == digests


def test_a_list_of_one_cache_is_measured_and_registered_under_its_name(
    settings: dict[str, Any], cache_url: str, tmp_path: Path
) -> None:
    cache = shutil.copytree(cache_url, tmp_path / "own")
    data = settings["data"] | {"caches": [{"url": str(cache), "weight": 2, "name": "web"}]}
    training = settings["train"] | {"max_steps": 2, "register": True}
    config = runs.write_config(tmp_path / "one.yaml", **(settings | {"data": data, "train": training}))
    summary = runs.fit_here(config, "eval.every_steps=2")
    (found,) = runs.metrics(tmp_path / "run", "eval")
    (entry,), _ = Ledger.open(cache).runs()
    assert entry.heldout_kl == summary["heldout_kl"] == found["heldout_kl"] == found["heldout_kl/web"]


def test_the_gradient_of_mixed_sequences_is_that_of_their_rows(
    cache_url: str, sampled_url: str, settings: dict[str, Any], student: Path
) -> None:
    """One step over both kinds equals, in its gradient, the sum over rows of each kind alone / all rows."""
    top, drawn = (next(iter(PackedCache(teachercache.open(url), seq_len=128))) for url in (cache_url, sampled_url))
    batch = [top, replace(drawn, cache=1)]
    rows = top.num_rows + drawn.num_rows

    def gradients(sequences: list[Any], **options: Any) -> list[torch.Tensor]:
        config = TrainerConfig.model_validate(settings | options)
        model = students.load_student(student, dtype=torch.float32, device=CPU).train()
        step = Step(model, build_optimizer(model, config.optim), config, attention_kind="documents", vocab_size=320)
        for sequence in sequences:
            step.loss(sequence, num_valid=rows).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    apart = [gradients([top], loss={"tail": "bucket"}), gradients([drawn], loss={"tail": "sampled"})]
    for both, one, other in zip(gradients(batch), *apart, strict=True):
        torch.testing.assert_close(both, one + other)


def test_what_cannot_be_mixed_is_refused_in_one_line(
    settings: dict[str, Any], sampled_url: str, cache_url: str, tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(sampled_url, copy)
    for source in ("web", "code"):
        writer = teachercache.create(str(other / source), synthetic_spec(), probe=False)
        writer.commit("shard", synthetic_records(synthetic_spec(), 3, source=source, prefix=source))
        writer.publish(allow_partial=True)
    web, code = other / "web", other / "code"

    def checked(config: TrainerConfig) -> None:
        setup.check_names(config, setup.open_caches(config))

    def refused(message: str, *overrides: str) -> None:
        with pytest.raises(UsageError, match=message):
            checked(load_config(runs.write_config(tmp_path / "train.yaml", **settings), overrides))

    two = "data.caches=[{url: %s, weight: 1}, {url: %s, weight: %s}]"
    refused("the same cache twice", two % (cache_url, cache_url + "/", 1))
    refused("the same cache twice", two % (sampled_url, copy, 1))
    refused(r"one tokenizer, but \S+ was made with \w{12} \([\d,]+ tokens\) and", two % (cache_url, web, 1))
    refused("set a name for one", two % ("a/x", "b/x", 1))
    refused("greater than 0", two % ("a", "b", 0))
    refused("greater than 0", two % ("a", "b", -1))
    refused("plain decimals", two % ("a", "b", ".nan"))
    refused("unknown key data.caches.0.wieght.*did you mean data.caches.0.weight", "data.caches=[{url: a, wieght: 1}]")
    refused("lacks data.caches.0.weight", "data.caches=[{url: a}]")
    refused("both set", f"cache={cache_url}")
    refused("manifest and data.caches are both set", "manifest=1")
    refused("lacks cache", "data.caches=[]")
    refused(f"{sampled_url} has sampled.*tail='bucket' does not go", "loss.tail=bucket")
    refused(f"{cache_url} has top-16 rows.*tail='sampled' needs", "loss.tail=sampled")
    refused("only 3 entries of a sampled row of", "data.top_k=4")
    refused(r"data.caches.1.split: .* no records of split 'trian'.*did you mean train", "data.caches.1.split=trian")
    refused("data.weights names x, but split train of .* and split train of .* has the sources", "data.weights={x: 1}")
    refused(
        "data.weights leaves nothing of split train of .*code", two % (web, code, 1), "data.weights={web: 1}", "eval={}"
    )


def test_a_resumed_run_has_the_same_caches(settings: dict[str, Any], cache_url: str, tmp_path: Path) -> None:
    config = runs.write_config(tmp_path / "train.yaml", **(settings | {"eval": {}}))
    runs.fit_here(config, "train.max_steps=1")
    top, drawn = settings["data"]["caches"]
    for entries, message in (
        ([top], "trained from 2 caches, the configuration names 1"),
        ([drawn, top], "trained from another cache"),
        ([top, drawn | {"weight": 0.5}], r"started with data.caches.1.weight = 0.4, found 0.5"),
        ([top, drawn | {"name": "x"}], r"started with data.caches.1.name = drawn, found x"),
        ([top, drawn | {"manifest": 9}], "pinned to manifest 1 of"),
    ):
        with pytest.raises(UsageError, match=message):
            runs.fit_here(config, f"data.caches={json.dumps(entries)}")
    with pytest.raises(UsageError, match="trained from 2 caches"):
        runs.fit_here(config, f"cache={cache_url}", "data.caches=[]")


def test_a_run_takes_the_mean_of_two_teachers(
    settings: dict[str, Any], teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One loss, held-out KL to each teacher, exact resumption; what a mean of rows cannot give is refused."""
    teachers = [teacher, tiny.make_model(tmp_path / "other", seed=5)]
    urls = [
        tiny.make_cache(str(tmp_path / name), folder, rows=SampledRows(entries=12, exact=3), documents=20)
        for name, folder in zip(("one", "two"), teachers, strict=True)
    ]
    entries = [{"url": url, "weight": weight} for url, weight in zip(urls, (3, 1), strict=True)]
    data = settings["data"] | {"batch_tokens": 128, "caches": entries, "combine": "mean"}
    training = settings["train"] | {"max_steps": 4}
    config = runs.write_config(tmp_path / "mean.yaml", **(settings | {"data": data, "train": training}))
    summary = runs.fit_here(config, "eval.every_steps=4", "train.register=true")
    assert "combine: the mean of 2 teachers' rows for 20 records" in capsys.readouterr().err
    assert summary["data"]["not_in_all"] == 0
    log = runs.metrics(tmp_path / "run")
    assert all("loss" in line and not any(key.startswith("loss/") for key in line) for line in log)
    (found,) = runs.metrics(tmp_path / "run", "eval")
    assert found["heldout_kl"] == pytest.approx(0.75 * found["heldout_kl/one"] + 0.25 * found["heldout_kl/two"])
    (tmp_path / "run/summary.json").unlink()  # as if it was killed when its last checkpoint was saved
    index = tmp_path / "run/checkpoints.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"finished": False}))
    assert runs.fit_here(config, "eval.every_steps=4", "train.register=true") == summary
    for url, name in zip(urls, ("one", "two"), strict=True):
        (entry,), _ = Ledger.open(url).runs()
        assert (entry.steps, entry.heldout_kl) == (4, found[f"heldout_kl/{name}"])
    again = [f"output={tmp_path / 'again'}"]
    runs.fit_here(config, *again, "train.max_steps=3", "eval={}")
    with pytest.raises(UsageError, match=r"started with data\.combine = mean, found None"):
        runs.fit_here(config, *again, "data.combine=null")
    runs.fit_here(config, *again)
    ours, theirs = (load_file(tmp_path / name / "final/model.safetensors") for name in ("run", "again"))
    assert all(ours[key].equal(value) for key, value in theirs.items())

    def refused(message: str, *overrides: str) -> None:
        with pytest.raises(UsageError, match=message):
            runs.fit_here(config, f"output={tmp_path / 'no'}", *overrides)

    top = settings["data"]["caches"][0]["url"]
    refused("has top-16 rows: each teacher leaves out other tokens", f"data.caches.1.url={top}")
    refused("several data.caches, found 1", f"data.caches=[{{url: {top}, weight: 1}}]")
    refused("goes without data.top_k", "data.top_k=2")
    refused("goes without data.rows", "data.rows.entropy_above=1")
    refused("loss.method=online reads none", "loss.method=online", f"teacher={teacher}")
    refused("temperature 1 alone", "loss.temperature=2")
    refused("data.weights names x, but split train of \\S+/one has the sources default", "data.weights={x: 1}")
