"""`hf-dpzero`: train, evaluate, plan, replay, push, sweep, bench.

This module only parses words and dispatches; each command's work is a module in
`hf_dpzero.cli` (and `scripts.benchmarks`), imported when it runs, so that `--help` is instant.

Exit status: 0 done, 2 a mistake in what was asked (one line on stderr, `--traceback` for more),
130 interrupted. Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import hf_dpzero

MISTAKES = (ValueError, OSError, ImportError)
"""What a user can cause and mend: bad settings, files and network, an extra not installed."""

_OVERRIDES = (
    "Every field of the recipe may be overridden: --field value (a list: --field a b; true: "
    "--field alone). Fields are those of ModelArguments, DataArguments and DPZeroConfig, which "
    "includes all of Hugging Face's TrainingArguments. The last mention wins."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status; `argv` defaults to the process's own."""
    words = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true")
    try:
        return dispatch(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `hf-dpzero plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MISTAKES as error:
        if "--traceback" in words:
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2


def dispatch(words: list[str]) -> int:
    """Parses `words` and runs the command; errors propagate."""
    if words[:1] == ["bench"]:
        rest = [word for word in words[1:] if word != "--traceback"]
        return int(importlib.import_module("scripts.benchmarks").main(rest) or 0)
    parser = build_parser()
    arguments, overrides = parser.parse_known_args(words)
    if overrides and not arguments.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    arguments.overrides = overrides
    importlib.import_module(f"hf_dpzero.cli.{arguments.command}").run(arguments)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The argument parser of all commands; imports nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="hf-dpzero",
        description="Differentially private zeroth-order fine-tuning with Hugging Face.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hf-dpzero {hf_dpzero.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_evaluate(commands)
    _add_plan(commands)
    _add_replay(commands)
    _add_push(commands)
    _add_sweep(commands)
    _add_compare(commands)
    _add_command(commands, "bench", "measure the cost of a step (see hf-dpzero bench --help)")
    return parser


_Commands = argparse._SubParsersAction  # argparse offers no public name for it


def _add_command(
    commands: _Commands, name: str, summary: str, *, overrides: bool = False
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_OVERRIDES if overrides else None,
        allow_abbrev=False,
    )
    parser.set_defaults(takes_overrides=overrides)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def _add_train(commands: _Commands) -> None:
    parser = _add_command(commands, "train", "fine-tune as a recipe says", overrides=True)
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")


def _add_evaluate(commands: _Commands) -> None:
    parser = _add_command(
        commands,
        "evaluate",
        "evaluate a recipe's model: zero-shot, with --num_demonstrations K in context, or with "
        "--model_name_or_path OUT a trained one",
        overrides=True,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--zero_shot",
        action="store_true",
        help="the recipe's base model, untrained (also what happens without --model_name_or_path)",
    )


def _add_plan(commands: _Commands) -> None:
    parser = _add_command(
        commands,
        "plan",
        "compute the noise for a budget, or the epsilon of a noise; of a recipe also its memory",
    )
    parser.epilog = f"With --recipe, these options are overrides as well. {_OVERRIDES}"
    add = parser.add_argument
    add(
        "--recipe",
        action=_Recipe,
        metavar="RECIPE",
        help="YAML file: plan its run, download nothing",
    )
    add(
        "--num_examples",
        type=_whole,
        help="n, rows of training data; a recipe's own if they are here",
    )
    add("--expected_batch_size", type=float, help="B; required unless --sampling full_batch")
    add("--max_steps", type=_whole, help="T, steps of training")
    add("--target_epsilon", type=float, help="epsilon to calibrate the noise for")
    add(
        "--noise_multiplier",
        type=float,
        help="noise std / C on the sum, instead of --target_epsilon",
    )
    add("--target_delta", type=float, help="delta; default 1 / (10 n), and 0 for laplace")
    add("--clip", type=float, help="C; only scales the noise that is printed (default 1)")
    add("--num_directions", type=_whole, help="K; does not change epsilon (default 1)")
    add(
        "--sampling",
        help="poisson (default), truncated_poisson, fixed_size_without_replacement or full_batch",
    )
    add("--max_batch_size", type=_whole, help="cap of a truncated_poisson batch")
    add(
        "--neighboring_relation",
        help="add_or_remove_one (default), replace_one or replace_special",
    )
    add("--accountant", help="pld (default), rdp or advanced_composition")
    add("--noise_distribution", help="gaussian (default) or laplace")
    add("--json", action="store_true", help="print JSON instead of a table")


class _Recipe(argparse.Action):
    """Notes the recipe, and that other options may be overrides of its fields."""

    def __call__(self, parser: object, namespace: object, values: object, *_: object) -> None:
        setattr(namespace, self.dest, values)
        namespace.takes_overrides = True  # type: ignore[attr-defined]


def _add_replay(commands: _Commands) -> None:
    parser = _add_command(
        commands,
        "replay",
        "rebuild trained weights from the base model and the public trajectory",
        overrides=True,
    )
    add = parser.add_argument
    add("--base", required=True, help="base model (folder or Hub id), or the run's recipe.yaml")
    add("--trajectory", required=True, help="trajectory.safetensors or a .ledger file")
    add("--output_dir", required=True, help="where to save the rebuilt model")
    add("--upto", type=_whole, help="stop before this step; default the end")
    add("--expect", help="folder of a trained model to compare with, bit for bit")


def _add_push(commands: _Commands) -> None:
    parser = _add_command(commands, "push", "publish a run on the Hub with its privacy card")
    add = parser.add_argument
    add("output_dir", metavar="OUTPUT_DIR", help="folder of a finished run")
    add("--repo_id", required=True, help="namespace/name")
    add("--dry_run", action="store_true", help="only build the folder that would be uploaded")
    add(
        "--private",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="repository visibility",
    )
    add(
        "--allow_not_private",
        action="store_true",
        help="publish a run whose report says NOT PRIVATE",
    )


def _add_compare(commands: _Commands) -> None:
    parser = _add_command(
        commands,
        "compare",
        "train several methods on the same data and write a table and a plot",
        overrides=True,
    )
    add = parser.add_argument
    add(
        "recipes",
        metavar="RECIPE",
        nargs="+",
        help="YAML file, before any option; with --merge the folders of comparisons",
    )
    add(
        "--methods",
        help="with commas; M takes NAME-M.yaml beside RECIPE (NAME-dpzero.yaml, say), else the "
        "recipe file M, else RECIPE with method: M",
    )
    add("--epsilons", help="with commas; default the recipe's target_epsilon")
    add("--seeds", help="with commas: of the few-shot draw, initial weights and directions")
    add("--output_dir", help="continued if it exists; default out/compare-RECIPE")
    add("--jobs", type=_whole, default=1, help="runs at once, each with its share of the cores")
    add("--retry_failed", action="store_true", help="run again what has a row without success")
    add("--discard_weights", action="store_true", help="keep results and ledgers, not the models")
    add("--merge", action="store_true", help="one table from the folders of several tasks")


def _add_sweep(commands: _Commands) -> None:
    parser = _add_command(
        commands, "sweep", "try settings of a recipe and state what choosing costs", overrides=True
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="YAML file")
    add(
        "--grid",
        action="append",
        metavar="FIELD=V,V",
        help="a field and the values to try; repeat for more fields",
    )
    add("--grid_file", help="YAML file of `field: [value, value]` (see configs/sweep)")
    add(
        "--tuning",
        required=True,
        help="composed: the total epsilon includes the search; public: the training data is "
        "declared public; not_accounted: the search is not in any epsilon",
    )
    add(
        "--selection",
        default="random",
        help="for composed. random (default): a secret random number of trials, only the best is "
        "released; all: the whole grid is run, accounted and released",
    )
    add("--mean_trials", type=float, help="expected number of trials; default the grid's size")
    add(
        "--trial_count",
        default="geometric",
        help="its distribution: geometric (default), poisson, logarithmic, or a shape such as 0.5",
    )
    add("--metric", help="result that scores a trial, such as eval_accuracy; default the task's")
    add("--output_dir", help="the sweep's folder; default the recipe's with -sweep behind it")
    add("--dry_run", action="store_true", help="only print the plan and its cost")


def _whole(word: str) -> int:
    """An integer, also written as 1e4."""
    number = float(word)
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number")
    return int(number)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
