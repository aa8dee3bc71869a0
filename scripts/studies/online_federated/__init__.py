"""Correlated noise in locally private federated learning; start at `study`."""
