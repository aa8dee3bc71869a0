"""Model outputs become per-example losses `[B]`, float32.

Start at `heads`: an objective for each head of transformers, `select_objective`, which finds it, and
`register_objective`, which adds one. `losses` says what every objective must be, `prompted` has prompts
with label words, candidates and answers, `bounded` 1 - accuracy and 1 - F1 (of answers that
`generation` decodes), `host` what a batch on a device was sent from.

Promise: no example's loss depends on another example of the batch, up to float32 rounding of padding.
May import: torch, and transformers inside functions; no other room.
"""

from hf_dpzero.objectives.heads import (
    own_loss_objective,
    register_objective,
    select_objective,
)

__all__ = ["own_loss_objective", "register_objective", "select_objective"]
