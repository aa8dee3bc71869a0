"""A step's rows become forward passes of fixed shapes, in a secret order.

Promise: an example's tensors, its pass and the process that computes it follow from that example and its
place alone, so adding or removing one row displaces at most one other (docs/placement.md, with proof in
`placement`). May import: estimators, objectives, privacy. Start at `logical_batch.StepBatches`.

| file | what it answers |
|---|---|
| `logical_batch` | which rows a step has on this process, and how a data set's rows are collated |
| `units` | rows that are one unit of privacy together, and their mean |
| `columns` | what known collators make of rows in typed columns, many at once |
| `shapes` | the shape of a row; rows of one shape as passes, filled up with blank ones |
| `placement` | which pass a place belongs to, who computes it, and how many rows fit into memory |
"""
