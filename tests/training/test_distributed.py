"""Two processes release what one releases: same batches, exact integer sums, one draw of noise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_model

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from tiny_runs import build

folder, both = Path(sys.argv[1]), "RANK" in os.environ
shared = {{"max_steps": 3, "eval_strategy": "no", "ddp_backend": "gloo" if both else None}}
runs = {{
    "dpzero": {{"microbatch_size": 1, "num_directions": 2}},
    "secret": {{"microbatch_size": 1, "insecure_noise_seed": None}},
    "dp-sgd": {{"microbatch_size": 4, "method": "dp-sgd", "clip": 0.5, "learning_rate": 0.1}},
}}
for name, settings in runs.items():
    trainer = build(folder / name, **shared, **settings)
    trainer.train()
    assert trainer.args.world_size == (2 if both else 1)
    flat = torch.cat([p.detach().view(-1) for p in trainer.model.parameters()])
    torch.save(flat, folder / f"{{name}}.rank{{trainer.args.process_index}}")
if both:
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # some builds' gloo threads abort an ordinary interpreter exit
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """Number of processes -> the folder of what they trained."""
    folders = {}
    for processes in (1, 2):
        folder = folders[processes] = tmp_path_factory.mktemp(f"of{processes}")
        script = folder / "run.py"
        script.write_text(SCRIPT.format(tests=str(Path(__file__).resolve().parents[1])))
        command = [sys.executable, str(script), str(folder)]
        if processes > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, f"--nproc_per_node={processes}", *command[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return folders


def trained(runs: dict[int, Path], name: str) -> list[torch.Tensor]:
    """The weights of the run of one process, and of each of two."""
    return [torch.load(runs[n] / f"{name}.rank{r}") for n, r in ((1, 0), (2, 0), (2, 1))]


@pytest.mark.slow
def test_one_process_equals_two_bit_for_bit(runs):
    one, *both = trained(runs, "dpzero")
    assert torch.equal(one, both[0]) and torch.equal(*both)
    ledgers = [(runs[n] / "dpzero" / "trajectory.ledger").read_bytes() for n in (1, 2)]
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
