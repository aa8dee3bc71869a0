"""A payload as Flower carries it; this module and what it imports load neither torch nor transformers.

Each payload travels as one bytes entry of a `ConfigRecord`: kind "join" as Flower's message type query,
kind "round" as train. Flower knows who sent a message; the payload's own checks are in `messages`.
Telemetry of Flower and usage statistics of Ray are off unless the environment says otherwise.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
    ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
):
    os.environ.setdefault(_name, _value)

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

RECORD, PAYLOAD = "hf_dpzero", "payload"
TYPES = {"join": "query", "round": "train"}
"""Flower's message type of each kind."""

FAILED = "failed; its own log says why"
"""All that leaves a client of an error, whose words may quote a row."""


def wrapped(payload: bytes) -> RecordDict:
    """A payload as Flower carries it."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({RECORD: ConfigRecord({PAYLOAD: payload})})


def unwrapped(message: Message) -> Any:
    """The payload of a message; None if it has none."""
    with contextlib.suppress(KeyError, TypeError):
        record: Any = message.content[RECORD]
        return record[PAYLOAD]
    return None


def reply(payload: bytes, message: Message) -> Message:
    """An answer."""
    from flwr.app import Message

    return Message(wrapped(payload), reply_to=message)


def failure(message: Message, reason: str = FAILED) -> Message:
    """An answer of a client that has none."""
    from flwr.app import Error, Message

    return Message(Error(code=0, reason=reason), reply_to=message)
