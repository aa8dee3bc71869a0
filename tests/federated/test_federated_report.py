"""What a run leaves: reports and trajectory that agree, a client's own cost, and who was left out."""

from __future__ import annotations

import json
import logging

import pytest
from federated_sides import NAMES, client_folder, interrupted, released, rounds_of, side, started
from tiny_runs import tiny_model

from hf_dpzero.federated.report import federated_report, spent, summary
from hf_dpzero.federated.run import InProcess, ServerRun
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.privacy_report import REPORT_FILE
from hf_dpzero.reporting.provenance import Origin, trained_as
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.reporting.wording import counted_steps, round_up


def ran(folder, leaves: int | None = None, **settings) -> ServerRun:
    """A whole run; the second client is away from the round `leaves` on."""
    run = ServerRun(side(folder / "made", **settings), folder)
    transport = InProcess(run.side, folder, NAMES)
    exchange = transport.exchange

    def leaving(kind, payloads):
        if run.server.round == leaves:
            transport.gone.add(NAMES[1])
        return exchange(kind, payloads)

    transport.exchange = leaving
    run.run(transport)
    run.close()
    return run


TARGET = {"target_epsilon": 3.0, "noise_multiplier": None}


@pytest.mark.parametrize(
    "settings",
    [
        TARGET,
        {"noise_multiplier": 2.0},
    ],
)
def test_a_finished_run_can_be_verified_and_shipped(tmp_path, settings):
    run = ran(tmp_path, **settings)
    report = report_of(tmp_path)
    stated = json.loads((tmp_path / REPORT_FILE).read_text())
    assert report.epsilon == pytest.approx(run.report()["epsilon"]) and report.private
    assert report.caveats == stated["caveats"]  # nothing in words is lost when derived again
    assert any("largest epsilon, one of 3" in text for text in report.caveats)
    assert any("against the server" in text for text in report.caveats)
    assert "differentially private" in trained_as(Origin.of(str(tmp_path), None))
    names = {path.name for path in build_hub_folder(tmp_path, tmp_path / "hub").iterdir()}
    assert {"README.md", REPORT_FILE, SHIPPING_NAME} <= names
    assert not names & {"clients", "clients.json", "messages.ledger", "federated_report.json"}


def test_a_report_is_of_the_costliest_client_and_of_its_own_run(tmp_path):
    """One misses the last two rounds: nobody is charged for more than was released."""
    run = ran(tmp_path / "a", leaves=2, noise_multiplier=2.0)
    rows = {row["client"]: row["released"] for row in run.report()["clients"]}
    assert rows == {NAMES[0]: 4, NAMES[1]: 2, NAMES[2]: 4}
    assert report_of(tmp_path / "a").steps == 4
    assert (
        counted_steps({"federated": {"steps": 2}, "plan": {}}, 4) == 2 and counted_steps({}, 4) == 4
    )
    path = tmp_path / "a" / SHIPPING_NAME
    shipped = Trajectory.load(path)
    shipped.header["plan"]["mechanism"]["noise_multiplier"] = 3.0
    shipped.to_safetensors(path)
    with pytest.raises(ValueError, match="noise_multiplier"):
        report_of(tmp_path / "a")


def test_a_run_that_did_not_end_says_so_and_loses_no_evaluation(tmp_path):
    def run_of(resume=False):
        made = side(tmp_path / "made", eval_strategy="steps", eval_steps=1)
        run = ServerRun(made, tmp_path, resume=resume)
        return run, InProcess(made, tmp_path, NAMES)

    run, transport = run_of()
    interrupted(run, transport, at=2)
    run.close()
    with pytest.raises(ValueError, match="did not end"):
        counted_steps(Trajectory.load(tmp_path / SHIPPING_NAME).header, 2)
    again, transport = run_of(resume=True)
    again.run(transport)
    assert [entry["round"] for entry in again.report()["evaluations"]] == [0, 1, 2, 3, 4]
    assert again.evaluations[:3] == run.evaluations


def test_a_server_does_not_start_from_trained_weights(tmp_path):
    made = side(tmp_path / "made")
    tiny_model().save_pretrained(tmp_path / "base")
    model = made.replica.trainer.model
    model.config._name_or_path = str(tmp_path / "base")
    model.classifier.weight.data.add_(1.0)
    with pytest.raises(ValueError, match="base"):
        ServerRun(made, tmp_path / "run")


def test_seeded_noise_is_private_in_no_report(tmp_path):
    run = ran(tmp_path, testing={"insecure_noise_seed": 3})
    (row, *_) = run.report()["clients"]
    assert not run.report()["private"] and not row["private"]
    assert not report_of(tmp_path).private and "seeded" in summary(run.report())
    assert "NOT PRIVATE" in spent(client_folder(tmp_path))


def test_epsilon_counts_what_a_client_released(tmp_path):
    made, server = started(tmp_path, rounds=6)
    rounds = rounds_of(made, server)
    gone = {2: NAMES[0], 4: NAMES[1]}
    rounds.run(lambda release, count: rounds.transport.gone.add(gone.get(release.step + 1)))
    report = federated_report(server, tmp_path / "clients")
    rows = {row["client"]: row for row in report["clients"]}
    for name, count in zip(NAMES, (2, 4, 6), strict=True):
        plan, row = server.members[name].local.plan, rows[name]
        assert row["released"] == row["applied"] == released(tmp_path, name) == count
        assert row["epsilon"] == plan.epsilon(1e-3, at=count)
        assert row["planned_epsilon"] == plan.epsilon(1e-3)
        words = spent(client_folder(tmp_path, name))  # without model, rows and server
        assert f"{count} of 6 rounds released, epsilon = {round_up(row['epsilon'])} (of" in words
    assert report["epsilon"] == rows[NAMES[2]]["epsilon"] and report["private"]
    assert "0 refused" not in summary(report) and "NOT PRIVATE" not in summary(report)
    # without the clients' ledgers, the bound is of all rounds that were opened
    above = federated_report(server)["clients"]
    assert all(row["epsilon"] == rows[NAMES[2]]["epsilon"] for row in above)
    with pytest.raises(FileNotFoundError, match="joined no run"):
        spent(tmp_path / "none")


def test_who_is_left_out_is_named_on_both_sides(tmp_path, caplog):
    made, server = started(tmp_path / "server", clip=2.0)
    other = side(tmp_path / "other", clip=1.0)
    running = rounds_of(made, server)

    answer = made.answer

    def answered(kind, raw, name, *own):
        if name == NAMES[0]:
            return other.answer(kind, raw, "south", 0, tmp_path / "south")
        if name == NAMES[2]:
            raise OSError("no such file")
        return answer(kind, raw, name, *own)

    made.answer = answered
    with caplog.at_level(logging.INFO):
        running.run()
    assert "south does not take part" in caplog.text and "clip: 2.0 there" in caplog.text
    assert f"{NAMES[1]} answers the invitation: 20 rows" in caplog.text
    declined, silent = running.left_out()
    assert declined.startswith(f"{NAMES[0]}: the client declined") and "clip" in declined
    assert silent == f"{NAMES[2]}: gave no answer to 3 invitations; see its log"
    shown = summary({**federated_report(server), "left_out": running.left_out()})
    assert "left out    client-000: the client declined" in shown
    assert "?: its ledger is on its own machine" in shown and "each row of its client" in shown
