"""What a run shows: one banner, one bar, and no loss that nobody may see."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import SECRET, build, config, tiny_model
from transformers import trainer as hf_trainer
from transformers.trainer_callback import ProgressCallback, TrainerControl, TrainerState
from transformers.utils import logging as hf_logging

from hf_dpzero import DPZeroConfig
from hf_dpzero.training import progress


@pytest.fixture(autouse=True)
def verbosity() -> Any:
    """A run's log_level stays set in the process."""
    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_warning()
    yield
    hf_logging.set_verbosity(before)


def bars(trainer: Any) -> list[str]:
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    return [name for name in names if "Progress" in name or "Printer" in name or "Notebook" in name]


def test_a_terminal_shows_one_banner_one_bar_and_no_loss(tmp_path: Path, capsys: Any) -> None:
    aim = {"target_epsilon": 3.0, "noise_multiplier": None}
    trainer = build(
        tmp_path, disable_tqdm=False, eval_strategy="steps", eval_steps=3, **aim, **SECRET
    )
    assert bars(trainer) == ["PrivacyProgressCallback"]
    output = trainer.train()
    print(output)
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert shown.out.count("Private training") == 1
    for words in (
        "n = 120, expected batch B = 12 (poisson, q = 0.1)",
        "(target 3) at delta 0.001, add_or_remove_one",
        f"multiplier {trainer.plan.mechanism.noise_multiplier:.6g}, clip C = 5",
        "K = 1 rademacher, smoothing 0.001",
        "parameters in",
    ):
        assert words in shown.out, words
    assert "nan" not in text and "'loss'" not in text and "train_samples_per_second" not in text
    assert "training_loss" not in repr(output) and "epsilon=" in shown.err


def test_a_run_without_privacy_says_so_and_a_quiet_one_nothing(tmp_path: Path, capsys: Any) -> None:
    build(tmp_path / "b", method="mezo", noise_multiplier=None).train()
    out = capsys.readouterr().out
    assert "Training WITHOUT privacy" in out and "nothing bounds what is released" in out
    build(tmp_path / "a", log_level="error", **SECRET).train()
    assert "Private training" not in capsys.readouterr().out


def test_the_banner_names_the_processes_once(tmp_path: Path) -> None:
    trainer = build(tmp_path, **SECRET)
    trainer.train()
    assert "  processes " not in progress.banner(trainer.run, trainer.privacy_report())
    trainer.args.distributed_state.num_processes = 2
    try:
        assert progress.banner(trainer.run, trainer.privacy_report()).count("  processes ") == 1
        assert "gathers" not in progress.banner(trainer.run, trainer.privacy_report())
        trainer.run.sharded = True
        parts = progress.banner(trainer.run, trainer.privacy_report())
        assert "40 bytes in a step, and every pass gathers the parameters (FSDP2)" in parts
    finally:
        trainer.args.distributed_state.num_processes = 1


def test_replicas_warn_only_where_they_were_asked_to(tmp_path: Path, monkeypatch: Any) -> None:
    ours = logging.getLogger("hf_dpzero")
    build(tmp_path)
    monkeypatch.setattr(DPZeroConfig, "should_log", False)
    build(tmp_path, log_level_replica="info")
    assert ours.level == logging.NOTSET
    try:
        build(tmp_path)
        of_a_module = logging.getLogger("hf_dpzero.training.trainer")
        assert not of_a_module.isEnabledFor(logging.WARNING)
        assert of_a_module.isEnabledFor(logging.ERROR)
    finally:
        ours.setLevel(logging.NOTSET)


def test_a_resumed_bar_starts_where_the_run_is(tmp_path: Path, capsys: Any) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, **SECRET}
    build(tmp_path, **settings).train()
    trainer = build(tmp_path, disable_tqdm=False, **settings)
    capsys.readouterr()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    shown = capsys.readouterr()
    assert "6, 6 of them in the ledger" in shown.out and " 50%" in shown.err


def test_the_time_left_is_told_from_the_steps_after_the_first(tmp_path: Path) -> None:
    """The first one takes a minute here, each of the others a second."""
    callback, args = progress.PrivacyProgressCallback(), config(tmp_path)
    state = TrainerState(max_steps=10, is_world_process_zero=True)
    callback.on_train_begin(args, state, TrainerControl())
    for step, seconds in enumerate([60.0, 1.0, 1.0], 1):
        bar, state.global_step = callback.training_bar, step
        bar.start_t, bar.last_print_t = bar.start_t - seconds, bar.last_print_t - seconds
        callback.on_step_end(args, state, TrainerControl())
    shown = bar.format_dict
    assert shown["n"] == 3 and shown["rate"] == pytest.approx(1.0, rel=0.1)
    bar.close()


def test_a_bar_of_the_users_own_stays_alone(tmp_path: Path) -> None:
    class Own(ProgressCallback):
        pass

    trainer = build(tmp_path, disable_tqdm=False, trainer_settings={"callbacks": [Own()]})
    assert [
        type(c) for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)
    ] == [Own]


@pytest.fixture
def notebook(monkeypatch: Any) -> list[str]:
    """As in Jupyter: transformers has chosen its notebook callback; what is displayed is collected."""
    shown: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            shown.append(html)

    def display(html: str, display_id: bool = False) -> Handle:
        shown.append(html)
        return Handle()

    module = types.ModuleType("IPython.display")
    module.display, module.HTML = display, str  # type: ignore[attr-defined]
    package = types.ModuleType("IPython")
    package.display = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    from transformers.utils import notebook as stock

    monkeypatch.setattr(stock, "disp", module)
    monkeypatch.setattr(hf_trainer, "DEFAULT_PROGRESS_CALLBACK", stock.NotebookProgressCallback)
    progress.notebook_progress.cache_clear()
    return shown


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_notebook_shows_epsilon_where_the_loss_was(
    tmp_path: Path, notebook: list[str], evaluated: bool
) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2} if evaluated else {}
    trainer = build(tmp_path, tiny_model(), disable_tqdm=False, **settings, **SECRET)
    assert bars(trainer) == ["NotebookPrivacyCallback"]
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    last = [html for html in notebook if "<th>Epsilon</th>" in html][-1]
    assert f"{trainer.plan.epsilon(1e-3):.3f}" in last
    assert ("<th>Validation Loss</th>" in last) or not evaluated
    assert not any("Training Loss" in html or "nan" in html.lower() for html in notebook)


def test_importing_the_trainer_prints_nothing_and_flower_sends_nothing() -> None:
    """In one fresh process, because the imports take seconds."""
    names = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")
    code = "import hf_dpzero; hf_dpzero.DPZeroTrainer"
    if importlib.util.find_spec("flwr"):
        code += f"""
import os, hf_dpzero.federated.flower
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what flwr prints is not ours
from flwr.supercore import telemetry
assert telemetry.FLWR_TELEMETRY_ENABLED == "0", "telemetry"
assert [os.environ[name] for name in {names}] == ["0", "0"], "environment"
"""
    environment = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
