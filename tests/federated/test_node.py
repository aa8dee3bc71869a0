"""A client's resident process: who starts it, who ends it, and that nothing but payloads leaves it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_dpzero.federated import flower
from hf_dpzero.federated.flower import (
    ADDRESS_NAME,
    ResidentError,
    client_of,
    hand_over,
    settings_of,
)

VALUES = {"name": "north", "recipe": "quickstart", "rounds": 5}


class Answers:
    """Takes the place of the client behind the socket: echoes, fails, or dies once."""

    dies = 0

    def __init__(self, folder):
        pass

    def __call__(self, values, kind: str, payload: bytes) -> bytes | None:
        if payload == b"die" and Answers.dies:
            Answers.dies -= 1
            raise OSError("killed")
        return None if payload == b"fail" else f"{kind} {values['name']}".encode() + payload


@pytest.fixture
def started(monkeypatch):
    """Resident "processes" as threads; says how many were started."""
    count: list[Path] = []

    def start(folder):
        count.append(folder)
        threading.Thread(target=flower.serve, args=(folder,), daemon=True).start()
        return SimpleNamespace(poll=lambda: None, kill=lambda: None)

    monkeypatch.setattr(flower, "_Answers", Answers)
    monkeypatch.setattr(flower, "_start", start)
    return count


def test_one_process_answers_until_it_dies(tmp_path, started, monkeypatch):
    south = {**VALUES, "name": "south"}
    assert hand_over(tmp_path, VALUES, "join", b"ab") == b"join northab"
    assert hand_over(tmp_path, VALUES, "round", b"") == b"round north"
    assert stat.S_IMODE((tmp_path / ADDRESS_NAME).stat().st_mode) == 0o600
    with pytest.raises(ResidentError, match=r"client\.log says why"):
        hand_over(tmp_path, VALUES, "round", b"fail")
    assert (
        hand_over(tmp_path, VALUES, "round", b"again") == b"round northagain" and len(started) == 1
    )
    assert hand_over(tmp_path, south, "round", b"") == b"round south" and len(started) == 1
    entry = json.loads((tmp_path / ADDRESS_NAME).read_text())
    (tmp_path / ADDRESS_NAME).write_text(json.dumps({**entry, "address": str(tmp_path / "none")}))
    assert hand_over(tmp_path, south, "round", b"") == b"round south" and len(started) == 2
    # killed in the middle of a message, it is given the message once more
    monkeypatch.setattr(Answers, "dies", 1)
    assert hand_over(tmp_path, south, "round", b"die") == b"round southdie"
    monkeypatch.setattr(Answers, "dies", 2)
    with pytest.raises(ResidentError):
        hand_over(tmp_path, south, "round", b"die")


def test_whoever_has_not_the_key_is_not_answered(tmp_path, started):
    hand_over(tmp_path, VALUES, "round", b"")
    entry = json.loads((tmp_path / ADDRESS_NAME).read_text())
    (tmp_path / ADDRESS_NAME).write_text(json.dumps({**entry, "key": "00" * 32}))
    with pytest.raises(AuthenticationError):
        flower._call(tmp_path)
    assert len(started) == 1


def test_a_process_loads_with_its_first_message(tmp_path):
    """Real processes; the recipe is missing, so that the message fails after the start."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom hf_dpzero.federated.flower import *\n"
        "try:\n hand_over(Path(sys.argv[1]), {'name': 'north'}, 'join', b'{}')\n"
        "except ResidentError as error:\n print(error)\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    told = subprocess.run(  # the resident process watches this one's parent: us
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "client.log says why" in told[0] and told[1] == "set()"
    assert "recipe is missing" in (tmp_path / flower.LOG_NAME).read_text()
    process = json.loads((tmp_path / ADDRESS_NAME).read_text())["pid"]
    assert running(process)
    os.kill(process, signal.SIGKILL)


def test_a_resident_process_ends_with_the_one_that_it_serves(tmp_path):
    served = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    words = [sys.executable, "-m", "hf_dpzero.federated.flower", str(tmp_path), str(served.pid)]
    resident = subprocess.Popen(words)
    while not (tmp_path / ADDRESS_NAME).exists():
        assert resident.poll() is None
        time.sleep(0.05)
    (tmp_path / flower.LOG_NAME).unlink(missing_ok=True)  # a log may be thrown away
    second = subprocess.run(words, capture_output=True)  # one for a folder
    assert second.returncode == 1 and b"being written by another" in second.stderr
    served.communicate(b"\n")
    assert resident.wait(300) == 0


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# ------------------------------------------------------------------ node configurations


def test_settings_of_a_node():
    values = {"recipe": "quickstart", "overrides": "--clip 3 --seed '4'", "rounds": 5}
    made = settings_of({**values, "sampling-probability": 0.25, "max-epsilon": 3})
    assert made.recipe == "quickstart" and made.overrides == ("--clip", "3", "--seed", "4")
    assert (made.rounds, made.sampling_probability, made.max_epsilon) == (5, 0.25, 3.0)
    assert made.own_rows and made.clients == 1
    assert settings_of(values).sampling_probability is settings_of(values).max_epsilon is None
    assert settings_of({**values, "rounds": 0}).rounds == 0  # and not the recipe's
    assert settings_of({**values, "rounds": ""}).rounds is None
    assert client_of({"name": "a", "output-dir": "/data/run"}) == ("a", Path("/data/run"))


RECIPE = {"recipe": "quickstart"}


@pytest.mark.parametrize(
    ("read", "values", "why"),
    [
        (settings_of, {}, "recipe is missing"),
        (settings_of, {**RECIPE, "rounds": "many"}, "rounds='many': give a number"),
        (settings_of, {**RECIPE, "sampling-probability": "x"}, "probability='x': give a number"),
        *[
            (client_of, {"name": name}, "give each client a name of its own")
            for name in ("", "../up", ".hidden", "a/b", "a b", "x" * 65)
        ],
    ],
)
def test_configurations_that_cannot_be_read_are_refused(read, values, why):
    with pytest.raises(ValueError, match=why):
        read(values)
