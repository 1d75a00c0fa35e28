"""Draw the memory of one training step over time, with all, half and none of the graphs kept.

The batch is that of engine.py (lengths as texts have them, BERT of 6 layers x 384). Each step runs in a forked child,
whose resident size the parent reads.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=65536 python benchmarks/memory_timeline.py docs/images/memory.svg
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine import our_step
from engine_workload import build_workload

from vembed.gradcache.chunks import ChunkBudget

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_SECONDS = 0.02


def main() -> int:
    """Record each variant and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="SVG to write")
    parser.add_argument("--texts", type=int, default=256, help="queries and documents together")
    parser.add_argument("--tokens", type=int, default=1024, help="chunk budget")
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        sys.exit("set OMP_NUM_THREADS=1: a forked child of a process with several OpenMP threads hangs")
    settings = argparse.Namespace(
        texts=arguments.texts, seed=0, median=40, device="cpu", shape="small", layers=None, bf16=False, packing=False
    )
    workload = build_workload(settings, "mixed", dropout=0.1)
    budget = ChunkBudget(2**20, arguments.tokens)
    variants: dict[str, Callable[[], object]] = {
        f"retain {retain:g}": partial(our_step, workload, budget, retain) for retain in (1.0, 0.5, 0.0)
    }
    curves = {name: _recorded(step) for name, step in variants.items()}
    for name, (_, megabytes) in curves.items():
        print(f"{name:12}{max(megabytes):8.0f} MB at its peak")
    _draw(curves, arguments.output)
    return 0


def _recorded(step: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Run a step in a child; return seconds and megabytes above the start."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        step()
        os._exit(0)
    seconds, megabytes = [], []
    started = time.perf_counter()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        seconds.append(time.perf_counter() - started)
        megabytes.append(_resident_bytes(child) / 1e6)
        time.sleep(SAMPLE_SECONDS)
    return seconds, [value - megabytes[0] for value in megabytes[:-1]]


def _resident_bytes(process: int) -> int:
    fields = Path(f"/proc/{process}/statm").read_text("ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _draw(curves: dict[str, tuple[list[float], list[float]]], output: Path) -> None:
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "vembed"  # the same drawing for the same numbers
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for (name, (seconds, megabytes)), colour in zip(curves.items(), ("#b3541e", "#2e7d6b", "#2b5c9e"), strict=True):
        axes.plot(seconds[: len(megabytes)], megabytes, label=name, color=colour, linewidth=1.6)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MB above the start")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    sys.exit(main())
