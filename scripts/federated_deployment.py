"""A federated run by Flower's own server and client processes, with TLS, keys, and kill -9.

    python scripts/federated_deployment.py --clients 4 --rounds 8 --kill 1 --output_dir out/deployment

Starts a SuperLink and n SuperNodes on this machine, lets each in by its key, submits
`configs/federated`, kills `--kill` clients (SuperNode and resident process) in random rounds, `--back`
of them return, and with `--kill_server` the SuperLink dies once too and the run is submitted again.
At the end it checks the report against the clients' own ledgers, and the weights against the released
numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
CONNECTION, HOSTS = "trial", ("localhost", "127.0.0.1")


# ------------------------------------------------------------------ processes


@dataclass
class Deployment:
    """Flower's processes of one trial, in one folder.

    Attributes:
      folder: of everything.
      settings: of the command line.
      processes: by name; each leads a group, so that it can be killed whole.
      read_up_to: how long a process's log was when it started.
    """

    folder: Path
    settings: argparse.Namespace
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    read_up_to: dict[str, int] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        own = {"FLWR_HOME": str(self.folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        bin_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        own |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONPATH": path, "PATH": bin_path}
        return {**os.environ, **own}

    def start(self, name: str, *words: str) -> None:
        path = self.folder / f"{name}.log"
        self.read_up_to[name] = len(path.read_text(errors="replace")) if path.exists() else 0
        with open(path, "ab") as log:
            self.processes[name] = subprocess.Popen(
                words, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def command(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment(), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout[-1500:]} {done.stderr[-1500:]}")
        return done.stdout

    def prepare(self) -> None:
        from hf_dpzero.federated import certificates

        names = [f"client{i}" for i in range(self.settings.clients)]
        certificates.make(self.folder, HOSTS, names, days=1)
        (self.folder / "flwr").mkdir()
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.settings.port}"\n'
            f'root-certificates = "{self.folder / "server.pem"}"\n'
        )

    def start_server(self) -> None:
        from hf_dpzero.federated import certificates

        certificates.check(self.folder)
        files = {"ca-certfile": "server.pem", "certfile": "server.pem", "keyfile": "server.key"}
        tls = [w for k, v in files.items() for w in (f"--ssl-{k}", str(self.folder / v))]
        self.start(
            "superlink",
            *("flower-superlink", "--port", str(self.settings.port), "--enable-supernode-auth"),
            *("--disable-runtime-dependency-installation", *tls),
            *("--database", str(self.folder / "superlink.db")),
        )
        self.wait_for("superlink", "Application startup complete")

    def register(self) -> None:
        for i in tqdm(range(self.settings.clients), desc="registering keys"):
            key = str(self.folder / f"client{i}.pub")
            self.command("flwr", "supernode", "register", key, CONNECTION)

    def start_client(self, i: int) -> None:
        key, s = str(self.folder / f"client{i}"), self.settings
        values = {
            "name": f"client-{i}",
            "recipe": s.recipe,
            "overrides": s.overrides,
            "output-dir": str(self.client_folder(i)),
        }
        config = " ".join(f"{k}={json.dumps(v)}" for k, v in values.items()) + f" rounds={s.rounds}"
        self.start(
            f"client{i}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{s.port}"),
            *("--root-certificates", str(self.folder / "server.pem")),
            *("--auth-supernode-private-key", key),
            *("--auth-supernode-public-key", f"{key}.pub"),
            *("--port", str(s.port + 1 + i), "--node-config", config),
        )
        self.wait_for(f"client{i}", "SuperNode ID")

    def wait_for(self, name: str, words: str, seconds: float = 180.0) -> None:
        """Until the newest process of that name has said so."""
        log, deadline = self.folder / f"{name}.log", time.monotonic() + seconds
        while words not in log.read_text(errors="replace")[self.read_up_to.get(name, 0) :]:
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not start: see {log}.")
            time.sleep(0.2)

    def submit(self) -> None:
        s = self.settings
        values = {"recipe": s.recipe, "overrides": s.overrides}
        values["output-dir"] = str(self.folder / "server")
        numbers = {"rounds": s.rounds, "min-clients": s.min_clients, "timeout": float(s.timeout)}
        config = " ".join(f"{k}={json.dumps(v)}" for k, v in {**values, **numbers}.items())
        app = str(ROOT / "configs" / "federated")
        self.command("flwr", "run", app, CONNECTION, "--run-config", config)

    def client_folder(self, i: int) -> Path:
        return self.folder / "clients" / f"client-{i}"

    def kill(self, name: str) -> None:
        """As if the machine lost its power: the whole group, and a client's resident process."""
        process = self.processes.pop(name)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if name.startswith("client"):
            entry = self.client_folder(int(name[6:])) / "resident.json"
            with contextlib.suppress(OSError, ValueError, KeyError):
                os.kill(json.loads(entry.read_text())["pid"], signal.SIGKILL)

    def ended(self) -> list[int]:
        """Clients whose SuperNode ended without being killed, as a service manager would see."""
        clients = [(n, p) for n, p in self.processes.items() if n.startswith("client")]
        return [int(name[6:]) for name, process in clients if process.poll() is not None]

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)


# ------------------------------------------------------------------ the trial


def rounds_done(folder: Path) -> int:
    from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory

    with contextlib.suppress(OSError, ValueError):
        return len(Trajectory.load(folder / LEDGER_NAME).releases)
    return 0


def follow(run: Deployment, chance: random.Random) -> list[str]:
    """Waits for the end; kills and brings back on the way. Returns what happened."""
    s, server = run.settings, run.folder / "server"
    victims = chance.sample(range(s.clients), s.kill)
    deaths = {i: chance.randrange(1, max(2, s.rounds - 1)) for i in victims}
    returns = {i: deaths[i] + 2 for i in victims[: s.back]}
    server_dies = chance.randrange(1, s.rounds) if s.kill_server else None
    events: list[str] = []
    deadline = time.monotonic() + s.limit
    with tqdm(total=s.rounds, desc="rounds") as bar:
        while not (server / "model.safetensors").is_file():
            done = rounds_done(server)
            if done > bar.n:
                bar.update(done - bar.n)
            for i in [i for i, at in deaths.items() if done >= at]:
                run.kill(f"client{i}")
                events.append(f"client-{i} killed in round {done}, planned for {deaths.pop(i)}")
            for i in [i for i, at in returns.items() if done >= at and i not in deaths]:
                run.start_client(i)
                events.append(f"client-{i} started again in round {done}")
                returns.pop(i)
            if server_dies is not None and done >= server_dies:
                server_dies = None
                run.kill("superlink")
                run.start_server()
                run.submit()
                events.append(f"SuperLink killed in round {done} and the run submitted again")
            for i in run.ended():
                run.start_client(i)
                events.append(
                    f"client-{i} had ended by itself in round {done} and was started again"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"not at the end after {s.limit} s: round {done}; {events}")
            time.sleep(0.5)
        bar.update(s.rounds - bar.n)
    return events


def check(run: Deployment) -> dict[str, Any]:
    """The report beside the clients' ledgers, and the weights beside the released numbers."""
    from hf_dpzero.federated.messages import RELEASED_NAME, read_log
    from hf_dpzero.ledger.trajectory import SHIPPING_NAME
    from hf_dpzero.reporting.public import RECIPE_FILE

    server = run.folder / "server"
    report = json.loads((server / "federated_report.json").read_text())
    _, taken = read_log(server / "messages.ledger")
    names = [m["name"] for m in json.loads((server / "clients.json").read_text())]
    rows = {row["client"]: row for row in report["clients"]}
    for i in range(run.settings.clients):
        row = rows[f"client-{i}"]
        _, own = read_log(next(run.client_folder(i).rglob(RELEASED_NAME)))
        at_server = {r: v for (r, c), v in taken.items() if c == names.index(row["client"])}
        assert all(own[r, 0] == v for r, v in at_server.items()), "other numbers than its ledger's"
        assert row["applied"] == len(at_server) <= len(own) <= row["opened"], row
        row["released"] = len(own)
    assert report["rounds"] == run.settings.rounds
    words = [
        sys.executable,
        "-m",
        "hf_dpzero.cli.main",
        "replay",
        "--base",
        str(server / RECIPE_FILE),
    ]
    words += ["--trajectory", str(server / SHIPPING_NAME)]
    words += ["--output_dir", str(run.folder / "replayed")]
    report["replay"] = run.command(*words).strip().splitlines()[-1]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kill", type=int, default=1, help="clients killed in random rounds")
    parser.add_argument("--back", type=int, default=0, help="of these, how many return")
    parser.add_argument("--kill_server", action="store_true", help="the SuperLink dies once too")
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "quickstart.yaml"))
    parser.add_argument("--overrides", default="--use_cpu true --report_to none --seed 1")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a round")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of the whole trial")
    parser.add_argument("--port", type=int, default=18230)
    parser.add_argument("--quick", action="store_true", help="2 clients, 3 rounds, few rows")
    parser.add_argument("--output_dir", type=Path, default=Path("out/deployment"))
    s = parser.parse_args()
    if s.quick:
        s.clients, s.rounds, s.kill = 2, 3, min(s.kill, 1)
        s.overrides += " --max_train_samples 64 --max_eval_samples 16 --num_directions 4"
        s.overrides += " --expected_batch_size 16"
    s.min_clients = s.clients - s.kill
    if not __debug__:
        parser.error("run it without -O: what it checks are assertions.")
    s.output_dir.mkdir(parents=True)
    run = Deployment(s.output_dir.absolute(), s)
    began = time.monotonic()
    try:
        run.prepare()
        run.start_server()
        run.register()
        for i in tqdm(range(s.clients), desc="starting clients"):
            run.start_client(i)
        run.submit()
        events = follow(run, random.SystemRandom())
        ended = time.monotonic()
        report = check(run)
    finally:
        run.stop()
    print("\n".join(events))
    print("client       rows  applied  released  opened  epsilon reported")
    for row in report["clients"]:
        cells = (row["client"], row["num_examples"], row["applied"], row["released"], row["opened"])
        print("{:<12} {:>4} {:>8} {:>9} {:>7}".format(*cells), f" {row['epsilon']:.4f}")
    print(f"payload bytes a client and round: {report['payload_bytes_of_a_client_and_round']}")
    print(f"evaluations: first {report['evaluations'][0]}, last {report['evaluations'][-1]}")
    print(f"seconds: {ended - began:.0f}; {report['replay']}")


if __name__ == "__main__":
    main()
