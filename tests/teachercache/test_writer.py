"""create and CacheWriter: appending to a cache, and refusing another teacher's."""

from __future__ import annotations

import pytest

import teachercache
from teachercache.errors import SpecMismatch
from teachercache.format.spec import TopKRows
from teachercache.testing import synthetic_records, synthetic_spec

SPEC = synthetic_spec()


@pytest.mark.slow
def test_an_equal_spec_appends_and_another_is_refused_field_by_field(any_url):
    teachercache.create(any_url, SPEC).commit("s", synthetic_records(SPEC, 2))
    assert teachercache.create(any_url, SPEC).committed() == {"s"}
    other = SPEC.model_copy(
        update={"rows": TopKRows(entries=9), "teacher": SPEC.teacher.model_copy(update={"dtype": "bfloat16"})}
    )
    with pytest.raises(SpecMismatch) as caught:
        teachercache.create(any_url, other)
    assert [d[0] for d in caught.value.differences] == ["rows.entries", "teacher.dtype"]
    assert caught.value.exit_code == 2
