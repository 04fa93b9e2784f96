"""The comparison of pins with advisories: which versions a range covers."""

from __future__ import annotations

import pytest

from scripts.check_advisories import covers, pins

EVENTS = [{"introduced": "0"}, {"fixed": "1.5"}, {"introduced": "2.0"}, {"last_affected": "2.3"}]
ADVISORY = {
    "affected": [
        {"package": {"name": "X_y"}, "ranges": [{"type": "ECOSYSTEM", "events": EVENTS}]},
        {"package": {"name": "other"}, "versions": ["9"]},
    ]
}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.0", True), ("1.5", False), ("1.9", False), ("2.0", True), ("2.3", True), ("2.3.1", False), ("2.4+cpu", False)],
)
def test_a_version_is_covered_from_introduced_until_fixed(version: str, expected: bool) -> None:
    assert covers(ADVISORY, "x-y", version) is expected


def test_versions_that_are_listed_are_covered_for_their_package_alone() -> None:
    assert covers(ADVISORY, "other", "9")
    assert not covers(ADVISORY, "x-y", "9")


def test_pins_are_read_from_every_constraints_file() -> None:
    found = pins()
    assert {"torch", "pyarrow", "vllm"} <= found.keys()
    assert all(versions for versions in found.values())
