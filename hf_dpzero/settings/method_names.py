"""The methods of `DPZeroConfig.method`, and groups of them."""

from __future__ import annotations

ZEROTH_ORDER = ("dpzero", "dpgd-0th", "mezo")
FIRST_ORDER = ("dp-sgd", "dp-adamw", "sgd", "adamw")
METHODS = (*ZEROTH_ORDER, *FIRST_ORDER)
NOT_PRIVATE = ("mezo", "sgd", "adamw")
PRIVATE = tuple(method for method in METHODS if method not in NOT_PRIVATE)
SGD, ADAMW = ("dp-sgd", "sgd"), ("dp-adamw", "adamw")
"""First-order methods by torch's optimizer."""
