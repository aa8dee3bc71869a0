"""The command line `hf-dpzero`: each subcommand is a function `run_NAME(arguments)`.

`options.py` holds the options of every subcommand as dataclasses, `main.py` makes the parser from them
and dispatches: `train.py` trains and evaluates, `plan.py` plans, `audit.py` attacks a plan,
`release.py` replays, publishes and verifies a run, `many_runs.py` compares, sweeps and federates,
`start.py` lists recipes and writes starters. Nothing else is imported until a subcommand runs, so
`--help` is instant. This room may import every other room, and no other room imports it.
"""
