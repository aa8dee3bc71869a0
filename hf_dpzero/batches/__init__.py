"""A step's rows become forward passes of fixed shapes, in a secret order (see docs/placement.md)."""
