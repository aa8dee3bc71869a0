"""Model outputs become per-example losses `[B]`, float32.

Start at `losses`: an objective for each head of transformers, and what every objective must be.
`prompted` has prompts with label words, candidates and answers, `bounded` 1 - accuracy and 1 - F1.

Promise: no example's loss depends on another example of the batch, up to float32 rounding of padding.
May import: torch, and transformers inside functions; no other room.
"""
