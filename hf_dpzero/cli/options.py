"""The options of each subcommand: a dataclass whose fields become command-line options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OVERRIDES = (
    "Every field of the recipe may be overridden: --field value (a list: --field a,b or "
    "--field a b; true: --field alone). Fields are those of ModelArguments, DataArguments and "
    "DPZeroConfig, which includes all of Hugging Face's TrainingArguments. The last mention wins."
)

_RECIPE = "YAML file, or a name that `hf-dpzero recipes` lists"


def _option(help: str, default: Any = None, **settings: Any) -> Any:
    """A field with its help; `settings` are those of `add_argument`, and positional=True."""
    return field(default=default, metadata={"help": help, **settings})


@dataclass(kw_only=True)
class Options:
    """What every subcommand takes; `overrides` are the words that are no options."""

    traceback: bool = _option("show where an error came from", False)
    overrides: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Train(Options):
    """Fine-tune as a recipe says."""

    recipe: str = _option(_RECIPE, positional=True)


@dataclass(kw_only=True)
class Recipes(Options):
    """List the recipes that come with the package."""

    task: str | None = _option("only those of this task, such as sst2")
    json: bool = _option("print JSON instead of a table", False)


@dataclass(kw_only=True)
class Init(Options):
    """Write a starter recipe, or with --script a script, for a file of your own."""

    train_file: str = _option("private rows: csv, tsv, json, jsonl or parquet", required=True)
    target_epsilon: float = _option("epsilon of the whole run", required=True)
    target_delta: float | None = _option("delta; default 1 / (10 n), rounded")
    validation_file: str | None = _option("public rows of the same columns, to evaluate on")
    holdout: float = _option("in place of them: share of the rows to evaluate on, with noise", 0.0)
    class_names: str | None = _option("names of the labels, such as a,b, where no public rows tell")
    model: str | None = _option("Hub id or folder; default one that suits the columns")
    text_column: str | None = _option("where the columns' names do not tell")
    text_pair_column: str | None = _option("the second text of a pair")
    label_column: str | None = _option("where the columns' names do not tell")
    unit_column: str | None = _option(
        "column that says whose a row is: epsilon is then for a person"
    )
    script: bool = _option("a script instead of a recipe", False)
    output: str | None = _option("file to write; default the name of train_file")


@dataclass(kw_only=True)
class Evaluate(Options):
    """Evaluate a recipe's model: zero-shot, with --num_demonstrations K in context, or with
    --model_name_or_path OUT a trained one."""

    recipe: str = _option(_RECIPE, positional=True)
    json: bool = _option("print JSON instead of a table", False)
    zero_shot: bool = _option(
        "the recipe's base model, untrained (also what happens without --model_name_or_path)", False
    )
    private_file: str | None = _option(
        "private rows, to be evaluated in place of the validation rows; default those of holdout"
    )
    epsilon: float | None = _option(
        "release how many private rows are answered right, with noise", metavar="E"
    )
    trained_on: bool = _option("rows of private_file may be training rows: epsilons add up", False)


@dataclass(kw_only=True)
class Plan(Options):
    """Compute the noise for a budget, or the epsilon of a noise; of a recipe also its memory.

    Without a recipe: --num_examples N --max_steps T --expected_batch_size B --target_epsilon E."""

    recipe: str | None = _option(f"{_RECIPE}: plan its run, download nothing", metavar="RECIPE")
    num_examples: int | None = _option("n, rows of training data; a recipe's own if they are here")
    propose: float | None = _option(
        "choose the num_directions, expected_batch_size (unless given) and max_steps of dpzero that "
        "gain most in so many minutes",
        metavar="MINUTES",
    )
    rows_per_second: float | None = _option(
        "with --propose: rows of one forward pass; about eval_samples_per_second of "
        "`hf-dpzero evaluate`",
        metavar="R",
    )
    rows_of_one: list[str] | None = _option(
        "a list, such as 2,10: also epsilon for so many rows of one person, each a unit of its own",
        nargs="+",
        metavar="M",
    )
    json: bool = _option("print JSON instead of a table", False)


@dataclass(kw_only=True)
class Audit(Options):
    """Attack what a recipe's plan would release, and bound the epsilon that it spends from below.

    Exit status 1 where a bound at confidence 1 - 1e-6 passes the claim. With --model, attack a trained
    one: do losses tell its training rows from others? With holdout: 0.5 that bounds epsilon too."""

    recipe: str = _option(f"{_RECIPE}: its plan is audited, nothing is trained", positional=True)
    model: str | None = _option(
        "folder of a model that the recipe trained, asked about training rows and the rows held out, or "
        "without holdout the validation rows"
    )
    num_examples: int | None = _option("n, rows of training data; a recipe's own if they are here")
    runs: int = _option("of one step, on each of the two data sets", 40_000)
    steps: int = _option("T, of the short run; of T steps there are runs / T runs", 8)
    output_dir: str | None = _option(
        "for audit.json or membership.json, and a figure; default the recipe's, or --model, and -audit"
    )


@dataclass(kw_only=True)
class Compare(Options):
    """Train several methods on the same data and write a table and a plot."""

    recipes: list[str] = _option(
        f"{_RECIPE}, before any option",
        positional=True,
        metavar="RECIPE",
        nargs="+",
    )
    methods: list[str] | None = _option(
        "a list; M takes NAME-M.yaml beside RECIPE (NAME-dpzero.yaml, say), else the recipe "
        "file M, else RECIPE with the settings of methods/_NAME-M.yaml, else RECIPE with method: M",
        nargs="+",
        metavar="M",
    )
    epsilons: list[str] | None = _option(
        "a list, such as 2,6; default the recipe's target_epsilon", nargs="+", metavar="E"
    )
    seeds: list[str] | None = _option(
        "a list: of few-shot draw, weights, directions; the recipe's", nargs="+", metavar="SEED"
    )
    output_dir: str | None = _option("continued if it exists; default out/compare-RECIPE")
    jobs: int = _option("runs at once, each with its share of the cores", 1)
    retry_failed: bool = _option("run again what has a row without success", False)
    discard_weights: bool = _option("keep results and ledgers, not the models", False)


@dataclass(kw_only=True)
class Sweep(Options):
    """Try settings of a recipe and state what choosing costs."""

    recipe: str = _option(_RECIPE, positional=True)
    grid: list[str] | None = _option(
        "a field and its values; repeat for more fields", action="append", metavar="FIELD=V,V"
    )
    grid_file: str | None = _option("YAML file of `field: [value, value]` (see configs/sweep)")
    tuning: str = _option(
        "composed: the total epsilon includes the search; public: the training data is declared "
        "public; not_accounted: the search is not in any epsilon",
        required=True,
    )
    selection: str = _option(
        "for composed. random (default): a secret random number of trials, only the best is "
        "released; all: the whole grid is run, accounted and released",
        "random",
    )
    mean_trials: float | None = _option("expected number of trials; default the grid's size")
    metric: str | None = _option("what scores a trial, such as eval_accuracy; default the task's")
    output_dir: str | None = _option("the sweep's folder; default the recipe's and -sweep")
    dry_run: bool = _option("only print the plan and its cost", False)


@dataclass(kw_only=True)
class Replay(Options):
    """Rebuild trained weights from the base model and the public trajectory."""

    base: str = _option("base model (folder or Hub id), or the run's recipe.yaml", required=True)
    trajectory: str = _option("trajectory.safetensors or a .ledger file", required=True)
    output_dir: str = _option("where to save the rebuilt model", required=True)
    expect: str | None = _option("folder of a trained model to compare with, bit for bit")
    average_last: int | None = _option(
        "the mean of the weights after each of the last N steps, for the same epsilon"
    )


@dataclass(kw_only=True)
class Verify(Options):
    """Check each claim of a published run, from its folder and the base model alone.

    Exit status 1 where one does not hold."""

    folder: str = _option("folder of a published run, or its Hub id", positional=True)
    base: str | None = _option(
        "the base model's folder or Hub id, where its name does not lead to it"
    )
    json: bool = _option("print JSON instead of a page", False)
    registry_entry: str | None = _option("file for an entry of the OpenDP deployments registry")


@dataclass(kw_only=True)
class Budget(Options):
    """Show a budget file: what all releases about a data set cost together, and what is left.

    With --epsilon and --delta make one; `budget_file` of a recipe names it."""

    file: str = _option("of JSON lines, appended by runs", positional=True)
    epsilon: float | None = _option(
        "of all releases together, at most; makes the file", metavar="E"
    )
    delta: float | None = _option("at which they are all stated", metavar="D")
    neighboring_relation: str = _option("of all of them", "add_or_remove_one")
    privacy_unit: str = _option("what it protects one of, as reports name it", "example")


@dataclass(kw_only=True)
class Push(Options):
    """Publish a run on the Hub with its privacy card."""

    output_dir: str = _option("folder of a finished run", positional=True)
    repo_id: str = _option("namespace/name", required=True)
    dry_run: bool = _option("only build the folder that would be uploaded", False)
    private: bool = _option("repository visibility", True)
    allow_not_private: bool = _option("publish a run whose report says NOT PRIVATE", False)


@dataclass(kw_only=True)
class Clean(Options):
    """List, and with --yes remove, caches of training rows, keys and checkpoints of a finished run."""

    output_dir: str = _option(
        "folder of a finished run; ledger, report, weights stay", positional=True
    )
    yes: bool = _option("remove what is listed", False)
    unfinished: bool = _option("give up a run that could still resume", False)


@dataclass(kw_only=True)
class Federate(Options):
    """Train one recipe on clients with their own rows and their own local noise."""

    recipe: str = _option(f"{_RECIPE}; its batch is all clients' together", positional=True)
    clients: int | None = _option("n, default 2; each gets every n-th row")
    client_files: list[str] | None = _option(
        "a file of rows for each client, in place of train_file", nargs="+"
    )
    partition: str | None = _option(
        "deal rows by label with flwr-datasets: dirichlet:ALPHA, or pathological:CLASSES; for studies "
        "on public rows, since the clients' numbers of rows are reported"
    )
    rounds: int | None = _option("R; default the recipe's max_steps")
    output_dir: str | None = _option("the run's folder; default the recipe's and -federated")
    resume: bool = _option("go on with the ledgers in output_dir", False)
    min_clients: int = _option("wait until so many are there", 1)
    timeout: float = _option("seconds for a round's answers; slower clients are left out", 120.0)
    engine: str = _option(
        "flower (default): clients in other processes; in_process: the same messages without Flower",
        "flower",
    )
    actors: int = _option("processes that the simulated clients share", 1)


@dataclass(kw_only=True)
class Certificates(Options):
    """Make the certificate and keys of a federation's server, and a key for each client."""

    folder: str = _option("where they are written, or with --check read", positional=True)
    host: list[str] | None = _option("names or addresses of the server", nargs="+")
    clients: list[str] | None = _option("a name for each client", nargs="+")
    days: int = _option("how long the certificate holds", 365)
    check: bool = _option("only say of which hosts the certificate there is, and until when", False)


COMMANDS: dict[str, type[Options]] = {
    options.__name__.lower(): options
    for options in (
        Train,
        Evaluate,
        Plan,
        Audit,
        Replay,
        Verify,
        Budget,
        Push,
        Clean,
        Sweep,
        Compare,
        Federate,
        Certificates,
        Recipes,
        Init,
    )
}
