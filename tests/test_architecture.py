"""The house rules that a reader of the imports can check: `docs/architecture.md` is the plan.

The table there lists the modules; imports go down it, heavy packages are imported eagerly only
where its third column names them without "(lazy)", and no module uses a global generator.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_dpzero"

HEAVY = {
    "accelerate",
    "bitsandbytes",
    "datasets",
    "dp_accounting",
    "evaluate",
    "huggingface_hub",
    "matplotlib",
    "numba",
    "opacus",
    "opendp",
    "pandas",
    "peft",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "transformers",
    "triton",
}


class Row(NamedTuple):
    """One row of the table: its modules and the packages it may import on loading."""

    modules: tuple[str, ...]
    eager: frozenset[str]
    everything: bool


def table() -> list[Row]:
    """The rows of the first table of docs/architecture.md, top to bottom."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| `")]
    return [_row(*[cell.strip() for cell in line.strip("|").split("|")[:3]]) for line in lines]


def _row(first: str, _what: str, third: str) -> Row:
    eager = re.sub(r"\w+ \(lazy\)", "", third)
    return Row(
        modules=tuple(re.findall(r"`([\w/]+)(?:\.py)?`", first)),
        eager=frozenset(re.findall(r"\w+", eager)),
        everything=third.startswith("all"),
    )


def rank() -> dict[str, int]:
    """module name -> its row; `tasks/` and `commands/` stand for everything in them."""
    return {name: index for index, row in enumerate(table()) for name in row.modules}


def modules() -> list[Path]:
    """Every module of the package but the lazy `__init__`s."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def relative(path: Path) -> str:
    """A readable id for a parametrised test."""
    return str(path.relative_to(PACKAGE).with_suffix(""))


def house_name(path: Path) -> str:
    """As the table calls it: "plan", or "tasks/" for a module in that folder."""
    inside = path.relative_to(PACKAGE)
    return inside.stem if len(inside.parts) == 1 else f"{inside.parts[0]}/"


class Import(NamedTuple):
    """One imported dotted name; `eager` if it happens when the module is loaded."""

    name: str
    eager: bool
    line: int


def imports(path: Path) -> list[Import]:
    """All imports of a file, those under TYPE_CHECKING left out."""
    return list(_walk(ast.parse(path.read_text(encoding="utf-8")), eager=True))


def _walk(node: ast.AST, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _walk(other, eager)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, eager, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import in line {child.lineno}"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", eager, child.lineno)
        else:
            inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, eager and not inner)


def our_module(name: str, known: dict[str, int]) -> str | None:
    """The table's name for an imported dotted name of ours; None for the package itself."""
    parts = name.split(".")
    if parts[0] != "hf_dpzero" or len(parts) < 2:
        return None
    folder = f"{parts[1]}/"
    return folder if folder in known else parts[1]


# ---------------------------------------------------------------- the table and the tree


def test_the_reader_sees_what_is_there():
    """Guards this file: an empty table, tree or import list would make every test below pass."""
    assert len(table()) >= 15
    names = {house_name(path) for path in modules()}
    assert names >= {"directions", "mechanisms", "plan", "trainer", "cli", "recipe"}
    assert sum(len(imports(path)) for path in modules()) > 100
    assert any(item.name.startswith("hf_dpzero.") for path in modules() for item in imports(path))
    assert "transformers" in next(row for row in table() if "arguments" in row.modules).eager
    assert "opendp" not in next(row for row in table() if "noise" in row.modules).eager


def test_every_module_is_in_the_table():
    known = rank()
    missing = {house_name(path) for path in modules()} - known.keys()
    assert not missing, f"add to the table of docs/architecture.md: {sorted(missing)}"


def test_every_module_of_the_table_exists():
    present = {house_name(path) for path in modules()}
    absent = rank().keys() - present
    assert not absent, f"docs/architecture.md lists what is not there: {sorted(absent)}"


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_go_down(path: Path):
    known, here = rank(), house_name(path)
    if here not in known:
        pytest.skip("test_every_module_is_in_the_table reports it")
    for item in imports(path):
        there = our_module(item.name, known)
        if there is None or there not in known:
            continue  # a name of the package itself, such as __version__
        assert known[there] <= known[here], (
            f"{path.name}:{item.line} imports {there}, listed below {here} in docs/architecture.md"
        )


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_heavy_packages_are_imported_eagerly_only_where_the_table_says(path: Path):
    rows, known, here = table(), rank(), house_name(path)
    if here not in known:
        pytest.skip("test_every_module_is_in_the_table reports it")
    row = rows[known[here]]
    above = frozenset().union(*(r.eager for r in rows)) if row.everything else frozenset()
    for item in imports(path):
        package = item.name.split(".")[0]
        if item.eager and package in HEAVY:
            assert package in row.eager | above, (
                f"{path.name}:{item.line} imports {package} on loading; import it in the function "
                "that uses it, or name it in the third column of docs/architecture.md"
            )


def test_the_package_itself_imports_nothing_on_loading():
    found = imports(PACKAGE / "__init__.py")
    assert found
    eager = {item.name.split(".")[0] for item in found if item.eager}
    assert eager <= {"__future__", "importlib", "typing"}


def test_one_module_imports_opacus():
    users = [p.stem for p in modules() for item in imports(p) if item.name.startswith("opacus")]
    assert set(users) == {"opacus_hooks"}


# ---------------------------------------------------------------- no global generator

GLOBAL_CALLS = re.compile(
    r"^(torch\.(manual_seed|seed|cuda\.manual_seed(_all)?|random\.manual_seed|set_rng_state)"
    r"|random\.(?!Random$|SystemRandom$)\w+"
    r"|(np|numpy)\.random\.(?!Generator$|Philox$|PCG64$|SeedSequence$|BitGenerator$)\w+"
    r"|(transformers\.)?set_seed|enable_full_determinism)$"
)
DRAWS = re.compile(
    r"^(torch\.(rand|randn|randint|randperm|normal|bernoulli|multinomial|poisson)(_like)?"
    r"|.*\.(normal_|uniform_|bernoulli_|random_|exponential_|geometric_|cauchy_|log_normal_))$"
)


def global_draws(source: str) -> list[str]:
    """Calls that read or set a process-wide generator."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        name = ast.unparse(call.func)
        generator = any(keyword.arg == "generator" for keyword in call.keywords)
        initialiser = ".init." in name  # torch.nn.init.normal_(tensor, generator=...)
        if GLOBAL_CALLS.match(name) or (
            (DRAWS.match(name) or initialiser) and not generator and not _deterministic(name)
        ):
            found.append(f"line {call.lineno}: {name}")
    return found


def _deterministic(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in {"zeros_", "ones_", "constant_", "eye_"}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.manual_seed(1)", 1),
        ("np.random.normal(size=3)", 1),
        ("numpy.random.seed(0)", 1),
        ("random.random()", 1),
        ("random.Random(3).random()", 0),
        ("torch.randn(3)", 1),
        ("x.normal_()", 1),
        ("nn.init.xavier_uniform_(w)", 1),
        ("set_seed(3)", 1),
        ("np.random.Generator(np.random.Philox(key=k)).normal()", 0),
        ("torch.randn(3, generator=g)", 0),
        ("x.normal_(generator=g)", 0),
        ("nn.init.zeros_(w)", 0),
        ("os.urandom(32)", 0),
    ],
)
def test_the_detector_of_global_generators_detects(source: str, count: int):
    assert len(global_draws(source)) == count


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_no_global_generator(path: Path):
    if path.stem == "isolation":  # it saves, replaces and restores them; it draws nothing
        return
    assert global_draws(path.read_text(encoding="utf-8")) == []


# ---------------------------------------------------------------- nothing of one machine

MACHINE_PATHS = re.compile(r"(?<![\w.}$/-])/(work|root|home(?!/me/)|tmp|Users|opt|mnt)/\w")


def project_files() -> list[Path]:
    """Text files that git tracks or would track; the folders themselves outside a checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    paths = [ROOT / n for n in names] if names else [p for p in ROOT.rglob("*") if p.is_file()]
    suffixes = {".py", ".md", ".yaml", ".yml", ".toml", ".cfg", ".sh", ".txt", ".json", ""}
    return [
        path
        for path in paths
        if path.is_file()
        and path.suffix in suffixes
        and not any(_of_tools(part) for part in path.relative_to(ROOT).parts[:-1])
    ]


def _of_tools(folder: str) -> bool:
    """Whether a folder holds what tools left behind: caches, environments, runs."""
    hidden = folder.startswith(".") and folder != ".ci"
    return hidden or folder in {"out", "build", "venv"} or folder.endswith(".egg-info")


def test_no_path_of_one_machine_is_in_the_project():
    files = project_files()
    assert len(files) > 30
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not MACHINE_PATHS.search(line), f"{path.relative_to(ROOT)}:{number}: {line}"


def test_the_detector_of_machine_paths_detects():
    folder = "home"
    assert MACHINE_PATHS.search(f"open('/{folder}/someone/data.csv')")
    assert not MACHINE_PATHS.search("see https://example.org/home/page and ./work/x")


def test_documents_have_no_placeholders():
    """A table that was to be filled in later is not a table."""
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    for path in texts:
        found = re.findall(r"^(?:TABLE|MEASURED|TODO|FIXME|XXX)\w*", path.read_text(), re.MULTILINE)
        assert not found, f"{path.name}: {found}"
