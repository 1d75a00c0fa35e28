"""Train the same configurations with two commits, and compare what the runs leave behind to the last bit.

    python benchmarks/same_runs.py a40e84e HEAD
    python benchmarks/same_runs.py a40e84e . --only lora,mined --processes 2     # "." is the working tree as it stands

For a change that must not change a number. Each configuration is trained on 1 and on 2 processes, first by one commit
and then by the other, with one thread each and the same seed. Compared are metrics.jsonl, plan.json, config.yaml, the
model's files, each evaluation with its rankings, and report.json; times, speeds, memory and the fingerprint of the data
are left out. Prints a line for each run, and exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soak_compare import difference

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]

TEXT = {
    "data_path": "builtin:stdlib-code",
    "val_data_path": "builtin:stdlib-code",
    "test_data_path": "builtin:stdlib-code",
    "model_name": "builtin:tiny-transformer",
    "batch_size": 64,
    "max_steps": 6,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "learning_rate": 1e-3,
}

# Name -> (configuration file, or none; keys). "TEACHER" stands for the model of the run before, of the first commit.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "quickstart_text": ("configs/quickstart_text.yaml", {}),
    "quickstart": ("configs/quickstart.yaml", {}),
    "lora": ("", {**TEXT, "use_lora": True, "lora_r": 4, "gradient_cache_chunk_size": 24, "retain": 0.5}),
    "sharded": ("", {**TEXT, "use_fsdp": True, "fsdp_mode": "sharded", "gradient_accumulation_steps": 2}),
    # 14 steps an epoch: mined before the first step, and again before the last two.
    "mined": ("", {**TEXT, "mine": 1, "mine_negatives": 2, "batch_size": 256, "max_steps": 16, "eval_steps": 8}),
    "distilled": ("", {**TEXT, "loss_type": "distillation", "teacher_model_name": "TEACHER", "mrl_dims": [128, 32]}),
}

COMPARED = ("metrics.jsonl", "plan.json", "config.yaml", "model/**/*", "evaluation/**/*", "report/report.json")
"""Files of a run's folder that must be equal; in JSON but for times and memory."""

IGNORED = "data_hashes"
"""Fingerprints of the data tell two runs apart, so another form of the rows in memory may change them."""


def train(tree: Path, folder: Path, name: str, processes: int, teacher: Path) -> str:
    """Train one of RUNS with the code of a tree; return what it printed last where it failed."""
    config, keys = RUNS[name]
    # Processes share the rows of one global batch, so that 1 and 2 of them train alike.
    keys = {**keys, "num_processes": processes, "output_dir": "out"}
    if "batch_size" in keys:
        keys["global_batch_size"] = keys.pop("batch_size")
    keys = {key: value for key, value in keys.items() if value is not None}
    values = {key: str(teacher) if value == "TEACHER" else value for key, value in keys.items()}
    folder.mkdir(parents=True)
    # A copy of the file, as a report shows the command that made it.
    text = (tree / config).read_text("utf-8") if config else f"model_name: {values.pop('model_name')}\n"
    (folder / "config.yaml").write_text(text, "utf-8")
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    command = [sys.executable, str(tree / "run.py"), "config.yaml", "--config_override", *overrides]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yield what differs between two folders of runs, a line for each file."""
    names = {
        str(path.relative_to(folder))
        for folder in (one, other)
        for pattern in COMPARED
        for path in folder.glob(pattern)
        if path.is_file()
    }
    assert any(name.endswith(".safetensors") for name in names), f"{one} holds no weights, so nothing would be compared"
    for name in sorted(names):
        if missing := [folder for folder in (one, other) if not (folder / name).is_file()]:
            yield f"{name} is not in {missing[0]}"
        elif text := difference(one, other, name, ignored=IGNORED):
            yield f"{name}: {text}"


def main() -> int:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commits", nargs=2, help='two commits; "." is the working tree')
    parser.add_argument("--only", default=",".join(RUNS), help="names of runs, with commas between them")
    parser.add_argument("--processes", default="1,2", help="numbers of processes (default: 1,2)")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which then stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.keep or Path(scratch)).resolve()
        trees = []
        for number, commit in enumerate(options.commits):
            tree = ROOT if commit == "." else Path(scratch, f"tree-{number}")
            if commit != ".":
                tree.mkdir()
                archive = subprocess.run(
                    ["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=True
                )
                subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
            trees.append(tree)
        names = options.only.split(",")
        if "distilled" in names and "quickstart_text" not in names:
            names = ["quickstart_text", *names]
        num_different = 0
        for name in names:
            for processes in map(int, options.processes.split(",")):
                outputs = [work / f"{name}-{processes}" / str(number) for number in (0, 1)]
                teacher = work / f"quickstart_text-{options.processes.split(',')[0]}" / "0" / "out" / "model"
                failures = [train(trees[side], outputs[side], name, processes, teacher) for side in (0, 1)]
                lines = [f"{commit}: {text}" for commit, text in zip(options.commits, failures, strict=True) if text]
                lines = lines or list(differences(outputs[0] / "out", outputs[1] / "out"))
                num_different += bool(lines)
                result = "different" if lines else f"equal, {_summary(outputs[1] / 'out')}"
                print(f"{name}, {processes} processes: {result}", *lines, sep="\n  ", flush=True)
    return 1 if num_different else 0


def _summary(folder: Path) -> str:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    weights = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("model/**/*.safetensors"))))
    strategy = json.loads((folder / "plan.json").read_text("utf-8"))["strategy"]
    return f"{strategy}, {len(losses)} steps, last loss {losses[-1]!r}, weights {weights.hexdigest()[:16]}"


if __name__ == "__main__":
    sys.exit(main())
