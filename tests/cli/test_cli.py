"""The command line as a user meets it: results, files left behind, and one-line errors."""

from __future__ import annotations

import configparser
import importlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_dpzero.cli import main
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.recipes.recipe import load_recipe, read_recipe
from hf_dpzero.reporting.verification import report_of

ROOT = Path(__file__).resolve().parents[2]

PLAN = ["plan", "--num_examples", "1024", "--expected_batch_size", "64", "--max_steps", "10000"]


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Runs a command that must succeed and returns what it printed."""
    status = main.main([str(word) for word in words])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def fail(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Runs a command that must be refused and returns its one line."""
    status = main.main([str(word) for word in words])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2 and error.startswith("error: ")
    return error


def test_every_command_has_help(capsys):
    commands = ("train", "evaluate", "plan", "compare", "sweep", "replay", "push", "verify")
    for words in ([], *([command] for command in commands)):
        with pytest.raises(SystemExit) as stop:
            main.main([*words, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert all(command in text for command in commands) if not words else "--traceback" in text


def test_no_command_and_unknown_options_are_refused(capsys):
    for words, message in (
        ([], "required"),
        (["dance"], "'dance'"),
        (["recipes", "--colour", "red"], "unrecognized arguments: --colour red"),
    ):
        with pytest.raises(SystemExit) as stop:
            main.main(words)
        assert stop.value.code == 2 and message in capsys.readouterr().err
    assert "did you mean 'target_epsilon'" in fail(capsys, *PLAN, "--target_eps", "2")
    with pytest.raises(ValueError, match="give exactly one"):
        main.main([*PLAN, "--traceback"])


def test_the_declared_entry_point_is_the_command():
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    name, _, target = declared["options.entry_points"]["console_scripts"].strip().partition(" = ")
    assert name == "hf-dpzero"
    module, _, function = target.partition(":")
    assert getattr(importlib.import_module(module), function) is main.main


def planned(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    """What `plan ... --json` prints, which must be valid JSON."""
    out = run(capsys, *words, "--json")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_plan_finds_the_noise_of_a_budget(capsys):
    """The PLD accountant needs 4.84 C/B here, under add-or-remove-one."""
    found = planned(capsys, *PLAN, "--target_epsilon", 6, "--target_delta", "1e-5", "--clip", 3)
    assert found["noise_multiplier"] == pytest.approx(4.84, rel=0.005)
    assert found["noise_std"] == pytest.approx(found["noise_multiplier"] * 3 / 64)
    assert found["noise_std_in_clip_over_batch"] == found["noise_multiplier"]
    assert found["sampling_probability"] == 64 / 1024 and 5.9 < found["epsilon"] <= 6
    by_relation = found["epsilon_by_relation"]
    assert by_relation["add_or_remove_one"] == found["epsilon"]
    assert by_relation["replace_one"] > 1.5 * found["epsilon"]
    table = run(capsys, *PLAN, "--target_epsilon", "6", "--max_steps", "1e2")
    assert "noise_multiplier" in table and "replace_one" in table and "{" not in table


def test_plan_finds_the_epsilon_of_a_noise(capsys):
    """Also with an accountant that was not asked for, and without noise."""
    found = planned(capsys, *PLAN, "--noise_multiplier", 4.84, "--target_delta", "1e-5")
    assert found["epsilon"] == pytest.approx(6, rel=0.01) and found["target_epsilon"] is None
    fixed = ["--sampling", "fixed_size_without_replacement"]
    fixed += ["--neighboring_relation", "replace_one"]
    assert planned(capsys, *PLAN, *fixed, "--noise_multiplier", 20)["accountant"] == "rdp"
    assert planned(capsys, *PLAN, "--noise_multiplier", 0)["epsilon"] == "inf"
    assert planned(capsys, *PLAN, "--method", "mezo")["private"] is False


def test_plan_of_the_papers_lemma(capsys):
    """Lemma 2.2: std of the mean is 4 C sqrt(2 T log(e + eps/delta)) / (n eps)."""
    n, steps, epsilon, delta = 1000, 100, 2.0, 1e-5
    found = planned(
        capsys,
        *("plan", "--num_examples", n, "--max_steps", steps, "--sampling", "full_batch"),
        *("--accountant", "advanced_composition", "--neighboring_relation", "replace_one"),
        *("--target_epsilon", epsilon, "--target_delta", delta),
    )
    expected = 4 * math.sqrt(2 * steps * math.log(math.e + epsilon / delta)) / (n * epsilon)
    assert found["noise_std"] == pytest.approx(expected, rel=2e-3)
    assert found["expected_batch_size"] == n
    assert "not accounted" in found["epsilon_by_relation"]["add_or_remove_one"]


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """train_file and validation_file with a sentence and its label."""
    folder = tmp_path_factory.mktemp("rows")
    texts = (("it was good", 1), ("great film", 1), ("it was bad", 0), ("awful film was", 0))
    lines = [json.dumps({"sentence": text, "label": label}) for text, label in texts]
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    for path, copies in zip(files.values(), (24, 6), strict=True):
        path.write_text("\n".join(lines * copies) + "\n", encoding="utf-8")
    return files


def tiny_recipe(folder: Path, checkpoint: Path, rows: dict[str, Path], **settings: Any) -> Path:
    """Writes a recipe that trains a tiny model for three steps."""
    values: dict[str, Any] = {
        "model_name_or_path": str(checkpoint), "task": "sst2", "target_epsilon": 4.0,
        "target_delta": 1e-3, "expected_batch_size": 8, "num_directions": 2, "max_steps": 3,
        "learning_rate": 1e-3, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "output_dir": str(folder / "out"), **{key: str(path) for key, path in rows.items()},
    }  # fmt: skip
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**values, **settings}), encoding="utf-8")
    return path


@pytest.fixture
def recipe(tmp_path: Path, bert_checkpoint: Path, rows: dict[str, Path]) -> Path:
    return tiny_recipe(tmp_path, bert_checkpoint, rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path, rows: Any) -> Path:
    """The output_dir of a finished run; its recipe lies beside it. Read only."""
    folder = tmp_path_factory.mktemp("trained")
    assert main.main(["train", str(tiny_recipe(folder, bert_checkpoint, rows))]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def not_private(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path, rows: Any) -> Path:
    """The output_dir of a run of MeZO: its report says NOT PRIVATE. Read only."""
    folder = tmp_path_factory.mktemp("not_private")
    recipe = tiny_recipe(folder, bert_checkpoint, rows, method="mezo", target_epsilon=None)
    assert main.main(["train", str(recipe)]) == 0
    return folder / "out"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_train_leaves_results_model_report_and_recipe(trained):
    results = read(trained / "all_results.json")
    assert 0 <= results["zero_shot_accuracy"] <= 1
    assert results["eval_accuracy"] == read(trained / "eval_results.json")["eval_accuracy"]
    assert results["train_samples"] == 96 and "train_loss" not in results
    report = read(trained / "privacy_report.json")
    assert report["private"] is True and report["steps"] == 3
    assert 0 < report["epsilon"] <= 4 and (trained / "model.safetensors").is_file()
    assert load_recipe(trained / "recipe.yaml").training.max_steps == 3
    assert len(Trajectory.load(trained / "trajectory.safetensors").releases) == 3
    assert (trained / "training_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_that_cannot_be_drawn_does_not_fail_the_run(recipe, capsys, monkeypatch):
    def broken(*arguments: Any) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("hf_dpzero.cli.train.plot_run", broken)
    assert main.main(["train", str(recipe)]) == 0
    assert "no training curve was drawn: no fonts" in capsys.readouterr().err


def test_zero_shot_is_the_untrained_model(trained, capsys):
    """`evaluate` of the recipe's base gives the figure that `train` noted, and writes no file."""
    before = sorted(trained.parent.rglob("*"))
    out = run(capsys, "evaluate", trained.parent / "tiny.yaml", "--json")
    assert sorted(trained.parent.rglob("*")) == before
    results, found = read(trained / "all_results.json"), json.loads(out)
    assert found["eval_accuracy"] == results["zero_shot_accuracy"]
    assert found["eval_loss"] == pytest.approx(results["zero_shot_loss"], rel=1e-4)
    assert found["eval_samples"] == 24


def test_evaluate_a_trained_model_and_write_the_result(trained, tmp_path, capsys):
    words = ["--model_name_or_path", trained, "--output_dir", tmp_path]
    run(capsys, "evaluate", trained.parent / "tiny.yaml", *words)
    found, results = read(tmp_path / "eval_results.json"), read(trained / "all_results.json")
    assert found["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-4)
    assert found["eval_loss"] != results["zero_shot_loss"]


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten private rows, one of which has another length."""
    path = tmp_path_factory.mktemp("private") / "ward.jsonl"
    lines = [{"sentence": f"it was {'good ' * k}film", "label": k % 2} for k in range(10)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


def test_private_rows_are_evaluated_with_noise(trained, private, tmp_path, capsys):
    """A line on record for each release, and epsilons that add up; card and shipped folder say so."""
    folder = shutil.copytree(trained, tmp_path / "out")
    words = ["evaluate", trained.parent / "tiny.yaml", "--model_name_or_path", folder]
    words += ["--private_file", private, "--epsilon"]
    found = json.loads(run(capsys, *words, 50, "--json"))
    assert (found["rows"], found["num_rows"], found["step"]) == ("ward.jsonl", 10, 3)
    # at epsilon = 50 the noise is 0 but for 1e-21
    assert found["released"] == 10 * found["accuracy"] and 0 <= found["released"] <= 10
    assert found["interval_of_noise"] == [found["accuracy"]] * 2
    least, most = found["interval_of_noise_and_sampling"]
    assert least < found["accuracy"] < most or found["accuracy"] in (0, 1)
    shown = run(capsys, *words, "0.25")
    assert "2 private evaluations on record: epsilon = 50.25, delta = 0" in shown
    assert "at least 95 %, over the noise alone" in shown and "population" in shown
    record = (folder / "private_evaluations.jsonl").read_text()
    assert [json.loads(line)["epsilon"] for line in record.splitlines()] == [50.0, 0.25]
    for name in ("README.md", "report.html"):
        assert "With the training: epsilon = 50.25" in (folder / name).read_text()
    run(capsys, "push", folder, "--repo_id", "me/x", "--dry_run")
    assert (folder / "hub" / "private_evaluations.jsonl").read_text() == record
    card = (folder / "hub" / "README.md").read_text()
    assert "## Evaluated on private rows" in card
    for text in (card, (folder / "hub" / "report.html").read_text()):
        assert "With the training: epsilon = 50.25" in text


def test_what_no_private_evaluation_can_be_made_of_is_refused(trained, private, rows, capsys):
    words = ("evaluate", trained.parent / "tiny.yaml", "--private_file", private)
    assert "--epsilon says what one release may spend" in fail(capsys, *words)
    assert "the same --output_dir" in fail(capsys, *words, "--epsilon", 1)
    model = ("--model_name_or_path", trained)
    assert "a number above 0" in fail(capsys, *words, *model, "--epsilon", 0)
    shown = fail(
        capsys, *words, *model, "--epsilon", 1, "--num_demonstrations", 1, "--prompt", "null"
    )
    assert "num_demonstrations" in shown
    assert not (trained / "private_evaluations.jsonl").exists()


def privacy(capsys: Any, *words: Any) -> str:
    return json.loads(run(capsys, "evaluate", *words, "--json"))["privacy"]


def copy_of(trained: Path, folder: Path, *left_out: str) -> Path:
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns(*left_out, "hub", "_private"))
    return folder


NO_ROW = "zero-shot: no training row was used"


def test_an_evaluation_quotes_the_report_of_what_it_evaluates(recipe, trained, not_private, capsys):
    for folder, private in ((trained, True), (not_private, False)):
        report = read(folder / "privacy_report.json")
        said = privacy(capsys, recipe, "--model_name_or_path", folder)
        assert report["statement"] in said and said.startswith("NOT PRIVATE") is not private


def test_a_trained_base_model_is_not_zero_shot(rows, trained, not_private, tmp_path, capsys):
    """The recipe's own base may be a folder that was trained, on these very rows; a ledger tells too."""
    for folder in (trained, not_private):
        recipe = tiny_recipe(tmp_path, folder, rows)
        statement = read(folder / "privacy_report.json")["statement"]
        assert statement in privacy(capsys, recipe)
        assert statement in fail(capsys, "evaluate", recipe, "--zero_shot")
    for kept, other in (("ledger", "safetensors"), ("safetensors", "ledger")):
        left_out = ("privacy_report.json", f"trajectory.{other}")
        folder = copy_of(trained, tmp_path / kept, *left_out)
        recipe = tiny_recipe(tmp_path, folder, rows)
        said = privacy(capsys, recipe)
        assert said.startswith(f"NOT KNOWN: {folder} was trained") and f"trajectory.{kept}" in said
        assert "was trained" in fail(capsys, "evaluate", recipe, "--zero_shot")


def test_a_report_that_cannot_be_read_claims_nothing(rows, trained, tmp_path, capsys):
    """Also one that was edited into a claim that its numbers contradict."""
    folder = copy_of(trained, tmp_path / "base")
    recipe, report = tiny_recipe(tmp_path, folder, rows), read(trained / "privacy_report.json")
    for text in ("{", json.dumps({**report, "epsilon": "inf"})):
        (folder / "privacy_report.json").write_text(text, encoding="utf-8")
        assert privacy(capsys, recipe).startswith(f"NOT KNOWN: {folder} was trained")
        assert "was trained" in fail(capsys, "evaluate", recipe, "--zero_shot")
    (folder / "privacy_report.json").write_text(json.dumps(report), encoding="utf-8")
    weights = folder / "model.safetensors"
    saved = weights.read_bytes()
    weights.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    assert f"the weights in {folder} are not those that" in privacy(capsys, recipe)
    weights.write_bytes(saved)
    unsaid = {**report, "private": False, "statement": "All is well."}
    (folder / "privacy_report.json").write_text(json.dumps(unsaid), encoding="utf-8")
    assert privacy(capsys, recipe).startswith("NOT KNOWN: ")  # the trajectory says otherwise
    (folder / "trajectory.safetensors").unlink()
    assert privacy(capsys, recipe).startswith("NOT PRIVATE: All is well.")


def test_a_checkpoint_says_what_was_spent_until_then(recipe, capsys):
    """Its own report; where it has none, what the whole run spent, which is more."""
    run(capsys, "train", recipe, "--save_strategy", "steps", "--save_steps", 2)
    out = recipe.parent / "out"
    checkpoint = out / "checkpoint-2"
    words = ["--model_name_or_path", checkpoint]
    statements = [read(folder / "privacy_report.json")["statement"] for folder in (checkpoint, out)]
    assert statements[0] != statements[1]
    assert statements[0] in privacy(capsys, recipe, *words)
    (checkpoint / "privacy_report.json").unlink()
    assert statements[1] in privacy(capsys, recipe, *words)
    assert statements[1] in fail(capsys, "evaluate", recipe, "--zero_shot", *words)


def test_a_folder_without_a_report_says_nothing(recipe, trained, tmp_path, capsys):
    """Weights that somebody copied, without what the run wrote beside them."""
    folder = copy_of(trained, tmp_path / "w", "privacy_report.json", "trajectory.*")
    said = privacy(capsys, recipe, "--model_name_or_path", folder)
    assert said.startswith("NOT KNOWN: ") and "not the recipe's base model" in said
    error = fail(capsys, "evaluate", recipe, "--zero_shot", "--model_name_or_path", folder)
    assert f"{folder} at main is not the recipe's base model" in error


def test_another_revision_is_another_model(recipe, bert_checkpoint, tmp_path, capsys):
    """The default branch by its name is the recipe's, and so is its folder by another name."""
    assert privacy(capsys, recipe, "--model_revision", "main") == NO_ROW
    said = privacy(capsys, recipe, "--model_revision", "after-training")
    assert said.startswith("NOT KNOWN: ") and "at after-training is not" in said
    error = fail(capsys, "evaluate", recipe, "--zero_shot", "--model_revision", "after-training")
    assert "at after-training is not the recipe's base model" in error
    link = tmp_path / "link"
    link.symlink_to(bert_checkpoint)
    for name in (link, bert_checkpoint / ".." / bert_checkpoint.name):
        assert privacy(capsys, recipe, "--model_name_or_path", name, "--zero_shot") == NO_ROW


def test_an_adapter_speaks_for_itself_and_its_base(
    bert_checkpoint, rows, not_private, tmp_path, capsys
):
    lora = {"peft_method": "lora", "lora_r": 2, "lora_target_modules": ["query", "value"]}
    for name, base in (("clean", bert_checkpoint), ("spoilt", not_private)):
        folder = tmp_path / name
        folder.mkdir()
        recipe = tiny_recipe(folder, base, rows, **lora)
        run(capsys, "train", recipe)
        out = folder / "out"
        assert (out / "adapter_model.safetensors").is_file()
        own = read(out / "privacy_report.json")["statement"]
        found = json.loads(run(capsys, "evaluate", recipe, "--model_name_or_path", out, "--json"))
        said, loss = found["privacy"], read(out / "all_results.json")["eval_loss"]
        assert own in said and found["eval_loss"] == pytest.approx(loss, rel=1e-4)
        assert ("NOT PRIVATE" in said) is (base == not_private)
        words = ("evaluate", recipe, "--zero_shot", "--model_name_or_path", folder / "out")
        assert own in fail(capsys, *words)
    clean = tmp_path / "clean" / "out"
    replay = ["replay", "--base", clean / "recipe.yaml", "--output_dir", tmp_path / "rebuilt"]
    assert "bit for bit" in run(capsys, *replay, "--trajectory", clean / "trajectory.safetensors")
    run(capsys, "push", clean, "--repo_id", "me/tiny", "--dry_run")
    for values in (
        True,
        False,
    ):  # by the base's name and a file of initial values, then by the recipe
        out = run(capsys, "verify", clean / "hub", "--base", bert_checkpoint)
        assert "verified     weights" in out and "bit for bit" in " ".join(out.split())
        assert (clean / "hub" / "initial_values.safetensors").exists() is values
        (clean / "hub" / "initial_values.safetensors").unlink(missing_ok=True)
    words = ("--model_name_or_path", clean, "--model_revision", "later")
    said = privacy(capsys, tmp_path / "clean" / "tiny.yaml", *words)
    assert "NOT KNOWN" in said and "at later is not" in said


def test_a_hub_model_that_came_with_a_report_is_not_zero_shot(tmp_path, trained, monkeypatch):
    """Its repository holds what `push` put there."""
    import huggingface_hub

    from hf_dpzero.cli.train import privacy_statement
    from hf_dpzero.reporting.provenance import Origin

    asked = []

    def download(repo_id: str, name: str, revision: str) -> str:
        asked.append((repo_id, name, revision))
        if repo_id == "me/clean":
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        return str(trained / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    statement = read(trained / "privacy_report.json")["statement"]
    words = ["--output_dir", str(tmp_path)]
    for name in ("me/clean", "me/tuned"):
        path = tmp_path / "r.yaml"
        settings = {"model_name_or_path": name, "model_revision": "v1", "method": "mezo"}
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        said = privacy_statement(load_recipe(path, words), Origin.of(name, "v1"))
        assert (said == NO_ROW) is (name == "me/clean")
        assert (statement in said) is (name == "me/tuned")
        later = privacy_statement(load_recipe(path, words), Origin.of(name, "v0"))
        assert (later.startswith("NOT KNOWN")) is (name == "me/clean")
    assert {(name, revision) for _, name, revision in asked} >= {("privacy_report.json", "v1")}


def test_replay_rebuilds_the_weights_without_the_data(trained, tmp_path, capsys):
    """Who verifies a published run has its folder, not its private rows."""
    published, rebuilt = tmp_path / "published", tmp_path / "rebuilt"
    published.mkdir()
    for name in ("config.json", "model.safetensors", "trajectory.safetensors"):
        shutil.copy(trained / name, published)
    values = {**read_recipe(trained / "recipe.yaml"), "train_file": "gone.jsonl"}
    (published / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    words = ["replay", "--base", published / "recipe.yaml"]
    words += ["--trajectory", published / "trajectory.safetensors", "--output_dir"]
    out = run(capsys, *words, rebuilt)
    assert "replayed 3 steps" in out and "bit for bit" in out
    assert (rebuilt / "tokenizer.json").is_file()
    assert "own folder" in fail(capsys, *words, published)


def test_a_replayed_average_is_a_run_of_its_own_report(trained, recipe, tmp_path, capsys):
    """It costs what the run cost, can be pushed, and can be replayed and compared like a run."""
    words = ["replay", "--base", trained / "recipe.yaml", "--trajectory"]
    mean = tmp_path / "mean"
    average = ("--output_dir", mean, "--average_last")
    assert "mean of those after each of the last 2" in run(capsys, *words, trained, *average, 2)
    run_report, report = read(trained / "privacy_report.json"), report_of(mean)
    assert (report.average_last, report.epsilon) == (2, run_report["epsilon"])
    assert report.weights_digest != run_report["weights_digest"]
    assert "3 of 3 planned; the weights are the mean of those after the last 2 steps" in str(report)
    assert str(mean / "hub") in run(capsys, "push", mean, "--repo_id", "me/tiny", "--dry_run")
    again = ("--output_dir", tmp_path / "again")
    assert f"equal those in {mean}, bit for bit" in run(capsys, *words, mean, *again)
    last = ("--output_dir", tmp_path / "last", "--average_last", 1, "--expect", trained)
    assert "bit for bit" in run(capsys, *words, mean, *last)
    for wrong in (0, 4):  # of three steps
        assert f"average_last={wrong}" in fail(capsys, *words, trained, *average, wrong)


def test_replay_refuses_other_weights_another_base_and_a_damaged_trajectory(
    trained, not_private, recipe, tmp_path, capsys
):
    words = ["--trajectory", trained / "trajectory.ledger", "--output_dir", tmp_path / "again"]
    base = ["replay", "--base", trained / "recipe.yaml", *words]
    assert "is not what the trajectory gives" in fail(capsys, *base, "--expect", not_private)
    whole, out = trained / "trajectory.safetensors", ("--output_dir", tmp_path / "r")
    words = ("--trajectory", whole, *out)
    assert "digest" in fail(capsys, "replay", "--base", recipe, *words, "--init_seed", 7)
    weights = trained / "model.safetensors"
    assert "a file, and no recipe" in fail(capsys, "replay", "--base", weights, *words)
    assert "digest" in fail(capsys, "replay", "--base", trained, *words)  # already trained
    damaged = tmp_path / "trajectory.safetensors"
    damaged.write_bytes(whole.read_bytes()[:-5])
    base = ("replay", "--base", trained / "recipe.yaml", "--trajectory")
    assert str(damaged) in fail(capsys, *base, damaged, *out) and not (tmp_path / "r").exists()


def test_push_dry_run_leaves_the_folder(trained, not_private, tmp_path, capsys):
    copy, words = tmp_path / "out", ("--repo_id", "me/tiny", "--dry_run")
    fail(capsys, "push", tmp_path, *words)  # nothing is there
    assert "not private" in fail(capsys, "push", not_private, *words).lower()
    shutil.copytree(trained, copy)
    assert str(copy / "hub") in run(capsys, "push", copy, *words)
    names = {path.name for path in (copy / "hub").rglob("*")}
    assert names >= {"README.md", "privacy_report.json", "trajectory.safetensors"}
    assert not names & {"sampler_key", "training_args.bin", "trajectory.ledger"}


def test_train_resumes_and_does_not_touch_an_earlier_run(recipe, capsys):
    """Stopped after two of four steps, then continued: the ledger has each step once."""
    out = recipe.parent / "out"
    words = ["--max_steps", 4, "--save_strategy", "steps", "--save_steps", 2]
    run(capsys, "train", recipe, *words)
    whole = Trajectory.load(out / "trajectory.ledger").releases
    weights = (out / "model.safetensors").read_bytes()
    (out / "checkpoint-4").rename(recipe.parent / "set-aside")
    run(capsys, "train", recipe, *words, "--resume_from_checkpoint")
    assert Trajectory.load(out / "trajectory.ledger").releases == whole
    assert (out / "model.safetensors").read_bytes() == weights
    assert [release.step for release in whole] == [0, 1, 2, 3]
    assert "set aside" in run(capsys, "train", recipe, *words)  # a new run
    assert Trajectory.load(out / "earlier-1" / "trajectory.ledger").releases == whole
    assert Trajectory.load(out / "trajectory.ledger").releases != whole
