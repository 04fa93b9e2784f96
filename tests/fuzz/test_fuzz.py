"""A slice of the fuzzer: the same in each run. `make fuzz` runs all of it, with another seed each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.plans import CACHE, TRAINER
from tests.fuzz.reader import Reader, fuzz

EXAMPLES = 20


@pytest.fixture(scope="module", params=["cache", "trainer"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    started = Reader(request.param)
    yield started
    started.close()


def test_every_mutated_input_ends_in_a_coded_error_or_a_right_result(reader: Reader) -> None:
    for kind in CACHE if reader.kinds == "cache" else TRAINER:
        outcomes, findings = fuzz(reader, kind, EXAMPLES, 1)
        assert findings == []
        assert outcomes.total() >= EXAMPLES // 2
