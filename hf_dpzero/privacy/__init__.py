"""Differential privacy of a run: noise, sampling, mechanisms, events, accounting, plan.

Promise: the sampler, mechanism and relation that run are the ones that are accounted, and a combination
without a sound account is refused. Imports numpy, dp-accounting and OpenDP, torch for tensors in and
out, and nothing of this package. Start at `plan.PrivacyPlan`; proofs are in the docstrings of `events`,
`discretization` and `mechanisms/*`.
"""
