"""Private saddle points on the simplex, and synthetic data from them, given first-order oracles.

Imports `privacy`, never torch itself. Start at `saddle_point`, which has the algorithms;
`saddle_point_parameters` has the theorems' numbers, `saddle_point_plans` what a run costs, and
`synthetic_data` is Algorithm 5 of the paper. Algorithms that are simulated, not released, stand beside
their studies in `scripts.studies` of the checkout.
"""
