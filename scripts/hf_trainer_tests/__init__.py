"""Hugging Face's own trainer tests, run with `DPZeroTrainer` in place of `Trainer`.

    python -m scripts.hf_trainer_tests path/to/a/checkout/of/transformers

| file | answers |
|---|---|
| `__main__.py` | which tests pass with Trainer, and which of those with ours |
| `substitute.py` | what stands in place of what (a plugin of pytest) |
| `cannot_hold.py` | which tests cannot pass, and why |
"""

from __future__ import annotations

ARMS = ("plain", "mezo", "private")
"""Hugging Face's Trainer; ours without privacy; ours with an epsilon."""
