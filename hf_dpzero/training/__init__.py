"""Everything that knows `transformers.Trainer`: settings, trainer, methods, one step, batches, checks.

Promise: what cannot be accounted is refused before step 0, and only released values reach logs, the
ledger and saved files. May import: reporting, estimators, ledger, privacy, perturbation, objectives,
values.
Start at `trainer.DPZeroTrainer`; a step is `zeroth_order_step.py` or `first_order_step.py`.
"""
