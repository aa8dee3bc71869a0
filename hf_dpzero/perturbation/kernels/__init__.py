"""One sweep over a flat tensor that adds multiples of random directions to it.

`dispatch` is the door: it picks the fastest implementation for a tensor's device. `torch_reference`
defines the numbers in plain torch; `numba_kernels` (CPU) and `triton_kernels` (CUDA) compute the same to
the last bit. numba and Triton are imported on first use only.
"""
