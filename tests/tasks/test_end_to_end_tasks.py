"""The paper's tasks from the command line to the scores, on the rows of tests/data, with tiny models.

Each task and kind of prompt is trained once for two private steps. Its figures are held against an
independent computation: whole forward passes of single rows, and a decoder that knows some answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_language_models import POSITIONS, save_causal_lm, save_masked_lm

from hf_dpzero.cli import main
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives import prompted
from hf_dpzero.objectives.losses import IGNORE_INDEX
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.description import DataArguments
from hf_dpzero.tasks.prompted import PromptedClassification

DATA = Path(__file__).resolve().parents[1] / "data"
STEPS = 2
LENGTHS = {"sst2": 30, "trec": 30, "rte": 80}
"""max_seq_length, so that some prompts of the task are cut; 90 for the others."""
# One of each kind of prompt and answer: what else a task is, is in the tests of its prompts.
CASES = [
    ("sst2", "masked_lm"),
    ("trec", "causal_lm"),
    ("squad", "causal_lm"),
    pytest.param("rte", "masked_lm", marks=pytest.mark.slow),
    pytest.param("boolq", "causal_lm", marks=pytest.mark.slow),
    pytest.param("drop", "causal_lm", marks=pytest.mark.slow),
]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny ones, with weights so large that predictions differ from row to row."""
    folder = tmp_path_factory.mktemp("models")
    save = {"masked_lm": save_masked_lm, "causal_lm": save_causal_lm}
    found = {kind: make(folder / kind) for kind, make in save.items()}
    for kind, path in found.items():
        model, _ = loaded(found, kind)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
        model.save_pretrained(path)
    return found


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """(words) -> what a command prints; it must succeed."""

    def run(*words: Any) -> str:
        status = main.main([str(word) for word in words])
        captured = capsys.readouterr()
        assert status == 0, captured.err[-2000:]
        return captured.out

    return run


@pytest.fixture
def evaluate(call: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """(recipe, words) -> the figures of `hf-dpzero evaluate`."""

    def run(*words: Any) -> dict[str, Any]:
        out = call("evaluate", *words, "--json")
        return dict(json.loads(out[out.index("{") :]))

    return run


def rows_of(task: str) -> dict[str, str]:
    return {f"{s}_file": str(DATA / task / f"{s}.jsonl") for s in ("train", "validation")}


def recipe_of(folder: Path, models: dict[str, Path], task: str, kind: str, **settings: Any) -> Path:
    """A recipe that trains a tiny language model for two private steps."""
    values = {
        "model_name_or_path": str(models[kind]),
        "task": task,
        "prompt": kind,
        **rows_of(task),
        "max_seq_length": LENGTHS.get(task, 90),
        "max_new_tokens": 5,
        "target_epsilon": 4.0,
        "target_delta": 1e-2,
        "expected_batch_size": 3,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "output_dir": str(folder / "out"),
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def loaded(models: dict[str, Path], kind: str) -> tuple[Any, Any]:
    import transformers

    names = {"masked_lm": "AutoModelForMaskedLM", "causal_lm": "AutoModelForCausalLM"}
    model = getattr(transformers, names[kind]).from_pretrained(models[kind]).eval()
    return model, transformers.AutoTokenizer.from_pretrained(models[kind])


def prompt_text(task: Any, row: dict[str, Any]) -> str:
    """The text that the model is given."""
    fields = {**task.texts(row), "mask": "<mask>", "answer": ""}
    return str(task.template.render(fields)).rstrip(" ")


@torch.no_grad()
def scores_by_hand(task: Any, model: Any, tokenizer: Any) -> torch.Tensor:
    """Logits `[N, L]` of the label words, by one whole forward pass a row, without padding."""
    scores = []
    for row in task.splits["validation"]:
        text = prompt_text(task, row)
        ids = tokenizer(text)["input_ids"]
        place = ids.index(tokenizer.mask_token_id) if task.head == "masked_lm" else -1
        space = "" if text.endswith("\n") else " "
        words = [f"{space}{word}" for word in task.prompt.label_words]
        chosen = [ids[0] for ids in tokenizer(words, add_special_tokens=False)["input_ids"]]
        scores.append(model(torch.tensor([ids])).logits[0, place][chosen])
    return torch.stack(scores)


def answer_tokens(task: Any, row: dict[str, Any], tokenizer: Any) -> list[int]:
    value = row["answers"]
    answer = value["text"][0] if isinstance(value, dict) else ", ".join(value[0])
    return list(tokenizer(f" {answer}\n", add_special_tokens=False)["input_ids"])


@torch.no_grad()
def answer_loss_by_hand(task: Any, model: Any, tokenizer: Any) -> float:
    losses = []
    for row in task.splits["validation"]:
        prompt = tokenizer(prompt_text(task, row))["input_ids"]
        answer = answer_tokens(task, row, tokenizer)
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item())
    return sum(losses) / len(losses)


def check_label_words(task: Any, model: Any, tokenizer: Any, found: Any, prediction: Any) -> None:
    """Prompts, padding, positions, words, order, labels, averages are those of single rows."""
    scores = scores_by_hand(task, model, tokenizer)
    labels = torch.tensor(task.splits["validation"]["label"][:])
    assert torch.equal(torch.as_tensor(prediction.label_ids), labels)
    torch.testing.assert_close(torch.as_tensor(prediction.predictions), scores, atol=1e-5, rtol=0)
    assert scores.std(dim=0).min() > 1e-3  # rows differ, so another order would show
    assert found["eval_accuracy"] == pytest.approx((scores.argmax(1) == labels).float().mean())
    loss = torch.nn.functional.cross_entropy(scores, labels).item()
    assert found["eval_loss"] == pytest.approx(loss, abs=2e-5)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_task_is_trained_evaluated_and_replayed(
    name, kind, models, tmp_path, call, evaluate, caplog, monkeypatch
):
    recipe, out = recipe_of(tmp_path, models, name, kind), tmp_path / "out"
    data: dict[str, Any] = {"task": name, "prompt": kind, **rows_of(name)}
    task: Any = build_task(DataArguments(**data))
    model, tokenizer = loaded(models, kind)
    scores = ("accuracy",) if task.num_labels else ("f1", "exact_match")

    assert "NOT PRIVATE" not in call("train", recipe)
    report, results = read(out / "privacy_report.json"), read(out / "all_results.json")
    assert report["private"] is True
    assert (report["steps"], results["train_samples"]) == (STEPS, len(task.splits["train"]))
    assert 3.0 < report["epsilon"] <= 4.0
    assert len(Trajectory.load(out / "trajectory.safetensors").releases) == STEPS
    assert results["zero_shot_loss"] != results["eval_loss"]
    assert all(0 <= results[f"{s}_{score}"] <= 1 for s in ("zero_shot", "eval") for score in scores)

    # How many public prompts were cut is what the tokenizer says of the whole ones.
    rows, cut = task.splits["validation"], 0
    for row in rows:
        room = 0 if kind == "masked_lm" else 1
        if not task.num_labels:
            room = max(5, len(answer_tokens(task, row, tokenizer)))
        size = len(tokenizer(prompt_text(task, row))["input_ids"])
        cut += size + room > LENGTHS.get(name, 90)
    assert 0 < cut < len(rows)
    assert f"{cut} of {len(rows)} validation prompts have more" in caplog.text
    assert "train prompts have more" not in caplog.text

    # With room for every prompt, the figures are those of single rows, computed by hand.
    predictions: list[Any] = []
    metrics = PromptedClassification.metrics

    def watched(task: Any, tokenizer: Any) -> Any:
        compute = metrics(task, tokenizer)
        return lambda prediction: predictions.append(prediction) or compute(prediction)

    monkeypatch.setattr(PromptedClassification, "metrics", watched)
    whole = ("--max_seq_length", POSITIONS)
    caplog.clear()
    zero_shot = evaluate(recipe, "--zero_shot", *whole)
    assert "validation prompts have more" not in caplog.text
    assert zero_shot["privacy"] == "zero-shot: no training row was used"
    assert zero_shot["eval_samples"] == len(task.splits["validation"])
    if task.num_labels:
        check_label_words(task, model, tokenizer, zero_shot, *predictions)
    else:
        loss = answer_loss_by_hand(task, model, tokenizer)
        assert zero_shot["eval_loss"] == pytest.approx(loss, abs=2e-4)

    # A trained folder is evaluated to the run's own figures, and says what it promises.
    trained = evaluate(recipe, "--model_name_or_path", out)
    assert trained["privacy"].startswith(report["statement"])
    assert trained["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5)
    assert all(trained[f"eval_{score}"] == results[f"eval_{score}"] for score in scores)

    # Whoever verifies a run has its folder and the base model, and not the private rows.
    words = ("--trajectory", out / "trajectory.safetensors", "--output_dir", tmp_path / "rebuilt")
    gone = ("--train_file", "gone.jsonl", "--validation_file", "gone.jsonl")
    replayed = call("replay", "--base", recipe, *words, "--expect", out, *gone)
    assert f"replayed {STEPS} steps" in replayed
    assert "bit for bit" in replayed


@pytest.mark.parametrize("name", ["squad", "drop"])
def test_answers_are_scored_against_their_own_question(
    name, models, tmp_path, evaluate, monkeypatch
):
    """A decoder that knows every second answer, by the question in the prompt, is right there only."""
    recipe = recipe_of(tmp_path, models, name, "causal_lm", max_new_tokens=20)
    data: dict[str, Any] = {"task": name, "prompt": "causal_lm", **rows_of(name)}
    task, (_, tokenizer) = build_task(DataArguments(**data)), loaded(models, "causal_lm")
    rows = list(task.splits["validation"])[::2]
    known = {row["question"]: answer_tokens(task, row, tokenizer)[:-1] for row in rows}

    def greedy(model: Any, ids: Any, mask: Any, *, max_new_tokens: int, **_: Any) -> Any:
        found = torch.full((len(ids), max_new_tokens), IGNORE_INDEX)
        for target, row, kept in zip(found, ids, mask, strict=True):
            text = tokenizer.decode(row[kept.bool()], skip_special_tokens=True)
            answer = known.get(text.split("\nQuestion: ")[1].split("\n")[0], [])
            target[: len(answer)] = torch.tensor(answer, dtype=torch.int64)
        return found, torch.zeros(len(ids))

    monkeypatch.setattr(prompted, "greedy", greedy)
    found = evaluate(recipe, "--zero_shot")
    assert (found["eval_exact_match"], found["eval_f1"]) == (0.5, 0.5)

    # The same counted privately; at epsilon = 50 the noise is 0 but for 1e-21.
    *private, public = (DATA / name / "validation.jsonl").read_text().splitlines(keepends=True)
    files = {"validation": tmp_path / "public.jsonl", "private": tmp_path / "private.jsonl"}
    files["validation"].write_text(public)
    files["private"].write_text("".join(private))
    words = [word for split, file in files.items() for word in (f"--{split}_file", file)]
    made = evaluate(recipe, *words, "--epsilon", 50, "--output_dir", tmp_path / "record")
    assert (made["metric"], made["num_rows"]) == ("exact_match", len(private))
    assert made["released"] == len(private[::2]) > 0


@pytest.mark.parametrize("kind", ["masked_lm", "causal_lm"])
def test_demonstrations_are_said_to_be_not_private(kind, models, tmp_path, evaluate):
    recipe = recipe_of(tmp_path, models, "sst2", kind)
    shown = evaluate(recipe, "--num_demonstrations", 2, "--max_seq_length", 200)
    assert shown["privacy"].startswith("NOT PRIVATE: 2 training rows stand in every prompt")
    plain = evaluate(recipe)
    assert plain["privacy"] == "zero-shot: no training row was used"
    assert shown["eval_loss"] != plain["eval_loss"]


SEVERAL = ["a short form", "a thing", "an account", "a person", "a place", "Number"]
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "accuracy of several words": (
        "trec",
        "causal_lm",
        {"objective": "accuracy", "smoothing": 0.01},
    ),
    "f1 of drop": ("drop", "causal_lm", {"objective": "f1", "smoothing": 1e-2}),
    "prefix at a mask": ("rte", "masked_lm", {"peft_method": "prefix"}),
    "dp-adamw, several words": ("trec", "causal_lm", {"method": "dp-adamw", "clip": 1.0}),
    "mezo": ("boolq", "causal_lm", {"method": "mezo", "target_epsilon": None}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_train_evaluate_and_replay(way, models, tmp_path, call, evaluate):
    name, kind, changes = WAYS[way]
    changes = {**changes, "label_words": SEVERAL} if "several words" in way else changes
    recipe, out = recipe_of(tmp_path, models, name, kind, **changes), tmp_path / "out"
    call("train", recipe)
    results = read(out / "all_results.json")
    assert read(out / "privacy_report.json")["private"] is (changes.get("method") != "mezo")
    assert results["zero_shot_loss"] > 0.05  # cross entropy, whatever is trained on
    check_again(out, call, evaluate, replays=changes.get("method") != "dp-adamw")


def check_again(out: Path, call: Any, evaluate: Any, replays: bool = True) -> None:
    """What was trained is evaluated to the run's own figures, and its log gives its weights."""
    recipe, results = out / "recipe.yaml", read(out / "all_results.json")
    found = evaluate(recipe, "--model_name_or_path", out)
    assert found["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5)
    if replays:
        words = (
            "--trajectory",
            out / "trajectory.safetensors",
            "--output_dir",
            out.parent / "again",
        )
        assert "bit for bit" in call("replay", "--base", recipe, *words)


def test_a_bounded_loss_releases_what_a_bounded_loss_can(models, tmp_path, call):
    """Without noise: sums of differences of 0 or +-1 / (2 lambda), over B."""
    settings = {
        "objective": "accuracy", "noise_multiplier": 0.0, "target_epsilon": None, "clip": 1e3,
        "smoothing": 0.1, "max_steps": 6, "expected_batch_size": 5, "testing.direction_key": 7,
        "testing.insecure_noise_seed": 3, "testing.sampler_key": "ab" * 32,
    }  # fmt: skip
    call("train", recipe_of(tmp_path, models, "trec", "causal_lm", **settings))
    releases = Trajectory.load(tmp_path / "out" / "trajectory.safetensors").releases
    sums = torch.tensor([list(release.values) for release in releases]) * 5 * 2 * 0.1
    torch.testing.assert_close(sums, sums.round(), atol=1e-3, rtol=0)
    assert 0.5 <= sums.abs().max() <= 10  # some answer changed; there are ten rows


@pytest.mark.parametrize(
    ("name", "kind", "tag", "settings"),
    [
        ("sst2", "masked_lm", "fill-mask", {}),
        ("squad", "causal_lm", "text-generation", {"peft_method": "lora"}),
    ],
)
def test_a_prompted_run_is_described_as_what_it_is(
    name, kind, tag, settings, models, tmp_path, call, evaluate, monkeypatch
):
    """The card's pipeline and privacy; its code runs on the folder that is shipped."""
    call("train", recipe_of(tmp_path, models, name, kind, **settings))
    out, hub = tmp_path / "out", tmp_path / "out" / "hub"
    if settings:  # an adapter, which no other test here trains
        check_again(out, call, evaluate)
    call("push", out, "--repo_id", "me/tiny", "--dry_run")
    card = (hub / "README.md").read_text(encoding="utf-8")
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["pipeline_tag"] == tag
    assert "differential-privacy" in metadata["tags"]
    assert "text-classification" not in card
    assert read(out / "privacy_report.json")["statement"] in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    names: dict[str, Any] = {}
    monkeypatch.chdir(models[kind].parent)  # of a local base, its folder's name is published
    exec(code.replace('"me/tiny"', repr(str(hub))), names)
    assert names["model"] is not None
    for path in (p for p in hub.iterdir() if p.suffix in (".json", ".md", ".yaml")):
        text = path.read_text(encoding="utf-8")
        assert str(tmp_path) not in text, path.name
        assert "prompts have more than" not in text, path.name


REFUSED_RUNS: list[tuple[tuple[str, ...], str, dict[str, Any], str]] = [
    (
        *(("train",), "masked_lm", {"num_demonstrations": 2}),
        "num_demonstrations=2 would put these training rows into every example's loss",
    ),
    (
        *(("train",), "causal_lm", {"max_seq_length": 257}),
        "max_seq_length=257, but opt models of this size take 256 tokens; lower it",
    ),
    (
        *(("evaluate", "--zero_shot"), "causal_lm", {"num_demonstrations": 2}),
        "NOT PRIVATE: 2 training rows stand in every prompt",
    ),
    (
        *(("evaluate", "--zero_shot", "--model_name_or_path", "masked_lm"), "causal_lm", {}),
        "masked_lm at main is not the recipe's base model",
    ),
]


@pytest.mark.parametrize(("command", "kind", "settings", "message"), REFUSED_RUNS)
def test_a_run_is_refused(command, kind, settings, message, tmp_path, models, capsys):
    recipe = recipe_of(tmp_path, models, "sst2", kind, **settings)
    words = [str(models.get(word, word)) for word in command]
    assert main.main([words[0], str(recipe), *words[1:]]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in said
    assert ("without training rows" in said) is ("--zero_shot" in command)
    assert not (tmp_path / "out").exists()
