"""Runs the quick tests with the oldest and with the newest releases of what the package depends on.

    scripts/check.sh --versions                   both, then a table
    scripts/check.sh --versions oldest -k plan    one of them; words after it go to pytest
    python -m scripts.versions --pins             the oldest ones, as `pip install -c` reads them

Oldest are the lower bounds of setup.cfg, newest is what pip finds. Torch is the release of
constraints.txt in both, as another one may come with gigabytes of CUDA; oldest takes its lower bound
where pip finds a build of it without an index (`PIP_FIND_LINKS`). Each environment stays in
.cache/versions and is made anew when its pins change, newest every time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "versions"
NAMED = ("transformers", "torch", "accelerate", "peft", "datasets")
BUILT_WITH_TORCH = ("torch", "triton")
PRINT_VERSIONS = (
    "import platform, sys; from importlib.metadata import version;"
    "print(platform.python_version(), *map(version, sys.argv[1:]))"
)


def lower_bounds() -> dict[str, str]:
    """Returns the oldest release of every requirement in setup.cfg."""
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    found = dict(re.findall(r"^ {4}([\w-]+)(?:\[\w+\])?>=([\d.]+)", text, re.MULTILINE))
    assert set(NAMED) <= set(found), found
    return found


def pinned_torch() -> str:
    """Returns torch's release in constraints.txt."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return re.findall(r"^torch==(\S+)", text, re.MULTILINE)[0]


def at_hand(torch: str) -> bool:
    """Whether pip has a build of that torch in a folder of its own."""
    asked = ["--dry-run", "--no-index", "--no-deps", "--ignore-installed", f"torch=={torch}"]
    return subprocess.run(_pip(sys.executable, *asked), capture_output=True).returncode == 0


def pins(which: str) -> dict[str, str]:
    """Returns what an environment is held to: {name: release}."""
    bounds = lower_bounds()
    if which == "oldest" and at_hand(bounds["torch"]):
        return bounds
    kept = bounds if which == "oldest" else {}
    others = {name: at for name, at in kept.items() if name not in BUILT_WITH_TORCH}
    return {**others, "torch": pinned_torch()}


def _pip(python: str | Path, *words: str) -> list[str]:
    return [str(python), "-m", "pip", "install", "--quiet", *words]


def environment(which: str) -> Path:
    """Makes the environment, or finds it as it would be made; returns its Python."""
    folder = FOLDER / which
    python, made_with = folder / "bin" / "python", folder / "pins.txt"
    text = "".join(f"{name}=={release}\n" for name, release in sorted(pins(which).items()))
    if which == "oldest" and made_with.exists() and made_with.read_text() == text:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    held = folder / "held.txt"
    held.write_text(text)
    wanted = ["-c", str(held), "-e", f"{ROOT}[demo,test]"]
    subprocess.run(_pip(python, *wanted), check=True)
    held.rename(made_with)  # only now it is whole
    return python


def tested(python: Path, words: list[str]) -> str:
    """Runs the tests; returns pytest's last line without its time, such as "812 passed, 3 skipped"."""
    command = [str(python), "-m", "pytest", "-q", "--continue-on-collection-errors", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdout is not None
        last = ""
        for line in ran.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return re.sub(r" in [\d.]+s.*", "", last).strip("= ") or f"exit status {ran.returncode}"


def row(which: str, words: list[str]) -> tuple[str, bool]:
    """Returns a row of the table, and whether nothing failed."""
    python = environment(which)
    told = subprocess.run(
        [str(python), "-c", PRINT_VERSIONS, *NAMED], check=True, capture_output=True, text=True
    )
    result = tested(python, words)
    good = "passed" in result and not re.search(r"failed|error", result)
    return f"| {which} | {' | '.join(told.stdout.split())} | {result} |", good


def main(words: list[str] | None = None) -> int:
    """Prints the table; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="*", help="oldest or newest; default: both")
    parser.add_argument("--pins", action="store_true", help="print the oldest releases and stop")
    given, for_pytest = parser.parse_known_args(words)
    if given.pins:
        print(*(f"{name}=={release}" for name, release in lower_bounds().items()), sep="\n")
        return 0
    rows = [row(which, for_pytest) for which in given.which or ("oldest", "newest")]
    header = f"| releases | Python | {' | '.join(NAMED)} | quick tests |"
    print("", header, "|---" * (3 + len(NAMED)) + "|", *(line for line, _ in rows), sep="\n")
    return 0 if all(good for _, good in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
