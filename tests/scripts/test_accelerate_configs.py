"""Every file of configs/accelerate is read by accelerate's own loader and launched on a CPU (gloo).

A launch runs the script at the end of this file. On a CPU it cannot use a file's GPUs, so processes are
fewer and the device is given; all else is the file's. A new file is covered as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config import load_config_from_file

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "accelerate"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
LIMIT_S = 900


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def launch(name: str, folder: Path, *words: str, kind: str, machine: int) -> subprocess.Popen:
    """`accelerate launch` of this file's script as on one machine, in a session of its own."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", FOLDER / name]
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A process has one thread: gloo's and torch's would crowd each other out.
    place = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in dropped}
    return subprocess.Popen(
        [*map(str, command), *words, __file__, kind, str(folder)],
        env={**inherited, **place},
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"errors{machine}").open("w"),
        start_new_session=True,
    )


def finish(*started: subprocess.Popen) -> list[int]:
    """Exit statuses; nothing is left running."""
    try:
        return [process.wait(timeout=LIMIT_S) for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def said(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def errors(folder: Path) -> str:
    return "".join(path.read_text()[-3000:] for path in sorted(folder.glob("errors*")))


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_there_is_a_file_for_each_kind_of_machine():
    assert {"cpu.yaml", "one-gpu.yaml", "eight-gpus.yaml", "two-nodes.yaml"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_it_and_it_says_what_it_runs(name):
    """The loader refuses unknown keys; the header has the command, with this very file."""
    loaded, given = load_config_from_file(str(FOLDER / name)), read(name)
    assert loaded.num_processes == given["num_processes"] >= 1
    assert loaded.mixed_precision == "no", "the trainer's own bf16 and fp16 say what is rounded"
    assert loaded.distributed_type in ("NO", "MULTI_GPU", "FSDP")
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert f"accelerate launch --config_file configs/accelerate/{name}" in text
    assert (given["num_machines"] == 1) == ("main_process_ip" not in given)


def test_a_misspelt_key_is_refused(tmp_path):
    """The check above can fail."""
    (tmp_path / "bad.yaml").write_text("distributed_type: 'NO'\nnum_proceses: 2\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(str(tmp_path / "bad.yaml"))


def launched(name: str, folder: Path, kind: str = "sum") -> list[dict[str, Any]]:
    """What the processes of a file said: two on each of its machines, one if it starts one alone."""
    config = read(name)
    machines, alone = config["num_machines"], config["num_processes"] == 1
    words = ["--num_processes", "1" if alone else str(2 * machines)]
    if machines > 1:
        words += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    ranks = [["--machine_rank", str(rank)] if machines > 1 else [] for rank in range(machines)]
    started = [
        launch(name, folder, *words, *rank, kind=kind, machine=number)
        for number, rank in enumerate(ranks)
    ]
    statuses = finish(*started)
    assert statuses == [0] * machines, errors(folder)
    return said(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_it_launches(name, tmp_path):
    """Each process knows the others: their ranks, from 1 up, are summed over gloo."""
    config, heard = read(name), launched(name, tmp_path)
    count = 1 if config["num_processes"] == 1 else 2 * config["num_machines"]
    assert len(heard) == count and all(h["processes"] == count for h in heard)
    assert all(h["sum"] == count * (count + 1) / 2 for h in heard)
    assert sorted(h["local"] for h in heard) == sorted([0, 1] * config["num_machines"])[:count]
    assert all(h["fsdp"] == (config["distributed_type"] == "FSDP") for h in heard)


@pytest.mark.slow
def test_the_trainer_runs_on_what_the_cpu_file_launches(tmp_path):
    heard = launched("cpu.yaml", tmp_path, kind="train")
    assert [h["processes"] for h in heard] == [2, 2]
    assert heard[0]["digest"] == heard[1]["digest"] != heard[0]["before"]


# ---------------------------------------------------------------- what is launched


def tell(folder: Path, **facts: Any) -> None:
    rank = os.environ.get("RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps(facts))


def add_ranks(folder: Path) -> None:
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=True)
    total = torch.tensor(float(state.process_index + 1))
    if state.num_processes > 1:
        torch.distributed.all_reduce(total)
        torch.distributed.barrier()
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    tell(folder, sum=float(total), processes=state.num_processes, local=local, fsdp=fsdp)


def train_tiny(folder: Path) -> None:
    import torch
    from tiny_runs import build

    from hf_dpzero.ledger.digests import digest_tensors

    trainer = build(folder / "run", max_steps=2, eval_strategy="no", ddp_backend="gloo")
    before = digest_tensors(trainer.model.named_parameters())
    trainer.train()
    after = digest_tensors(trainer.model.named_parameters())
    tell(folder, processes=trainer.args.world_size, digest=after, before=before)
    torch.distributed.barrier()


if __name__ == "__main__":
    {"sum": add_ranks, "train": train_tiny}[sys.argv[1]](Path(sys.argv[2]))
    os._exit(0)  # some builds' gloo threads abort an ordinary interpreter exit
