"""What a user may get wrong: one line that says what to do, exit status 2, no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_dpzero.cli import main

ROWS = [{"text": f"it was good {i}", "label": i % 2} for i in range(16)]
FILES: dict[str, str | bytes] = {
    "public.jsonl": "\n".join(json.dumps(row | {"text": f"bad {i}"}) for i, row in enumerate(ROWS)),
    "train.jsonl": "\n".join(map(json.dumps, ROWS)),
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "broken.jsonl": '{"text": "a", "label": 1}\n{"text": "b", \n',
    "numbers.jsonl": "1\n2\n",
    "broken.json": '[{"text": "a", "label": 1},\n {"text": ]',
    "mixed.jsonl": '{"text": "a", "label": 1}\n{"words": ["b"]}\n',
    "lists.jsonl": "\n".join(json.dumps(row | {"text": ["a"]}) for row in ROWS),
    "numbered.jsonl": "\n".join(json.dumps(row | {"text": {"a": 1}}) for row in ROWS),
    "header.csv": "text,label\n",
    "empty.csv": "",
    "ragged.csv": "text,label\na,1\nb,0,3,4\n",
    "quote.csv": 'text,label\n"a,1\n',
    "latin.csv": b"text,label\ncaf\xe9,1\n",
    "utf16.csv": "text,label\na,1\n".encode("utf-16"),
    "latin.jsonl": b'{"text": "caf\xe9", "label": 1}\n{"text": "b", "label": 0}\n',
    "twice.csv": "text,text,label\na,b,1\n",
    "semicolons.csv": "text;label\na;1\n",
    "floats.csv": "text,label\na,0.5\nb,1.5\n",
    "gap.csv": "text,label\na,1\nb,\n",
    "table.json": '{"text": ["a", "b"], "label": [0, 1]}',
    "notes.txt": "a\nb\n",
    "bad.parquet": "no parquet",
    "rows.xlsx": "x",
    "list.yaml": "- a\n- b\n",
    "text.yaml": "only words\n",
    "empty.yaml": "",
    "broken.yaml": "a: [1, 2\n",
    "latin.yaml": b"task: \xe9\n",
    "nested.yaml": "model: {name: x}\n",
    "typo.yaml": "model_name_or_path: x\nlerning_rate: 1.0\n",
    "twice.yaml": "model_name_or_path: x\nclip: 1\nclip: 2\n",
    "circle.yaml": "extends: circle.yaml\n",
    "orphan.yaml": "extends: nowhere.yaml\n",
    "utf16.yaml": "clip: 1\n".encode("utf-16"),
    "tabs.yaml": "clip: 1\n\tseed: 2\n",
    "equals.yaml": "clip = 1\n",
    "two.yaml": "clip: 1\n---\nclip: 2\n",
    "words.yaml": "model_name_or_path: x\nclip: one\n",
    "truth.yaml": "model_name_or_path: x\nclip: true\n",
    "many.yaml": "model_name_or_path: x\nclip: [1, 2]\n",
    "number.yaml": "model_name_or_path: 3\n",
    "percent.yaml": "model_name_or_path: x\ntarget_epsilon: 2%\n",
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
    # numbers out of range
    ("--max_steps 0", "max_steps=0"),
    ("--max_steps -3", "max_steps=-3"),
    ("--max_steps 1e9", "1000000000 steps"),
    ("--max_steps 2.5", "max_steps"),
    ("--max_steps many", "max_steps"),
    ("--learning_rate -1", "learning_rate=-1"),
    ("--learning_rate nan", "learning_rate"),
    ("--learning_rate inf", "learning_rate=inf"),
    ("--weight_decay -0.1", "weight_decay=-0.1"),
    ("--clip -1", "clip=-1"),
    ("--clip 0", "clip=0"),
    ("--smoothing 0", "smoothing=0"),
    ("--num_directions 0", "num_directions=0"),
    ("--expected_batch_size 0", "expected_batch_size=0"),
    ("--expected_batch_size 1000", "expected_batch_size=1000"),
    ("--microbatch_size 0", "microbatch_size=0"),
    ("--per_device_eval_batch_size 0", "per_device_eval_batch_size=0"),
    ("--per_device_eval_batch_size -4", "per_device_eval_batch_size=-4"),
    ("--num_train_epochs -1 --max_steps -1", "num_train_epochs=-1"),
    ("--num_train_epochs 0 --max_steps -1", "num_train_epochs=0"),
    ("--target_epsilon -2", "epsilon"),
    ("--target_epsilon 0", "epsilon"),
    ("--target_delta 1.5", "delta"),
    ("--target_delta -1e-5", "delta"),
    ("--max_train_samples -1", "max_train_samples=-1"),
    ("--max_seq_length 0", "max_seq_length=0"),
    ("--logging_steps 0", "logging_steps"),
    ("--warmup_steps -5", "warmup_steps"),
    ("--seed -1", "seed=-1"),
    ("--seed 99999999999999", "seed=99999999999999"),
    ("--subset_seed -1", "subset_seed=-1"),
    ("--testing.direction_key -1", "testing.direction_key=-1"),
    ("--testing.sampler_key xyz", "sampler_key must be 64 hex digits"),
    ("--testing.insecure_noise_seed -1", "testing.insecure_noise_seed=-1"),
    ("--num_directions 100000000", "num_directions=100000000"),
    ("--target_delta 0", "target_delta=0"),
    ("--target_delta 1", "target_delta=1"),
    ("--target_epsilon inf", "target_epsilon=inf"),
    ("--noise_multiplier 1", "give exactly one of them"),
    ("--microbatch_size 1.5", "microbatch_size"),
    ("--logging_steps -1", "logging_steps=-1"),
    ("--eval_strategy steps --eval_steps 0", "eval_steps=0"),
    ("--eval_strategy steps --eval_steps -5", "eval_steps=-5"),
    ("--eval_delay -1", "eval_delay=-1"),
    ("--save_strategy steps --save_steps 0", "save_steps=0"),
    ("--save_total_limit 0", "save_total_limit=0"),
    # words that are not known, settings that contradict each other
    ("--accountant moments", "accountant='moments'"),
    ("--neighboring_relation add_remove", "'add_or_remove_one'"),
    ("--noise_distribution cauchy", "noise_distribution='cauchy'"),
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
    ("--include_for_metrics nosuch", "include_for_metrics=['nosuch']"),
    ("--lr_scheduler_kwargs notadict", "lr_scheduler_kwargs"),
    ("--lr_scheduler_kwargs {power:2}", "lr_scheduler_kwargs"),
    ("--load_best_model_at_end", "load_best_model_at_end=True"),
    ("--save_strategy best", "metric_for_best_model"),
    (
        "--save_strategy best --eval_strategy steps --metric_for_best_model nosuch",
        "metric_for_best_model='nosuch'",
    ),
    ("--eval_strategy sometimes", "'sometimes'"),
    ("--class_names a a", "class_names=['a', 'a']"),
    ("--text_column text --text_pair_column text", "name different columns"),
    ("--extends_run nowhere", "extends_run='nowhere'"),
    ("--resume_from_checkpoint train.jsonl", "is no folder"),
    # files and folders
    ("--train_file .", "is a folder"),
    ("--train_file no.jsonl", "no.jsonl not found"),
    ("--train_file rows.xlsx", "rows are read from"),
    ("--train_file empty.jsonl", "empty.jsonl is empty"),
    ("--train_file blank.jsonl", "blank.jsonl"),
    ("--train_file broken.jsonl", "line 2 is not JSON"),
    ("--train_file numbers.jsonl", "line 1 is no JSON object"),
    ("--train_file broken.json", "line 2 is not JSON"),
    ("--train_file mixed.jsonl", "is empty in some rows"),
    ("--train_file header.csv", "header.csv"),
    ("--train_file empty.csv", "empty.csv is empty"),
    ("--train_file ragged.csv", "line 3"),
    ("--train_file quote.csv", "quote.csv"),
    ("--train_file latin.csv", "line 2 is not UTF-8"),
    ("--train_file bad.parquet", "bad.parquet"),
    ("--train_file lists.jsonl", "'text' of the train rows holds lists"),
    ("--train_file numbered.jsonl", "'text' of the train rows holds mappings"),
    ("--train_file public.jsonl", "a copy of|is the train_file"),
    ("--train_file utf16.csv", "line 1 is not UTF-8"),
    ("--train_file latin.jsonl", "line 1 is not UTF-8"),
    ("--train_file twice.csv", "the column 'text' more than once"),
    ("--train_file semicolons.csv", "no column 'text'"),
    ("--train_file floats.csv", "float64"),
    ("--train_file gap.csv", "is empty in some rows"),
    ("--train_file table.json", "holds lists"),
    ("--train_file notes.txt", "rows are read from"),
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
    ("--gradient_accumulation_steps 2", "microbatch_size"),
    ("--sampling fixed_size_without_replacement", "replace_one"),
    ("--fp16 true", "fp16"),
    ("--resume_from_checkpoint", "no checkpoint"),
]
PLAN = "plan --num_examples 1024 --max_steps 100 --expected_batch_size 64"
COMMANDS = [
    ("train list.yaml", "key: value"),
    ("train text.yaml", "key: value"),
    ("train empty.yaml", "key: value"),
    ("train broken.yaml", "not valid YAML"),
    ("train latin.yaml", "latin.yaml"),
    ("train nested.yaml", "unknown key 'model'"),
    ("train typo.yaml", "'learning_rate'"),
    ("train twice.yaml", "'clip' appears more than once"),
    ("train circle.yaml", "circle"),
    ("train orphan.yaml", "nowhere.yaml"),
    ("train utf16.yaml", "utf16.yaml"),
    ("train tabs.yaml", "not valid YAML"),
    ("train equals.yaml", "key: value"),
    ("train two.yaml", "not valid YAML"),
    ("train words.yaml", "clip"),
    ("train truth.yaml", "clip"),
    ("train many.yaml", "is not a single value"),
    ("train number.yaml", "3 is not text"),
    ("train percent.yaml", "target_epsilon"),
    ("train .", "is a folder"),
    ("train train.jsonl", "train.jsonl"),
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
    (f"{PLAN} --target_epsilon 1 --expected_batch_size 2000", "larger than num_examples"),
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
    ("recipes --task cola", "sst2"),
    ("init --train_file . --target_epsilon 1", "is a folder"),
    ("init --train_file empty.csv --target_epsilon 1", "is empty"),
    ("init --train_file train.jsonl --target_epsilon 0", "target_epsilon=0"),
    ("init --train_file train.jsonl --target_epsilon inf", "target_epsilon=inf"),
    ("init --train_file train.jsonl --target_epsilon 1 --target_delta 2", "target_delta=2"),
    (
        "init --train_file train.jsonl --target_epsilon 1 --validation_file train.jsonl",
        "the private rows",
    ),
    ("init --train_file train.jsonl --target_epsilon 1 --text_column label", "both text and label"),
    ("init --train_file floats.csv --target_epsilon 1", "holds floats"),
    ("init --train_file twice.csv --target_epsilon 1", "more than once"),
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
    for name, text in FILES.items():
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


@pytest.mark.parametrize(
    ("words", "message"), [(f"train r.yaml {words}", said) for words, said in TRAIN] + COMMANDS
)
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
