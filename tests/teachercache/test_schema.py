"""docs/FORMAT.md and the shipped schemas say what the code does."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

import teachercache
from teachercache.format.objects import Plan, PlanShard
from teachercache.format.schema import MODELS, text_of
from teachercache.format.sealed import utc_now
from teachercache.testing import synthetic_records, synthetic_spec

SPEC = synthetic_spec()
FORMAT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_shipped_schema_is_that_of_the_code(name):
    shipped = resources.files("teachercache").joinpath(f"schemas/{name}.schema.json").read_text(encoding="utf-8")
    assert shipped == text_of(name), "run python -m teachercache.format.schema"
    jsonschema.Draft202012Validator.check_schema(json.loads(shipped))


def test_every_sealed_object_of_a_cache_fits_its_schema(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    shard = PlanShard(shard_id="s", source="default", input="x", input_digest="d")
    writer.put_plan(Plan(spec_digest=SPEC.digest, created=utc_now(), shards=[shard]))
    writer.quarantine("s", reason="nan", message="a row is NaN")
    writer.commit("s", synthetic_records(SPEC, 3), provenance={"engine": "x"})
    writer.publish()
    kinds = {
        "spec.json": "spec",
        "commits": "commit",
        "manifests": "manifest",
        "plans": "plan",
        "quarantine": "quarantine",
    }
    seen = set()
    for path in tmp_path.rglob("*.json"):
        kind = kinds[path.relative_to(tmp_path).parts[0]]
        jsonschema.validate(
            json.loads(path.read_bytes()), json.loads(text_of(kind)), cls=jsonschema.Draft202012Validator
        )
        seen.add(kind)
    assert seen == set(kinds.values())


def test_every_reason_of_an_invalid_record_is_documented():
    root = Path(teachercache.__file__).parent
    text = "".join(p.read_text(encoding="utf-8") for p in root.rglob("*.py"))
    reasons = set(re.findall(r'require\([^"]*?"(\w+)",', text)) | set(re.findall(r'InvalidRecord\("(\w+)"', text))
    listed = re.search(r"`reason` of a TC-E101 is one of:(.*?)\n\n", FORMAT, re.DOTALL)
    assert listed is not None
    assert reasons - {"count"} <= set(re.findall(r"\w+", listed[1]))


def test_every_column_is_documented(tmp_path):
    import pyarrow.parquet as pq

    for codec in ("open", "compact"):
        writer = teachercache.create(tmp_path / codec, SPEC, codec=codec)
        writer.commit("s", synthetic_records(SPEC, 2))
        names = pq.read_schema(next((tmp_path / codec).rglob("*.parquet"))).names
        missing = [n for n in names if not n.startswith("meta_") and n not in FORMAT]
        assert missing == []
