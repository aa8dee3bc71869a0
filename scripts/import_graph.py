"""Which module of a package imports which, read from the source; circles and floors of such a graph."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

Graph = dict[str, set[str]]


def dotted(path: Path, root: Path) -> str:
    """The name under which `path` is imported."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node: ast.AST, package: str, types: bool = False) -> Iterator[str]:
    """Dotted names that the code under `node` imports.

    Args:
      node: a module or a part of one.
      package: dotted name of the package it lies in, for relative imports.
      types: with the imports under `if TYPE_CHECKING`.
    """
    for child in ast.iter_child_nodes(node):
        if not types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imported_names(other, package, types)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1]
            base = (
                ".".join([*above, *filter(None, [child.module])]) if child.level else child.module
            )
            yield from (f"{base}.{alias.name}" for alias in child.names)
        else:
            yield from imported_names(child, package, types)


def import_graph(trees: dict[Path, ast.Module], root: Path, types: bool = False) -> Graph:
    """Module name -> the modules of the package that it imports, wherever in the file.

    Args:
      trees: every file of the package, parsed.
      root: the folder that holds the package.
      types: with the imports under `if TYPE_CHECKING`.
    """
    names = {dotted(path, root) for path in trees}
    graph: Graph = {}
    for path, tree in trees.items():
        here = dotted(path, root)
        package = here if path.name == "__init__.py" else here.rpartition(".")[0]
        wanted = imported_names(tree, package, types)
        targets = {name if name in names else name.rpartition(".")[0] for name in wanted}
        graph[here] = (targets & names) - {here}
    return graph


def room_of(module: str) -> str:
    """The part of a module's name that follows the package's; empty for the package itself."""
    return [*module.split("."), ""][1]


def room_graph(modules: Graph) -> Graph:
    """Room -> the other rooms that any of its modules imports."""
    graph: Graph = {room_of(module): set() for module in modules if room_of(module)}
    for module, targets in modules.items():
        if room_of(module):
            graph[room_of(module)] |= {room_of(t) for t in targets} - {"", room_of(module)}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of more than one node."""
    reach: Graph = {}
    for start in graph:
        waiting, reach[start] = list(graph[start]), set()
        while waiting:
            node = waiting.pop()
            if node not in reach[start]:
                reach[start].add(node)
                waiting.extend(graph[node])
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def floors(graph: Graph) -> int:
    """Nodes on the longest chain of imports, a circle counted as one."""
    name = {node: node for node in graph}
    for circle in circles(graph):
        name.update(dict.fromkeys(circle, circle[0]))
    below: Graph = {name[node]: set() for node in graph}
    for node, targets in graph.items():
        below[name[node]] |= {name[target] for target in targets} - {name[node]}

    @functools.cache
    def height(node: str) -> int:
        return 1 + max(map(height, below[node]), default=0)

    return max(map(height, below), default=0)
