"""IAM and bucket policies, tested against a table of what each role may and may not do."""

from __future__ import annotations

import json

import pytest

from tests.deploy.manifests import DEPLOY
from tests.deploy.policy import allowed, load

STORAGE = DEPLOY / "storage"
WRITER, READER, COLLECTOR = (load(STORAGE / f"iam/{role}.json") for role in ("writer", "reader", "collector"))
BUCKET = load(STORAGE / "bucket-policy.json")
ROLES = {"writer": WRITER, "reader": READER, "collector": COLLECTOR, "stranger": []}
ARN = {role: f"arn:aws:iam::111122223333:role/teachercache-{role}" for role in ROLES}

CACHE = "arn:aws:s3:::teachercache/llama-8b"
CREATE = {"s3:if-none-match": "*", "s3:ObjectCreationOperation": "true"}
OVERWRITE = {"s3:ObjectCreationOperation": "true"}
PART = {"s3:ObjectCreationOperation": "false"}
ATTEMPT = "0" * 32
DATA = f"data/codec=open/split=train/source=web/abc-{ATTEMPT}.parquet"

# role, action, object below the cache (None: the bucket itself), what the request carries, verdict
TABLE = [
    ("writer", "s3:ListBucket", None, {}, True),
    ("writer", "s3:GetObject", "spec.json", {}, True),
    ("writer", "s3:PutObject", "spec.json", CREATE, True),
    ("writer", "s3:PutObject", "spec.json", OVERWRITE, False),
    ("writer", "s3:PutObject", "commits/abc.json", CREATE, True),
    ("writer", "s3:PutObject", "commits/abc.json", OVERWRITE, False),
    ("writer", "s3:PutObject", "manifests/00000001.json", CREATE, True),
    ("writer", "s3:PutObject", "manifests/00000001.json", OVERWRITE, False),
    ("writer", "s3:PutObject", f"plans/{'0' * 64}.json", CREATE, True),
    ("writer", "s3:PutObject", f"plans/{'0' * 64}.json", OVERWRITE, False),
    ("writer", "s3:PutObject", DATA, CREATE, True),
    ("writer", "s3:PutObject", DATA, OVERWRITE, False),
    ("writer", "s3:PutObject", DATA, PART, True),  # parts and the start of a multipart upload carry no condition
    ("writer", "s3:AbortMultipartUpload", DATA, {}, True),
    ("writer", "s3:PutObject", f"tokenizer/{'0' * 64}/tokenizer.json", CREATE, True),
    ("writer", "s3:PutObject", f"quarantine/abc/{ATTEMPT}.json", CREATE, True),
    ("writer", "s3:PutObject", "leases/job/00000001.json", CREATE, True),
    ("writer", "s3:PutObject", "probes/x", CREATE, True),
    ("writer", "s3:DeleteObject", DATA, {}, False),
    ("writer", "s3:DeleteObject", "commits/abc.json", {}, False),
    ("writer", "s3:DeleteObject", "leases/job/00000001.json", {}, False),
    ("writer", "s3:DeleteObject", "probes/x", {}, False),
    ("writer", "s3:PutBucketPolicy", None, {}, False),
    ("writer", "s3:PutObjectAcl", DATA, {}, False),
    ("reader", "s3:ListBucket", None, {}, True),
    ("reader", "s3:GetObject", "manifests/00000001.json", {}, True),
    ("reader", "s3:GetObject", DATA, {}, True),
    ("reader", "s3:GetObject", DATA, {"aws:SecureTransport": "false"}, False),
    ("reader", "s3:PutObject", "commits/abc.json", CREATE, False),
    ("reader", "s3:PutObject", "leases/job/1.json", CREATE, False),
    ("reader", "s3:DeleteObject", DATA, {}, False),
    ("collector", "s3:ListBucket", None, {}, True),
    ("collector", "s3:GetObject", "manifests/00000001.json", {}, True),
    ("collector", "s3:PutObject", "probes/clock", CREATE, True),
    ("collector", "s3:DeleteObject", "probes/clock", {}, True),
    ("collector", "s3:DeleteObject", DATA, {}, True),
    ("collector", "s3:DeleteObject", "manifests/00000001.json", {}, True),
    ("collector", "s3:DeleteObject", "leases/job/00000001.json", {}, True),
    ("collector", "s3:DeleteObject", "commits/void.json", {}, True),
    ("collector", "s3:DeleteObject", "spec.json", {}, False),
    ("collector", "s3:DeleteObject", f"quarantine/abc/{ATTEMPT}.json", {}, False),
    ("collector", "s3:DeleteObject", f"plans/{'0' * 64}.json", {}, False),
    ("collector", "s3:DeleteObject", f"tokenizer/{'0' * 64}/tokenizer.json", {}, False),
    ("collector", "s3:PutObject", "commits/abc.json", CREATE, False),
    ("collector", "s3:PutObject", DATA, CREATE, False),
    ("stranger", "s3:GetObject", DATA, {}, False),
    ("stranger", "s3:ListBucket", None, {}, False),
]


@pytest.mark.parametrize(("role", "action", "name", "request_facts", "verdict"), TABLE)
def test_role_may_do_exactly_this(role: str, action: str, name: str | None, request_facts: dict, verdict: bool) -> None:
    resource = "arn:aws:s3:::teachercache" if name is None else f"{CACHE}/{name}"
    facts = {"aws:PrincipalArn": ARN[role], **request_facts}
    assert allowed(action, resource, identity=ROLES[role], bucket=BUCKET, context=facts) is verdict


def test_an_administrator_without_the_collectors_role_cannot_delete_by_accident() -> None:
    everything = [{"Sid": "All", "Effect": "Allow", "Action": "s3:*", "Resource": "*"}]
    facts = {"aws:PrincipalArn": "arn:aws:iam::111122223333:role/poweruser"}
    assert not allowed("s3:DeleteObject", f"{CACHE}/{DATA}", identity=everything, bucket=BUCKET, context=facts)
    assert allowed("s3:GetObject", f"{CACHE}/{DATA}", identity=everything, bucket=BUCKET, context=facts)


def test_another_account_reads_and_does_nothing_else() -> None:
    theirs = [{"Sid": "All", "Effect": "Allow", "Action": "s3:*", "Resource": "*"}]
    facts = {"aws:PrincipalArn": "arn:aws:iam::444455556666:role/students"}
    kwargs = {"bucket": BUCKET, "context": facts}
    assert allowed("s3:GetObject", f"{CACHE}/{DATA}", identity=[], **kwargs)
    assert not allowed("s3:PutObject", f"{CACHE}/leases/x", identity=[], **kwargs)
    assert not allowed("s3:DeleteObject", f"{CACHE}/{DATA}", identity=theirs, **kwargs)


def test_the_writer_reads_the_corpora_and_nothing_else_of_them() -> None:
    assert allowed("s3:GetObject", "arn:aws:s3:::corpus/web/0.jsonl.zst", identity=WRITER)
    assert not allowed("s3:PutObject", "arn:aws:s3:::corpus/web/0.jsonl.zst", identity=WRITER)
    assert not allowed("s3:GetObject", "arn:aws:s3:::payroll/x", identity=WRITER)


def test_policies_fit_the_size_limits_of_aws() -> None:
    for role in ("writer", "reader", "collector"):
        text = json.dumps(json.loads((STORAGE / f"iam/{role}.json").read_text()), separators=(",", ":"))
        assert len(text) <= 6144  # a managed policy
    assert len((STORAGE / "bucket-policy.json").read_bytes()) <= 20 * 1024


def test_lifecycle_and_policy_are_taken_by_the_s3_api(s3_server, monkeypatch) -> None:
    """The service's own model checks names and types; moto stores the rule and gives it back."""
    server = s3_server("moto")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    client = server.client()
    client.create_bucket(Bucket="lifecycle-test")
    rules = json.loads((STORAGE / "lifecycle.json").read_text())
    client.put_bucket_lifecycle_configuration(Bucket="lifecycle-test", LifecycleConfiguration=rules)
    stored = client.get_bucket_lifecycle_configuration(Bucket="lifecycle-test")["Rules"]
    assert {rule["ID"] for rule in stored} == {rule["ID"] for rule in rules["Rules"]}
    assert any(rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation") for rule in stored)
    client.put_bucket_policy(Bucket="lifecycle-test", Policy=(STORAGE / "bucket-policy.json").read_text())
