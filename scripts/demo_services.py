"""The demo's two servers on this machine: an S3 server that keeps its data on disk and a Ray head with its job server.

Each starts a new process group, so that stopping it also stops what it started; `ray stop` would stop every
Ray on the machine, other people's too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports of the loopback address that are free at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def stop_group(process: subprocess.Popen[bytes], patience_s: float = 4.0) -> None:
    """SIGTERM, then SIGKILL, to the whole process group that `process` leads."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            if sent is signal.SIGTERM:
                time.sleep(0.3)  # what the leader started gets the same signal; then the rest of the group is killed


@contextlib.contextmanager
def service(command: list[str], log: Path, env: dict[str, str], ready: Callable[[], bool], what: str) -> Iterator[None]:
    """Run `command` until the block ends; raises RuntimeError with the end of its log when it is not ready in 60 s."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{what} did not start (`{' '.join(command[:3])} …`); its log {log} ends:\n{tail}")
            time.sleep(0.2)
        yield
    finally:
        stop_group(process)


def answers(url: str) -> bool:
    """True once something at `url` speaks HTTP, whatever the status."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, OSError):
        return False
    return True


@contextlib.contextmanager
def s3_server(data: Path, log: Path) -> Iterator[dict[str, str]]:
    """localbucket over the folder `data`; yields the environment that makes any S3 client use it."""
    data.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    client = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = [str(BIN / "localbucket"), "--port", str(port), str(data)]
    with service(command, log, dict(os.environ), lambda: answers(endpoint), "the S3 server"):
        yield client


@contextlib.contextmanager
def ray_head(env: dict[str, str], log: Path, num_cpus: int) -> Iterator[str]:
    """A Ray head node with its job server; yields the address for `ray job submit --address`.

    Sets a fresh token in `env`, which clients need as well: a job server runs whatever it is given.
    """
    env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    gcs, dashboard, agent, metrics, client, runtime_env = free_ports(6)
    # Ray puts Unix sockets under this folder, and their paths may have 107 bytes only: so not under the project.
    scratch = tempfile.mkdtemp(prefix="tc-ray-")
    command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    command += [f"--port={gcs}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", f"--temp-dir={scratch}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}"]
    command += [f"--ray-client-server-port={client}", f"--runtime-env-agent-port={runtime_env}"]
    command += [f"--num-cpus={num_cpus}", "--object-store-memory=200000000"]
    address = f"http://127.0.0.1:{dashboard}"
    try:
        with service(command, log, env, lambda: answers(f"{address}/api/version"), "the Ray head"):
            yield address
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
