"""Each JSON object that docs/FORMAT.md shows is one that a reader takes, its seal included."""

from __future__ import annotations

import json
import re

import pytest

from teachercache.format.schema import MODELS
from teachercache.format.sealed import seal, unseal
from teachercache.format.spec import canonical_json
from tests.deploy.manifests import ROOT
from tests.docs.markdown import blocks
from tests.docs.test_docs import DOCS

PAGE = (ROOT / "docs/FORMAT.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: ([\w-]+) -->\n```json\n(.*?)```\n<!-- end -->", PAGE, re.S))


def test_every_kind_of_object_has_an_example() -> None:
    assert EXAMPLES.keys() == MODELS.keys()
    shown = [block for path in DOCS for block in blocks(path) if block.language == "json"]
    assert len(shown) == len(EXAMPLES), "a json block is an example of docs/FORMAT.md, so that it is parsed"


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_reader_takes_the_example(kind: str) -> None:
    tree = json.loads(EXAMPLES[kind])
    found = tree.pop("seal")
    stored = canonical_json(tree)[:-1] + f',"seal":"{found}"}}\n'.encode()
    model = unseal(MODELS[kind], stored, f"the example of a {kind}")
    assert seal(model) == stored, "a key was added or renamed; run `python scripts/format_examples.py`"


def test_the_examples_belong_to_one_cache() -> None:
    trees = {kind: json.loads(text) for kind, text in EXAMPLES.items()}
    commit, manifest = trees["commit"], trees["manifest"]
    assert commit["spec_digest"] == manifest["spec_digest"] == trees["plan"]["spec_digest"]
    assert MODELS["spec"].model_validate_json(without_seal(trees["spec"])).digest == commit["spec_digest"]
    assert [MODELS["plan"].model_validate_json(without_seal(trees["plan"])).digest] == manifest["plans"]
    assert [file["path"] for file in manifest["files"]] == [file["path"] for file in commit["files"]]
    assert commit["shard_id"] == trees["plan"]["shards"][0]["shard_id"]


def without_seal(tree: dict) -> str:
    return json.dumps({key: value for key, value in tree.items() if key != "seal"})
