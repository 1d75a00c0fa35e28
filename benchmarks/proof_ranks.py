"""Train the same small model on this process and others in several ways, three steps each: one JSON line for each way.

`gpu_proof.py` starts one process for each rank. The collectives are NCCL's alone on a GPU, as in a run: what is put
together from shards in the host's memory must not ask it for CPU tensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from memory_cases import Case, bert
from memory_prediction import prepare

from vembed.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Mapping

WITHOUT_DROPOUT = {**bert(64, 2), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

WAYS: Mapping[str, Case] = {
    "replicated": Case("replicated", WITHOUT_DROPOUT, ranks=2),
    "fast": Case("fast", WITHOUT_DROPOUT, ranks=2, fsdp_mode="fast"),
    "lean": Case("lean", WITHOUT_DROPOUT, ranks=2, fsdp_mode="lean"),
    "sharded": Case("sharded", WITHOUT_DROPOUT, ranks=2, fsdp_mode="sharded"),
    "offload": Case("offload", WITHOUT_DROPOUT, ranks=2, fsdp_mode="sharded", cpu_offload=True),
}
"""How two ranks share the work."""

ALONE = Case("alone", WITHOUT_DROPOUT)
"""The same batch on one process."""

STEPS = 3


def trajectory(case: Case, device: torch.device) -> list[float]:
    """Return loss and gradient norm of each step: the later ones depend on every weight."""
    _, _, step = prepare(case, device)
    return [number for index in range(STEPS) for number in step(index)]


def main() -> int:
    """Run the ways that are named, as one rank of two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="+", choices=sorted(WAYS))
    parser.add_argument("--device", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--meet", required=True, help="file in which the ranks find each other")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    backend = "gloo"
    if device.type == "cuda":
        backend, device = "nccl", torch.device("cuda", arguments.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{arguments.meet}", rank=arguments.rank, world_size=2)
    for way in arguments.ways:
        try:
            said = {"way": way, "trajectory": trajectory(WAYS[way], device)}
        except MachineError as error:
            said = {"way": way, "refused": str(error)}
        print(json.dumps(said), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
