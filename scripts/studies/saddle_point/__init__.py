"""Private saddle points and synthetic data for linear queries; start at `study`."""
