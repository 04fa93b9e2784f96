"""CacheSpec: which teacher, tokenizer and kind of rows. Two caches are the same cache exactly when their specs are equal.

`spec.json` is this model as JSON. What may change without changing a row (engine version, batch settings, hardware)
is provenance and belongs to each commit instead.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FORMAT_VERSION = 1
HexDigest = Field(pattern=r"^[0-9a-f]{64}$")


def canonical_json(value: Any) -> bytes:
    """Return the one byte string of a JSON value: sorted keys, no blanks, UTF-8, NaN refused. Digests are taken of it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def json_digest(value: Any) -> str:
    """Return the sha256 hex of `canonical_json`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Strict(BaseModel):
    """A frozen model; an unknown key is an error, and so is a string of more than 16,384 characters."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", str_max_length=2**14)


class TeacherSpec(Strict):
    """The teacher's weights and everything about their execution that moves a log-probability on purpose."""

    name: str
    revision: str = ""
    weights_digest: str = HexDigest
    config_digest: str = HexDigest
    adapter: str | None = None
    dtype: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    engine: str
    head_dtype: str
    rope_scaling: dict[str, Any] | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)


class TokenizerSpec(Strict):
    """The tokenizer: a student must have the same one."""

    digest: str = HexDigest
    vocab_size: int = Field(gt=0, le=2**24, description="largest id of the tokenizer, added tokens included, plus one")
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    special_ids: tuple[int, ...] = ()
    chat_template_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class TopKRows(Strict):
    """Rows of the K most probable tokens."""

    kind: Literal["top_k"] = "top_k"
    entries: int = Field(default=100, gt=0, le=4096)


class SampledRows(Strict):
    """Rows that are an unbiased sparse estimate of the whole distribution; see teachercache/format/sampled.py."""

    kind: Literal["sampled"] = "sampled"
    entries: int = Field(default=24, gt=1, le=4096)
    exact: int = Field(gt=0, description="least number of entries that are the most probable tokens themselves")
    seed: int = Field(default=0, ge=0, lt=2**63)
    thinned_from: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="digest of the spec whose rows these were drawn from; null: from the teacher's",
    )

    @model_validator(mode="before")
    @classmethod
    def _quarter(cls, tree: Any) -> Any:
        """Let a quarter of the entries be exact, where nothing else is said."""
        if isinstance(tree, dict) and tree.get("exact") is None and isinstance(tree.get("entries", 24), int):
            return {**tree, "exact": max(1, tree.get("entries", 24) // 4)}
        return tree

    @model_validator(mode="after")
    def _some_drawn(self) -> SampledRows:
        if self.exact >= self.entries:
            raise ValueError(f"exact must be below entries, found {self.exact} of {self.entries}")
        return self


Rows = TopKRows | SampledRows


class CacheSpec(Strict):
    """`spec.json`: the identity of a cache."""

    format_version: Literal[1] = 1
    teacher: TeacherSpec
    tokenizer: TokenizerSpec
    rows: Annotated[Rows, Field(discriminator="kind")]

    @property
    def top_k(self) -> int:
        """Return how many entries a row has, of whichever kind: the width of the stored arrays."""
        return self.rows.entries

    @property
    def digest(self) -> str:
        """Return the sha256 hex of the canonical JSON; every commit and manifest carries it."""
        return json_digest(self.model_dump(mode="json"))

    def differences(self, other: CacheSpec) -> list[tuple[str, Any, Any]]:
        """Return (dotted field, ours, theirs) of every leaf in which the two specs differ."""
        ours, theirs = _leaves(self.model_dump(mode="json")), _leaves(other.model_dump(mode="json"))
        pairs = ((name, ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys()))
        return [pair for pair in pairs if pair[1] != pair[2]]


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        k: v for name, item in value.items() for k, v in _leaves(item, f"{prefix}.{name}" if prefix else name).items()
    }
