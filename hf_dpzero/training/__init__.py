"""Everything that knows `transformers.Trainer`: the trainer, its inputs, one step, what a run shows.

Promise: what cannot be accounted is refused before step 0, and only released values reach logs, the
ledger and saved files. May import: all rooms below it in docs/architecture.md.
Start at `dpzero_trainer.DPZeroTrainer` and the `trainer.DPZeroMixin` below it; a step is
`zeroth_order_step.py` or `first_order_step.py`, both on `private_step.py`.

| file | what it answers |
|---|---|
| `dpzero_trainer`, `trainer` | what a script constructs; which of Hugging Face's methods are replaced |
| `inputs`, `texts` | what a model's name, an adapter, rows of text become |
| `preparation` | what happens before step 0 |
| `zeroth_order_method`, `first_order_method` | which objects make a step of a run, and its chosen rate |
| `private_step`, `zeroth_order_step`, `first_order_step` | what a step computes, in order |
| `evaluation` | losses and metrics on public rows, by group too |
| `private_evaluation` | how private rows are evaluated: counted one by one, released with noise |
| `publishing` | what is evaluated, saved and published in place of Hugging Face's |
| `progress`, `step_meter`, `signal` | what a run shows: bar, time, signal over noise |
| `termination` | what SIGTERM does |
"""
