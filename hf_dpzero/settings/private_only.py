"""Training arguments that no Trainer trains with but a private one."""

from __future__ import annotations


class PrivateOnly:
    """A parent of `DPZeroConfig`: refuses a Trainer without `DPZeroMixin`, which knows no privacy."""

    trains_privately = False  # DPZeroMixin.train sets it while it runs

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """As in TrainingArguments. Every Trainer asks for it when its training starts.

        Args:
          num_training_steps: of the run.

        Returns:
          Steps of warm-up.

        Raises:
          ValueError: a Trainer without `DPZeroMixin` asks.
        """
        if not self.trains_privately:
            raise ValueError(
                f"a {type(self).__name__} was given to a Trainer that would train without privacy: "
                "make a DPZeroTrainer, or put DPZeroMixin first among the parents of your own."
            )
        steps: int = super().get_warmup_steps(num_training_steps)  # type: ignore[misc]
        return steps
