"""Functions that run on several ranks at once: processes over gloo, forked from one that has imported torch already."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

PRELOAD = ["tests.trainer.ranks", "trainer.fit", "peft", "transformers.models.llama.modeling_llama",
           "transformers.models.gpt_oss.modeling_gpt_oss"]  # fmt: skip
_context = multiprocessing.get_context("forkserver")


class RankFailed(AssertionError):
    """A rank raised or died; `ends` has each rank's exception, as text, or exit status."""

    def __init__(self, ends: list[Any]) -> None:
        super().__init__("\n".join(map(str, ends)))
        self.ends = ends


def free_ports(count: int = 32) -> int:
    """The first of some free ports in a row, below those that the system gives to connections and to other tests' servers."""
    for first in random.SystemRandom().sample(range(20_000, 32_000, count), 100):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RankFailed([f"no {count} free ports in a row"])


def run(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns on each of the ranks; RankFailed where one ends otherwise."""
    return finish(start(count, function, *arguments))


def start(count: int, function: Callable[..., Any], *arguments: Any) -> list[tuple[Any, Any]]:
    """Start the ranks: (process, the end of its pipe) of each."""
    _context.set_forkserver_preload(PRELOAD)
    port, started = free_ports(), []
    for rank in range(count):
        ours, theirs = _context.Pipe(duplex=False)
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
        environment = {**os.environ, **{k: str(v) for k, v in where.items()}, "MASTER_ADDR": "127.0.0.1"}
        process = _context.Process(target=_child, args=(theirs, environment, function, arguments), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def finish(started: Sequence[tuple[Any, Any]], timeout: float = 120) -> list[Any]:
    """Wait for the ranks and return their results; the others are ended where one fails, as torchrun does."""
    results: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) < len(started):
            left = [i for i in range(len(started)) if i not in results]
            ready = wait([started[i][1] for i in left], max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {left} did not end in {timeout} s; so far {results}"
            for i in left:
                process, pipe = started[i]
                if pipe in ready:
                    try:
                        results[i] = pipe.recv()
                    except EOFError:
                        process.join(10)
                        results[i] = "died", process.exitcode
            if any(kind != "returned" for kind, _ in results.values()):
                deadline = min(deadline, time.monotonic() + 20)
    finally:
        for process, _ in started:
            process.kill()
            process.join(10)
    if any(kind != "returned" for kind, _ in results.values()):
        raise RankFailed([results[i][1] for i in range(len(started))])
    return [torch.load(io.BytesIO(results[i][1]), weights_only=False) for i in range(len(started))]


def _child(pipe: Any, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        result = io.BytesIO()
        torch.save(function(*arguments), result)  # pickled as it is, tensors would stay behind in shared memory
        pipe.send(("returned", result.getvalue()))
    except SystemExit as ended:
        pipe.send(("ended", ended.code))
        os._exit(1)
    except BaseException as error:
        pipe.send(("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        os._exit(1)


def each(function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """What a function returns for each of the arguments, one after the other: a rank's body. A group has its own port."""
    found = []
    for ours in arguments:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        found.append(function(*ours))
    return found


def fits(*runs: tuple[Path, Sequence[str]]) -> list[dict[str, Any]]:
    """`fit` with each of the configurations and overrides: a rank's body."""
    from tests.trainer.runs import fit_here

    return each(lambda config, overrides: fit_here(config, *overrides), runs)
