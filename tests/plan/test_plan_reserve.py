"""What stays free on a device: named, by what the run is spread over, and part of whether a way fits."""

from __future__ import annotations

import pytest
from plan_cases import planned, reason

from vembed.plan.problem import BLAS_BYTES, COMMUNICATOR_BYTES, CONTEXT_BYTES, PROCESS_BYTES, Way, reserve

HYBRID = Way("fsdp", mode="fast", sharding_factor=2)


@pytest.mark.parametrize(
    ("way", "num_devices", "num_groups"),
    [
        (Way("single"), 1, 0),
        (Way("ddp"), 8, 1),
        (Way("fsdp", mode="lean", sharding_factor=8), 8, 1),  # shards are spread over the group of all
        (HYBRID, 8, 3),
    ],
)
def test_an_accelerator_keeps_room_for_context_libraries_and_each_group(
    way: Way, num_devices: int, num_groups: int
) -> None:
    total = sum(reserve("cuda", way, num_devices).values())
    assert total == CONTEXT_BYTES + BLAS_BYTES + num_groups * COMMUNICATOR_BYTES
    assert sum(reserve("cpu", way, num_devices).values()) == PROCESS_BYTES


def test_the_plan_lists_the_reserve_and_counts_it() -> None:
    made = planned("8xA100-40GB", 1.5e9, "use_fsdp=true", "sharding_factor=2")
    assert "3 communicators of NCCL" in reason(made, "reserve: ")
    assert "1 communicator of NCCL" in reason(planned("8xA100-40GB", 1.5e9), "reserve: ")
    assert "+ 2.7 GiB =" in reason(made, "memory: ")
    assert "NCCL" not in reason(planned("1xA100-40GB", 1e8), "reserve: ")
