"""The layer over Flower: what its messages carry, who is left out, and a simulation by Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Flower needs CPython 3.11", allow_module_level=True)

from federated_sides import side, started
from flwr.app import ConfigRecord, RecordDict

from hf_dpzero.federated import flower
from hf_dpzero.federated.app import settings_of
from hf_dpzero.federated.messages import VALUES, unpack
from hf_dpzero.federated.setup import Settings


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
    for content in (RecordDict(), RecordDict({flower.RECORD: ConfigRecord({"other": 1})})):
        assert flower.unwrapped(Message(content)) is None


def test_a_client_answers_and_its_failures_quote_nothing(tmp_path, monkeypatch):
    made, server = started(tmp_path / "server")
    settings, folder = made.settings, str(tmp_path)
    monkeypatch.setitem(flower._SIDES, (settings, folder), made)
    monkeypatch.setattr(flower, "_reply", lambda payload, message: payload)
    monkeypatch.setattr(flower, "_error", lambda reason, message: reason)
    where = (settings, folder, "a", 0, tmp_path / "a")
    answer = flower.answer_invitation(*where, sent(server.invitation()))
    server.join(answer)
    values = flower.answer_round(*where, sent(server.ask("a")))
    assert unpack(values, 3).kind == VALUES and server.take("a", values)

    def quote(*_):
        raise KeyError("row 3: the patient's name")

    monkeypatch.setattr(made.replica, "differences", quote)
    server.close_round(0.1)
    assert flower.answer_round(*where, sent(server.ask("a"))) == "failed; its own log says why"
    other = side(tmp_path / "b", clip=9.0)
    monkeypatch.setitem(flower._SIDES, (settings, folder), other)
    declined = flower.answer_invitation(*where, sent(server.invitation()))
    assert "federated.clip: 5.0 there, 9.0 here" in json.loads(declined)["declined"]


def test_telemetry_is_off():
    code = (
        "import os, hf_dpzero.federated.flower;"
        "from flwr.supercore import telemetry;"
        "print(telemetry.FLWR_TELEMETRY_ENABLED, os.environ['RAY_USAGE_STATS_ENABLED'])"
    )
    names = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split()[-2:] == ["0", "0"]


def test_settings_of_a_node():
    values = {"recipe": "quickstart", "overrides": "--clip 3 --seed '4'", "rounds": 5}
    assert settings_of({**values, "sampling-probability": 0.25}) == Settings(
        recipe="quickstart",
        overrides=("--clip", "3", "--seed", "4"),
        rounds=5,
        sampling_probability=0.25,
        own_rows=True,
    )
    with pytest.raises(ValueError, match="recipe is missing"):
        settings_of({})


def test_random_stops_are_of_so_many_clients():
    stops = flower.random_stops(20, 10, 5)
    assert len(stops) == 5 and all(0 <= c < 20 and 1 <= r < 10 for c, r in stops.items())
