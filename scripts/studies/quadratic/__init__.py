"""DPZero, DPGD-0th and DP-GD on quadratics; start at `study`."""
