"""Tracking services that upload all of output_dir would take the keys of the noise along."""

from __future__ import annotations

import gc

import pytest
from attacked_runs import Calls
from tiny_runs import build
from transformers import TrainerCallback

from hf_dpzero.batches.logical_batch import StepBatches

RUN = {"method": "dp-sgd", "sampling": "fixed_batches", "testing.sampler_key": None, "max_steps": 1}


class CometCallback(TrainerCallback):
    """Named as Hugging Face's, which sends `output_dir` off before `train` returns."""


class DagsHubCallback(TrainerCallback):
    """As above."""


class DVCLiveCallback(TrainerCallback):
    """As above; it keeps its setting."""

    def __init__(self, log_model) -> None:
        self._log_model = log_model


@pytest.mark.parametrize(
    ("callback", "variable"),
    [
        (CometCallback(), "COMET_LOG_ASSETS"),
        (DagsHubCallback(), "HF_DAGSHUB_LOG_ARTIFACTS"),
        (DVCLiveCallback("all"), "HF_DVCLIVE_LOG_MODEL"),
    ],
)
def test_uploads_of_the_keys_are_refused(tmp_path, monkeypatch, callback, variable):
    monkeypatch.setenv(variable, "TRUE")
    trainer = build(tmp_path, trainer_settings={"callbacks": [callback]}, **RUN)
    with pytest.raises(ValueError, match=f"Set {variable}=FALSE"):
        trainer.train()
    assert not (tmp_path / "_private").exists()


@pytest.mark.parametrize("callback", [CometCallback(), DVCLiveCallback(True)])
def test_services_that_take_metrics_alone_are_allowed(tmp_path, monkeypatch, callback):
    monkeypatch.delenv("COMET_LOG_ASSETS", raising=False)
    trainer = build(tmp_path, trainer_settings={"callbacks": [callback]}, **RUN)
    assert trainer.train().global_step == 1


def test_keys_are_in_no_text_form(tmp_path):
    shown = []

    def look(*_, **__) -> None:
        keys = trainer._keys
        secrets = [keys.sampler, *(key for _, key in keys.noise)]
        batches = [made for made in gc.get_objects() if isinstance(made, StepBatches)]
        assert batches  # of the training loop
        text = repr(keys) + str(keys) + repr(batches)
        shown.append(any(repr(key) in text or key.hex() in text for key in secrets))

    trainer = build(tmp_path, trainer_settings={"callbacks": [Calls("on_step_end", look)]}, **RUN)
    trainer.train()
    assert shown == [False]
