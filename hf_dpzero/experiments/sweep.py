"""What a sweep tries, what trying it costs, and running it.

Where the trials are secret (`SweepSettings.secret`), they run under D/_private, a folder of mode 0700
whose name is on no allow list: how many trials there are, their settings, their ledgers, weights, logs
and scores. `trials.json` remembers across interrupts which ones there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.checks.data import num_units
from hf_dpzero.experiments.plan import choose_directions
from hf_dpzero.experiments.results import Row, Run
from hf_dpzero.experiments.runner import Attempt, Workspace, execute, locked, train_in_process
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.privacy import selection
from hf_dpzero.privacy.selection import TrialCount, Tuning
from hf_dpzero.recipes.recipe import COMMAND_LINE, Recipe, coerce_fields, load_recipe, read_recipe
from hf_dpzero.reporting.public import public_results
from hf_dpzero.shipped import find_config
from hf_dpzero.tasks import build_task, same_rows
from hf_dpzero.tasks.description import DataArguments
from hf_dpzero.values import listed, one_of, parse_yaml

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.tasks import AnyTask

TUNINGS = ("composed", "public", "not_accounted")
SELECTIONS = ("random", "all")
SECRET_FOLDER = "_private"  # Trainer's own Hub upload ignores names that start with "_"

_NEVER = (
    "output_dir", "resume_from_checkpoint", "push_to_hub", "hub_model_id", "hub_token", "testing",
    "base_is_public", "extends_run", "budget_file",
)  # fmt: skip
_BUDGET = ("target_epsilon", "target_delta", "noise_multiplier", "accountant")
_EVENT = (
    "method", "max_steps", "num_train_epochs", "expected_batch_size", "sampling", "max_batch_size",
    "neighboring_relation", "noise_distribution", "unit_column",
)  # fmt: skip
_CHANGES_EVENT = (
    "changes the privacy event of a run, and all trials of a private selection share one. Fix it, or "
    "sweep with --selection all or --tuning public. Allowed: learning_rate, clip, smoothing, "
    "num_directions, direction, update_rule, momentum, weight_decay, lr_scheduler_type and whatever "
    "else leaves the privacy event of one run alone."
)

Point = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """A sweep as it was asked for."""

    recipe: str  # its path
    overrides: Mapping[str, Any]  # settings laid over the recipe in every trial, coerced
    grid: Mapping[str, Sequence[Any]]  # field -> values to try, coerced, without repeats
    tuning: str  # "composed", "public" or "not_accounted"
    selection: str  # for "composed": "random" (private selection) or "all" (every run is released)
    trials: TrialCount  # the distribution of the number of trials; for composed, random
    metric: str | None  # what a trial is scored by; None takes the task's own metric
    output_dir: Path  # D, the sweep's folder

    @property
    def secret(self) -> bool:
        """Whether the number of trials and the losers must not be released."""
        return self.tuning == "composed" and self.selection == "random"

    @property
    def points(self) -> list[dict[str, Any]]:
        """Every combination of the grid, the last field varying fastest."""
        combinations = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, values, strict=True)) for values in combinations]

    def load(self, point: Point, extra: Point | None = None) -> Recipe:
        """Returns the recipe of one point of the grid, which wins over it; `extra` wins over both."""
        return load_recipe(self.recipe, {**self.overrides, **point, **(extra or {})})

    def for_private_rows(self) -> SweepSettings:
        """Leaves out overrides of the data, which name the public stand-in of a public sweep."""
        data = {field.name for field in dataclasses.fields(DataArguments)}
        kept = {name: value for name, value in self.overrides.items() if name not in data}
        return dataclasses.replace(self, overrides=kept)

    def fingerprint(self, num_examples: int) -> str:
        """Returns SHA-256 (hex) of everything that a continued sweep must have in common."""
        values = {
            "recipe": read_recipe(self.recipe),
            "overrides": dict(self.overrides),
            "grid": {name: list(values) for name, values in self.grid.items()},
            "tuning": [self.tuning, self.selection, self.trials.mean],
            "num_examples": num_examples,
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sweep that may start: what its trials run with, and what its report says."""

    extra: Mapping[str, Any]  # settings of every trial beside its point: noise, where logs may go
    num_examples: int  # n of the training data
    metric: str  # key of `all_results.json` that scores a trial
    tuning: Tuning  # the entry of the trials' privacy reports
    epsilon: float | None = None  # of everything released together; None where nothing is claimed
    epsilon_one_run: float | None = None  # of one trial alone
    delta: float | None = None  # of both
    noise_multiplier: float | None = None  # of every trial, where the sweep sets it


# ---- what is asked for


def parse_grid(words: Sequence[str], file: str | None = None) -> dict[str, list[Any]]:
    """Reads `field=value,value` words over the lists of a YAML file, coerced to the fields' types.

    A field among the words replaces the file's list.

    Raises:
      ValueError: a word without "=", an unknown field, an empty list, a repeated value.
      FileNotFoundError: no such file.
    """
    swept: dict[str, list[Any]] = {}
    if file:
        if not find_config(file).is_file():
            raise FileNotFoundError(f"grid file {file!r} not found; give the path of a YAML file.")
        swept = parse_yaml(find_config(file).read_text(encoding="utf-8"))
        if isinstance(swept, dict):
            swept = {name: listed(values) for name, values in swept.items()}
        if not isinstance(swept, dict) or not all(isinstance(v, list) for v in swept.values()):
            raise ValueError(f"{file}: a grid file is lines of `field: [value, value]`.")
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not text:
            raise ValueError(f"--grid {word!r}: write it as field=value,value,...")
        swept[name.strip().replace("-", "_")] = listed(text)
    if not swept:
        raise ValueError("the grid is empty: give --grid field=value,value or --grid_file FILE.")
    source = f"{COMMAND_LINE} or {file}" if file else COMMAND_LINE
    grid = {}
    for name, values in swept.items():
        grid[name] = [coerce_fields({name: value}, source)[name] for value in values]
        if not values:
            raise ValueError(f"{name} has no values to sweep; give at least one.")
        if repeated := [value for i, value in enumerate(grid[name]) if value in grid[name][:i]]:
            raise ValueError(f"{name}={repeated[0]} appears more than once in the grid; keep one.")
    return grid


def _check(settings: SweepSettings) -> None:
    """Refuses, before any data is read, what may not be swept or fixed under this tuning."""
    one_of(settings, "tuning", TUNINGS, "what the search may cost")
    one_of(settings, "selection", SELECTIONS, "what may be released of it")
    if both := sorted(set(settings.grid) & set(settings.overrides)):
        raise ValueError(f"{both[0]} is both swept and overridden; keep one.")
    composed = settings.tuning == "composed"
    data = {field.name for field in dataclasses.fields(DataArguments)} - {"max_seq_length"}
    for name in settings.grid:
        reasons = {
            "it belongs to a run's folder, secrets or publication, and is no hyper-parameter.": (
                name.partition(".")[0] in _NEVER
            ),
            "the sweep sets the noise of every trial from the total that the recipe's "
            "target_epsilon and target_delta allow; sweep it with --tuning public.": (
                composed and name in _BUDGET
            ),
            "the guarantee is for one fixed set of training rows, and scores compare on one "
            "validation set; fix it.": composed and name in data,
            f"it {_CHANGES_EVENT}": settings.secret and name in _EVENT,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"{name} may not be in a {settings.tuning} grid: {reason}")
    if composed:
        training = settings.load(settings.points[0]).training
        if settings.secret and training.budget_file is not None:
            raise ValueError(
                f"budget_file={training.budget_file!r} with --selection random: each trial would be an "
                "entry, which tells the secret number of trials. Use --selection all, where each trial "
                "pays; or leave it out, and train with best.yaml elsewhere."
            )
        for name in training.testing.not_private:
            raise ValueError(
                f"testing.{name}={getattr(training.testing, name)} makes every trial NOT PRIVATE, so a "
                "composed sweep would pay for nothing; leave it out, or use --tuning not_accounted."
            )
    elif settings.tuning == "public":
        # What best.yaml will train on is private: also a part or a copy of it is not public.
        plain = settings.for_private_rows()
        for point in settings.points:
            swept = settings.load(point).data
            if same_rows(swept, plain.load(point).data):
                rows = swept.train_file or swept.dataset_name or swept.task
                raise ValueError(
                    f"--tuning public would sweep {rows}, which the recipe (and best.yaml) trains on: "
                    "its report would say that choosing spent nothing on these rows. Give public data "
                    "for the sweep (--train_file, --validation_file), or use --tuning composed or "
                    "not_accounted."
                )


# ---- what it costs


def prepare(settings: SweepSettings) -> Prepared:
    """Loads the task once, checks every point, and of a composed sweep calibrates the noise.

    Raises:
      ValueError: settings or a grid that this tuning refuses, or runs that no accountant composes.
    """
    _check(settings)
    recipes = [settings.load(point) for point in settings.points]
    if any(recipe.data.holdout for recipe in recipes):
        raise ValueError(
            "holdout in a sweep: each run would hold other rows out; split the file once."
        )
    task = build_task(recipes[0].data)
    n = num_units(task.splits["train"], recipes[0].training)
    own = getattr(task, "metric", "accuracy")
    metric = f"eval_{own}" if settings.metric in (None, own) else str(settings.metric)
    if not metric.startswith("eval_") or not public_results({metric: 0.0}):
        raise ValueError(
            f"metric={settings.metric!r} is no metric of the validation rows: trials are chosen, and "
            f"shown, by what may be published of a run (eval_{own}, eval_loss), never by losses of "
            "training rows, times or memory, which tell what rows a step drew."
        )
    common: dict[str, Any] = {"push_to_hub": False, "disable_tqdm": True}
    if settings.tuning == "public":
        common["budget_file"] = None  # is for the rows of best.yaml
    if settings.secret:
        common["report_to"] = ["none"]  # no loser's metrics leave for a tracking service
    if settings.tuning != "composed":
        return Prepared(extra=common, num_examples=n, metric=metric, tuning=settings.tuning)
    delta = recipes[0].training.delta(n)
    # One noise multiplier for all trials: private selection accounts for a single event.
    sigma = _noise_of_trials(settings, task, delta)
    plans = _plans(settings, task, sigma)
    if settings.secret:
        chosen = _most_directions(plans)
        tuning = selection.selection_entry(chosen, settings.trials, list(settings.grid), delta)
        epsilon = selection.selection_epsilon(chosen, settings.trials, delta)
    else:
        tuning = selection.composition_entry(plans, list(settings.grid))
        epsilon = selection.composed_epsilon(plans, delta)
    noise = {"target_epsilon": None, "noise_multiplier": sigma}
    claim = {"target_delta": delta, "accountant": plans[0].accountant}
    return Prepared(
        extra={**common, **noise, **claim},
        num_examples=n,
        metric=metric,
        tuning=tuning,
        epsilon=epsilon,
        epsilon_one_run=max(plan.epsilon(delta) for plan in plans),
        delta=delta,
        noise_multiplier=sigma,
    )


def _noise_of_trials(settings: SweepSettings, task: AnyTask, delta: float) -> float:
    """Returns the noise multiplier of every trial: the recipe's, or what its target_epsilon allows."""
    training = settings.load(settings.points[0]).training
    given, target = training.noise_multiplier, training.target_epsilon
    plans = _plans(settings, task, 1.0 if given is None else given)
    if not all(plan.private for plan in plans):
        raise ValueError(
            f"method={training.method!r} is not private, so there is nothing to account: use "
            "--tuning public or --tuning not_accounted."
        )
    if settings.secret:
        _refuse_different_events(settings.points, plans)
    if target is None:
        calibrated = plans[0]
    elif settings.secret:
        # The trials share one event up to K, and the most directions have the most discrete noise.
        chosen = _most_directions(plans)
        calibrated = selection.calibrate_selection(
            chosen, settings.trials, epsilon=target, delta=delta
        )
    else:
        calibrated = selection.calibrate_composed(plans, epsilon=target, delta=delta)[0]
    return float(calibrated.mechanism.noise_multiplier)


def _plans(settings: SweepSettings, task: AnyTask, noise_multiplier: float) -> list[PrivacyPlan]:
    """Returns the plans of all points, as their runs will make them from the same settings."""
    plans, noise = [], {"target_epsilon": None, "noise_multiplier": noise_multiplier}
    for point in settings.points:
        recipe = choose_directions(settings.load(point, noise), len(task.label_names))
        plans.append(recipe.training.plan(num_units(task.splits["train"], recipe.training)))
    if settings.secret:  # selection is accounted in Renyi divergences
        plans = [dataclasses.replace(plan, accountant="rdp") for plan in plans]
    return plans


def _most_directions(plans: Sequence[PrivacyPlan]) -> PrivacyPlan:
    return max(plans, key=lambda plan: plan.spec.num_directions)


def _refuse_different_events(points: Sequence[Point], plans: Sequence[PrivacyPlan]) -> None:
    """Refuses a grid whose runs differ in their event: private selection accounts for one."""
    events = [selection.run_event(plan) for plan in plans]
    if all(event == events[0] for event in events):
        return
    names = set()
    for i, j in itertools.combinations(range(len(points)), 2):
        changed = [name for name in points[i] if points[i][name] != points[j][name]]
        if events[i] != events[j] and len(changed) == 1:
            names.add(changed[0])
    raise ValueError(f"{', '.join(sorted(names)) or 'the grid'} {_CHANGES_EVENT}")


# ---- running it


def open_workspace(settings: SweepSettings, prepared: Prepared) -> Workspace:
    """Makes or continues the files of a sweep; secret trials are drawn once, before the first of them.

    A run that cannot be continued is moved to D/_private/abandoned and begun again: it is never
    released, so the total epsilon does not speak of it.

    Raises:
      ValueError: the folder holds another sweep, or other files.
    """
    root = settings.output_dir
    private = root / SECRET_FOLDER
    base = private if settings.secret else root
    state, fingerprint = base / "trials.json", settings.fingerprint(prepared.num_examples)
    if not state.exists():
        inside = list(root.iterdir()) if root.exists() else []
        if any(path != private or any(private.iterdir()) for path in inside):
            raise ValueError(f"output_dir={root} holds other files; name an empty folder.")
    elif json.loads(state.read_text(encoding="utf-8"))["fingerprint"] != fingerprint:
        raise ValueError(
            f"output_dir={root} holds a sweep with other settings; repeat its command to "
            "continue it, or name an empty folder. What it spent stays spent."
        )
    private.mkdir(parents=True, exist_ok=True)
    # mkdir's mode is cut by the umask, and the folder may be of an earlier start
    private.chmod(0o700)
    if not state.exists():
        # Drawn once and kept: whoever could interrupt and draw again would choose the number.
        points = draw_points(settings) if settings.secret else settings.points
        text = json.dumps({"fingerprint": fingerprint, "trials": points}, indent=2)
        write_atomically(state, text + "\n")
    # Until the sweep has ended and its reports are written, a trial claims nothing of the search.
    said = settings.tuning if settings.tuning in selection.WORDS else "not_accounted"
    runs = []
    for trial, point in enumerate(json.loads(state.read_text(encoding="utf-8"))["trials"]):
        recipe = settings.load(point, {**prepared.extra, "tuning": said})
        run = Run(
            name=f"{trial:03d}",
            method=recipe.training.method,
            source=settings.recipe,
            epsilon=math.inf,
            recipe=recipe,
            trial=trial,
            point=point,
            metric=prepared.metric,
        )
        runs.append(run)
    folders, abandoned = ("trials", "trials", "trials"), private / "abandoned"
    return Workspace(base, runs, rows="trials.jsonl", folders=folders, abandoned=abandoned)


def draw_points(settings: SweepSettings) -> list[dict[str, Any]]:
    """Draws a secret number of points, each uniform on the grid, from the system's entropy."""
    points = settings.points
    return [secrets.choice(points) for _ in range(settings.trials.draw())]


def run_trials(
    settings: SweepSettings, prepared: Prepared, say: Callable[[str], None]
) -> Workspace:
    """Runs what is not finished yet; returns the workspace with the rows of all trials.

    Of secret trials nothing is said but that they run. Otherwise a failed trial is a row of the
    table; a secret one stops the sweep, because leaving it out could depend on the data.

    Raises:
      ChildProcessError: a secret trial failed.
      ValueError: the folder holds another sweep, or other files.
      OSError: the folder is in use.
    """
    workspace = open_workspace(settings, prepared)
    private = settings.output_dir / SECRET_FOLDER

    def check(row: Row) -> None:
        if settings.secret and not row.done:
            raise ChildProcessError(
                f"a trial failed; its log is in {private}. Mend what it says and repeat "
                "the command: the sweep continues with the same trials."
            )

    def ended(attempt: Attempt, row: Row) -> None:
        if not settings.secret:
            point = ", ".join(f"{name}={value}" for name, value in (row.settings or {}).items())
            result = f"{row.score}" if row.done else f"failed: {row.error}"
            trial = f"trial {(row.trial or 0) + 1} of {len(workspace.runs)}"
            say(f"{trial}: {point}: {prepared.metric} {result}")

    if settings.secret:
        say(f"trials run; how many, and how they score, stays in {private}")
    with locked(private) as lock:
        start = train_in_process(1, lock)
        execute(workspace, workspace.pending(), start, check=check, ended=ended)
    return workspace
