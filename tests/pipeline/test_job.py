"""A whole job: what a user gets wrong is one line and exit status 2, and nothing is written; what dies is resumed."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

import teachercache
from tests.pipeline.conftest import (
    check_complete,
    command,
    documents,
    environment,
    make_tokenizer,
    pipeline,
    poison_id,
    verify,
    write_jsonl,
)
from tests.waiting import wait_for

# -- misuse ------------------------------------------------------------------------------------------------------


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """The error: exit status 2, one line on standard error that begins with `error:`, no traceback."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_wrong_teacher_path(job_file, tmp_path):
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(3))])
    line = one_line(pipeline("run", job, "teacher.model=/no/such/folder"))
    assert "/no/such/folder" in line
    assert not (tmp_path / "cache").exists()


def tiny_teacher(folder: Path, padding: int = 0) -> Path:
    """A real `hf` teacher: a tiny random Llama, whose head has `padding` more rows than the tokenizer has tokens."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    make_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size = teachercache.fingerprint_tokenizer(folder).vocab_size + padding
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=size, max_position_embeddings=512, initializer_range=0.3, **sizes)
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_a_teacher_with_a_padded_head_gives_rows_without_its_padding(job_file, tmp_path, kind):
    """All of a job's documents are kept; a top-K row's tail holds the padding's mass, a sampled row has none of it."""
    folder = tiny_teacher(tmp_path / "teacher", padding=64)
    teacher = {"model": str(folder), "engine": "hf", "dtype": "float32"}
    rows = {"entries": 16} if kind == "top_k" else {"kind": "sampled", "entries": 16, "exact": 4}
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    result = pipeline("run", job_file(tmp_path / "cache", [path], teacher=teacher, rows=rows))
    assert result.returncode == 0, result.stdout + result.stderr
    cache = teachercache.open(str(tmp_path / "cache"))
    size = cache.spec.tokenizer.vocab_size
    assert (cache.manifest.documents, dict(cache.manifest.drops)) == (30, {})

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    padded = 0
    for record in cache.records():
        assert record.topk_ids.max() < size
        with torch.no_grad():
            logits = (
                model(torch.from_numpy(record.input_ids[None].astype(np.int64)))
                .logits[0, record.row_pos.copy()]
                .double()
            )
        padded += int((logits.argmax(1) >= size).sum())
        if kind == "sampled":
            p = torch.softmax(logits[:, :size], 1)
            assert np.exp(record.topk_logprobs).sum(1) == pytest.approx(1, abs=0.01)
        else:
            p = torch.softmax(logits, 1)
            outside = 1 - p.gather(1, torch.from_numpy(record.topk_ids.astype(np.int64))).sum(1).numpy()
            np.testing.assert_allclose(np.exp(record.tail_logprob), outside, atol=1e-4)
        np.testing.assert_allclose(record.topk_logprobs[:, 0], p[:, :size].amax(1).log(), atol=5e-3)
    assert padded > 100, "the padding ranks first in many rows"


@pytest.mark.slow
def test_a_teacher_whose_weights_are_a_pointer_leaves_nothing_and_the_same_command_then_works(job_file, tmp_path):
    folder = tiny_teacher(tmp_path / "teacher")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {len(whole)}\n")
    teacher = {"model": str(folder), "engine": "hf", "dtype": "float32"}
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(3))], teacher=teacher)
    line = one_line(pipeline("run", job))
    assert f"{weights} is a pointer of Git LFS" in line
    assert not (tmp_path / "cache").exists()
    weights.write_bytes(whole)
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    check_complete(tmp_path / "cache", {f"doc{i}" for i in range(3)})


@pytest.mark.slow
def test_unknown_key_names_its_neighbour(job_file, tmp_path):
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(3))])
    assert "did you mean run.actors?" in one_line(pipeline("run", job, "run.actorz=3"))
    tree = yaml.safe_load(job.read_text())
    tree["corpora"][0]["feilds"] = {}
    job.write_text(yaml.safe_dump(tree))
    assert "did you mean corpora.0.fields?" in one_line(pipeline("run", job))
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_cache_of_another_teacher(job_file, tmp_path):
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", documents(3))])
    assert pipeline("run", job).returncode == 0
    before = sorted(p for p in (tmp_path / "cache").rglob("*"))
    assert "rows.entries: ours 9" in one_line(pipeline("run", job, "rows.entries=9"))
    assert sorted(p for p in (tmp_path / "cache").rglob("*")) == before


@pytest.mark.slow
def test_wrong_credentials(job_file, tmp_path, s3_server, monkeypatch):
    """moto and localbucket accept any key; nanio checks signatures."""
    server = s3_server("nanio")
    bucket = server.new_bucket()
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    job = job_file(f"{bucket}/cache", [write_jsonl(tmp_path / "a.jsonl", documents(3))])
    line = one_line(pipeline("run", job))
    assert "wrong" not in line.replace("wrong credentials", "")


@pytest.mark.slow
def test_store_without_conditional_writes_is_refused_before_a_teacher_starts(job_file, tmp_path, unsafe_s3_url):
    job = job_file(f"{unsafe_s3_url}/cache", [write_jsonl(tmp_path / "a.jsonl", documents(3))])
    assert "conditional" in one_line(pipeline("run", job))


# -- documents ---------------------------------------------------------------------------------------------------


def bad_corpus(path: Path) -> Path:
    good = documents(5)
    lines: list[bytes] = [json.dumps(d).encode() for d in good]
    lines += [
        json.dumps({"id": "empty", "text": ""}).encode(),
        json.dumps({"id": "blank", "text": " \n\t "}).encode(),
        json.dumps({"id": "long", "text": "x" * 2000}).encode(),
        b'{"id": "utf8", "text": "caf\xe9"}',
        json.dumps({"id": "doc0-again", "text": good[0]["text"]}).encode(),
        json.dumps({"id": "doc1", "text": "another text under an id that is taken"}).encode(),
        json.dumps({"id": "no-text"}).encode(),
        json.dumps({"id": "number", "text": 7}).encode(),
        json.dumps({"id": "controls", "text": "a\x00b\x07c"}).encode(),
        b'{"id": "broken", "text": "no end',
        b"[1, 2, 3]",
        b'{"id": "half", "text": "half a pair \\ud800"}',
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


EXPECTED_DROPS = {
    "empty": 1,
    "blank": 1,
    "too_long": 1,
    "invalid_utf8": 2,
    "duplicate": 1,
    "duplicate_id": 1,
    "missing_field": 1,
    "wrong_type": 2,
    "invalid_json": 1,
}


@pytest.mark.slow
def test_bad_documents_are_handled_as_the_job_says_and_counted(job_file, tmp_path):
    recipe = {"windows": {"policy": "skip"}, "filters": {"dedup": "shard"}}
    job = job_file(tmp_path / "cache", [bad_corpus(tmp_path / "bad.jsonl")], recipe=recipe, run={"shard_bytes": 10**6})
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    status = json.loads(pipeline("status", job, "--json").stdout)
    assert status["drops"] == EXPECTED_DROPS
    assert status["documents"] == 6
    assert verify(tmp_path / "cache").returncode == 0


def test_long_documents_are_truncated_and_control_characters_kept(job_file, tmp_path):
    recipe = {"windows": {"policy": "truncate"}}
    job = job_file(tmp_path / "cache", [bad_corpus(tmp_path / "bad.jsonl")], recipe=recipe, run={"shard_bytes": 10**6})
    assert pipeline("run", job).returncode == 0
    ids = {r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records()}
    assert {"long", "controls", "doc0-again"} <= ids
    assert not {"blank", "utf8", "half"} & ids


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_truncated_file_names_itself_and_the_last_good_document(job_file, tmp_path, compression):
    import zstandard

    rng = random.Random(0)
    noise = [{"id": f"d{i}", "text": "".join(rng.choices("abcdefghij klmnop", k=400))} for i in range(1500)]
    plain = "".join(json.dumps(d) + "\n" for d in noise).encode()
    packed = gzip.compress(plain) if compression == "gz" else zstandard.ZstdCompressor().compress(plain)
    whole = write_jsonl(tmp_path / "whole.jsonl", documents(3))
    cut = tmp_path / f"cut.jsonl.{compression}"
    cut.write_bytes(packed[: len(packed) * 2 // 3])
    job = job_file(tmp_path / "cache", [whole, cut])
    result = pipeline("run", job)
    assert result.returncode == 1
    said = result.stdout
    assert "cut.jsonl" in said
    assert "last good document at offset" in said
    assert pipeline("quarantine", job).returncode == 1
    # zstd decodes blocks of 128 KiB, so the last good document lies before the cut
    kept = pipeline("run", job, "run.on_truncated=keep", "run.retry_quarantined=true")
    assert kept.returncode == 0, kept.stdout + kept.stderr
    cached = {r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records()}
    assert {"doc0", "doc1", "doc2", "d0", "d50"} <= cached
    assert "d1499" not in cached


# -- deaths ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sigkill_of_the_driver_then_the_same_command(job_file, tmp_path, seed):
    files = [
        write_jsonl(tmp_path / f"{i}.jsonl", [d | {"id": f"{i}-{d['id']}"} for d in documents(40)]) for i in range(3)
    ]
    job = job_file(tmp_path / "cache", files, teacher={"engine_args": {"delay_s": 0.1}})
    process = subprocess.Popen(command("run", job), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    commits = tmp_path / "cache" / "commits"
    rng = random.Random(seed)
    wanted = rng.randrange(1, 5)
    wait_for(
        lambda: len(list(commits.glob("*.json"))) >= wanted, what=f"{wanted} commits (seed {seed})", interval_s=0.02
    )
    time.sleep(rng.random() * 0.2)  # somewhere inside the next shard
    process.send_signal(signal.SIGKILL)
    process.wait()
    committed = len(list(commits.glob("*.json")))
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{committed} found committed" in result.stdout
    check_complete(tmp_path / "cache", {f"{i}-doc{k}" for i in range(3) for k in range(40)})


@pytest.mark.slow
def test_two_whole_jobs_race_on_one_cache(job_file, tmp_path, s3_url):
    files = [
        write_jsonl(tmp_path / f"{i}.jsonl", [d | {"id": f"{i}-{d['id']}"} for d in documents(40)]) for i in range(3)
    ]
    job = job_file(f"{s3_url}/cache", files, teacher={"engine_args": {"delay_s": 0.05}}, run={"leases": False})
    both = [
        subprocess.Popen(command("run", job), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [p.communicate(timeout=200)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    check_complete(f"{s3_url}/cache", {f"{i}-doc{k}" for i in range(3) for k in range(40)})


@pytest.mark.slow
def test_sigterm_gives_the_shards_back(job_file, tmp_path):
    job = job_file(
        tmp_path / "cache",
        [write_jsonl(tmp_path / "a.jsonl", documents(60))],
        teacher={"engine_args": {"delay_s": 0.2}},
    )
    process = subprocess.Popen(command("run", job), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    commits = tmp_path / "cache" / "commits"
    wait_for(commits.exists, what="the first commit")
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "giving back" in said
    assert "run the same command to go on" in said
    assert not list((tmp_path / "cache").glob("leases/*/*"))
    assert pipeline("run", job).returncode == 0
    check_complete(tmp_path / "cache", {f"doc{k}" for k in range(60)})


@pytest.mark.slow
def test_document_that_kills_the_engine_costs_only_itself(job_file, tmp_path):
    docs = documents(30)
    docs[17]["text"] = "a poisonous \x7f document"
    path = write_jsonl(tmp_path / "a.jsonl", docs)
    poison = poison_id(tmp_path)
    job = job_file(tmp_path / "cache", [path], teacher={"engine_args": {"poison": poison}}, run={"shard_bytes": 10**6})
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    check_complete(tmp_path / "cache", {f"doc{k}" for k in range(30) if k != 17})
    assert json.loads(pipeline("status", job, "--json").stdout)["drops"] == {"kills_engine": 1}
    named = pipeline("quarantine", job)
    assert "doc17" in named.stdout


@pytest.mark.slow
def test_document_with_nan_rows_costs_only_itself(job_file, tmp_path):
    docs = documents(30)
    docs[3]["text"] = "a document \x7f of NaN"
    path = write_jsonl(tmp_path / "a.jsonl", docs)
    job = job_file(tmp_path / "cache", [path], teacher={"engine_args": {"nan": poison_id(tmp_path)}})
    result = pipeline("run", job)
    assert result.returncode == 0, result.stdout + result.stderr
    check_complete(tmp_path / "cache", {f"doc{k}" for k in range(30) if k != 3})
    assert json.loads(pipeline("status", job, "--json").stdout)["drops"] == {"nan": 1}
