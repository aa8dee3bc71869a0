"""What a federated run cost each client's rows, in numbers and words.

Three counts of a client's rounds, which need not be equal:

  applied   its values are in the update (the server's `messages.ledger`)
  released  it wrote values into its own ledger; some may have come too late, or never
  opened    rounds that the server opened since it joined: it cannot have released more

Its epsilon is that of `released` where its ledger is at hand, else that of `opened`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.federated.client import RELEASED_NAME
from hf_dpzero.federated.message_log import read_count
from hf_dpzero.federated.server import Member, RoundServer
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.privacy.noise import is_seeded
from hf_dpzero.reporting.model_card import new_figure, optional_plot
from hf_dpzero.reporting.wording import (
    FEDERATED_CAVEATS,
    UNSEEN_CAVEAT,
    delta_words,
    number,
    relation_words,
    round_up,
)

REPORT_NAME, PLOT_NAME = "federated_report.json", "federated_run.png"


def federated_report(
    server: RoundServer,
    clients: Path | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The run's report: what each client's rows were charged.

    Args:
      server: of the run.
      clients: folder of the clients' folders, where they are on this machine.
      metrics: evaluations, each with its "round".

    Returns:
      JSON-safe; see the module for the counts.
    """
    header = server.trajectory.header
    rows = [_client_row(server, member, clients) for member in server.members.values()]
    common = header["federated"]
    count = max(1, server.round)
    return {
        "rounds": server.round,
        "planned_rounds": server.rounds,
        **{name: common[name] for name in ("participation", "neighboring_relation", "clip")},
        "sampling_probability": header["sampling_probability"],
        "num_directions": header["num_directions"],
        "learning_rate": max((r.learning_rate for r in server.trajectory.releases), default=None),
        "contract_digest": server.digest.hex(),
        "base_model_digest": header["base_model_digest"],
        "epsilon": _finite(max((float(row["epsilon"]) for row in rows), default=0.0)),
        "delta": max((row["delta"] for row in rows), default=0.0),
        "private": all(row["private"] for row in rows),
        "clients": rows,
        "strangers_refused": dict(server.strangers),
        "payload_bytes_of_a_client_and_round": round(
            sum(member.sent + member.received for member in server.members.values())
            / max(1, sum(count - member.joined for member in server.members.values())),
            1,
        ),
        "evaluations": [dict(entry) for entry in metrics],
        "caveats": [UNSEEN_CAVEAT, *FEDERATED_CAVEATS],
    }


def _client_row(server: RoundServer, member: Member, clients: Path | None) -> dict[str, Any]:
    local, opened = member.local, max(0, min(server.round + 1, server.rounds) - member.joined)
    released = None
    if clients is not None and (path := clients / member.name / RELEASED_NAME).is_file():
        released = read_count(path)
    private = local.plan.private and not is_seeded(member.noise_source)
    counted = opened if released is None else released
    epsilon = local.epsilon(counted)
    return {
        "client": member.name,
        "num_examples": local.num_examples,
        "expected_batch_size": local.mechanism.expected_batch_size,
        "noise_multiplier": local.mechanism.noise_multiplier,
        "noise_source": member.noise_source,
        "joined": member.joined,
        "applied": server.applied(member.name),
        "released": released,
        "opened": opened,
        "epsilon": _finite(epsilon),
        "epsilon_is_of": "opened rounds (an upper bound)"
        if released is None
        else "released rounds",
        "planned_epsilon": _finite(local.epsilon(local.rounds)),
        "delta": local.delta,
        "private": private,
        "refused": dict(member.refused),
        "statement": statement(member, epsilon, private),
    }


def _finite(value: float) -> float | str:
    return value if value < float("inf") else "inf"


def statement(member: Member, epsilon: float, private: bool) -> str:
    """A client's guarantee in one sentence."""
    if not private:
        why = (
            "its noise came from a seeded generator"
            if member.local.plan.private
            else "no noise was added"
        )
        return f"NOT PRIVATE: {why}."
    local = member.local
    neighbours = relation_words(local.plan.relation, "example")
    return (
        f"Against the server and all who read its messages, {member.name} is (epsilon = "
        f"{round_up(epsilon)}, delta = {delta_words(local.delta)})-differentially private for "
        f"{neighbours} of its {local.num_examples}."
    )


def summary(report: Mapping[str, Any]) -> str:
    """The report for a terminal: a headline and a line for each client."""
    rows = report["clients"]
    private = report["private"] and rows
    worst = max((row["epsilon"] for row in rows if row["private"]), default=0.0)
    head = (
        f"Local differential privacy: epsilon at most {round_up(worst)} (delta "
        f"{delta_words(report['delta'])}) for each row of "
        f"{'its client' if len(rows) == 1 else f'each of {len(rows)} clients'}"
        if private
        else "NOT PRIVATE: see the clients"
    )
    lines = [
        head,
        f"  rounds      {report['rounds']} of {report['planned_rounds']}, rows take part "
        f"{report['participation']}, {report['neighboring_relation']}",
        f"  messages    {report['payload_bytes_of_a_client_and_round']} payload bytes "
        "for a client and round",
        "  client            rows  noise/C  applied  released  opened  epsilon",
    ]
    for row in rows:
        released = "?" if row["released"] is None else row["released"]
        epsilon = row["epsilon"] if isinstance(row["epsilon"], str) else round_up(row["epsilon"])
        lines.append(
            f"  {row['client']:<16} {row['num_examples']:>5} {number(row['noise_multiplier']):>8} "
            f"{row['applied']:>8} {released:>9} {row['opened']:>7}  {epsilon}"
            + "".join(f"; {count} refused ({why})" for why, count in row["refused"].items())
        )
    if any(row["released"] is None for row in rows):
        lines.append(
            "  ?: its ledger is on its own machine; epsilon is that of the rounds opened, an upper bound"
        )
    lines += [f"  left out    {line}" for line in report.get("left_out", ())]
    return "\n".join(lines)


def save_report(report: Mapping[str, Any], folder: Path, released: Sequence[int] = ()) -> None:
    """Writes federated_report.json and, with matplotlib, federated_run.png."""
    write_atomically(folder / REPORT_NAME, json.dumps(report, indent=2, allow_nan=False) + "\n")
    with optional_plot(PLOT_NAME):
        _plot(report, folder / PLOT_NAME, released)


def _plot(report: Mapping[str, Any], target: Path, answered: Sequence[int]) -> None:
    names = sorted({k for entry in report["evaluations"] for k in entry} - {"round"})
    panels: list[tuple[str, Callable[[Any], Any]]] = [
        (
            name,
            lambda axes, name=name: axes.plot(  # type: ignore[misc]
                *zip(
                    *[(e["round"], e[name]) for e in report["evaluations"] if name in e],
                    strict=True,
                ),
                marker=".",
            ),
        )
        for name in names
    ]
    if answered:
        panels.append(("clients in the round", lambda axes: axes.plot(answered, drawstyle="steps")))
    figure = new_figure(max(1, len(panels)), 4.0, 3.0)
    for axes, (label, draw) in zip(
        figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels, strict=False
    ):
        draw(axes)
        axes.set(xlabel="round", ylabel=label)
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=120)
