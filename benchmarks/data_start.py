"""How long runs over a million rows of JSONL take to their first step, and in how much memory, at first and later.

Rows of a query, a positive and a hard negative, 460 bytes each. Every start is two processes: one does what a run does
with its data before it plans, the other trains one step of a small model of texts. 1,000 rows show what the program
takes without data.

    OMP_NUM_THREADS=1 python benchmarks/data_start.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FEW_ROWS = 1000

PROGRAM = """
import json, sys, time
import vembed.entrypoints.train, vembed.training.loop
from vembed.config.load import load_config
from vembed.training.data import load_data
config = load_config(None, ["model_name=builtin:ngram-bag", "data_path=" + sys.argv[1]]).config
wall, cpu = time.perf_counter(), time.process_time()
load_data(config)
told = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps(told | {name: int(status[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon", "RssFile")}))
"""


def main() -> None:
    """Write the rows, start again and again, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, many = folder / "few.jsonl", folder / "many.jsonl"
        write_rows(few, FEW_ROWS)
        write_rows(many, rows)
        print(f"{rows:,} rows, {many.stat().st_size / 1e6:.0f} MB of JSONL; seconds (of CPU in brackets), MB")
        print(f"{'start':<12}{'data s':>16}{'peak':>8}{'own':>8}{'mapped':>8}{'first step s':>18}{'peak':>8}")
        show("1,000 rows", few, "never", folder)
        show("first", many, str(folder / "cache"), folder, clear=True)
        show("second", many, str(folder / "cache"), folder)


def write_rows(path: Path, count: int) -> None:
    """Write rows of random words."""
    generator, words = random.Random(0), [f"w{number}" for number in range(5000)]
    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            query, positive, negative = (" ".join(generator.choices(words, k=size)) for size in (8, 30, 30))
            texts = {"query": f"{query} {row}", "positive": f"{positive} {row}", "negatives": [f"{negative} {row}"]}
            file.write(json.dumps(texts) + "\n")


def show(start: str, data: Path, cache: str, folder: Path, *, clear: bool = False) -> None:
    """Start twice, with clear each time as if it were the first, and print a line."""
    os.environ["VEMBED_CACHE"] = cache
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(data)], check=True, stdout=subprocess.PIPE, text=True)
    part = json.loads(done.stdout)
    if clear:
        shutil.rmtree(cache, ignore_errors=True)
    seconds, cpu, peak = one_step(data, folder / start.replace(",", ""), folder / "told.txt")
    memory = "".join(f"{part[name]:>8,.0f}" for name in ("VmHWM", "RssAnon", "RssFile"))
    alone, whole = f"{part['seconds']:.1f} ({part['cpu']:.1f})", f"{seconds:.1f} ({cpu:.1f})"
    print(f"{start:<12}{alone:>16}{memory}{whole:>18}{peak:>8,.0f}", flush=True)


def one_step(data: Path, output: Path, told: Path) -> tuple[float, float, float]:
    """Train a step; return seconds and CPU seconds from the process's start until it is done, and the peak in MB."""
    settings = {"model_name": "builtin:ngram-bag", "data_path": data, "output_dir": output, "batch_size": 256}
    settings |= {"max_steps": 1, "eval_strategy": "no", "report_to": "none"}
    command = [sys.executable, "-m", "vembed", "train", "--config_override"]
    command += [f"{key}={value}" for key, value in settings.items()]
    metrics, begun = output / "metrics.jsonl", time.perf_counter()
    with told.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        seconds, cpu = time.perf_counter() - begun, 0.0 if process.returncode else cpu_seconds(process.pid)
        if process.wait():
            sys.exit(told.read_text())
    return seconds, cpu, json.loads(metrics.read_text().splitlines()[0])["peak_memory_bytes"] / 2**20


def cpu_seconds(process: int) -> float:
    """Return what a process has used, in itself alone."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
