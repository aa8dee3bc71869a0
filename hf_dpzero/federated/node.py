"""What a SuperNode's `--node-config` and a server's `--run-config` say.

What concerns a client's privacy (recipe, overrides, rows, folder) comes from the client's own
`--node-config`, never from the server's run configuration.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dpzero.federated.setup import Settings, Side


@dataclass(frozen=True)
class Node:
    """A client of a SuperNode.

    Attributes:
      values: its configuration.
      name: what it is called.
      folder: where its ledger is; its own.
      shard, of: its number among clients that share the recipe's rows; (0, 1) where all are its own.
    """

    values: Mapping[str, Any]
    name: str
    folder: Path
    shard: int = 0
    of: int = 1

    def build(self) -> Side:
        """Loads model and rows.

        Raises:
          ValueError, OSError, ImportError: whatever recipe, model, data or checks refuse.
        """
        from hf_dpzero.federated.setup import Side

        return Side.build(settings_of(self.values, self.of), self.folder)


def node_of(values: Mapping[str, Any]) -> Node:
    """A client's name, folder and shard.

    Args:
      values: `name`, and if wanted `output-dir`, `shard` ("3/20": every 20th row, from the third on, for
        trials on one machine), and those of `settings_of`.

    Raises:
      ValueError: no name, or an entry that cannot be read.
    """
    name = str(values.get("name", ""))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(
            f"name={name!r} in --node-config: give each client a name of its own, of letters, digits, "
            "'.', '_' and '-'."
        )
    folder = Path(str(values.get("output-dir") or f"out/{name}")).absolute()
    return Node(dict(values), name, folder, *_shard(str(values.get("shard", "1/1"))))


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        raise ValueError(f"shard={text!r} in --node-config: give it as '3/20', from 1/20 to 20/20.")
    return number - 1, of


def settings_of(values: Mapping[str, Any], clients: int = 1) -> Settings:
    """A side's settings from a configuration of Flower.

    Args:
      values: `recipe`, and if wanted `overrides` (words), `rounds`, `participation`,
        `sampling-probability`.
      clients: that share the recipe's rows; 1 where all rows are the side's own.

    Raises:
      ValueError: no recipe, or an entry that is no number.
    """
    from hf_dpzero.federated.setup import Settings

    if not values.get("recipe"):
        raise ValueError(
            "recipe is missing: give it in --node-config for a client, in --run-config for the server."
        )
    return Settings(
        recipe=str(values["recipe"]),
        overrides=tuple(shlex.split(str(values.get("overrides", "")))),
        clients=clients,
        rounds=_number(values, "rounds", int),
        participation=values.get("participation") or "sampled",
        sampling_probability=_number(values, "sampling-probability", float),
        own_rows=clients == 1,
    )


def _number(values: Mapping[str, Any], name: str, kind: type) -> Any:
    given = values.get(name)
    if given is None or given == "":
        return None
    try:
        return kind(given)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={given!r}: give a number.") from None
