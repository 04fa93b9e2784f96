"""Which module imports which, read from the source: the graph of modules and the graph of rooms of a package."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


def imports_of(path: Path, module: str) -> set[str]:
    """Dotted names that a file imports: at its top, in functions, under TYPE_CHECKING and by import_module.

    `from a.b import c` counts as `a.b.c`, which is cut to `a.b` where c is no module (see `modules`).
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return names


@cache
def modules(package: str) -> dict[str, set[str]]:
    """Each module of a package (`pipeline.corpus.readers`; `pipeline` is its `__init__`) -> dotted names it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[module] = imports_of(path, module)
    return found


def module_graph(package: str) -> dict[str, set[str]]:
    """Module -> modules of the same package that it imports."""
    known = modules(package)

    def owner(name: str) -> str | None:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name or None

    return {m: {o for name in names if (o := owner(name)) and o != m} for m, names in known.items()}


def room(module: str) -> str:
    """The folder or the top-level module of the package that a module belongs to; "" for the package's `__init__`."""
    _, _, inside = module.partition(".")
    return inside.partition(".")[0]


def room_graph(package: str) -> dict[str, set[str]]:
    """Room -> rooms of the same package that it imports."""
    graph: dict[str, set[str]] = {}
    for module, imported in module_graph(package).items():
        graph.setdefault(room(module), set()).update(room(other) for other in imported if room(other) != room(module))
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, each sorted (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = [stack.pop()]
            while component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """Room -> 1 + the largest level of the rooms that it imports. The graph must have no cycle."""
    known: dict[str, int] = {}

    def level(node: str) -> int:
        if node not in known:
            known[node] = 1 + max((level(other) for other in graph[node]), default=0)
        return known[node]

    for node in graph:
        level(node)
    return known
