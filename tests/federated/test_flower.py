"""The layer over Flower: what its messages carry, who is left out, and what leaves a client."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")  # an extra, for CPython 3.11 and newer

from federated_sides import side, started
from flwr.app import ConfigRecord, RecordDict

from hf_dpzero.federated import flower
from hf_dpzero.federated.flower import answered, unwrapped, wrapped
from hf_dpzero.federated.messages import VALUES, unpack


class Message(SimpleNamespace):
    """What is used of Flower's message, which cannot be made outside of a run of Flower."""

    def __init__(self, content, dst_node_id=0, message_type="train"):
        node = SimpleNamespace(dst_node_id=dst_node_id, message_type=message_type)
        super().__init__(content=content, metadata=node)


def payload_of(content):
    return None if content is None else unwrapped(Message(content))[1]


class Grid:
    """Two nodes: one answers in capitals, one fails."""

    def get_node_ids(self):
        return [5, 6]

    def send_and_receive(self, messages, timeout):
        self.timeout = timeout
        for message in messages:
            node = message.metadata.dst_node_id
            yield SimpleNamespace(
                metadata=SimpleNamespace(src_node_id=node),
                has_error=lambda node=node: node == 6,
                error=SimpleNamespace(reason="no"),
                content=wrapped(
                    b" ".join([unwrapped(message)[0].encode(), unwrapped(message)[1].upper()])
                ),
            )


def test_a_transport_carries_bytes_and_leaves_out_who_failed(caplog, monkeypatch):
    monkeypatch.setattr("flwr.app.Message", Message)
    grid = Grid()
    transport = flower.FlowerTransport(grid, timeout=7.0)
    assert transport.present() == ["5", "6"]
    assert transport.exchange("round", {"5": b"abc", "6": b"abc"}) == {"5": b"round ABC"}
    assert grid.timeout == 7.0 and "node 6 gave no answer: no" in caplog.text
    transport.exchange("join", {"5": b"x"})
    assert grid.timeout == 1800.0
    assert transport.exchange("round", {}) == {}
    for values in ({}, {"round": 1}):
        assert payload_of(RecordDict({flower.RECORD: ConfigRecord(values)})) is None
    assert payload_of(RecordDict()) is None


def test_a_simulated_client_answers_and_its_failures_quote_nothing(tmp_path, monkeypatch):
    made, server = started(tmp_path / "server")
    monkeypatch.setattr(flower, "_side", lambda settings, folder: made)
    context = SimpleNamespace(node_config={"partition-id": 0})

    def sent(kind, payload):
        answer = functools.partial(flower.simulated_answer, made.settings, tmp_path)
        return payload_of(answered(answer, Message(wrapped(payload, kind)), context))

    name = server.join(sent("join", server.invitation())).name
    values = sent("round", server.ask(name))
    assert unpack(values, 3).kind == VALUES and server.take(name, values)

    def quote(*_):
        raise KeyError("row 3: the patient's name")

    monkeypatch.setattr(made.replica, "differences", quote)
    server.close_round(0.1)
    assert sent("round", server.ask(name)) is None
    other = side(tmp_path / "b", clip=9.0)
    monkeypatch.setattr(flower, "_side", lambda settings, folder: other)
    declined = sent("join", server.invitation())
    assert "federated.clip: 5.0 there, 9.0 here" in json.loads(declined)["declined"]


def test_a_supernode_hands_messages_over(tmp_path, monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(flower, "hand_over", lambda *given: calls.append(given) or b"answer")
    config = {"name": "north", "output-dir": str(tmp_path)}

    def sent(content, config):
        context = SimpleNamespace(node_config=config)
        return payload_of(answered(flower.deployed_answer, Message(content), context))

    assert sent(wrapped(b"ask", "round"), config) == b"answer"
    assert calls == [(tmp_path, config, "round", b"ask")]
    assert sent(RecordDict(), config) is None
    assert sent(wrapped(b"ask", "round"), {}) is None
    assert "give each client a name" in caplog.text and len(calls) == 1


def test_a_resident_process_serves_runs_in_folders_of_their_own(tmp_path, monkeypatch):
    """Two runs in turns; what a run released is answered from its ledger when its turn comes again."""
    target = {"target_epsilon": 2.0, "noise_multiplier": None}
    servers = [
        started(tmp_path / f"server-{key}", **target, **{"testing.direction_key": key})[1]
        for key in (1, 2)
    ]
    built = []

    def build(settings, folder):
        built.append(side(folder, **target))
        built[-1].settings = settings
        return built[-1]

    monkeypatch.setattr("hf_dpzero.federated.setup.Side.build", build)
    values = {"name": "north", "recipe": "none", "max-epsilon": 4}
    answers = flower._Answers(tmp_path / "north")

    def asked(server):
        return answers(values, "round", server.ask("north"))

    for server in servers:
        server.join(answers(values, "join", server.invitation()))
    first = asked(servers[0])
    assert servers[0].take("north", first) and servers[1].take("north", asked(servers[1]))
    assert asked(servers[0]) == first and len(built) == 5
    assert asked(servers[0]) == first and len(built) == 5  # the same run again
    values["max-epsilon"] = 5  # of a SuperNode that was started anew
    assert asked(servers[0]) == first and len(built) == 6
    folders = {folder.name for folder in (tmp_path / "north" / "runs").iterdir()}
    assert folders == {server.digest.hex() for server in servers}
