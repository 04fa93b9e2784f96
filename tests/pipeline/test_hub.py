"""Teachers and corpora on the Hugging Face Hub, asked by HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

import teachercache
from pipeline.config import TeacherConfig, load_job
from pipeline.corpus.inputs import expand, fingerprint
from pipeline.planning.identity import resolve_model
from pipeline.running.job import run_job
from teachercache.errors import StoreUnavailable, TeacherCacheError, UsageError
from tests.fake_hub import Refuse
from tests.pipeline.conftest import documents, write_jsonl

TEXTS = "hf://datasets/org/texts"


def publish_texts(hub, folder: Path, *, private: bool = False) -> list[bytes]:
    files = [write_jsonl(folder / f"{name}.jsonl", part) for name, part in (("a", documents(90)), ("b", documents(3)))]
    names = ("data/a.jsonl", "data/b.jsonl")
    hub.publish(
        "datasets", "org/texts", {n: f.read_bytes() for n, f in zip(names, files, strict=True)}, private=private
    )
    return [file.read_bytes() for file in files]


def test_a_job_whose_teacher_and_corpus_are_on_the_hub(hub, job_file, tmp_path, tokenizer_folder):
    publish_texts(hub, tmp_path / "texts", private=True)
    commit = hub.publish("models", "org/teacher", {f.name: f.read_bytes() for f in tokenizer_folder.iterdir()})
    hub.publish("models", "org/teacher", {"config.json": b"{}"})  # another commit than the one that is asked for
    job = job_file(tmp_path / "cache", [f"{TEXTS}/data/a*.jsonl"], teacher={"model": "org/teacher", "revision": commit})
    assert run_job(load_job(job)).outcome.tally.committed > 1
    cache = teachercache.open(tmp_path / "cache")
    assert {record.doc_id for record in cache.records()} == {f"doc{i}" for i in range(90)}
    assert run_job(load_job(job)).outcome.tally.committed == 0, "the same corpus is the same shards"


def test_the_digest_of_an_lfs_file_costs_no_download_and_is_that_of_its_content(hub, tmp_path):
    large, small = publish_texts(hub, tmp_path)
    (tmp_path / "large").write_bytes(large)
    (tmp_path / "small").write_bytes(small)
    assert fingerprint(f"{TEXTS}/data/a.jsonl").digest == fingerprint(str(tmp_path / "large")).digest
    assert not any("/resolve/" in request for request in hub.requests)
    assert fingerprint(f"{TEXTS}/data/b.jsonl").digest == fingerprint(str(tmp_path / "small")).digest


def test_a_corpus_that_changes_is_seen(hub, tmp_path):
    publish_texts(hub, tmp_path)
    before = fingerprint(f"{TEXTS}/data/a.jsonl")
    hub.publish("datasets", "org/texts", {"data/a.jsonl": b"x" * 20_000, "data/c.jsonl": b"{}"})
    assert fingerprint(f"{TEXTS}/data/a.jsonl") != before
    assert expand([f"{TEXTS}/data/*.jsonl"]) == [f"{TEXTS}/data/a.jsonl", f"{TEXTS}/data/c.jsonl"]


@pytest.mark.parametrize("pattern", [f"{TEXTS}/data/a.jsonl", f"{TEXTS}/data/*.jsonl"])
@pytest.mark.parametrize(
    ("token", "status", "kind", "said"),
    [
        ("", None, UsageError, "refuses to give it.*HF_TOKEN"),
        ("hf_wrong_secret", None, UsageError, "refuses to give it.*HF_TOKEN"),
        ("hf_write", 503, StoreUnavailable, "does not answer"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_one_line(hub, tmp_path, monkeypatch, pattern, token, status, kind, said):
    publish_texts(hub, tmp_path, private=True)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def refuse(request: str) -> None:
        if status is not None:
            raise Refuse(status)

    hub.on_request = refuse
    with pytest.raises(TeacherCacheError, match=said) as caught:
        expand([pattern])
    assert type(caught.value) is kind
    assert hub.endpoint in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../../evil.json", "a/../../../../evil.json", "/tmp/teachercache-evil/evil.json"])
def test_a_teacher_with_a_hostile_file_name_writes_nothing_outside(hub, tmp_path, tokenizer_folder, name):
    files = {file.name: file.read_bytes() for file in tokenizer_folder.iterdir()}
    hub.publish("models", "org/teacher", files | {name: b"evil"})
    config = TeacherConfig.model_validate({"model": "org/teacher", "engine": "noop"})
    with pytest.raises(UsageError, match="Invalid filename") as caught:
        resolve_model(config)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.rglob("evil.json")) == []
    assert not Path("/tmp/teachercache-evil").exists()


def test_a_teacher_that_is_not_there_is_one_line(hub):
    config = TeacherConfig.model_validate({"model": "org/none", "engine": "noop"})
    with pytest.raises(UsageError, match="org/none: neither a folder here nor a model") as caught:
        resolve_model(config)
    assert "\n" not in str(caught.value)
