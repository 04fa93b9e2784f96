"""Nothing that someone else wrote is unpickled: neither by pickle itself nor by a loader that falls back on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("teachercache", "pipeline", "trainer")
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
OURS = {("teachercache/store/store.py", "pickle.loads")}  # of the file system that the same line pickled


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the dotted name of each call."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield ast.unparse(node.func), node


def unsafe(text: str) -> list[str]:
    """Return what in a module could run a pickle's code."""
    found = []
    for name, call in calls(text):
        module, _, verb = name.rpartition(".")
        options = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if (
            (module.split(".")[0] in UNSAFE and verb in ("load", "loads", "Unpickler", "open"))
            or (name == "torch.load" and options.get("weights_only") != "True")
            or (options.get("allow_pickle", "False") != "False")
            or (name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") and "Safe" not in ast.unparse(call))
            or verb == "read_pickle"
            or options.get("use_safetensors") == "False"
        ):
            found.append(name)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE:
            found.append(f"from {node.module} import")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_foreign_is_unpickled(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        assert [name for name in unsafe(path.read_text(encoding="utf-8")) if (where, name) not in OURS] == [], where


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(data)", "torch.load(path)", "torch.load(path, weights_only=False)", "np.load(p, allow_pickle=True)",
        "from pickle import loads", "yaml.load(text, Loader=yaml.Loader)", "pd.read_pickle(path)", "dill.load(file)",
    ],
)  # fmt: skip
def test_the_test_finds_what_it_looks_for(line):
    assert unsafe(line)


@pytest.mark.parametrize(
    "line", ["json.load(file)", "torch.load(p, weights_only=True)", "np.load(p)", "yaml.safe_load(t)"]
)
def test_the_test_leaves_safe_loaders_alone(line):
    assert not unsafe(line)
