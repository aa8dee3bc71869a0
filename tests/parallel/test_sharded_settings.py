"""What runs on parts of parameters are given, and what is refused; in one process."""

from __future__ import annotations

from types import SimpleNamespace

import peft
import pytest
import torch
from tiny_runs import build, config, tiny_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_dpzero.checks.passes import blank_microbatch
from hf_dpzero.objectives.losses import batch_size, num_examples
from hf_dpzero.parallel import collectives, fsdp
from hf_dpzero.perturbation.directions import Direction


def told_to_shard(plugin=None) -> SimpleNamespace:
    """An accelerator that was told to use FSDP with such a plugin."""
    settings = {
        "fsdp_version": 2, "cpu_offload": None, "reshard_after_forward": True,
        "mixed_precision_policy": "bf16 copies", **(plugin or {}),
    }  # fmt: skip
    kind = SimpleNamespace(value=settings.pop("distributed_type", "FSDP"))
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**settings))
    return SimpleNamespace(state=state, distributed_type=kind)


def test_a_trainer_cuts_by_itself_and_gathers_weights_as_they_are(tmp_path):
    accelerator = told_to_shard()
    assert fsdp.uses_fsdp2(accelerator, None, config(tmp_path))
    assert accelerator.state.fsdp_plugin.mixed_precision_policy is None


@pytest.mark.parametrize(
    ("plugin", "settings", "message"),
    [
        (
            {"fsdp_version": 1},
            {},
            "fsdp_version=1 .* set fsdp_version: 2, as in configs/accelerate",
        ),
        ({"distributed_type": "TP"}, {}, "distributed_type=TP shards or copies parameters"),
        ({"cpu_offload": True}, {}, "fsdp_offload_params .* set it to false"),
        ({}, {"method": "dp-sgd"}, "method='dp-sgd' under FSDP.*use method='dpzero'"),
        ({}, {"performance.perturbation_strategy": "layerwise"}, "use 'whole_model'"),
        ({}, {"performance.perturbation_strategy": "stacked"}, "use 'whole_model'"),
        ({}, {"accelerator_config": {"even_batches": False}}, "wait for ever; leave it at True"),
    ],
)
def test_settings_that_need_whole_parameters_are_refused(tmp_path, plugin, settings, message):
    with pytest.raises(ValueError, match=message):
        fsdp.uses_fsdp2(told_to_shard(plugin), None, config(tmp_path, **settings))


def test_weights_that_fsdp_would_change_are_refused(tmp_path):
    half = tiny_model().bfloat16()
    plain = SimpleNamespace(mixed_precision="no")
    fsdp.check_splittable(half, plain)
    with pytest.raises(
        ValueError, match="is torch.bfloat16 and mixed_precision='bf16'.*Leave bf16"
    ):
        fsdp.check_splittable(half, SimpleNamespace(mixed_precision="bf16"))
    half.requires_grad_(False)
    fsdp.check_splittable(half, SimpleNamespace(mixed_precision="bf16"))
    quantised = nn.Module()
    quantised.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="weight is quantised .*plain data parallelism"):
        fsdp.check_splittable(quantised, plain)
    settings = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="is a prompt of PEFT's.*train LoRA, or use plain data"):
        fsdp.check_splittable(peft.get_peft_model(tiny_model(), settings), plain)


def test_blocks_are_layers_and_not_what_holds_an_embedding():
    """BERT's class names BertEmbeddings too, around the matrix that Accelerate cuts by itself."""
    assert "BertEmbeddings" in tiny_model()._no_split_modules
    assert fsdp.layer_classes(tiny_model()) == ["BertLayer"]
    small = GPT2Config(vocab_size=9, n_embd=4, n_layer=2, n_head=1)
    assert fsdp.layer_classes(GPT2LMHeadModel(small)) == ["GPT2Block"]
    own = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    assert fsdp.layer_classes(own) == ["Linear"]
    assert fsdp.layer_classes(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_a_process_with_fewer_microbatches_makes_blank_passes(
    tmp_path, monkeypatch, microbatch_size
):
    trainer = build(tmp_path, microbatch_size=microbatch_size, max_steps=1)
    trainer.train()
    blank = blank_microbatch(trainer.run)
    lockstep = fsdp.Lockstep(trainer.run.objective, blank)
    monkeypatch.setattr(collectives, "gather_numbers", lambda count: [count, 3])
    own = trainer.run.shapes.microbatches([5, 6])
    padded = lockstep(own)
    assert len(padded) == 3 and padded[: len(own)] == own
    assert [num_examples(part) for part in padded[len(own) :]] == [0] * (3 - len(own))
    assert all(batch_size(part) == microbatch_size for part in padded)
    assert lockstep(own * 4) == own * 4  # the one with most makes none
    losses, _ = trainer.step.differences.losses(padded, [Direction(7, 0)])
    trainer.space.settle_()
    assert len(losses) == 2


def test_objectives_of_many_passes_are_refused(tmp_path):
    def counted(model, inputs):
        raise AssertionError("not run")

    counted.single_pass = False
    with pytest.raises(ValueError, match="a loss of one pass"):
        fsdp.Lockstep(counted, {})


def test_processes_that_compute_other_losses_are_refused(monkeypatch):
    losses = torch.tensor([0.5, float("nan")])
    assert fsdp.assert_same_losses(losses) is losses
    monkeypatch.setattr(collectives, "gather_numbers", lambda digest: [digest, digest + 1])
    with pytest.raises(ValueError, match="other losses for the same rows"):
        fsdp.assert_same_losses(losses)


def test_a_whole_models_state_is_its_state_dict():
    model = tiny_model()
    found, expected = fsdp.gathered_state(model), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert fsdp.gathered_state(model, keep=False) == {}


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    from safetensors.torch import save_file

    model = tiny_model()
    values = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    fsdp.load_gathered_(model, str(tmp_path))
    assert torch.equal(model.classifier.bias, values["classifier.bias"])
    save_file(values | {"more": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds more, \[1\], which this model does not have"):
        fsdp.load_gathered_(model, str(tmp_path))
