"""The API pages cover the package, docstrings say what signatures say, and versions agree."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_dpzero

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_dpzero"
PAGES = ROOT / "docs" / "api"

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SECTION = re.compile(r"^(Args|Attributes|Raises):\n((?:[ ].*\n|\n)+)", re.MULTILINE)


def test_every_room_has_an_api_page_and_every_page_a_room():
    """A page shows a room with all modules below it (show_submodules in mkdocs.yml)."""
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    rooms |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    pages = {path.stem: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    contents = pages.pop("index")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert len(rooms) > 10 and pages.keys() == rooms
    assert "show_submodules: true" in site
    for room, text in pages.items():
        assert f"\n::: hf_dpzero.{room}\n" in text
        assert f"({room}.md)" in contents and f"- api/{room}.md\n" in site


def test_the_api_index_lists_the_public_names():
    listed = re.findall(r"^\| \[`(\w+)`\]", (PAGES / "index.md").read_text(), re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(hf_dpzero.__all__)


def documented() -> Iterator[tuple[str, Documented, str]]:
    """(where, function or class, docstring) of all that have a docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node, f"{text}\n"


def entries(section: str) -> list[str]:
    """What stands before the colon in each entry of a section; "" for a line that has none."""
    lines = textwrap.dedent(section).splitlines()
    names = (re.match(r"[*\w., \[\]`]+(?=:( |$))", line) for line in lines if line[:1].strip())
    return [name[0] if name else "" for name in names]


@pytest.mark.parametrize(
    ("section", "names"),
    [("  x: a\n    b: c\n  y, z: d\n", ["x", "y, z"]), ("  x: a\n  and more\n", ["x", ""])],
)
def test_the_reader_of_sections_reads(section: str, names: list[str]):
    assert entries(section) == names


def test_sections_of_docstrings_name_what_the_signature_has():
    seen = 0
    for where, node, text in documented():
        for title, section in SECTION.findall(text):
            assert "" not in entries(section), f"{where}: an entry of {title} has no `name: `"
            if title == "Args" and not isinstance(node, ast.ClassDef):
                given = {name for entry in entries(section) for name in re.findall(r"\w+", entry)}
                has = {p.arg for p in ast.walk(node.args) if isinstance(p, ast.arg)}
                assert given <= has, f"{where}: no parameter {sorted(given - has)}"
                seen += len(given)
    assert seen > 100


def test_documents_name_modules_and_functions_that_exist():
    """`settings/config.py` is a file of the package, `privacy.events.check_sound` a name in a module."""
    rooms = "|".join(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    seen = 0
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        linked = re.findall(r"\]\(\.\./hf_dpzero/([\w/]+\.py)\)", text)
        for name in linked + re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text):
            assert (PACKAGE / name).is_file(), f"{page.name} names {name}"
            seen += 1
        for module, name in re.findall(rf"`((?:{rooms})(?:\.\w+)+)\.(\w+)(?:\(\))?`", text):
            path = PACKAGE / f"{module.replace('.', '/')}.py"
            assert path.is_file(), f"{page.name} names {module}.{name}"
            assert re.search(rf"\b{name}\b", path.read_text()), f"{page.name}: {module}.{name}"
            seen += 1
    assert seen > 20


def only_match(pattern: str, file: str) -> str:
    """The group of the one match of a pattern in a file of the project."""
    matches = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(matches) == 1, f"{file}: {pattern} matches {matches}"
    return matches[0]


def test_versions_agree():
    assert only_match(r"^version: (.+)$", "CITATION.cff") == hf_dpzero.__version__
    ruff = only_match(r"^ruff==(.+)$", "constraints.txt")
    assert only_match(r"ruff-pre-commit\n +rev: v(\S+)", ".pre-commit-config.yaml") == ruff


def test_every_python_version_that_the_package_names_is_tested():
    metadata = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    named = set(re.findall(r"Python :: (3\.\d+)", metadata))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    tested = set(re.findall(r'- \{ python: "(3\.\d+)"', workflow))
    assert len(named) > 2 and tested == named
    oldest = min(named, key=lambda version: int(version.split(".")[1]))
    assert f"python_requires = >={oldest}\n" in metadata
    assert f'python: "{oldest}", versions: oldest' in workflow


def test_the_maths_without_a_trainer_runs_as_the_api_page_shows_it(capsys):
    """120 runs, whose noise is fresh, ended at 0.93 to 0.97 of the rows; a coin is at 0.5."""
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/api/index.md").read_text(), re.DOTALL
    )
    exec(compile(code, "docs/api/index.md", "exec"), {})
    plan, accuracy = capsys.readouterr().out.splitlines()
    sigma, epsilon, half = map(float, plan.split())
    assert 1.99 < epsilon <= 2 and 0 < half < epsilon and 3 < sigma < 4
    assert float(accuracy.strip("tensor()")) > 0.75
