"""The loss stage alone: value and gradients for all embeddings of a batch, whole matrix against tiles.

    python benchmarks/loss_stage.py
    python benchmarks/loss_stage.py --sizes 16384 65536 --losses infonce-both --methods tiled

Each case runs in a process of its own. Its memory is the peak resident size (VmHWM) of the stage minus what was
resident before it: both gradients (2 x B x dim) are counted, the embeddings aren't. Seconds are of the CPU, so that a
busy machine counts little; with one thread they are what a quiet one would take.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vembed.losses.base import BatchStructure
from vembed.losses.infonce import InfoNCE
from vembed.losses.sigmoid import SigmoidLoss
from vembed.losses.streamed import StreamedBatch, StreamedLoss
from vembed.losses.tiles import DEFAULT_TILE_SIZE, Prefixes

LOSSES = ("infonce", "infonce-both", "sigmoid", "infonce-both-mrl")
METHODS = ("dense", "tiled")
DENSE_MATRICES = 11
"""Most matrices of B x B that the definition holds at once; cases that may not fit are left out and said so."""

WARM_UP_SIZE = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One process.

    Attributes:
        loss: Which loss.
        method: "dense" or "tiled".
        size: Queries, and as many documents.
        dim: Embedding dim.
        tile_size: Rows and columns of a tile.
    """

    loss: str
    method: str
    size: int
    dim: int
    tile_size: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a case measured. `checksum` tells whether two methods computed the same: the norm of all gradients."""

    case: Case
    cpu_seconds: float
    wall_seconds: float
    added_bytes: int
    loss: float
    checksum: float


def make_loss(case: Case) -> StreamedLoss:
    """Build the loss of a case."""
    if case.loss == "sigmoid":
        return SigmoidLoss(init_logit_scale=2.302585, init_logit_bias=-10.0, tile_size=case.tile_size)
    return InfoNCE(
        temperature=0.05,
        learn_temperature=True,
        bidirectional="both" in case.loss,
        prefixes=Prefixes.of([case.dim >> shift for shift in range(4)]) if "mrl" in case.loss else None,
        tile_size=case.tile_size,
    )


def make_batch(size: int, dim: int) -> tuple[torch.Tensor, BatchStructure]:
    """Return the embedding table [queries; documents] and a structure of pairs."""
    generator = torch.Generator().manual_seed(0)
    table = torch.empty(2 * size, dim)
    for part in table.split(4096):
        part.copy_(torch.nn.functional.normalize(torch.randn(len(part), dim, generator=generator), dim=1))
    rows = torch.arange(size)
    return table, BatchStructure(torch.stack([rows, rows], 1), rows, rows + size, rows, rows)


def loss_stage(loss: StreamedLoss, table: torch.Tensor, structure: BatchStructure, method: str) -> tuple[float, float]:
    """Compute the loss and its gradients as the engine does; return the loss and the norm of the gradients."""
    size = structure.num_queries
    if method == "dense":
        leaf = table.detach().requires_grad_()
        value = loss(leaf[:size], leaf[size:], structure)
        gradients, *_ = torch.autograd.grad(value, [leaf, *loss.parameters()])
        return value.item(), gradients.norm().item()
    batch = StreamedBatch(table[:size], table[size:], structure)
    statistics = loss.statistics(batch) if loss.needs_statistics else None
    gradients = torch.empty_like(table)
    found = loss.gradients(batch, statistics, (gradients[:size], gradients[size:]))
    return found.loss.item(), gradients.norm().item()


def run_case(case: Case) -> Result:
    """Measure a case in this process."""
    small, small_structure = make_batch(WARM_UP_SIZE, case.dim)
    loss_stage(make_loss(case), small, small_structure, case.method)  # libraries allocate at their first use
    loss = make_loss(case)
    table, structure = make_batch(case.size, case.dim)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present size
    before = status_bytes("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    value, checksum = loss_stage(loss, table, structure, case.method)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Result(case, cpu, wall, status_bytes("VmHWM") - before, value, checksum)


def status_bytes(name: str) -> int:
    """Read a size of this process from /proc."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def run_in_process(case: Case, threads: int) -> Result:
    """Measure a case in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{case} failed with exit code {done.returncode}:\n{done.stderr}")
    content = json.loads(done.stdout)
    return Result(**{**content, "case": Case(**content["case"])})


def fits(case: Case) -> bool:
    """Return whether a dense case fits into three quarters of the memory that is free."""
    (line,) = [each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemAvailable:")]
    needed = DENSE_MATRICES * case.size**2 * 4
    return case.method == "tiled" or needed < 0.75 * int(line.split()[1]) * 1024


def main(arguments: list[str] | None = None) -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096], help="queries and documents")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tile-size", type=int, default=DEFAULT_TILE_SIZE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write the results as JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case is not None:
        print(json.dumps(asdict(run_case(Case(**json.loads(given.case))))))
        return
    results = []
    names = ("loss", "B", "method", "CPU s", "ns/cell", "added MB", "loss value", "|gradient|")
    print("{:<18}{:>7}  {:<7}{:>9}{:>9}{:>10}{:>14}{:>12}".format(*names))
    for size in given.sizes:
        for loss in given.losses:
            for method in given.methods:
                case = Case(loss, method, size, given.dim, given.tile_size)
                if not fits(case):
                    print(
                        f"{loss:<18}{size:>7}  {method:<7}  left out: about {DENSE_MATRICES * size**2 * 4 / 1e9:.0f} GB"
                    )
                    continue
                result = run_in_process(case, given.threads)
                results.append(result)
                print(
                    f"{loss:<18}{size:>7}  {method:<7}{result.cpu_seconds:>9.3f}"
                    f"{result.cpu_seconds / size**2 * 1e9:>9.1f}{result.added_bytes / 1e6:>10.1f}"
                    f"{result.loss:>14.8f}{result.checksum:>12.4e}",
                    flush=True,
                )
    if given.output is not None:
        given.output.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
