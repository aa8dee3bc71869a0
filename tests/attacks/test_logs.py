"""Attack: read private rows off what a run logs and ships beside its weights.

The guarantee is for weights, released numbers and what is computed from them. Logs with times stay on
the training machine; they count no private rows, and nothing that is shipped says how long a step took.
"""

from __future__ import annotations

import json
import logging
import warnings

import datasets
import pytest
from tiny_language_models import opt_tokenizer
from tiny_runs import build

from hf_dpzero.reporting import hub
from hf_dpzero.reporting.public import public_results
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.description import DataArguments

SHORT, LONG = "it rained", "it rained " * 60
RELEASED = {"released_value", "released_signal"}
PLAIN = {"task": "boolq", "prompt": "causal_lm", "max_seq_length": 48}


def task_of(folder, passages, **settings):
    folder.mkdir()
    sources = {"train": passages, "validation": [SHORT, SHORT + " today"]}
    for split, texts in sources.items():
        rows = [{"passage": t, "question": "did it", "label": i % 2} for i, t in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {f"{split}_file": str(folder / f"{split}.jsonl") for split in sources}
    return build_task(DataArguments(**files, **{**PLAIN, **settings}))


def test_two_training_sets_that_differ_in_a_row_leave_the_same_log(tmp_path, monkeypatch, caplog):
    """It said how many training prompts were cut: exactly, and for one row more or less."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    said = {}
    for name, last in (("short", SHORT), ("long", LONG)):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="hf_dpzero"):
            task_of(tmp_path / name, [SHORT, SHORT, LONG, last]).tokenize(opt_tokenizer())
        said[name] = [r.getMessage() for r in caplog.records if r.name.startswith("hf_dpzero")]
    assert any(
        "train prompts of more than max_seq_length=48 tokens are cut" in s for s in said["long"]
    )
    assert said["short"] == said["long"]


def test_small_classes_and_empty_cells_are_not_counted(tmp_path):
    texts = [SHORT] * 5
    few = {"prompt": None, "task": "boolq", "num_examples_per_class": 3}
    with pytest.raises(ValueError, match="has fewer training rows") as refusal:
        task_of(tmp_path / "few", texts, **few)
    assert "has 2" not in str(refusal.value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task_of(tmp_path / "all", texts, **few, allow_fewer_per_class=True)
    assert any("has fewer training rows" in str(w.message) for w in caught)
    assert not any("has 2" in str(w.message) for w in caught)
    with pytest.raises(ValueError, match="is empty in some rows") as refusal:
        task_of(tmp_path / "empty", [SHORT, None, None])
    assert "2" not in str(refusal.value)


def test_what_is_shipped_holds_no_times(tmp_path, monkeypatch):
    trainer = build(
        tmp_path,
        testing={"insecure_noise_seed": None, "sampler_key": None},
        logging_steps=1,
    )
    output = trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {**output.metrics, "seconds_per_step": 0.5})
    trainer.save_metrics("eval", trainer.evaluate())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.out.tfevents.1700000000.machine").write_text("wall time")
    (tmp_path / "train.log").write_text("1700000000.1 step 1")
    kept = json.loads((tmp_path / "all_results.json").read_text())
    timed = [n for n in kept if n.endswith(("runtime", "per_second", "per_step"))]
    assert {"train_runtime", "eval_runtime", "eval_samples_per_second"} <= set(timed)

    folder = hub.build_hub_folder(tmp_path, tmp_path / "hub")
    shipped = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert {"privacy_report.json", "model.safetensors"} <= shipped
    assert not shipped & {
        "trainer_state.json",
        "train_results.json",
        "training_args.bin",
        "train.log",
    }
    assert not any("runs" in name or "checkpoint" in name for name in shipped)
    results = json.loads((folder / "all_results.json").read_text())
    assert "eval_loss" in results
    assert not set(results) & set(timed)
    for path in folder.iterdir():
        text = path.read_bytes()
        for name in timed:
            assert name.encode() not in text, (path, name)


@pytest.mark.parametrize("counted", ["no", "all", "non_padding"])
def test_checkpoints_tell_neither_tokens_nor_how_long_a_step_took(tmp_path, counted):
    counts = {"include_num_input_tokens_seen": counted}
    build(tmp_path, logging_steps=1, save_strategy="steps", save_steps=6, **counts).train()
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert len(state["log_history"]) == 6
    for entry in state["log_history"]:
        assert entry.pop("num_input_tokens_seen", 0) == 0
        assert set(entry) == {"epoch", "epsilon", "learning_rate", "step"} | RELEASED
    assert (state["num_input_tokens_seen"], state["total_flos"]) == (0, 0)


def test_public_results_have_neither_memory_nor_times():
    """Memory: results of a plain Trainer; private runs refuse `skip_memory_metrics=False`."""
    kinds = ("cpu_alloc_delta", "cpu_peaked_delta", "gpu_alloc_delta")
    measured = {f"{split}_mem_{kind}": 7 for kind in kinds for split in ("eval", "test", "eval_b")}
    times = ("eval_runtime", "eval_steps_per_second", "test_jit_compilation_time", "train_runtime")
    measured |= dict.fromkeys(times, 1.0)
    kept = {"eval_memory_f1": 0.5, "eval_f1": 0.5}
    assert public_results({**measured, **kept}) == kept


@pytest.mark.parametrize(
    "said",
    [
        "Logs, progress bars and monitoring files tell when a step ended",
        "they stay on the training machine",
        "not derived again for the neighbouring data set",
        "The privacy unit is a row as it was given to the trainer",
    ],
)
def test_the_report_says_what_the_guarantee_is_not_of(tmp_path, said):
    """Logs are outside of it; the constants of the claim and its unit are named."""
    assert said in " ".join(build(tmp_path).privacy_report().caveats)
