"""An HTTP proxy before an S3 server: it counts, answers 503 or slows down for a while, or answers as other vendors do.

It forwards whole requests only. A client that is killed in the middle of a body so leaves nothing behind, as on S3;
the small test servers would store the half they got.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """What another vendor says instead."""

    status: int
    body: bytes = b""
    content_type: str = "application/xml"

    def raw(self) -> bytes:
        said = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\nContent-Type: {self.content_type}\r\n"
        return f"{said}Content-Length: {len(self.body)}\r\nConnection: close\r\n\r\n".encode() + self.body


class FaultyProxy:
    """`mode` is pass, error, slow or silent.

    refuse: answers a request (method, target, headers with lower-case names) instead of the server, or returns None.
    change: replaces the server's answer of a status, or returns None.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._upstream = (parts.hostname, parts.port)
        self.mode = "pass"
        self.refused = 0
        self.requests: Counter[str] = Counter()  # by method
        self.targets: list[str] = []
        self.refuse: Callable[[str, str, dict[str, str]], Answer | None] = lambda method, target, headers: None
        self.change: Callable[[int], Answer | None] = lambda status: None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        threading.Thread(target=self._run, daemon=True).start()
        self._ready.wait(10)
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def start() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
            self.port = server.sockets[0].getsockname()[1]
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, OSError):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
            if "expect" in headers:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await writer.drain()
            body = await self._body(reader, headers)
            method, target, _ = lines[0].split(" ", 2)
            self.requests[method] += 1
            self.targets.append(f"{method} {target}")
            answer = self.refuse(method, target, headers)
            if self.mode == "silent":
                await reader.read()  # until the client gives up
            elif answer is not None:
                writer.write(answer.raw())
                await writer.drain()
            elif self.mode == "error":
                self.refused += 1
                writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                await writer.drain()
            else:
                if self.mode == "slow":
                    await asyncio.sleep(0.3)
                await self._forward(lines, body, writer)
        writer.close()

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await reader.readexactly(int(headers.get("content-length", 0)))
        pieces = []
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            pieces += [line, await reader.readexactly(size + 2)]
            if not size:
                return b"".join(pieces)

    async def _forward(self, lines: list[str], body: bytes, writer: asyncio.StreamWriter) -> None:
        kept = [line for line in lines if line and not line.lower().startswith(("expect:", "connection:"))]
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        up_writer.write(("\r\n".join([*kept, "Connection: close"]) + "\r\n\r\n").encode("latin-1") + body)
        await up_writer.drain()
        first = await up_reader.readline()
        answer = self.change(int(first.split()[1]))
        writer.write(answer.raw() if answer is not None else first)
        while answer is None and (data := await up_reader.read(1 << 16)):
            writer.write(data)
            await writer.drain()
        await writer.drain()
        up_writer.close()

    def count(self, work: Callable[[], object]) -> int:
        """How many requests some work takes."""
        self.requests.clear()
        self.targets.clear()
        work()
        return self.requests.total()

    def for_a_while(self, mode: str, seconds: float) -> None:
        """Blocks for the time of the fault."""
        self.mode = mode
        time.sleep(seconds)
        self.mode = "pass"

    def close(self) -> None:
        async def end() -> None:
            others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
