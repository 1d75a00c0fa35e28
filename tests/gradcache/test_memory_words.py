"""How torch and the libraries under it say that memory ran out, and what a step makes of each."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import make_case
from test_engine import CPU, make_loss

from vembed.config.schema import Config
from vembed.distributed.ranks import Ranks
from vembed.distributed.watchdog import Watchdog
from vembed.errors import MachineError
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.memory import MemoryGuard, free_cache, is_out_of_memory, out_of_memory_advice
from vembed.gradcache.stopwatch import Stopwatch
from vembed.training import run as assembly

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.30.7\nncclUnhandledCudaError: Call to CUDA function failed.\n"
)
SEARCH = "\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more."
NCCL_NO_MEMORY = torch.distributed.DistBackendError(f"{NCCL}Last error:\nFailed to CUDA calloc async 4194304 bytes")
NCCL_NO_ROOM = torch.distributed.DistBackendError(
    f"{NCCL}Last error:\nError while creating shared memory segment /dev/shm/nccl-a1 (size 9637888), error: No space"
)
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"), "repair"),
        (torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory. (out of memory)"), "repair"),
        (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB"), "repair"),
        (torch.AcceleratorError(f"CUDA error: out of memory{SEARCH}"), "repair"),
        (RuntimeError("CUDA error: out of memory"), "repair"),
        (RuntimeError("HIP error: out of memory"), "repair"),
        (RuntimeError("CUDA driver error: out of memory"), "repair"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "repair"),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), "repair"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "repair"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "repair"),
        (RuntimeError("CUDA ran out of memory outside PyTorch's allocator. If this workload uses many"), "repair"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "repair"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GiB, max allowed: 9.07 GiB)."), "repair"),
        (RuntimeError("Invalid buffer size: 29.80 GiB"), "repair"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"), "repair"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 80000000 bytes."), "repair"),
        (RuntimeError("std::bad_alloc"), "repair"),
        (MemoryError(), "repair"),
        (NCCL_NO_MEMORY, "advice"),
        (torch.distributed.DistBackendError(f"{NCCL}Last error:\nCuda failure 2 'out of memory'"), "advice"),
        (RuntimeError("NCCL Error 1: unhandled cuda error: Failed to CUDA host alloc 64 bytes"), "advice"),
        (NCCL_NO_ROOM, "advice"),
        (torch.distributed.DistBackendError(f"{NCCL}Last error:\nCuda failure 'invalid device'"), "raise"),
        (ILLEGAL, "raise"),
        (RuntimeError("CUDA error: device-side assert triggered"), "raise"),
        (RuntimeError("CUDA error: unspecified launch failure"), "raise"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), "raise"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), "raise"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "raise"),
        (ValueError("out of memory"), "raise"),
    ],
)
def test_each_error_is_repaired_or_ends_the_run_with_advice_or_as_it_is(error: Exception, verdict: str) -> None:
    found = "repair" if is_out_of_memory(error) else "advice" if out_of_memory_advice(error) else "raise"
    assert found == verdict


@pytest.mark.parametrize("error", [NCCL_NO_MEMORY, ILLEGAL])
def test_a_step_is_not_done_again_after_what_no_smaller_chunk_cures(error: RuntimeError) -> None:
    case = make_case(dropout=0.0, negatives=1)
    calls = []

    def broken(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(len(inputs))
        raise error

    [encoder] = case.encoder
    encoder.forward = broken
    engine = GradCacheEngine(make_loss(), EngineOptions(ChunkBudget(4, 10**6), CPU), list(encoder.parameters()))
    with pytest.raises(type(error)):
        engine.step(case.pools, case.structure)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("rows", "retain", "cure"),
    [
        (8, 0.5, "set gradient_cache_chunk_size: 4 and gradient_cache_chunk_tokens: 40 and retain: 0"),
        (8, 0.0, "set gradient_cache_chunk_size: 4 and gradient_cache_chunk_tokens: 40"),
        (1, 0.0, "shorten the rows (max_seq_length, or smaller pictures) or set cpu_offload: true"),
    ],
)
def test_memory_that_runs_out_while_other_ranks_wait_ends_the_run_with_keys_that_fit(
    rows: int, retain: float, cure: str
) -> None:
    guard = MemoryGuard(
        ChunkBudget(64, 4096), retain, ranks=Ranks(), device=CPU, stopwatch=Stopwatch(CPU), may_repair=True,
        needs_equal_calls=True,
    )  # fmt: skip
    call: Any = SimpleNamespace(chunk=SimpleNamespace(rows=range(rows), padded_tokens=rows * 10))
    message = (
        f"out of memory in chunks of {rows} rows and {rows * 10} tokens. With this fsdp_mode .*: {re.escape(cure)}$"
    )
    with pytest.raises(MachineError, match=message), guard.guard("encode", [call]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_device_that_is_broken_says_so_before_the_step_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def broken() -> None:
        raise ILLEGAL

    module = SimpleNamespace(synchronize=broken, empty_cache=lambda: done.append("emptied"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        free_cache(torch.device("cuda"))
    module.synchronize = lambda: done.append("waited")
    free_cache(torch.device("cuda"))
    assert done == ["waited", "emptied"]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (NCCL_NO_MEMORY, r"NCCL found no memory .*batch_size.* while training; "),
        (NCCL_NO_ROOM, r"shared memory.*--shm-size=8g.* while training; "),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), r"CUDA out of memory. Tried\).*eval_batch_size"),
        (MemoryError(), r"\(MemoryError\): set eval_batch_size"),
    ],
)
def test_memory_that_nothing_brings_back_ends_a_run_with_advice(
    monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(assembly, "start_runtime", fails)
    watchdog = Watchdog()
    watchdog.words.doing = "training"
    with pytest.raises(MachineError, match=advice):
        assembly.run_from_config(Config(model_name="a"), watchdog=watchdog)
