"""Wrong configurations, wrong data and wrong command lines, with everything that the program says about each.

Run as a program (`python golden_messages.py TREE FOLDER quick|slow|plans|mistakes`) it calls the doors of a tree one
after another in one interpreter, `run.py` and `python -m vembed` as they stand there, and prints what each call printed
and returned.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import runpy
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG = "a.yaml"
URL = "https://user:canary@host/x?access_token=canary&page=1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEYS = """
model_name model_revision trust_remote_code allow_pickle torch_dtype attn_implementation pooling_method
max_seq_length query_prompt document_prompt pad_token gradient_checkpointing trainable use_lora lora_r
lora_alpha lora_dropout lora_target_modules lora_towers load_in_4bit data_path val_data_path test_data_path
data_split val_data_split test_data_split column_mapping image_root max_image_pixels image_augmentation
image_flip retrieval_mode num_workers skip_invalid_records max_invalid_records drop_last loss_type temperature
learn_temperature loss_bidirectional mask_false_negatives init_logit_scale init_logit_bias mrl_dims mrl_weights
loss_tile_size batch_size global_batch_size gradient_accumulation_steps lr_scaling lr_reference_batch
use_gradient_cache gradient_cache_chunk_size gradient_cache_chunk_tokens retain oom_retry num_processes use_fsdp
sharding_factor fsdp_mode cpu_offload nccl_timeout ddp_bucket_cap_mb ddp_broadcast_buffers
ddp_find_unused_parameters dataloader_pin_memory epochs max_steps learning_rate weight_decay adam_beta1
adam_beta2 adam_epsilon max_grad_norm scheduler_type warmup_ratio warmup_steps bf16 fp16 seed deterministic
eval_strategy eval_steps eval_batch_size metric_for_best_model early_stopping_patience eval_both_directions bm25
output_dir overwrite_output_dir save_steps save_minutes save_total_limit resume resume_elastic embedding_cache
logging_steps report_to nonfinite_policy max_skipped_steps
""".split()  # noqa: SIM905
VALUES = ("true", "-1", "1.5", "99999999999", ".nan", "'3'", "''", "autoo", "{a: b}")
"""Each is given to every key: where it is fine, the other messages of the file show so by saying nothing."""

COMMANDS = ("init", "explain", "train", "plan", "evaluate", "compare", "mine", "merge", "encode", "search", "doctor",
            "export", "push", "data", "sweep")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of the program."""

    name: str
    words: tuple[str, ...]  # the first one is run.py or vembed
    files: dict[str, str | bytes] = field(default_factory=dict)


def _validate(name: str, *overrides: str, text: str | bytes | None = None, file: str = CONFIG) -> Case:
    words = ["run.py", *([] if text is None else [file]), "--validate"]
    files = {} if text is None else {file: text}
    return Case(name, (*words, *(["--config_override", *overrides] if overrides else [])), files)


RULES = """
use_lora=false lora_r=8
use_lora=false lora_alpha=8
use_lora=false lora_dropout=0.1
use_lora=false lora_target_modules=[q_proj]
use_lora=false lora_towers=text
use_lora=true trainable=text
use_lora=true trainable=last_2_layers
trainable=last_0_layers
trainable=last_257_layers
trainable=Text
load_in_4bit=true
load_in_4bit=true use_lora=true torch_dtype=float64
load_in_4bit=true use_lora=true use_fsdp=true
batch_size=1
batch_size=1 loss_type=sigmoid
global_batch_size=1
batch_size=1 global_batch_size=1
batch_size=auto global_batch_size=8
lr_reference_batch=128
use_gradient_cache=false gradient_cache_chunk_size=8
use_gradient_cache=false gradient_cache_chunk_tokens=8
use_gradient_cache=false retain=0.5
data_split=train
val_data_split=dev
test_data_split=test
max_invalid_records=5
use_fsdp=false sharding_factor=2
use_fsdp=true sharding_factor=1
use_fsdp=false fsdp_mode=fast
sharding_factor=1 fsdp_mode=lean
use_fsdp=false cpu_offload=true
sharding_factor=1 cpu_offload=true
eval_strategy=steps
eval_steps=5
eval_steps=5 eval_strategy=no
early_stopping_patience=2 eval_strategy=no
loss_type=sigmoid temperature=0.1
loss_type=sigmoid temperature=0.001
loss_type=sigmoid temperature=7
loss_type=sigmoid learn_temperature=true
loss_type=sigmoid loss_bidirectional=true
init_logit_scale=3.0
init_logit_bias=3.0
mrl_dims=[8,8,4]
mrl_weights=[1.0]
mrl_weights=[1.0] mrl_dims=[8,4]
mrl_dims=[] mrl_weights=[]
trust_remote_code=true
trust_remote_code=true model_revision=main
warmup_steps=10 max_steps=10
bf16=true fp16=true
bf16=true torch_dtype=float64
fp16=true torch_dtype=float64
bf16=false torch_dtype=bfloat16
fp16=true torch_dtype=bfloat16
max_skipped_steps=5
batch_size=1 bf16=true fp16=true mrl_dims=[2,2] eval_strategy=steps
scheduler_type=cosin
metric_for_best_model=NDCG@10
loss_type=contrastive_with_bank
column_mapping={text:query} column_mapping.a=querry
column_mapping={3:query}
column_mapping={photo:image}
lora_target_modules=[]
learning_rate=1e999
max_seq_length=3
""".strip().splitlines()

GOOD = """
model_name=m
model_name=m data_path=builtin:stdlib-code
model_name_or_path=m lr=1e-3 per_device_train_batch_size=8 num_gpus=2 dataloader_num_workers=2 prompt=x
model_name=m column_mapping.a=label column_mapping.b=query
model_name=m query_prompt='' max_grad_norm=null learning_rate=1E-4
""".strip().splitlines()

ALIASES = """
lr=1 learning_rate=1
learning_rate=1 lr=1
per_device_train_batch_size=8 batch_size=8
resume_from_checkpoint=never resume=never
dataloader_num_workers=1 num_workers=1
num_gpus=1 num_processes=1
prompt=x query_prompt=y
document_prompt=y prompt=x
prompt=3
lr=0
model_name_or_path=n
""".strip().splitlines()

OVERRIDES = (
    "foo", "=1", "epochs=", "epochs= ", "epoch=1", "l-r=1", "zzzzzz=1", "epochs=NaN", "learning_rate=.nan",
    "epochs=true", "epochs=[1]", "epochs='1'", "model_revision=!!python/object:x", "model_revision=&a b",
    "model_revision=*a", "column_mapping={a: *x}", "column_mapping={a: query, a: label}", "column_mapping={a: query",
    "query_prompt='a' b", "query_prompt='a': b", "column_mapping=[a]", "column_mapping.a=querry",
    "column_mapping.=query", "epochs.x=1", "epochs=1\nb.yaml:1: fine", f"fp16={'x' * 200}", f"data_path={URL}\0",
    f"report_to={URL}", "hub_token=canary", f"column_mapping.https://u:canary@h={URL}", URL, "model_name=n",
)  # fmt: skip

YAML = {
    "empty": "",
    "only a comment": "# nothing\n",
    "duplicate key": "model_name: m\nmodel_name: n\n",
    "duplicate part": "model_name: m\ncolumn_mapping:\n  a: query\n  a: label\n",
    "anchor": "model_name: m\ndata_path: &x a\n",
    "alias": "model_name: m\ndata_path: *x\n",
    "python tag": "model_name: !!python/object/apply:os.system ['true']\n",
    "plain tag": "model_name: !!str m\n",
    "tag of all": "!!map {model_name: m}\n",
    "two documents": "model_name: m\n---\nmodel_name: n\n",
    "a list": "- model_name\n",
    "a word": "model_name\n",
    "two colons": "model_name: m\nepochs: a: b\n",
    "tab": "model_name: m\n\tepochs: 1\n",
    "open quote": "model_name: m\nquery_prompt: 'abc\n",
    "control character": "model_name: m\nepochs: \x7f\n",
    "complex key": "model_name: m\n? [a]\n: 1\n",
    "number as key": "model_name: m\n3: 1\n",
    "number as part": "model_name: m\ncolumn_mapping: {3: query}\n",
    "merge key": "model_name: m\n<<: {epochs: 2}\n",
    "nested": "model_name: m\ndata_path: [[[[[[[[1]]]]]]]]\n",
    "NUL": "model_name: m\nepochs: 1\0\n",
    "not UTF-8": b"model_name: m\nepochs: \xff\n",
    "wrong words": "model_name: m\nbf16: yes\nmax_steps: 0100\nlearning_rate: nan\nepochs: 3.0\nfp16: 'true'\n",
    "texts": 'model_name: m\ndata_path: 2024\noutput_dir: \' \'\nval_data_path: "a\\0b"\ntest_data_path: "\\ud800"\n',
    "secrets": f"model_name: m\nhub_token: canary\nreport_to: {URL}\n'{URL}': 1\n"
    f"column_mapping: {{'{URL}': '{URL}'}}\n",
    "no model": "epochs: 1\n",
    "near keys": "model_name: m\nlearning_rte: 1\nlora_rank: 8\ntemprature: 1\n"
    "batchsize: 4\nloss: infonce\nBF16: true\n",
    "many problems": "model_name: m\n" + "".join(f"unknown_{number}: 1\n" for number in range(105)),
    "all at once": "model_name: m\nbatch_size: true\nlearning_rte: 1e-5\nbf16: true\nfp16: true\ntemperature: .nan\n"
    "seed: 1\nseed: 2\n",
    "rule over a wrong key": "model_name: m\nwarmup_steps: 10\nmax_steps: -1\n",
    "rule of two lines": "model_name: m\nuse_gradient_cache: false\nretain: 0.5\n",
    "alias beside its key": "model_name: m\nlearning_rate: 1e-5\nlr: 1e-4\n",
    "too large": "model_name: m\n" + "#" * 2**20,
    "fine": b"\xef\xbb\xbf---\r\nmodel_name: m # why\r\n\r\nepochs: 2\r\n...\r\n",
}
JSON = {
    "duplicate key": '{"model_name": "m",\n "model_name": "n"}',
    "duplicate part": '{"model_name": "m", "column_mapping": {\n"a": null,\n"a": null}}',
    "NaN": '{"model_name": "m",\n"learning_rate": NaN, "epochs": NaN, "temperature": -Infinity, "seed": 1e999}',
    "trailing comma": '{"model_name": "m",\n}',
    "two objects": '{"model_name": "m"} {}',
    "a list": '["model_name"]',
    "empty": "",
    "deep": "[" * 100,
    "unknown": '{"model_nam\\ne": "m"}',
    "wrong part": '{"model_name": "m", "column_mapping": {\n"a": "x"}}',
    "fine": '{"model_name": "m", "column_mapping": {"a": "query", "b": null}}',
    "DeepSpeed": '{"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
}


def quick_cases() -> list[Case]:
    """Return the cases that read no data and load no model."""
    cases = [
        _validate(f"every key {value}, {part}", text="".join(f"{key}: {value}\n" for key in keys))
        for value in VALUES
        for part, keys in (("first", KEYS[:50]), ("second", KEYS[50:]))
    ]
    cases += [_validate(f"rule {line}", "model_name=m", *line.split()) for line in RULES]
    cases += [_validate(f"fine {line}", *line.split()) for line in GOOD]
    cases += [_validate(f"alias {line}", "model_name=m", *line.split()) for line in ALIASES]
    cases += [_validate(f"override {word}", "model_name=m", word) for word in OVERRIDES]
    cases += [_validate(f"YAML {name}", text=text) for name, text in YAML.items()]
    cases += [_validate(f"JSON {name}", text=text, file="a.json") for name, text in JSON.items()]
    over = "model_name: m\nbatch_size: 0\nlearning_rate: 1e-5\nbf16: true\ncolumn_mapping:\n  a: query\n  b: lable\n"
    cases += [
        _validate("override mends", "batch_size=8", "lr=1", "column_mapping.b=label", text=over),
        _validate("override breaks a rule with the file", "batch_size=2", "fp16=true", text=over),
        _validate("override of a text", "column_mapping.c=query", text="model_name: m\ncolumn_mapping: text\n"),
        _validate("nothing"),
        _validate("other suffix", text="model_name: m\n", file="a.toml"),
        Case("no such file", ("run.py", "quikstart.yaml", "--validate"), {"quickstart.yaml": "model_name: m\n"}),
        Case("no such folder", ("run.py", "nowhere/a.yaml", "--validate", "--config_override", "epoch=2", "lr=-1")),
        Case("a folder", ("run.py", "folder.yaml", "--validate"), {"folder.yaml/x": ""}),
        Case("given twice", ("run.py", CONFIG, "--config", CONFIG, "--validate"), {CONFIG: "model_name: m\n"}),
        Case("two modes", ("run.py", CONFIG, "--validate", "--plan"), {CONFIG: "model_name: m\n"}),
        Case("resume twice", ("run.py", CONFIG, "--validate", "--resume", "never", "--config_override", "resume=auto"),
             {CONFIG: "model_name: m\n"}),
        Case("no command", ("vembed",)),
        Case("unknown command", ("vembed", "trian")),
        Case("help", ("vembed", "--help")),
        Case("help of run.py", ("run.py", "--help")),
        *(Case(f"help of {name}", ("vembed", name, "--help")) for name in COMMANDS),
        *(Case(f"{name} without words", ("vembed", name)) for name in ("evaluate", "encode", "search", "export")),
        Case("search k 0", ("vembed", "search", "index", "query", "-k", "0")),
        Case("search blank", ("vembed", "search", "index", " ")),
        Case("search and serve", ("vembed", "search", "index", "query", "--serve")),
        Case("search port", ("vembed", "search", "index", "query", "--port", "1")),
        Case("search port too high", ("vembed", "search", "index", "--serve", "--port", "70000")),
        Case("search nothing there", ("vembed", "search", "index", "query")),
        Case("search another folder", ("vembed", "search", "index", "query"), {"index/a.txt": ""}),
    ]  # fmt: skip
    return cases


ROW = '{"query": "a red fox", "positive": "un renard rouge"}\n'
ROWS = "".join(f'{{"query": "question {n}", "positive": "answer {n}"}}\n' for n in range(40))
BASE = {"model_name": "builtin:ngram-bag", "max_steps": 1, "batch_size": 4, "bm25": False, "report_to": "none",
        "num_workers": 0}  # fmt: skip


def _dry(name: str, *overrides: str, files: dict[str, str | bytes] | None = None, data: str = "d.jsonl") -> Case:
    text = json.dumps({**BASE, "data_path": data})
    words = ("run.py", "a.json", "--dry-run", *(("--config_override", *overrides) if overrides else ()))
    return Case(name, words, {"a.json": text, **(files or {})})


DATA = {
    "empty file": "",
    "bad JSON": ROW + "{not json\n" + ROW,
    "a list": "[1, 2]\n",
    "no positive": '{"query": "a"}\n',
    "no query": '{"positive": "a"}\n',
    "unknown columns": '{"frage": "a", "antwort": "b"}\n',
    "two queries": '{"query": "a", "anchor": "b", "positive": "c"}\n',
    "number as text": ROW + '{"query": 3, "positive": "a"}\n',
    "null": ROW + '{"query": null, "positive": "a"}\n',
    "blank": ROW + '{"query": " ", "positive": ""}\n',
    "many bad rows": ROW + '{"query": 3, "positive": "a"}\n' * 30,
    "negatives no list": '{"query": "a", "positive": "b", "negatives": 3}\n',
    "pos and positive": '{"query": "a", "positive": "b", "pos": ["c"]}\n',
    "label beside texts": '{"query": "a", "positive": "b", "label": "x"}\n{"query": "c", "positive": "d"}\n',
    "scores": '{"sentence1": "a", "sentence2": "b", "score": 0.5}\n' * 8,
    "score alone": '{"query": "a", "score": 1}\n',
    "image column": '{"query": "a", "image": "x.png"}\n',
    "missing picture": '{"query": "a", "positive_image": "x.png"}\n' * 8,
    "picture outside": '{"query": "a", "positive_image": "../../x.png"}\n' * 8,
    "not UTF-8": b'{"query": "\xff", "positive": "b"}\n',
    "one row": ROW,
    "two rows alike": ROW * 2,
    "duplicate keys": '{"query": "a", "query": "b", "positive": "c"}\n',
    "too deep": '{"query": ' + "[" * 300 + "]" * 300 + ', "positive": "c"}\n',
}


def slow_cases() -> list[Case]:
    """Return the cases that need data or a model, and so import torch."""
    rows = {"d.jsonl": ROWS}
    bag = {"words.txt": "a\n"}
    cases = [_dry(f"data {name}", files={"d.jsonl": text}) for name, text in DATA.items()]
    cases += [
        _dry(
            f"data dropped {name}", "skip_invalid_records=true", "max_invalid_records=5", files={"d.jsonl": DATA[name]}
        )
        for name in ("bad JSON", "number as text", "many bad rows", "no positive")
    ]
    sets = ("d.jsonl", "nowhere.jsonl", "nowhere/", "d.jsonll", "folder", "*.csv", "builtin:shape", "builtin:shapes",
            "flickr30k", "flickr30k:nowhere", "sop:folder", "cirr:folder", "https://host/d.jsonl", "d.parquet",
            "d.csv", "e.csv", "d.tsv", "d.json", "d.jsonl.gz", "splits")  # fmt: skip
    files = {**rows, "folder/readme.txt": "x", "d.parquet": "no parquet", "d.csv": "query,positive\na,b\nc\n",
             "e.csv": "query,query\na,b\n", "d.tsv": "", "d.json": "{}", "d.jsonl.gz": b"\x1f\x8bno",
             "splits/a.jsonl": ROWS, "splits/b.csv": "query,positive\n"}  # fmt: skip
    cases += [_dry(f"path {name}", data=name, files=files) for name in sets]
    overrides = (
        "model_name=builtin:ngram-bags", "model_name=nowhere/model", "model_name=folder",
        "model_name=open_clip:nothing",
        "val_data_path=nowhere", "test_data_path=builtin:nothing", "data_split=dev",
        "column_mapping={frage:query}", "column_mapping={query:positive}", "column_mapping.query=positive",
        "column_mapping.query=null",
        "column_mapping.frage=query",
        "image_root=nowhere", "retrieval_mode=t2i", "retrieval_mode=i2i", "image_augmentation=light", "image_flip=true",
        "trainable=vision", "trainable=projection", "trainable=last_3_layers", "use_lora=true",
        "lora_target_modules=[nothing]", "load_in_4bit=true use_lora=true", "mrl_dims=[100000]", "pooling_method=cls",
        "pad_token=[NONE]", "max_seq_length=100000", "gradient_checkpointing=true", "attn_implementation=eager",
        "batch_size=4096", "drop_last=true batch_size=64", "warmup_steps=3", "torch_dtype=float64", "bf16=true",
        "fp16=true", "resume=nowhere", "resume=folder", "embedding_cache=d.jsonl", "output_dir=d.jsonl",
        "output_dir=d.jsonl/out", "model_revision=main", "query_prompt=q:", "use_gradient_cache=false",
        "sharding_factor=2", "use_fsdp=true", "cpu_offload=true", "gradient_accumulation_steps=3 lr_scaling=linear",
        "deterministic=true", "loss_type=sigmoid", "mask_false_negatives=false", "retain=0.5",
        "model_name=builtin:tiny-clip",
        "model_name=builtin:tiny-transformer use_lora=true lora_target_modules=[nothing]",
        "model_name=builtin:tiny-transformer trainable=last_99_layers",
        "model_name=builtin:tiny-transformer use_lora=true lora_towers=vision",
        "data_path=builtin:shapes", "data_path=null", "eval_both_directions=true",
    )  # fmt: skip
    cases += [_dry(f"key {line}", *line.split(), files={**rows, "folder/config.json": "{}"}) for line in overrides]
    beir = {"beir/corpus.jsonl": '{"_id": "d1", "text": "a"}\n', "beir/queries.jsonl": '{"_id": "q1", "text": "a"}\n'}
    qrels = "query-id\tcorpus-id\tscore\n"
    judged = {
        "no judgements": {},
        "no rows": {"beir/qrels/test.tsv": qrels},
        "unknown document": {"beir/qrels/test.tsv": f"{qrels}q1\td9\t1\n"},
        "bad grade": {"beir/qrels/test.tsv": f"{qrels}q1\td1\tmuch\n"},
        "all negative": {"beir/qrels/test.tsv": f"{qrels}q1\td1\t0\n"},
        "twice": {"beir/qrels/test.tsv": f"{qrels}q1\td1\t1\nq1\td1\t2\n"},
        "another split": {"beir/qrels/train.tsv": f"{qrels}q1\td1\t1\n"},
    }
    words = ("vembed", "evaluate", "bm25", "--data", "beir", "--output", "board")
    cases += [Case(f"BEIR {name}", words, {**beir, **more}) for name, more in judged.items()]
    fine = {**beir, **judged["twice"], "beir/qrels/test.tsv": f"{qrels}q1\td1\t1\n"}
    lines = ("--metric ndcg", "--metric ndcg@1000", "--metric speed@10", "--batch-size 0", "--dims 0", "--dims 8,8",
             "--dims x", "--index Nothing", "--quantize int4", "--split dev", "--bm25", "--both-directions",
             "--trust-remote-code", "--image-root nowhere")  # fmt: skip
    cases += [Case(f"evaluate {line}", (*words, *line.split()), fine) for line in lines]
    others = {
        "evaluate twice": "evaluate bm25 bm25 --data beir --output board",
        "evaluate nowhere": "evaluate nowhere/model --data beir --output board",
        "evaluate no set": "evaluate bm25 --data nowhere --output board",
        "evaluate into a file": "evaluate bm25 --data beir --output beir/corpus.jsonl",
        "encode nowhere": "encode nowhere/model --data beir --output index",
        "encode no corpus": "encode builtin:ngram-bag --data nowhere --output index",
        "export nowhere": "export nowhere/model --output out",
        "plan devices": f"plan {CONFIG} --devices 8xFoo",
        "plan devices 0": f"plan {CONFIG} --devices 0xH100-80GB",
        "plan nodes": f"plan {CONFIG} --devices 2x8xA100",
        "plan shape": f"plan {CONFIG} --devices 8xH100-80GB --model-config nowhere.json",
        "plan no shape": f"plan {CONFIG} --devices 8xH100-80GB --model-config shape.json",
        "plan records": f"plan {CONFIG} --devices 8xH100-80GB --records 0",
    }
    more = {**fine, **bag, CONFIG: "model_name: builtin:ngram-bag\n", "shape.json": "{}"}
    return cases + [Case(name, ("vembed", *line.split()), more) for name, line in others.items()]


SHAPES = {
    "8xH100-80GB": "qwen3_vl_8b_fsdp_lora.yaml qwen3_vl_8b.json",
    "4x24GB": "qwen3_vl_2b_gradcache.yaml qwen3_vl_2b.json",
    "2x8xA100-40GB": "qwen3_vl_2b_gradcache.yaml qwen3_vl_2b.json",
    "1xRTX4090": "finetune_text.yaml bert_base.json",
    "2xRTX4090": "clip_ddp.yaml clip_vit_base_patch32.json",
    "8xA100-80GB": "finetune_text.yaml mistral_7b.json",
}
"""Devices that are planned for -> configuration and shape of the model."""


def plan_cases() -> list[Case]:
    """Return plans for devices that are described and not there: nothing of this machine stands in them."""
    cases = []
    for devices, files in SHAPES.items():
        config, shape = files.split()
        words = ("vembed", "plan", f"TREE/configs/{config}", "--devices", devices, "--records", "50000", "--details",
                 "--model-config", f"TREE/configs/shapes/{shape}")  # fmt: skip
        cases.append(Case(f"{shape} on {devices}", words))
    return [*cases, Case(f"{cases[-1].name} as JSON", (*cases[-1].words, "--json"))]


def mistake_cases() -> list[Case]:
    """Return the mistakes of newcomers, some of which train."""
    from golden_mistakes import mistakes  # here, as it takes Case from this file

    return [mistake.case for mistake in mistakes()]


CASES = {"quick": quick_cases, "slow": slow_cases, "plans": plan_cases, "mistakes": mistake_cases}


def _call(tree: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """Call the program as a process of its own would, and return what it printed and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = [words[0], *words[1:]]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if words[0] == "run.py":
                runpy.run_path(str(tree / "run.py"), run_name="__main__")
            else:
                runpy.run_module("vembed", run_name="__main__", alter_sys=True)
            code: object = 0
        except SystemExit as error:
            code = error.code or 0
        except Exception:  # noqa: BLE001 a fault of the program, as the user would see it
            code = 1
            err.write(traceback.format_exc().strip().splitlines()[-1] + "\n")
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def main(tree: Path, folder: Path, *, which: str) -> None:
    """Print the answer to every case as JSON."""
    answers = {}
    for number, case in enumerate(CASES[which]()):
        work = folder / str(number)
        for name, content in case.files.items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        logging.getLogger().handlers.clear()
        assert case.name not in answers, case.name
        answers[case.name] = _call(tree, tuple(word.replace("TREE", str(tree)) for word in case.words))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), which=sys.argv[3])
