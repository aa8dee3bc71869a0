"""What the folder of a finished run holds for others: weights, and the report and plan they rest on.

A row is one client's, and all that the run put out follows from the messages. So the largest of the
clients' epsilons, all at one delta, holds for every row of all of them together. The delta is the
largest of theirs: a smaller client's default delta is larger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.federated.local_plan import LocalPlan
from hf_dpzero.federated.server import RoundServer
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.privacy.noise import InsecureSeededNoise, NoiseSource, SecureNoise, is_seeded
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.verification import bound_to
from hf_dpzero.reporting.wording import federated_caveats
from hf_dpzero.run_folder.base_model import check_start


@dataclass(frozen=True)
class Start:
    """What is known of the weights that a run starts from; a report's entries of these names."""

    base_weights: str
    earlier_runs: list[dict[str, Any]]

    @classmethod
    def of(cls, trainer: Any) -> Start:
        """Before the first round.

        Args:
          trainer: of the run, on its base weights.

        Raises:
          ValueError: weights that were trained before, and that nobody declared public.
        """
        words, _ = check_start(trainer.model, trainer.args.base_is_public)
        return cls(words, trainer.earlier_runs)


@dataclass(frozen=True)
class Costliest:
    """The client with the largest epsilon.

    Attributes:
      local: its plan, at the run's delta.
      released: rounds that it is charged.
      noise: as it said where its noise comes from.
    """

    local: LocalPlan
    released: int
    noise: NoiseSource

    @classmethod
    def of(cls, server: RoundServer, report: Mapping[str, Any]) -> Costliest:
        """Picks it.

        Args:
          server: with its members.
          report: of `federated_report`.
        """
        found = []
        for row in report["clients"]:
            member = server.members[row["client"]]
            local = dataclasses.replace(member.local, delta=report["delta"])
            count = row["opened"] if row["released"] is None else row["released"]
            noise = InsecureSeededNoise(0) if is_seeded(member.noise_source) else SecureNoise()
            found.append((not row["private"], local.epsilon(count), cls(local, count, noise)))
        return max(found, key=lambda entry: entry[:2])[2]


def private_report(
    local: LocalPlan, config: Any, released: int, noise: NoiseSource, start: Start
) -> PrivacyReport:
    """A client's privacy report, as every run has it.

    Args:
      local: its plan.
      config: the recipe's `DPZeroConfig`; its target_epsilon is the client's, or None.
      released: rounds in its ledger.
      noise: where its noise came from.
      start: the base.

    Returns:
      The report; its steps are the releases that a row may be part of.
    """
    return PrivacyReport.from_run(
        local.plan,
        delta=local.delta,
        target_epsilon=config.target_epsilon,
        steps_completed=local.steps_of(released),
        noise=noise,
        direction=config.direction,
        privacy_unit=config.privacy_unit,
        base_weights=start.base_weights,
        earlier_runs=start.earlier_runs,
    ).with_tuning(config.tuning, local.plan)


def save_weights(
    server: RoundServer,
    trainer: Any,
    config: Any,
    report: Mapping[str, Any],
    start: Start,
) -> None:
    """Model, tokenizer, and report and trajectory that agree, so that they can be checked and pushed.

    Args:
      server: its last round is closed.
      trainer: at the last weights.
      config: as in `private_report`.
      report: of `federated_report`.
      start: the base.
    """
    folder: Path = server.folder
    trainer.model.save_pretrained(folder)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    found = Costliest.of(server, report)
    own = private_report(found.local, config, found.released, found.noise, start)
    header = _header(server, own, found, len(report["clients"]))
    Trajectory(header, server.trajectory.releases).to_safetensors(folder / SHIPPING_NAME)
    words = [own.caveats[0], *federated_caveats(header), *own.caveats[1:]]
    own = dataclasses.replace(own, caveats=words)
    bound_to(own, folder).save(folder / REPORT_FILE)


def _header(
    server: RoundServer, own: PrivacyReport, found: Costliest, clients: int
) -> dict[str, Any]:
    header = dict(server.trajectory.header)
    return {
        **header,
        "plan": found.local.plan.to_dict(),
        "target_epsilon": own.target_epsilon,
        "target_delta": own.target_delta,
        "tuning": own.tuning,
        "noise_source": found.noise.name,
        "privacy_unit": own.privacy_unit,
        "sampler_key_is_secret": True,  # each client draws its own and nobody keeps it
        "log_private_diagnostics": False,
        "base_weights": own.base_weights,
        "earlier_runs": own.earlier_runs,
        "federated": {**header["federated"], "clients": clients, "steps": own.steps},
    }
