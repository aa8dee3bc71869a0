"""What a reader of a federated run's report must know, from what its trajectory's header says.

The header of `trajectory.safetensors` holds the plan of one client, the one with the largest epsilon,
and under "federated" how many `clients` there were and the `steps` that a row of that client may be
part of. The run's own ledger holds neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAVEATS = (
    "Local: the guarantee of each client holds against the server and everybody who reads the messages. "
    "The other clients, the metrics and the weights know no more than the messages.",
    "It is for one row of one client. All rows of a client together, and whether a client took part at "
    "all, are not covered.",
    "Sizes of shards and the rounds a client takes part in are public. Being away must not depend on "
    "the rows.",
    "The time that an answer takes is not covered: it tells how many rows a round drew, and how long "
    "they are, to whoever sees when messages travel.",
    "A client that is not honest can spoil the model: it declares its number of rows, which weighs its "
    "mean, its noise, which bounds its values, and its delta: the run's own report is stated at the "
    "largest of all. Nothing here finds it. The others' guarantee stands.",
    "A row that is with several clients, or in several runs or output folders, is charged by each of "
    "them, and the charges add up; nothing here knows of the others.",
)


def caveats_of(header: Mapping[str, Any]) -> list[str]:
    """Caveats of a federated run, to stand behind the first of its plan's; none for other runs.

    Args:
      header: of a trajectory.

    >>> caveats_of({})
    []
    """
    common = header.get("federated")
    if common is None:
        return []
    return [
        "Federated: the numbers are those of the client with the largest epsilon, one of "
        f"{common.get('clients')}; the run's federated_report.json has them all.",
        *CAVEATS,
    ]


def steps_of(header: Mapping[str, Any], releases: int) -> int:
    """Steps that the report of a trajectory counts.

    Args:
      header: of the trajectory.
      releases: in it.

    Returns:
      For a federated run those of the client that the report is about: it may have missed rounds, or
      have released in one that was never closed. Else `releases`.

    Raises:
      ValueError: a federated run that did not end, so that no report is about it.
    """
    common = header.get("federated")
    if common is None:
        return releases
    steps = common.get("steps")
    if "plan" not in header or not isinstance(steps, int) or steps < 0:
        raise ValueError(
            "this trajectory is of a federated run that did not end, and no report was written for "
            "it: finish the run with `hf-dpzero federate RECIPE --resume` (on several machines, "
            "submit it again)."
        )
    return steps
