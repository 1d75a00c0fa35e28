"""Train the same small model on one or two ranks in several ways, three steps each: one JSON line for each way.

`gpu_proof.py` starts one process for each rank. The collectives are NCCL's alone on a GPU, as in a run: what is put
together from shards in the host's memory must not ask it for CPU tensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from engine_workload import structure_of_pairs
from memory_cases import Case, bert
from memory_step import prepare_step
from proof_models import text_encoder

from vembed.batch import Features, Ragged
from vembed.distributed.ranks import Ranks
from vembed.distributed.runtime import prepare_device
from vembed.errors import MachineError
from vembed.gradcache.engine import Pool

if TYPE_CHECKING:
    from collections.abc import Mapping

SHAPE = {**bert(64, 2), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

WAYS: Mapping[str, Case] = {
    "replicated": Case("replicated", SHAPE),
    "fast": Case("fast", SHAPE, fsdp_mode="fast"),
    "lean": Case("lean", SHAPE, fsdp_mode="lean"),
    "sharded": Case("sharded", SHAPE, fsdp_mode="sharded"),
    "offload": Case("offload", SHAPE, fsdp_mode="sharded", cpu_offload=True),
}
"""How ranks share the work."""

ALONE = Case("alone", SHAPE)
"""The same batch on one process."""

STEPS = 3


class OneRank(Ranks):
    """A single rank that takes every way that several take: its collectives are the library's, with nobody else."""

    @property
    def is_one(self) -> bool:
        """False, so that nothing is left out."""
        return False


def trajectory(case: Case, device: torch.device, ranks: Ranks) -> list[float]:
    """Return loss and gradient norm of each step: the later ones depend on every weight."""
    torch.manual_seed(0)
    encoder, rng = text_encoder(SHAPE, device.type).train(), np.random.default_rng(0)
    ids = Ragged.from_rows([rng.integers(5, 500, case.tokens - row % 2) for row in range(2 * case.pairs)])
    slots = case.assignment.slots[ranks.rank]
    rows = Features({"input_ids": ids}, ids.lengths).take(slots)
    pool = Pool(encoder, encoder.collate, rows, slots)
    _, step = prepare_step(case, encoder, ranks, device, [pool], structure_of_pairs(case.pairs))
    return [number for index in range(STEPS) for number in step(index)]


def main() -> int:
    """Run the ways that are named, as one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="+", choices=sorted(WAYS))
    parser.add_argument("--device", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--meet", required=True, help="file in which the ranks find each other")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    backend = "gloo"
    if device.type == "cuda":
        backend, device = "nccl", torch.device("cuda", arguments.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    prepare_device()  # the arithmetic of a run, which the process without ranks has too
    place = {"rank": arguments.rank, "world_size": arguments.ranks}
    dist.init_process_group(backend, init_method=f"file://{arguments.meet}", **place)
    ranks = Ranks.of_this_process() if arguments.ranks > 1 else OneRank()
    for way in arguments.ways:
        try:
            row = {"way": way, "trajectory": trajectory(replace(WAYS[way], ranks=arguments.ranks), device, ranks)}
        except MachineError as error:
            row = {"way": way, "refused": str(error)}
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
