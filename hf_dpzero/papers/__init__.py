"""The algorithms of the papers on explicit objectives, to compare with what the papers report.

Imports `privacy`, never torch. Start at `quadratic`; `quadratic_study` runs its grid and draws.
"""
