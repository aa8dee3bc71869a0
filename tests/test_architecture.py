"""Rules that can be read off the source: imports go down the table of rooms in docs/architecture.md,
heavy packages load only where that table says, and no module uses a global random generator.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_dpzero"

HEAVY = frozenset(
    """accelerate bitsandbytes datasets dp_accounting evaluate huggingface_hub matplotlib numba opacus
    opendp pandas peft rich safetensors scipy sklearn transformers triton""".split()  # noqa: SIM905
)


class Room(NamedTuple):
    """One row of the table: the rooms it may import, and the heavy packages it may load eagerly."""

    imports: frozenset[str]
    packages: frozenset[str]


class Import(NamedTuple):
    """One imported dotted name; `eager` if it happens when the module is loaded."""

    name: str
    eager: bool
    where: str


def rooms() -> dict[str, Room]:
    """The table of docs/architecture.md, top to bottom: room -> what it may import."""
    lines = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
    table = {}
    for line in lines:
        if match := re.match(r"\| `(\w+)(?:/|\.py)` \|", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            table[match[1]] = Room(*(frozenset(re.findall(r"\w+", cell)) for cell in cells[2:4]))
    return table


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The first folder below the package; a file at its root is its own room."""
    inside = path.relative_to(PACKAGE)
    return inside.parts[0].removesuffix(".py")


def imports(path: Path) -> list[Import]:
    """All imports of a file but those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return list(_walk(tree, str(path.relative_to(ROOT)), eager=True))


def _walk(node: ast.AST, file: str, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            where = f"{file}:{child.lineno}"
            yield from (Import(alias.name, eager, where) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{file}:{child.lineno} is a relative import"
            where = f"{file}:{child.lineno}"
            yield from (Import(f"{child.module}.{a.name}", eager, where) for a in child.names)
        else:
            inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, file, eager and not inner)


def test_imports_go_down_the_table_of_rooms():
    table = rooms()
    order = list(table)
    present = {room_of(path) for path in modules()} - {"__init__"}
    assert len(table) >= 12 and present == table.keys(), sorted(present ^ table.keys())
    for name, room in table.items():
        above = [other for other in room.imports if order.index(other) <= order.index(name)]
        assert not above, f"the table lets {name} import {above}, which do not stand below it"
    seen = 0
    for path in modules():
        here = room_of(path)
        for item in imports(path):
            top, _, rest = item.name.partition(".")
            there = rest.split(".")[0]
            assert top not in {"scripts", "tests"}, f"{item.where} imports {item.name}"
            if top != "hf_dpzero" or here == "__init__" or there not in table:
                continue
            seen += there != here
            assert there == here or there in table[here].imports, (
                f"{item.where} imports {item.name}; {here} may import {sorted(table[here].imports)}"
            )
    assert seen > 50


def test_a_room_names_each_of_its_files():
    """A reader of `hf_dpzero/ROOM/__init__.py` learns what each file is for."""
    unnamed = []
    for path in modules():
        room = path.parent / "__init__.py"
        if path.parent.parent == room.parents[1] and path.parent.parent.name == "hf_dpzero":
            said = ast.get_docstring(ast.parse(room.read_text(encoding="utf-8"))) or ""
            if path.stem != "__init__" and not re.search(rf"`[^`]*\b{path.stem}\b", said):
                unnamed.append(f"{path.parent.name}/{path.stem}")
    assert not unnamed


def test_heavy_packages_are_loaded_only_where_the_table_says():
    table = rooms()
    seen = 0
    for path in modules():
        allowed = table[room_of(path)].packages if room_of(path) in table else frozenset()
        for item in imports(path):
            package = item.name.split(".")[0]
            seen += package in HEAVY
            assert not (item.eager and package in HEAVY - allowed), (
                f"{item.where} imports {package} on loading; import it in the function that uses it, "
                "or name it in the fourth column of docs/architecture.md"
            )
    assert seen > 30
    users = {p.stem for p in modules() for item in imports(p) if item.name.startswith("opacus")}
    assert users == {"ghost_clipping"}


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
    draws = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        generator = any(keyword.arg == "generator" for keyword in call.keywords)
        constant = name.rsplit(".", 1)[-1] in {"zeros_", "ones_", "constant_", "eye_"}
        initialiser = ".init." in name and not constant  # torch.nn.init.normal_(tensor, generator=)
        if GLOBAL_CALLS.match(name) or ((DRAWS.match(name) or initialiser) and not generator):
            draws.append(f"line {call.lineno}: {name}")
    return draws


def test_no_global_generator():
    bad = """torch.manual_seed(1); np.random.normal(size=3); numpy.random.seed(0); random.random()
torch.randn(3); x.normal_(); nn.init.xavier_uniform_(w); set_seed(3)"""
    good = """random.Random(3).random(); np.random.Generator(np.random.Philox(key=k)).normal()
torch.randn(3, generator=g); x.normal_(generator=g); nn.init.zeros_(w); os.urandom(32)"""
    assert len(global_draws(bad)) == 8 and not global_draws(good)
    for path in modules():
        if path.stem != "random_state":  # saves, replaces and restores them; draws nothing
            assert not global_draws(path.read_text(encoding="utf-8")), path


# ---------------------------------------------------------------- text files

MACHINE_PATHS = re.compile(r"(?<![\w.}$/-])/(work|root|home(?!/me/)|tmp|Users|opt|mnt)/\w")
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".cfg", ".sh", ".txt", ".json", ".cff", ""}


def project_files() -> list[Path]:
    """Text files that git tracks or would track; all files outside a checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    paths = [ROOT / name for name in listed if name] or list(ROOT.rglob("*"))
    tools = re.compile(r"^(\.(?!ci$|github$).*|out|build|venv|.*\.egg-info)$")
    return [
        path
        for path in paths
        if path.is_file()
        and path.suffix in SUFFIXES
        and not any(tools.match(part) for part in path.relative_to(ROOT).parts[:-1])
    ]


def test_text_files_name_no_machine_and_hold_no_placeholder():
    folder = "home"
    assert MACHINE_PATHS.search(f"open('/{folder}/someone/data.csv')")
    assert not MACHINE_PATHS.search("see https://example.org/home/page and ./work/x")
    files = project_files()
    assert len(files) > 30
    for path in files:
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            assert not MACHINE_PATHS.search(line), f"{path.relative_to(ROOT)}:{number}: {line}"
        if path.suffix == ".md":
            assert not re.search(r"^(TABLE|MEASURED|TODO|FIXME|XXX)", text, re.MULTILINE), path
