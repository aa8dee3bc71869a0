"""What a client sees of a run: its cost from its own ledger, and why it was left out."""

from __future__ import annotations

import logging

import pytest
from federated_sides import NAMES, client_folder, rounds_of, side, started

from hf_dpzero.federated.report import federated_report, summary
from hf_dpzero.federated.spent import spent, words
from hf_dpzero.ledger.log_file import LedgerError


def test_a_client_knows_its_cost_from_its_ledger_alone(tmp_path):
    made, server = started(tmp_path, noise_multiplier=2.0)
    running = rounds_of(made, server)
    running.run(lambda release, count: running.transport.gone.add(NAMES[1]))
    local = server.members[NAMES[1]].local
    cost = spent(client_folder(tmp_path, NAMES[1]))
    assert (cost["released"], cost["epsilon"]) == (1, local.epsilon(1))
    assert cost["planned_epsilon"] == local.epsilon(4) and cost["private"]
    assert "1 of 4 rounds released, epsilon = " in words(cost)
    with pytest.raises(FileNotFoundError, match="joined no run"):
        spent(tmp_path)


def test_seeded_noise_is_not_private_here_either(tmp_path):
    made, server = started(tmp_path, testing={"insecure_noise_seed": 3})
    rounds_of(made, server).run()
    assert "NOT PRIVATE" in words(spent(client_folder(tmp_path, NAMES[0])))


def test_who_is_left_out_is_named_on_both_sides(tmp_path, caplog):
    made, server = started(tmp_path / "server", clip=2.0)
    other = side(tmp_path / "other", clip=1.0)
    with caplog.at_level(logging.INFO):
        answer = other.invited("south", 0, tmp_path / "south", server.invitation())
        made.invited(NAMES[1], 1, client_folder(tmp_path / "server", NAMES[1]), server.invitation())
    assert "south does not take part" in caplog.text and "clip: 2.0 there" in caplog.text
    assert f"{NAMES[1]} answers the invitation: 20 rows" in caplog.text
    running = rounds_of(made, server)
    honest = running.transport.join
    running.transport.join = lambda name, raw: answer if name == NAMES[0] else honest(name, raw)
    running.run()
    assert len(running.left_out()) == 1 and running.left_out()[0].startswith(f"{NAMES[0]}: ")
    shown = summary({**federated_report(server), "left_out": running.left_out()})
    assert "left out    client-000: the client declined" in shown
    assert "?: its ledger is on its own machine" in shown and "each of 2 clients" in shown


def test_a_client_that_never_answers_is_named(tmp_path):
    made, server = started(tmp_path)

    def join(name, raw):
        if name == NAMES[2]:
            raise OSError("no such file")
        return made.join(name, NAMES.index(name), client_folder(tmp_path, name), raw)

    running = rounds_of(made, server)
    running.transport.join = join
    running.run()
    assert running.left_out() == [
        f"{NAMES[2]}: gave no answer to 3 invitations; its own log says why"
    ]


def test_rows_do_not_move_between_clients_of_a_resumed_run(tmp_path):
    made, server = started(tmp_path)
    running = rounds_of(made, server)
    running.run()
    server.close()
    for settings in ({"clients": 4}, {"clients": 2}):
        with pytest.raises(LedgerError, match="rows that change between clients"):
            started(tmp_path, resume=True, **settings)
