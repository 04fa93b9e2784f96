"""The walls of the house, read from the imports, wherever in a file they are.

- `pipeline -> teachercache <- trainer`, and nothing else crosses; what is shipped imports no benchmark, test or script.
- Inside a package neither modules nor rooms import in a circle, not even in functions or under TYPE_CHECKING.
- A *room* is a folder or a top-level module of a package. The package's `__init__` and `__main__` are doors, not rooms:
  no room imports them. The *level* of a room is 1 + the largest level of the rooms that it imports, so a room that
  imports none has level 1. No package has more than seven levels.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.imports import ROOT, cycles, levels, module_graph, modules, room_graph

NOT_SHIPPED = {"benchmarks", "tests", "scripts", "docs", "deploy"}
FORBIDDEN = {
    "teachercache": {"ray", "vllm", "torch", "triton", "transformers", "pipeline", "trainer", *NOT_SHIPPED},
    "trainer": {"ray", "vllm", "pipeline", *NOT_SHIPPED},
    "pipeline": {"trainer", *NOT_SHIPPED},
}
PACKAGES = sorted(FORBIDDEN)
DOORS = {"", "__main__"}
MOST_LEVELS = 7


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_across_its_boundary(package: str) -> None:
    found = modules(package)
    assert found, f"{package} has no files"
    crossing = {
        module: sorted(bad)
        for module, names in found.items()
        if (bad := {name.split(".")[0] for name in names} & FORBIDDEN[package])
    }
    assert crossing == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_do_not_import_in_a_circle(package: str) -> None:
    assert cycles(module_graph(package)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_do_not_import_in_a_circle_and_have_few_levels(package: str) -> None:
    graph = room_graph(package)
    assert {room: sorted(imported & DOORS) for room, imported in graph.items() if imported & DOORS} == {}
    rooms = {room: imported for room, imported in graph.items() if room not in DOORS}
    assert cycles(rooms) == []
    found = levels(rooms)
    for level in sorted(set(found.values())):
        print(f"{package} {level}: {' '.join(sorted(room for room in found if found[room] == level))}")
    assert max(found.values()) <= MOST_LEVELS, found


HEAVY = ("torch", "triton", "transformers", "ray", "vllm")
RUN = f"""
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code, ended.code
print("imported:", *[name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "command",
    [
        "teachercache.cli --help",
        "pipeline --help",
        "pipeline run --help",
        "trainer --help",
        "trainer fit --help",
        "teachercache.cli plan --help",
        "teachercache.cli fit --help",
    ],
)
def test_help_imports_nothing_heavy(command: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, *command.split()], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].strip() == "imported:"
