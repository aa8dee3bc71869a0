"""Methods side by side on one task: the grid of runs, their rows, tables and plots."""
