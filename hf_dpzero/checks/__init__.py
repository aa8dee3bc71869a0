"""What is refused before step 0, and between two steps.

Promise: a run that could not be accounted, or that would break its guarantee, is refused before it
releases anything; an error says what, the value and what to do. Private rows decide whether a run
starts, and nothing that is released. May import: run_folder and the rooms below it. Start at `table`,
which lists the checks in their order; docs/privacy_reference.md has it as a page.

| file | what it answers |
|---|---|
| `table` | which checks there are, when and in which runs |
| `overrides` | what of Trainer a script may replace |
| `data`, `evaluation_rows` | whether rows are examples; whether evaluation data holds private ones |
| `model`, `precision` | whether a model can be trained in place, and in which arithmetic |
| `passes` | how many rows a forward pass has |
| `smoke_test`, `invented_rows` | whether rows of a pass feel each other: tried on invented rows |
| `public_rows` | whether losses are finite and feel the perturbation, on public rows |
| `processes` | whether all processes run the same thing |
| `between_steps` | whether anything else wrote to the weights |
"""
