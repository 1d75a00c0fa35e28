"""Inputs travel one call ahead, out of page-locked memory, on a stream of their own.

No GPU is needed to see the order: streams and page-locked memory are told to a log, and tensors of the device are fake.
That copies and kernels really overlap only a GPU can show.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine_cases import make_case
from test_engine import CPU
from torch._subclasses.fake_tensor import FakeTensorMode

from vembed.device import Transfer, to_device
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.losses.infonce import InfoNCE

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = torch.device("cuda")


class Stream:
    """A stream that writes down what it is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.num_events = name, log, 0

    def record_event(self) -> str:
        self.num_events += 1
        self.log.append(f"{self.name} records {self.num_events}")
        return str(self.num_events)

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what streams and page-locked memory are asked for, on a CUDA device that isn't there."""
    log: list[str] = []
    computing = Stream("compute", log)
    present = [computing]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        present.append(stream)
        yield
        present.pop()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        log.append(f"pin {tuple(tensor.shape)} {tensor.dtype} on {present[-1].name}")
        return tensor

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copy", log))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: present[-1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"keep for {stream.name}"))
    return log


def make(number: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.zeros(number, 7, dtype=torch.int32)}


def test_the_next_call_is_on_its_way_before_a_call_computes(log: list[str]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        transfer = Transfer(CUDA)
        for number, inputs in transfer.ahead([1, 2, 3], make):
            assert inputs["ids"].device.type == "cuda"
            assert inputs["ids"].shape == (number, 7)
            log.append(f"call {number}")

    def sent(number: int) -> list[str]:
        return [f"pin ({number}, 7) torch.int32 on copy", f"copy records {number}"]

    def computed(number: int) -> list[str]:
        return [f"compute waits for {number}", "keep for compute", f"call {number}"]

    assert log == [*sent(1), *sent(2), *computed(1), *sent(3), *computed(2), *computed(3)]
    log.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [number for number, _ in transfer.ahead([1], make)] == [1]
        assert list(transfer.ahead([], make)) == []
    assert log[:2] == ["pin (1, 7) torch.int32 on copy", "copy records 4"], "one stream for all passes"


def test_what_is_on_the_device_already_is_not_pinned(log: list[str]) -> None:
    with FakeTensorMode():
        there = torch.zeros(3, device="cuda")
        [(_, inputs)] = Transfer(CUDA).ahead(["a"], lambda _: {"there": there})
        assert inputs["there"] is there
    assert not any(line.startswith("pin") for line in log)


def test_a_tensor_is_sent_by_way_of_page_locked_memory(log: list[str]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert to_device(torch.arange(3), CUDA).device.type == "cuda"
        assert to_device(torch.empty(0), CUDA).device.type == "cuda"
    assert log == ["pin (3,) torch.int64 on compute"], "nothing is there of an empty one"
    assert to_device(torch.arange(3), CPU).tolist() == [0, 1, 2]


def test_on_a_cpu_nothing_is_sent_and_no_call_is_made_ahead(log: list[str]) -> None:
    made: list[int] = []

    def one(number: int) -> dict[str, torch.Tensor]:
        made.append(number)
        return make(number)

    for number, inputs in Transfer(CPU).ahead(range(3), one):
        assert made == list(range(number + 1))
        assert inputs["ids"].device == CPU
    assert log == []


@pytest.mark.parametrize("retain", [0.0, 0.5, 1.0])
def test_a_step_makes_the_inputs_of_each_call_once_in_each_pass(retain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    ahead = Transfer.ahead

    def counted(transfer: Transfer, items: Any, make: Any) -> Any:
        items = list(items)
        seen.append(len(items))
        return ahead(transfer, items, make)

    monkeypatch.setattr(Transfer, "ahead", counted)
    case = make_case(dropout=0.1, negatives=1)
    engine = GradCacheEngine(InfoNCE(temperature=0.1), EngineOptions(ChunkBudget(4, 10**6), CPU, retain=retain))
    result = engine.step(case.pools, case.structure)
    first, second = seen
    assert first == result.num_chunks > 2
    assert (second == first, second == 0) == (retain == 0, retain == 1)
