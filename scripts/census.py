"""How many scripts that were written for Trainer keep their arguments here, and why the others do not.

Run `python -m scripts.census FOLDER...` on folders of .py and .ipynb files, e.g. clones of
https://github.com/huggingface/notebooks and https://github.com/huggingface/peft (its `examples`). Each
call of `TrainingArguments` in a file that makes a `Trainer` too is a script; nothing of it is run. Its
arguments go into a `DPZeroSeq2SeqConfig` with `target_epsilon=2`, under their names in transformers 5;
what is no literal is left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hf_dpzero import DPZeroSeq2SeqConfig
from hf_dpzero.settings.hf_arguments import NAMES
from scripts.markdown import table

ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments"}
TRAINERS = {"Trainer", "Seq2SeqTrainer"}
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "no_cuda": "use_cpu",
    "push_to_hub_model_id": "hub_model_id",
}
"""A name in transformers 4 -> what transformers 5 calls it."""

ASSUMED = {"fp16": True, "bf16": True, "deepspeed": {"zero_optimization": {}}}
"""What an argument is that a script computes, where its default would say nothing."""

OURS = {"target_epsilon": 2.0, "use_cpu": True, "report_to": "none", "tf32": None}
"""The privacy, and what depends on the machine that runs the census."""


class Script(NamedTuple):
    """Training arguments of a script: its file's name, what it gives; `...` for what is no literal."""

    name: str
    given: dict[str, Any]


class Verdict(NamedTuple):
    """What became of a script: the reasons of its refusal (none where it is accepted), names dropped."""

    script: Script
    reasons: tuple[str, ...]
    dropped: tuple[str, ...]


def scripts_in(folder: Path) -> Iterator[Script]:
    """Finds the training arguments in a folder's files; one that is no Python is passed over."""
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".ipynb")):
        try:
            tree = ast.parse(_python_of(path))
        except (OSError, SyntaxError, ValueError, LookupError):
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if _of_transformers(tree) and any(_called(call) in TRAINERS for call in calls):
            for call in calls:
                if _called(call) in ARGUMENTS and call.keywords:
                    yield Script(
                        path.name, {k.arg: _literal(k.value) for k in call.keywords if k.arg}
                    )


def _python_of(path: Path) -> str:
    """Reads a file; of a notebook the cells that are Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(filter(_parses, map(_without_magic, cells)))


def _without_magic(cell: dict[str, Any]) -> str:
    lines = "".join(cell["source"]).split("\n")
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%", "?")))


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _of_transformers(tree: ast.AST) -> bool:
    """False where the arguments are imported from another library that has a class of the name."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    origins = {i.module for i in imports if ARGUMENTS & {name.name for name in i.names}}
    return all((origin or "").startswith("transformers") for origin in origins)


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "id", None) or getattr(call.func, "attr", ""))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...


def verdict(script: Script, output_dir: str) -> Verdict:
    """Makes the configuration of a script's arguments and says what is refused."""
    given = {RENAMED.get(name, name): value for name, value in script.given.items()}
    if given.pop("group_by_length", False):
        given["train_sampling_strategy"] = "group_by_length"
    given |= {name: value for name, value in ASSUMED.items() if given.get(name) is ...}
    if given.get("fp16") and given.get("bf16"):  # options of which a user chooses one
        del given["fp16"]
    kept = {n: v for n, v in given.items() if n in NAMES and v is not ...}
    dropped = tuple(name for name in given if name not in NAMES)
    try:
        DPZeroSeq2SeqConfig(**{**kept, **OURS, "output_dir": output_dir})
    except (ValueError, TypeError, ImportError) as error:
        lines = str(error).split("\n- ")
        named = [line.partition("=")[0] for line in lines if "=" in line]
        ours = tuple(f"`{name}`" for name in named if name.isidentifier())
        return Verdict(script, ours or ("by transformers itself",), dropped)
    return Verdict(script, (), dropped)


def census(folders: Iterable[Path]) -> list[Verdict]:
    """The verdict on each script of several folders; copies, as translations have them, count once."""
    found = {repr((s.name, sorted(s.given.items()))): s for f in folders for s in scripts_in(f)}
    with tempfile.TemporaryDirectory() as folder:
        return [verdict(script, folder) for script in found.values()]


def report(verdicts: list[Verdict]) -> str:
    """Markdown: how many are accepted, then reason and argument by how many scripts have it."""
    refused = Counter(reason for v in verdicts for reason in set(v.reasons))
    dropped = Counter(name for v in verdicts for name in v.dropped)
    accepted = sum(not v.reasons for v in verdicts)
    parts = [f"{accepted} of {len(verdicts)} scripts are accepted by their arguments.\n"]
    if refused:
        parts.append(table(("refused", "scripts"), refused.most_common()))
    if dropped:
        counted = ", ".join(f"`{name}` ({count})" for name, count in dropped.most_common())
        parts.append(f"Left out, since transformers 5 has no such argument: {counted}.\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--list", action="store_true", help="also each script that is refused")
    asked = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    verdicts = census(asked.folders)
    print(report(verdicts))
    for v in verdicts:
        if asked.list and v.reasons:
            print(v.script.name, "; ".join(v.reasons), sep=": ")


if __name__ == "__main__":
    main()
