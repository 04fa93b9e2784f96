"""Caches on the Hugging Face Hub: push and read, through the Hub's own client and a Hub on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import sys
from datetime import UTC, datetime
from itertools import count
from multiprocessing import get_context

import duckdb
import pytest
import yaml

import teachercache
from teachercache.cli import main
from teachercache.errors import (
    CorruptFile,
    MissingObject,
    NotACache,
    SpecMismatch,
    StaleParent,
    StoreDenied,
    StoreUnavailable,
    TeacherCacheError,
    UsageError,
)
from teachercache.format.spec import SampledRows
from teachercache.store.store import Store
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.thin import thin
from teachercache.upkeep.verify import verify
from teachercache.urls import hide_credentials
from teachercache.views.card import YOURS
from teachercache.views.push import push
from tests.fake_hub import SIGNATURE, Refuse
from tests.teachercache.caches import SPEC, in_a_fork, page_cache
from tests.waiting import wait_for

NAME = "org/rows"
URL = f"hf://datasets/{NAME}"
COMMIT = f"POST /api/datasets/{NAME}/commit/main"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of two manifests: the second has the files of the first in one file a split."""
    folder = tmp_path_factory.mktemp("cache")
    writer = teachercache.create(folder, SPEC, probe=False)
    provenance = {"teacher_seconds": 60, "device": "NVIDIA H200", "tensor_parallel": 2}
    for seed, name in enumerate(("a", "b")):
        writer.commit(name, synthetic_records(SPEC, 40, seed=seed, prefix=name), provenance=provenance)
    writer.commit("h", synthetic_records(SPEC, 3, seed=9, prefix="h", split="held-out"))
    writer.publish()
    optimize(writer)
    return folder


def assert_equal(one: teachercache.Cache, other: teachercache.Cache) -> None:
    assert one.manifest == other.manifest
    for a, b in zip(one.records(), other.records(), strict=True):
        assert a.doc_id == b.doc_id
        assert (a.topk_logprobs == b.topk_logprobs).all()


def assert_sound(url: str, cache) -> None:
    """A manifest on the Hub is all there, and equal to the cache's of this number."""
    there = teachercache.open(url)
    assert verify(there.store, there.spec).problems == []
    assert_equal(there, teachercache.open(cache, there.manifest.number))


# ---- push and read -------------------------------------------------------------------------------------------------


def test_a_pushed_manifest_is_read_and_verified_as_where_it_came_from(hub, cache):
    ours = teachercache.open(cache, 1)
    done = push(ours, URL)
    theirs = teachercache.open(URL)
    assert theirs.url == f"{URL}@{done.commit}"
    assert_equal(theirs, ours)
    assert hub.repositories["datasets", NAME].private
    found = verify(theirs.store, theirs.spec)
    assert (found.problems, found.strange, found.files_read) == ([], [], 3)
    assert any("lfs-complete" in request for request in hub.requests), "one file went in several parts"
    requests = len(hub.requests)
    assert push(ours, URL).commit == done.commit, "nothing is lacking"
    assert not any(request.startswith("PUT") or request == COMMIT for request in hub.requests[requests:])


def test_a_second_manifest_adds_to_the_first_and_readers_stay_at_their_commit(hub, cache):
    first = push(teachercache.open(cache, 1), URL)
    reader = teachercache.open(URL)
    requests = len(hub.requests)
    second = push(teachercache.open(cache), URL)
    sent = [request for request in hub.requests[requests:] if request.startswith("PUT /lfs/")]
    assert not {request[-64:] for request in sent} & {f.sha256 for f in reader.manifest.files}
    assert not reader.store.exists("manifests/00000002.json")
    assert len(list(reader.records())) == 83
    assert teachercache.open(f"{URL}@{first.commit}").manifest.number == 1
    newest = teachercache.open(f"{URL}@main")
    assert (newest.manifest.number, newest.url) == (2, f"{URL}@{second.commit}")
    assert_equal(teachercache.open(URL, 1), teachercache.open(cache, 1))
    assert_sound(URL, cache)
    card = hub.files(NAME)["README.md"]
    assert b"manifest 2" in card
    push(teachercache.open(cache, 1), URL)
    assert hub.files(NAME)["README.md"] == card, "the card is the newest manifest's"


def test_a_cache_that_is_on_no_local_disk_is_pushed_too(hub, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    push(teachercache.open(cache), URL)
    push(teachercache.open(URL), "hf://datasets/org/copy")
    assert_sound("hf://datasets/org/copy", cache)
    assert list(tmp_path.glob("teachercache-push-*")) == []


def test_a_store_in_another_process_reads_the_same_commit_without_asking_for_it(hub, cache):
    push(teachercache.open(cache, 1), URL)
    reader = teachercache.open(URL)
    push(teachercache.open(cache, 2), URL)
    requests = len(hub.requests)
    copy = pickle.loads(pickle.dumps(reader.store))
    assert copy.read("spec.json") == reader.store.read("spec.json")
    assert in_a_fork(lambda: [r.doc_id for r in reader.records(limit=2)]) == [r.doc_id for r in reader.records(limit=2)]
    assert all("/resolve/" in request for request in hub.requests[requests:])


def test_a_read_is_one_range_request(hub, cache):
    push(teachercache.open(cache), URL)
    store = teachercache.open(URL).store
    (entry, *_) = teachercache.open(cache).manifest.files
    requests = len(hub.requests)
    with open(cache / entry.path, "rb") as file:
        file.seek(1000)
        assert store.read_range(entry.path, 1000, 1100) == file.read(100)
    assert len(hub.requests) == requests + 1
    with pytest.raises(MissingObject):
        store.read("commits/none.json")


def test_what_the_hub_answers_wrongly_is_found_by_its_digest(hub, cache):
    push(teachercache.open(cache), URL)
    files = hub.files(NAME)
    path = next(path for path in files if path.endswith(".parquet") and "train" in path)
    files[path] = files[path][:1000] + bytes([files[path][1000] ^ 1]) + files[path][1001:]
    hub.publish("datasets", NAME, files)
    there = teachercache.open(URL)
    assert {(p.path, p.code) for p in verify(there.store, there.spec).problems} == {(path, CorruptFile.code)}


# ---- races, kills --------------------------------------------------------------------------------------------------


def test_of_two_pushers_that_race_one_is_told_and_nothing_is_lost(hub, cache):
    one, other = teachercache.open(cache, 1), teachercache.open(cache, 2)

    def second_push(request: str) -> None:
        if request == COMMIT:
            hub.on_request = lambda request: None
            push(other, URL)

    hub.on_request = second_push
    with pytest.raises(StaleParent, match="run it again") as caught:
        push(one, URL)
    assert "\n" not in str(caught.value)
    assert_sound(URL, cache)
    with pytest.raises(NotACache, match="no manifest 1"):
        teachercache.open(URL, 1)
    push(one, URL)
    for number, ours in ((1, one), (2, other)):
        assert_equal(teachercache.open(URL, number), ours)
    assert_sound(URL, cache)


def test_pushers_and_readers_at_the_same_time(hub, cache):
    """Two processes push a manifest each until it is there; whoever reads meanwhile finds what it opens whole."""

    def push_until_there(number: int) -> None:
        for _ in range(20):
            with contextlib.suppress(StaleParent):
                push(teachercache.open(cache, number), URL)
                return
        raise AssertionError("never there")

    pushers = [get_context("fork").Process(target=push_until_there, args=(number,)) for number in (1, 2)]
    for pusher in pushers:
        pusher.start()
    while any(pusher.is_alive() for pusher in pushers):
        with contextlib.suppress(NotACache):  # nothing is there yet
            there = teachercache.open(URL)
            assert verify(there.store, there.spec, sample=0).problems == []
    assert [pusher.exitcode for pusher in pushers] == [0, 0]
    for number in (1, 2):
        assert_equal(teachercache.open(URL, number), teachercache.open(cache, number))
    assert len(hub.repositories["datasets", NAME].commits) == 3


def kill_at(hub, cache, number: int, *, answered: bool) -> None:
    """Run a push in a child that is killed at its request `number`, before the Hub acts on it or after."""
    pid, seen = 0, count()

    def kill(request: str) -> None:
        if next(seen) == number:
            os.kill(pid, signal.SIGKILL)
            hub.on_request = lambda request: None
            if not answered:
                raise ConnectionResetError

    begin, begun = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(begin, 1)
        push(teachercache.open(cache, 2), URL)
        os._exit(0)
    hub.on_request = kill
    os.write(begun, b"x")
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_push_that_is_killed_at_any_request_completes_when_repeated(hub, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a kill leaves its scratch folder
    push(teachercache.open(cache, 1), URL)
    hub.blobs.clear()
    requests = len(hub.requests)
    push(teachercache.open(cache, 2), URL)
    requests, whole = hub.requests[requests:], hub.files(NAME)
    at_commit, commits = requests.index(COMMIT), hub.repositories["datasets", NAME].commits
    for number in sorted({*random.Random(0).sample(range(len(requests)), 5), at_commit}):
        for answered in (False, True) if number == at_commit else (False,):
            del commits[2:]  # only the first manifest is there, and nothing of the second was uploaded
            hub.blobs.clear()
            kill_at(hub, cache, number, answered=answered)
            wait_for(lambda: len(commits) == 2 + answered, 10)  # noqa: B023
            there = teachercache.open(URL)
            assert there.manifest.number == 1 + answered, "the commit decides, and nothing else shows"
            assert verify(there.store, there.spec, sample=0).problems == []
            push(teachercache.open(cache, 2), URL)
            assert hub.files(NAME) == whole
    assert_sound(URL, cache)


def test_an_upload_that_reached_the_hub_is_not_sent_again(hub, cache):
    def refuse_commit(request: str) -> None:
        if request == COMMIT:
            raise Refuse(422)

    hub.on_request = refuse_commit
    with pytest.raises(UsageError, match="refused the request"):
        push(teachercache.open(cache), URL)
    hub.on_request = lambda request: None
    requests = len(hub.requests)
    push(teachercache.open(cache), URL)
    assert not any(request.startswith("PUT") for request in hub.requests[requests:])
    assert_sound(URL, cache)


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_another_cache_in_the_data_set_is_refused(hub, cache, tmp_path):
    push(teachercache.open(cache), URL)
    before = hub.files(NAME)
    other = teachercache.create(tmp_path / "other", synthetic_spec(name="another"), probe=False)
    other.commit("a", synthetic_records(other.spec, 3))
    other.publish()
    with pytest.raises(SpecMismatch, match=r"teacher\.name"):
        push(teachercache.open(tmp_path / "other"), URL)
    again = teachercache.create(tmp_path / "again", SPEC, probe=False)
    again.commit("a", synthetic_records(SPEC, 3))
    again.publish()
    with pytest.raises(UsageError, match=r"holds commits/a\.json with other content"):
        push(teachercache.open(tmp_path / "again"), URL)
    assert hub.files(NAME) == before


def test_a_file_that_is_damaged_here_is_not_pushed(hub, cache, tmp_path):
    ours = teachercache.open(shutil.copytree(cache, tmp_path / "cache"))
    path = tmp_path / "cache" / ours.manifest.files[0].path
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptFile, match="sha256"):
        push(ours, URL)
    assert COMMIT not in hub.requests


def test_strange_names_in_the_listing_are_ignored_and_named(hub, cache):
    push(teachercache.open(cache), URL)
    names = ["../../evil.json", "commits/../../evil.json", "data/evil.txt"]
    hub.publish("datasets", NAME, hub.files(NAME) | dict.fromkeys(names, b"{}"))
    there = teachercache.open(URL)
    found = verify(there.store, there.spec)
    assert (found.problems, found.strange) == ([], sorted(names))


def test_the_token_may_come_from_the_storage_options(hub, cache, monkeypatch):
    push(teachercache.open(cache), URL)
    monkeypatch.setenv("HF_TOKEN", "")
    there = teachercache.open(URL, storage_options={"token": "hf_write"})
    assert len(list(there.records(limit=2))) == 2
    assert "hf_write" not in repr(there) + repr(there.store)


def test_a_data_set_that_would_leave_files_out_is_refused(hub, cache):
    hub.publish("datasets", NAME, {".gitignore": b"data/\n"})
    with pytest.raises(UsageError, match=r"\.gitignore"):
        push(teachercache.open(cache), URL)


@pytest.mark.parametrize(
    ("url", "token", "kind", "said"),
    [
        ("hf://datasets/org/none", "hf_write", NotACache, "does not exist"),
        ("hf://datasets/org/none", "", NotACache, "set HF_TOKEN"),
        (URL, "", NotACache, "it is private"),
        (URL, "hf_wrong_secret", StoreDenied, "set HF_TOKEN to a valid token"),
        (f"{URL}@v9", "hf_write", NotACache, "no such revision"),
        ("hf://datasets/org", "hf_write", UsageError, "expected hf://datasets/ORG/NAME"),
        ("hf://org/model", "hf_write", UsageError, "expected hf://datasets/ORG/NAME"),
        ("hf://datasets/org/empty", "hf_write", NotACache, "not a teacher cache"),
    ],
)
def test_what_cannot_be_read_is_one_line(hub, cache, monkeypatch, url, token, kind, said):
    push(teachercache.open(cache), URL)
    hub.publish("datasets", "org/empty", {"a.txt": b""})
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(TeacherCacheError, match=said) as caught:
        teachercache.open(url)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert hide_credentials(str(caught.value)) == str(caught.value), "nothing of it is left out when it is printed"


@pytest.mark.parametrize(
    ("url", "token", "kind", "said"),
    [
        ("hf://datasets/others/rows", "hf_write", StoreDenied, "to write"),
        (URL, "", StoreDenied, "set HF_TOKEN"),
        (f"{URL}@main", "hf_write", UsageError, "main branch"),
        ("s3://bucket/x", "hf_write", UsageError, "expected hf://datasets/ORG/NAME"),
    ],
)
def test_what_cannot_be_pushed_to_is_one_line(hub, cache, monkeypatch, url, token, kind, said):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(kind, match=said) as caught:
        push(teachercache.open(cache), url)
    assert "\n" not in str(caught.value)


def test_a_hub_that_is_away_or_not_to_be_asked_is_one_line(hub, monkeypatch):
    from huggingface_hub import constants

    def away(request: str) -> None:
        raise Refuse(503)

    hub.on_request = away
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "sleep", lambda seconds: None)
    with pytest.raises(StoreUnavailable, match="HF_ENDPOINT"):
        Store.open(URL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        Store.open(URL)


def test_a_rate_limit_is_waited_for(hub, cache, monkeypatch):
    push(teachercache.open(cache), URL)
    store, refused = Store.open(URL), iter([True])

    def limit(request: str) -> None:
        if next(refused, False):
            raise Refuse(429, {"Retry-After": "7"})

    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    hub.on_request = limit
    assert store.read("spec.json")
    assert waited == [8.0]


def sampled_cache(folder):
    spec = synthetic_spec(rows=SampledRows(entries=8, exact=2))
    writer = teachercache.create(folder, spec, probe=False)
    writer.commit("a", synthetic_records(spec, 3))
    writer.publish()
    return teachercache.open(folder)


def test_everything_that_writes_refuses_the_hub(hub, cache, tmp_path):
    push(teachercache.open(cache), URL)
    there = teachercache.open(URL)
    attempts = {
        "create": lambda: teachercache.create(URL, SPEC),
        "writer": lambda: teachercache.CacheWriter(there.store, SPEC),
        "gc": lambda: collect(there.store, SPEC),
        "object": lambda: there.store.create("x", b""),
        "replace": lambda: there.store.replace("x", b""),
        "delete": lambda: there.store.delete("spec.json"),
        "probe": lambda: there.store.probe(),
        "thin": lambda: thin(sampled_cache(tmp_path / "sampled"), URL, entries=4),
    }
    before = hub.files(NAME)
    for name, attempt in attempts.items():
        with pytest.raises(UsageError, match="is read only") as caught:
            attempt()
        assert "teachercache push" in str(caught.value), name
    assert hub.files(NAME) == before


# ---- the command line, and readers without our code ----------------------------------------------------------------


@pytest.fixture
def run(capfd, monkeypatch):
    """run("ls", url) -> (exit status, stdout, stderr)"""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["teachercache", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capfd.readouterr()

    return call


def test_every_command_that_reads_takes_the_url(hub, cache, run, tmp_path):
    code, out, err = run("push", cache, URL, "--json")
    assert code == 0, err
    at = json.loads(out)["url"]
    for command in (
        ["ls", URL], ["ls", URL, "--files"], ["show", URL], ["head", URL], ["verify", URL], ["doctor", URL],
        ["report", at, "--to", tmp_path / "page.html"], ["export", at, "--to", tmp_path / "folder"],
    ):  # fmt: skip
        code, out, err = run(*command)
        assert code == 0, (command, out, err)
        assert at in out or command[0] not in ("ls", "show"), command
    assert "nothing was lacking" in run("push", cache, URL)[1]
    assert run("optimize", URL)[0] == run("gc", URL)[0] == 2


def test_tokens_and_signed_urls_are_never_printed(hub, cache, run, monkeypatch, caplog):
    """Whatever the Hub answers to a push or a read, and with the client's own log at its most talkative but debug."""
    secret = "hf_" + "s3cr3t" * 5
    hub.tokens = {secret}
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "sleep", lambda seconds: None)
    caplog.set_level(logging.INFO)
    said, codes = "", set()
    for path in ("create", "revision", "tree", "preupload", "batch", "PUT", "verify", "yaml", "commit", "resolve"):
        for status in (400, 403, 412, 503):

            def refuse(request: str, path: str = path, status: int = status) -> None:
                if path in request:
                    raise Refuse(status, {"X-Error-Message": f"no, {secret}"})

            hub.on_request = refuse
            hub.repositories.clear()
            for command in (["push", cache, URL], *([["show", URL]] if path in ("revision", "resolve") else [])):
                code, out, err = run(*command)
                assert "Traceback" not in err
                assert err.count("\nerror:") + err.startswith("error:") == bool(code), err
                codes.add(code)
                said += out + err
    assert codes == {0, 1, 2}
    for hidden in (secret, SIGNATURE, "X-Amz"):
        assert hidden not in said
        assert hidden not in caplog.text


def test_the_card_says_what_it_is_and_how_to_load_it(hub, cache):
    push(teachercache.open(cache), URL)
    card = hub.files(NAME)["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert "base_model" not in head, "a teacher that is no model of the Hub"
    assert [split["split"] for split in head["configs"][0]["data_files"]] == ["held_out", "train"]
    assert "240 GPU-seconds (NVIDIA H200); " in card
    assert f'teachercache.open("{URL}")' in card
    assert f'load_dataset("{NAME}", split="train", streaming=True)' in card


def test_a_card_has_a_configuration_for_each_source_and_none_of_encoded_columns(hub, cache, tmp_path):
    push(page_cache(tmp_path / "two"), "hf://datasets/org/two")
    card = hub.files("org/two")["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert [(c["config_name"], [d["split"] for d in c["data_files"]]) for c in head["configs"]] == [
        ("default", ["train"]), ("web", ["heldout"]),
    ]  # fmt: skip
    writer = teachercache.CacheWriter(Store.open(shutil.copytree(cache, tmp_path / "compact")), SPEC)
    optimize(writer, codec="compact")
    push(teachercache.open(tmp_path / "compact"), URL)
    card = hub.files(NAME)["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["viewer"] is False
    assert "load_dataset" not in card
    assert_sound(URL, tmp_path / "compact")


def test_what_people_add_to_the_card_is_kept(hub, cache):
    hub.publish("datasets", NAME, {"README.md": b"---\nlicense: mit\n---\n# Soon\n"})
    push(teachercache.open(cache, 1), URL)
    assert hub.files(NAME)["README.md"].endswith(f"{YOURS}\n\n# Soon\n".encode())
    files = hub.files(NAME)
    card = files["README.md"].decode()
    files["README.md"] = (
        card.replace('license: "mit"', "license: apache-2.0").replace(YOURS, f"{YOURS}\nAsk Ada.").encode()
    )
    hub.publish("datasets", NAME, files)
    push(teachercache.open(cache, 2), URL)
    card = hub.files(NAME)["README.md"].decode()
    assert "manifest 2" in card
    assert card.endswith(f"{YOURS}\nAsk Ada.\n\n# Soon\n")
    assert yaml.safe_load(card.split("---")[1])["license"] == "apache-2.0"
    assert "| licence | apache-2.0; " in card


@pytest.mark.parametrize("manifests", [(1,), (1, 2)], ids=["a pattern", "a list, next to an older manifest"])
def test_datasets_and_duckdb_load_it_as_the_card_says(hub, cache, manifests, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    from huggingface_hub import HfFileSystem

    class Dated(HfFileSystem):
        """DuckDB's own reader of hf:// is an extension to download; with fsspec's it wants a time of every file."""

        def modified(self, path):
            return datetime(2026, 1, 1, tzinfo=UTC)

    for number in manifests:
        push(teachercache.open(cache, number), URL)
    ours = teachercache.open(cache, manifests[-1])
    expected = {
        (r.doc_id, int(p)): int(r.topk_ids[i, 0]) for r in ours.records("train") for i, p in enumerate(r.row_pos)
    }
    card = hub.files(NAME)["README.md"].decode()
    use = card[card.index("With `datasets`") :]
    python, sql = (re.search(rf"```{name}\n(.*?)```", use, re.DOTALL)[1] for name in ("python", "sql"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    known: dict[str, object] = {}
    exec(python, known)
    found = {
        (row["doc_id"], p): ids[0]
        for row in known["rows"]
        for p, ids in zip(row["row_pos"], row["topk_ids"], strict=True)
    }
    assert found == expected
    whole = datasets.load_dataset(NAME, split="held_out", cache_dir=str(tmp_path / "arrow"))
    assert len(whole) == 3
    connection = duckdb.connect()
    connection.register_filesystem(Dated(skip_instance_cache=True))
    assert {(doc, pos): top for doc, pos, top, _ in connection.sql(sql).fetchall()} == expected
