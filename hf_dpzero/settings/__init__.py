"""Settings of a run: fields of `DPZeroConfig`, their ranges and defaults, the plan that they make."""
