"""A report speaks of certain weights, and its words of its numbers: neither can be exchanged."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from attacked_runs import SAVED, finished, loaded, lora, not_shipped, plain_training
from safetensors.torch import load_file, save_file
from tiny_runs import tiny_model

from hf_dpzero.privacy.selection import composition_entry
from hf_dpzero.reporting.hub import build_hub_folder, write_model_card
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.provenance import Origin, earlier_runs
from hf_dpzero.reporting.weights import digest_weights

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {**SAVED, "save_steps": 1, "max_steps": 2}
OTHER_WEIGHTS = "not those that privacy_report.json was written for"


def runs_in(*names: Any) -> list[dict[str, Any]]:
    """The earlier runs of a base that was loaded from these folders or Hub ids."""
    return earlier_runs([Origin.of(str(name), None) for name in names])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    finished(tmp_path / "out", **SHORT)
    return tmp_path / "out"


def test_weights_of_a_plain_trainer_in_the_same_folder_are_not_shipped(
    run: Path, tmp_path: Path
) -> None:
    plain_training(loaded(run), run).save_model()
    not_shipped(run, tmp_path / "hub", OTHER_WEIGHTS)
    (entry,) = runs_in(run)  # and as a base they count for what they are
    assert not entry["private"] and "not of what lies beside it" in entry["statement"]


def test_a_model_that_was_trained_on_is_not_saved_under_the_report(tmp_path: Path) -> None:
    """The DPZero trainer is asked to save after a plain one has changed its model."""
    trainer = finished(tmp_path / "out", max_steps=2)
    before = digest_weights(tmp_path / "out")
    plain_training(trainer.model, tmp_path / "plain")
    for save in (trainer.save_model, trainer.push_to_hub):
        with pytest.raises(ValueError, match="changed after training"):
            save()
    assert digest_weights(tmp_path / "out") == before
    trainer.args.output_dir = str(tmp_path / "again")
    with pytest.raises(ValueError, match="trained on the private data already"):
        trainer.train()
    with pytest.raises(ValueError, match="changed after training"):
        trainer.save_model(str(tmp_path / "again"))


@pytest.mark.parametrize("change", ["one_bit", "a_name", "a_shape", "a_dtype", "one_more"])
def test_any_change_of_the_weights_is_seen(run: Path, tmp_path: Path, change: str) -> None:
    path, name = run / "model.safetensors", "classifier.weight"
    tensors = load_file(path)
    if change == "one_bit":
        tensors[name].view(torch.int32)[0, 0] ^= 1
    elif change == "a_name":
        tensors["classifier.weights"] = tensors.pop(name)
    elif change == "a_shape":
        tensors[name] = tensors[name].reshape(-1)
    elif change == "a_dtype":
        tensors[name] = tensors[name].view(torch.int32)
    else:
        tensors["more"] = torch.zeros(1)
    save_file(tensors, path, metadata={"format": "pt"})
    not_shipped(run, tmp_path / "hub", OTHER_WEIGHTS)


def test_shards_of_another_model_do_not_slip_in(run: Path, tmp_path: Path) -> None:
    save_file({"classifier.weight": torch.ones(2, 16)}, run / "model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match="classifier.weight in two files"):
        build_hub_folder(run, tmp_path / "hub")
    save_file({"other": torch.ones(2)}, run / "model-00001-of-00001.safetensors")
    not_shipped(run, tmp_path / "hub", OTHER_WEIGHTS)


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_every_folder_that_a_run_saves_names_its_own_weights(tmp_path: Path, kind: str) -> None:
    """The run's folder, another one, and checkpoints; whole models, in shards too, and adapters."""
    model = tiny_model() if kind == "model" else lora(tiny_model())
    trainer = finished(tmp_path / "out", model, **SHORT)
    trainer.save_model(str(tmp_path / "elsewhere"))
    folders = [tmp_path / "out", tmp_path / "elsewhere", *(tmp_path / "out").glob("checkpoint-*")]
    assert len(folders) == 4
    digests = []
    for number, folder in enumerate(folders):
        shipped = build_hub_folder(folder, tmp_path / "hub" / str(number))
        digests.append(PrivacyReport.load(shipped).weights_digest)
        assert digests[-1] == digest_weights(shipped) is not None
    assert digests[0] == digests[1]
    if kind == "model":
        assert len(set(digests)) == 2  # the last checkpoint holds what the run ends in
        trainer.model.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
        assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
        assert digest_weights(tmp_path / "sharded") == digests[0]


def edited(run: Path, **changes: Any) -> dict[str, Any]:
    """The report as it was; on disk with changes."""
    path = run / "privacy_report.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, **changes}))
    return report


def test_an_edited_statement_is_neither_shipped_nor_headlined(run: Path, tmp_path: Path) -> None:
    claim = "The weights of this run are (0.01, 1e-09)-differentially private."
    true = edited(run, statement=claim, caveats=["None."])
    folder = build_hub_folder(run, tmp_path / "hub")
    for text in (folder / "README.md", folder / "privacy_report.json"):
        assert claim not in text.read_text() and true["statement"] in text.read_text()
        assert all(caveat in text.read_text() for caveat in true["caveats"])
    assert write_model_card(run).read_text() == (folder / "README.md").read_text()
    assert PrivacyReport.load(run).statement == true["statement"]
    edited(run, statement=claim)
    (entry,) = runs_in(run)
    assert entry["statement"] == true["statement"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.01}, "epsilon: 0.01"),
        ({"delta": 1e-2}, "epsilon"),
        ({"num_examples": 10**6}, "num_examples"),
        ({"base_weights": "equal_to_named"}, "base_weights"),
        ({"earlier_runs": [{"folder": "b", "private": True, "statement": "x"}]}, "earlier_runs"),
        ({"target_epsilon": 0.01}, "target_epsilon: 0.01 / None"),
        ({"target_delta": 1e-12}, "target_delta: 1e-12 / 0.001"),
        ({"tuning": "public"}, "tuning: public / none"),
        ({"tuning": {"composition": {"runs": 1}}}, "tuning"),
        ({"weights_digest": None}, "does not say which weights"),
        ({"weights_digest": "ab" * 32}, "not those that"),
    ],
)
def test_an_edited_number_is_refused(
    run: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    edited(run, **change)
    not_shipped(run, tmp_path / "hub", message)


def test_what_a_run_said_about_tuning_stays_said(tmp_path: Path) -> None:
    finished(tmp_path / "out", tuning="not_accounted", max_steps=2)
    for tuning in ("none", "public"):
        report = edited(tmp_path / "out", tuning=tuning)
        with pytest.raises(ValueError, match=f"tuning: {tuning} / not_accounted"):
            build_hub_folder(tmp_path / "out", tmp_path / "hub")
        (tmp_path / "out" / "privacy_report.json").write_text(json.dumps(report))
    shipped = build_hub_folder(tmp_path / "out", tmp_path / "hub")
    assert "NOT ACCOUNTED" in PrivacyReport.load(shipped).statement


def test_a_sweeps_entry_replaces_only_what_its_trials_say(tmp_path: Path) -> None:
    """Trials of a sweep run as "not_accounted"; its total may not be above the target it states."""
    for tuning in ("not_accounted", "public"):
        out = tmp_path / tuning
        trainer = finished(out, tuning=tuning, max_steps=2)
        plan, report = trainer.plan, PrivacyReport.load(out)
        swept = report.with_tuning(composition_entry([plan, plan], ["clip"]), plan, {})
        swept.save(out)
        if tuning == "public":
            with pytest.raises(ValueError, match="are not of the same run.*tuning"):
                build_hub_folder(out, tmp_path / "hub")
            continue
        build_hub_folder(out, tmp_path / "hub")
        for target, fits in ((swept.epsilon * 1.1, True), (0.01, False)):
            edited(out, target_epsilon=target)
            with nullcontext() if fits else pytest.raises(ValueError, match="target_epsilon: 0.01"):
                build_hub_folder(out, tmp_path / "hub")
