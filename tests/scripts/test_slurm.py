"""The job script of docs/how_to/slurm.md under a stand-in for Slurm that sends the signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from tiny_runs import KEY, same

from hf_dpzero.cli import main
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "configs" / "slurm" / "train.sbatch"
LIMIT_S = 120
RESUME = "--resume_from_checkpoint"
Job = subprocess.Popen
COMMANDS = {
    # Starts the tasks, passes SIGTERM on, and ends with the highest status, 128 + a signal's number.
    "srun": f"""#!{sys.executable}
import os, pathlib, signal, subprocess, sys
tasks = []
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
for rank in map(str, range(int(os.environ["SLURM_NTASKS"]))):
    place = {{**os.environ, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}}
    tasks.append(subprocess.Popen(sys.argv[1:], env=place))
pathlib.Path("step.part").write_text(str(os.getpid()))
os.replace("step.part", "step.pid")  # whole as soon as it is there
sys.exit(max(status if status >= 0 else 128 - status for status in [t.wait() for t in tasks]))
""",
    "scontrol": """#!/bin/sh
case "$1" in
  show) echo 127.0.0.1 ;;
  requeue) echo "$2" >> requeued ;;
esac
""",
    "hf-dpzero": f'#!/bin/sh\nexec {sys.executable} -m hf_dpzero.cli.main "$@"\n',
}


def write_recipe(folder: Path, checkpoint: Path, **settings: Any) -> Path:
    """A recipe of 150 steps of a tiny model, with test keys."""
    texts = (("it was good", 1), ("great film", 1), ("it was bad", 0), ("awful film was", 0))
    lines = [json.dumps({"sentence": text, "label": label}) for text, label in texts]
    files = {"train_file": folder / "rows.jsonl", "validation_file": folder / "public.jsonl"}
    for path, copies in zip(files.values(), (20, 6), strict=True):
        path.write_text("\n".join(lines * copies), encoding="utf-8")
    values: dict[str, Any] = {
        "model_name_or_path": str(checkpoint), "task": "sst2", "noise_multiplier": 1.0, "clip": 5.0,
        "target_delta": 1e-3, "expected_batch_size": 8, "microbatch_size": 4, "num_directions": 2,
        "max_steps": 150, "learning_rate": 1e-3, "save_strategy": "no", "eval_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "report_to": "none",
        "testing": {"direction_key": 7, "sampler_key": KEY, "insecure_noise_seed": 3},
        **{name: str(path) for name, path in files.items()},
    }  # fmt: skip
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**values, **settings}), encoding="utf-8")
    return path


class Scheduler:
    """Starts the job script as Slurm does, in a folder of its own."""

    def __init__(self, folder: Path, recipe: Path) -> None:
        self.folder, self.recipe, self.output = folder, recipe, folder / "out"
        (folder / "bin").mkdir()
        for name, text in COMMANDS.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def start(self, *words: str, tasks: int = 1) -> Job:
        (self.folder / "step.pid").unlink(missing_ok=True)
        place = {
            "SLURM_JOB_ID": "4711", "SLURM_NTASKS": str(tasks), "SLURM_JOB_NODELIST": "node[1-2]",
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["bash", str(SCRIPT), str(self.recipe), str(self.output), *words]
        log = (self.folder / "log").open("a")
        return Job(
            command, cwd=self.folder, env={**os.environ, **place}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip

    def step(self) -> int:
        return int((self.folder / "step.pid").read_text())

    def requeued(self) -> int:
        path = self.folder / "requeued"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def paid(self) -> int:
        path = self.output / LEDGER_NAME
        return Trajectory.load(path).next_step if path.exists() else 0

    def stopped(self, job: Job, when: Callable[[], bool], tell: Callable[[Job], None]) -> int:
        """Waits for `when`, sends what `tell` sends, and returns the status of the script."""
        try:
            until = time.monotonic() + LIMIT_S
            while not when():
                assert job.poll() is None and time.monotonic() < until, self.log()
                time.sleep(0.01)
            tell(job)
            return job.wait(timeout=LIMIT_S)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]


@pytest.mark.slow
def test_a_job_that_is_stopped_twice_gives_the_weights_of_one_that_is_not(
    tmp_path: Path, bert_checkpoint: Path
) -> None:
    """Before the time limit: by SIGTERM to the step, then by USR1 to the script."""
    slurm = Scheduler(tmp_path, write_recipe(tmp_path, bert_checkpoint))
    tells = (
        lambda job: os.kill(slurm.step(), signal.SIGTERM),
        lambda job: os.kill(job.pid, signal.SIGUSR1),
    )
    for count, tell in enumerate(tells, start=1):
        before, job = slurm.paid(), slurm.start()
        status = slurm.stopped(job, lambda at=before + 2: slurm.paid() > at, tell)
        assert (status, slurm.requeued()) == (143, count), slurm.log()
    assert slurm.paid() < 150
    assert slurm.start().wait(timeout=LIMIT_S) == 0, slurm.log()
    assert slurm.requeued() == 2 and slurm.paid() == 150
    assert main.main(["train", str(slurm.recipe), "--output_dir", str(tmp_path / "alone")]) == 0
    stopped, alone = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "alone"))
    assert same(stopped, alone)


def test_tasks_know_each_other(tmp_path: Path) -> None:
    slurm = Scheduler(tmp_path, tmp_path / "recipe.yaml")
    told = "$RANK of $WORLD_SIZE, $LOCAL_RANK here, meet at $MASTER_ADDR:$MASTER_PORT"
    (tmp_path / "bin" / "hf-dpzero").write_text(f'#!/bin/sh\necho "{told}, $@" > task$RANK\n')
    assert slurm.start("--ddp_backend", "gloo", tasks=2).wait(timeout=LIMIT_S) == 0, slurm.log()
    words = f"train {slurm.recipe} --output_dir {slurm.output} --ddp_backend gloo\n"
    for rank in ("0", "1"):
        said = (tmp_path / f"task{rank}").read_text()
        assert said == f"{rank} of 2, {rank} here, meet at 127.0.0.1:24711, {words}"


def test_what_is_not_requeued(tmp_path: Path) -> None:
    """A start without a step, which would go on for ever; an error; a job that is cancelled."""
    slurm = Scheduler(tmp_path, tmp_path / "recipe.yaml")
    slurm.output.mkdir()
    (slurm.output / LEDGER_NAME).write_bytes(b"paid")
    trains = slurm.folder / "bin" / "hf-dpzero"
    trains.write_text('#!/bin/sh\necho "$@" > words\nexit 143\n')
    assert slurm.start().wait(timeout=LIMIT_S) == 143
    assert slurm.requeued() == 0 and "not requeued" in slurm.log()
    words = (tmp_path / "words").read_text().split()
    assert words == ["train", str(slurm.recipe), "--output_dir", str(slurm.output), RESUME]
    trains.write_text("#!/bin/sh\nexit 1\n")
    assert slurm.start().wait(timeout=LIMIT_S) == 1
    trains.write_text(f'#!/bin/sh\necho more >> "{slurm.output / LEDGER_NAME}"\nexec sleep 60\n')
    job = slurm.start()
    ended = slurm.stopped(job, (tmp_path / "step.pid").exists, lambda job: kill_all(job, slurm))
    assert ended == -signal.SIGTERM and slurm.requeued() == 0


def kill_all(job: Job, slurm: Scheduler) -> None:
    """As scancel does: the script and its step get SIGTERM."""
    os.kill(job.pid, signal.SIGTERM)
    os.kill(slurm.step(), signal.SIGTERM)
