"""What a user may get wrong: one line that says what to do, exit status 2, no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_dpzero.cli import main


def lines(texts: list[Any]) -> str:
    return "\n".join(json.dumps({"text": t, "label": i % 2}) for i, t in enumerate(texts))


FILES: dict[str, tuple[str | bytes, str]] = {
    "rows.xlsx": ("x", "rows are read from"),
    "empty.jsonl": ("", "empty.jsonl is empty"),
    "blank.jsonl": ("\n\n", "blank.jsonl"),
    "broken.jsonl": ('{"text": "a", "label": 1}\n{"text": "b", \n', "line 2 is not JSON"),
    "numbers.jsonl": ("1\n2\n", "line 1 is no JSON object"),
    "broken.json": ('[{"text": "a", "label": 1},\n {"text": ]', "line 2 is not JSON"),
    "mixed.jsonl": ('{"text": "a", "label": 1}\n{"words": ["b"]}\n', "is empty in some rows"),
    "header.csv": ("text,label\n", "header.csv"),
    "empty.csv": ("", "empty.csv is empty"),
    "ragged.csv": ("text,label\na,1\nb,0,3,4\n", "line 3"),
    "quote.csv": ('text,label\n"a,1\n', "quote.csv"),
    "latin.csv": (b"text,label\ncaf\xe9,1\n", "line 2 is not UTF-8"),
    "bad.parquet": ("no parquet", "bad.parquet"),
    "lists.jsonl": (lines([["a"]] * 16), "'text' of the train rows holds lists"),
    "numbered.jsonl": (lines([{"a": 1}] * 16), "'text' of the train rows holds mappings"),
    "public.jsonl": (lines([f"bad {i}" for i in range(16)]), "a copy of|is the train_file"),
    "utf16.csv": ("text,label\na,1\n".encode("utf-16"), "line 1 is not UTF-8"),
    "latin.jsonl": (
        b'{"text": "caf\xe9", "label": 1}\n{"text": "b", "label": 0}\n',
        "line 1 is not UTF-8",
    ),
    "twice.csv": ("text,text,label\na,b,1\n", "the column 'text' more than once"),
    "semicolons.csv": ("text;label\na;1\n", "no column 'text'"),
    "floats.csv": ("text,label\na,0.5\nb,1.5\n", "float64"),
    "gap.csv": ("text,label\na,1\nb,\n", "is empty in some rows"),
    "table.json": ('{"text": ["a", "b"], "label": [0, 1]}', "holds lists"),
    "notes.txt": ("a\nb\n", "rows are read from"),
}
"""What train_file may hold, and what is said of it."""
RECIPES: dict[str, tuple[str | bytes, str]] = {
    "list.yaml": ("- a\n- b\n", "key: value"),
    "text.yaml": ("only words\n", "key: value"),
    "empty.yaml": ("", "key: value"),
    "broken.yaml": ("a: [1, 2\n", "not valid YAML"),
    "latin.yaml": (b"task: \xe9\n", "latin.yaml"),
    "nested.yaml": ("model: {name: x}\n", "unknown key 'model'"),
    "typo.yaml": ("model_name_or_path: x\nlerning_rate: 1.0\n", "'learning_rate'"),
    "twice.yaml": ("model_name_or_path: x\nclip: 1\nclip: 2\n", "'clip' appears more than once"),
    "circle.yaml": ("extends: circle.yaml\n", "circle"),
    "orphan.yaml": ("extends: nowhere.yaml\n", "nowhere.yaml"),
    "utf16.yaml": ("clip: 1\n".encode("utf-16"), "utf16.yaml"),
    "tabs.yaml": ("clip: 1\n\tseed: 2\n", "not valid YAML"),
    "equals.yaml": ("clip = 1\n", "key: value"),
    "two.yaml": ("clip: 1\n---\nclip: 2\n", "not valid YAML"),
    "words.yaml": ("model_name_or_path: x\nclip: one\n", "clip"),
    "truth.yaml": ("model_name_or_path: x\nclip: true\n", "clip"),
    "many.yaml": ("model_name_or_path: x\nclip: [1, 2]\n", "is not a single value"),
    "number.yaml": ("model_name_or_path: 3\n", "3 is not text"),
    "percent.yaml": ("model_name_or_path: x\ntarget_epsilon: 2%\n", "target_epsilon"),
    "train.jsonl": (lines([f"it was good {i}" for i in range(16)]), "train.jsonl"),
}
TRAIN = [
    # what is missing or misspelled
    ("--output_dir", "output_dir: needs a value"),
    ("--model_name_or_path", "model_name_or_path: needs a value"),
    ("--learning_rate", "learning_rate: needs a value"),
    ("--train_file", "train_file: needs a value"),
    ("--lerning_rate 1", "did you mean --learning_rate?|did you mean 'learning_rate'?"),
    ("--max_stpes 4", "'max_steps'"),
    ("words", "--key value"),
    ("--method dpsgd", "'dp-sgd'"),
    # numbers out of range: tests/settings/test_ranges.py has more
    ("--max_steps 0", "max_steps=0"),
    ("--max_steps 2.5", "max_steps"),
    ("--max_steps many", "max_steps"),
    ("--learning_rate inf", "learning_rate=inf"),
    ("--clip 0", "clip=0"),
    ("--num_train_epochs -1 --max_steps -1", "num_train_epochs=-1"),
    ("--num_train_epochs 0 --max_steps -1", "num_train_epochs=0"),
    ("--target_epsilon 0", "epsilon"),
    ("--max_train_samples -1", "max_train_samples=-1"),
    ("--max_seq_length 0", "max_seq_length=0"),
    ("--seed 99999999999999", "seed=99999999999999"),
    ("--subset_seed -1", "subset_seed=-1"),
    ("--target_epsilon inf", "target_epsilon=inf"),
    ("--noise_multiplier 1", "give exactly one of them"),
    # words that are not known, settings that contradict each other
    ("--sampling poison", "'poisson'"),
    ("--sampling truncated_poisson", "max_batch_size"),
    ("--max_batch_size 8", "truncated_poisson"),
    ("--clipping automatic", "clipping='automatic'"),
    ("--torch_dtype fp32", "torch_dtype='fp32'"),
    ("--peft_method ia3", "'ia3'"),
    ("--peft_method lora --lora_target_modules nosuch", "nosuch"),
    ("--trainable nosuchlayer", "matches no parameter"),
    ("--trainable (", "no regular expression"),
    ("--load_in_4bit", "peft_method"),
    ("--peft_method prefix --num_virtual_tokens 1000", "num_virtual_tokens=1000 leaves no room"),
    ("--head_init label_text", "label_texts"),
    ("--lr_scheduler_kwargs notadict", "lr_scheduler_kwargs"),
    ("--lr_scheduler_kwargs {power:2}", "lr_scheduler_kwargs"),
    (
        "--load_best_model_at_end --save_strategy steps",
        "load_best_model_at_end requires the save and eval strategy",
    ),
    ("--save_strategy best", "metric_for_best_model"),
    (
        "--save_strategy best --eval_strategy steps --metric_for_best_model nosuch",
        "metric_for_best_model='nosuch'",
    ),
    ("--eval_strategy sometimes", "'sometimes'"),
    ("--class_names a a", "class_names=['a', 'a']"),
    ("--text_column text --text_pair_column text", "name different columns"),
    ("--extends_run nowhere", "extends_run='nowhere'"),
    ("--resume_from_checkpoint train.jsonl", "is a checkpoint's folder"),
    # files and folders
    ("--train_file .", "is a folder"),
    ("--train_file no.jsonl", "no.jsonl not found"),
    ("--model_name_or_path damaged", "its weights are damaged"),
    ("--model_name_or_path weightless", "model.safetensors"),
    ("--model_name_or_path mute", "has no tokenizer"),
    ("--model_name_or_path train.jsonl", "is a file"),
    ("--output_dir train.jsonl/below", "train.jsonl"),
    ("--text_column body", "no column 'body'"),
    ("--output_dir train.jsonl", "is a file; give a folder"),
    ("--model_name_or_path nowhere/at-all", "nowhere/at-all"),
    ("--model_name_or_path .", "."),
    ("--task no-task.yaml", "no-task.yaml"),
    ("--task stt2", "sst2"),
    ("--resume_from_checkpoint nowhere", "nowhere"),
    ("--report_to clearml", "clearml"),
    ("--report_to clearmll", "clearml"),
    # what training needs
    ("--trace_back", "unknown key 'trace_back'"),
    ("--gradient_accumulation_steps 0", "gradient_accumulation_steps=0"),
    ("--sampling fixed_size_without_replacement", "replace_one"),
    ("--fp16_full_eval true", "fp16_full_eval"),
    ("--resume_from_checkpoint", "No valid checkpoint"),
]
PLAN = "plan --num_examples 1024 --max_steps 100 --expected_batch_size 64"
COMMANDS = [
    ("train .", "is a folder"),
    ("train no/such.yaml", "not found"),
    ("train sst2/minlm-dpzero", "sst2/minilm-dpzero"),
    ("evaluate .", "is a folder"),
    ("plan --recipe .", "is a folder"),
    (f"{PLAN} --target_epsilon 1 --num_examples 0", "num_examples"),
    (f"{PLAN} --target_epsilon 1 --max_steps 0", "max_steps"),
    (f"{PLAN}", "give exactly one"),
    (f"{PLAN} --target_epsilon 1 --noise_multiplier 1", "give exactly one"),
    (f"{PLAN} --target_epsilon 0", "epsilon=0"),
    (f"{PLAN} --target_epsilon 1 --target_delta 2", "delta"),
    (f"{PLAN} --target_epsilon 1 --clip 0", "clip=0"),
    (f"{PLAN} --target_epsilon 1 --sampling shuffle", "'shuffle'"),
    (f"{PLAN} --target_epsilon 1 --sampling truncated_poisson", "needs max_batch_size"),
    (f"{PLAN} --target_epsilon 1 --sampling fixed_size_without_replacement", "replace_one"),
    (f"{PLAN} --target_epsilon 1 --neighboring_relation cousins", "'cousins'"),
    (f"{PLAN} --target_epsilon 1 --accountant magic", "'magic'"),
    ("plan --num_examples 9 --max_steps 2 --target_epsilon 1", "batch_size is missing"),
    ("plan --max_steps 5", "num_examples is missing"),
    ("plan --num_examples 5", "max_steps is missing"),
    ("plan --recipe r.yaml --colour red", "unknown key 'colour'"),
    ("plan --recipe none.yaml", "recipe 'none.yaml' not found"),
    ("audit none.yaml", "recipe 'none.yaml' not found"),
    ("audit r.yaml --runs 10", "runs=10 show nothing"),
    ("recipes --task cola", "sst2"),
    ("init --train_file . --target_epsilon 1 --output new.yaml", "is a folder"),
    ("init --train_file empty.csv --target_epsilon 1 --output new.yaml", "is empty"),
    ("init --train_file train.jsonl --target_epsilon 0", "target_epsilon=0"),
    ("init --train_file train.jsonl --target_epsilon inf", "target_epsilon=inf"),
    ("init --train_file train.jsonl --target_epsilon 1 --target_delta 2", "target_delta=2"),
    (
        "init --train_file train.jsonl --target_epsilon 1 --validation_file train.jsonl",
        "the private rows",
    ),
    ("init --train_file train.jsonl --target_epsilon 1 --text_column label", "both text and label"),
    ("init --train_file floats.csv --target_epsilon 1", "holds floats"),
    ("init --train_file twice.csv --target_epsilon 1 --output new.yaml", "more than once"),
    ("init --train_file train.jsonl --target_epsilon 1 --output no/x.yaml", "does not exist"),
    ("sweep r.yaml --tuning public --grid clip", "field=value"),
    ("sweep r.yaml --tuning public --grid_file .", "grid file '.'"),
    ("compare r.yaml --methods dpzeroo", "dpzeroo"),
    ("compare r.yaml --methods dpzero --epsilons two", "--epsilons two"),
    ("compare r.yaml --methods dpzero --seeds 1.5", "--seeds 1.5"),
    ("compare . --methods dpzero", "is a folder"),
    ("compare r.yaml --methods dpzero --jobs 0", "jobs=0"),
    ("compare r.yaml", "there are no methods"),
    ("compare r.yaml r.yaml --methods dpzero", "give one recipe"),
    ("push nowhere --repo_id a/b --dry_run", "nowhere"),
    ("replay --base r.yaml --trajectory . --output_dir out/x", "."),
    ("replay --base r.yaml --trajectory no.safetensors --output_dir out/x", "no.safetensors"),
    ("replay --base r.yaml --trajectory train.jsonl --output_dir out/x", "train.jsonl"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path) -> Path:
    """All the files, and r.yaml, which would train."""
    folder = tmp_path_factory.mktemp("bad")
    for name, (text, _) in {**FILES, **RECIPES}.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for name, lacking in (("weightless", "model.safetensors"), ("mute", "tokenizer*")):
        shutil.copytree(bert_checkpoint, folder / name, ignore=shutil.ignore_patterns(lacking))
    shutil.copytree(bert_checkpoint, folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"junk")
    values = {
        "model_name_or_path": str(bert_checkpoint), "task": "text_classification",
        "train_file": "train.jsonl", "validation_file": "public.jsonl", "target_epsilon": 4.0,
        "target_delta": 1e-3, "expected_batch_size": 4, "max_steps": 1, "learning_rate": 1e-3,
        "clip": 1.0, "max_seq_length": 16, "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "output_dir": "out/r",
    }  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder


CASES = [
    *[(f"train r.yaml --train_file {name}", said) for name, (_, said) in FILES.items()],
    *[(f"train {name}", said) for name, (_, said) in RECIPES.items()],
    *[(f"train r.yaml {words}", said) for words, said in TRAIN],
    *COMMANDS,
]


@pytest.mark.parametrize(("words", "message"), CASES)
def test_one_line_says_what_is_wrong(words: str, message: str, folder, monkeypatch, capsys: Any):
    monkeypatch.chdir(folder)
    shutil.rmtree("out", ignore_errors=True)
    status = main.main(words.split())
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert status == 2, (words, lines[-1:])
    assert len(errors) == 1 and errors == lines[-1:], lines
    assert any(part in errors[0] for part in message.split("|")), errors
    assert not any(line.startswith("Traceback") for line in lines)
    assert len(errors[0]) < 600
    assert not any(path.is_file() for path in Path("out").rglob("*"))


def test_a_list_of_refused_settings_has_one_a_line(folder, monkeypatch, capsys: Any):
    monkeypatch.chdir(folder)
    wrong = ["--clip=-1", "--debug=underflow_overflow", "--seed=-1"]
    assert main.main(["plan", "--recipe", "r.yaml", *wrong]) == 2
    lines = capsys.readouterr().err.strip().splitlines()[-4:]
    assert lines[0] == "error: 3 settings are refused:"
    assert lines[-1].startswith("  - debug=['underflow_overflow'] prints statistics")
    assert [line.split("=")[0] for line in lines[1:3]] == ["  - clip", "  - seed"]


SECRET_ROWS = {
    "rows.csv": "text,label\nana has flu,1\nbob is well,0\n",
    "colon.csv": 'text,label\n"secret: ana has flu",1\n',
    "rows.jsonl": '{"text": "ana has flu", "label": 1}\n{"text": "ana has flu", "label": 0}\n',
    "rows.json": '[{"text": "ana has flu", "label": 1}]',
}


@pytest.mark.parametrize("name", SECRET_ROWS)
@pytest.mark.parametrize("command", ["train {}", "plan --recipe {}", "compare {}"])
def test_private_rows_that_are_taken_for_a_recipe_are_not_quoted(
    name: str, command: str, tmp_path, capsys: Any
):
    path = tmp_path / name
    path.write_text(SECRET_ROWS[name])
    assert main.main(command.format(path).split()) == 2
    said = capsys.readouterr()
    assert "ana" not in said.err + said.out and "flu" not in said.err + said.out
    assert name in said.err
