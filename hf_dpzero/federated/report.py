"""What a federated run cost each client's rows, in numbers and words, for server, client and readers.

Three counts of a client's rounds, which need not be equal:

  applied   its values are in the update (the server's `messages.ledger`)
  released  it wrote values into its own ledger; some may have come too late, or never
  opened    rounds that the server opened since it joined: it cannot have released more

Its epsilon is that of `released` where its ledger is at hand, else that of `opened`. A client reads it
from its ledgers alone, by `python -m hf_dpzero.federated.report FOLDER` (its output-dir).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_dpzero.federated.messages import RELEASED_NAME, read_log
from hf_dpzero.federated.plan import LocalPlan, PlanError
from hf_dpzero.federated.server import MESSAGES_NAME, Member, RoundServer, weights
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME, Trajectory
from hf_dpzero.privacy.accounting import epsilon_together
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise, is_seeded
from hf_dpzero.reporting.caveats import FEDERATED_CAVEATS, UNSEEN_CAVEAT
from hf_dpzero.reporting.hub import write_page
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.verification import bound_to
from hf_dpzero.reporting.wording import delta_words, number, round_up
from hf_dpzero.values import encode

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig

REPORT_NAME = "federated_report.json"

RUNS = "runs"
"""Folder of the runs that a client served, in its own; each is named by its contract."""


def federated_report(
    server: RoundServer, clients: Path | None = None, metrics: Sequence[Mapping[str, float]] = ()
) -> dict[str, Any]:
    """Reports what each client's rows were charged, JSON-safe; see the module for the counts.

    `clients` holds the clients' folders, where they are on this machine.
    """
    header, members = server.trajectory.header, server.members.values()
    weight = weights({member.name: member.local for member in members})
    rows = [
        {**_client_row(server, m, clients), "weight": weight[m.name] / sum(weight.values())}
        for m in members
    ]
    payloads = sum(member.sent + member.received for member in members)
    rounds_of_clients = sum(max(1, server.round) - member.joined for member in members)
    report = {
        "rounds": server.round,
        "planned_rounds": server.rounds,
        **{name: header["federated"][name] for name in ("neighboring_relation", "clip")},
        **{name: header[name] for name in ("sampling_probability", "num_directions")},
        "learning_rate": max((r.learning_rate for r in server.trajectory.releases), default=None),
        "epsilon": max((row["epsilon"] for row in rows), default=0.0),
        "delta": max((row["delta"] for row in rows), default=0.0),
        "private": all(row["private"] for row in rows),
        "clients": rows,
        "payload_bytes_of_a_client_and_round": round(payloads / max(1, rounds_of_clients), 1),
        "evaluations": [dict(entry) for entry in metrics],
        "caveats": [UNSEEN_CAVEAT, *FEDERATED_CAVEATS],
    }
    return dict(encode(report))  # JSON has no infinity


def _client_row(server: RoundServer, member: Member, clients: Path | None) -> dict[str, Any]:
    local, opened = member.local, max(0, min(server.round + 1, server.rounds) - member.joined)
    released = None
    if clients is not None and (path := clients / member.name / RELEASED_NAME).is_file():
        released = len(read_log(path)[1])
    return {
        "client": member.name,
        "num_examples": local.num_examples,
        "noise_multiplier": local.mechanism.noise_multiplier,
        "joined": member.joined,
        "applied": server.applied(member.name),
        "released": released,
        "opened": opened,
        "epsilon": local.epsilon(opened if released is None else released),
        "planned_epsilon": local.epsilon(local.rounds),
        "delta": local.delta,
        "private": local.plan.private and not is_seeded(member.noise_source),
        "refused": dict(member.refused),
    }


def summary(report: Mapping[str, Any]) -> str:
    """Says the report for a terminal: a headline and a line for each client."""
    rows = report["clients"]
    head = "NOT PRIVATE: a client without noise, or with noise from a seeded generator"
    if report["private"] and rows:
        whose = "its client" if len(rows) == 1 else f"each of {len(rows)} clients"
        head = (
            f"Local differential privacy: epsilon at most {round_up(report['epsilon'])} (delta "
            f"{delta_words(report['delta'])}) for each row of {whose}"
        )
    last = (f"{k} {float(v):.4g}" for e in report["evaluations"][-1:] for k, v in e.items())
    lines = [
        head,
        f"  rounds      {report['rounds']} of {report['planned_rounds']}, "
        f"{report['neighboring_relation']}",
        f"  messages    {report['payload_bytes_of_a_client_and_round']} payload bytes "
        "for a client and round",
        f"  evaluation  {', '.join(last) or 'none'}",
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


def save_costliest(
    server: RoundServer, config: DPZeroConfig, report: Mapping[str, Any], base: Mapping[str, Any]
) -> None:
    """Writes the privacy report and the trajectory of the client with the largest epsilon.

    A row is one client's, and all that the run put out follows from the messages. So the largest of the
    clients' epsilons, all at the largest of their deltas, holds for every row of all of them together.
    `config` has the client's target, if any, and `base` the report's `base_weights` and `earlier_runs`.
    """
    costs = []
    for row in report["clients"]:
        member = server.members[row["client"]]
        local = replace(member.local, delta=report["delta"])
        released = row["opened"] if row["released"] is None else row["released"]
        costs.append((not row["private"], local.epsilon(released), local, released, member))
    _, _, local, released, member = max(costs, key=lambda cost: cost[:2])
    noise = InsecureSeededNoise(0) if is_seeded(member.noise_source) else SecureNoise()
    private, common = local.plan.private, server.trajectory.header["federated"]
    header = {
        **server.trajectory.header,
        **base,
        "plan": local.plan.to_dict(),
        "target_epsilon": config.target_epsilon if private else None,
        "target_delta": local.delta if private else None,
        "tuning": config.tuning,
        "noise_source": noise.name,
        "privacy_unit": config.privacy_unit,
        "sampler_key_is_secret": True,  # each client draws its own and nobody keeps it
        "log_private_diagnostics": False,
        "federated": {**common, "clients": len(costs), "steps": released},
    }
    trajectory = Trajectory(header, server.trajectory.releases)
    trajectory.to_safetensors(server.folder / SHIPPING_NAME)
    own = PrivacyReport.from_header(header, steps=released, delta=local.delta, in_other_terms=True)
    own = bound_to(own, server.folder)
    own.save(server.folder / REPORT_FILE)
    write_page(server.folder, own, trajectory)


class Served(NamedTuple):
    """A run that a client took part in: its plan and what its ledger counts, also while it runs."""

    client: str
    local: LocalPlan
    released: int
    private: bool

    def __str__(self) -> str:
        local, count = self.local, self.released
        head = f"{self.client}: {count} of {local.rounds} rounds released"
        if not self.private:
            return f"{head}; NOT PRIVATE: without noise, or with noise from a seeded generator."
        return (
            f"{head}, epsilon = {round_up(local.epsilon(count))} (of at most "
            f"{round_up(local.epsilon(local.rounds))}), delta = {delta_words(local.delta)}, "
            f"for each of its {local.num_examples} rows."
        )


def served(folder: Path) -> list[Served]:
    """Reads the ledgers of all runs in a client's folder; none may be missing."""
    # not `rglob`, which passes over a run's folder that is a link to another disk
    runs = []
    for place in (folder, *sorted(folder.glob(f"{RUNS}/*"))):
        path = place / RELEASED_NAME
        if path.exists():
            header, messages = read_log(path)
            local = LocalPlan.from_dict(header)
            private = local.plan.private and not is_seeded(header["noise_source"])
            runs.append(Served(header["client"], local, len(messages), private))
        elif any((place / name).exists() for name in (LEDGER_NAME, MESSAGES_NAME)):
            raise LedgerError(
                f"{path} is missing, which says what the run that is there released: restore it, or "
                "take a folder of the client's own as output-dir. Nothing here knows what it spent."
            )
    return runs


def together(runs: Sequence[tuple[LocalPlan, int]], delta: float) -> float:
    """Returns epsilon of so many rounds of several plans on the same rows, by one accountant."""
    if len(relations := sorted({local.plan.relation for local, _ in runs})) > 1:
        raise PlanError(f"neighboring_relation {relations}: one guarantee has one relation.")
    parts = tuple(part for local, count in runs for part in local.plan.own_parts(count))
    try:
        return epsilon_together(parts, delta)
    except ValueError as error:
        raise PlanError(f"runs without a common account: {error}") from None


def spent(folder: str | Path) -> str:
    """Says what a client has spent, by the ledgers in its folder: a line for each run, and for all."""
    runs = served(Path(folder))
    if not runs:
        raise FileNotFoundError(f"no {RELEASED_NAME} in {folder}: the client joined no run there.")
    lines = list(map(str, runs))
    if len(runs) > 1 and all(run.private for run in runs):
        delta = max(run.local.delta for run in runs)
        total = together([(run.local, run.released) for run in runs], delta)
        lines.append(
            f"all {len(runs)} runs together, taken to be on the same rows: epsilon = {round_up(total)}, "
            f"delta = {delta_words(delta)}."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        print(spent(sys.argv[1] if len(sys.argv) > 1 else "."))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
