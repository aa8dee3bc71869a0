"""How many processes made a run, and what is assumed of the links between them, in a report's words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan

_ENTRY = {
    "first_step": int,
    "processes": int,
    "row_shares": int,
    "direction_parallel_size": int,
    "sharded": bool,
}


def check_processes(entries: Any, steps: int) -> None:
    """Refuses a report's `processes` that contradict themselves or the number of steps.

    Args:
      entries: of `PrivacyReport.processes`.
      steps: completed.

    Raises:
      ValueError: an entry of another form, a mesh of another size, or starts out of order.
    """
    whole = isinstance(entries, list) and all(map(_is_whole, entries))
    firsts = [0, *(entry["first_step"] for entry in entries), steps] if whole else []
    if not whole or sorted(firsts) != firsts:
        raise ValueError(
            f"processes={entries!r} in a privacy report of {steps} steps; it must list the "
            f"{', '.join(_ENTRY)} of each start, in order. It was edited or damaged; take the file that "
            "the run wrote."
        )


def _is_whole(entry: Any) -> bool:
    """Whether an entry has its fields, and its mesh as many places as there are processes."""
    if not isinstance(entry, dict) or {k: type(v) for k, v in entry.items()} != _ENTRY:
        return False
    mesh = entry["row_shares"] * entry["direction_parallel_size"]
    return bool(entry["processes"] == mesh and mesh > 0)


def process_words(entries: Sequence[Mapping[str, Any]], steps: int) -> str:
    """How many processes took which steps, in a few words.

    Args:
      entries: of `PrivacyReport.processes`; not empty.
      steps: completed.

    >>> two = {"first_step": 0, "processes": 2, "row_shares": 2, "direction_parallel_size": 1,
    ...        "sharded": False}
    >>> process_words([two], 6)
    '2 (2 shares of the rows)'
    >>> process_words([two, {**two, "first_step": 4, "processes": 1, "row_shares": 1}], 6)
    'steps 0 to 3: 2 (2 shares of the rows); steps 4 to 5: 1'
    """
    if len(entries) == 1 and not entries[0]["first_step"]:
        return _layout(entries[0])
    firsts = [*(entry["first_step"] for entry in entries), steps]
    ranges = [_range(*pair) for pair in itertools.pairwise(firsts)]
    told = [f"{of}: {_layout(entry)}" for of, entry in zip(ranges, entries, strict=True)]
    before = [f"{_range(0, firsts[0])}: not recorded"] if firsts[0] else []
    return "; ".join([*before, *told])


def _range(first: int, end: int) -> str:
    if end - first < 2:
        return f"step {first}" if end > first else f"a start at step {first} without a release"
    return f"steps {first} to {end - 1}"


def _layout(entry: Mapping[str, Any]) -> str:
    processes, directions = entry["processes"], entry["direction_parallel_size"]
    if processes == 1:
        return "1"
    shares = {"rows": entry["row_shares"], "directions": directions}
    mesh = " x ".join(f"{n} shares of the {of}" for of, n in shares.items() if n > 1)
    return f"{processes} ({mesh}{', parameters in parts by FSDP2' if entry['sharded'] else ''})"


def process_caveats(facts: Mapping[str, Any], plan: PrivacyPlan) -> list[str]:
    """What the guarantee assumes of several processes; nothing for one.

    Args:
      facts: of a report.
      plan: the plan that ran.

    Returns:
      Sentences; none for a report that does not know how many there were.
    """
    entries = facts["processes"]
    if not entries:
        return []
    several = [entry for entry in entries if entry["processes"] > 1]
    told = [_links(several, facts, plan)] if several else []
    if first := entries[0]["first_step"]:
        told.append(
            f"How many processes took {_range(0, first)} is not recorded. Had there been several, the "
            "links between them are assumed to be private."
        )
    if facts["parts"][:-1]:
        told.append(
            "How many processes ran is told of this run alone: of the runs that it extends, their own "
            "reports say."
        )
    return told


def _links(
    several: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], plan: PrivacyPlan
) -> str:
    clipped = "clipped " if plan.mechanism.private else ""
    what = "gradients" if facts["direction"] == "none" else "finite differences of losses"
    sent = [f"the sums of {clipped}{what} before noise"]
    if any(entry["direction_parallel_size"] > 1 for entry in several):
        sent.append("losses of single examples")
    if plan.groups is not None:
        sent.append("the sums of the groups' losses before noise")
    if any(entry["sharded"] for entry in several):
        sent.append("numbers of forward passes, which follow from the drawn rows")
    return (
        f"At most {max(entry['processes'] for entry in several)} processes ran at once. The links "
        "between them, and every machine that ran one, are assumed to be as private as one training "
        "machine: "
        f"torch.distributed (gloo, NCCL) sent {', '.join(sent)}, and the secret key that batches are "
        "drawn by, neither encrypted nor authenticated. The first process drew the noise, and neither "
        "its values nor its keys were sent; but a sum and the released number tell the noise that is "
        "between them."
    )
