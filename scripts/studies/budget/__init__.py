"""Noise that falls over the steps of private gradient descent; start at `study`."""
