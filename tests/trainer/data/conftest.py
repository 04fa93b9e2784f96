"""The session's cache, open."""

from __future__ import annotations

import pytest

import teachercache


@pytest.fixture(scope="module")
def cache(cache_url: str) -> teachercache.Cache:
    return teachercache.open(cache_url)
