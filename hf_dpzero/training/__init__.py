"""Everything that knows `transformers.Trainer`: the trainer, its inputs, one step, what a run shows.

Promise: what cannot be accounted is refused before step 0, and only released values reach logs, the
ledger and saved files. May import: all rooms below it in docs/architecture.md.
Start at `dpzero_trainer.DPZeroTrainer` and the `trainer.DPZeroMixin` below it; a step is
`zeroth_order_step.py` or `first_order_step.py`, both on `private_step.py`.
"""
