"""AClipped-dpSGD, DP-SGD and DP-GD on heavy-tailed regressions; start at `study`."""
