"""An engine's processes end when the process that started them is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.teachers import orphans

MODEL = Path("build/models/smollm2-135m")
PROCESSES = """
import multiprocessing, os, sys, time
from pipeline.teachers import orphans

def inner(depth):
    if depth:
        child(depth - 1)
    else:
        orphans.end_with_front_end(every_s=0.05)
        print("READY", flush=True)
    time.sleep(600)

def child(depth):
    multiprocessing.get_context("spawn").Process(target=inner, args=(depth,)).start()

if __name__ == "__main__":
    orphans.announce()
    child(int(sys.argv[1]))
    time.sleep(600)
"""
ENGINE = """
import sys, time
if __name__ == "__main__":
    from pipeline.config import TeacherConfig
    from pipeline.teachers.base import RowsWanted
    from pipeline.teachers.vllm_teacher import VllmTeacher
    from teachercache.format.spec import TopKRows

    config = TeacherConfig(model=sys.argv[1], max_model_len=64, engine_args={"enforce_eager": True})
    teacher = VllmTeacher(config, sys.argv[1], RowsWanted(TopKRows(), 49_152))
    print("READY", flush=True)
    time.sleep(600)
"""


def survivors(program: str, argument: str, folder: Path) -> list[str]:
    """Start a program, kill it once it is ready, and return which of its descendants live on after a while."""
    (folder / "program.py").write_text(program)
    root = str(Path.cwd())
    front_end = subprocess.Popen(
        [sys.executable, str(folder / "program.py"), argument],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), HF_HUB_OFFLINE="1"),
    )
    assert front_end.stdout is not None
    assert any("READY" in line for line in front_end.stdout)
    below = psutil.Process(front_end.pid).children(recursive=True)
    assert below
    front_end.kill()
    front_end.wait()
    _, alive = psutil.wait_procs(below, timeout=60)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    names = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    return [name for name in names if "resource_tracker" not in name]  # multiprocessing's, which ends by itself


@pytest.mark.parametrize("depth", [0, 1])
def test_processes_between_worker_and_front_end_are_killed_with_it(depth, tmp_path):
    """depth 0: the engine runs the worker; 1: the worker is a process below the engine's, as tensor-parallel ones are."""
    assert not survivors(PROCESSES, str(depth), tmp_path)


def test_the_front_end_and_strangers_are_left_alone(monkeypatch):
    monkeypatch.delenv(orphans.FRONT_END, raising=False)  # left by a test that started an engine in this process
    alone = "from pipeline.teachers import orphans; import threading; {}orphans.end_with_front_end(); "
    for begin in ("", "orphans.announce(); ", "import os; os.environ[orphans.FRONT_END] = '999999999'; "):
        program = alone.format(begin) + "print(threading.active_count())"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "1"


@pytest.mark.soak
def test_a_real_engine_ends_with_its_teacher(tmp_path, monkeypatch):
    """vLLM's processes of a teacher that is killed; without the watch they live on for ever."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # as on GPUs; on a CPU the teacher runs its engine
    assert not survivors(ENGINE, str(MODEL.resolve()), tmp_path)
