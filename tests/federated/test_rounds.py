"""Whole rounds in one process: weights, ledgers and epsilon, whoever comes late, leaves or crashes."""

from __future__ import annotations

import shutil
import statistics

import pytest
import torch
from federated_sides import NAMES, client_folder, interrupted, rounds_of, side, started
from tiny_runs import build, same, tiny_data, tiny_model, weights

from hf_dpzero.federated.client import RELEASED_NAME
from hf_dpzero.federated.contract import ContractError, contract_digest
from hf_dpzero.federated.ending import Start, private_report
from hf_dpzero.federated.local_plan import PlanError
from hf_dpzero.federated.message_log import MessageLog, read_count
from hf_dpzero.federated.messages import ASK, VALUES, Message, MessageError, pack, unpack
from hf_dpzero.federated.report import federated_report, summary
from hf_dpzero.federated.run import ServerRun, in_process
from hf_dpzero.federated.server import MESSAGES_NAME
from hf_dpzero.federated.setup import shard
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise


def released(folder, name=NAMES[0]) -> int:
    return read_count(client_folder(folder, name) / RELEASED_NAME)


def test_a_run_ends_in_the_weights_that_its_numbers_make(tmp_path):
    made, server = started(tmp_path)
    base = tiny_model()
    counts = []
    rounds_of(made, server).run(lambda release, count: counts.append(count))
    made.replica.catch_up(server.trajectory.releases)
    assert counts == [3] * 4 and server.round == 4
    server.close()
    replay(base, Trajectory.load(tmp_path / LEDGER_NAME))
    assert same(weights(base), weights(made.replica.trainer.model))
    assert not same(weights(base), weights(tiny_model()))
    for name in NAMES:  # a client has the same releases, from the messages alone
        own = Trajectory.load(client_folder(tmp_path, name) / LEDGER_NAME)
        assert own.releases == server.trajectory.releases[:3]


def test_the_update_is_the_mean_weighted_by_expected_batches(tmp_path):
    made, server = started(tmp_path, data=tiny_data(61))
    rounds_of(made, server).run()
    sizes = {n: server.members[n].local.num_examples for n in NAMES}
    assert sizes == {NAMES[0]: 21, NAMES[1]: 20, NAMES[2]: 20}
    for release in server.trajectory.releases:
        for k, value in enumerate(release.values):
            sent = {n: server.log.get(release.step, server.members[n].index)[k] for n in NAMES}
            mean = sum(sizes[n] * sent[n] for n in NAMES) / 61
            assert value == pytest.approx(mean, rel=1e-6, abs=1e-9)


def test_one_client_without_noise_is_a_central_run(tmp_path):
    """Limit: the same rows, no noise, one client: the releases of a `DPZeroTrainer`, bit for bit."""
    settings = {"sampling": "full_batch", "noise_multiplier": 0.0, "testing.direction_key": 9}
    data = tiny_data(24)
    central = build(
        tmp_path / "central",
        data=data,
        max_steps=4,
        num_directions=3,
        testing={"insecure_noise_seed": None, "sampler_key": None},
        **settings,
    )
    central.train()
    made, server = started(tmp_path / "fed", data=data, clients=1, **settings)
    rounds_of(made, server, NAMES[:1]).run()
    made.replica.catch_up(server.trajectory.releases)
    assert server.trajectory.releases == central.trajectory.releases
    assert same(weights(made.replica.trainer.model), weights(central.model))


@pytest.mark.false_alarm(1e-7)  # chi-square of 800 degrees: 4e-8
def test_noise_has_the_standard_deviation_of_the_plan(tmp_path):
    """Power: sigma is accepted, 2/3 and 3/2 of it are rejected (the rows' part is small beside it)."""
    data = tiny_data(12)
    settings = {"num_directions": 400, "noise_multiplier": 500.0, "clip": 2.0, "learning_rate": 0.0}
    made, server = started(tmp_path, rounds=2, clients=1, data=data, **settings)
    rounds_of(made, server, NAMES[:1]).run()
    values = [v for release in server.trajectory.releases for v in release.values]
    mechanism = server.members[NAMES[0]].local.mechanism
    sigma = 500.0 * 2.0 / mechanism.expected_batch_size  # rows add at most 24 C of 500 C
    ratio = statistics.fmean((v / sigma) ** 2 for v in values)  # deviation sqrt(2/800) = 0.05
    assert 0.75 < ratio < 1.3
    assert ratio * 1.5**2 > 1.5 and ratio / 1.5**2 < 0.65


def test_replacing_a_row_moves_a_message_by_2_radii_over_b_at_most(tmp_path):
    """Sensitivity, with noise that cancels: the same insecure seed for two data sets."""
    data = tiny_data(24)
    other = data.to_list()
    other[5]["labels"] = 1 - other[5]["labels"]
    sent = []
    settings = {
        "sampling": "full_batch",
        "testing.insecure_noise_seed": 3,
        "testing.direction_key": 2,
        "clip": 1e-3,
    }
    for i, rows in enumerate((data, type(data).from_list(other))):
        made, server = started(tmp_path / str(i), data=rows, clients=1, rounds=1, **settings)
        rounds_of(made, server, NAMES[:1]).run()
        sent.append(torch.tensor(server.log.get(0, 0), dtype=torch.float64))
    moved = float((sent[0] - sent[1]).norm()) * 24
    radius = 1e-3 / (1 + 2.0**-8)  # every row is clipped to it, and this one turns around
    assert radius < moved <= 2 * radius * (1 + 1e-4)


def test_epsilon_counts_what_a_client_released(tmp_path):
    made, server = started(tmp_path, rounds=6)
    rounds = rounds_of(made, server)
    gone = {2: NAMES[0], 4: NAMES[1]}

    def leave(release, count):
        if name := gone.get(release.step + 1):
            rounds.transport.gone.add(name)

    rounds.run(leave)
    report = federated_report(server, tmp_path / "clients")
    rows = {row["client"]: row for row in report["clients"]}
    assert [rows[n]["released"] for n in NAMES] == [2, 4, 6]
    assert [rows[n]["applied"] for n in NAMES] == [2, 4, 6]
    for name, count in zip(NAMES, (2, 4, 6), strict=True):
        local = server.members[name].local
        assert rows[name]["epsilon"] == local.plan.epsilon(1e-3, at=count)
        assert rows[name]["planned_epsilon"] == local.plan.epsilon(1e-3)
    assert report["epsilon"] == rows[NAMES[2]]["epsilon"] and report["private"]
    assert "0 refused" not in summary(report) and "NOT PRIVATE" not in summary(report)
    # without the clients' ledgers, the bound is of all rounds that were opened
    above = federated_report(server)["clients"]
    assert all(row["epsilon"] == rows[NAMES[2]]["epsilon"] for row in above)


def test_a_late_joiner_catches_up_by_the_numbers_alone(tmp_path):
    made, server = started(tmp_path, rounds=5)
    rounds = rounds_of(made, server)
    rounds.transport.gone.add(NAMES[2])
    bytes_before = []

    def arrive(release, count):
        if release.step == 2:
            rounds.transport.gone.clear()
        bytes_before.append(count)

    rounds.run(arrive)
    member = server.members[NAMES[2]]
    assert bytes_before == [2, 2, 2, 3, 3] and member.joined == 3
    assert released(tmp_path, NAMES[2]) == 2
    down = [36 + 3 * (8 + 12), 36 + (8 + 12)]  # three missed releases of 3 values, then one
    assert member.sent == sum(down)
    assert federated_report(server)["clients"][2]["opened"] == 2


def test_a_silent_client_costs_the_head_of_a_message(tmp_path):
    """Gone without a word, and still there for the transport: no growing history is sent to it."""
    made, server = started(tmp_path, rounds=8)
    rounds = rounds_of(made, server)
    transport = rounds.transport
    exchange, silent = transport.exchange, set()

    def some_answer(kind, payloads):
        return exchange(kind, {a: p for a, p in payloads.items() if a not in silent})

    transport.exchange = some_answer
    sent = []

    def note(release, count):
        sent.append(server.members[NAMES[0]].sent)
        if release.step == 1:
            silent.add(NAMES[0])
        if release.step == 6:
            silent.clear()

    rounds.run(note)
    down = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    head, one = 36, 8 + 12  # a release of three values
    # the first message that is lost still brings a release; then heads; then what it missed, in two
    assert down == [head, head + one, head + one, *[head] * 4, head + (head + 6 * one)]
    assert released(tmp_path) == 3 and server.applied(NAMES[0]) == 3
    report = federated_report(server, tmp_path / "clients")
    assert report["payload_bytes_of_a_client_and_round"] <= 100 + 16 * 3


def test_a_client_that_comes_back_under_another_address_is_let_in_once_the_old_one_is_silent(
    tmp_path,
):
    """A restarted SuperNode may have a new id while its old one is still listed as connected."""
    made, server = started(tmp_path, rounds=6)
    rounds = rounds_of(made, server)
    transport = rounds.transport
    exchange, present = transport.exchange, transport.present
    new, silent = "new-address", set()

    def carried(kind, payloads):
        if kind == "round" and new in payloads:
            payloads = {NAMES[0] if a == new else a: p for a, p in payloads.items()}
            return {new if a == NAMES[0] else a: p for a, p in exchange(kind, payloads).items()}
        return exchange(kind, {a: p for a, p in payloads.items() if a not in silent})

    transport.exchange = carried
    transport.present = lambda: [*present(), new] if server.round >= 1 else present()
    join = transport.join
    transport.join = lambda address, raw: join(NAMES[0] if address == new else address, raw)
    counts = []

    def note(release, count):
        counts.append(count)
        if release.step == 1:  # it was declined in this round: the old address answered
            assert "the name of client-000" in rounds.declined[new]
            silent.add(NAMES[0])

    rounds.run(note)
    assert counts == [3, 3, 2, 3, 3, 3]  # out for the round in which the old address fell silent
    assert rounds.names[new] == NAMES[0] and NAMES[0] not in rounds.names and not rounds.declined
    assert released(tmp_path) == 5


def test_a_server_that_resumes_asks_what_its_clients_know(tmp_path):
    made, server = started(tmp_path)
    rounds = rounds_of(made, server)

    def stop(release, count):
        if release.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.run(stop)
    before = {n: server.members[n].sent for n in NAMES}
    server.close()
    made, server = started(tmp_path, resume=True)
    rounds_of(made, server).run()
    head, one = 36, 8 + 12
    for name in NAMES:  # asked, told the one release it lacks, and told one in the last round
        assert server.members[name].sent - before[name] == head + 2 * (head + one)
        assert released(tmp_path, name) == server.applied(name) == 4


def test_a_killed_server_goes_on_from_its_ledgers(tmp_path):
    straight, first = started(
        tmp_path / "a",
        testing={"direction_key": 4, "insecure_noise_seed": 3},
        sampling="full_batch",
    )
    rounds_of(straight, first).run()
    settings = {
        "testing.direction_key": 4,
        "testing.insecure_noise_seed": 3,
        "sampling": "full_batch",
    }
    made, server = started(tmp_path / "b", **settings)

    class Killed(Exception):
        pass

    def kill(release, count):
        if release.step == 1:
            raise Killed

    with pytest.raises(Killed):
        rounds_of(made, server).run(kill)
    server.close()
    made, server = started(tmp_path / "b", resume=True, **settings)
    assert server.round == 2 and made.replica.round == 2
    rounds_of(made, server).run()
    assert server.trajectory.releases == first.trajectory.releases
    assert released(tmp_path / "b") == 4
    with pytest.raises(LedgerError, match="earlier run"):
        server.close()
        started(tmp_path / "b", **settings)


def test_evaluations_of_a_killed_server_are_not_lost(tmp_path):
    def run_of(resume=False):
        made = side(
            tmp_path / "made",
            eval_strategy="steps",
            eval_steps=1,
        )
        made.recipe.to_yaml = lambda: ""
        run = ServerRun(made, tmp_path, resume=resume)
        return run, in_process(made, tmp_path, NAMES)

    run, transport = run_of()
    interrupted(run, transport, at=2)
    run.server.close()
    again, transport = run_of(resume=True)
    again.run(transport)
    assert [entry["round"] for entry in again.report()["evaluations"]] == [0, 1, 2, 3, 4]
    assert again.evaluations[:3] == run.evaluations


def test_a_release_that_did_not_arrive_is_sent_again_and_not_drawn_again(tmp_path):
    """A client killed between its ledger and the network."""
    made, server = started(tmp_path, rounds=3)
    rounds = rounds_of(made, server)
    rounds._gather()
    client, ask = made.clients[NAMES[0]], server.ask(NAMES[0])
    lost = client.answer(made.replica, ask)
    made.clients.pop(NAMES[0])  # another process, which reads the folder
    again = made.client(NAMES[0], 0, client_folder(tmp_path, NAMES[0]))
    assert again is not client and again.answer(made.replica, ask) == lost
    assert released(tmp_path) == 1
    rounds.run()
    assert released(tmp_path) == 3
    assert server.log.get(0, 0) == unpack(lost, 3).values


def test_a_client_releases_no_more_rounds_than_its_plan(tmp_path):
    made, server = started(tmp_path, rounds=2)
    rounds_of(made, server).run()
    client = made.clients[NAMES[0]]
    for number in (0, 1):
        assert client._ledger().get(number, 0) is not None
    server.trajectory.header["federated"]["rounds"] = 9  # a server that asks on
    ask = server.ask(NAMES[0])
    kind = unpack(client.answer(made.replica, ask), 3).kind
    assert kind != VALUES and released(tmp_path) == 2


def test_an_old_round_is_not_released_later(tmp_path):
    """Asked for round 0 after round 1, a client that missed round 0 says no."""
    made, server = started(tmp_path)
    rounds = rounds_of(made, server)
    rounds.transport.gone.add(NAMES[0])

    def note(release, count):
        rounds.transport.gone.clear()

    rounds._gather()
    made.join(NAMES[0], 0, client_folder(tmp_path, NAMES[0]), server.invitation())
    old = pack(Message(ASK, 0, server.digest))
    rounds.run(note)
    kind = unpack(made.clients[NAMES[0]].answer(made.replica, old), 3).kind
    assert kind != VALUES and released(tmp_path) == 3


# ------------------------------------------------------------------ refusals of the server


@pytest.fixture
def opened(tmp_path):
    made, server = started(tmp_path, rounds=3)
    rounds = rounds_of(made, server)
    rounds._gather()
    return made, server


def honest(made, server, name=NAMES[0]) -> bytes:
    return made.clients[name].answer(made.replica, server.ask(name))


def test_replayed_messages_are_refused(opened):
    made, server = opened
    first = honest(made, server)
    assert server.take(NAMES[0], first)
    with pytest.raises(MessageError, match="replayed: client client-000 has sent round 0"):
        server.take(NAMES[0], first)
    server.close_round(0.1)
    with pytest.raises(MessageError, match="replayed or late: it is of round 0, and round 1"):
        server.take(NAMES[0], first)
    row = federated_report(server)["clients"][0]
    assert row["refused"] == {"replayed": 1, "replayed or late": 1} and row["applied"] == 1


def test_broken_foreign_and_unknown_messages_are_refused(opened):
    made, server = opened
    good = honest(made, server)
    most = server.members[NAMES[0]].local.largest_value()

    def forged(values, digest=server.digest, number=0):
        return pack(Message(VALUES, number, digest, values=values))

    for raw, why in [
        (b"nonsense", "malformed"),
        (good[:-1] + bytes([good[-1] ^ 1]), "checksum"),
        (forged((0.0, 0.0)), "num_directions=3"),
        (forged((0.0, 0.0, float("nan"))), "not finite"),
        (forged((0.0, 0.0, float("inf"))), "not finite"),
        (forged((0.0, 2 * most, 0.0)), "out of range"),
        (forged((0.0, 0.0, 0.0), bytes(16)), "another contract"),
        (forged((0.0, 0.0, 0.0), number=2), "round 2, and round 0 is open"),
    ]:
        with pytest.raises(MessageError, match=why):
            server.take(NAMES[0], raw)
    with pytest.raises(MessageError, match="unknown client 'mallory'"):
        server.take("mallory", good)
    assert federated_report(server)["strangers_refused"] == {"mallory": 1}
    assert sum(federated_report(server)["clients"][0]["refused"].values()) == 8
    assert server.take(NAMES[0], good)  # and the round goes on
    assert server.close_round(0.1).values == pytest.approx(unpack(good, 3).values)


def test_two_releases_for_one_round_are_noticed(opened, tmp_path):
    """A client whose ledger was rolled back draws again: the server saw the first values."""
    made, server = opened
    assert server.take(NAMES[0], honest(made, server))
    server._taken.clear()  # the server is started again before the round is closed
    shutil.rmtree(client_folder(tmp_path, NAMES[0]))
    made.clients.clear()
    made.join(NAMES[0], 0, client_folder(tmp_path, NAMES[0]), server.invitation())
    with pytest.raises(MessageError, match="two releases.*rolled back"):
        server.take(NAMES[0], honest(made, server))


def test_a_round_without_answers_changes_nothing(opened):
    _, server = opened
    with pytest.raises(LedgerError, match="no client answered"):
        server.close_round(0.1)
    assert server.round == 0


def test_a_run_without_clients_says_so(tmp_path):
    made, server = started(tmp_path)
    rounds = rounds_of(made, server, min_clients=2)
    rounds.transport.gone.update(NAMES[:2])
    with pytest.raises(LedgerError, match="1 clients are there and min_clients=2"):
        rounds.run()


# ------------------------------------------------------------------ refusals at joining


def test_a_client_with_another_base_or_plan_does_not_join(tmp_path):
    _, server = started(tmp_path / "server")
    others = {
        "base_model_digest": side(tmp_path / "a"),
        "clip": side(tmp_path / "b", clip=6.0),
        "rounds": side(tmp_path / "c", rounds=7),
        "num_directions": side(tmp_path / "d", num_directions=4),
        "smoothing": side(tmp_path / "e", smoothing=2e-3),
    }
    with torch.no_grad():
        next(others["base_model_digest"].replica.trainer.model.parameters()).add_(1.0)
    for what, other in others.items():
        with pytest.raises(ContractError, match=f"another one.*{what}"):
            other.join("x", 0, tmp_path / "x", server.invitation())
    assert not (tmp_path / "x").exists()


def test_a_declared_plan_is_checked_by_the_server(tmp_path):
    import json

    made, server = started(tmp_path)
    answer = made.join("a", 0, tmp_path / "a", server.invitation())
    for path, value in [("clip", 50.0), ("num_directions", 2)]:
        changed = json.loads(answer)
        changed["plan"]["plan"]["mechanism"][path] = value
        with pytest.raises(ContractError, match=path):
            server.join(json.dumps(changed).encode())
    for key in ("name", "plan", "contract_digest"):
        with pytest.raises(MessageError, match="without its plan"):
            server.join(
                json.dumps({k: v for k, v in json.loads(answer).items() if k != key}).encode()
            )
    server.join(answer)
    changed = json.loads(answer)
    changed["plan"]["plan"]["mechanism"]["noise_multiplier"] = 9.0
    with pytest.raises(ContractError, match="another plan than it joined with"):
        server.join(json.dumps(changed).encode())


def test_more_clients_than_rows_are_refused():
    with pytest.raises(ValueError, match="1 of them would be empty"):
        shard(4, 5, 0)
    assert [len(shard(7, 3, c)) for c in range(3)] == [3, 2, 2]
    assert sorted(i for c in range(3) for i in shard(7, 3, c)) == list(range(7))


def test_a_participation_of_once(tmp_path):
    made, server = started(
        tmp_path,
        participation="once",
        neighboring_relation="replace_one",
        rounds=4,
        num_directions=2,
    )
    rounds_of(made, server).run()
    (row, *_) = federated_report(server, tmp_path / "clients")["clients"]
    local = server.members[NAMES[0]].local
    assert row["released"] == 4 and row["epsilon"] == local.plan.epsilon(1e-3)
    assert local.plan.steps == 1 and row["expected_batch_size"] == 5


ONCE = {"participation": "once", "neighboring_relation": "replace_one"}


def test_rows_that_come_once_keep_their_order_from_start_to_start(tmp_path):
    """In another order, a row of block 0 could come again in block 1."""
    data = tiny_data(24)
    made, server = started(tmp_path, data=data, clients=1, **ONCE)
    name, folder = NAMES[0], client_folder(tmp_path, NAMES[0])
    made.join(name, 0, folder, server.invitation())
    secret = folder / "_private" / "rows.json"
    assert secret.stat().st_mode & 0o077 == 0
    again = side(tmp_path / "again", data=data, clients=1, **ONCE)
    again.join(name, 0, folder, server.invitation())
    turned = type(data).from_list(data.to_list()[::-1])
    other = side(tmp_path / "other", data=turned, clients=1, **ONCE)
    with pytest.raises(PlanError, match="could take part twice"):
        other.join(name, 0, folder, server.invitation())
    other.clients.clear()
    with pytest.raises(PlanError, match="could take part twice"):
        other.client(name, 0, folder)  # another process, asked for a round
    other.join(name, 0, tmp_path / "new", server.invitation())
    drawn = side(tmp_path / "drawn", data=turned, clients=1)  # drawn afresh, the order is nothing
    _, open_server = started(tmp_path / "sampled", data=data, clients=1)
    drawn.join(name, 0, tmp_path / "x", open_server.invitation())
    assert not (tmp_path / "x" / "_private").exists()


def test_an_insecure_seed_is_reported(tmp_path):
    made, server = started(tmp_path, testing={"insecure_noise_seed": 3})
    rounds_of(made, server).run()
    report = federated_report(server)
    assert not report["private"] and "seeded" in report["clients"][0]["statement"]
    local, config = server.members[NAMES[0]].local, made.recipe.training
    start = Start("not_compared", [])
    own = private_report(local, config, 4, InsecureSeededNoise(3), start)
    assert not own.private
    own = private_report(local, config, 3, SecureNoise(), start)
    assert own.private and own.steps == 3 and own.epsilon == local.epsilon(3)


# ------------------------------------------------------------------ ledgers


def test_a_message_log_keeps_whole_records(tmp_path):
    path = tmp_path / MESSAGES_NAME
    header = {"contract_digest": "ab", "num_values": 2}
    with MessageLog(path, header) as log:
        log.append(0, 1, (1.5, -2.0))
        log.append(4, 0, (0.5, 3.0))
        with pytest.raises(LedgerError, match="has a message of client 1 for round 0"):
            log.append(0, 1, (1.5, -2.0))
        with pytest.raises(LedgerError, match="another run"):
            MessageLog(path, header)
    raw = path.read_bytes()
    path.write_bytes(raw[:-3])  # cut short by a crash
    with MessageLog(path, header) as log:
        assert log.messages == {(0, 1): (1.5, -2.0)} and log.last_round() == 0
    with pytest.raises(LedgerError, match="contract_digest differ"):
        MessageLog(path, {**header, "contract_digest": "cd"})
    path.write_bytes(raw[:-24] + bytes(24))  # made longer, and never written: a loss of power
    with MessageLog(path, header) as log:
        assert log.messages == {(0, 1): (1.5, -2.0)}
    path.write_bytes(raw[:-10] + b"\x07" + raw[-9:])
    with pytest.raises(LedgerError, match="record 1 is corrupt"):
        MessageLog(path, header)


def test_a_contract_is_named_by_all_but_versions(tmp_path):
    _, server = started(tmp_path)
    header = dict(server.trajectory.header)
    assert contract_digest({**header, "versions": {}}) == server.digest
    assert contract_digest({**header, "smoothing": 2.0}) != server.digest
    assert contract_digest({**header, "direction_key": "0" * 32}) != server.digest
