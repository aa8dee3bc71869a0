"""`python -m scripts.gpu`: what is kept of a cut run, its methods, its files, a dry run of all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from scripts.gpu import __main__ as command
from scripts.gpu import device_tests, pack, profile, sst2, stages, steps, tables, tiny
from scripts.gpu.results import FAILED, OK, RUNNING, SKIPPED, Item, Results, run_items

ROOT = Path(__file__).resolve().parents[2]


def item(name, result=None, expects_s=0.0):
    def call(left):
        if result is None:
            raise ValueError("broken on purpose")
        return {"found": result}

    return Item(name, expects_s, call)


# ---------------------------------------------------------------- what is kept


def test_items_are_kept_as_they_end_and_a_failure_keeps_no_other_from_running(tmp_path):
    results, lines = Results(tmp_path / "deep" / "results.json"), []
    plan = [item("a", 1), item("b"), item("c", 3), item("d", 4, expects_s=1e6)]
    run_items(results, "stage", plan, time.time() + 60, lines.append)
    kept = json.loads((tmp_path / "deep" / "results.json").read_text())["stages"]["stage"]
    assert {n: o["status"] for n, o in kept.items()} == {
        "a": OK, "b": FAILED, "c": OK, "d": SKIPPED
    }  # fmt: skip
    assert kept["c"]["result"] == {"found": 3} and "broken on purpose" in kept["b"]["error"]
    assert "60 s are left" in kept["d"]["why"] or "59 s are left" in kept["d"]["why"]
    assert results.failed(["stage"]) == ["stage/b"] and len(lines) == 4


def test_a_resumed_run_repeats_what_failed_was_cut_or_skipped_and_nothing_else(tmp_path):
    path, calls = tmp_path / "results.json", []
    first = Results(path)
    for name, status in (("a", OK), ("b", FAILED), ("c", RUNNING), ("d", SKIPPED)):
        first.note("stage", name, status, result={"found": 0})
    assert Results(path).failed(["stage"]) == ["stage/b", "stage/c"]  # the cut one counts
    again = [
        Item(name, 0.0, lambda left, name=name: calls.append(name) or {"found": 1})
        for name in "abcd"
    ]
    run_items(Results(path), "stage", again, time.time() + 60, lambda line: None)
    assert calls == ["b", "c", "d"] and Results(path).failed(["stage"]) == []
    assert Results(path).outcomes("stage")["a"]["result"] == {"found": 0}


def test_a_cut_while_writing_leaves_the_file_before(tmp_path, monkeypatch):
    results = Results(tmp_path / "results.json")
    results.note("stage", "a", OK)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        results.note("stage", "b", OK)
    assert list(Results(tmp_path / "results.json").outcomes("stage")) == ["a"]


def test_a_stage_that_dies_or_hangs_is_a_failure(tmp_path, monkeypatch):
    options = command.parser().parse_args(["run", "--output_dir", str(tmp_path), "--device", "cpu"])
    results = Results(tmp_path / "results.json")
    monkeypatch.setattr(stages, "items_of", lambda *_: [item("a", 1)])

    def dies(command, **_):
        Results(results.path).note("steps", "a", RUNNING)
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr(subprocess, "run", dies)
    command.in_a_process(results, "steps", options, time.time() + 60)
    assert results.outcomes("steps")["a"] == {
        "status": FAILED,
        "error": "its process ended with -11",
    }

    def hangs(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    command.in_a_process(results, "sst2", options, time.time() + 60)
    assert "did not end within 40 s" in results.outcomes("sst2")["start"]["error"]


# ---------------------------------------------------------------- tests on the device


def test_files_with_tests_for_a_gpu_are_found_kernels_first():
    found = device_tests.marked_files()
    assert device_tests.KERNELS in found and Path("tests/scripts/test_command.py") not in found
    names = [i.name for i in device_tests.items(dry_run=False)]
    assert names[0] == "test_triton_kernels" and sorted(names) == sorted(f.stem for f in found)


def test_counts_of_a_report():
    suite = '<all><testsuite tests="5" failures="1" errors="1" skipped="2" time="2.5"/></all>'
    assert device_tests.counts(ElementTree.fromstring(suite)) == {
        "passed": 1, "failed": 2, "skipped": 2, "seconds": 2.5
    }  # fmt: skip
    skipped = suite.replace('failures="1" errors="1" skipped="2"', 'skipped="5"')
    with pytest.raises(RuntimeError, match="no test passed"):
        device_tests.counts(ElementTree.fromstring(skipped))


@pytest.mark.parametrize(
    ("said", "status", "outcome"),
    [
        ("E   ModuleNotFoundError: No module named 'datasets.arrow'", 2, {"lacks": "datasets"}),
        ("12/40 tests collected (28 deselected) in 1.0s", 0, {"collected": 12}),
        ("1 failed", 1, RuntimeError),
    ],
)
def test_what_pytest_says_becomes_an_outcome(said, status, outcome, monkeypatch):
    done = subprocess.CompletedProcess([], status, stdout=said, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    words = ["--collect-only"] if status == 0 else []
    if outcome is RuntimeError:
        with pytest.raises(RuntimeError, match="1 failed"):
            device_tests.run_file(Path("x.py"), words, 5.0)
        return
    assert outcome.items() <= device_tests.run_file(Path("x.py"), words, 5.0).items()


# ---------------------------------------------------------------- SST-2


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> sst2.Packed:
    return sst2.Packed(tiny.pack_tiny(tmp_path_factory.mktemp("packed")), "cpu")


def arm(count=4, rate=0.05):
    return sst2.Arm(count, rate, 1.0)


def test_rows_are_padded_so_that_a_mask_is_never_empty(packed):
    rows = packed.train
    assert rows["input_ids"].shape == (tiny.ROWS, pack.TRAIN_TOKENS + 1)
    assert (rows["attention_mask"].sum(1) == tiny.WIDTH).all()
    assert (rows["attention_mask"][:, -1] == 0).all() and set(rows["labels"].tolist()) == {0, 1}
    ids, lengths = torch.tensor([7, 8, 9], dtype=torch.uint16), torch.tensor([1, 2])
    made = sst2.padded(ids, lengths, torch.zeros(2), "cpu")
    assert made["input_ids"][:, :2].tolist() == [[7, 0], [8, 9]]


def test_microbatches_have_few_shapes_whatever_is_drawn(packed):
    """Starting a pass costs more than its rows here, so the first one has room for nearly all."""
    drawn = sst2.DrawnRows(packed, seed=5)
    sizes = [len(drawn.drawn(step)) for step in range(30)]
    steps = [drawn.fixed(step) for step in range(30)]
    shapes = {tuple(part["input_ids"].shape) for parts in steps for part in parts}
    most = round(1.25 * tiny.BATCH)
    assert shapes <= {(n, pack.TRAIN_TOKENS + 1) for n in (1, 4, most)} and len(set(sizes)) > 4
    assert {len(parts[0]["input_ids"]) for parts in steps if parts} == {most}
    assert [sum(part.examples for part in parts) for parts in steps] == sizes
    places = [place for part in steps[0] for place in part.places]
    assert sorted(places) == list(range(sizes[0]))


def test_dpzero_releases_within_its_clip_and_moves_the_weights(packed):
    noised = sst2.DPZeroRun(packed, arm(), noise_multiplier=0.7, seed=3).step.mechanism
    assert noised.noise_multiplier == 0.7 and noised.expected_batch_size == tiny.BATCH
    run = sst2.DPZeroRun(packed, arm(), noise_multiplier=0.0, seed=3)
    before = {n: t.clone() for n, t in run.model.state_dict().items()}
    for number in range(3):
        run(number, 1e-3)
    model = run.finish()
    mechanism = run.step.mechanism
    assert mechanism.clip == sst2.CLIP_PER_DIRECTION * 2
    values = run.step.trajectory.get(1).values
    drawn = len(run.batches.drawn(1))
    assert 0 < sum(v * v for v in values) ** 0.5 <= mechanism.radius * drawn / tiny.BATCH
    assert any(not torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_it_learns_what_the_first_token_says(packed):
    """Without noise, at a rate for this tiny model, whose start is at chance."""
    start = sst2.accuracy(packed.model(), packed.validation)
    assert 0.2 <= start <= 0.8
    run = sst2.DPZeroRun(packed, arm(count=16), 0.0, 3)
    for number in range(30):
        run(number, 1e-3)
    assert sst2.accuracy(run.finish(), packed.validation) >= 0.9


def test_the_number_of_steps_fits_the_time():
    known = {10: 0.8, 40: 0.9, 80: 1.0}
    assert [sst2.steps_that_fit(s, 30.0, known) for s in (0.1, 0.5, 1.0, 99.0)] == [80, 40, 10, 10]


# ---------------------------------------------------------------- the packed file


@pytest.fixture
def data(tmp_path) -> Path:
    rows = [("good film", 1), ("bad film it was", 0), ("great", 1), ("awful urgent blood", 0)]
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"sentence": s, "label": y}) + "\n" for s, y in rows)
    )
    (tmp_path / "validation.jsonl").write_text(
        "".join(json.dumps({"sentence": s, "label": y}) + "\n" for s, y in rows[:2])
    )
    return tmp_path


def test_a_packed_model_is_the_model(bert_checkpoint, data, monkeypatch):
    """Less embeddings that no row needs, and rounded to float16."""
    made_up = {str(e): {"2": 1.0} for e in pack.EPSILONS}
    monkeypatch.setattr(pack, "noise_multipliers", lambda *_: made_up)
    file = data / "packed.safetensors"
    size = pack.pack(str(bert_checkpoint), data, file, batch_size=2, say=lambda line: None)
    assert size == file.stat().st_size
    packed = sst2.Packed(file, "cpu")
    assert packed.train["labels"].tolist() == [1, 0, 1, 0] and len(packed.validation["labels"]) == 2
    weights, settings = pack.model_tensors(str(bert_checkpoint))
    words = packed.weights["encoder.embeddings.word_embeddings.weight"]
    whole = weights["model.encoder.embeddings.word_embeddings.weight"]
    assert len(words) < len(whole) == settings["encoder"]["vocab_size"]
    from transformers import AutoModel, AutoTokenizer

    from hf_dpzero.recipes.sentence_classifier import SentenceClassifier

    encoder = AutoModel.from_pretrained(bert_checkpoint).float()
    model = SentenceClassifier.from_encoder(
        encoder, num_labels=2, logit_scale=settings["logit_scale"]
    )
    model.classifier.weight.data.copy_(weights["model.classifier.weight"].float())
    text = AutoTokenizer.from_pretrained(bert_checkpoint)("awful urgent blood", return_tensors="pt")
    row = {n: v[3:4] for n, v in packed.train.items()}
    ours = packed.model()(row["input_ids"], row["attention_mask"]).logits
    theirs = model(text["input_ids"], text["attention_mask"]).logits
    largest = float(theirs.detach().abs().max())
    assert largest > 1e-4
    torch.testing.assert_close(ours, theirs, atol=3e-3 * largest + 1e-5, rtol=0)


def test_a_file_that_is_too_large_and_a_folder_without_rows_are_refused(
    bert_checkpoint, data, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(pack, "noise_multipliers", lambda *_: {})
    monkeypatch.setattr(pack, "LIMIT_MB", 1e-3)
    with pytest.raises(ValueError, match="more than 0.001"):
        pack.pack(str(bert_checkpoint), data, data / "packed.safetensors", say=lambda line: None)
    with pytest.raises(OSError, match="train.jsonl"):
        list(pack.read_rows(tmp_path_factory.mktemp("empty"), "train"))


@pytest.mark.slow
def test_the_noise_is_what_the_plan_needs():
    from hf_dpzero.privacy.mechanisms import ScalarMechanism
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.privacy.sampling import PoissonSampler

    noise = pack.noise_multipliers(1000, 50, 1e-5, (20,))
    for epsilon in pack.EPSILONS:
        sigma = noise[str(epsilon)]["20"]
        plan = PrivacyPlan(
            sampler=PoissonSampler(num_examples=1000, expected_batch_size=50.0),
            mechanism=ScalarMechanism(
                clip=9.0, noise_multiplier=sigma, expected_batch_size=50, num_directions=64
            ),
            steps=20,
        )
        assert 0.98 * epsilon < plan.epsilon(1e-5) <= epsilon


# ---------------------------------------------------------------- tables, and a dry run


def test_tables_say_what_was_measured_and_what_was_not(capsys, tmp_path):
    results = Results(tmp_path / "results.json")
    results.content["machine"] = {"name": "Some GPU", "driver": "1.2", "torch": "2.11"}
    measured = {
        "settings": {"batch_size": 8, "seq_length": 256}, "strategy": "layerwise", "rows_per_pass": 4,
        "ratio_quartiles": [1.1, 1.2, 1.3],
        "seconds": {"two_forwards": 0.25},
        "peak_bytes": {"inference": 2**30, "step": 2**31},
    }  # fmt: skip
    results.note("steps", "opt-13b", OK, seconds=9.0, result=measured)
    results.note("steps", "opt-6.7b", SKIPPED, why="takes about 45 s and 3 s are left")
    results.note("kernels", "test_a", OK, seconds=1.0, result={"lacks": "datasets", "passed": 0})
    results.note("sst2", "start", FAILED, error="Traceback\nOSError: no | file")
    assert command.main(["table", "--output_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    row = "| opt-13b | 8 x 256 | layerwise, 4.0 rows a pass | 1.20 (1.10 to 1.30) | 0.250 |"
    assert f"{row} 1.00 | 2.00 |" in printed and "Some GPU, driver 1.2, torch 2.11" in printed
    assert "skipped: takes about 45 s" in printed and "not run: datasets is missing" in printed
    assert "no \\| file" in printed
    for _, heads, rows in tables.tables(results.content):
        assert all(len(row) == len(heads) for row in rows)


def test_the_stages_cover_the_published_shapes():
    assert [*stages.STAGES][:3] == ["kernels", "passes", "steps"] and "sst2" not in stages.UNASKED
    names = [i.name.split(",")[0] for i in steps.items("cuda", dry_run=False)]
    assert [*dict.fromkeys(names)] == ["roberta-large", "opt-1.3b", "opt-6.7b", "opt-13b"]
    runs = [i.name for i in sst2.items(Path("x"), "cuda", dry_run=False)]
    assert len(runs) == 7 and {"start", "dpzero-64-eps2"} < set(runs)
    measured = (stages.items_of(s, "cuda", Path("x"), False) for s in stages.UNASKED)
    assert sum(i.expects_s for items in measured for i in items) < command.BUDGET_S


def test_a_place_that_waits_is_counted_by_its_line():
    import warnings

    def step():
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("of something else", stacklevel=1)

    ((place, count),) = profile.waiting(step, "cpu").items()
    assert count == 3 and place.startswith("scripts/test_gpu.py:") and place.endswith(" step")


def test_a_dry_run_of_what_is_measured(tmp_path, capsys):
    words = ["run", "--dry_run", "--one_process", "--output_dir", str(tmp_path)]
    measured = stages.STAGES.keys() - {"kernels"}
    assert command.main([*words, "--stages", *measured]) == 0
    kept = json.loads((tmp_path / "results.json").read_text())
    assert {o["status"] for s in kept["stages"].values() for o in s.values()} == {OK}
    assert set(kept["stages"]) == measured and len(kept["stages"]["sst2"]) == 7
    assert {"tiny, K=1", "tiny-opt, K=16"} < set(kept["stages"]["steps"])
    assert kept["stages"]["sst2"]["dpzero-1-eps2"]["result"]["noise_multiplier"] == 1.0
    assert "rows a pass" in capsys.readouterr().out
    broken = ["--stages", "sst2", "--data", str(tmp_path / "results.json")]
    assert command.main([*words, *broken]) == 1  # no packed file


_BARE = """
import importlib.util, sys
LACKS = {"opacus", "datasets", "dp_accounting", "opendp", "evaluate"}
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.split(".")[0] in LACKS else find(name, package))
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in LACKS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["--stages", "passes"], ["--one_process", "--stages", *stages.STAGES]],
    ids=["one", "all"],
)
def test_a_dry_run_where_packages_are_missing(words, tmp_path):
    """A stage in a process of its own, as on the machine with the GPU, which has neither; then all."""
    (tmp_path / "sitecustomize.py").write_text(_BARE)
    place = os.pathsep.join(
        [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu", "run", "--dry_run", "--output_dir", str(tmp_path), *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": place}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kept = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert set(kept) == {*words} - {"--stages", "--one_process"}
    assert {o["status"] for s in kept.values() for o in s.values()} == {OK}
    if "kernels" in kept and importlib.util.find_spec("triton"):
        assert kept["kernels"]["test_triton_kernels"]["result"]["passed"] >= 5
