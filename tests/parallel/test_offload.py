"""Training a model that Accelerate offloads: the same releases, weights and files as without offload."""

from __future__ import annotations

import filecmp
import hashlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import peft
import pytest
import torch
from killed_runs import die, in_child
from tiny_language_models import save_causal_lm
from tiny_runs import build, same, tiny_model, weights
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    TrainerCallback,
)

from hf_dpzero.estimators.offload import living_elsewhere, prefetcher_of
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.replay import replay
from hf_dpzero.parallel import offload
from hf_dpzero.parallel.offload import check_offload, in_own_file, settle_offloaded
from hf_dpzero.perturbation import coordinates
from hf_dpzero.perturbation.segments import GridSegment
from hf_dpzero.recipes.models import settle_quantised_

SPLIT = {
    **dict.fromkeys(("bert.embeddings", "bert.pooler", "dropout", "classifier"), "cpu"),
    "bert.encoder": "disk",
}
LORA = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(base: Path, **settings: Any) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(base, **settings)


def offloaded(base: Path, folder: Path, where: str, **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    if where in ("disk", "split"):
        device_map = {"": "disk"} if where == "disk" else SPLIT
        return load(base, device_map=device_map, offload_folder=str(folder), **settings)
    model = load(base, **settings)
    if where == "cpu":
        return accelerate.cpu_offload(model, offload_buffers=True)
    return accelerate.disk_offload(model, folder)


def digests(*folders: Path) -> dict[str, str]:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        ("cpu", torch.float32),
        ("split", torch.bfloat16),
        pytest.param("disk", torch.float32, marks=pytest.mark.slow),
        pytest.param("files", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_run_without_offload(
    tmp_path: Path, base: Path, where: str, dtype: torch.dtype
):
    elsewhere = offloaded(base, tmp_path / "folder", where, dtype=dtype)
    here = build(tmp_path / "here", load(base, dtype=dtype), weight_decay=0.01)
    away = build(tmp_path / "away", elsewhere, weight_decay=0.01)
    untouched = digests(base, tmp_path / "folder")
    assert away.evaluate()["eval_loss"] == here.evaluate()["eval_loss"]  # before it is trained
    for trainer in (here, away):
        trainer.train()
        trainer.save_model()
    assert away.step.differences.strategy == "layerwise"
    assert away.trajectory.releases == here.trajectory.releases
    assert away.trajectory.header == here.trajectory.header  # the base's digest among others
    assert same(weights(away.model), weights(here.model))
    assert not same(weights(away.model), weights(load(base, dtype=dtype)))
    assert away.evaluate()["eval_loss"] == here.evaluate()["eval_loss"]
    for name in ("model.safetensors", "config.json", "privacy_report.json"):
        assert filecmp.cmp(tmp_path / "here" / name, tmp_path / "away" / name, shallow=False), name
    assert digests(base, tmp_path / "folder") == untouched
    fresh = load(base, dtype=dtype)
    replay(fresh, away.trajectory)
    assert same(weights(fresh), weights(away.model))


@pytest.mark.parametrize("directions", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_adapters_on_an_offloaded_base(tmp_path: Path, base: Path, directions: int):
    """The base comes once a microbatch, not once a pass, where directions are stacked (K = 8)."""
    settings: dict[str, Any] = {
        "trainer_settings": {"peft_config": LORA},
        "num_directions": directions,
        "expected_batch_size": 8,
    }
    here = build(tmp_path / "here", load(base), **settings)
    away = build(tmp_path / "away", offloaded(base, tmp_path / "folder", "disk"), **settings)
    for trainer in (here, away):
        trainer.train()
    assert same(weights(away.model), weights(here.model))
    assert away.trajectory.releases == here.trajectory.releases
    assert away.step.differences.strategy == here.step.differences.strategy
    assert (away.step.differences.strategy == "stacked") == (directions == 8)
    elsewhere = living_elsewhere(away.model)
    assert elsewhere
    for name, parameter in away.model.named_parameters():
        of_base = ".modules_to_save." not in name and "lora" not in name
        assert (id(parameter) in elsewhere) == of_base


def test_an_adapter_that_was_put_on_before_has_no_values(tmp_path: Path, base: Path):
    model = peft.get_peft_model(offloaded(base, tmp_path / "folder", "disk"), LORA)
    with pytest.raises(ValueError, match="pass peft_config= to DPZeroTrainer"):
        build(tmp_path / "out", model)
    settled = offloaded(base, tmp_path / "folder", "disk")
    settle_offloaded(settled)
    build(tmp_path / "out", peft.get_peft_model(settled, LORA), max_steps=1).train()


class Stop(TrainerCallback):
    """Ends a run as Ctrl-C does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, base: Path):
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    first = build(tmp_path / "out", offloaded(base, tmp_path / "folder", "disk"), **settings)
    first.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first.trajectory.next_step == 4
    again = build(tmp_path / "out", offloaded(base, tmp_path / "folder", "split"), **settings)
    again.train(resume_from_checkpoint=True)
    assert again.trajectory.next_step == 6
    fresh = load(base)
    replay(fresh, again.trajectory)
    assert same(weights(fresh), weights(again.model))


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_of_its_weights(tmp_path: Path, base: Path):
    """Killed between two writes of an update, with the disk's copy half old and half new."""
    applied, apply = [], GridSegment.apply_

    def dying(segment: GridSegment, *given: Any) -> Any:
        applied.append(segment)
        if len(applied) == 40:
            die()
        return apply(segment, *given)

    def run() -> None:
        GridSegment.apply_ = dying  # type: ignore[method-assign]
        coordinates.SMALL = 256  # several segments
        build(tmp_path / "out", offloaded(base, tmp_path / "folder", "disk")).train()

    before = digests(base)
    assert in_child(run) == (signal.SIGKILL, None)
    assert digests(base) == before
    assert list((tmp_path / "folder").iterdir()) == []
    # The release of the step that was being applied is in the ledger: it is replayed, not paid again.
    again = build(tmp_path / "out", offloaded(base, tmp_path / "folder", "disk"))
    again.train(resume_from_checkpoint=True)
    paid = again.trajectory.releases
    whole = build(tmp_path / "whole", load(base))
    whole.train()
    assert paid[:3] == whole.trajectory.releases[:3]
    assert again.trajectory.next_step == 6
    fresh = load(base)
    replay(fresh, again.trajectory)
    assert same(weights(fresh), weights(again.model))


def test_generation_ties_and_digests(tmp_path: Path):
    """Tied embeddings live in one place, whichever function offloaded them."""
    folder = save_causal_lm(tmp_path / "lm")
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(5, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    wanted = plain.generate(ids, **inputs)
    by_map = AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": "disk"}, offload_folder=str(tmp_path / "one")
    )
    by_disk = accelerate.disk_offload(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "two"
    )
    by_cpu = accelerate.cpu_offload(AutoModelForCausalLM.from_pretrained(folder))
    for model in (by_map, by_disk, by_cpu):
        settle_offloaded(model.eval())
        assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
        assert digest_model(model) == digest_model(plain)
        assert torch.equal(model.generate(ids, **inputs), wanted)


def test_weights_that_are_cast_on_loading(tmp_path: Path, base: Path):
    model = offloaded(base, tmp_path / "folder", "disk", dtype=torch.bfloat16)
    settle_offloaded(model)
    assert digest_model(model) == digest_model(load(base, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="not converted to torch.float32 in place"):
        model.to(torch.float32)
    assert model.to("meta") is model  # moves nothing
    assert not any(p.is_meta for p in model.parameters())


def test_weights_on_disk_are_saved_in_shards(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(offload, "SHARD", "10KB")
    trainer = build(tmp_path / "out", offloaded(base, tmp_path / "folder", "disk"), max_steps=1)
    trainer.train()
    trainer.save_model()
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert same(weights(load(tmp_path / "out")), weights(trainer.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "dpgd-0th", "num_directions": 2},
        {"method": "mezo", "noise_multiplier": None, "target_delta": None, "clip": None},
        {"direction": "gaussian", "num_directions": 3, "update_rule": "momentum"},
    ],
)
def test_other_methods_and_rules(tmp_path: Path, base: Path, settings: dict[str, Any]):
    runs, strategy = [], {"perturbation_strategy": "layerwise"}
    models = {"here": load(base), "away": offloaded(base, tmp_path / "folder", "disk")}
    for name, model in models.items():
        trainer = build(tmp_path / name, model, performance=strategy, **settings)
        trainer.train()
        runs.append(weights(trainer.model))
    assert same(*runs)


@pytest.mark.slow
def test_float_layers_are_offloaded_beside_quantised_ones(tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    tiny_model(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "base")
    packed = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["classifier"])
    runs = []
    for name in ("here", "away"):
        model = load(tmp_path / "base", quantization_config=packed)
        settle_quantised_(model)
        if name == "away":
            accelerate.cpu_offload(model.bert.embeddings, torch.device("cpu"))
        settings: dict[str, Any] = {"trainer_settings": {"peft_config": LORA}, "microbatch_size": 1}
        trainer = build(tmp_path / name, model, **settings)
        trainer.train()
        runs.append(weights(trainer.model))
    assert same(*runs)
    model = accelerate.cpu_offload(load(tmp_path / "base", quantization_config=packed))
    with pytest.raises(
        ValueError, match=r"query\.weight is quantised \(torch\.uint8\) and offloaded"
    ):
        build(tmp_path / "out", model)


def test_a_file_of_ones_own(tmp_path: Path):
    values = torch.arange(12.0).view(3, 4)
    copy = in_own_file(values, str(tmp_path), torch.bfloat16)
    assert copy.dtype == torch.bfloat16 and torch.equal(copy.float(), values)
    assert list(tmp_path.iterdir()) == []  # without a name
    copy.zero_()
    assert float(values.sum()) == 66.0
    with pytest.raises(OSError, match="space|large"):
        in_own_file(torch.empty(1 << 50, device="meta"), str(tmp_path))  # no room
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dp-sgd"}, "weights are there for a forward pass"),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "Turn torch_compile off"),
        ({"performance.perturbation_strategy": "whole_model"}, "offloaded weights that train"),
    ],
)
def test_what_offload_does_not_allow(
    tmp_path: Path, base: Path, settings: dict[str, Any], message: str
):
    trainer = build(tmp_path / "out", offloaded(base, tmp_path / "folder", "cpu"), **settings)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_several_processes_are_sent_to_fsdp2(tmp_path: Path, base: Path):
    model = offloaded(base, tmp_path / "folder", "cpu")
    settle_offloaded(model)
    with pytest.raises(ValueError, match=r"2 processes.*configs/accelerate/fsdp2\.yaml"):
        check_offload(model, SimpleNamespace(world_size=2))


def test_quantised_weights_are_not_offloaded(tmp_path: Path):
    module, packed = torch.nn.Module(), torch.zeros(4, 4, dtype=torch.int8)
    module.weight = torch.nn.Parameter(packed, requires_grad=False)
    model = accelerate.cpu_offload(module)
    with pytest.raises(ValueError, match="quantised layers on the GPU"):
        settle_offloaded(model)
    assert prefetcher_of(torch.nn.Linear(2, 2)) is None
