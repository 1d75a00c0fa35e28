"""What a run does before it first uses an accelerator, and what it says of one; no GPU is needed to see it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import accelerate
import accelerate.utils
import pytest
import torch

from vembed.api.arguments import device_named
from vembed.distributed import runtime
from vembed.distributed.process_env import ProcessEnv
from vembed.distributed.runtime import describe_machine, local_device, start_runtime
from vembed.plan.devices import GIB
from vembed.plan.problem import CONTEXT_BYTES

CARD = torch.device("cuda", 0)
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the runtime take this machine for one with two GPUs; the variables that it sets go with the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(runtime, "num_devices", lambda: 2)
    monkeypatch.setattr(runtime, "has_virtual_memory", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    return monkeypatch


@pytest.fixture
def with_cudnn_attention() -> Iterator[None]:
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.usefixtures("with_cudnn_attention")
@pytest.mark.parametrize(
    "prepare", [local_device, lambda: start_runtime(deterministic=False), lambda: device_named("cpu")]
)
def test_cudnns_attention_is_off_in_runs_and_for_models_that_are_loaded(prepare: Any) -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    prepare()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_the_allocators_blocks_grow_unless_the_user_said_otherwise_or_there_is_no_gpu(gpus: pytest.MonkeyPatch) -> None:
    assert local_device() == CARD
    chosen = os.environ["PYTORCH_ALLOC_CONF"]
    assert chosen == "expandable_segments:True,pinned_max_round_threshold_mb:1"
    before = torch._C._accelerator_getAllocatorSettings()
    assert before in ("", chosen)
    torch._C._accelerator_setAllocatorSettings(chosen)  # torch knows both
    torch._C._accelerator_setAllocatorSettings(before)
    gpus.delenv("PYTORCH_ALLOC_CONF")
    with gpus.context() as patch:
        patch.setattr(torch, "__version__", "2.14.1+cu130")
        local_device()
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True", "it refuses what it doesn't know"
    for name in VARIABLES[:2]:
        gpus.delenv("PYTORCH_ALLOC_CONF", raising=False)
        gpus.setenv(name, "backend:cudaMallocAsync")
        local_device()
        assert {each: os.environ.get(each) for each in VARIABLES[:2]} == {
            **dict.fromkeys(VARIABLES[:2]),
            name: "backend:cudaMallocAsync",
        }
        gpus.delenv(name)
    for place, value in ((runtime.sys, "platform"), (torch.version, "cuda")):
        with gpus.context() as patch:
            patch.setattr(place, value, "win32" if value == "platform" else None)
            local_device()
        assert "PYTORCH_ALLOC_CONF" not in os.environ
    with gpus.context() as patch:
        patch.setattr(runtime, "has_virtual_memory", lambda: False)
        local_device()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    gpus.setattr(runtime, "num_devices", lambda: 0)
    assert local_device() == torch.device("cpu")
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(("code", "supported", "expected"), [(0, 1, True), (0, 0, False), (801, 1, False)])
def test_the_driver_is_asked_whether_blocks_can_grow(
    monkeypatch: pytest.MonkeyPatch, code: int, supported: int, expected: bool
) -> None:
    def attribute(found: Any, number: int, device: Any) -> int:
        assert (number, device.value) == (102, 0)
        found._obj.value = supported
        return code

    driver = SimpleNamespace(cuInit=lambda _: 0, cuDeviceGet=lambda *_: 0, cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda _: driver)
    assert runtime.has_virtual_memory() == expected


PREPARED = """
import torch
from vembed.distributed import runtime
runtime.num_devices, runtime.has_virtual_memory, torch.version.cuda = lambda: 1, lambda: True, "13.2"
runtime.prepare_device()
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.slow
def test_torch_reads_the_allocators_settings_after_it_was_imported() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    found = subprocess.run([sys.executable, "-c", PREPARED], env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("expandable_segments:True")


def refusing_state(**_: Any) -> SimpleNamespace:
    """Refuse as accelerate does on RTX 40 cards with an old driver."""
    if "NCCL_P2P_DISABLE" not in os.environ or "NCCL_IB_DISABLE" not in os.environ:
        raise NotImplementedError("Using RTX 4000 series doesn't support faster communication broadband via P2P or IB.")
    return SimpleNamespace(num_processes=2, device=CARD)


@pytest.mark.parametrize("own", [{}, {"NCCL_P2P_DISABLE": "0"}])
def test_cards_that_cannot_copy_to_each_other_train_together_and_the_run_says_how(
    gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: dict[str, str]
) -> None:
    gpus.setattr(accelerate, "PartialState", refusing_state)
    gpus.setattr(accelerate.utils, "check_cuda_p2p_ib_support", lambda: False)
    for name, value in own.items():
        gpus.setenv(name, value)
    for name, value in ProcessEnv(1, 2, 1, 2, "torchrun").environment().items():
        gpus.setenv(name, value)
    with caplog.at_level("WARNING", "vembed"):
        assert runtime._join(ProcessEnv(1, 2, 1, 2, "torchrun"), 60) == CARD
    assert os.environ["NCCL_IB_DISABLE"] == "1"
    assert os.environ["NCCL_P2P_DISABLE"] == own.get("NCCL_P2P_DISABLE", "1")
    assert "NCCL_IB_DISABLE set to 1" in caplog.text
    assert "550.40.07" in caplog.text


def test_other_cards_keep_their_ways_and_one_process_needs_none(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(accelerate, "PartialState", lambda **_: pytest.fail("one process joins nobody"))
    gpus.setattr(runtime, "describe_machine", lambda *_, **__: None)
    assert start_runtime(deterministic=False).device == CARD
    gpus.setattr(accelerate.utils, "check_cuda_p2p_ib_support", lambda: True)
    runtime.leave_out_broken_links()
    assert not os.environ.keys() & set(VARIABLES[2:])


@pytest.mark.parametrize(
    ("free", "reserved", "taken"),
    [
        (24 * GIB - CONTEXT_BYTES, 0, 0),  # nobody else
        (24 * GIB, 0, 0),  # the driver keeps less than expected
        (21 * GIB - CONTEXT_BYTES, 0, 3 * GIB),  # a display and a browser
        (10 * GIB - CONTEXT_BYTES, 14 * GIB, 0),  # a run before, in this process
    ],
)
@pytest.mark.parametrize("capability", [7, 8])
def test_a_card_offers_what_others_leave_and_bfloat16_where_it_has_units_for_it(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, taken: int, capability: int
) -> None:
    card = SimpleNamespace(name="a card", total_memory=24 * GIB, major=capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)  # emulated
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    machine = describe_machine(CARD)
    assert (machine.memory_bytes, machine.taken_bytes) == (24 * GIB - taken, taken)
    assert machine.fast_bf16 == (capability >= 8)


@pytest.mark.parametrize(("launcher", "cores"), [("srun", 8), ("torchrun", 2)])
def test_a_task_of_srun_has_the_cores_that_it_is_bound_to_and_others_share_the_machines(
    monkeypatch: pytest.MonkeyPatch, launcher: str, cores: int
) -> None:
    monkeypatch.setattr(runtime, "process_env", lambda: ProcessEnv(1, 4, 1, 4, launcher))
    monkeypatch.setattr(runtime, "cpu_cores", lambda: 8)
    assert describe_machine(torch.device("cpu"), num_processes=4).num_cores == cores
