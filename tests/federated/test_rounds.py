"""Whole rounds in one process: weights, ledgers and messages, whoever comes late, leaves or crashes."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import replace

import pytest
import torch
from federated_sides import NAMES, client_folder, interrupted, released, rounds_of, side, started
from tiny_runs import build, same, tiny_data, tiny_model, weights

from hf_dpzero.federated.messages import ASK, VALUES, Message, MessageError, pack, unpack
from hf_dpzero.federated.plan import SMALLEST_CLIP, PlanError, contract_digest
from hf_dpzero.federated.report import federated_report
from hf_dpzero.federated.run import InProcess, ServerRun, chosen_rate
from hf_dpzero.federated.server import shares
from hf_dpzero.federated.setup import shard
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import directions_of, replay
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.objectives.losses import PaddedMicrobatch

ONE = NAMES[:1]
HEAD, RELEASE = 36, 8 + 12  # bytes of a message's head, and of a release of three values


def ran(folder, names=NAMES, **settings):
    """Side and server after all rounds."""
    made, server = started(folder, clients=len(names), **settings)
    rounds_of(made, server, names).run()
    made.replica.catch_up(server.trajectory.releases)
    return made, server


def test_a_run_ends_in_the_weights_that_its_numbers_make(tmp_path):
    shards = [shard(61, 3, client).tolist() for client in range(3)]
    assert sorted(row for rows in shards for row in rows) == list(range(61))
    with pytest.raises(ValueError, match="1 of them would be empty"):
        shard(4, 5, 0)
    made, server = started(tmp_path, data=tiny_data(61))
    counts = []
    rounds_of(made, server).run(lambda release, count: counts.append(count))
    made.replica.catch_up(server.trajectory.releases)
    assert counts == [3] * 4 and server.round == 4
    base = tiny_model()
    server.close()
    replay(base, Trajectory.load(tmp_path / LEDGER_NAME))
    assert same(weights(base), weights(made.replica.trainer.model))
    assert not same(weights(base), weights(tiny_model()))
    for name in NAMES:  # a client has the same releases, from the messages alone
        own = Trajectory.load(client_folder(tmp_path, name) / LEDGER_NAME)
        assert own.releases == server.trajectory.releases[:3]
    # the update is the mean, weighted by expected batches
    sizes = {n: server.members[n].local.num_examples for n in NAMES}
    assert list(sizes.values()) == [21, 20, 20]
    for release in server.trajectory.releases:
        for k, value in enumerate(release.values):
            sent = {n: server.log.messages[release.step, i][k] for i, n in enumerate(NAMES)}
            mean = sum(sizes[n] * sent[n] for n in NAMES) / 61
            assert value == pytest.approx(mean, rel=1e-6, abs=1e-9)


def test_one_client_without_noise_is_a_central_run(tmp_path):
    """Limit: the same rows, no noise, one client: the releases of a `DPZeroTrainer`, bit for bit."""
    settings = {"sampling": "full_batch", "noise_multiplier": 0.0, "testing.direction_key": 9}
    settings |= {"num_directions": 3, "data": tiny_data(24)}
    own = {"testing.insecure_noise_seed": None, "testing.sampler_key": None, "max_steps": 4}
    central = build(tmp_path / "central", **own, **settings)
    central.train()
    made, server = ran(tmp_path / "fed", ONE, **settings)
    assert server.trajectory.releases == central.trajectory.releases
    assert same(weights(made.replica.trainer.model), weights(central.model))


@pytest.mark.false_alarm(1e-7)  # chi-square of 800 degrees: 4e-8
def test_noise_has_the_standard_deviation_of_the_plan(tmp_path):
    """Power: sigma is accepted, 2/3 and 3/2 of it are rejected (the rows' part is small beside it)."""
    settings = {"num_directions": 400, "noise_multiplier": 500.0, "clip": 2.0, "learning_rate": 0.0}
    _, server = ran(tmp_path, ONE, rounds=2, data=tiny_data(12), **settings)
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
    }
    for i, rows in enumerate((data, type(data).from_list(other))):
        _, server = ran(tmp_path / str(i), ONE, data=rows, rounds=1, clip=1e-3, **settings)
        sent.append(torch.tensor(server.log.messages[0, 0], dtype=torch.float64))
    moved = float((sent[0] - sent[1]).norm()) * 24
    radius = 1e-3 / (1 + 2.0**-8)  # every row is clipped to it, and this one turns around
    assert radius < moved <= 2 * radius * (1 + 1e-4)


def noisier(local, times):
    mechanism = local.plan.mechanism
    noisy = replace(mechanism, noise_multiplier=times * mechanism.noise_multiplier)
    return replace(local, plan=replace(local.plan, mechanism=noisy))


def test_clients_are_weighed_by_the_inverse_variance_of_their_noise(tmp_path):
    """Equal batches, noise 1 : 1 : 2: of all weights, 4 : 4 : 1 leave the least variance."""
    made, server = started(tmp_path)
    rounds_of(made, server).gather()
    equal = [server.members[name].local for name in NAMES]
    assert shares(equal) == [1.0, 1.0, 1.0] and len({p.num_examples for p in equal}) == 1
    server.members[NAMES[2]].local = noisier(equal[2], 2.0)
    server.taken = {NAMES[0]: (9.0, 0.0, 0.0), NAMES[1]: (0.0, 9.0, 0.0), NAMES[2]: (0.0, 0.0, 9.0)}
    assert server.close_round(0.1).values == (4.0, 4.0, 1.0)
    assert [row["weight"] for row in federated_report(server)["clients"]] == [4 / 9, 4 / 9, 1 / 9]
    # the rate follows: noise sqrt(1 + 1 + (2/4)^2) over batches 1 + 1 + 1/4, where three equal ones have
    # sqrt(3) over 3
    loud = [noisier(plan, 1e3) for plan in equal]  # noise alone bounds the rate
    third = noisier(equal[2], 2e3)
    ratio = chosen_rate([*loud[:2], third], "constant") / chosen_rate(loud, "constant")
    assert ratio == pytest.approx((3**0.5 / 3) / (2.25**0.5 / 2.25))
    # noise is as declared: next to none makes four rows of one, and not all of the mean
    for tiny in (0.01, 0.0):
        assert shares([noisier(equal[0], tiny), *equal[1:]]) == [1.0, 0.25, 0.25]
        assert shares([noisier(equal[0], tiny), equal[1]]) == [1.0, 0.25]
    assert shares([noisier(plan, 0.0) for plan in equal]) == [1.0, 1.0, 1.0]


# ------------------------------------------------------------------ who comes and goes


def test_a_late_joiner_catches_up_by_the_numbers_alone(tmp_path):
    made, server = started(tmp_path, rounds=5)
    rounds = rounds_of(made, server)
    rounds.transport.gone.add(NAMES[2])
    counts = []

    def arrive(release, count):
        if release.step == 2:
            rounds.transport.gone.clear()
        counts.append(count)

    rounds.run(arrive)
    member = server.members[NAMES[2]]
    assert counts == [2, 2, 2, 3, 3] and member.joined == 3
    assert released(tmp_path, NAMES[2]) == 2
    assert member.sent == (HEAD + 3 * RELEASE) + (HEAD + RELEASE)  # three missed ones, then one
    assert federated_report(server)["clients"][2]["opened"] == 2


def test_a_silent_client_costs_the_head_of_a_message(tmp_path):
    """Gone without a word, and still there for the transport: no growing history is sent to it."""
    made, server = started(tmp_path, rounds=8)
    rounds = rounds_of(made, server)
    exchange, silent, sent = rounds.transport.exchange, set(), []
    rounds.transport.exchange = lambda kind, payloads: exchange(
        kind, {a: p for a, p in payloads.items() if a not in silent}
    )

    def note(release, count):
        sent.append(server.members[NAMES[0]].sent)
        if release.step == 1:
            silent.add(NAMES[0])
        if release.step == 6:
            silent.clear()

    rounds.run(note)
    down = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    one = HEAD + RELEASE
    # the first message that is lost still brings a release; then heads; then what it missed, in two
    assert down == [HEAD, one, one, *[HEAD] * 4, HEAD + (HEAD + 6 * RELEASE)]
    assert released(tmp_path) == 3 and server.applied(NAMES[0]) == 3
    report = federated_report(server, tmp_path / "clients")
    assert report["payload_bytes_of_a_client_and_round"] <= 100 + 16 * 3


def test_a_client_under_another_address_is_let_in_once_the_old_one_is_silent(tmp_path):
    """A restarted SuperNode may have a new id while its old one is still listed as connected."""
    made, server = started(tmp_path, rounds=6)
    rounds = rounds_of(made, server)
    transport = rounds.transport
    exchange, present = transport.exchange, transport.present
    new, silent, counts = "new-address", set(), []

    def carried(kind, payloads):
        if new in payloads:
            payloads = {NAMES[0] if a == new else a: p for a, p in payloads.items()}
            return {new if a == NAMES[0] else a: p for a, p in exchange(kind, payloads).items()}
        return exchange(kind, {a: p for a, p in payloads.items() if a not in silent})

    transport.exchange = carried
    transport.present = lambda: [*present(), new] if server.round >= 1 else present()

    def note(release, count):
        counts.append(count)
        if release.step == 1:  # it was declined in this round: the old address answered
            assert "the name of a client that is connected" in rounds.declined[new][0]
            silent.add(NAMES[0])

    rounds.run(note)
    assert counts == [3, 3, 2, 3, 3, 3]  # out for the round in which the old address fell silent
    assert rounds.names[new] == NAMES[0] and NAMES[0] not in rounds.names and not rounds.declined
    assert released(tmp_path) == 5


def test_too_few_clients_and_rounds_without_answers_say_so(tmp_path):
    made, server = started(tmp_path)
    rounds = rounds_of(made, server, min_clients=2)
    rounds.transport.gone.update(NAMES[:2])
    with pytest.raises(LedgerError, match="1 clients are there and min_clients=2"):
        rounds.run()
    with pytest.raises(LedgerError, match="no client answered"):
        server.close_round(0.1)
    assert server.round == 0


# ------------------------------------------------------------------ crashes


def test_a_killed_server_goes_on_from_its_ledgers(tmp_path):
    settings = {
        "testing.direction_key": 4,
        "testing.insecure_noise_seed": 3,
        "sampling": "full_batch",
    }
    _, first = ran(tmp_path / "a", **settings)
    folder = tmp_path / "b"
    run = ServerRun(side(folder, **settings), folder)
    interrupted(run, InProcess(run.side, folder, NAMES), at=2)
    before = {name: run.server.members[name].sent for name in NAMES}
    run.close()
    made, server = started(folder, resume=True, **settings)
    assert server.round == 2 and made.replica.round == 2
    rounds_of(made, server).run()
    assert server.trajectory.releases == first.trajectory.releases
    for name in NAMES:  # asked, told the one release it lacks, and told one in the last round
        assert server.members[name].sent - before[name] == HEAD + 2 * (HEAD + RELEASE)
        assert released(folder, name) == server.applied(name) == 4
    server.close()
    with pytest.raises(LedgerError, match="earlier run"):
        started(folder, **settings)
    for clients in (2, 4):
        with pytest.raises(LedgerError, match="rows that change between clients"):
            started(folder, resume=True, clients=clients, **settings)


def test_a_release_that_did_not_arrive_is_sent_again_and_not_drawn_again(tmp_path):
    """A client killed between its ledger and the network."""
    made, server = started(tmp_path, rounds=3)
    rounds = rounds_of(made, server)
    rounds.gather()
    client, ask = made.clients[NAMES[0]], server.ask(NAMES[0])
    lost = client.answer(made.replica, ask)
    made.clients.pop(NAMES[0])  # another process, which reads the folder
    again = made.client(NAMES[0], 0, client_folder(tmp_path))
    assert again is not client and again.answer(made.replica, ask) == lost
    assert released(tmp_path) == 1
    rounds.run()
    assert released(tmp_path) == 3
    assert server.log.messages[0, 0] == unpack(lost, 3).values


def test_a_client_releases_no_more_rounds_than_its_plan_and_no_old_one(tmp_path):
    """Asked for round 0 after round 1, a client that missed round 0 says no."""
    made, server = started(tmp_path, rounds=2)
    rounds = rounds_of(made, server)
    rounds.gather()
    rounds.transport.gone.add(NAMES[0])
    old = pack(Message(ASK, 0, server.digest))
    rounds.run(lambda release, count: rounds.transport.gone.clear())
    late, full = made.clients[NAMES[0]], made.clients[NAMES[1]]
    assert (released(tmp_path), released(tmp_path, NAMES[1])) == (1, 2)
    assert unpack(late.answer(made.replica, old), 3).kind != VALUES
    for client, name in ((late, NAMES[0]), (full, NAMES[1])):  # a server that asks on
        kind = unpack(client.answer(made.replica, server.ask(name)), 3).kind
        assert kind != VALUES
    assert (released(tmp_path), released(tmp_path, NAMES[1])) == (1, 2)


# ------------------------------------------------------------------ refusals of the server


@pytest.fixture
def opened(tmp_path):
    made, server = started(tmp_path, rounds=3)
    rounds_of(made, server).gather()
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
    assert sum(federated_report(server)["clients"][0]["refused"].values()) == 8
    assert server.take(NAMES[0], good)  # and the round goes on
    assert server.close_round(0.1).values == pytest.approx(unpack(good, 3).values)


def test_two_releases_for_one_round_are_noticed(opened, tmp_path):
    """A client whose ledger was rolled back draws again: the server saw the first values."""
    made, server = opened
    assert server.take(NAMES[0], honest(made, server))
    server.taken.clear()  # the server is started again before the round is closed
    shutil.rmtree(client_folder(tmp_path))
    made.clients.clear()
    made.join(NAMES[0], 0, client_folder(tmp_path), server.invitation())
    with pytest.raises(MessageError, match="two releases.*rolled back"):
        server.take(NAMES[0], honest(made, server))


# ------------------------------------------------------------------ refusals at joining


def test_a_client_with_another_base_or_plan_does_not_join(tmp_path):
    _, server = started(tmp_path / "server")
    for i, (what, settings) in enumerate(
        {
            "base_model_digest": {},
            "clip": {"clip": 6.0},
            "rounds": {"rounds": 7},
            "num_directions": {"num_directions": 4},
            "smoothing": {"smoothing": 2e-3},
            "differences": {"differences": "forward"},
        }.items()
    ):
        other = side(tmp_path / str(i), **settings)
        if not settings:
            with torch.no_grad():
                next(other.replica.trainer.model.parameters()).add_(1.0)
        with pytest.raises(PlanError, match=f"another one.*{what}"):
            other.join("x", 0, tmp_path / "x", server.invitation())
    assert not (tmp_path / "x").exists()
    header = dict(server.trajectory.header)
    assert contract_digest({**header, "versions": {}}) == server.digest == contract_digest(header)
    for change in ({"smoothing": 2.0}, {"direction_key": "0" * 32}):
        assert contract_digest({**header, **change}) != server.digest


LEFT_OUT = {"clip_left_out": True, "noise_multiplier": 1.5}


def test_a_clip_that_is_left_out_follows_from_public_rows_and_is_the_same_for_all(tmp_path):
    made, server = started(tmp_path, **LEFT_OUT)
    run = made.replica.run
    public, directions = run.rows_of(run.evaluation), directions_of(0, run.header)
    rows = [PaddedMicrobatch(public.collate_rows([i]), 1) for i in range(len(run.evaluation))]
    norms = made.replica.method.step.differences(rows, directions).norm(dim=1)
    made.replica.method.settle_()
    header = server.trajectory.header
    assert header["median_norm"] == pytest.approx(float(norms.median()), rel=1e-3)
    assert header["federated"]["clip"] == header["median_norm"] / 2 == made.recipe.training.clip
    rounds_of(made, server).run()
    assert server.members[NAMES[0]].local.mechanism.clip == header["federated"]["clip"]
    server.close()
    again, resumed = started(tmp_path, resume=True, **LEFT_OUT)
    assert again.recipe.training.clip == header["federated"]["clip"] and resumed.round == 4
    other = side(tmp_path / "other", **LEFT_OUT)  # a client elsewhere, whose model is other rows'
    other.join("x", 0, tmp_path / "x", resumed.invitation())
    assert other.clients["x"].local.mechanism.clip == header["federated"]["clip"]
    assert other.replica.run.plan.smallest_clip == SMALLEST_CLIP  # what it was checked for


def test_a_folder_of_a_version_that_measured_no_norm_is_not_resumed(tmp_path):
    made, server = started(tmp_path)
    server.close()
    header = {k: v for k, v in server.trajectory.header.items() if k != "median_norm"}
    (tmp_path / LEDGER_NAME).unlink()
    Trajectory.create(tmp_path / LEDGER_NAME, header).close()
    with pytest.raises(LedgerError, match="has no 'median_norm'.*use the release that did"):
        made.start_server(tmp_path, resume=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_public_rows_whose_losses_are_not_finite_choose_no_clip(tmp_path, bad):
    made = side(tmp_path, **LEFT_OUT)
    norms = torch.tensor([[bad], [3.0], [bad], [bad]], dtype=torch.float64)
    made.replica._measured = lambda parts: norms
    assert made.replica.public_norms().tolist() == [3.0]
    norms[1] = bad
    with pytest.raises(PlanError, match="give validation_file, or clip"):
        made.start_server(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("clip", [SMALLEST_CLIP / 2, float("inf"), float("nan"), "5", True, None])
def test_a_servers_clip_is_no_word_and_not_below_what_was_checked(tmp_path, clip):
    other = side(tmp_path, **LEFT_OUT)
    contract = other.own_contract()
    contract["federated"]["clip"] = clip
    invitation = json.dumps({"contract": contract}).encode()
    with pytest.raises((PlanError, MessageError), match="clip=|JSON"):
        other.join("x", 0, tmp_path / "x", invitation)
    assert not (tmp_path / "x").exists()


def test_a_plan_is_made_of_what_a_client_declares(tmp_path):
    made, server = started(tmp_path)
    answer = json.loads(made.join("a", 0, tmp_path / "a", server.invitation()))

    def joins(**changes):
        return server.join(json.dumps({**answer, **changes}).encode())

    for key in ("name", "noise_multiplier", "num_examples", "delta", "contract_digest"):
        without = {k: v for k, v in answer.items() if k != key}
        with pytest.raises(MessageError, match="cannot be accounted"):
            server.join(json.dumps(without).encode())
    assert joins().local == made.clients["a"].local  # the same on both sides, to the last bit
    with pytest.raises(PlanError, match="another plan than a joined with"):
        joins(noise_multiplier=9.0)
    target = {"target_epsilon": 2.0, "noise_multiplier": None, "target_delta": None}
    for i, sampling in enumerate(SAMPLINGS):
        made, server = started(tmp_path / f"s{i}", **target, **sampling)
        rounds_of(made, server).gather()
        for name in NAMES:
            assert server.members[name].local == made.clients[name].local


SAMPLINGS = (
    {"sampling": "full_batch"},
    {"sampling": "fixed_size_without_replacement", "neighboring_relation": "replace_one"},
    {"sampling": "truncated_poisson", "max_batch_size": 15},
)
