"""The command line `hf-dpzero`: one module a subcommand, each with `run(arguments)`.

`options.py` holds the options of every subcommand as dataclasses, `main.py` makes the parser from them
and dispatches. Nothing else is imported until a subcommand runs, so `--help` is instant. This room may
import every other room, and no other room imports it.
"""
