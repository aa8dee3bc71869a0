"""Noise that is correlated over the steps of a run, so that it cancels in sums over time.

Promise: column norms are exact, never a bound that may be too small; a row of noise of
the Toeplitz, banded and tree factorisations needs no matrix of rounds by rounds. Start at
`factorization.Factorization`.
"""
