"""Callbacks of `DPZeroTrainer`: honest epochs, and the spent budget in the progress bar."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback


class PrivacyCallback(TrainerCallback):
    """Reports epochs as the expected number of passes, step * B / n, also after a resume."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets `state.epoch` before anything is logged."""
        state.epoch = state.global_step * self.trainer.plan.sampler.sampling_probability


class PrivacyProgressCallback(ProgressCallback):
    """Hugging Face's progress bar with the spent epsilon beside it."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Shows the last logged epsilon; computing it at every step would cost more than steps."""
        if (
            state.is_world_process_zero
            and self.training_bar is not None
            and "epsilon" in (logs or {})
        ):
            self.training_bar.set_postfix(epsilon=f"{logs['epsilon']:.3f}", refresh=False)
        super().on_log(args, state, control, logs=logs, **kwargs)
