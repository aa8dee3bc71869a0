"""Everything that knows `transformers.Trainer`: settings, trainer, methods, one step, batches, checks.

Promise: what cannot be accounted is refused before step 0, and only released values reach logs, the
ledger and saved files. May import: reporting, estimators, ledger, privacy, perturbation, objectives,
values.
Start at `dpzero_trainer.DPZeroTrainer` and the `trainer.DPZeroMixin` below it; a step is
`zeroth_order_step.py` or `first_order_step.py`.
"""
