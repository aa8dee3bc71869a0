"""The algorithms of the papers on explicit objectives, to compare with what the papers report.

Imports `privacy`, never torch itself. Start at `quadratic`; `quadratic_study` runs its grid and draws.
`averaged_clipping` has the algorithms of the heavy-tails paper, `averaged_clipping_study` its tables;
`online_federated` has federated learning with correlated noise, `online_federated_study` its tables;
`saddle_point` solves private saddle points given first-order oracles, `synthetic_data` is Algorithm 5.
"""
