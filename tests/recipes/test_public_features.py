"""Components of a decoder's states: the equation, what is public, a run from recipe to replay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from row_files import row_files
from tiny_language_models import save_causal_lm

from hf_dpzero.cli import main
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.build import build_trainer, digest_of_public_texts
from hf_dpzero.recipes.models import load_model
from hf_dpzero.recipes.public_features import components_of, public_rows, take_public_features_
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier, pool
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.description import DataArguments

WORDS = ("film", "evening", "river", "school", "horse", "town", "man", "music", "lake", "house")
TEXTS = [f"The {a} was {b}." for a in WORDS for b in ("good", "bad", "okay", "slow")]
PUBLIC = [f"A {a} with the {b}" for a in WORDS for b in WORDS[:3]]
TEMPLATE = "Review: {sentence}\nSentiment:"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal_lm(tmp_path_factory.mktemp("decoder"))


def public_file(folder: Path, texts: list[str]) -> str:
    path = folder / "public.jsonl"
    path.write_text("".join(json.dumps({"sentence": text}) + "\n" for text in texts))
    return str(path)


def settings(folder: Path, checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """A recipe's keys: a head on four components of the decoder's states."""
    rows = [{"sentence": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    return {
        "model_name_or_path": str(checkpoint), "architecture": "sentence_classifier",
        "pooling": "last", "features": "all_layers", "components": 4, "head_init": "zero",
        "precompute_features": True, "trainable": "^classifier", "task": "sst2",
        "template": TEMPLATE, "max_seq_length": 24, "method": "dpzero", "target_epsilon": 2.0,
        "target_delta": 1e-3, "num_directions": 2, "expected_batch_size": 8, "max_steps": 2,
        "learning_rate": 0.01, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "output_dir": str(folder / "out"), "public_file": public_file(folder, PUBLIC),
        **row_files(folder, rows[8:], rows[:8]), **changes,
    }  # fmt: skip


def written(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(values))
    return str(path)


def loaded(values: dict[str, Any]) -> tuple[SentenceClassifier, Any, Any]:
    recipe = load_recipe(written(Path(values["output_dir"]).parent, values))
    task = build_task(recipe.data)
    model, tokenizer = load_model(recipe.model, task)
    assert isinstance(model, SentenceClassifier)
    return model, tokenizer, task


@pytest.mark.false_alarm(0)  # a fixed seed
def test_components_are_standardised_rotated_and_half_whitened():
    """Against z = c diag(l)^(-1/4) V' (h - m) / s, whose covariance is c^2 diag(sqrt(l))."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(400, 6, generator=generator) @ torch.randn(6, 6, generator=generator)
    h = 100 * mixed * torch.tensor([1.0, 10, 0.1, 1, 3, 1]) + 5
    constant = torch.full((400, 1), 7.0)
    weight, bias = components_of(torch.cat([h, constant], dim=1), 3)
    assert (weight.shape, bias.shape) == ((3, 7), (3,)) and not weight[:, 6].any()
    z = (torch.cat([h, constant], dim=1).double() @ weight.double().T + bias.double()).float()
    values = torch.linalg.eigvalsh(torch.corrcoef(h.double().T)).flip(0)[:3]
    covariance = z.T.double() @ z.double() / 400
    expected = values.sqrt().diag()
    scale = covariance[0, 0] / expected[0, 0]
    torch.testing.assert_close(covariance, scale * expected, atol=2e-3 * float(scale), rtol=1e-3)
    assert float(z.norm(dim=1).median()) == pytest.approx(1.0, rel=1e-3)


@torch.no_grad()
def test_the_head_sees_components_of_the_last_token_in_each_layer(checkpoint, tmp_path):
    values = settings(tmp_path, checkpoint, normalize=False)
    model, tokenizer, task = loaded(values)
    rows = task.tokenize(tokenizer)["validation"]
    text = f"Review: {TEXTS[0]}\nSentiment:"
    assert rows["input_ids"][0] == tokenizer(text)["input_ids"]
    batch = task.collator(tokenizer)([rows[i] for i in range(4)])
    batch.pop("labels")
    states = []
    for text in TEXTS[:4]:
        ids = tokenizer(f"Review: {text}\nSentiment:", return_tensors="pt")["input_ids"]
        hidden = model.encoder(ids, output_hidden_states=True).hidden_states
        states.append(torch.cat([state[0, -1] for state in hidden]))
    expected = model.public_features(torch.stack(states))
    torch.testing.assert_close(model.embed(**batch), expected, atol=1e-4, rtol=1e-4)
    assert model.public_features.weight.shape == (4, 3 * 16) and expected.std() > 0.1
    assert not any(p.requires_grad for p in model.public_features.parameters())


def test_layers_above_the_highest_one_are_left_out(checkpoint, tmp_path):
    model, _, _ = loaded(settings(tmp_path, checkpoint, features="0, 1"))
    whole, _, _ = loaded(settings(tmp_path, checkpoint))
    count = [sum(".layers.1." in name for name, _ in m.named_parameters()) for m in (model, whole)]
    assert count[0] == 0 < count[1] and model.config.layers == (0, 1)
    with pytest.raises(ValueError, match=r"features='5': the encoder has the layers 0 to 2"):
        loaded(settings(tmp_path, checkpoint, features="5"))


def test_last_pooling_finds_the_last_attended_token():
    states, mask = torch.arange(12.0).reshape(2, 3, 2), torch.tensor([[1, 1, 0], [0, 1, 1]])
    assert pool(states, mask, "last").tolist() == [[2.0, 3.0], [10.0, 11.0]]


def test_a_run_is_saved_evaluated_and_replayed(checkpoint, tmp_path, capsys):
    """The components are parameters: of the digest, of the saved weights, and never trained."""
    values = settings(tmp_path, checkpoint)
    recipe, out = written(tmp_path, values), tmp_path / "out"
    assert main.main(["train", recipe]) == 0
    model, _, task = loaded(values)
    again, _ = load_model(
        dataclasses.replace(load_recipe(recipe).model, model_name_or_path=str(out)), task
    )
    assert torch.equal(again.public_features.weight, model.public_features.weight)
    assert not torch.equal(again.classifier.weight, model.classifier.weight)
    report = json.loads((out / "privacy_report.json").read_text())
    assert (
        report["base_weights"] == "equal_to_named_but_new_parts"
    )  # the decoder is the checkpoint's
    assert any(f"(SHA-256 {again.config.public_texts[:16]})" in c for c in report["caveats"])
    further = {**values, "model_name_or_path": str(out), "base_is_public": True}
    public_file(tmp_path, PUBLIC[1:])
    with pytest.raises(ValueError, match="were fitted to other texts than public_file="):
        build_trainer(load_recipe(written(tmp_path, further)))
    written(tmp_path, values)
    assert main.main(["push", str(out), "--repo_id", "me/it", "--dry_run"]) == 0
    shown = json.loads((out / "hub" / "config.json").read_text())
    assert shown["encoder"]["_name_or_path"] == checkpoint.name  # not where it lay
    Path(values["public_file"]).unlink()  # whoever verifies a release may not have it
    assert main.main(["evaluate", recipe, "--model_name_or_path", str(out)]) == 0
    words = ["--trajectory", str(out / "trajectory.safetensors"), "--output_dir"]
    assert main.main(["replay", "--base", recipe, *words, str(tmp_path / "rebuilt")]) == 0
    assert "bit for bit" in capsys.readouterr().out
    bare = settings(tmp_path, checkpoint, components=5)
    other, _, _ = loaded(bare)
    with pytest.raises(ValueError, match="made with another encoder, features or components"):
        take_public_features_(other, out)
    with pytest.raises(ValueError, match="made with components=4, the recipe says 5; set"):
        load_model(ModelArguments(**{
            **dataclasses.asdict(load_recipe(written(tmp_path, bare)).model),
            "model_name_or_path": str(out),
        }), task)  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([*PUBLIC, TEXTS[9]], "holds the text of a training row"),
        (PUBLIC[:4], "states of 4 public rows span 3 directions: give at least 5 different rows"),
        (PUBLIC[:2] * 10, "span 1 directions"),
    ],
)
def test_public_text_that_is_private_or_too_little_is_refused(checkpoint, tmp_path, texts, said):
    values = settings(tmp_path, checkpoint)
    public_file(tmp_path, texts)
    with pytest.raises(ValueError, match=said):
        loaded(values)


def test_rows_that_a_subset_left_out_are_private_too(checkpoint, tmp_path):
    values = settings(tmp_path, checkpoint, max_train_samples=2)
    recipe = load_recipe(written(tmp_path, values))
    kept = build_task(recipe.data).splits["train"]["sentence"][:]
    left_out = next(text for text in TEXTS[8:] if text not in kept)
    public_file(tmp_path, [*PUBLIC, left_out])
    with pytest.raises(ValueError, match="holds the text of a training row"):
        build_trainer(recipe)


def test_a_zero_shot_figure_is_of_no_private_row(checkpoint, tmp_path, capsys):
    """Also where the rows that it would be fitted to were left out of the recipe's subset."""
    recipe = written(tmp_path, settings(tmp_path, checkpoint, max_train_samples=2))
    public_file(tmp_path, TEXTS[8:])
    assert main.main(["evaluate", recipe, "--zero_shot"]) == 2
    assert "holds the text of a training row" in capsys.readouterr().err


def test_the_recipes_own_rows_are_private_whatever_the_command_line_names(
    checkpoint, tmp_path, capsys
):
    values = settings(tmp_path, checkpoint)
    recipe, elsewhere = written(tmp_path, values), tmp_path / "elsewhere"
    elsewhere.mkdir()
    others = [
        {"sentence": f"A lake by the {word}.", "label": i % 2} for i, word in enumerate(WORDS)
    ]
    files = row_files(elsewhere, others[:8], others[8:])
    words = ["evaluate", recipe, "--zero_shot", *(f"--{k}={v}" for k, v in files.items())]
    assert main.main(words) == 0
    public_file(tmp_path, TEXTS[8:])
    assert main.main(words) == 2
    assert "holds the text of a training row" in capsys.readouterr().err
    Path(values["train_file"]).unlink()  # a recipe of rows that are not here
    assert main.main(words) == 0


@pytest.mark.parametrize(
    "public",
    [
        {"premise": "The  film was good.", "hypothesis": "Nobody was there."},
        {"premise": "Nobody was there.", "hypothesis": "The film was good."},
    ],
)
def test_a_private_text_beside_another_one_is_private(tmp_path, public):
    """Of pairs each long text counts, and rows without a label as well."""
    rows = [
        {"premise": "A horse ran home.", "hypothesis": "It ran.", "label": 0},
        {"premise": "The film was good.", "hypothesis": "It was so.", "label": -1},
    ]
    files = row_files(tmp_path, rows, [{"premise": "A", "hypothesis": "B", "label": 1}])
    data, path = DataArguments(task="snli", **files), tmp_path / "public.jsonl"
    path.write_text(json.dumps({"premise": "A man", "hypothesis": "It ran."}) + "\n")
    assert digest_of_public_texts(
        str(path), data, build_task(data)
    )  # short texts are alike by chance
    path.write_text(json.dumps(public) + "\n")
    with pytest.raises(ValueError, match="holds the text of a training row"):
        digest_of_public_texts(str(path), data, build_task(data))


def test_states_that_are_not_finite_or_too_narrow_are_refused():
    states = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="components=5 of states of 4 numbers: lower it"):
        components_of(states, 5)
    states[3, 2] = torch.inf
    with pytest.raises(ValueError, match="not all finite"):
        components_of(states, 2)


def test_the_task_names_the_columns_of_public_text(checkpoint, tmp_path):
    values = settings(tmp_path, checkpoint)
    Path(values["public_file"]).write_text('{"text": "a river"}\n')
    task = build_task(load_recipe(written(tmp_path, values)).data)
    with pytest.raises(
        ValueError, match=r"no column 'sentence' \(they have text\); set public_file"
    ):
        public_rows(task, values["public_file"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"features": "top"}, "features='top' is not last, all_layers or numbers"),
        ({"public_file": None}, "one needs the other; set public_file"),
        ({"components": None}, "one needs the other; set components"),
        ({"components": 0}, "components=0 must be positive"),
        ({"pair_features": "siamese"}, "set pair_features: joint"),
        ({"precompute_features": False}, "set precompute_features: true"),
        ({"architecture": "auto"}, "needs architecture: sentence_classifier"),
        ({"template": "{sentence} {answer}"}, "needs a prompt.*, or leave out {mask} and {answer}"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(checkpoint, tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        loaded(settings(tmp_path, checkpoint, **changes))


def test_a_long_text_is_cut_in_its_field(checkpoint, tmp_path):
    """So the last token stays the template's."""
    data = DataArguments(
        task="text_classification", max_seq_length=12, template="It: {text}\nSo:",
        **row_files(tmp_path, [{"text": "river " * 40, "label": 0}], [{"text": "a", "label": 1}]),
        class_names=["no", "yes"],
    )  # fmt: skip
    _, tokenizer = load_model(ModelArguments(model_name_or_path=str(checkpoint)), build_task(data))
    ids = build_task(data).tokenize(tokenizer)["train"]["input_ids"][0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert len(ids) <= 12 and text.startswith("It: river") and text.endswith("\nSo:")
