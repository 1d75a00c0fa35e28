"""What a machine's facts and variables are said to mean: each rule on both sides of its threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from vembed.workflows.doctor.machine import (
    MEANINGS,
    Device,
    MachineFacts,
    Space,
    check_machine,
    machine_facts,
    odd_variables,
    shown_variables,
)

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
GPU = Device("NVIDIA H100", 80 * GIB, 79 * GIB, fast_bf16=True, capability="9.0")

READY = MachineFacts(
    system="Linux", python="3.11.7", num_cores=16, all_cores=16, memory_bytes=128 * GIB, all_memory_bytes=128 * GIB,
    devices=(GPU, GPU), driver="570.1", cuda="12.8", nccl="2.27.3", topology="",
    packages={"torch": "2.15.0", "numpy": "2.4"}, extras={"bitsandbytes": ""},
    shared_memory=Space("/dev/shm", 64 * GIB, 64 * GIB), disk=Space("/data/out", 900 * GIB, 500 * GIB),
)  # fmt: skip


def found(facts: MachineFacts) -> list[tuple[str, str]]:
    return [(check.level, check.about) for check in check_machine(facts, ())]


def test_a_ready_machine_has_nothing_to_mend_with_or_without_gpus() -> None:
    assert found(READY) == []
    assert found(replace(READY, devices=(), driver="", cuda="", nccl="")) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"packages": {"torch": "2.15.0", "numpy": ""}}, [("problem", "packages")]),
        ({"packages": {"torch": "2.10.1"}}, [("problem", "torch")]), ({"packages": {"torch": "2.11.0+cu128"}}, []),
        ({"packages": {"torch": "2.15.0+cu130"}}, []), ({"packages": {"torch": "3.0"}}, []),
        ({"devices": ()}, [("problem", "devices")]),
        ({"devices": (GPU, replace(GPU, name="NVIDIA A100"))}, [("warning", "devices")]),
        ({"devices": (GPU, replace(GPU, free_bytes=71 * GIB))}, [("warning", "device 1")]),
        ({"devices": (GPU, replace(GPU, free_bytes=73 * GIB))}, []),
        ({"shared_memory": Space("/dev/shm", 64 << 20, 64 << 20)}, [("warning", "shared memory")]),
        ({"shared_memory": Space("/dev/shm", GIB, GIB)}, []), ({"shared_memory": None}, []),
        ({"disk": Space("/data", 900 * GIB, 19 * GIB)}, [("warning", "disk")]),
        ({"disk": Space("/data", 900 * GIB, GIB // 2)}, [("problem", "disk")]),
        ({"disk": Space("/data", 900 * GIB, 21 * GIB)}, []),
    ],
)  # fmt: skip
def test_each_rule_speaks_beyond_its_threshold_and_not_within(
    change: dict[str, object], expected: list[tuple[str, str]]
) -> None:
    assert found(replace(READY, **change)) == expected


def test_problems_come_before_warnings_and_variables_are_warnings() -> None:
    oddities = odd_variables({"NCCL_P2P_DISABLE": "1"}, num_cores=16, num_gpus=2)
    checks = check_machine(replace(READY, packages={"torch": "2.15.0", "numpy": ""}), oddities)
    assert [(check.level, check.about) for check in checks] == [
        ("problem", "packages"),
        ("warning", "NCCL_P2P_DISABLE"),
    ]


def test_a_driver_without_a_build_for_it_names_the_build() -> None:
    (check,) = check_machine(replace(READY, devices=(), cuda=""), ())
    assert "built without CUDA" in check.sentence
    (check,) = check_machine(replace(READY, devices=()), ())
    assert "torch can't use them" in check.sentence


def test_devices_that_fail_at_the_first_call_are_a_problem_with_the_words_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it.")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", fails)
    facts = machine_facts(tmp_path / ("x" * 300) / "out")
    assert facts.devices == ()
    assert facts.disk is not None, "the room is that of the nearest folder that can be looked at"
    (sentence,) = [check.sentence for check in check_machine(facts, ()) if check.about == "devices"]
    assert sentence.startswith("torch can't use the GPUs: The NVIDIA driver on your system is too old (found version 1")


@pytest.mark.parametrize(
    ("odd", "usual"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": "0"}),
        ({"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "0"}),
        ({"NCCL_SHM_DISABLE": "1"}, {"NCCL_SOCKET_IFNAME": "eth0"}),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}),
        ({"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "WARN"}), ({"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": "4"}),
        ({"OMP_NUM_THREADS": "all"}, {}), ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"},
         {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}), ({"WORLD_SIZE": "2", "RANK": "0"}, {"WORLD_SIZE": "1"}),
    ],
)  # fmt: skip
def test_odd_variables_are_named_and_usual_ones_are_not(odd: dict[str, str], usual: dict[str, str]) -> None:
    assert [check.about for check in odd_variables(odd, num_cores=4, num_gpus=0)] == [next(iter(odd))]
    assert odd_variables(usual, num_cores=4, num_gpus=0) == ()


def test_only_variables_that_matter_are_shown_and_no_secret_is() -> None:
    environment = dict.fromkeys(MEANINGS, "1") | {
        "HF_TOKEN": "canary",
        "WANDB_API_KEY": "canary",
        "HOME": "/root",
        "RANKING": "x",
        "NCCL_ALGO": "Ring",
    }
    shown = shown_variables(environment)
    assert set(shown) == set(MEANINGS) | {"NCCL_ALGO"}
    assert "canary" not in shown.values()
