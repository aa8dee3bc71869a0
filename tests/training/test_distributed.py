"""Two processes release what one releases: same batches, exact integer sums, one draw of noise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_trainer import build
from hf_dpzero.ledger.digests import digest_model

trainer = build(Path(sys.argv[1]), microbatch_size=1, num_directions=2, max_steps=3,
                eval_strategy="no", ddp_backend="gloo" if "RANK" in os.environ else None,
                insecure_noise_seed={seed})
trainer.train()
line = f"{{trainer.args.world_size}} {{digest_model(trainer.model)}}"
Path(f"{{sys.argv[1]}}.rank{{trainer.args.process_index}}").write_text(line)
if trainer.args.world_size > 1:
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # some builds' gloo threads abort an ordinary interpreter exit
"""


def run(tmp_path: Path, processes: int, seed: int | None = 3) -> list[list[str]]:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).resolve().parents[1]), seed=seed))
    command = [sys.executable, str(script), str(tmp_path / f"out{processes}")]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc_per_node={processes}", *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = sorted(tmp_path.glob(f"out{processes}.rank*"))
    assert len(files) == processes
    return [file.read_text().split() for file in files]


@pytest.mark.slow
def test_one_process_equals_two_bit_for_bit(tmp_path):
    single = run(tmp_path, 1)
    double = run(tmp_path, 2)
    assert [world for world, _ in single] == ["1"]
    assert [world for world, _ in double] == ["2", "2"]
    assert {digest for _, digest in single + double} == {single[0][1]}
    ledgers = [(tmp_path / f"out{n}" / "trajectory.ledger").read_bytes() for n in (1, 2)]
    assert ledgers[0].split(b"\n", 1)[1] == ledgers[1].split(b"\n", 1)[1]


@pytest.mark.slow
def test_processes_agree_under_secret_noise(tmp_path):
    digests = {digest for _, digest in run(tmp_path, 2, seed=None)}
    assert len(digests) == 1


GRADIENTS = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from test_trainer import build

trainer = build(Path(sys.argv[1]), method="dp-sgd", microbatch_size=4, max_steps=3, clip=0.5,
                learning_rate=0.1, eval_strategy="no",
                ddp_backend="gloo" if "RANK" in os.environ else None)
trainer.train()
flat = torch.cat([p.detach().view(-1) for p in trainer.model.parameters()])
torch.save(flat, f"{{sys.argv[1]}}.weights{{trainer.args.process_index}}")
Path(f"{{sys.argv[1]}}.rank{{trainer.args.process_index}}").write_text(
    f"{{trainer.args.world_size}} {{len(trainer.trajectory.releases)}}")
if trainer.args.world_size > 1:
    trainer.accelerator.wait_for_everyone()
    os._exit(0)
"""


@pytest.mark.slow
def test_gradients_and_noise_of_two_processes_add_up_to_those_of_one(tmp_path, monkeypatch):
    """The clipped sums and one draw of noise: equal up to the order of float32 additions."""
    import torch

    monkeypatch.setitem(globals(), "SCRIPT", GRADIENTS)
    assert run(tmp_path, 1) == [["1", "3"]]
    assert run(tmp_path, 2) == [["2", "3"], ["2", "3"]]
    one, *both = (torch.load(tmp_path / f"out{n}.weights{r}") for n, r in ((1, 0), (2, 0), (2, 1)))
    assert torch.equal(*both)
    torch.testing.assert_close(one, both[0], atol=1e-6, rtol=1e-5)
    import test_trainer

    base = torch.cat([p.detach().view(-1) for p in test_trainer.tiny_model().parameters()])
    assert float((one - base).abs().max()) > 1e-3
