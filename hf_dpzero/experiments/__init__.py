"""Comparisons and sweeps of many runs, and plans of one run before it starts.

- `plan`: privacy and memory of a recipe's run, without a download; `memory` computes the bytes.
- `compare`: methods x epsilons x seeds on the same data, one table and one plot (`tables`).
- `sweep`: settings of one recipe, and what choosing among them costs (`sweep_outputs` writes
  what may be released).

Both `compare` and `sweep` train through `runner`: a process a run, a `results.Row` a finished run, in a
file that only grows, so that an interrupted command continues. Start reading at `results` and `runner`.
This room may import `recipes` and what lies below it; only `cli` imports it.
"""
