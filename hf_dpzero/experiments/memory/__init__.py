"""Peak memory of a run before it starts, counted on the meta device: no weights, no download.

`live_bytes` counts the tensors that a forward or backward pass keeps alive. `model_on_meta` builds a
recipe's model, `objective_passes` evaluates its objective on it, and `peaks` adds what a training step
keeps beside that. Start with `peaks.all_peaks`.
"""
