"""Fixtures for all packages: S3 servers that live for the session, and a fresh bucket for each test."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import fsspec
import pytest

from tests import fake_hub
from tests.fake_hub import FakeHub
from tests.servers import Server, serve

# TEACHERCACHE_TEST_S3 = endpoint of one more server, with the keys of tests/servers.py; see scripts/protocol_on_radosgw.sh.
EXTERNAL = os.environ.get("TEACHERCACHE_TEST_S3")
SAFE = ["moto", "localbucket", *(["external"] if EXTERNAL else [])]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """`s3_server("moto" | "localbucket" | "nanio" | "rclone")`: started at first use, stopped after the session."""
    with ExitStack() as stack:
        running: dict[str, Server] = {}

        def get(kind: str) -> Server:
            if kind == "external":
                return Server(kind, str(EXTERNAL))
            if kind not in running:
                running[kind] = stack.enter_context(serve(kind, tmp_path_factory.mktemp("s3") / kind))
            return running[kind]

        yield get


def _use(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    # a file system that an earlier test made without keys keeps looking for none
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    return server.new_bucket()


@pytest.fixture
def s3_url(s3_server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a fresh bucket on moto, with AWS_* set for this process and its children."""
    return _use(s3_server("moto"), monkeypatch)


@pytest.fixture(params=SAFE)
def any_s3_url(
    request: pytest.FixtureRequest, s3_server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> str:
    """URL of a fresh bucket on each S3 server that honours conditional writes, one after the other."""
    return _use(s3_server(request.param), monkeypatch)


@pytest.fixture(params=["file", *SAFE])
def any_url(
    request: pytest.FixtureRequest, s3_server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> str:
    """A fresh cache URL on local disk and on two independent S3 servers."""
    if request.param == "file":
        return str(tmp_path / "cache")
    return _use(s3_server(request.param), monkeypatch) + "/team/cache"


@pytest.fixture(params=["rclone", "nanio"])
def unsafe_s3_url(
    request: pytest.FixtureRequest, s3_server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> str:
    """URL of a fresh bucket on each S3 server that ignores If-None-Match, one after the other."""
    return _use(s3_server(request.param), monkeypatch)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[FakeHub]:
    """A Hugging Face Hub on this machine that the Hub's client in this process and its children asks; HF_TOKEN may write."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with fake_hub.serve() as hub:
        close_session()
        values = {
            "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False, "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_CACHE": str(tmp_path / "hf/hub"), "HF_TOKEN": "hf_write",
        }  # fmt: skip
        for name, value in values.items():
            monkeypatch.setenv(name, str(int(value)) if isinstance(value, bool) else value)
            if name != "HF_TOKEN":
                monkeypatch.setattr(constants, name.removeprefix("HF_") if name == "HF_ENDPOINT" else name, value)
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub
        close_session()


def pytest_configure() -> None:
    """Take SIGINT as a terminal's program does: a shell starts what runs in its background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that two workers end together."""
    kinds = {kind: {item.path for item in items if item.get_closest_marker(kind)} for kind in ("engine", "slow")}
    items.sort(key=lambda item: (item.path not in kinds["engine"], item.path not in kinds["slow"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was skipped and why, grouped by reason: a green run promises nothing about these tests."""
    groups: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
        groups.setdefault(reason.removeprefix("Skipped: "), Counter())[report.nodeid.split("::")[0]] += 1
    if not groups:
        return
    terminalreporter.section("skipped: how many tests, why, and where")
    for reason, files in sorted(groups.items(), key=lambda group: -group[1].total()):
        terminalreporter.line(f"{files.total():4}  {reason}")
        terminalreporter.line("      " + ", ".join(f"{file} ({count})" for file, count in sorted(files.items())))
