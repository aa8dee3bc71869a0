"""Measures the package: rooms, imports between them, docstrings, sizes, and the calls of one step.

    python scripts/house.py                  goals, then a plain table
    python scripts/house.py --goals          what is to be reached, with the goal beside it
    python scripts/house.py --json           the same as JSON
    python scripts/house.py --trace          also runs a tiny model and counts the calls of one step
    python scripts/house.py --root DIR       another checkout

Reads the source with `ast`; only `--trace` imports the package. What is counted:

- A room is a folder directly below the package. A file beside the rooms counts as a room of its own for
  arrows, floors and circles; the package's own `__init__` does not: it only names public objects.
- An import counts wherever it stands, in a function too. Those under `if TYPE_CHECKING` count in
  `circles_with_type_imports` only.
- A module is a file with code; an `__init__` that holds a docstring only is not one.
- A line of code holds a token that is no comment and no docstring; line ends and indents are no tokens.
- An `Any` annotation is nothing but `Any`; a whole trainer is a parameter called `trainer`.
- A function's lines run from `def` (or its decorators) to its end, functions inside it included.
- Public: no leading underscore in the name or its classes, not inside a function. Parameters leave out
  `self` and `cls`. A body starts after the docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from import_graph import circles, floors, import_graph, room_graph

PACKAGE = "hf_dpzero"
LONG_FILE = 450
LONG_BODY = 10
Function = ast.FunctionDef | ast.AsyncFunctionDef
Fact = Callable[[dict[str, Any]], Any]
GOALS: tuple[tuple[str, Fact, str], ...] = (
    ("lines in all", lambda f: f["package_lines"], "36,000; stretch 32,000"),
    ("lines of code", lambda f: f["code_lines"], "23,000; stretch 21,000"),
    ("tokens of code", lambda f: f["code_tokens"], "210,000"),
    ("modules", lambda f: f["modules"], "140"),
    ("functions", lambda f: f["functions"], "2,000"),
    ("90th percentile of a function, lines", lambda f: f["function_lines_90th"], "40"),
    ("comment lines", lambda f: f["comment_lines"], "800"),
    ("Any annotations", lambda f: f["any_annotations"], "120"),
    ("functions that take a whole trainer", lambda f: f["take_a_trainer"], "0"),
    ("settings of DPZeroConfig", lambda f: f["settings"], "25 flat, 6 nested"),
    ("files of a step", lambda f: f["step"]["modules_entered"], "20"),
    ("functions of a step", lambda f: f["step"]["functions_entered"], "90"),
    ("Python calls of a step", lambda f: f["step"]["calls"], "250"),
    ("test lines", lambda f: f["test_lines"], "32,000"),
    ("planted bugs", lambda f: f["planted_bugs"], "60, all caught"),
    ("characters of a line, on average", lambda f: f["mean_line"], "43 at most"),
    ("lines of package, scripts, recipes", lambda f: f["all_lines"], "counted together too"),
)
"""Label, where it is among the facts, what is to be reached."""
LAYOUT_TOKENS = (
    *(tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
    *(tokenize.COMMENT, tokenize.ENCODING),
)


def functions(node: ast.AST, public: bool = True, outer: bool = True) -> Iterator[tuple[Any, bool]]:
    """(function, whether it is public) of everything under `node`."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, Function | ast.ClassDef)
        seen = public and not (named and child.name.startswith("_"))
        if isinstance(child, Function):
            yield child, seen and outer
        yield from functions(child, seen, outer and not isinstance(child, Function))


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes of a function's body, those of functions and classes inside it left out."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def parameters(function: Function) -> int:
    """How many parameters a caller sees."""
    a = function.args
    names = [p.arg for p in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg] if p]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def returns_something(function: Function) -> bool:
    """By the annotation if there is one, else by the body."""
    if function.returns is not None:
        return ast.unparse(function.returns) not in {"None", "NoReturn"}
    return any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        or (isinstance(node, ast.Return) and node.value is not None)
        for node in own_nodes(function)
    )


def raises(function: Function) -> bool:
    """Whether the body raises an error of its own; NotImplementedError marks a method to override."""
    errors = [node.exc for node in own_nodes(function) if isinstance(node, ast.Raise) and node.exc]
    return any("NotImplementedError" not in ast.unparse(error) for error in errors)


def body_lines(function: Function) -> int:
    """Lines from the first statement after the docstring to the end."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def share(held: list[bool]) -> dict[str, Any]:
    """How many of how many, and in %."""
    percent = round(100 * sum(held) / len(held), 1) if held else None
    return {"have": sum(held), "of": len(held), "percent": percent}


def docstring_facts(trees: dict[Path, ast.Module]) -> dict[str, Any]:
    """Coverage of the sections of public docstrings, and sizes of functions."""
    everything = [item for tree in trees.values() for item in functions(tree)]
    public = [(f, ast.get_docstring(f) or "") for f, is_public in everything if is_public]
    several = [(f, text) for f, text in public if parameters(f) >= 2]

    def has(text: str, *sections: str) -> bool:
        return any(line.strip() in sections for line in text.splitlines())

    long = [text for f, text in public if body_lines(f) > LONG_BODY]
    return {
        "functions": len(everything),
        "public_functions": len(public),
        "public_with_docstring": share([bool(text) for _, text in public]),
        "args_section": share([has(text, "Args:") for _, text in several]),
        "returns_section": share(
            [has(text, "Returns:", "Yields:") for f, text in several if returns_something(f)]
        ),
        "raises_section": share([has(text, "Raises:") for f, text in several if raises(f)]),
        "one_line_docstring_over_10_lines": share([len(t.splitlines()) == 1 for t in long]),
        "median_body_lines": statistics.median(body_lines(f) for f, _ in everything),
    }


def comment_lines(text: str) -> int:
    """Lines that hold a comment and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type == tokenize.COMMENT and t.line.lstrip().startswith("#") for t in tokens)


def code_facts(texts: dict[Path, str], trees: dict[Path, ast.Module]) -> dict[str, int]:
    """Lines and tokens of code, and what of it is untyped or large."""
    lines = tokens = 0
    for path, text in texts.items():
        strings = set(_string_lines(trees[path]))
        read = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [t for t in read if t.type not in LAYOUT_TOKENS and t.start[0] not in strings]
        tokens += len(found)
        lines += len({n for t in found for n in range(t.start[0], t.end[0] + 1)})
    everything = [f for tree in trees.values() for f, _ in functions(tree)]
    sizes = sorted(
        (f.end_lineno or 0) - min([f.lineno, *(d.lineno for d in f.decorator_list)]) + 1
        for f in everything
    )
    return {
        "code_lines": lines,
        "code_tokens": tokens,
        "function_lines_90th": sizes[len(sizes) * 9 // 10],
        "any_annotations": sum(map(_is_any, _annotations(trees))),
        "take_a_trainer": sum(
            any(a.arg == "trainer" for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs))
            for f in everything
        ),
    }


def _string_lines(tree: ast.AST) -> Iterator[int]:
    """Lines of strings that are statements: docstrings, and those under a constant."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield from range(node.lineno, (node.end_lineno or 0) + 1)


def _annotations(trees: dict[Path, ast.Module]) -> Iterator[ast.AST]:
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        found = (getattr(node, name, None) for name in ("annotation", "returns"))
        yield from (annotation for annotation in found if isinstance(annotation, ast.AST))


def _is_any(annotation: ast.AST) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def settings_of(tree: ast.Module) -> int:
    """Fields that `DPZeroConfig` has of its own, flat and nested ones."""
    (own,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "OwnFields")
    return sum(isinstance(node, ast.AnnAssign) for node in own.body)


def planted_bugs(root: Path) -> int:
    """Bugs that `planted_bugs.py` knows."""
    files = [root / "scripts" / name for name in ("bugs_to_plant.py", "planted_bugs.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(isinstance(call.func, ast.Name) and call.func.id == "Bug" for call in calls)


def measure(root: Path) -> dict[str, Any]:
    """Every count of the tree at `root`."""
    package = root / PACKAGE
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    if not texts:
        raise SystemExit(f"no Python file below {package}")
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path.relative_to(package): len(text.splitlines()) for path, text in texts.items()}
    tests = [path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py")]
    modules = import_graph(trees, root)
    rooms = room_graph(modules)
    sizes: dict[str, list[int]] = {}
    for path, count in lines.items():
        sizes.setdefault(path.parts[0] if len(path.parts) > 1 else "(root)", []).append(count)
    comments = sum(map(comment_lines, texts.values()))
    config = next(tree for tree in trees.values() if _has_config(tree))
    return {
        "files_at_root": len(sizes["(root)"]),
        "python_files": len(trees),
        "modules": sum(len(t.body) > (ast.get_docstring(t) is not None) for t in trees.values()),
        "package_lines": sum(lines.values()),
        "test_files": len(tests),
        "test_lines": sum(len(text.splitlines()) for text in tests),
        "rooms": {
            room: {"files": len(of), "lines": sum(of), "imports": sorted(rooms.get(room, ()))}
            for room, of in sorted(sizes.items())
        },
        "arrows_between_rooms": sum(map(len, rooms.values())),
        "floors": floors(rooms),
        "circles_between_modules": circles(modules),
        "circles_with_type_imports": circles(import_graph(trees, root, types=True)),
        "circles_between_rooms": circles(rooms),
        "files_over_450_lines": {str(p): n for p, n in lines.items() if n > LONG_FILE},
        "comment_lines": comments,
        "comment_lines_percent": round(100 * comments / sum(lines.values()), 1),
        "mean_line": round(sum(map(len, texts.values())) / sum(lines.values()), 1),
        "all_lines": sum(lines.values()) + _beside(root),
        "settings": settings_of(config),
        "planted_bugs": planted_bugs(root),
        **code_facts(texts, trees),
        **docstring_facts(trees),
    }


def _has_config(tree: ast.Module) -> bool:
    return any(isinstance(n, ast.ClassDef) and n.name == "OwnFields" for n in tree.body)


def _beside(root: Path) -> int:
    """Lines of scripts and recipes."""
    files = [*(root / "scripts").rglob("*.py"), *(root / "recipes").rglob("*.yaml")]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def goals(facts: dict[str, Any]) -> Iterator[str]:
    """A row for each of `GOALS`; those of a step only where one was traced."""
    for label, value_of, goal in GOALS:
        try:
            value = value_of(facts)
        except KeyError:
            continue
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        yield f"{label:38}{shown:>10}   {goal}"


def table(facts: dict[str, Any], indent: str = "") -> Iterator[str]:
    """The facts as aligned lines of text."""
    for name, value in facts.items():
        if isinstance(value, dict) and "percent" in value:
            value = f"{value['percent']} % ({value['have']} of {value['of']})"
        elif isinstance(value, dict) and "imports" in value:
            imports = ", ".join(value["imports"]) or "nothing"
            value = f"{value['files']:3} files {value['lines']:6} lines, imports {imports}"
        if isinstance(value, dict):
            yield f"{indent}{name:34} {len(value)}"
            yield from table(value, indent + "  ")
        elif isinstance(value, list):
            yield f"{indent}{name:34} {len(value)}"
            yield from (f"{indent}  {' <-> '.join(circle)}" for circle in value)
        else:
            yield f"{indent}{name:34} {value}"


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--goals", action="store_true", help="print the rows with a goal only")
    parser.add_argument("--trace", action="store_true", help="also count the calls of one step")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args()
    facts = measure(options.root.resolve())
    if options.trace:
        sys.path.insert(0, str(options.root.resolve()))
        from step_trace import trace_one_step

        facts["step"] = trace_one_step()
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    rows = list(goals(facts))
    print("\n".join(rows if options.goals else [*rows, "", *table(facts)]))


if __name__ == "__main__":
    main()
