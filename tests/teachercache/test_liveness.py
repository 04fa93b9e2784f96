"""Which commits are part of the cache: the rules, without a store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from teachercache.format.objects import Commit, FileEntry
from teachercache.store.liveness import is_void, live_commits, resolve_replacements
from teachercache.store.store import ObjectInfo

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def commit(shard_id: str, *replaces: str) -> Commit:
    entry = FileEntry(
        path=f"data/{shard_id}", codec="open", split="train", source="s", size=1, sha256="0" * 64, records=1,
        documents=1, tokens=1, rows=1, row_groups=1,
    )  # fmt: skip
    return Commit(
        shard_id=shard_id, attempt="0" * 32, spec_digest="", files=[entry], records=1, documents=1, tokens=1, rows=1,
        replaces=list(replaces), created="",
    )  # fmt: skip


def live(commits: list[Commit], settled: dict[str, str]) -> list[str]:
    return [c.shard_id for c in live_commits(commits, resolve_replacements(commits, settled))]


def test_the_first_replacement_by_name_wins_whole_and_the_other_is_void_whole():
    commits = [commit("a"), commit("b"), commit("c"), commit("opt-1", "a", "b"), commit("opt-2", "b", "c")]
    assert live(commits, {}) == ["c", "opt-1"]


def test_what_a_manifest_settled_stays():
    commits = [commit("a"), commit("b"), commit("opt-1", "a", "b"), commit("opt-2", "a", "b")]
    assert live(commits, {"a": "opt-2", "b": "opt-2"}) == ["opt-2"]


def test_a_replacement_of_a_shard_without_a_commit_is_void():
    assert live([commit("a"), commit("opt-1", "a", "b")], {}) == ["a"]


def test_a_commit_is_void_half_the_grace_period_after_its_upload_unless_a_manifest_names_its_file():
    ours = commit("a")
    path = ours.files[0].path
    for seconds, void in ((50, False), (51, True)):
        data = {path: ObjectInfo(path, 1, NOW - timedelta(seconds=seconds))}
        assert is_void(ours, NOW, data, set(), grace_seconds=100) is void
        assert not is_void(ours, NOW, data, {path}, grace_seconds=100)
