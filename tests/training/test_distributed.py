"""Two processes release what one releases: same batches, exact integer sums, one draw of noise."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from tiny_runs import build, tiny_data, tiny_model

_NAMES = ["few" if row % 5 == 0 else "many" for row in range(120)]
_GROUPS = {
    "data": tiny_data().add_column("where", _NAMES),
    "group_column": "where",
    "group_shares": {"few": 0.2, "many": 0.8},
    "microbatch_size": 1,
}
_FIXED = {**_GROUPS, "sampling": "fixed_batches"}
RUNS = {
    "dpzero": {"microbatch_size": 1, "num_directions": 2},
    "secret": {"microbatch_size": 1, "insecure_noise_seed": None},
    "groups": _GROUPS,
    "groups-prefix": {**_FIXED, "group_weights": "prefix_sum"},
    "groups-vertex": {**_FIXED, "group_weights": "vertex", "group_draws": 2},
    "dp-sgd": {"microbatch_size": 4, "method": "dp-sgd", "clip": 0.5, "learning_rate": 0.1},
}


def train(folder: Path, processes: int) -> None:
    """Leaves the flat weights of every run, one file a process."""
    shared = {"max_steps": 3, "eval_strategy": "no"}
    shared["ddp_backend"] = "gloo" if processes > 1 else None
    for name, settings in RUNS.items():
        trainer = build(folder / name, **shared, **settings)
        trainer.train()
        assert trainer.args.world_size == processes
        flat = torch.cat([p.detach().view(-1) for p in trainer.model.parameters()])
        torch.save(flat, folder / f"{name}.rank{trainer.args.process_index}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """Number of processes -> the folder of what they trained. The two run while this one trains."""
    folders = {processes: tmp_path_factory.mktemp(f"of{processes}") for processes in (1, 2)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = subprocess.Popen(
        [sys.executable, __file__, str(folders[2])],
        env={
            **os.environ, **place, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stdout=subprocess.DEVNULL,
        stderr=(folders[2] / "errors").open("w"),
        start_new_session=True,
    )  # fmt: skip
    try:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the two
        train(folders[1], processes=1)
        torch.set_num_threads(threads)
        status = started.wait(timeout=300)
        assert status == 0, (folders[2] / "errors").read_text()[-3000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    return folders


def trained(runs: dict[int, Path], name: str) -> list[torch.Tensor]:
    """The weights of the run of one process, and of each of two."""
    return [torch.load(runs[n] / f"{name}.rank{r}") for n, r in ((1, 0), (2, 0), (2, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpzero", "groups", "groups-prefix", "groups-vertex"])
def test_one_process_equals_two_bit_for_bit(runs, name):
    one, *both = trained(runs, name)
    assert torch.equal(one, both[0]) and torch.equal(*both)
    ledgers = [(runs[n] / name / "trajectory.ledger").read_bytes() for n in (1, 2)]
    assert ledgers[0].split(b"\n", 1)[1] == ledgers[1].split(b"\n", 1)[1]


@pytest.mark.slow
def test_processes_agree_under_secret_noise(runs):
    one, *both = trained(runs, "secret")
    assert torch.equal(*both) and not torch.equal(one, both[0])


@pytest.mark.slow
def test_gradients_and_noise_of_two_processes_add_up_to_those_of_one(runs):
    """The clipped sums and one draw of noise: equal up to the order of float32 additions."""
    one, *both = trained(runs, "dp-sgd")
    assert torch.equal(*both)
    torch.testing.assert_close(one, both[0], atol=1e-6, rtol=1e-5)
    base = torch.cat([p.detach().view(-1) for p in tiny_model().parameters()])
    assert float((one - base).abs().max()) > 1e-3


if __name__ == "__main__":
    second = os.fork()  # before any thread or model: both have imported all that takes seconds
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if second else "1"
    try:
        train(Path(sys.argv[1]), processes=2)
        torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    failed = second and os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
    os._exit(1 if failed else 0)  # some builds' gloo threads abort an ordinary interpreter exit
