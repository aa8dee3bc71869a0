"""What is shipped is exactly what may be, and it says what is true."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import yaml
from finished_runs import report_of, trajectory_of, write_run
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from tiny_runs import build

from hf_dpzero.privacy.mechanisms import NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.reporting.hub import build_hub_folder, push, write_model_card
from hf_dpzero.reporting.model_card import model_card
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.private_evaluations import PrivateEvaluation
from hf_dpzero.reporting.public import public_recipe, public_results
from hf_dpzero.reporting.weights import digest_weights
from hf_dpzero.run_folder import keys
from hf_dpzero.values import parse_yaml

SECRET = "7f3a-secret-of-the-run"
STEPS = 3

RECIPE = """# Fine-tunes a tiny model.
model_name_or_path: someone/tiny-bert
dataset_name: stanfordnlp/sst2
clip: 50.0
learning_rate: 1e-6
"""


def make_plan(private: bool = True) -> PrivacyPlan:
    batch = 8.0
    mechanism = (
        ScalarMechanism(clip=50.0, noise_multiplier=4.0, expected_batch_size=batch)
        if private
        else NonPrivateMean(expected_batch_size=batch)
    )
    sampler = PoissonSampler(num_examples=64, expected_batch_size=batch)
    return PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=STEPS)


def leave_run(folder: Path, private: bool = True) -> Path:
    """A finished run with everything a trainer leaves, secrets included."""
    plan = make_plan(private)
    write_run(folder, plan, report_of(plan))
    (folder / "tokenizer.json").write_text("{}")
    results = {
        "zero_shot_accuracy": 0.718,
        "eval_accuracy": 0.801,
        "eval_loss": 0.45,
        "eval_runtime": 1.5,
        "train_runtime": 987.125,
        "train_loss": 0.123456,
        "train_accuracy": 0.999,
        "note": SECRET,
    }
    (folder / "all_results.json").write_text(json.dumps(results))
    (folder / "recipe.yaml").write_text(RECIPE)
    _write_secrets(folder)
    return folder


def _write_secrets(folder: Path) -> None:
    """Files that a run really leaves, each holding the secret."""
    for name in (
        "_private/sampler_key",
        "private/sampler_key",
        "checkpoint-3/model.safetensors",
        "checkpoint-3/optimizer.pt",
        "checkpoint-3/rng_state.pth",
        "checkpoint-3/trainer_state.json",
        "runs/events.out.tfevents.1",
        "logs/train.log",
        "optimizer.pt",
        "rng_state.pth",
        "rng_state_0.pth",
        "scheduler.pt",
        "training_args.bin",
        "trainer_state.json",
        "train_results.json",
        "trajectory.ledger",
        "README.md",
        ".env",
        "predictions.json",
        "model.safetensors.bak",
        "pytorch_model.bin",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return leave_run(tmp_path / "out")


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


SHIPPED = {
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "privacy_report.json",
    "trajectory.safetensors",
    "README.md",
    "all_results.json",
    "recipe.yaml",
    "report.html",
}

# ---- the folder


def test_folder_holds_exactly_what_may_be_shipped(run: Path, tmp_path: Path) -> None:
    folder = build_hub_folder(run, tmp_path / "shipped")
    assert names(folder) == SHIPPED
    for name in ("model.safetensors", "trajectory.safetensors", "privacy_report.json"):
        assert (folder / name).read_bytes() == (run / name).read_bytes()
    shipped = (folder / "recipe.yaml").read_text()
    assert parse_yaml(shipped) == parse_yaml(RECIPE) and "#" not in shipped


def test_no_secret_reaches_the_folder(run: Path, tmp_path: Path) -> None:
    planted = [p for p in run.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert len(planted) > 20
    folder = build_hub_folder(run, tmp_path / "shipped")
    contents = [path.read_bytes() for path in folder.iterdir()]
    assert contents
    for content in contents:
        assert SECRET.encode() not in content
        assert b"0.123456" not in content  # the training loss
        assert b"987.1" not in content  # how long training took


def test_results_keep_evaluation_only(run: Path, tmp_path: Path) -> None:
    folder = build_hub_folder(run, tmp_path / "shipped")
    shipped = json.loads((folder / "all_results.json").read_text())
    assert set(shipped) == {"zero_shot_accuracy", "eval_accuracy", "eval_loss"}
    odd = {"eval_f1": float("nan"), "eval_rows": ["text"], "eval_em": 1}
    assert public_results(odd) == {"eval_em": 1}


def test_recipe_loses_secrets_and_local_paths() -> None:
    text = (
        "output_dir: out\nhub_token: hf_abc\nhub_model_id: me/x\napi_key: k\n"
        "testing: {sampler_key: 'ff', direction_key: 7, other: 1}\nmax_new_tokens: 5\n"
        "train_file: /home/me/a.jsonl\n"
        "learning_rate: 1e-6\nlabel_texts: [/srv/x/bad, good]\neval_strategy: no\n"
    )
    shipped = yaml.safe_load(public_recipe(text))
    assert shipped == {
        "testing": {"direction_key": 7},
        "max_new_tokens": 5,
        "train_file": "a.jsonl",
        "learning_rate": 1e-6,
        "label_texts": ["bad", "good"],
        "eval_strategy": "no",
    }


def test_text_that_starts_like_a_path_is_shipped_as_it_is() -> None:
    """A mangled template would be another model."""
    text = (
        "template: '/srv/x/{text} ~ {answer}'\nlabel_words: [/srv/x/bad, ~]\n"
        "class_names: [/r/ask/me, ~/b]\nlabel_texts: [/s, ~ three / five stars, /a/ b/ c]\n"
        "run_name: ~5/8\n"
    )
    assert parse_yaml(public_recipe(text)) == parse_yaml(text)
    lines = text + "train_file: /home/me/my rows.jsonl\n"  # this one has to go
    rest = {"train_file": "my rows.jsonl"}
    assert yaml.safe_load(public_recipe(lines)) == {**yaml.safe_load(text), **rest}


@pytest.mark.parametrize(
    ("name", "value", "shipped"),
    [
        ("train_file", "/rows.jsonl", "rows.jsonl"),
        ("validation_file", "~/a b/rows {1}.csv", "rows {1}.csv"),
        ("model_name_or_path", "/m", "m"),
        ("model_name_or_path", "~me/models/tuned", "tuned"),
        ("model_name_or_path", "org/model", "org/model"),
        ("task", "/srv/me/t.yaml", "t.yaml"),
        ("task", "sst2", "sst2"),
        ("dataset_name", "/srv/rows", "rows"),
        ("deepspeed", "/srv/me/zero.json", "zero.json"),
        ("run_name", "/srv/me/x.bin", "x.bin"),  # any key: it looks like a path
    ],
)
def test_paths_of_a_recipe_keep_their_last_part(name: str, value: str, shipped: str) -> None:
    text = yaml.safe_dump({name: value})
    assert yaml.safe_load(public_recipe(text)) == {name: shipped}


def test_a_path_that_exists_is_one_whatever_it_looks_like(tmp_path: Path) -> None:
    place = tmp_path / "with white space {and braces}"
    for exists in (False, True):
        if exists:
            place.mkdir()
        found = yaml.safe_load(public_recipe(yaml.safe_dump({"label_names": [str(place)]})))
        assert found == {"label_names": [place.name if exists else str(place)]}


def test_a_recipe_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recipe\.yaml is no mapping"):
        public_recipe("- a\n")


def test_recipe_and_results_are_optional(run: Path, tmp_path: Path) -> None:
    (run / "recipe.yaml").unlink()
    (run / "all_results.json").unlink()
    folder = build_hub_folder(run, tmp_path / "shipped")
    assert names(folder) == SHIPPED - {"recipe.yaml", "all_results.json"}


def test_shards_and_adapters_are_shipped(run: Path, tmp_path: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    (run / "model.safetensors").rename(run / shard)
    index = {"weight_map": {"w": shard}}
    (run / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = build_hub_folder(run, tmp_path / "sharded")
    assert {shard, "model.safetensors.index.json"} <= names(folder)
    (run / "model.safetensors.index.json").unlink()
    (run / shard).rename(run / "adapter_model.safetensors")
    (run / "adapter_config.json").write_text(json.dumps({"task_type": "SEQ_CLS"}))
    folder = build_hub_folder(run, tmp_path / "adapter")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names(folder)
    assert shard not in names(folder)


def test_an_older_folder_is_replaced_whole(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "shipped"
    target.mkdir()
    (target / "vocab.txt").write_text("old")
    assert names(build_hub_folder(run, target)) == SHIPPED
    assert names(tmp_path) >= {"out", "shipped"}
    assert not list(tmp_path.glob(".hub-*"))


def test_a_trained_run_ships_its_model_and_no_key(tmp_path: Path, monkeypatch: Any) -> None:
    """End to end: whatever the trainer leaves, the sampler key is not in it."""
    key = bytes(range(100, 132))
    monkeypatch.setattr(keys, "new_sampler_key", lambda: key)
    secret = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}
    trainer = build(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1, **secret)
    trainer.train()
    trainer.save_model()
    folder = build_hub_folder(tmp_path / "out", tmp_path / "shipped")
    assert names(folder) == {
        "model.safetensors",
        "config.json",
        "privacy_report.json",
        "trajectory.safetensors",
        "README.md",
        "report.html",
    }
    for path in folder.iterdir():
        content = path.read_bytes()
        assert key.hex().encode() not in content
        assert key not in content
    digest = digest_weights(folder)
    assert PrivacyReport.load(folder) == dataclasses.replace(
        trainer.privacy_report(), weights_digest=digest
    )


# ---- refusals


def test_a_folder_with_other_files_is_not_touched(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        build_hub_folder(run, target)
    assert names(target) == {"thesis.tex"}
    with pytest.raises(ValueError, match="own folder"):
        build_hub_folder(run, run)
    with pytest.raises(ValueError, match=r"holds .*not made"):
        build_hub_folder(run, target / "thesis.tex")


def without(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def sharded(shard: str) -> Callable[[Path], None]:
    index = json.dumps({"weight_map": {"w": shard}})
    return lambda run: (run / "model.safetensors.index.json").write_text(index) and None


def reported(**change: Any) -> Callable[[Path], None]:
    other = dataclasses.replace(report_of(make_plan()), **change)
    return lambda run: other.save(run) and None


def linked(run: Path) -> None:
    (run / "vocab.txt").symlink_to(run / "_private" / "sampler_key")


def cut_short(run: Path) -> None:
    path = run / "trajectory.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


OTHER = "not of the same run.*"
REFUSED: list[tuple[Callable[[Path], None], type[Exception], str]] = [
    (
        without("privacy_report.json"),
        FileNotFoundError,
        "report.json is missing: the run there ended",
    ),
    (without("trajectory.safetensors"), FileNotFoundError, "ended before its model was saved"),
    (without("model.safetensors"), FileNotFoundError, r"save_model.*\.bin weights are not shipped"),
    (sharded("model-00001-of-00002.safetensors"), FileNotFoundError, "model-00001-of-00002"),
    (sharded("_private/sampler_key"), ValueError, "_private/sampler_key"),
    (linked, ValueError, r"vocab\.txt is a link"),
    (cut_short, ValueError, r"trajectory\.safetensors"),
    (reported(steps=2), ValueError, OTHER + "steps: 2 / 3"),
    (reported(epsilon=0.01), ValueError, OTHER + "epsilon: 0.01 / "),
    (
        reported(noise_source="another"),
        ValueError,
        OTHER + "noise_source: another / os_entropy_exact",
    ),
    (reported(noise_multiplier=8.0), ValueError, OTHER + "noise_multiplier: 8.0 / 4.0"),
    (reported(sampling="full_batch"), ValueError, OTHER + "sampling: full_batch / poisson"),
    (reported(direction="sphere"), ValueError, OTHER + "direction: sphere / rademacher"),
    (reported(clip=1.0), ValueError, OTHER + "clip: 1.0 / 50.0"),
]
"""What is done to a finished run, and how shipping it is refused."""


@pytest.mark.parametrize(("damage", "error", "message"), REFUSED)
def test_what_is_not_a_whole_run_is_refused_before_the_network(
    damage: Callable[[Path], None],
    error: type[Exception],
    message: str,
    run: Path,
    api: type[FakeApi],
) -> None:
    damage(run)
    with pytest.raises(error, match=message):
        push(run, "me/x", token="t")
    assert not (run / "hub").exists() and api.calls == []


def test_not_private_needs_consent_and_the_card_says_so(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "out", private=False)
    with pytest.raises(ValueError, match=r"NOT PRIVATE.*--allow_not_private"):
        build_hub_folder(run, tmp_path / "shipped")
    folder = build_hub_folder(run, tmp_path / "shipped", allow_not_private=True)
    card = (folder / "README.md").read_text()
    assert "\n> NOT PRIVATE: the method mezo" in card
    assert "| private | NO |" in card
    assert "- differential-privacy" not in card


# ---- the card


def full_card(**settings: Any) -> huggingface_hub.ModelCard:
    plan = make_plan()
    given: dict[str, Any] = {
        "base_model": "someone/tiny-bert",
        "task": "text-classification",
        "dataset": "stanfordnlp/sst2",
        "metrics": {"zero_shot_accuracy": 0.718, "eval_accuracy": 0.801, "eval_runtime": 2.0},
        "recipe": RECIPE,
        "trajectory": trajectory_of(plan, STEPS),
        "repo_id": "me/tiny-private",
        **settings,
    }
    return model_card(report_of(plan), **given)


def test_card_metadata() -> None:
    data = full_card().data.to_dict()
    assert data["tags"] == ["differential-privacy", "dpzero", "zeroth-order"]
    assert data["base_model"] == "someone/tiny-bert"
    assert data["datasets"] == ["stanfordnlp/sst2"]
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-classification"
    assert data["metrics"] == ["accuracy"]
    (model,) = data["model-index"]
    (result,) = model["results"]
    assert result["metrics"] == [{"type": "accuracy", "value": 0.801}]


def test_the_hubs_own_parser_reads_the_card() -> None:
    """As the Hub does when a repository is pushed, but for its network check of names."""
    made = PrivateEvaluation(
        **{"rows": "wards.csv", "num_rows": 200, "metric": "accuracy", "step": STEPS},
        **{"epsilon": 0.5, "sensitivity": 1, "noise_source": "os_entropy_exact"},
        **{"trained_on": False, "released": 161},
    )
    data = huggingface_hub.ModelCard(full_card(evaluations=[made]).content).data
    assert (data.base_model, data.license) == ("someone/tiny-bert", None)
    assert "differential-privacy" in data.tags and data.model_name == "tiny-private"
    public, private = data.eval_results
    assert (public.dataset_name, public.metric_type) == ("stanfordnlp/sst2", "accuracy")
    assert (public.dataset_split, public.metric_value) == ("validation", 0.801)
    assert (private.dataset_name, private.metric_type) == ("wards.csv", "accuracy")
    assert (private.dataset_split, private.metric_value) == ("private", 161 / 200)
    for without in ({"metrics": {}}, {"task": None}, {"dataset": None}):
        bare = huggingface_hub.ModelCard(full_card(**without).content).data
        assert bare.eval_results is None and bare.base_model == "someone/tiny-bert"


def test_card_text_states_privacy_results_use_and_limits() -> None:
    report, text = report_of(make_plan()), full_card().text
    assert f"> {report.statement}" in text
    assert "| delta | 1e-05 |" in text
    assert "| neighbours | adding or removing one training example |" in text
    assert "| `zero_shot_accuracy` | 0.718 |" in text
    assert "| `eval_accuracy` | 0.801 |" in text
    assert "eval_runtime" not in text
    assert 'AutoModelForSequenceClassification.from_pretrained("me/tiny-private")' in text
    assert "hf-dpzero replay --base recipe.yaml" in text
    assert "hf-dpzero replay --base someone/tiny-bert" in full_card(recipe=None).text
    assert "ab" * 32 in text
    assert len(report.caveats) > 3
    for grade, caveat in zip(report.caveat_grades, report.caveats, strict=True):
        assert f"- *{grade}*: {caveat}\n" in text
    assert RECIPE.strip() in text


def test_card_of_an_adapter_loads_with_peft() -> None:
    card = full_card(peft=True)
    assert card.data.library_name == "peft"
    assert "AutoPeftModelForSequenceClassification.from_pretrained" in card.text
    assert "adapter on `someone/tiny-bert`" in card.text


def test_card_of_a_sentence_classifier_imports_its_class(run: Path, tmp_path: Path) -> None:
    config = {"architectures": ["SentenceClassifier"], "model_type": "sentence_classifier"}
    (run / "config.json").write_text(json.dumps(config))
    folder = build_hub_folder(run, tmp_path / "shipped")
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    lines = card.text.splitlines()
    assert "import hf_dpzero.recipes.sentence_classifier  # registers the model class" in lines
    assert "from transformers import AutoModelForSequenceClassification, AutoTokenizer" in lines


def test_card_shows_the_template_that_texts_must_be_in() -> None:
    assert (
        "```text\nReview: {sentence}\nSentiment:\n```"
        in full_card(template="Review: {sentence}\nSentiment:").text
    )
    assert "in this template" not in full_card().text


def test_card_shows_no_local_path(tmp_path: Path) -> None:
    card = full_card(base_model=str(tmp_path / "tiny-bert"), dataset=None, recipe=None)
    assert str(tmp_path) not in card.content
    assert card.data.base_model is None
    assert "--base tiny-bert" in card.text


def test_card_without_replay_offers_none() -> None:
    trajectory = trajectory_of(make_plan(), STEPS)
    trajectory.header["replayable"] = False
    assert "How to verify" not in full_card(trajectory=trajectory).text
    assert "How to verify" not in full_card(trajectory=None).text


def test_write_model_card_leaves_a_readme_in_the_run(run: Path) -> None:
    (run / "model.safetensors").unlink()  # `compare --discard_weights` removes them
    card = write_model_card(run)
    assert card == run / "README.md"
    assert report_of(make_plan()).statement in card.read_text()
    (run / "trajectory.ledger").unlink()  # with it the run would be resumed
    (run / "trajectory.safetensors").rename(run / "elsewhere")
    with pytest.raises(FileNotFoundError, match="report cannot be checked"):
        write_model_card(run)
    (run / "privacy_report.json").unlink()
    with pytest.raises(FileNotFoundError, match="hf-dpzero train"):
        write_model_card(run)


# ---- the push


class FakeApi:
    """Records what would be sent."""

    calls: list[tuple[str, Any]]
    public = False

    def __init__(self, token: str | None = None) -> None:
        self.calls.append(("token", token))

    def create_repo(self, repo_id: str, **settings: Any) -> Any:
        self.calls.append(("create_repo", {"repo_id": repo_id, **settings}))
        full = repo_id if "/" in repo_id else f"me/{repo_id}"

        class Url(str):
            repo_id = full

        return Url(f"https://hub.example/{full}")

    def repo_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=not self.public)

    def upload_folder(self, *, folder_path: Path, **settings: Any) -> None:
        self.calls.append(("upload_folder", {"files": names(Path(folder_path)), **settings}))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[FakeApi]:
    fake = type("Api", (FakeApi,), {"calls": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    return fake


def test_dry_run_leaves_the_exact_folder_and_needs_no_network(
    run: Path, api: type[FakeApi]
) -> None:
    assert push(run, "me/x", dry_run=True) == str(run / "hub")
    assert names(run / "hub") == SHIPPED
    assert api.calls == []


def test_push_creates_a_private_repository_and_uploads_the_folder(
    run: Path, api: type[FakeApi]
) -> None:
    assert push(run, "x", token="hf_t") == "https://hub.example/me/x"
    token, created, uploaded = api.calls
    assert token == ("token", "hf_t")
    assert created == ("create_repo", {"repo_id": "x", "private": True, "exist_ok": True})
    assert uploaded[1]["files"] == SHIPPED
    assert uploaded[1]["repo_id"] == "me/x"
    assert uploaded[1]["delete_patterns"] == ["*"]


def test_a_public_repository_is_not_taken_for_a_private_one(run: Path, api: type[FakeApi]) -> None:
    api.public = True
    with pytest.raises(PermissionError, match=r"me/x exists and is public"):
        push(run, "me/x", token="t")
    assert "upload_folder" not in dict(api.calls)
    push(run, "me/x", token="t", private=False)
    assert "upload_folder" in dict(api.calls)


@pytest.mark.parametrize("repo_id", ["", "a/b/c", "me/with space"])
def test_bad_repo_ids_are_refused_first(repo_id: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Repo id must"):
        push(tmp_path, repo_id, dry_run=True)


def test_no_token_and_offline_are_said_before_anything_is_built(
    run: Path, api: type[FakeApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PermissionError, match="hf auth login"):
        push(run, "me/x")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="--dry_run"):
        push(run, "me/x", token="t")
    assert not (run / "hub").exists()


def _forbidden() -> Exception:
    return HfHubHTTPError("403 Forbidden", response=MagicMock(headers={}))


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (_forbidden(), PermissionError, "The Hub refused 'me/x'"),
        (HTTPError("no route"), ConnectionError, "cannot be reached"),
    ],
)
def test_network_errors_say_what_to_do(
    error: Exception,
    raised: type[Exception],
    message: str,
    run: Path,
    api: type[FakeApi],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(api, "create_repo", fail)
    with pytest.raises(raised, match=message):
        push(run, "me/x", token="t")
    assert names(run / "hub") == SHIPPED
