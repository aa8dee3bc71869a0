"""What a client has spent, from its own ledger alone: no model, no rows, no server.

python -m hf_dpzero.federated.spent FOLDER     # a client's output-dir
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hf_dpzero.federated.client import RELEASED_NAME
from hf_dpzero.federated.local_plan import LocalPlan
from hf_dpzero.federated.message_log import read_count
from hf_dpzero.ledger.log_file import split_header
from hf_dpzero.privacy.noise import is_seeded
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.wording import delta_words, round_up


def spent(folder: str | Path) -> dict[str, Any]:
    """Rounds released and their cost for a row; reads only, also while the client runs.

    Args:
      folder: the client's own.

    Returns:
      "client", "num_examples", "released", "rounds", "epsilon", "planned_epsilon" (inf without noise),
      "delta", "private".

    Raises:
      FileNotFoundError: the client has joined no run in this folder.
      LedgerError: its ledger is damaged.
    """
    path = Path(folder) / RELEASED_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there: the client has joined no run in this folder, and spent nothing in it."
        )
    header, _ = split_header(path.read_bytes(), path)
    names = ("num_examples", "rounds", "participation", "delta")
    plan = PrivacyPlan.from_dict(header["plan"])
    local = LocalPlan(plan=plan, **{name: header[name] for name in names})
    count = read_count(path)
    return {
        "client": header["client"],
        "num_examples": local.num_examples,
        "released": count,
        "rounds": local.rounds,
        "epsilon": local.epsilon(count),
        "planned_epsilon": local.epsilon(local.rounds),
        "delta": local.delta,
        "private": plan.private and not is_seeded(header["noise_source"]),
    }


def words(cost: dict[str, Any]) -> str:
    """`spent` in one sentence."""
    head = f"{cost['client']}: {cost['released']} of {cost['rounds']} rounds released"
    if not cost["private"]:
        return f"{head}; NOT PRIVATE: without noise, or with noise from a seeded generator."
    return (
        f"{head}, epsilon = {round_up(cost['epsilon'])} (of at most "
        f"{round_up(cost['planned_epsilon'])}), delta = {delta_words(cost['delta'])}, "
        f"for each of its {cost['num_examples']} rows."
    )


if __name__ == "__main__":
    try:
        print(words(spent(sys.argv[1] if len(sys.argv) > 1 else ".")))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
