"""Two processes with halves of the parameters (FSDP2) do what one does with all of them, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.commands import launch
from datasets import Dataset
from several_processes import in_processes, started
from tiny_runs import build, config, tiny_data, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, default_data_collator

from hf_dpzero import DPZeroTrainer
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.reporting.weights import read_weights

pytestmark = pytest.mark.slow
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2}, "ddp_backend": "gloo"}


def odd_model():
    """Rows of 18 elements, which begin no row of 32, and one of three rows for two processes."""
    return tiny_model(hidden_size=18, num_attention_heads=2, intermediate_size=33, num_labels=3)


def half_model():
    return tiny_model().bfloat16()


def adapter_model():
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(4)
        settings = peft.LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["query", "value"])
        return peft.get_peft_model(tiny_model(), settings)


def tied_model():
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def sentences(rows: int = 60) -> Dataset:
    """Texts of 3 to 14 tokens, whose microbatches are of several shapes."""
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(3, 15, (rows,), generator=generator).tolist()
    ids = [torch.randint(1, 50, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": ids, "attention_mask": [[1] * n for n in lengths]}
    )


def padded(rows):
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return default_data_collator(
        [{k: v + [fill[k]] * (14 - len(v)) for k, v in row.items()} for row in rows]
    )


FEW_KEY = "01" * 32  # batches of none, one and two rows
FEW = {
    "expected_batch_size": 2, "max_steps": 6, "microbatch_size": 1, "testing.sampler_key": FEW_KEY,
}  # fmt: skip
"""Batches of which a process, or both, may have nothing; other shapes would follow from B over W."""
RUNS = {
    "plain": (tiny_model, {"num_directions": 2, "weight_decay": 0.1, "max_steps": 5}),
    "odd": (odd_model, {"direction": "sphere", "learning_rate": 50.0, "max_steps": 4}),
    "half": (half_model, {"learning_rate": 0.1}),
    "autocast": (tiny_model, {"bf16": True}),
    "adapter": (adapter_model, {"direction": "gaussian", "learning_rate": 0.1, **FEW}),
    "tied": (tied_model, {"microbatch_size": 2, "update_rule": "momentum"}),
}


def made(folder: Path, name: str, processes: int, **others) -> DPZeroTrainer:
    """The trainer of a run, for one process or for this one of two."""
    model, settings = RUNS[name]
    usual = {
        "output_dir": str(folder / name), "eval_strategy": "steps", "eval_steps": 3,
        "save_strategy": "steps", "save_steps": 2, "max_steps": 3, "microbatch_size": 4,
    }  # fmt: skip
    settings = {**usual, **settings, **others, **(SHARDED if processes > 1 else {})}
    texts = name == "tied"
    return DPZeroTrainer(
        model=model(),
        args=config(folder, **settings),
        train_dataset=sentences() if texts else tiny_data(),
        eval_dataset=sentences(9) if texts else tiny_data(40, seed=2),
        data_collator=padded if texts else default_data_collator,
    )


ENDINGS = {1: ("others", "others-ledger"), 2: ("own", "others", "others-ledger")}
"""Processes -> what they go on from: whose files, with the checkpoint or with the ledger alone."""


class Interrupted(Exception):
    """What stops a run after its third step, one after its checkpoint."""


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise Interrupted


def train(folder: Path, processes: int, other: Path) -> None:
    """Runs everything; notes of each run on the first process. Then goes on from the other's files."""
    for name in RUNS:
        trainer = made(folder, name, processes)
        assert trainer.args.world_size == processes and trainer.shards == (processes > 1)
        if name == "plain":
            trainer.evaluate()  # cuts the model
        trainer.train()
        trainer.save_model()
        predicted = trainer.predict(trainer.eval_dataset).predictions
        trained = sum(t.numel() for t in trainer.space.tensors) / trainer.space.dimension
        note = {
            "digest": digest_model(trainer.model), "share": trained,
            "predicted": float(predicted.astype("float64").sum()),
        }  # fmt: skip
        if trainer.is_world_process_zero():
            (folder / name / "note.json").write_text(json.dumps(note))
    stopped = made(folder, "plain", processes, output_dir=str(folder / "stopped"))
    stopped.add_callback(Stop())
    with pytest.raises(Interrupted):
        stopped.train()
    wait(processes)
    (folder / "stopped.ready").touch()
    for begun, name in ((folder, "own"), (other, "others")):
        until(begun / "stopped.ready")
        for output in (folder / ending for ending in ENDINGS[processes] if ending.startswith(name)):
            if stopped.is_world_process_zero():
                shutil.copytree(begun / "stopped", output)
                if output.name != name:
                    shutil.rmtree(output / "checkpoint-2")
            wait(processes)
            resumed = made(folder, "plain", processes, output_dir=str(output))
            resumed.train(resume_from_checkpoint=True)
            resumed.save_model()


def wait(processes: int) -> None:
    if processes > 1:
        torch.distributed.barrier()


def until(ready: Path) -> None:
    """Returns once the file is there."""
    for _ in range(600):
        if ready.exists():
            return
        time.sleep(0.5)
    raise TimeoutError(str(ready))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """Number of processes -> the folder of what they trained. The two run while this one trains."""
    folders = {processes: tmp_path_factory.mktemp(f"of{processes}") for processes in (1, 2)}
    words, log = (str(folders[2]), str(folders[1])), folders[2] / "log"
    with started(__file__, *words, log=log) as two:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the two
        train(folders[1], processes=1, other=folders[2])
        torch.set_num_threads(threads)
        assert two.wait(timeout=900) == 0, log.read_text(errors="replace")[-3000:]
    return folders


def note(runs, processes: int, name: str) -> dict:
    return json.loads((runs[processes] / name / "note.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_releases_weights_and_files_are_those_of_one_process(runs, name):
    one, two = (runs[n] / name for n in (1, 2))
    ledgers = [Trajectory.load(run / "trajectory.ledger").releases for run in (one, two)]
    assert ledgers[0] == ledgers[1] and len(ledgers[0]) >= 3
    for part in (".", "checkpoint-2"):
        weights = [read_weights(run / part) for run in (one, two)]
        assert weights[0].keys() == weights[1].keys() and weights[0]
        assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    states = [
        json.loads((run / "checkpoint-2" / "dpzero_state.json").read_text()) for run in (one, two)
    ]
    for state in states:  # others tell of the processes, or write their metadata in any order
        state["files"] = {n: d for n, d in state["files"].items() if "model.safetensors" in n}
        del state["digest"], state["trajectory_digest"]  # of the header, which names the processes
    assert states[0] == states[1] and states[0]["files"]
    assert {p.name for p in one.iterdir()} == {p.name for p in two.iterdir()}


@pytest.mark.parametrize("name", RUNS)
def test_processes_hold_parts_and_predict_as_one(runs, name):
    """And their ledger is replayed on one device."""
    one, two = note(runs, 1, name), note(runs, 2, name)
    assert one["share"] == 1 and 0.45 < two["share"] < 0.6
    assert one["predicted"] == pytest.approx(two["predicted"], rel=1e-3)
    model = RUNS[name][0]()
    replay(model, Trajectory.load(runs[2] / name / "trajectory.ledger"))
    assert digest_model(model) == one["digest"] == two["digest"]


def test_a_stopped_run_goes_on_with_another_number_of_processes(runs):
    """From a checkpoint and from the base and the ledger, to the end of the run that nobody stopped."""
    ends = {(n, name): read_weights(runs[n] / name) for n in ENDINGS for name in ENDINGS[n]}
    expected = read_weights(runs[1] / "plain")
    for end in ends.values():
        assert all(torch.equal(end[name], expected[name]) for name in expected)
    short = read_weights(runs[1] / "stopped" / "checkpoint-2")
    assert not all(torch.equal(short[name], expected[name]) for name in expected)


def test_processes_without_rows_were_tried(runs):
    """What the batches of the run were: the sampler's key is the test's."""
    trainer = made(runs[1] / "again", "adapter", 1)
    batches = [trainer.plan.sampler.batch(t, bytes.fromhex(FEW_KEY)) for t in range(6)]
    assert {0, 1} <= {min(len(batch[rank::2]) for rank in (0, 1)) for batch in batches}
    assert any(len(batch) % 2 for batch in batches)


def test_a_grid_that_grew_did_so_on_both(runs):
    state = json.loads((runs[2] / "odd" / "checkpoint-4" / "dpzero_state.json").read_text())
    assert (
        max(entry["exponent"] for entry in state["space"]["grids"].values()) > 1
    )  # of weights below 1


def test_accelerate_launches_an_ordinary_script(tmp_path):
    """With the file as it is, but for the port: an own one, as others may test beside this."""
    file = Path(__file__).resolve().parents[2] / "configs" / "accelerate" / "fsdp2.yaml"
    words = [
        "--main_process_port",
        "0",
        "--config_file",
        str(file),
        __file__,
        str(tmp_path / "two"),
    ]
    log = tmp_path / "log"
    with started(launch.__file__, *words, log=log) as process:
        one = build(tmp_path / "one", max_steps=3)
        one.train()
        assert process.wait(timeout=900) == 0, log.read_text(errors="replace")[-3000:]
    expected, found = dict(one.model.named_parameters()), read_weights(tmp_path / "two")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def of_two(rank: int) -> None:
    train(Path(sys.argv[1]), processes=2, other=Path(sys.argv[2]))
    wait(2)


def an_ordinary_script() -> None:
    trainer = build(Path(sys.argv[1]), max_steps=3)
    trainer.train()
    trainer.save_model()
    assert trainer.shards and trainer.args.world_size == 2


if __name__ == "__main__" and "RANK" in os.environ:  # of `accelerate launch`
    an_ordinary_script()
elif __name__ == "__main__":
    in_processes(2, of_two)
