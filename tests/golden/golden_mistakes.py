"""Thirty-seven mistakes of people who use the program for the first time, and what each must be told.

The cases run as those of golden_messages.py do. A mistake is answered well where the answer names it and its cure
(`told`), and in time (`by`):

- "refused": before anything is trained, with the exit code for configurations (2), data (3) or the machine (5).
- "start": on the plan or the log, before the first step is logged.
- "run": by the end, as only the training itself can show it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from golden_messages import Case

if TYPE_CHECKING:
    from collections.abc import Mapping

BASE = {
    "model_name": "builtin:ngram-bag", "data_path": "d.jsonl", "epochs": 8, "batch_size": 8, "learning_rate": 2e-3,
    "report_to": "none", "num_workers": 0, "output_dir": "out", "logging_steps": 5, "bm25": False,
}  # fmt: skip

_WORDS = "amber birch cedar dune elm fjord grove heath iris jade".split()  # noqa: SIM905
_MORE_WORDS = "kelp lake moss night oak pearl quartz reef sand thorn".split()  # noqa: SIM905
# An answer shares no word with its query: an untrained model guesses, and a trained one has something to learn.
_PAIRS = [(f"{one} {other}", f"{one[::-1]} {other[::-1]}") for one in _WORDS for other in _MORE_WORDS]
_PAIRS = [_PAIRS[row * 37 % len(_PAIRS)] for row in range(len(_PAIRS))]


def _rows(pairs: list[tuple[str, str]], **columns: object) -> str:
    rows = ({"query": query, "positive": positive, **columns} for query, positive in pairs)
    return "".join(f"{json.dumps(row)}\n" for row in rows)


ROWS, TEST_ROWS = _rows(_PAIRS[:64]), _rows(_PAIRS[64:])


@dataclass(frozen=True)
class Mistake:
    """One mistake and the answer that it must get."""

    case: Case
    told: tuple[str, ...]  # regular expressions, of which each must match a part of what is printed
    by: Literal["refused", "start", "run"]

    def faults(self, answer: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with an answer, as it is frozen: silent, late, or the wrong exit code."""
        printed = "\n".join(line for stream in ("out", "err") for line in answer.get(stream, ()))
        before = re.split(r"^step +\d+/", printed, maxsplit=1, flags=re.MULTILINE)[0]
        seen = printed if self.by == "run" else before
        faults = [f"says nothing of {pattern!r}" for pattern in self.told if not re.search(pattern, seen)]
        wanted = {2, 3, 5} if self.by == "refused" else {0}
        if answer["code"] not in wanted:
            faults.append(f"exit code {answer['code']}")
        if "Traceback" in printed:
            faults.append("a traceback")
        return faults


def _run(
    name: str, *told: str, by: Literal["refused", "start", "run"], mode: str = "", words: str = "",
    files: Mapping[str, str | bytes] | None = None, **keys: Any,
) -> Mistake:  # fmt: skip
    config = {key: value for key, value in {**BASE, **keys}.items() if value is not ...}
    everything = {"a.json": json.dumps(config), "d.jsonl": ROWS, "test.jsonl": TEST_ROWS, **(files or {})}
    arguments = ("run.py", "a.json", *([mode] if mode else []), *words.split())
    return Mistake(Case(name, arguments, everything), told, by)


def mistakes() -> list[Mistake]:
    """Return the mistakes."""
    text_rows = [json.loads(line) for line in ROWS.splitlines()]
    german = "".join(json.dumps({"frage": row["query"], "antwort": row["positive"]}) + "\n" for row in text_rows)
    spoilt = "".join(
        json.dumps({"query": query, "positive": positive}) + "\n"
        for query, positive in [
            *_PAIRS[:60], ("nan here", "NaN"), ("none here", "None"), ("html here", "<p>in <b>hall</b> 9&nbsp;</p>"),
            ("mojibake here", "cafÃ© of the fjord"), ("mark here", "caf\ufffd of the fjord"),
        ]
    )  # fmt: skip
    csv = "query,positive\n" + "".join(f'"{query}","{positive}"\n' for query, positive in _PAIRS[:20])
    bad_quote = (
        csv + '"an open quote, then text\n' + "".join(f"{query},{positive}\n" for query, positive in _PAIRS[20:])
    )
    semicolons = "query;positive\n" + "".join(f"{query};{positive}\n" for query, positive in _PAIRS[:64])
    pictures = _rows(_PAIRS[:8]).replace('"positive": ', '"positive_image": ')
    return [
        # What is judged was trained on
        _run("the test set is the training file", "trained on", by="run", test_data_path="d.jsonl"),
        _run("the plan of a test set that is the training file", "trained on", by="start", mode="--dry-run",
             test_data_path="d.jsonl"),
        _run("a leaked test set with leak: refuse", "hold a query of d.jsonl with an answer", "leak", by="refused",
             test_data_path="d.jsonl", leak="refuse"),
        _run("the dev set is the training file", "trained on", by="run", val_data_path="d.jsonl"),
        _run("the test set is the dev set", "same|chose", by="run", val_data_path="test.jsonl",
             test_data_path="test.jsonl"),
        _run("a verdict on the dev set that chose the checkpoint", "chose", by="run"),
        # Nothing can be learnt from these rows
        _run("labels of one class", "class", by="refused", label_kind="class",
             files={"d.jsonl": _rows(_PAIRS[:64], label="a")}),
        _run("grades that are all alike", "score", by="refused", loss_type="cosent", label_kind="grade",
             files={"d.jsonl": "".join(json.dumps({"sentence1": query, "sentence2": positive, "score": 1.0}) + "\n"
                                       for query, positive in _PAIRS[:64])}),
        _run("positives that are all alike", "positive", by="refused",
             files={"d.jsonl": _rows([(query, "the same answer") for query, _ in _PAIRS[:64]])}),
        _run("a batch of one", "negative", by="refused", batch_size=1),
        # Learning rates
        _run("a learning rate far too high", "learning rate", by="run", learning_rate=1.0,
             test_data_path="test.jsonl"),
        _run("a learning rate of fine-tuning for a model from scratch", "learning_rate", "init writes", by="start",
             learning_rate=2e-5, epochs=1, test_data_path="test.jsonl"),
        _run("a file as the output folder", "output folder .*/out .*Choose another", by="refused", files={"out": "x"}),
        # Data that look otherwise
        _run("columns with other names", "frage", "antwort", "column_mapping", by="refused", files={"d.jsonl": german}),
        _run("both names of columns misspelt", "quer\\b", "positiv\\b", by="refused",
             files={"d.jsonl": ROWS.replace('"query"', '"quer"').replace('"positive"', '"positiv"')}),
        _run("a mapping to columns that aren't there", "fragen|antworten", by="refused",
             column_mapping={"fragen": "query", "antworten": "positive"}, files={"d.jsonl": german}),
        _run("pictures for a model of texts", "reads texts|reads no pictures", by="refused", mode="--dry-run",
             data_path="builtin:shapes"),
        _run("pictures that are missing", "image_root", by="refused", model_name="builtin:tiny-clip",
             files={"d.jsonl": pictures}),
        _run("one open quote in a CSV file", r"d\.csv:22", by="refused", data_path="d.csv",
             files={"d.csv": bad_quote}),
        _run("a CSV file with semicolons", ";|semicolon|delimiter", by="start", data_path="d.csv", mode="--dry-run",
             files={"d.csv": semicolons}),
        Mistake(Case("texts that are no texts", ("vembed", "data", "check", "d.jsonl"),
                     {"d.jsonl": spoilt}), ("HTML|markup|tags", "NaN", "encod|mojibake", "U\\+FFFD"), "start"),
        _run("a broken row", r"d\.jsonl:65", by="refused", files={"d.jsonl": ROWS + "{not json\n"}),
        # Keys and words of other programs
        _run("device: cuda", "device", by="refused", device="cuda"),
        _run("gpu: 0", "gpu", by="refused", gpu=0),
        _run("cuda: true", "cuda", by="refused", cuda=True),
        _run("an unknown key that is near nothing", "n_dims_per_step", by="refused", n_dims_per_step=3),
        _run("an option of another program", "learning.rate", "config_override", by="refused",
             words="--learning-rate 1e-5"),
        _run("a misspelt override", "epochs", by="refused", words="--config_override epoch=2"),
        _run("no dev set", "val_data_path", by="refused", val_data_path="none"),
        # Names and folders
        _run("a file that isn't there", "data.jsonl", by="refused", data_path="data.jsonl"),
        _run("a built-in model that isn't there", "builtin:ngram-bag\\b", by="refused",
             model_name="builtin:ngram-bags"),
        _run("a model's folder that isn't there", "./models/mine", by="refused", model_name="./models/mine"),
        _run("LoRA on layers that aren't there", "lora_target_modules|q_projection", by="refused", use_lora=True,
             model_name="builtin:tiny-transformer", lora_target_modules=["q_projection"]),
        _run("a batch larger than the file", "batch", by="start", mode="--dry-run", batch_size=4096),
        _run("two precisions", "fp16", "bf16", by="refused", fp16=True, bf16=True),
        Mistake(Case("a search in a folder that is no index", ("vembed", "search", "model", "query"),
                     {"model/config.json": "{}"}), ("index",), "refused"),
        Mistake(Case("a comparison with a log among the runs",
                     ("vembed", "compare", "runs/a", "runs/train.log", "--output", "c"),
                     {"runs/train.log": "x\n", "runs/a/x": ""}), ("runs/a",), "refused"),
    ]  # fmt: skip
