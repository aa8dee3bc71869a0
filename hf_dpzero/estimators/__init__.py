"""Un-noised per-example statistics of a batch: private values, to be clipped and noised by `privacy`.

Zeroth order, start at `finite_differences`: x [B, K] by forward passes, with the strategies `layerwise`
and `stacked`; `choose_strategy` tries them before training, `forward_passes` guards the weights and runs
frozen layers once. First order, start at `per_example_gradients`: weighted sums of per-example
gradients, dense or by `ghost_clipping`, which alone imports opacus, when first used.

Promises: evaluations leave the parameters bit for bit at theta once settled, also after an exception;
what cannot be attributed to single examples is refused by name.
May import: objectives, perturbation, and of privacy the clip factors. Not transformers or datasets.

| file | what it answers |
|---|---|
| `finite_differences`, `choose_strategy` | x [B, K]; which strategy computes it |
| `layerwise`, `stacked` | where a perturbation is while a model runs |
| `offload` | weights that come for a module's forward |
| `forward_passes`, `random_state` | what a forward pass may neither write nor draw |
| `arithmetic`, `precision_diagnostics` | autocast and compilation; whether rounding hides the signal |
| `landscape` | slope, scatter and curvature of public rows' losses |
| `per_example_gradients`, `ghost_clipping` | clipped sums of gradients, dense or without them |
"""
