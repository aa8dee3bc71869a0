"""The algorithms of the papers on explicit objectives, to compare with what the papers report.

Imports `privacy`, never torch itself. `budget` has noise that changes from step to step,
`averaged_clipping` clipped means on heavy tails, `online_federated` learners with correlated noise;
`saddle_point` solves private saddle points given first-order oracles
(`saddle_point_parameters` has the theorems' numbers, `saddle_point_plans` what a run costs), and
`synthetic_data` is Algorithm 5. The studies that compare them are `scripts.studies` of the checkout.
"""
