"""Six runs of seconds, and everything that they leave behind but times, versions, paths and the machine."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from golden_text import digest, hashes, masked, page_lines, plain, text_lines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "pink")
THINGS = ("fox", "tree", "car", "lamp", "river", "stone", "bird", "house", "boat", "hat")
HOSTILE = (
    {"query": '<script>alert(1)</script> & "quoted" | pipe', "positive": "`code` <b>bold</b> [link](http://x) \\ * _"},
    {
        "query": "right to left \u202e\u05d0\u05d1\u05d2 \x1b[31m",
        "positive": "\u65e5\u672c\u8a9e \U0001f600 e\u0301 \x07",
    },
)
TRANSFORMER = {
    "model_name": "builtin:tiny-transformer",
    "data_path": "train.jsonl",
    "val_data_path": "dev.jsonl",
    "test_data_path": "test.jsonl",
    "batch_size": 16,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "num_workers": 0,
    "logging_steps": 1,
}

RUNS: Mapping[str, Mapping[str, Any]] = {
    # Its data are the standard library of the Python that runs it.
    "text": {
        "model_name": "builtin:ngram-bag",
        "data_path": "builtin:stdlib-code",
        "val_data_path": "builtin:stdlib-code",
        "test_data_path": "builtin:stdlib-code",
        "batch_size": 128,
        "max_steps": 5,
        "learning_rate": 2e-3,
        "temperature": 0.1,
        "loss_bidirectional": True,
        "num_workers": 0,
    },
    "pictures": {
        "model_name": "builtin:tiny-clip",
        "data_path": "builtin:shapes",
        "eval_strategy": "no",
        "batch_size": 16,
        "max_steps": 3,
        "learning_rate": 2e-3,
        "image_augmentation": "light",
        "gradient_cache_chunk_size": 8,
        "retain": 0.5,
        "num_workers": 0,
    },
    "lora": {**TRANSFORMER, "use_lora": True, "lora_r": 4, "lora_dropout": 0.1},
    "mrl_sigmoid": {
        **TRANSFORMER,
        "loss_type": "sigmoid",
        "mrl_dims": [256, 64, 16],
        "mrl_weights": [1.0, 0.5, 0.5],
        "gradient_cache_chunk_tokens": 96,
        "retain": 0.25,
        "report_to": "none",
    },
    "replicated": {
        **TRANSFORMER,
        "num_processes": 2,
        "global_batch_size": 24,
        "gradient_accumulation_steps": 2,
        "gradient_cache_chunk_size": 4,
        "retain": 0,
        "learn_temperature": True,
        "max_steps": 3,
        "eval_steps": 1,
    },
    "sharded": {**TRANSFORMER, "num_processes": 2, "use_fsdp": True, "fsdp_mode": "sharded", "max_steps": 3},
}

PAGES = ("pictures", "replicated")
"""Runs whose report is kept node for node and line for line; of the others one hash for each section."""

MEASURED = re.compile(
    r"seconds|_seconds$|_per_second$|peak_memory|memory_bytes$|^(encode_imbalance|slowest_rank|environment|findings|"
    r"time_of_a_step|performance|ranks|transformers_version|torch_version)$"
)
"""Keys that hold times, memory, versions, or what follows from them."""


HEADLINES = frozenset({"ndcg@10", "recall@1", "mrr@10", "map@100", "hit@100"})
"""Of thirty metrics those that are kept; rankings are compared as a whole."""


def write_rows(folder: Path) -> None:
    """Write the rows of the text runs: pairs in two made-up languages, some with negatives, two hostile ones."""
    rows: list[dict[str, Any]] = [
        {"query": f"a {colour} {thing}", "positive": f"un {thing[::-1]}o {colour[::-1]}a"}
        for colour, thing in itertools.product(COLOURS, THINGS)
    ]
    random.Random(5).shuffle(rows)
    for row, other in zip(rows[:12], rows[12:24], strict=True):
        row["negatives"] = [other["positive"], "something else"]
    rows[1] = {**rows[0], "query": "the same positive again"}
    parts = {"train": rows[:48], "dev": rows[48:60], "test": [*rows[60:], *HOSTILE]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of every child: one thread, no network, the package of a tree."""
    fixed = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120",
             "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}  # fmt: skip
    return {**os.environ, **fixed}


def run_command(tree: Path, folder: Path, program: str, *words: str, stdin: str = "") -> str:
    """Run `python run.py ...` or `python -m vembed ...` in a folder and return what it printed."""
    start = [str(tree / "run.py")] if program == "run.py" else ["-m", "vembed"]
    done = subprocess.run(
        [sys.executable, *start, *words], cwd=folder, env=environment(tree), capture_output=True, text=True,
        input=stdin, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(name: str, *, tree: Path, folder: Path) -> dict[str, Any]:
    """Train one of RUNS in a folder of its own and return what it left behind."""
    work = folder / name
    work.mkdir(parents=True)
    write_rows(work)
    (work / "a.json").write_text(json.dumps({"output_dir": "out", **RUNS[name]}), "utf-8")
    (work / "printed.txt").write_text(run_command(tree, work, "run.py", "a.json"))
    return left_behind(name, work, {str(work): "WORK", str(tree): "TREE"})


def left_behind(name: str, work: Path, places: dict[str, str]) -> dict[str, Any]:
    """Return what a run of RUNS printed and wrote."""
    out, printed = work / "out", (work / "printed.txt").read_text()
    read = {path: (out / path).read_text("utf-8") for path in ("report/report.html", "report/report.md", "config.yaml")}
    page, markdown = (
        page_lines(read["report/report.html"], places),
        _settled(text_lines(read["report/report.md"], places)),
    )
    return {
        "printed": text_lines(printed, places),
        "files": sorted(_named(path.relative_to(out)) for path in out.rglob("*") if path.is_file()),
        "config": read["config.yaml"].splitlines(),
        "plan": without_measures(json.loads((out / "plan.json").read_text("utf-8")), places),
        "metrics": [_step(json.loads(row)) for row in (out / "metrics.jsonl").read_text("utf-8").splitlines()],
        "weights": {str(path.relative_to(out)): weights(path) for path in sorted(out.rglob("*.safetensors"))
                    if path.relative_to(out).parts[0] in ("model", "checkpoints")},
        "model": _model_files(out / "model", places),
        "evaluations": {path.parent.name: without_measures(json.loads(path.read_text()), places)
                        for path in sorted(out.glob("evaluation/*/metrics.json"))},
        "rankings": {path.parent.name: {"sha256": digest(path.read_bytes())}
                     for path in sorted(out.glob("evaluation/*/run.trec"))},
        "report": _without_copies(without_measures(json.loads((out / "report/report.json").read_text()), places)),
        "page": sections(page, re.compile(r"^ {3}<section>.* id=\[(\w+)\]"), most=120 if name in PAGES else 0),
        "markdown": sections(markdown, re.compile(r"^## (.*)"), most=30 if name in PAGES else 0),
    }  # fmt: skip


def without_measures(value: Any, places: dict[str, str]) -> Any:
    """Return a value without the keys that are MEASURED, its texts as `plain`."""
    if isinstance(value, dict):
        kept = value if not HEADLINES & set(value) else {key: value[key] for key in value if key in HEADLINES}
        return {key: without_measures(part, places) for key, part in kept.items() if not MEASURED.search(key)}
    if isinstance(value, list) and value and isinstance(value[0], dict) and "bytes_per_device" in value[0]:
        return [json.dumps(part, separators=(",", ":")) for part in value]  # candidates of a plan, each in a line
    if isinstance(value, list):
        return [without_measures(part, places) for part in value]
    return plain(value, places) if isinstance(value, str) else value


def _step(row: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a step that no clock and no memory made."""
    numbers: dict[str, Any] = without_measures(row, {})
    numbers.pop("scaling_efficiency", None)  # measured here, predicted in the plan
    return numbers


def _without_copies(report: dict[str, Any]) -> dict[str, Any]:
    """Drop what plan, config and evaluations hold already, and measured curves."""
    left = {key: value for key, value in report.items() if key not in ("plan", "config")}
    left["recall_at_k"] = {key: values[:10] for key, values in report.get("recall_at_k", {}).items()}
    return left


def sections(lines: list[str], heading: re.Pattern[str], *, most: int = 0) -> list[str]:
    """Return the first lines of each section of a page, and hashes of the others.

    Args:
        lines: The page.
        heading: What the first line of a section matches; its group is the section's name.
        most: Lines of a section that are kept.
    """
    parts: dict[str, list[str]] = {"": []}
    name = ""
    for line in lines:
        found = heading.match(line)
        name = found[1] if found else name
        parts.setdefault(name, []).append(line)
    kept = []
    for name, part in parts.items():
        rest = part[most:]
        kept += [*part[:most], *([f"{name or 'head'}: {len(rest)} lines {hashes(rest)}"] if rest else [])]
    return kept


def weights(path: Path) -> dict[str, Any]:
    """Return what identifies the tensors of a safetensors file: a hash of them all, and their size and sums."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    parts = []
    magnitude = 0.0
    for name, fact in sorted(header.items()):
        begin, end = fact["data_offsets"]
        parts.append(f"{name} {fact['dtype']} {fact['shape']} {digest(data[begin:end])}")
        if fact["dtype"] in ("F32", "F64"):
            values = np.frombuffer(data[begin:end], dtype={"F32": "<f4", "F64": "<f8"}[fact["dtype"]]).astype(
                np.float64
            )
            magnitude += float(np.abs(values).sum())
    return {
        "sha256": digest("\n".join(parts)),
        "form": digest("\n".join(part.rpartition(" ")[0] for part in parts)),
        "tensors": len(parts),
        "magnitude": magnitude,
    }


def _model_files(folder: Path, places: dict[str, str]) -> dict[str, Any]:
    """Return the small JSON files of a model and its card; of longer files a hash."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".md":
            lines = _settled(text_lines(path.read_text("utf-8"), places))
            found[name] = sections(lines, re.compile(r"^## (.*)"), most=5)
        elif path.suffix == ".json" and path.stat().st_size < 3000:
            found[name] = without_measures(json.loads(path.read_text("utf-8")), places)
        elif path.is_file() and path.suffix != ".safetensors":
            found[name] = {"sha256": digest(path.read_bytes())}
    return found


def _settled(lines: list[str]) -> list[str]:
    """Mask what a report says of speed and of the software of a machine."""
    settled, heading = [], ""
    for line in lines:
        if line.startswith("#"):
            heading = line.strip("# ")
        if heading in SPEED_HEADINGS or line.startswith(SPEED_ROWS):
            line = masked(line)
        settled.append(line)
    return settled


SPEED_HEADINGS = ("Speed and health", "Performance", "Environment", "Ranks of the run", "Processes")
SPEED_ROWS = ("| Samples per second", "| Tokens per second", "| Peak memory", "| Waiting for data", "| cpu cores")


def _named(path: Path) -> str:
    return re.sub(r"tfevents\..*", "tfevents", str(path))
