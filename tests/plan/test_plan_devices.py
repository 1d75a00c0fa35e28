"""Devices that a plan is made for, what their names mean; and what this machine gives one process."""

import os
from pathlib import Path

import pytest

from vembed.errors import ConfigError
from vembed.plan.devices import (
    GIB,
    KNOWN_DEVICES,
    NETWORK,
    Devices,
    Machine,
    cpu_cores,
    cpu_memory_bytes,
    find_known,
    parse_devices,
)

# Names and figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "count", "name", "gib"),
    [
        *[("8xH100-80GB", 1, 8, "H100", 80), ("8xh100-80gb", 1, 8, "h100", 80)],
        *[("4x24GB", 1, 4, "device of 24 GB", 24), ("2x8xA100-40GB", 2, 16, "A100", 40), ("1xT4", 1, 1, "T4", 16)],
        *[("4xH200", 1, 4, "H200", 141), ("2xRTX4090", 1, 2, "RTX4090", 24)],
        *[("2xRTX 4090-24GB", 1, 2, "RTX 4090", 24), ("1xSomething-12.5GiB", 1, 1, "Something", 12.5)],
        *[("8xA100 40GB", 1, 8, "A100", 40), ("8xA100-SXM4-40GB", 1, 8, "A100-SXM4", 40)],
    ],
)
def test_a_text_says_how_many_of_what(text: str, nodes: int, count: int, name: str, gib: float) -> None:
    devices = parse_devices(text)
    assert (devices.nodes, devices.count, devices.name) == (nodes, count, name)
    assert devices.memory_bytes == int(gib * 0.985 * GIB), "the driver's part is left out"
    assert devices.known == (find_known(name) is not None)


@pytest.mark.parametrize(
    "text",
    [
        *["", "8", "H100", "x8", "0x24GB", "4xUnheardOf", "4xL40", "4x0GB", "4x24GB-H100", "4x24TB", "-1xT4"],
        "8xA100 40GB PCIe",
    ],
)
def test_what_cannot_be_read_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="8xH100-80GB"):
        parse_devices(text)


def test_the_names_that_drivers_give_find_their_figures() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-40GB": "A100", "NVIDIA GeForce RTX 4090": "RTX4090",
        "NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "Tesla T4": "T4", "NVIDIA RTX A6000": "A6000", "NVIDIA A10G": "A10",
    }  # fmt: skip
    assert {name: find_known(name) for name in names} == {name: KNOWN_DEVICES[key] for name, key in names.items()}
    assert [find_known(name) for name in ("Radeon", "NVIDIA L40", "NVIDIA RTX A4000", "NVIDIA RTX A1000")] == [None] * 4


@pytest.mark.parametrize(
    ("text", "has_bf16"),
    [
        *[("1xT4", False), ("2xv100", False), ("2xRTX 2080 Ti-11GB", False)],
        *[("2xRTX4090", True), ("1xRTX 2000 Ada-16GB", True), ("1xL4", True)],
    ],
)
def test_devices_that_emulate_bfloat16_are_planned_without_it(text: str, has_bf16: bool) -> None:
    assert parse_devices(text).machine(8).fast_bf16 == has_bf16


def test_a_group_within_a_machine_is_joined_faster_than_one_over_several() -> None:
    devices = parse_devices("2x8xH100-80GB")
    assert devices.bandwidth(8) == KNOWN_DEVICES["H100"].link
    assert devices.bandwidth(16) == NETWORK


def test_this_machine_becomes_as_many_devices_as_it_has_processes() -> None:
    cpu = Machine("cpu", "the CPU", 4 * GIB, 2, fast_bf16=False)
    assert (Devices.of(cpu).count, Devices.of(cpu, 2).memory_bytes) == (1, 4 * GIB)
    assert Devices.of(cpu, 2).tflops == Devices.of(cpu).tflops, "its cores are those of one process already"
    card = Machine("cuda", "NVIDIA H200", 139 * GIB, 16, fast_bf16=True)
    assert Devices.of(card, 16, 2).per_node == 8
    assert str(Devices.of(card, 16, 2)) == "16 x NVIDIA H200, 139.0 GiB each on 2 machines"


# Limits of a container or a batch job, as the system's files say them -------------------------------------------------


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


def test_machines_whose_kernels_take_some_more_or_less_have_one_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6_160_000}
    monkeypatch.setattr("os.sysconf", lambda name: pages[name])
    before = cpu_memory_bytes(tmp_path)
    assert 0.99 < before / (4096 * 6_160_000) <= 1
    pages["SC_PHYS_PAGES"] += 24
    assert cpu_memory_bytes(tmp_path) == before


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
