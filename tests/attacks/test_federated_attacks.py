"""Servers and clients of a federated run that do not keep to the rules; settings without account."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
from attacked_runs import SECRET
from federated_sides import NAMES, released, rounds_of, side, started
from tiny_runs import config, tiny_data

from hf_dpzero.federated.messages import (
    ASK,
    RELEASED_NAME,
    VALUES,
    Message,
    MessageError,
    pack,
    pack_json,
    unpack,
    unpack_json,
)
from hf_dpzero.federated.plan import PlanError, adopt, local_plan
from hf_dpzero.federated.report import federated_report, summary
from hf_dpzero.federated.run import InProcess, ServerRun
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Release
from hf_dpzero.privacy.sampling import FixedBatchesSampler, new_sampler_key
from hf_dpzero.reporting.privacy_report import REPORT_FILE


def test_samplings_that_need_one_order_for_the_whole_run_are_refused(tmp_path):
    """Drawn anew each round, fixed batches take a row several times an epoch; the account says once."""
    sampler = FixedBatchesSampler(num_examples=200, expected_batch_size=20)
    seen = [0] * 200
    for number in range(sampler.period):
        for row in sampler.batch(number, new_sampler_key()):
            seen[row] += 1
    assert max(seen) > 1
    settings = {**SECRET, "sampling": "fixed_batches"}
    with pytest.raises(PlanError, match="sampling='fixed_batches'.*poisson"):
        local_plan(config(tmp_path, **settings), 200, sampling_probability=0.1)


# ------------------------------------------------------------------ a server


def offered(server, **changes) -> bytes:
    return pack_json({"contract": {**unpack_json(server.invitation())["contract"], **changes}})


def test_a_server_cannot_choose_a_larger_epsilon_by_its_q(tmp_path):
    """With a noise multiplier, epsilon follows q: 2.1 for q = 0.1 and 23 for q = 1, over 20 rounds."""
    _, server = started(tmp_path)  # q = 12 / 60
    other = side(tmp_path / "client")
    for probability in (1.0, 0.21, 0.0, -0.5, math.pi, "0.2", True, None):
        with pytest.raises(PlanError, match="sampling_probability"):
            other.join("x", 0, tmp_path / "x", offered(server, sampling_probability=probability))
    assert not (tmp_path / "x").exists()


def test_a_client_with_fixed_noise_says_which_q_it_agrees_to(tmp_path):
    """A batch of 12 over its own 6 rows reads as q = 2, which would agree to anything."""
    data = tiny_data(6)
    _, server = started(tmp_path)  # q = 12 / 60
    own = side(tmp_path / "own", data=data, clients=1, own_rows=True)
    with pytest.raises(PlanError, match="no sampling-probability"):
        own.join("x", 0, tmp_path / "x", server.invitation())
    for most in (0.1, 0.2):
        settings = {"own_rows": True, "sampling_probability": most}
        said = side(tmp_path / f"said{most}", data=data, clients=1, **settings)
        refused = pytest.raises(PlanError, match="above this client's own")
        with refused if most < 0.2 else nullcontext():
            said.join("x", 0, tmp_path / "x", server.invitation())
    target = {"target_epsilon": 2.0, "noise_multiplier": None}
    _, server = started(tmp_path / "target", **target)
    calibrated = side(tmp_path / "calibrated", data=data, clients=1, own_rows=True, **target)
    calibrated.join("x", 0, tmp_path / "y", server.invitation())
    assert 1.9 < calibrated.clients["x"].local.epsilon(4) <= 2.0


def test_with_a_target_the_noise_follows_q_and_delta_does_not_pay_alone(tmp_path):
    target = {"target_epsilon": 2.0, "noise_multiplier": None}
    _, server = started(tmp_path, **target)
    other = side(tmp_path / "client", **target)
    with pytest.raises(PlanError, match="delta pays for it"):  # 4 rounds, delta = 1e-3
        other.join("x", 0, tmp_path / "x", offered(server, sampling_probability=2e-4))
    other.join("x", 0, tmp_path / "x", offered(server, sampling_probability=0.9))
    local = other.clients["x"].local
    assert 1.9 < local.epsilon(4) <= 2.0 and local.mechanism.noise_multiplier > 1


def test_a_contract_that_reads_in_two_ways_is_refused(tmp_path):
    _, server = started(tmp_path)
    own = json.loads(json.dumps(server.trajectory.header))
    forged = {**own, "federated": {**own["federated"], "clip": 50.0}}
    forged["federated.clip"] = own["federated"]["clip"]  # the last of two equal flat names
    with pytest.raises(PlanError):
        adopt(own, forged)
    assert adopt(own, own) == own


def test_a_server_that_comes_back_with_another_contract_gets_nothing(tmp_path):
    """Another key or q in the same folder would be another run: the ledger is bound to the first."""
    made, server = started(tmp_path, rounds=1)
    rounds_of(made, server).run()
    for change in ({"direction_key": "0" * 32}, {"sampling_probability": 0.1}):
        other = side(tmp_path / "again", rounds=1)
        folder = tmp_path / "clients" / NAMES[0]
        before = (folder / RELEASED_NAME).read_bytes()
        with pytest.raises(LedgerError):
            other.join(NAMES[0], 0, folder, offered(server, **change))
        assert (folder / RELEASED_NAME).read_bytes() == before


def test_a_round_asked_again_with_other_releases_is_refused_and_with_the_same_repeated(tmp_path):
    made, server = started(tmp_path)
    rounds_of(made, server).gather()
    client = made.clients[NAMES[0]]
    first = client.answer(made.replica, server.ask(NAMES[0]))
    assert {client.answer(made.replica, server.ask(NAMES[0])) for _ in range(3)} == {first}
    history = (Release(0, (1.0, 2.0, 3.0), 0.1),)
    one = client.answer(made.replica, pack(Message(ASK, 1, server.digest, history)))
    assert unpack(one, 3).kind == VALUES
    forged = (Release(0, (1.0, 2.0, 4.0), 0.1),)
    with pytest.raises(MessageError, match="another one than this client was told"):
        client.answer(made.replica, pack(Message(ASK, 1, server.digest, forged)))
    assert released(tmp_path) == 2
    again = client.answer(made.replica, pack(Message(ASK, 0, server.digest)))
    assert again == first and released(tmp_path) == 2


def test_an_absurd_update_is_refused_before_a_row_is_read(tmp_path):
    made, server = started(tmp_path)
    rounds_of(made, server).gather()
    history = (Release(0, (3e38, 3e38, -3e38), 1e30),)
    with pytest.raises(ValueError, match="out of range"):
        made.clients[NAMES[0]].answer(made.replica, pack(Message(ASK, 1, server.digest, history)))
    assert released(tmp_path) == 0


def test_weights_that_a_server_drove_out_of_range_release_noise_and_zeros(tmp_path, monkeypatch):
    """Weights of 1e29: losses overflow, rows with NaN count as zero, and no error tells of a row."""
    made, server = started(tmp_path, num_directions=50)
    rounds_of(made, server).gather()
    client = made.clients[NAMES[0]]
    history = (Release(0, (1.0,) * 50, 1e28),)
    never_empty = lambda plan, number: np.arange(3)  # noqa: E731
    monkeypatch.setattr(type(client.local), "rows", never_empty)
    seen = []
    measure = made.replica.differences
    made.replica.differences = lambda rows: seen.append(measure(rows)) or seen[-1]
    raw = client.answer(made.replica, pack(Message(ASK, 1, server.digest, history)))
    values = unpack(raw, 50).values
    assert not seen[0].isfinite().all()  # the rows' losses did overflow
    mechanism = client.local.mechanism
    assert not any(mechanism.clip_sum(seen[0]))
    sigma = mechanism.noise_multiplier * mechanism.clip / mechanism.expected_batch_size
    ratio = sum((v / sigma) ** 2 for v in values) / 50  # of noise alone: 1, deviation 0.2
    assert 0.3 < ratio < 2 and max(map(abs, values)) <= client.local.largest_value()


# ------------------------------------------------------------------ clients


@pytest.fixture
def opened(tmp_path):
    made, server = started(tmp_path, rounds=3)
    return made, server, json.loads(made.join("a", 0, tmp_path / "a", server.invitation()))


NAMES_TO_REFUSE = [
    "",
    "../../etc",
    "/etc",
    "a/b",
    ".hidden",
    "a\nb",
    "\ud800",
    "x" * 65,
    "\x1b[31m",
]
FIELDS_TO_REFUSE = [
    *[("num_examples", value) for value in ("many", 10**400, -1, 0, True, 3.5, float("nan"))],
    *[("delta", value) for value in ("x", float("nan"), -1e-9, 1.0, None)],
    *[
        ("noise_multiplier", value)
        for value in (1e308, 1e400, -1.0, "1", None, [1.0], float("nan"))
    ],
]


def test_what_no_honest_client_declares_is_refused_and_the_server_goes_on(opened):
    """Names that are paths or break a log, entries of wrong kinds, noise and nesting without end."""
    _, server, answer = opened
    for name in NAMES_TO_REFUSE:
        with pytest.raises(MessageError, match="name"):
            server.join(json.dumps({**answer, "name": name}).encode())
    for field, value in FIELDS_TO_REFUSE:
        with pytest.raises(MessageError, match="cannot be accounted"):
            server.join(json.dumps({**answer, field: value}).encode())
    with pytest.raises(MessageError, match="no JSON"):
        server.join(b"[" * 200_000)
    assert not server.members and summary(federated_report(server))


# ------------------------------------------------------------------ reports


def test_a_client_that_never_released_does_not_break_the_report_of_a_run_without_noise(tmp_path):
    made, server = started(tmp_path, noise_multiplier=0.0)
    rounds = rounds_of(made, server)
    rounds.gather()
    rounds.transport.gone.add(NAMES[2])
    rounds.run()
    report = federated_report(server, tmp_path / "clients")
    assert report["epsilon"] == "inf" and not report["private"]
    assert "NOT PRIVATE" in summary(report)


def test_the_report_of_all_clients_holds_at_the_largest_of_their_deltas(tmp_path):
    """Shards of 21 and 20 rows and delta = 0.1 / n: that of 20 has the larger delta."""
    data = tiny_data(41)
    made = side(tmp_path, clients=2, rounds=2, data=data, target_delta=None)
    made.recipe.to_yaml = lambda: ""
    run = ServerRun(made, tmp_path)
    run.run(InProcess(made, tmp_path, NAMES[:2]))
    deltas = [member.local.delta for member in run.server.members.values()]
    assert deltas == [0.1 / 21, 0.1 / 20]
    own = json.loads((tmp_path / REPORT_FILE).read_text(encoding="utf-8"))
    assert own["delta"] == run.report()["delta"] == 0.1 / 20
    for member in run.server.members.values():
        assert own["epsilon"] >= member.local.plan.epsilon(own["delta"], at=2)
