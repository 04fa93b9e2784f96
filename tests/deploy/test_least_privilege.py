"""The writer's policy is enough for a whole job, and no more: an S3 server that enforces IAM decides.

moto judges actions and resources (not conditions, which tests/deploy/policy.py does).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest

import teachercache
from pipeline.config import parse_job
from pipeline.running.job import run_job
from teachercache.errors import StoreDenied
from teachercache.upkeep.gc import collect
from tests.deploy.manifests import DEPLOY
from tests.deploy.small import job_tree, make_corpus, make_tokenizer
from tests.servers import serve

ROLES = ("writer", "reader", "collector")
ADMIN_CALLS = 2 + 3 * len(ROLES)  # what comes before enforcement: the readiness probe and the fixture


@dataclass(frozen=True)
class Guarded:
    """An S3 server with a bucket `teachercache` and one user per policy."""

    endpoint: str
    keys: dict[str, tuple[str, str]]

    def env(self, role: str) -> dict[str, str]:
        key, secret = self.keys[role]
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", str(ADMIN_CALLS))
        with serve("moto", tmp_path_factory.mktemp("iam") / "moto") as server:
            server.client().create_bucket(Bucket="teachercache")
            settings = {"endpoint_url": server.endpoint, "region_name": "us-east-1"}
            iam = boto3.client("iam", aws_access_key_id="x", aws_secret_access_key="y", **settings)
            keys = {}
            for role in ROLES:
                iam.create_user(UserName=role)
                iam.put_user_policy(UserName=role, PolicyName=role, PolicyDocument=as_moto_names_it(role))
                made = iam.create_access_key(UserName=role)["AccessKey"]
                keys[role] = (made["AccessKeyId"], made["SecretAccessKey"])
            yield Guarded(server.endpoint, keys)


def as_moto_names_it(role: str) -> str:
    """The role's policy; moto asks for `s3:HeadBucket` where AWS asks for `s3:ListBucket`."""
    document = json.loads((DEPLOY / f"storage/iam/{role}.json").read_text())
    for statement in document["Statement"]:
        if "s3:ListBucket" in statement["Action"]:
            actions = statement["Action"]
            statement["Action"] = [*([actions] if isinstance(actions, str) else actions), "s3:HeadBucket"]
    return json.dumps(document)


def act(guarded: Guarded, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in guarded.env(role).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def cached(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of a whole job and of the same job again, run with the writer's keys."""
    folder = tmp_path_factory.mktemp("job")
    model, corpus = make_tokenizer(folder / "model"), make_corpus(folder / "c.jsonl")
    job = parse_job(job_tree("s3://teachercache/small", model, corpus, executor="inline"))
    with pytest.MonkeyPatch.context() as patch:
        act(guarded, "writer", patch)
        return [run_job(job, say=lambda text: None) for _ in range(2)]


def test_the_writers_policy_is_enough_for_a_whole_job(guarded: Guarded, cached: list[Any], monkeypatch) -> None:
    act(guarded, "writer", monkeypatch)
    for result, committed in zip(cached, (5, 0), strict=True):  # the second time there is nothing to do
        assert result.outcome.tally.committed == committed
        assert result.manifest is not None
        assert result.manifest.complete
    store = teachercache.Store.open("s3://teachercache/small")
    for path in ("spec.json", "manifests/00000001.json", store.list("commits/")[0].path, store.list("data/")[0].path):
        with pytest.raises(StoreDenied):
            store.delete(path)


def test_the_reader_reads_everything_and_writes_nothing(guarded: Guarded, cached: list[Any], monkeypatch) -> None:
    act(guarded, "reader", monkeypatch)
    cache = teachercache.open("s3://teachercache/small")
    assert sum(len(record.row_pos) for record in cache.records()) == cache.manifest.rows
    store = teachercache.Store.open("s3://teachercache/small")
    with pytest.raises(StoreDenied):
        store.create("commits/forged.json", b"{}")
    with pytest.raises(StoreDenied):
        store.delete("spec.json")


def test_the_collectors_policy_is_enough_for_gc_but_not_for_the_identity(
    guarded: Guarded, cached: list[Any], monkeypatch
) -> None:
    act(guarded, "writer", monkeypatch)
    store = teachercache.Store.open("s3://teachercache/small")
    spec = teachercache.open("s3://teachercache/small").spec
    teachercache.create("s3://teachercache/small", spec, probe=False).publish()
    orphan = f"data/codec=open/split=train/source=notes/lost-{'0' * 32}.parquet"
    store.create(orphan, b"an upload whose writer died")

    act(guarded, "collector", monkeypatch)
    store = teachercache.Store.open("s3://teachercache/small")
    found = collect(store, spec, grace_seconds=60, dry_run=True)  # reads the server's clock by a scratch object
    assert found.waiting == 1  # too young to be collected
    store.delete(orphan)
    store.delete(store.list("probes/")[0].path)
    for path in ("spec.json", store.list("plans/")[0].path, store.list("tokenizer/")[0].path):
        with pytest.raises(StoreDenied):
            store.delete(path)
    with pytest.raises(StoreDenied):
        store.create("commits/forged.json", b"{}")
