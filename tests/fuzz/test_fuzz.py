"""A slice of the fuzzer: the same in each run, without what needs torch. `make fuzz` runs all of it, from a new seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.plans import CACHE, TRAINER
from tests.fuzz.reader import Reader, fuzz, reader_of

EXAMPLES = 6


@pytest.fixture(scope="module", params=["cache", "trainer"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    started = Reader(request.param)
    yield started
    started.close()


def test_every_mutated_input_ends_in_a_coded_error_or_a_right_result(reader: Reader) -> None:
    for kind in (kind for kind in (*CACHE, *TRAINER) if reader_of(kind) == reader.kinds):
        outcomes, findings = fuzz(reader, kind, EXAMPLES, 1)
        assert findings == []
        assert outcomes.total() >= EXAMPLES // 2
