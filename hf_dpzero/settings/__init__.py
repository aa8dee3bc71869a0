"""Settings of a run: `DPZeroConfig`, its fields, their ranges and defaults, the plan that they make.

Promise: a setting out of range, without effect, or against another one is refused by name when it is
made; none is ignored in silence. May import: reporting and the rooms below it. Start at
`config.DPZeroConfig`.

| file | what it answers |
|---|---|
| `config` | Hugging Face's arguments and ours, checked together |
| `fields`, `nested`, `setting` | each field: range, needs, cost; those that belong together |
| `hf_arguments` | what each of Hugging Face's fields does here |
| `schedules`, `row_groups` | noise, clip and smoothing over the steps; groups of rows |
| `plan_of` | the privacy plan of the settings |
| `defaults` | rate, clip and directions where nothing is given, from public numbers |
| `proposal` | directions, batch and steps for the time at hand |
"""
