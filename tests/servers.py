"""S3 servers on free loopback ports for tests: moto and localbucket; nanio and rclone, which ignore conditions.

Each is a child process that dies with its context manager. `env()` is what a client needs: endpoint, keys, region.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
KEY, SECRET = "testkeyid0000000", "testsecret000000000000000000000"
KINDS = ("moto", "localbucket", "nanio", "rclone")


@dataclass(frozen=True)
class Server:
    kind: str
    endpoint: str

    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
        }

    def client(self):
        import boto3  # not everywhere where a server runs

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def new_bucket(self, name: str | None = None) -> str:
        """The URL of a fresh bucket."""
        name = name or f"test-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return f"s3://{name}"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _command(kind: str, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    address = f"127.0.0.1:{port}"
    if kind == "moto":
        return [str(BIN / "moto_server"), "-H", "127.0.0.1", "-p", str(port)], {}
    if kind == "localbucket":
        return [sys.executable, "-m", "localbucket", "--host", "127.0.0.1", "--port", str(port), str(folder)], {}
    if kind == "nanio":
        keys = {"NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET}
        where = ["--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        return [str(BIN / "nanio"), "serve", *where], keys
    if kind == "rclone":
        return [str(BIN / "rclone"), "serve", "s3", str(folder), "--addr", address, "--auth-key", f"{KEY},{SECRET}"], {}
    raise ValueError(kind)


@contextmanager
def serve(kind: str, folder: Path) -> Iterator[Server]:
    """Start a server that keeps its data (where it keeps any) in `folder`; stop it and its children at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command, extra = _command(kind, port, folder)
    log = folder.with_name(folder.name + ".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | extra, start_new_session=True, preexec_fn=_die_with_parent
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}/", log)
            yield Server(kind, f"http://127.0.0.1:{port}")
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _die_with_parent() -> None:
    """Runs in the child: a test run that is killed must not leave its servers behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"server exited with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, if only to refuse us
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"server at {url} did not answer within 40 s: {log.read_text()[-2000:]}")
