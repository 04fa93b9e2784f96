"""The engine's processes end with the process that started them.

vLLM runs its engine in a child process. A SIGKILL of the parent leaves the child running for ever, and on a GPU it keeps
the memory, so that the actor which Ray starts next has no room. Ray ends children of a dead worker only where the
cluster was started with RAY_process_group_cleanup_enabled.
"""

from __future__ import annotations

import os
import threading
import time

import psutil

FRONT_END = "TEACHERCACHE_FRONT_END"  # environment variable, inherited by the engine's processes: the parent's id


def announce() -> None:
    """Let processes that are started from here on know that this one is their front end."""
    os.environ[FRONT_END] = str(os.getpid())


def end_with_front_end(every_s: float = 1.0) -> None:
    """Watch the front end from a thread; when it is gone, kill this process and those between the two.

    Does nothing in the front end itself, and where it is no ancestor of this process.
    """
    front_end, between = os.environ.get(FRONT_END), [psutil.Process()]
    while str(between[-1].pid) != front_end:
        parent = between[-1].parent()
        if parent is None:
            return
        between.append(parent)
    if len(between) > 1:
        threading.Thread(target=_watch, args=(between[:-1], int(front_end), every_s), daemon=True).start()


def _watch(between: list[psutil.Process], front_end: int, every_s: float) -> None:
    """Kill `between`, this process first and the front end's child last in the list, once that child has another parent."""
    while _parent_of(between[-1]) == front_end:
        time.sleep(every_s)
    for process in reversed(between):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _parent_of(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None
