"""Public random directions u, and theta + lambda u in a model's own memory, undone bit for bit.

Promises: a direction is a function of (key, step, query) alone, the same on every device, with any
number of threads; any sequence of moves that ends where it began changes no bit; an update is the same
whatever was fused with it. Nothing here is private: what may be released is decided elsewhere.

Imports torch and numpy only (numba and Triton when a kernel runs). Start with
`parameter_space.ParameterSpace`, then `directions` for the numbers and `grids` for why float32
arithmetic can be undone.

| file | what it answers |
|---|---|
| `directions` | which number u[i] is |
| `parameter_space`, `coordinates` | theta as one vector: moves, updates, copies |
| `segments`, `parts` | tensors that are moved together, or stay where they are; their arithmetic |
| `grids` | why float32 sums can be undone |
| `sharding`, `trainable` | parts of tensors on several processes; which tensors may train |
| `kernels/` | the loops: on a CPU, on a GPU, and in plain torch |
"""
