"""What a job set out to do, stored before it starts: `plans/<digest>.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from teachercache.format import layout
from teachercache.format.spec import Strict, json_digest


class PlanShard(Strict):
    """One unit of work: a range of one input under one row recipe."""

    shard_id: str
    source: str
    input: str = Field(description="URL of the input file")
    input_digest: str
    start: int = 0
    stop: int = 0
    unit: Literal["bytes", "row_groups", "rows", "file"] = "file"
    estimated_tokens: int = 0
    detail: dict[str, Any] = Field(default_factory=dict)

    @field_validator("shard_id")
    @classmethod
    def _named(cls, value: str) -> str:
        return layout.check_shard_id(value)


class Plan(Strict):
    """A job's inputs, recipe and shards. Two plans with equal digests are one plan, whenever they were made."""

    format_version: Literal[1] = 1
    spec_digest: str
    created: str
    job: dict[str, Any] = Field(default_factory=dict)
    shards: list[PlanShard]

    @property
    def digest(self) -> str:
        """sha256 hex of everything except `created`."""
        return json_digest(self.model_dump(mode="json", exclude={"created"}))


class Quarantine(Strict):
    """`quarantine/<shard>/<attempt>.json`: advisory; a commit of the shard wins over it."""

    format_version: Literal[1] = 1
    shard_id: str
    attempt: str
    reason: str
    message: str
    documents: list[str] = Field(default_factory=list)
    created: str
