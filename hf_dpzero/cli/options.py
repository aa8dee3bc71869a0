"""The options of each subcommand: a dataclass whose fields become command-line options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OVERRIDES = (
    "Every field of the recipe may be overridden: --field value (a list: --field a b; true: "
    "--field alone). Fields are those of ModelArguments, DataArguments and DPZeroConfig, which "
    "includes all of Hugging Face's TrainingArguments. The last mention wins."
)


def option(help: str, default: Any = None, **settings: Any) -> Any:
    """A field with its help.

    Args:
      help: what `--help` says.
      default: of the field.
      **settings: of `add_argument`; positional=True makes an argument without dashes.

    Returns:
      The field.
    """
    return field(default=default, metadata={"help": help, **settings})


@dataclass(kw_only=True)
class Options:
    """What every subcommand takes; `overrides` are the words that are no options."""

    traceback: bool = option("show where an error came from", False)
    overrides: list[str] = field(default_factory=list, metadata={"hidden": True})

    @property
    def takes_overrides(self) -> bool:
        """Whether words that are no options are fields of a recipe."""
        return True


@dataclass(kw_only=True)
class Train(Options):
    """Fine-tune as a recipe says."""

    recipe: str = option("YAML file", positional=True)


@dataclass(kw_only=True)
class Evaluate(Options):
    """Evaluate a recipe's model: zero-shot, with --num_demonstrations K in context, or with
    --model_name_or_path OUT a trained one."""

    recipe: str = option("YAML file", positional=True)
    json: bool = option("print JSON instead of a table", False)
    zero_shot: bool = option(
        "the recipe's base model, untrained (also what happens without --model_name_or_path)", False
    )


@dataclass(kw_only=True)
class Plan(Options):
    """Compute the noise for a budget, or the epsilon of a noise; of a recipe also its memory."""

    recipe: str | None = option("YAML file: plan its run, download nothing", metavar="RECIPE")
    num_examples: int | None = option("n, rows of training data; a recipe's own if they are here")
    expected_batch_size: float | None = option("B; required unless --sampling full_batch")
    max_steps: int | None = option("T, steps of training")
    target_epsilon: float | None = option("epsilon to calibrate the noise for")
    noise_multiplier: float | None = option("noise std / C on the sum, instead of --target_epsilon")
    target_delta: float | None = option("delta; default 1 / (10 n), and 0 for laplace")
    clip: float | None = option("C; only scales the noise that is printed (default 1)")
    num_directions: int | None = option("K; does not change epsilon (default 1)")
    sampling: str | None = option(
        "poisson (default), truncated_poisson, fixed_size_without_replacement or full_batch"
    )
    max_batch_size: int | None = option("cap of a truncated_poisson batch")
    neighboring_relation: str | None = option(
        "add_or_remove_one (default), replace_one or replace_special"
    )
    accountant: str | None = option("pld (default), rdp or advanced_composition")
    noise_distribution: str | None = option("gaussian (default) or laplace")
    json: bool = option("print JSON instead of a table", False)

    @property
    def takes_overrides(self) -> bool:
        """With --recipe; the options that are fields of a recipe override it as well."""
        return self.recipe is not None


@dataclass(kw_only=True)
class Compare(Options):
    """Train several methods on the same data and write a table and a plot."""

    recipes: list[str] = option(  # noqa: RUF009
        "YAML file, before any option; with --merge the folders of comparisons",
        positional=True,
        metavar="RECIPE",
        nargs="+",
    )
    methods: str | None = option(
        "with commas; M takes NAME-M.yaml beside RECIPE (NAME-dpzero.yaml, say), else the recipe "
        "file M, else RECIPE with the settings of methods/_NAME-M.yaml, else RECIPE with method: M"
    )
    epsilons: str | None = option("with commas; default the recipe's target_epsilon")
    seeds: str | None = option("with commas: of the few-shot draw, initial weights and directions")
    output_dir: str | None = option("continued if it exists; default out/compare-RECIPE")
    jobs: int = option("runs at once, each with its share of the cores", 1)
    retry_failed: bool = option("run again what has a row without success", False)
    discard_weights: bool = option("keep results and ledgers, not the models", False)
    merge: bool = option("one table from the folders of several tasks", False)


@dataclass(kw_only=True)
class Sweep(Options):
    """Try settings of a recipe and state what choosing costs."""

    recipe: str = option("YAML file", positional=True)
    grid: list[str] | None = option(  # noqa: RUF009
        "a field and the values to try; repeat for more fields",
        action="append",
        metavar="FIELD=V,V",
    )
    grid_file: str | None = option("YAML file of `field: [value, value]` (see configs/sweep)")
    tuning: str = option(
        "composed: the total epsilon includes the search; public: the training data is declared "
        "public; not_accounted: the search is not in any epsilon",
        required=True,
    )
    selection: str = option(
        "for composed. random (default): a secret random number of trials, only the best is "
        "released; all: the whole grid is run, accounted and released",
        "random",
    )
    mean_trials: float | None = option("expected number of trials; default the grid's size")
    trial_count: str = option(
        "its distribution: geometric (default), poisson, logarithmic, or a shape such as 0.5",
        "geometric",
    )
    metric: str | None = option(
        "result that scores a trial, such as eval_accuracy; default the task's"
    )
    output_dir: str | None = option(
        "the sweep's folder; default the recipe's with -sweep behind it"
    )
    dry_run: bool = option("only print the plan and its cost", False)


@dataclass(kw_only=True)
class Replay(Options):
    """Rebuild trained weights from the base model and the public trajectory."""

    base: str = option("base model (folder or Hub id), or the run's recipe.yaml", required=True)
    trajectory: str = option("trajectory.safetensors or a .ledger file", required=True)
    output_dir: str = option("where to save the rebuilt model", required=True)
    upto: int | None = option("stop before this step; default the end")
    expect: str | None = option("folder of a trained model to compare with, bit for bit")


@dataclass(kw_only=True)
class Push(Options):
    """Publish a run on the Hub with its privacy card."""

    output_dir: str = option("folder of a finished run", positional=True)
    repo_id: str = option("namespace/name", required=True)
    dry_run: bool = option("only build the folder that would be uploaded", False)
    private: bool = option("repository visibility", True)
    allow_not_private: bool = option("publish a run whose report says NOT PRIVATE", False)

    @property
    def takes_overrides(self) -> bool:
        """A finished run has no settings to change."""
        return False


COMMANDS: dict[str, type[Options]] = {
    "train": Train,
    "evaluate": Evaluate,
    "plan": Plan,
    "replay": Replay,
    "push": Push,
    "sweep": Sweep,
    "compare": Compare,
}
