"""Studies of the papers, and of methods on SST-2: they make what docs/papers and docs/results.md show.

    python -m scripts.studies.quadratic --quick --output_dir out/quadratic

Run them from the root of the checkout. A folder is a study of a paper, `quadratic` that of DPZero;
`saddle_point` runs what is in `hf_dpzero.papers`, the others have their algorithms beside them.
`schedules` and `group_robust` train on SST-2; `stored_features` simulates heads on SST-2 and TREC.
`--quick` takes less than a minute.
"""
