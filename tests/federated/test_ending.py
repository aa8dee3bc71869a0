"""The folder of a finished run: report and trajectory agree, so that it can be checked and pushed."""

from __future__ import annotations

import json

import pytest
from federated_sides import NAMES, interrupted, side
from tiny_runs import tiny_model

from hf_dpzero.federated.run import ServerRun, in_process
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.privacy_report import REPORT_FILE
from hf_dpzero.reporting.provenance import Origin, trained_as
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.reporting.wording import counted_steps


def ran(folder, gone: tuple[int, int] | None = None, **settings) -> ServerRun:
    """A whole run; with `gone`, the client of that number is away from that round on."""
    run = ServerRun(side(folder / "made", **settings), folder)
    transport = in_process(run.side, folder, NAMES)
    after = run._after

    def _after(release, count):
        after(release, count)
        if gone is not None and run.server.round == gone[1]:
            transport.gone.add(NAMES[gone[0]])

    run._after = _after
    run.run(transport)
    run.close()
    return run


@pytest.mark.parametrize(
    "settings",
    [
        {"target_epsilon": 3.0, "noise_multiplier": None},
        {"noise_multiplier": 2.0},
        {
            "participation": "once",
            "neighboring_relation": "replace_one",
            "target_epsilon": 3.0,
            "noise_multiplier": None,
        },
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
    shipped = build_hub_folder(tmp_path, tmp_path / "hub")
    names = {path.name for path in shipped.iterdir()}
    assert {"README.md", REPORT_FILE, SHIPPING_NAME} <= names
    assert not names & {"clients", "clients.json", "messages.ledger", "federated_report.json"}


def test_a_report_of_another_run_is_noticed(tmp_path):
    ran(tmp_path / "a", noise_multiplier=2.0)
    ran(tmp_path / "b", noise_multiplier=3.0)
    other = (tmp_path / "b" / SHIPPING_NAME).read_bytes()
    (tmp_path / "a" / SHIPPING_NAME).write_bytes(other)
    with pytest.raises(ValueError, match="noise_multiplier"):
        report_of(tmp_path / "a")


def test_steps_are_those_of_the_costliest_client(tmp_path):
    """All three miss the last round or more: nobody is charged for four."""
    run = ran(tmp_path, gone=(1, 2), noise_multiplier=2.0)
    rows = {row["client"]: row["released"] for row in run.report()["clients"]}
    assert rows == {NAMES[0]: 4, NAMES[1]: 2, NAMES[2]: 4}
    assert report_of(tmp_path).steps == 4
    assert (
        counted_steps({"federated": {"steps": 2}, "plan": {}}, 4) == 2 and counted_steps({}, 4) == 4
    )


def test_a_run_that_did_not_end_says_so(tmp_path):
    made, target = side(tmp_path / "made"), tmp_path / "run"
    run = ServerRun(made, target)
    interrupted(run, in_process(made, target, NAMES), at=2)
    run.close()
    with pytest.raises(ValueError, match="did not end"):
        counted_steps(Trajectory.load(target / SHIPPING_NAME).header, 2)


def test_a_server_does_not_start_from_trained_weights(tmp_path):
    made = side(tmp_path / "made")
    source = tmp_path / "base"
    tiny_model().save_pretrained(source)
    model = made.replica.trainer.model
    model.config._name_or_path = str(source)
    weight = model.classifier.weight
    weight.data.add_(1.0)
    with pytest.raises(ValueError, match="base"):
        ServerRun(made, tmp_path / "run")
