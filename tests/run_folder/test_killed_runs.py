"""kill -9 at any moment, and resume: the ledger holds what was released, the weights replay from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import die, in_child, kill_before_change
from tiny_runs import build, same, tiny_data, tiny_model, weights

from hf_dpzero import Trajectory
from hf_dpzero.ledger import log_file, trajectory
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.run_folder import checkpoints
from hf_dpzero.run_folder.checkpoints import STATE_NAME, load_state
from hf_dpzero.training import zeroth_order_step

LEDGER = trajectory.LEDGER_NAME
KINDS: dict[str, dict[str, Any]] = {
    "dpzero": {},
    "k8": {"num_directions": 8},
    "momentum": {"update_rule": "momentum", "warmup_steps": 2},
    "adaptive": {"clipping": "adaptive"},
    "mezo": {"method": "mezo", "noise_multiplier": None, "target_delta": None, "clip": None},
    "correlated": {
        "sampling": "fixed_batches",
        "correlated_noise.kind": "optimized",
        "correlated_noise.hold_direction_for": 2,
    },
    "dp-adamw": {"method": "dp-adamw", "clip": 0.5},
}


def settings_of(kind: str, **settings: Any) -> dict[str, Any]:
    return {"max_steps": 3, "eval_strategy": "no", "logging_steps": 1, **KINDS[kind], **settings}


def trained(folder: Path, resume: bool, settings: dict[str, Any]) -> dict[str, Any]:
    trainer = build(folder, **settings)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model()
    log = trainer.trajectory
    exact = True
    if log.header["replayable"]:
        rebuilt = tiny_model()
        replay(rebuilt, Trajectory.load(folder / LEDGER))
        exact = same(weights(rebuilt), weights(trainer.model))
    releases = [[r.step, r.learning_rate, *r.values] for r in log.releases]
    return {"releases": releases, "exact": exact, "epsilon": trainer.epsilon_spent}


def resumed(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the run comes to; it starts anew where nothing of it was there."""
    return trained(folder, (folder / LEDGER).exists(), settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: Any) -> Any:
    """Kind -> what an uninterrupted run of it comes to."""
    known: dict[str, dict[str, Any]] = {}

    def of(kind: str) -> dict[str, Any]:
        if kind not in known:
            known[kind] = resumed(tmp_path_factory.mktemp(kind), settings_of(kind))
        return known[kind]

    return of


def _die_in_append(step: int, after: bool) -> None:
    append = Trajectory.append

    def dying(self: Trajectory, release: Any, wait: bool = True) -> None:
        if after:
            append(self, release)
        if release.step == step:
            die()
        if not after:
            append(self, release)

    Trajectory.append = dying  # type: ignore[method-assign]


def _die_in_half_a_record(step: int) -> None:
    def half(path: Path, record: bytes, wait: bool = True) -> Any:
        steps = (len(path.read_bytes().split(b"\n", 2)[2])) // len(record)
        with open(path, "ab", buffering=0) as file:
            file.write(record if steps < step else record[: len(record) // 2])
        if steps == step:
            die()
        return lambda: None

    trajectory.append_whole = half


def _die_in_the_update(step: int) -> None:
    apply = zeroth_order_step.apply_release

    def dying(space: Any, log: Any, release: Any, **settings: Any) -> None:
        if release.step == step:
            with torch.no_grad():
                space.tensors[0].add_(1.0)  # half an update
            die()
        apply(space, log, release, **settings)

    zeroth_order_step.apply_release = dying


PLACES: dict[str, tuple[Any, int]] = {
    "noise was drawn": (lambda: _die_in_append(1, after=False), 1),
    "half a record": (lambda: _die_in_half_a_record(1), 1),
    "a whole record": (lambda: _die_in_append(1, after=True), 2),
    "in the update": (lambda: _die_in_the_update(1), 2),
}
"""A place in step 1 -> (what has the process die there, steps that are paid for)."""


def killed(folder: Path, settings: dict[str, Any], prepare: Any, resume: bool = False) -> None:
    def work() -> None:
        prepare()
        trained(folder, resume, settings)

    ended, told = in_child(work)
    assert ended == 9, told


QUICK = [
    ("dpzero", "half a record"),
    ("dpzero", "a whole record"),
    ("correlated", "noise was drawn"),
]
ALL = [(kind, place) for kind in KINDS for place in PLACES
       if kind != "dp-adamw" and (kind, place) not in QUICK]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "place"), QUICK + [pytest.param(*each, marks=pytest.mark.slow) for each in ALL]
)
def test_a_run_without_checkpoints_goes_on_from_its_ledger(
    tmp_path: Path, straight: Any, kind: str, place: str
) -> None:
    """The noise is seeded, so the straight run's releases are known."""
    prepare, paid = PLACES[place]
    settings = settings_of(kind)
    killed(tmp_path, settings, prepare)
    shutil.copy(tmp_path / LEDGER, tmp_path / "seen")
    seen = Trajectory.open(tmp_path / "seen")
    assert seen.next_step == paid
    told = resumed(tmp_path, settings)
    assert told == straight(kind) and told["exact"]
    assert Trajectory.load(tmp_path / LEDGER).releases[:paid] == seen.releases


@pytest.mark.slow
def test_killed_while_it_resumes(tmp_path: Path, straight: Any) -> None:
    """Again and again, in the replay and behind it."""
    settings = settings_of("dpzero")
    killed(tmp_path, settings, lambda: _die_in_append(1, after=True))
    for step in (0, 1):  # while it applies the two steps that are paid for
        killed(tmp_path, settings, lambda step=step: _die_in_the_update(step), resume=True)
    killed(tmp_path, settings, lambda: _die_in_half_a_record(2), resume=True)
    assert resumed(tmp_path, settings) == straight("dpzero")


# ---- every change of a file


def checkpoints_of(folder: Path) -> list[Path]:
    """All folders that are named as one; each is whole, and made by the ledger's first steps."""
    found = sorted(folder.glob("checkpoint-*"))
    log = folder / LEDGER
    for path in found:
        load_state(str(path), Trajectory.load(log))
        step = int(path.name.rpartition("-")[2])
        assert json.loads((path / STATE_NAME).read_text())["step"] == step
        assert json.loads((path / "trainer_state.json").read_text())["global_step"] == step
    return found


EVALUATED = {"max_steps": 4, "eval_strategy": "steps"}
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 2}


def changes(folder: Path, settings: dict[str, Any]) -> list[str]:
    """Each change of a file that a straight run makes, in order."""
    told = folder / "told"

    def work() -> None:
        kill_before_change(folder / "run", -1, told)
        trained(folder / "run", False, settings)

    assert in_child(work)[0] == 0
    return told.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "every"), [("dpzero", 9), ("dp-adamw", 5), ("correlated", 10)])
def test_killed_before_changes_of_files(tmp_path: Path, kind: str, every: int) -> None:
    """One checkpoint is kept, so a first-order run has nothing else to go on from."""
    settings = settings_of(kind, **CHECKPOINTS)
    made = changes(tmp_path, settings)
    expected = resumed(tmp_path / "straight", settings)
    assert len(made) > 20
    resumed_from = set()
    for number, change in list(enumerate(made))[::every]:
        folder = tmp_path / f"run{number}"
        killed(folder, settings, lambda n=number, at=folder: kill_before_change(at, n))
        steps = Trajectory.load(folder / LEDGER).next_step if (folder / LEDGER).exists() else 0
        there = checkpoints_of(folder)
        if kind == "dp-adamw" and steps and not there:
            with pytest.raises(LedgerError, match="what they spent is lost. Train in another"):
                build(folder, **settings).train(resume_from_checkpoint=True)
            assert steps == 1, change
            continue
        resumed_from.add((steps, len(there)))
        told = resumed(folder, settings)
        assert len(told["releases"]) == 2 and told["exact"], change
        assert told["epsilon"] == expected["epsilon"]
        if kind != "dp-adamw":
            assert told == expected, change
        shutil.rmtree(folder)
    assert {steps for steps, _ in resumed_from} >= {0, 2} and (2, 1) in resumed_from


def test_the_last_checkpoint_goes_only_when_the_next_is_there(tmp_path: Path) -> None:
    """A first-order run that keeps one checkpoint, killed where Trainer removed it before."""
    settings = settings_of("dp-adamw", **CHECKPOINTS)

    def prepare() -> None:
        save = checkpoints.save_state
        checkpoints.save_state = lambda folder, step, *rest: (
            die() if step == 2 else save(folder, step, *rest)
        )

    killed(tmp_path, settings, prepare)
    assert [path.name for path in checkpoints_of(tmp_path)] == ["checkpoint-1"]
    assert len(resumed(tmp_path, settings)["releases"]) == 2


# ---- disks and folders


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(
    tmp_path: Path, monkeypatch: Any
) -> None:
    settings = settings_of("dpzero", **CHECKPOINTS)
    save = torch.save

    def full(value: Any, path: Any, *rest: Any, **more: Any) -> None:
        if "checkpoint-2" in str(path):
            raise OSError(28, "No space left on device")
        save(value, path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match=r"checkpoint-2 could not be written.*ledger with its 2"):
            build(tmp_path, **settings).train()
    assert [path.name for path in checkpoints_of(tmp_path)] == ["checkpoint-1"]
    assert not list((tmp_path / checkpoints.UNFINISHED).glob("*"))
    build(tmp_path, **settings).train(resume_from_checkpoint=True)
    assert Trajectory.load(tmp_path / LEDGER).next_step == 2


@pytest.mark.parametrize("way", ["full", "gone", "replaced"])
def test_a_ledger_that_cannot_be_written_stops_the_run(tmp_path: Path, way: str) -> None:
    """Full: the kernel itself refuses the bytes beyond a limit, after it took some."""
    folder, settings = tmp_path / "run", settings_of("dpzero")

    def work() -> list[Any]:
        import resource
        import signal

        def obstruct(log: Trajectory) -> None:
            if way == "full":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                size = log.path.stat().st_size + 5
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            elif way == "gone":
                shutil.move(folder, tmp_path / "moved")
            else:
                other = log.path.read_bytes()
                log.path.unlink()
                log.path.write_bytes(other)

        append = Trajectory.append

        def late(self: Trajectory, release: Any, wait: bool) -> None:
            if release.step == 1:
                obstruct(self)
            append(self, release, wait)

        Trajectory.append = late  # type: ignore[method-assign]
        trainer = build(folder, **settings)
        try:
            trainer.train()
        except LedgerError as error:
            return [str(error), trainer.trajectory.next_step, folder.exists()]
        return ["not refused"]

    message, steps, there = in_child(work)[1]["result"]
    kept = tmp_path / "moved" if way == "gone" else folder
    words = "changed by somebody else" if way == "replaced" else "step 1 could not be written"
    assert words in message and steps == 1 and there == (way != "gone"), message
    assert Trajectory.load(kept / LEDGER).next_step == 1
    if way == "gone":
        shutil.move(kept, folder)
    assert len(resumed(folder, settings)["releases"]) == 3


def test_an_output_dir_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """Said by the operating system, since folders without write permission do not stop root."""

    def refused(*given: Any, **more: Any) -> Any:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(log_file.tempfile, "mkstemp", refused)
        with pytest.raises(
            LedgerError, match=r"cannot be written \(Read-only.*nothing is released"
        ):
            build(tmp_path, **settings_of("dpzero")).train()
    assert not (tmp_path / LEDGER).exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        build(tmp_path / "file", **settings_of("dpzero"))


def test_rows_that_became_fewer_are_refused(tmp_path: Path) -> None:
    settings = settings_of("dpzero")
    killed(tmp_path, settings, lambda: _die_in_append(1, after=True))
    with pytest.raises(LedgerError, match=r"num_examples: 120 -> 119"):
        build(tmp_path, data=tiny_data(119), **settings).train(resume_from_checkpoint=True)
    assert Trajectory.load(tmp_path / LEDGER).next_step == 2


def test_the_best_checkpoint_is_kept_and_named(tmp_path: Path) -> None:
    settings = settings_of("dpzero", **{**CHECKPOINTS, "save_total_limit": 2, **EVALUATED})
    best = {"metric_for_best_model": "eval_x", "greater_is_better": True, "eval_steps": 1}
    values = iter([1.0, 0.1, 0.9, 0.2, 0.3])  # the first one is of the trial before step 0
    given = {"compute_metrics": lambda _: {"x": next(values)}}
    trainer = build(tmp_path, trainer_settings=given, **settings, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert [path.name for path in checkpoints_of(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    kept = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert kept["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    assert not (tmp_path / checkpoints.UNFINISHED).exists()


def test_initial_values_that_a_crash_kept_from_being_written_come_later(tmp_path: Path) -> None:
    """The head is fresh, so that the run keeps its values beside the ledger."""
    from transformers import BertForSequenceClassification, BertModel

    base = tmp_path / "base"
    BertModel(tiny_model().config).save_pretrained(base)

    def model() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return BertForSequenceClassification.from_pretrained(base)

    def killed_run() -> None:
        from hf_dpzero.run_folder import folder as opening

        opening.write_initial_values = lambda *given: die()
        build(tmp_path / "run", model(), **settings_of("dpzero")).train()

    assert in_child(killed_run)[0] == 9
    file = tmp_path / "run" / "initial_values.safetensors"
    assert not file.exists()
    build(tmp_path / "run", model(), **settings_of("dpzero")).train(resume_from_checkpoint=True)
    assert file.is_file()


def test_a_tail_of_zeros_that_was_never_written_is_cut(tmp_path: Path) -> None:
    """As a loss of power leaves it; one in the middle, or a record that is damaged, is refused."""
    path = tmp_path / LEDGER
    log = Trajectory.create(path, {"num_values": 1, "num_directions": 1})
    for step in range(2):
        log.append(trajectory.Release(step, (0.5,), 0.1))
    log.close()
    raw = path.read_bytes()
    path.write_bytes(raw + bytes(24))
    with pytest.raises(LedgerError, match="cut short after step 1"):
        Trajectory.load(path)
    opened = Trajectory.open(path)
    assert opened.next_step == 2 and path.read_bytes() == raw
    opened.close()
    for damaged in (raw[:-24] + bytes(24) + raw[-24:], raw[:-4] + bytes(4), raw[:-24] + b"x" * 24):
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match="corrupt"):
            Trajectory.open(path)


def test_a_sector_that_was_never_written_is_known() -> None:
    record = b"x" * 24
    start = 512 - 10
    raw = bytes(start) + record[:10] + bytes(14)
    assert log_file.never_written(raw, start)
    assert not log_file.never_written(raw[:-1] + b"x", start)
    assert not log_file.never_written(bytes(100) + record[:10] + bytes(14), 100)
