"""With `participation: once`, a client's rows must keep their numbers from one start to the next.

Round r takes the r-th block of them. In another order, or with other rows, a row could come again,
which the account of one release does not cover. So a client leaves a digest of its rows, made with a
secret key, in its own folder, and compares. The digest is of up to 10,000 rows, evenly spread: of more,
two that changed places may go unnoticed, a shuffle does not.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.federated.client import RELEASED_NAME
from hf_dpzero.federated.local_plan import PlanError
from hf_dpzero.ledger.log_file import write_for_owner
from hf_dpzero.run_folder.keys import digest_of_rows

FILE = Path("_private") / "rows.json"


def check_same_rows(folder: Path, dataset: Any, rows: Sequence[int]) -> None:
    """Remembers the rows of a client, or compares them with those that it remembers.

    Args:
      folder: the client's own; the file in it is for its owner alone.
      dataset: rows by number.
      rows: numbers of the client's own.

    Raises:
      PlanError: they are others than before, or in another order; or there is no telling.
    """
    path = folder / FILE
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if before is None and (folder / RELEASED_NAME).exists():
        raise PlanError(
            f"{FILE} in the client's folder is missing, which knew its rows again: with "
            "participation=once a row could take part twice, which epsilon does not cover. Restore it, "
            "or take another output-dir; what was spent stays spent."
        )
    key = bytes.fromhex(before["key"]) if before else secrets.token_bytes(32)
    now = digest_of_rows(dataset, key, rows)
    if not now:
        raise PlanError(
            "the client's rows are drawn anew at each access, so that nothing tells whether they are "
            "those of its first start: with participation=once a row could take part twice. Store the "
            "rows as they are to be used, or use participation=sampled."
        )
    if before is None:
        write_for_owner(path, json.dumps({"key": key.hex(), "rows": now}))
    elif before["rows"] != now:
        raise PlanError(
            "the client's rows are not those of its first start, or not in that order (an unseeded "
            "shuffle?): with participation=once a row could take part twice, which epsilon does not "
            f"cover. Load them as they were ({FILE} in its folder knows them again), or take another "
            "output-dir; what was spent stays spent."
        )
