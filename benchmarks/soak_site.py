"""What the soak disturbs: tiny data, a tiny model, and the commands that work on them."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "pink", "gold", "teal")
_THINGS = ("fox", "tree", "car", "lamp", "river", "stone", "bird", "house", "boat", "hat", "door", "coin")

ALWAYS = ("kill", "term", "int", "hup", "usr1", "stop", "full")
"""Disturbances that any command must stand."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command that is disturbed and started again."""

    words: str  # behind "vembed"; {site} is the shared folder; relative paths are the round's own
    disturbances: tuple[str, ...] = ALWAYS
    before: str = ""  # a command whose files lie in the folder before it starts
    in_ranks: bool = False  # two processes under the launcher; all interpreters are fresh ones
    only_finish: bool = False  # disturbed behind its last checkpoint only


SCENARIOS = {
    "train": Scenario("train {site}/train.yaml", (*ALWAYS, "flip")),
    "scratch": Scenario("train {site}/scratch.yaml", (*ALWAYS, "flip")),
    "workers": Scenario("train {site}/workers.yaml", (*ALWAYS, "flip", "worker", "worker", "ctrl-c")),
    "finish": Scenario("train {site}/train.yaml", only_finish=True),
    "ranks": Scenario(
        "train {site}/ranks.yaml",
        (*ALWAYS, "flip", "ctrl-c", "rank-kill", "rank-term", "rank-stop", "all-ranks-kill"),
        in_ranks=True,
    ),
    "evaluate": Scenario(
        "evaluate {site}/out/model {site}/bert --data {site}/test.jsonl {site}/dev.jsonl --bm25 --dims 16 "
        "--quantize int8 --output board"
    ),
    "encode": Scenario("encode {site}/bert --data {site}/small.jsonl --output index"),
    "reencode": Scenario(
        "encode {site}/out --data {site}/corpus.jsonl --output index --overwrite",
        before="encode {site}/bert --data {site}/small.jsonl --output index",
    ),
    "table": Scenario("encode {site}/bert --data {site}/small.jsonl --output index.parquet"),
    "mine": Scenario("mine {site}/bert --data {site}/train.jsonl --output mined.jsonl --relative-margin none"),
    "remine": Scenario(
        "mine {site}/bert --data {site}/train.jsonl --output mined.jsonl --relative-margin none --overwrite",
        before="mine {site}/bert --data {site}/dev.jsonl --output mined.jsonl --relative-margin none",
    ),
    "merge": Scenario("merge {site}/bert {site}/out --data {site}/dev.jsonl --steps 2 --output merged"),
    "export": Scenario("export {site}/out --output exported"),
    "checkpoint": Scenario("export {site}/out --checkpoint 14 --output exported"),
    "reexport": Scenario(
        "export {site}/out --output exported --overwrite", before="export {site}/bert --output exported"
    ),
}

_KEYS: dict[str, Any] = {
    "output_dir": "out",
    "batch_size": 16,
    "max_steps": 14,  # two epochs and a part of the third
    "learning_rate": 3e-3,
    "temperature": 0.1,
    "learn_temperature": True,
    "gradient_cache_chunk_size": 6,
    "retain": 0.3,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_steps": 3,
    "early_stopping_patience": 9,
    "bm25": False,
    "report_to": "none",
    "logging_steps": 1,
}

_CHANGES: dict[str, dict[str, Any]] = {
    "train": {},
    "scratch": {
        "model_name": "builtin:tiny-transformer", "max_steps": 6, "eval_steps": 2, "save_steps": 2, "bm25": True,
        "report_to": "tensorboard",
    },
    "workers": {"num_workers": 2},
    "ranks": {"num_processes": 2, "batch_size": 8, "nccl_timeout": 60},
}  # fmt: skip


def make_site(folder: Path) -> None:
    """Write data, model and configurations into a folder."""
    folder.mkdir(parents=True)
    rows = [
        {"query": f"a {colour} {thing}", "positive": f"un {thing[::-1]}o {colour[::-1]}a"}
        for colour, thing in itertools.product(_COLOURS, _THINGS)
    ]
    random.Random(5).shuffle(rows)  # so that no word of a query stands in its positive, and each must be learned
    for name, part in (("train", rows[:84]), ("dev", rows[84:100]), ("test", rows[100:])):
        _write_lines(folder / f"{name}.jsonl", part)
    texts = [f"{one['positive']} {two['positive']}" for one, two in itertools.product(rows[:40], rows[40:80])]
    for name, count in (("corpus", len(texts)), ("small", 20)):
        _write_lines(folder / f"{name}.jsonl", ({"_id": f"d{n}", "text": text} for n, text in enumerate(texts[:count])))
    _write_bert(folder / "bert", {word for row in rows for text in row.values() for word in text.split()})
    data = {"data_path": "train", "val_data_path": "dev", "test_data_path": "test"}
    paths = {key: str(folder / f"{name}.jsonl") for key, name in data.items()}
    for name, changes in _CHANGES.items():
        keys = {"model_name": str(folder / "bert"), **paths, **_KEYS, **changes}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(keys, sort_keys=False), "utf-8")


def _write_lines(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


def _write_bert(folder: Path, words: set[str]) -> None:
    """Write a BERT of 2 layers x 32 with dropout and a vocabulary of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocabulary = {token: number for number, token in enumerate((*special, *sorted(words)))}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=32, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
