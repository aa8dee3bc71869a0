"""Fixtures of the attacks."""

from attacked_runs import base

__all__ = ["base"]
