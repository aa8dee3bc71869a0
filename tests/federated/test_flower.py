"""The layer over Flower: what its messages carry, who is left out, and a simulation by Ray."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Flower needs CPython 3.11", allow_module_level=True)

from federated_sides import side, started
from flwr.app import ConfigRecord, RecordDict

from hf_dpzero.federated import app, envelope, flower
from hf_dpzero.federated.envelope import FAILED
from hf_dpzero.federated.messages import VALUES, unpack


class Message(SimpleNamespace):
    """What is used of Flower's message, which cannot be made outside of a run of Flower."""

    def __init__(self, content, dst_node_id=0, message_type="train"):
        node = SimpleNamespace(dst_node_id=dst_node_id, message_type=message_type)
        super().__init__(content=content, metadata=node)


def sent(payload: bytes) -> Message:
    return Message(flower.wrapped(payload))


class Grid:
    """Two nodes: one answers in capitals, one fails."""

    def get_node_ids(self):
        return [5, 6]

    def send_and_receive(self, messages, timeout):
        self.timeout = timeout
        for message in messages:
            node = message.metadata.dst_node_id
            content = flower.wrapped(flower.unwrapped(message).upper())
            yield SimpleNamespace(
                metadata=SimpleNamespace(src_node_id=node),
                has_error=lambda node=node: node == 6,
                error=SimpleNamespace(reason="no"),
                content=content,
            )


def test_a_transport_carries_bytes_and_leaves_out_who_failed(caplog, monkeypatch):
    monkeypatch.setattr("flwr.app.Message", Message)
    grid = Grid()
    transport = flower.FlowerTransport(grid, timeout=7.0, join_timeout=9.0)
    assert transport.present() == ["5", "6"]
    assert transport.exchange("round", {"5": b"abc", "6": b"abc"}) == {"5": b"ABC"}
    assert grid.timeout == 7.0 and "node 6 gave no answer: no" in caplog.text
    transport.exchange("join", {"5": b"x"})
    assert grid.timeout == 9.0
    assert transport.exchange("round", {}) == {}


def test_a_message_without_a_payload_is_none():
    for content in (RecordDict(), RecordDict({envelope.RECORD: ConfigRecord({"other": 1})})):
        assert flower.unwrapped(Message(content)) is None


def in_simulation(tmp_path, monkeypatch):
    """A client of a simulation on a side in this process; Flower's answers as their payloads."""
    made, server = started(tmp_path / "server")
    settings, folder = made.settings, str(tmp_path)
    monkeypatch.setitem(flower._SIDES, (settings, folder), made)
    monkeypatch.setattr(flower, "reply", lambda payload, message: payload)
    monkeypatch.setattr(flower, "failure", lambda message, reason=FAILED: reason)
    context = SimpleNamespace(node_config={"partition-id": 0})
    return made, server, settings, folder, context


def test_a_client_answers_and_its_failures_quote_nothing(tmp_path, monkeypatch):
    made, server, settings, folder, context = in_simulation(tmp_path, monkeypatch)
    answer = flower._join(settings, folder, sent(server.invitation()), context)
    name = server.join(answer).name
    values = flower._answer(settings, folder, {}, sent(server.ask(name)), context)
    assert unpack(values, 3).kind == VALUES and server.take(name, values)

    def quote(*_):
        raise KeyError("row 3: the patient's name")

    monkeypatch.setattr(made.replica, "differences", quote)
    server.close_round(0.1)
    assert flower._answer(settings, folder, {}, sent(server.ask(name)), context) == FAILED
    stopped = flower._answer(settings, folder, {0: 1}, sent(server.ask(name)), context)
    assert stopped == "dropped out"
    other = side(tmp_path / "b", clip=9.0)
    monkeypatch.setitem(flower._SIDES, (settings, folder), other)
    declined = flower._join(settings, folder, sent(server.invitation()), context)
    assert "federated.clip: 5.0 there, 9.0 here" in json.loads(declined)["declined"]


def test_an_app_hands_messages_over_and_its_failures_quote_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(app, "reply", lambda payload, message: payload)
    monkeypatch.setattr(app, "failure", lambda message: FAILED)
    calls = []
    monkeypatch.setattr(app, "hand_over", lambda *given: calls.append(given) or b"answer")
    config = {"name": "north", "output-dir": str(tmp_path)}
    context = SimpleNamespace(node_config=config)
    assert app.answered("round", sent(b"ask"), context) == b"answer"
    assert calls == [(tmp_path, config, "round", b"ask")]
    assert app.answered("round", Message(RecordDict()), context) == FAILED
    nameless = SimpleNamespace(node_config={})
    assert app.answered("join", sent(b"ask"), nameless) == FAILED
    assert "give each client a name" in caplog.text and len(calls) == 1


def test_random_stops_are_of_so_many_clients():
    stops = flower.random_stops(20, 10, 5)
    assert len(stops) == 5 and all(0 <= c < 20 and 1 <= r < 10 for c, r in stops.items())
