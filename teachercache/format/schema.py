"""Write the JSON Schemas of the sealed objects to teachercache/schemas/: `python -m teachercache.format.schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from teachercache.format.objects import Commit, Manifest, ManifestPart, Plan, Quarantine, Run, TokenizerIndex
from teachercache.format.spec import CacheSpec

FOLDER = Path(__file__).parent.parent / "schemas"
MODELS: dict[str, type[BaseModel]] = {
    "spec": CacheSpec,
    "commit": Commit,
    "manifest": Manifest,
    "manifest-part": ManifestPart,
    "plan": Plan,
    "quarantine": Quarantine,
    "run": Run,
    "tokenizer-index": TokenizerIndex,
}


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of an object as it lies in the store: with every key present, and its seal."""
    schema = MODELS[name].model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = f"teachercache {name}, format 1"
    schema["properties"]["seal"] = {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "see docs/FORMAT.md"}
    schema["required"] = sorted({*schema["properties"]})
    return schema


def text_of(name: str) -> str:
    """Return the schema as its file has it."""
    return json.dumps(schema_of(name), indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write every schema."""
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        (FOLDER / f"{name}.schema.json").write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
