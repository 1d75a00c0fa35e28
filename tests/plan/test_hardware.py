"""What a process may use: the limits of its container or batch job, as the system's files say them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from vembed.plan.devices import cpu_cores, cpu_memory_bytes

if TYPE_CHECKING:
    from pathlib import Path

JOB = "slurm/uid_7/job_9/step_0"
VERSION_2 = f"0::/{JOB}\n"
VERSION_1 = f"12:memory:/{JOB}\n5:cpu,cpuacct:/{JOB}\n1:name=systemd:/user.slice\n"


def machine(root: Path, cgroups: str, files: dict[str, str]) -> Path:
    """Write what /proc and /sys say of this process and its cgroups."""
    for name, text in {"proc/self/cgroup": cgroups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroups", "files", "limited"),
    [
        (VERSION_2, {"sys/fs/cgroup/memory.max": "1048576\n"}, True),
        (VERSION_2, {f"sys/fs/cgroup/{JOB}/memory.max": "1048576\n"}, True),
        (VERSION_2, {f"sys/fs/cgroup/{JOB}/memory.max": "max", "sys/fs/cgroup/slurm/memory.max": "1048576"}, True),
        (VERSION_2, {f"sys/fs/cgroup/{JOB}/memory.max": "max\n"}, False),
        (VERSION_2, {"sys/fs/cgroup/slurm/uid_8/memory.max": "1048576\n"}, False),
        (VERSION_1, {f"sys/fs/cgroup/memory/{JOB}/memory.limit_in_bytes": "1048576\n"}, True),
        (VERSION_1, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1048576\n"}, True),
        (VERSION_1, {f"sys/fs/cgroup/memory/{JOB}/memory.limit_in_bytes": "9223372036854771712"}, False),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "1048576\n"}, True),
    ],
)
def test_memory_is_the_least_limit_of_the_process_or_of_what_it_is_in(
    tmp_path: Path, cgroups: str, files: dict[str, str], limited: bool
) -> None:
    whole = cpu_memory_bytes(tmp_path / "nothing")
    assert whole > 1048576
    assert cpu_memory_bytes(machine(tmp_path, cgroups, files)) == (1048576 if limited else whole)


@pytest.mark.parametrize(
    ("cgroups", "files", "cores"),
    [
        (VERSION_2, {f"sys/fs/cgroup/{JOB}/cpu.max": "300000 100000\n"}, 3),
        (VERSION_2, {f"sys/fs/cgroup/{JOB}/cpu.max": "max 100000\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (VERSION_2, {f"sys/fs/cgroup/{JOB}/cpu.max": "50000 100000\n"}, 1),
        (VERSION_2, {f"sys/fs/cgroup/{JOB}/cpu.max": "max 100000\n"}, 6),
        (
            VERSION_1,
            {
                f"sys/fs/cgroup/cpu/{JOB}/cpu.cfs_quota_us": "400000",
                f"sys/fs/cgroup/cpu/{JOB}/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (VERSION_1, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 6),
    ],
)
def test_cores_are_those_that_the_process_is_bound_to_within_its_share_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert cpu_cores(machine(tmp_path, cgroups, files)) == cores
