"""`hf-dpzero replay` rebuilds weights from a trajectory; `push`, `verify`, `clean` go by its folder."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_dpzero.cli.options import Budget, Clean, Push, Replay, Verify
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.recipes.recipe import Recipe, load_recipe
from hf_dpzero.reporting import budget_file, hub
from hf_dpzero.reporting.evidence import NotChecked, findings, page, unchecked
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.provenance import PACKAGE_SCHEME, Origin, earlier_runs, resolve_path
from hf_dpzero.reporting.public import RECIPE_FILE
from hf_dpzero.reporting.registry import registry_entry
from hf_dpzero.reporting.verification import agreeing, bound_to, check_weights
from hf_dpzero.reporting.weights import read_weights, weight_files
from hf_dpzero.reporting.wording import EQUAL, EQUAL_BUT_NEW, NOT_COMPARED
from hf_dpzero.run_folder.base_model import started_from
from hf_dpzero.run_folder.initial_values import load_initial_model
from hf_dpzero.run_folder.left_on_disk import left_on_disk, remove
from hf_dpzero.shipped import shipped_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_dpzero.tasks.classification import Task


def run_push(arguments: Push) -> None:
    """Ships what may be shipped, or with --dry_run leaves exactly that in a local folder."""
    address = hub.push(
        arguments.output_dir,
        arguments.repo_id,
        private=arguments.private,
        dry_run=arguments.dry_run,
        allow_not_private=arguments.allow_not_private,
    )
    print(f"the folder that would be uploaded: {address}" if arguments.dry_run else address)


def run_clean(arguments: Clean) -> None:
    """Lists what a run no longer needs, and with --yes removes it."""
    folder = Path(arguments.output_dir)
    going = remove(folder, dry_run=True, unfinished=arguments.unfinished)
    print("\n".join(map(str, going)) or f"nothing to remove in {folder}")
    if going and arguments.yes:
        remove(folder, dry_run=False, unfinished=arguments.unfinished)
    if going:
        print("removed" if arguments.yes else "nothing was removed: --yes removes what is listed")
    if staying := [left for left in left_on_disk(folder) if not left.goes]:
        print("what stays:", *staying, sep="\n")


def run_budget(arguments: Budget) -> None:
    """Prints what a budget file holds; with a ceiling it makes the file first."""
    if (arguments.epsilon, arguments.delta) != (None, None):
        if arguments.epsilon is None or arguments.delta is None:
            raise ValueError("--epsilon and --delta make a budget file together; give both.")
        known = {
            field.name: getattr(arguments, field.name) for field in fields(budget_file.Ceiling)
        }
        budget_file.create(arguments.file, budget_file.Ceiling(**known))
    print(budget_file.read(arguments.file))


def run_replay(arguments: Replay) -> None:
    """Loads base and trajectory, checks the base's digest, replays, saves, compares.

    The rebuilt weights are compared bit for bit with those of `--expect`, or with those that lie beside
    the trajectory, which is copied beside them, and so is the report where there is one. Another average
    than theirs is compared with `--expect` alone, and report and trajectory name it.
    """
    output, given = Path(arguments.output_dir), Path(arguments.trajectory).resolve()
    beside = given if given.is_dir() else given.parent
    if output.resolve() == beside:
        raise ValueError(f"output_dir={output} is the trajectory's own folder; give another one.")
    trajectory = Trajectory.load(given / SHIPPING_NAME if given.is_dir() else given)
    model, tokenizer = _load_base(arguments.base, arguments.overrides, beside)
    shipped = trajectory.average_last
    average = shipped if arguments.average_last is None else arguments.average_last
    trajectory.average_last = average
    replay(model, trajectory)  # refuses a base of another digest
    model.save_pretrained(output)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)
    trajectory.to_safetensors(output / SHIPPING_NAME)  # what was trained once is known by these two
    if (beside / REPORT_FILE).is_file():
        shutil.copyfile(beside / REPORT_FILE, output / REPORT_FILE)
        if average != shipped:
            report = replace(PrivacyReport.load(output), average_last=average)
            bound_to(report, output).save(output)
    made, all_of = trajectory.shipped_step, len(trajectory.releases)
    print(f"replayed {all_of if made is None else f'{made} of {all_of}'} steps into {output}")
    if average > 1:
        print(f"the weights are the mean of those after each of the last {average} steps")
    if arguments.expect is not None or (average == shipped and weight_files(beside)):
        print(_compared(output, Path(arguments.expect or beside)))


def run_verify(arguments: Verify) -> int:
    """Prints what of a published run's claims holds; 1 where one does not."""
    folder, names = _published(arguments.folder)

    def weights_hold(report: PrivacyReport, trajectory: Trajectory) -> str:
        with contextlib.redirect_stdout(sys.stderr):  # the page alone is the output
            return _weights_hold(folder, report, trajectory, arguments.base)

    found = findings(folder, weights_hold)
    fails = any(finding.holds is False for finding in found)
    if arguments.json:
        known = {"folder": arguments.folder, "holds": not fails}
        lists = {"findings": [asdict(f) for f in found], "cannot_be_checked": unchecked(names)}
        print(json.dumps({**known, **lists}, indent=2))
    else:
        print(page(arguments.folder, found, unchecked(names)))
    if (file := arguments.registry_entry) is not None:
        if fails:
            print(f"{file} was not written: a claim does not hold.", file=sys.stderr)
        else:
            entry = registry_entry(PrivacyReport.load(folder))
            Path(file).write_text(entry, encoding="utf-8")
    return int(fails)


def _published(name: str) -> tuple[Path, list[str]]:
    """A folder, or a copy of what a run publishes in the Hub's repository; names of all files there."""
    if Path(name).is_dir():
        found = (file for file in Path(name).rglob("*") if not file.is_dir())
        return Path(name), [file.relative_to(name).as_posix() for file in found]
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        files = [*hub.COPIED, *hub.WRITTEN]
        return Path(snapshot_download(name, allow_patterns=files)), list_repo_files(name)
    except (OSError, ValueError, HfHubHTTPError, HTTPError) as error:
        raise FileNotFoundError(
            f"{name} is no folder here, and no repository that the Hub gave ({type(error).__name__}): "
            "give the folder that `hf-dpzero push` made, or namespace/name."
        ) from error


def _weights_hold(
    folder: Path, report: PrivacyReport, trajectory: Trajectory, base: str | None
) -> str:
    """Compares a published run's weights with its report, and with what base and log give, bit for bit.

    Raises:
      ValueError: other weights, or another base; or the base cannot be loaded.
      NotChecked: nothing in the folder says what the run started from.
    """
    hub.check_files(folder)
    check_weights(report, folder)
    plan = PrivacyPlan.from_dict(trajectory.header["plan"])
    if not plan.mechanism.replayable:
        return "their digest is the report's; the log of this method cannot rebuild them"
    source, overrides = _base_of(folder, trajectory, base)
    name, origin = _origin_of(source, overrides, folder)
    try:
        model, _ = _load_base(source, overrides, folder)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"the base model cannot be loaded, so the weights were not rebuilt: {error} Give its folder "
            "or Hub id by --base."
        ) from error
    start = _start_holds(report, plan, model, name, origin)
    replay(model, trajectory)
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        same = _compared(Path(made), folder)
    return f"rebuilt from the log and {name} ({start}), whose digest the log has: {same}"


def _origin_of(source: str, overrides: Sequence[str], folder: Path) -> tuple[str, Origin]:
    """The base that `_load_base` takes, first its name for the page; refuses what is no base."""
    named, revision = source, None
    if source.endswith((".yaml", ".yml")):
        shipped = None if Path(source).exists() else shipped_file(source, "recipes")
        settings = load_recipe(str(shipped or source), overrides).model
        named, revision = settings.model_name_or_path, settings.model_revision
    origin = Origin.of(named, revision)
    place = Path(origin.path)
    if place.is_dir():
        named = repr(named if named.startswith(PACKAGE_SCHEME) else origin.path)
    else:
        named = f"{named!r} at {origin.revision!r}"
    if place.is_dir() and folder.resolve() in (place, *place.parents):
        raise ValueError(
            f"the base {named} lies in the folder that is verified: name one by --base."
        )
    if origin.revision.startswith("refs/") and not place.is_dir():
        raise ValueError(
            f"the base {named} is what anybody may propose to a repository, and no base."
        )
    if (place / hub.ADAPTER_FILE).is_file():
        raise NotChecked(
            f"their digest is the report's; they were not rebuilt: {named} is an adapter without its "
            "model. Give a recipe that loads both by --base"
        )
    return named, origin


def _extended(plan: PrivacyPlan, base: Path) -> list[str]:
    """The digest of the base's weights, where its own private run is what `plan` extends."""
    if not plan.after or not (base / SHIPPING_NAME).is_file():
        return []
    report, log = agreeing(PrivacyReport.load(base / REPORT_FILE), base)
    own = PrivacyPlan.from_dict(log.header["plan"])
    same = plan.after == (*own.after, (replace(own, after=()), report.steps))
    return [str(report.weights_digest)] if report.private and same else []


def _start_holds(
    report: PrivacyReport, plan: PrivacyPlan, model: Any, named: str, origin: Origin
) -> str:
    """Compares a loaded start with the base itself, and the base's runs with those of the report."""
    place = origin.path
    if not Path(place).is_dir():
        from huggingface_hub import snapshot_download

        place = snapshot_download(place, revision=origin.revision, local_files_only=True)
    stated, (start, new) = report.base_weights, started_from(model, place)
    if stated in (EQUAL, EQUAL_BUT_NEW) and start not in (EQUAL, stated):
        if start == NOT_COMPARED:
            raise NotChecked(
                f"their digest is the report's; that they started from {named} was not compared, for "
                "nothing of it is in the form of the model"
            )
        raise ValueError(
            f"the start is {start!r} beside {named}, and {REPORT_FILE} says {stated!r}: what the run "
            "began with is not the base that it names."
        )
    covered = _extended(plan, Path(place))
    listed = [(run["private"], run["statement"]) for run in report.earlier_runs]
    for run in earlier_runs([origin], covered):
        if (run["private"], run["statement"]) not in listed:
            raise ValueError(
                f"{named} came out of a run of this package that is not in earlier_runs of "
                f"{REPORT_FILE}: {run['statement']}"
            )
    return f"{start}, {new} tensors new" if new else start


def _base_of(folder: Path, trajectory: Trajectory, base: str | None) -> tuple[str, list[str]]:
    """What `_load_base` takes for a published folder, and overrides of a recipe."""
    if named := hub.replay_base(folder, trajectory):
        return base or named, []
    recipe = folder / RECIPE_FILE
    if recipe.is_file() and not (base or "").endswith((".yaml", ".yml")):
        return str(recipe), ["--model_name_or_path", base] if base else []
    if base is None:
        raise NotChecked(
            f"their digest is the report's; they were not rebuilt: neither {RECIPE_FILE} nor "
            f"{hub.INITIAL_VALUES_FILE} of this run says what it started from"
        )
    return base, []


def _load_base(
    base: str, overrides: Sequence[str], beside: Path
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Loads the untrained model and its tokenizer from a recipe, a model's folder or a Hub id."""
    shipped = None if Path(base).exists() else shipped_file(base, "recipes")
    base = str(shipped or base)
    if base.endswith((".yaml", ".yml")):
        from hf_dpzero.recipes.models import load_model
        from hf_dpzero.tasks import build_task

        recipe = load_recipe(base, overrides)
        fitted = beside if recipe.model.components and weight_files(beside) else None
        fits = recipe.model.components is not None and fitted is None
        if fitted is not None:
            print(f"public_features are taken from {fitted}: they are not fitted again or compared")
        task = build_task(recipe.data) if fits else _task_of(recipe, beside)
        return load_model(recipe.model, task, fitted=fitted)
    if Path(base).is_file():
        raise ValueError(
            f"--base {base} is a file, and no recipe: give the run's recipe.yaml, or the folder or Hub "
            "id of the untrained model."
        )
    if overrides:
        raise ValueError(f"{overrides[0]}: settings go with a recipe as --base, not with a model.")
    import transformers

    from hf_dpzero.recipes import sentence_classifier

    path, tokenizer = resolve_path(base), None
    if (beside / hub.INITIAL_VALUES_FILE).is_file():
        model = load_initial_model(beside / hub.INITIAL_VALUES_FILE, base)
    else:  # a saved model in float32, in the class that its configuration names
        config = transformers.AutoConfig.from_pretrained(path)
        kind = (config.architectures or ["(none)"])[0]
        owner = transformers if hasattr(transformers, kind) else sentence_classifier
        if not hasattr(owner, kind):
            raise ValueError(
                f"{base} is a {kind}, which transformers does not have; give the run's "
                "recipe.yaml as --base."
            )
        model = getattr(owner, kind).from_pretrained(path, dtype=torch.float32).eval()
    with contextlib.suppress(OSError, ValueError):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return model, tokenizer


def _task_of(recipe: Recipe, beside: Path) -> Task:
    """Builds the recipe's task, with its rows only where nothing else says what the labels are.

    Whoever verifies a release has the published model but not the private data: the names come from
    config.json beside the trajectory, else from the task, else one is made for each label text.
    """
    import datasets

    from hf_dpzero.tasks import build_task, description_of
    from hf_dpzero.tasks.classification import Task

    config, names = beside / "config.json", list[str]()
    if recipe.data.prompt is None:  # a language model's head has no labels
        if config.is_file():
            found = json.loads(config.read_text(encoding="utf-8")).get("id2label") or {}
            names = [found[key] for key in sorted(found, key=int)]
        known = description_of(recipe.data.task)
        names = names or [*(known.label_names if known else recipe.data.class_names or ())]
        if not names:
            try:
                return build_task(recipe.data)  # type: ignore[return-value]
            except (OSError, ValueError):
                if not recipe.model.label_texts:
                    raise
                names = [f"LABEL_{index}" for index in range(len(recipe.model.label_texts))]
    return Task(
        name=recipe.data.task,
        label_names=tuple(names),
        text_columns=(),
        splits=datasets.DatasetDict(),
        head=recipe.data.prompt or "sequence_classification",
    )


def _compared(rebuilt: Path, expected: Path) -> str:
    """Checks that two folders hold the same tensors, bit for bit, and says so."""
    ours, theirs = read_weights(rebuilt), read_weights(expected)
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(f"{rebuilt} and {expected} hold other tensors: {', '.join(odd[:3])}.")
    for name, tensor in ours.items():
        a, b = tensor.contiguous(), theirs[name].contiguous()
        alike = (a.dtype, a.shape) == (b.dtype, b.shape)
        # As bytes: -0.0 differs from 0.0, and a NaN equals itself.
        if not alike or not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
            raise ValueError(
                f"tensor {name} of {expected} is not what the trajectory gives: these weights "
                "were not made by these releases alone."
            )
    return f"all {len(ours)} tensors equal those in {expected}, bit for bit"
