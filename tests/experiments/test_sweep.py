"""What choosing settings costs is stated, and what must stay secret stays secret."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from finished_runs import report_of, write_run
from row_files import row_files

from hf_dpzero.cli import main
from hf_dpzero.experiments.results import Exit, Row
from hf_dpzero.experiments.runner import Attempt
from hf_dpzero.experiments.sweep import (
    Prepared,
    SweepSettings,
    _refuse_different_events,
    draw_points,
    open_workspace,
    parse_grid,
    prepare,
)
from hf_dpzero.experiments.sweep_outputs import _best_row
from hf_dpzero.privacy.mechanisms import NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.privacy.selection import (
    TrialCount,
    composed_epsilon,
    composition_entry,
    selection_entry,
    selection_epsilon,
    total_epsilon,
)
from hf_dpzero.recipes.recipe import load_recipe, read_recipe
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.wording import round_up

ROOT = Path(__file__).resolve().parents[2]
DELTA = 1e-5


def make_plan(steps: int = 200, num_directions: int = 1, **settings: Any) -> PrivacyPlan:
    mechanism = ScalarMechanism(
        clip=1.0,
        noise_multiplier=4.0,
        expected_batch_size=64.0,
        num_directions=num_directions,
        distribution="gaussian",
    )
    sampler = PoissonSampler(num_examples=1024, expected_batch_size=64.0)
    return PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=steps, **settings)


def test_grids_are_coerced_by_the_recipe(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text("clip: [1, 4]\nlearning_rate: [0.1]\n")
    found = parse_grid(["learning-rate=1e-3, 1e-2", "num_directions=1,16"], str(file))
    assert found == {"clip": [1.0, 4.0], "learning_rate": [1e-3, 1e-2], "num_directions": [1, 16]}
    assert [type(value) for value in found["num_directions"]] == [int, int]
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        parse_grid([], "none.yaml")
    for text in ("clip: 3\n", "- clip\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="a grid file is lines of"):
            parse_grid([], str(file))
    for words, message in (
        ([], "the grid is empty"),
        (["clip"], "write it as field=value"),
        (["clip="], "write it as field=value"),
        (["clop=1"], "did you mean 'clip'"),
        (["clip=one"], "clip: invalid float value: 'one'"),
        (["clip=1,1.0"], "clip=1.0 appears more than once"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_grid(words)


def test_grid_files_load_and_say_how_to_run_them():
    paths = sorted((ROOT / "configs" / "sweep").glob("*.yaml"))
    assert {path.stem for path in paths} >= {"roberta-dpzero", "first-order", "opt-dpzero"}
    for path in paths:
        assert math.prod(len(values) for values in parse_grid([], str(path)).values()) > 1
        assert f"configs/sweep/{path.name}" in path.read_text(encoding="utf-8")


def row(trial: int, score: float | None, status: str = "done") -> Row:
    about: Any = {"method": "dpzero", "algorithm": "dpzero", "private": True, "seed": 42}
    about |= {"target_epsilon": math.inf, "digest": str(trial), "folder": f"{trial:03d}"}
    settings = {"clip": float(trial)}
    return Row(**about, trial=trial, settings=settings, status=status, score=score)


def test_the_best_row():
    rows = [row(0, 0.5), row(1, 0.7), row(2, 0.7), row(3, None), row(4, None, "failed")]
    assert _best_row(rows, "eval_accuracy") is rows[1]  # the earlier of equals
    assert _best_row(rows, "eval_loss") is rows[0]
    assert _best_row([rows[3], rows[4]], "eval_loss") is rows[3]
    assert _best_row([rows[4]], "eval_loss") is None


def test_a_selected_run_reports_the_total(tmp_path):
    plan, trials = make_plan(accountant="rdp"), TrialCount(mean=5.0)
    entry = selection_entry(plan, trials, ["clip"], DELTA)
    again = json.loads(json.dumps(entry, allow_nan=False))
    report = report_of(plan).with_tuning(again, plan, {})
    total = selection_epsilon(plan, trials, DELTA)
    assert report.epsilon == total > plan.epsilon(DELTA)
    assert report.statement.startswith("The choice of settings, the weights and the trajectory")
    assert f"({round_up(total)}, 1e-05)-differentially private" in report.statement
    assert "secret random number of trials (geometric, mean 5)" in report.statement
    assert "Hyper-parameter tuning is included" in report.statement
    assert not any("is not accounted: epsilon covers" in caveat for caveat in report.caveats)
    report.save(tmp_path)
    assert PrivacyReport.load(tmp_path) == report


def test_other_tunings_change_words_alone():
    plan = make_plan()
    plain = report_of(plan)
    loud, public = (plain.with_tuning(tuning, plan, {}) for tuning in ("not_accounted", "public"))
    assert loud.epsilon == plain.epsilon
    assert "NOT ACCOUNTED: this epsilon holds for one run" in loud.statement
    assert ("tuning", "NOT ACCOUNTED; epsilon is for one run alone") in loud.rows()
    assert public.statement == plain.statement
    assert any("The declaration is the user's" in caveat for caveat in public.caveats)
    assert public.with_tuning("none", plan, {}) == plain
    mezo = dataclasses.replace(plan, mechanism=NonPrivateMean(expected_batch_size=64.0))
    report = report_of(mezo).with_tuning("not_accounted", mezo, {})
    assert not report.private and report.statement.startswith("NOT PRIVATE")


def test_tuning_is_for_whole_runs_and_known_entries():
    plan = make_plan(accountant="rdp")
    entry = selection_entry(plan, TrialCount(mean=5.0), ["clip"], DELTA)
    with pytest.raises(ValueError, match="tuning is accounted for whole runs"):
        report_of(plan, steps=3).with_tuning(entry, plan, {})
    for wrong in ("free", {"composition": {}}, {}, {"repeat_and_select": {"mean_trials": 2}}):
        with pytest.raises(ValueError, match="in a privacy report; it is one of"):
            report_of(plan).with_tuning(wrong, plan, {})


def test_a_composition_lists_the_run_itself():
    plans = [make_plan(), make_plan(), make_plan(num_directions=4)]
    entry = composition_entry(plans, ["num_directions"])
    assert [item["count"] for item in entry["composition"]["plans"]] == [2, 1]
    assert total_epsilon(plans[0], entry, DELTA) == composed_epsilon(plans, DELTA)
    with pytest.raises(ValueError, match="does not list the plan of this very run"):
        total_epsilon(make_plan(steps=7), entry, DELTA)
    entry["composition"]["runs"] = 2
    with pytest.raises(ValueError, match="another number of runs"):
        total_epsilon(plans[0], entry, DELTA)


@pytest.fixture
def selected() -> tuple[PrivacyPlan, PrivacyReport]:
    plan = make_plan(steps=3, accountant="rdp")
    entry = selection_entry(plan, TrialCount(mean=5.0), ["clip"], DELTA)
    return plan, report_of(plan).with_tuning(entry, plan, {})


def test_the_hub_ships_a_selected_run_with_its_total_or_more_and_not_with_less(selected, tmp_path):
    plan, report = selected
    folder = build_hub_folder(
        write_run(tmp_path / "run", plan, report, tuning="not_accounted"), tmp_path / "hub"
    )
    card = (folder / "README.md").read_text()
    assert report.statement in card
    assert f"| epsilon (spent) | {round_up(report.epsilon)} |" in card
    assert "private selection of the best of a random number of trials" in card
    strict = dataclasses.replace(report, epsilon=1.01 * report.epsilon)
    build_hub_folder(
        write_run(tmp_path / "strict", plan, strict, tuning="not_accounted"),
        tmp_path / "strict-hub",
    )
    plain = report_of(plan)  # without an entry, a larger epsilon is another run's
    wrong = [(report, 0.999 * report.epsilon), (report, plan.epsilon(DELTA)), (plain, 9.0)]
    for number, (source, epsilon) in enumerate(wrong):
        lax = dataclasses.replace(source, epsilon=epsilon)
        folder = write_run(tmp_path / f"lax{number}", plan, lax, tuning="not_accounted")
        with pytest.raises(ValueError, match="are not of the same run .*epsilon"):
            build_hub_folder(folder, tmp_path / f"hub{number}")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path) -> Path:
    """A recipe that trains a tiny BERT for three steps on the quickstart's messages."""
    folder = tmp_path_factory.mktemp("sweep")
    values = {
        "model_name_or_path": str(bert_checkpoint), "task": "quickstart", "max_train_samples": 96,
        "max_eval_samples": 24, "max_seq_length": 16, "target_epsilon": 4.0, "target_delta": 1e-3,
        "expected_batch_size": 8, "max_steps": 3, "learning_rate": 1e-3, "trainable": "^classifier",
        "use_cpu": True, "save_strategy": "no", "output_dir": str(folder / "out"),
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yaml"


def start_by(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """Trials are started by `start`."""
    monkeypatch.setattr("hf_dpzero.experiments.sweep.train_in_process", lambda jobs, lock: start)


def in_process(attempt: Attempt) -> Any:
    """A trial that trains in this process when it is asked how it ended."""
    return SimpleNamespace(poll=lambda: Exit(main.main(attempt.words), 1.0), stop=lambda: None)


def copied(attempt: Attempt, run: Path, status: int = 0) -> Any:
    """A trial that ends with `status`, leaving a copy of a run that was trained before."""

    def poll() -> Exit:
        if status:
            Path(f"{attempt.log}.err").write_text("error: it broke\n")
        else:
            shutil.copytree(run, attempt.folder)
        return Exit(status, 1.0)

    return SimpleNamespace(poll=poll, stop=lambda: None)


@pytest.fixture
def quick_trials(monkeypatch: pytest.MonkeyPatch) -> list[Attempt]:
    """Trials train in this process; returns those that were started, in order."""
    trained: list[Attempt] = []
    start_by(monkeypatch, lambda attempt: trained.append(attempt) or in_process(attempt))
    return trained


@pytest.fixture(scope="module")
def trained(recipe: Path) -> Path:
    """A finished run of the recipe, not accounted."""
    out = recipe.parent / "trained"
    assert main.main(["train", str(recipe), "--output_dir", str(out)]) == 0
    return out


COMPOSED = ("--tuning", "composed")
NOT_ACCOUNTED = ("--tuning", "not_accounted", "--grid", "clip=1,4")


def sweep(recipe: Path, folder: Path, *words: Any) -> int:
    return main.main(["sweep", str(recipe), "--output_dir", str(folder), *map(str, words)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("free --grid clip=1,2", "tuning='free' is not one of composed"),
        ("composed --grid max_steps=3,4", "Allowed: learning_rate, clip, smoothing"),
        ("composed --grid expected_batch_size=4,8", "changes the privacy event"),
        ("composed --grid target_epsilon=1,2", "the sweep sets the noise"),
        ("composed --grid subset_seed=1,2", "one fixed set of training rows"),
        ("composed --grid output_dir=a,b", "is no hyper-parameter"),
        ("composed --grid clip=1,2 --holdout 0.1", "each run would hold other rows out"),
        (
            "public --grid testing.sampler_key=a,b",
            "testing.sampler_key may not be in a public grid",
        ),
        ("composed --grid clip=1,2 --clip 3", "both swept and overridden"),
        ("composed --grid clip=1,2 --selection some", "selection='some'"),
        ("composed --grid clip=1,2 --mean_trials 0", "mean_trials=0.0"),
        ("composed --grid clip=1,2 --testing.insecure_noise_seed 0", "NOT PRIVATE"),
        ("composed --grid clip=1,-2", "clip=-2.0"),
        (
            "composed --grid clip=1,2 --neighboring_relation replace_one",
            "'poisson' have no sound account together; use accountant='pld'",
        ),
        ("composed --grid clip=1,2 --method mezo --target_epsilon null", "nothing to account"),
    ],
)
def test_what_may_not_be_swept(words, message, recipe, tmp_path, capsys):
    assert sweep(recipe, tmp_path / "D", "--tuning", *words.split()) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "D").exists()


def test_events_are_compared_whatever_the_field_is_called():
    """The list of names is for early messages; what protects is the comparison of events."""
    points = [{"clip": 1.0, "odd": 1}, {"clip": 2.0, "odd": 1}, {"clip": 1.0, "odd": 2}]
    plans = [make_plan(), make_plan(num_directions=4), make_plan(steps=7)]
    with pytest.raises(ValueError, match="^odd changes the privacy event"):
        _refuse_different_events(points, plans)
    _refuse_different_events(points[:2], plans[:2])


def settings_of(recipe: Path, folder: Path, **changes: Any) -> SweepSettings:
    values: dict[str, Any] = {
        "recipe": str(recipe), "overrides": {}, "tuning": "composed", "selection": "random",
        "grid": {"clip": [1.0, 4.0], "learning_rate": [1e-3, 1e-2]}, "metric": None,
        "trials": TrialCount(mean=4.0), "output_dir": folder,
    }  # fmt: skip
    return SweepSettings(**{**values, **changes})


def test_the_noise_of_trials_by_unit_is_that_of_their_runs(recipe, tmp_path):
    """n is the number of units, a third of the rows: the noise follows from n."""
    train = [{"text": f"text {i}", "label": i % 2, "who": i // 3} for i in range(96)]
    words = {"task": "text_classification", "text_column": "text", "unit_column": "who"}
    words |= row_files(tmp_path, train, [{"text": f"other {i}", "label": i} for i in range(2)])
    prepared = prepare(settings_of(recipe, tmp_path, overrides=words))
    assert prepared.num_examples == 32
    of_trial = load_recipe(recipe, {**words, "clip": 1.0}).training
    of_trial.target_epsilon, of_trial.noise_multiplier = None, prepared.noise_multiplier
    assert of_trial.plan(32).mechanism.rows_per_unit == 4
    assert prepared.epsilon_one_run == pytest.approx(
        dataclasses.replace(of_trial.plan(32), accountant="rdp").epsilon(1e-3)
    )


PREPARED = Prepared(extra={}, num_examples=96, metric="eval_accuracy", tuning="none")


@pytest.mark.false_alarm(3e-8)  # four shares, 5.8 deviations at 1,000 points
def test_points_are_drawn_uniformly_and_their_number_varies(recipe, tmp_path):
    drawn = [draw_points(settings_of(recipe, tmp_path)) for _ in range(300)]
    assert len({len(points) for points in drawn}) > 5
    counts = Counter(tuple(point.values()) for points in drawn for point in points)
    total = sum(counts.values())
    assert len(counts) == 4
    assert all(abs(count / total - 0.25) < 0.08 for count in counts.values())


def test_a_continued_sweep_keeps_its_draw(recipe, tmp_path):
    """A folder of another sweep, or of other files, is refused."""
    settings = settings_of(recipe, tmp_path / "D", trials=TrialCount(mean=50.0))
    first = [run.digest for run in open_workspace(settings, PREPARED).runs]
    assert len(set(first)) == len(first)  # equal points are trials of their own
    assert [run.digest for run in open_workspace(settings, PREPARED).runs] == first
    assert (tmp_path / "D" / "_private").stat().st_mode & 0o777 == 0o700
    other = dataclasses.replace(settings, grid={"clip": [1.0, 5.0]})
    with pytest.raises(ValueError, match="holds a sweep with other settings"):
        open_workspace(other, PREPARED)
    assert [path.name for path in (tmp_path / "D").iterdir()] == ["_private"]
    every = dataclasses.replace(settings, selection="all")  # an interrupted one left D/_private
    for wrong in (every, settings_of(recipe, tmp_path)):
        with pytest.raises(ValueError, match="holds other files"):
            open_workspace(wrong, PREPARED)


def test_an_unfinished_run_is_set_aside_in_private(recipe, tmp_path):
    """With a checkpoint it continues; once it has left its last file, only its row is missing."""
    settings = settings_of(recipe, tmp_path / "D", tuning="not_accounted")
    workspace = open_workspace(settings, PREPARED)
    run = workspace.runs[0]
    folder = workspace.attempt(run).folder
    assert folder == tmp_path / "D/trials/000"

    def leave(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    leave("trajectory.ledger", "x")
    assert workspace.attempt(run).folder == folder and not folder.exists()
    assert (tmp_path / "D/_private/abandoned/000-0/trajectory.ledger").is_file()
    leave("trajectory.ledger", "x")
    leave("checkpoint-2/dpzero_state.json", "{}")
    assert workspace.attempt(run).checkpoint == folder / "checkpoint-2"
    leave("recipe.yaml", "")
    assert workspace.attempt(run).finished


def public_files(folder: Path) -> dict[str, bytes]:
    """Every file outside D/_private and its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "_private" not in path.relative_to(folder).parts
    }


@pytest.mark.slow
def test_a_private_selection_end_to_end(recipe, tmp_path, quick_trials, monkeypatch, capsys):
    """Also: the same winner among more losers leaves the same public files, byte for byte."""
    monkeypatch.setattr(TrialCount, "draw", lambda self: 2)
    folder = tmp_path / "D"
    words = [*COMPOSED, "--grid", "learning_rate=1e-3,1e-2", "--grid", "clip=1,4"]
    assert sweep(recipe, folder, *words) == 0
    said = capsys.readouterr().out
    assert len(quick_trials) == 2
    rows = [json.loads(line) for line in (folder / "_private/trials.jsonl").open()]
    assert [one["trial"] for one in rows] == [0, 1]

    content = json.loads((folder / "sweep.json").read_text())
    best = max(rows, key=lambda one: one["score"])
    assert content["best"]["settings"] == best["settings"]
    assert content["mean_trials"] == 4.0
    assert 3.98 < content["epsilon"] <= 4.0 and "trials" not in content

    report = PrivacyReport.load(folder / "best")
    assert report.epsilon == pytest.approx(content["epsilon"])
    assert report.target_epsilon == 4.0 and report.private
    assert "repeat_and_select" in report.tuning
    assert report.noise_multiplier == content["noise_multiplier"]
    for trial in range(2):
        values = read_recipe(folder / f"_private/trials/{trial:03d}.yaml")
        assert values["noise_multiplier"] == content["noise_multiplier"]
        assert values["report_to"] == ["none"]

    files = public_files(folder)
    assert set(files) >= {"sweep.json", "sweep.md", "best/privacy_report.json", "best/README.md"}
    for name, text in files.items():
        assert b"/_private" not in text, name
        assert b"trials/0" not in text, name
    assert "trial 1" not in said
    build_hub_folder(folder / "best", tmp_path / "hub")

    state = folder / "_private/trials.json"
    values = json.loads(state.read_text())
    values["trials"] += values["trials"]  # two more, which score less
    state.write_text(json.dumps(values))
    run = folder / "_private/trials" / best["folder"]

    def lose(attempt: Attempt) -> Any:
        quick_trials.append(attempt)
        loser = tmp_path / f"loser{len(quick_trials)}"
        shutil.copytree(run, loser)
        results = json.loads((loser / "all_results.json").read_text())
        (loser / "all_results.json").write_text(json.dumps({**results, "eval_accuracy": -1.0}))
        return copied(attempt, loser)

    start_by(monkeypatch, lose)
    for _ in range(2):  # the second time nothing runs again
        assert sweep(recipe, folder, *words) == 0 and len(quick_trials) == 4
        assert public_files(folder) == files


def test_a_failed_secret_trial_stops_the_sweep(recipe, tmp_path, trained, monkeypatch):
    monkeypatch.setattr(TrialCount, "draw", lambda self: 2)
    start_by(monkeypatch, lambda attempt: copied(attempt, trained, status=1))
    assert sweep(recipe, tmp_path / "D", *COMPOSED, "--grid", "clip=1,4") == 2
    assert public_files(tmp_path / "D") == {}
    assert not (tmp_path / "D/_private/trials.jsonl").exists()


@pytest.mark.slow
def test_all_runs_may_be_released(recipe, tmp_path, quick_trials, capsys):
    folder = tmp_path / "D"
    words = [*COMPOSED, "--selection", "all", "--grid", "max_steps=2,3"]
    assert sweep(recipe, folder, *words) == 0 and "trial 2 of 2" in capsys.readouterr().out
    content = json.loads((folder / "sweep.json").read_text())
    assert [one["settings"]["max_steps"] for one in content["trials"]] == [2, 3]
    assert 3.98 < content["epsilon"] <= 4.0
    for trial in range(2):
        run = folder / f"trials/{trial:03d}"
        report = PrivacyReport.load(run)
        assert report.epsilon == pytest.approx(content["epsilon"])
        assert report.tuning["composition"]["runs"] == 2
        build_hub_folder(run, tmp_path / f"hub{trial}")


def test_a_sweep_not_accounted_says_so_everywhere(recipe, tmp_path, trained, monkeypatch, capsys):
    """A failed trial is a row of the table; its error is quoted, for it is a refusal of settings."""
    folder = tmp_path / "D"

    def start(attempt: Attempt) -> Any:
        return copied(attempt, trained, status=2 if attempt.run.name == "001" else 0)

    start_by(monkeypatch, start)
    words = ["--tuning", "not_accounted", "--grid", "clip=1,4,8", "--metric", "eval_loss"]
    assert sweep(recipe, folder, *words) == 0 and "NOT ACCOUNTED" in capsys.readouterr().out
    content = json.loads((folder / "sweep.json").read_text())
    assert content["epsilon"] is None and content["epsilon_if_composed"] > 4.0
    assert content["best"]["settings"] == {"clip": 1.0}  # the earlier of equals
    assert content["best"]["score"] == content["trials"][2]["score"]
    assert content["trials"][1]["message"] == "error: it broke"
    assert "| 4.0 | failed |" in (folder / "sweep.md").read_text()
    for trial in (0, 2):
        report = PrivacyReport.load(folder / f"trials/{trial:03d}")
        assert report.tuning == "not_accounted" and "NOT ACCOUNTED" in report.statement
    for name in ("sweep.md", "best.yaml"):
        assert "NOT ACCOUNTED" in (folder / name).read_text()
    assert load_recipe(folder / "best.yaml").training.clip == 1.0


def test_a_public_sweep_writes_a_recipe_for_the_private_data(
    recipe, tmp_path, trained, monkeypatch
):
    """Data overrides name the public stand-in and stay out of best.yaml; other overrides stay in."""
    folder = tmp_path / "D"
    start_by(monkeypatch, lambda attempt: copied(attempt, trained))
    stand_in = ["--task", "text_classification"]
    for name in ("train_file", "validation_file"):
        rows = [{"text": f"{name} {i}", "label": i % 2} for i in range(24)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        stand_in += [f"--{name}", tmp_path / f"{name}.jsonl"]
    words = ["--tuning", "public", "--grid", "clip=1,4", *stand_in, "--smoothing", 0.01]
    assert sweep(recipe, folder, *words) == 0
    swept = read_recipe(folder / "trials/000.yaml")["train_file"]
    assert swept == str(tmp_path / "train_file.jsonl")
    best = read_recipe(folder / "best.yaml")
    assert "train_file" not in best and best["task"] == "quickstart" and best["smoothing"] == 0.01
    assert best["target_epsilon"] == 4.0
    header = (folder / "best.yaml").read_text().split("\n\n")[0]
    assert "declaration is the user's" in header
    assert "declaration is the user's" in (folder / "sweep.md").read_text()
    assert PrivacyReport.load(folder / "trials/001").tuning == "public"


def test_an_interrupted_sweep_continues(recipe, tmp_path, trained, monkeypatch, capsys):
    """Ctrl-C in the second trial; repeated, the first is not run again.

    Before: a dry run writes nothing; a metric that the results lack leaves no row.
    """
    words = [*COMPOSED, "--grid", "clip=1,4", "--grid", "num_directions=1,2", "--dry_run"]
    assert sweep(recipe, tmp_path / "D", *words) == 0 and not (tmp_path / "D").exists()
    out = capsys.readouterr().out
    for said in ("grid: 4 settings of clip, num_directions", "mean 4", "epsilon of one run alone"):
        assert said in out
    start_by(monkeypatch, lambda attempt: copied(attempt, trained))
    assert sweep(recipe, tmp_path / "E", *NOT_ACCOUNTED, "--metric", "eval_f1") == 2
    assert "metric='eval_f1' is not among the results" in capsys.readouterr().err
    assert not (tmp_path / "E/trials.jsonl").exists()
    started: list[str] = []

    def start(attempt: Attempt) -> Any:
        started.append(attempt.run.name)
        if len(started) == 2:
            raise KeyboardInterrupt
        return copied(attempt, trained)

    start_by(monkeypatch, start)
    assert sweep(recipe, tmp_path / "D", *NOT_ACCOUNTED) == 130
    assert not (tmp_path / "D/sweep.json").exists()
    assert sweep(recipe, tmp_path / "D", *NOT_ACCOUNTED) == 0 and started == ["000", "001", "001"]
    content = json.loads((tmp_path / "D/sweep.json").read_text())
    assert [one["status"] for one in content["trials"]] == ["done", "done"]
