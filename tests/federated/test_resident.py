"""A client's resident process: who starts it, who ends it, and that nothing but payloads leaves it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_dpzero.federated import resident
from hf_dpzero.federated.node import node_of, settings_of
from hf_dpzero.federated.resident import ADDRESS_NAME, ResidentError, hand_over

VALUES = {"name": "north", "recipe": "quickstart", "rounds": 5}


class Answers:
    """Takes the place of the client behind the socket: echoes, fails, or dies once."""

    dies = 0

    def __init__(self, folder, values):
        self.values = values

    def __call__(self, request: bytes) -> bytes:
        if request == b"Rdie" and Answers.dies:
            Answers.dies -= 1
            raise OSError("killed")
        if request == b"Rfail":
            return resident.FAILED
        return resident.ANSWERED + request + self.values["name"].encode()


@pytest.fixture
def started(monkeypatch):
    """Resident "processes" as threads; says how many were started."""
    count: list[str] = []

    def start(folder, text):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ADDRESS_NAME).unlink(missing_ok=True)
        count.append(text)
        threading.Thread(target=resident.serve, args=(folder, text, 0), daemon=True).start()
        return SimpleNamespace(poll=lambda: None, kill=lambda: None)

    monkeypatch.setattr(resident, "_Answers", Answers)
    monkeypatch.setattr(resident, "_watch", lambda *_: None)
    monkeypatch.setattr(resident, "_start", start)
    monkeypatch.setattr(resident, "START_SECONDS", 5.0)
    return count


def test_one_process_answers_all_messages(tmp_path, started):
    assert hand_over(tmp_path, VALUES, "join", b"ab") == b"Jabnorth"
    assert hand_over(tmp_path, VALUES, "round", b"") == b"Rnorth"
    assert len(started) == 1
    assert stat.S_IMODE((tmp_path / ADDRESS_NAME).stat().st_mode) == 0o600
    with pytest.raises(ResidentError, match=r"client\.log says why"):
        hand_over(tmp_path, VALUES, "round", b"fail")
    assert hand_over(tmp_path, VALUES, "round", b"again") == b"Ragainnorth" and len(started) == 1


def test_other_values_and_a_dead_process_start_another(tmp_path, started):
    hand_over(tmp_path, VALUES, "round", b"")
    assert hand_over(tmp_path, {**VALUES, "name": "south"}, "round", b"") == b"Rsouth"
    assert len(started) == 2
    entry = json.loads((tmp_path / ADDRESS_NAME).read_text())
    (tmp_path / ADDRESS_NAME).write_text(json.dumps({**entry, "address": str(tmp_path / "none")}))
    assert hand_over(tmp_path, {**VALUES, "name": "south"}, "round", b"") == b"Rsouth"
    assert len(started) == 3


def test_a_message_in_whose_middle_it_is_killed_is_given_once_more(tmp_path, started, monkeypatch):
    monkeypatch.setattr(Answers, "dies", 1)
    assert hand_over(tmp_path, VALUES, "round", b"die") == b"Rdienorth"
    monkeypatch.setattr(Answers, "dies", 2)
    with pytest.raises(ResidentError):
        hand_over(tmp_path, VALUES, "round", b"die")


def test_whoever_has_not_the_key_is_not_answered(tmp_path, started):
    hand_over(tmp_path, VALUES, "round", b"")
    entry = json.loads((tmp_path / ADDRESS_NAME).read_text())
    (tmp_path / ADDRESS_NAME).write_text(json.dumps({**entry, "key": "00" * 32}))
    with pytest.raises(AuthenticationError):
        resident._call(tmp_path, entry["values"])
    assert len(started) == 1


def test_a_process_loads_with_its_first_message_and_ends_with_whom_it_serves(tmp_path):
    """Real processes; the recipe is missing, so that the message fails after the start."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom hf_dpzero.federated.resident import *\n"
        "try:\n hand_over(Path(sys.argv[1]), {'name': 'north'}, 'join', b'{}')\n"
        "except ResidentError as error:\n print(error)\n"
        "print('torch' in sys.modules, flush=True)\nsys.stdin.read()"
    )
    served = subprocess.Popen(  # the resident process watches this one's parent: us
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    told = [served.stdout.readline().decode() for _ in range(2)]
    served.communicate()
    assert "client.log says why" in told[0] and told[1].strip() == "False"
    assert "recipe is missing" in (tmp_path / resident.LOG_NAME).read_text()
    process = json.loads((tmp_path / ADDRESS_NAME).read_text())["pid"]
    assert resident._alive(process)
    (tmp_path / ADDRESS_NAME).write_text(json.dumps({"key": "another took its place"}))
    deadline = time.monotonic() + 300
    while running(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(process)


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_watch_sees_processes_that_ended():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not resident._alive(gone.pid) and resident._alive(os.getpid())


# ------------------------------------------------------------------ node configurations


def test_settings_of_a_node():
    values = {"recipe": "quickstart", "overrides": "--clip 3 --seed '4'", "rounds": 5}
    made = settings_of({**values, "sampling-probability": 0.25})
    assert made.recipe == "quickstart" and made.overrides == ("--clip", "3", "--seed", "4")
    assert (made.rounds, made.sampling_probability) == (5, 0.25)
    assert made.own_rows and made.clients == 1
    shared = settings_of(values, clients=20)
    assert not shared.own_rows and shared.clients == 20 and shared.sampling_probability is None
    with pytest.raises(ValueError, match="recipe is missing"):
        settings_of({})
    assert settings_of({**values, "rounds": 0}).rounds == 0  # and not the recipe's
    for name in ("rounds", "sampling-probability"):
        with pytest.raises(ValueError, match=f"{name}='many': give a number"):
            settings_of({**values, name: "many"})


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b", "a b", "x" * 65])
def test_a_client_needs_a_name_that_can_be_a_folder(name):
    with pytest.raises(ValueError, match="give each client a name of its own"):
        node_of({"name": name})


def test_a_shard_of_a_node():
    assert (node_of({"name": "a"}).shard, node_of({"name": "a"}).of) == (0, 1)
    node = node_of({"name": "a", "shard": "3/20", "output-dir": "/data/run"})
    assert (node.shard, node.of, node.folder) == (2, 20, Path("/data/run"))
    for text in ("0/2", "3/2", "2", "a/b", "1/0"):
        with pytest.raises(ValueError, match="shard="):
            node_of({"name": "a", "shard": text})
