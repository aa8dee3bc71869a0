"""`hf-dpzero federate`: a run, its files, resuming, refusals; over Ray in the slow suite."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tiny_language_models import save_encoder

from hf_dpzero.cli import main
from hf_dpzero.federated.plan import PlanError
from hf_dpzero.federated.setup import PARTITIONERS, Settings, Side, partitioned
from hf_dpzero.ledger.trajectory import Trajectory


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quickstart's rows with a tiny encoder."""
    monkeypatch.chdir(tmp_path)
    values = {
        "model_name_or_path": str(save_encoder(tmp_path / "model")), "task": "quickstart",
        "architecture": "sentence_classifier", "precompute_features": True, "method": "dpzero",
        "max_train_samples": 60, "max_eval_samples": 20, "max_seq_length": 16, "clip": 4.0,
        "target_epsilon": 2.0, "target_delta": 1e-3, "expected_batch_size": 30, "max_steps": 3,
        "num_directions": 4, "trainable": "^classifier", "learning_rate": 0.01, "use_cpu": True,
        "report_to": "none", "output_dir": str(tmp_path / "out"),
    }  # fmt: skip
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def run(recipe: Path, *words: str) -> int:
    return main.main(["federate", str(recipe), *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--holdout", "0.1"), "each client holds rows of its own out"),
        (("--unit_column", "who"), "each claim is for one row of a client"),
    ],
)
def test_what_a_federation_has_no_account_for_is_refused(recipe, words, said, capsys):
    assert run(recipe, "--clients", "3", "--engine", "in_process", *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def check(folder: Path, clients: int, rounds: int) -> dict:
    report = json.loads((folder / "federated_report.json").read_text())
    assert report["rounds"] == rounds and report["private"] and len(report["clients"]) == clients
    for row in report["clients"]:
        assert row["applied"] <= row["released"] <= row["opened"] and row["epsilon"] <= 2.0
    assert len(Trajectory.load(folder / "trajectory.safetensors").releases) == rounds
    own = json.loads((folder / "privacy_report.json").read_text())
    assert own["private"] and own["epsilon"] == report["epsilon"]
    assert (folder / "model.safetensors").is_file()
    return report


def test_a_run_writes_its_report_and_can_be_replayed(recipe, tmp_path, capsys, monkeypatch):
    words = ("--clients", "3", "--engine", "in_process")
    assert run(recipe, *words) == 0
    folder = tmp_path / "out-federated"
    assert "epsilon at most" in capsys.readouterr().out
    report = check(folder, 3, 3)
    assert report["epsilon"] > 1.9 and report["payload_bytes_of_a_client_and_round"] <= 100 + 16 * 4
    rebuilt = ["--trajectory", str(folder / "trajectory.safetensors"), "--output_dir", "again"]
    assert main.main(["replay", "--base", str(recipe), *rebuilt, "--expect", str(folder)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    monkeypatch.setattr(Side, "build", None)  # nothing is loaded for these
    assert run(recipe, *words) == 2 and "go on with --resume" in capsys.readouterr().err
    assert run(recipe, "--clients", "2", "--resume") == 2
    assert "is of 3 clients" in capsys.readouterr().err
    assert run(recipe, "--output_dir", str(tmp_path / "none"), "--resume") == 2
    assert "to resume from" in capsys.readouterr().err


def test_a_recipe_of_init_runs_as_it_is(recipe, tmp_path, caplog):
    """Its clip, K and rate are left out: public rows choose the clip, the noise and they the rate."""
    values = yaml.safe_load(recipe.read_text())
    left_out = ("clip", "num_directions", "learning_rate")
    recipe.write_text(yaml.safe_dump({k: v for k, v in values.items() if k not in left_out}))
    words = ("--clients", "2", "--engine", "in_process", "--rounds", "3")
    assert run(recipe, *words) == 0 and "clip=" in caplog.text
    check(tmp_path / "out-federated", 2, 3)
    header = Trajectory.load(tmp_path / "out-federated" / "trajectory.safetensors").header
    assert header["federated"]["clip"] == header["median_norm"] / 2 and header["num_values"] == 32
    assert run(recipe, *words, "--resume") == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--clients", "61", "--engine", "in_process"], "1 of them would be empty"),
        (["--engine", "carrier_pigeon"], "use one of flower, in_process"),
        (["--clients", "0"], "clients=0"),
        (["--client_files", "a.csv", "b.csv", "--clients", "3"], "names 2 files"),
        (["--client_files", "a.csv", "a.csv"], "each file is one client's"),
        (["--client_files", "north.csv", "./north.csv"], "each file is one client's"),
        (["--client_files", "north.csv", "empty.csv"], "empty.csv has no rows"),
        (["--client_files", "north.csv", "other.csv"], "other.csv has the columns body (large"),
        (["--client_files", "north.csv", "typed.csv"], "label (int64), text (large"),
        (
            ["--partition", "dirichlet", "--engine", "in_process"],
            "use one of dirichlet:ALPHA, path",
        ),
        (["--clipping", "adaptive"], "clipping='adaptive'"),
        (["--method", "mezo"], "method"),
    ],
)
def test_what_cannot_run_is_refused(recipe, capsys, words, why):
    if "--client_files" in words:
        of_files(recipe, empty=("text,label", 0), other=("body,label", 4), typed=("text,label", 4))
        typed = Path("typed.csv").read_text()
        Path("typed.csv").write_text(typed.replace("no", "0").replace("yes", "1"))
    assert run(recipe, *words) == 2
    assert why in capsys.readouterr().err


def of_files(recipe: Path, **files: tuple[str, int]) -> None:
    """Files of rows by name: header and number of rows; the recipe's own is north.csv."""
    usual = {"north": ("text,label", 9), "public": ("text,label", 6)}
    for name, (header, count) in (usual | files).items():
        lines = [f"{name} text {i},{'yes' if i % 2 else 'no'}" for i in range(count)]
        Path(f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
    values = yaml.safe_load(recipe.read_text())
    for name in ("max_train_samples", "max_eval_samples"):
        del values[name]
    values |= {"task": "text_classification", "label_column": "label", "text_column": "text"}
    values |= {"train_file": "north.csv", "validation_file": "public.csv"}
    recipe.write_text(yaml.safe_dump(values))


def test_each_file_is_a_client(recipe, tmp_path, capsys):
    of_files(recipe, south=("label,text", 7))
    south = Path("south.csv")
    lines = [line.split(",") for line in south.read_text().splitlines()[1:]]
    south.write_text("\n".join(["label,text", *(f"{b},{a}" for a, b in lines)]) + "\n")
    words = ("--client_files", "north.csv", "south.csv", "--engine", "in_process")
    assert run(recipe, *words) == 0
    report = check(tmp_path / "out-federated", 2, 3)
    assert "evaluation  round 3, eval_loss " in capsys.readouterr().out
    assert [row["num_examples"] for row in report["clients"]] == [9, 7]
    assert run(recipe, *words, "--resume", "--client_files", "south.csv", "north.csv") == 2
    assert "in another order" in capsys.readouterr().err
    north = Path("north.csv").read_text()
    Path("north.csv").write_text(south.read_text())  # as many rows as another client's file
    assert run(recipe, *words, "--resume") == 2
    assert "client-000 has 9 rows" in capsys.readouterr().err
    Path("north.csv").write_text(north)
    settings = Settings(recipe=str(recipe), clients=2, rounds=3)
    files = os.pathsep.join(("north.csv", "south.csv"))
    made = Side.build(
        dataclasses.replace(settings, overrides=("--train_file", files)), tmp_path / "b"
    )
    texts = [line.split(",")[0] for line in Path("north.csv").read_text().splitlines()[1:]]
    assert made.shards[0].tolist() == list(range(len(texts))) and len(made.shards[1]) == 7
    made.replica.close()
    few = dataclasses.replace(
        settings, overrides=("--train_file", files, "--max_train_samples", "9")
    )
    short = Side.build(few, tmp_path / "c")
    with pytest.raises(PlanError, match="16 rows, of which 9 are left"):
        short.shards[0]
    short.replica.close()


@pytest.mark.parametrize(
    ("partition", "settings"),
    [("dirichlet:0.3", {"alpha": 0.3}), ("pathological:1", {"num_classes_per_partition": 1})],
)
def test_flower_deals_rows_by_label(monkeypatch, partition, settings):
    """Flower's partitioners, by a stand-in that notes what it was asked for."""
    asked = []

    class Partitioner:
        def __init__(self, **given):
            asked.append(given)

        def load_partition(self, number):
            return self.dataset.filter(lambda row: row["label"] == number)

    name = next(iter(PARTITIONERS[partition.partition(":")[0]]))
    monkeypatch.setitem(
        sys.modules,
        "flwr_datasets",
        SimpleNamespace(partitioner=SimpleNamespace(**{name: Partitioner})),
    )
    dealt = partitioned([0, 1, 1, 0, 1], 2, partition, seed=5)
    common = {"num_partitions": 2, "partition_by": "label", "seed": 5}
    assert asked == [common | settings] and [rows.tolist() for rows in dealt] == [[0, 3], [1, 2, 4]]
    with pytest.raises(PlanError, match="partition='shard:2': use one of dirichlet:ALPHA"):
        partitioned([0, 1], 2, "shard:2", 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower needs CPython 3.11")
def test_a_simulation_over_ray(recipe, tmp_path):
    assert run(recipe, "--clients", "4", "--rounds", "3", "--actors", "1") == 0
    report = check(tmp_path / "out-federated", 4, 3)
    assert [row["released"] for row in report["clients"]] == [3] * 4
