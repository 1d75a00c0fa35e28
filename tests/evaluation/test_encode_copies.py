"""On a CUDA device encoding waits once for each slice, whatever its calls, and when the next slice has been started.

No GPU is needed to see the order: streams are told to a log, and tensors of the device are fake. That copies and
kernels really overlap only a GPU can show.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from test_engine_syncs import Waits
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vembed.batch import Features, texts_of
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.encoder import Encoder
from vembed.vectors import encode as encode_module
from vembed.vectors.encode import ItemEncoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item, Side

SLICE = 12
NUM_SLICES = 3
TEXTS = [str(number) for number in range(SLICE * NUM_SLICES)]


class Numbers(Encoder):
    """A text is a number, and its vector that number times a few weights."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.name, self.dimension, self.max_length = "numbers", 4, None
        self.weights, self.log = torch.nn.Parameter(torch.ones(4, device="cuda")), log

    @classmethod
    def load(cls, files: Any, texts: Iterable[str] = ()) -> Numbers:
        raise AssertionError

    def towers(self) -> Any:
        return ()

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        values = np.array([int(text) for text in texts_of(items)], dtype=np.int64)
        return Features({}, np.ones(len(items), dtype=np.int64), {"value": values})

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, torch.Tensor]:
        return {"value": torch.from_numpy(features.per_row["value"][rows])}

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert inputs["value"].device.type == "cuda"
        self.log.append("call")
        return inputs["value"].to(torch.float32)[:, None] * self.weights

    def save(self, folder: object) -> None:
        raise AssertionError


class Stream:
    """A stream that writes down what waits for it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_stream(self, other: object) -> None:
        self.log.append("copy")

    def wait_event(self, other: object) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        self.log.append("wait")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(FakeTensor, "numpy", lambda tensor: np.zeros(tensor.shape, np.float32), raising=False)
    monkeypatch.setattr(encode_module, "SLICE_ROWS", SLICE)
    return log


@pytest.mark.parametrize("rows", [SLICE, 3])
def test_the_host_waits_once_for_each_slice_when_the_next_is_under_way(
    log: list[str], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, calls, empty = Waits(), ["call"] * (SLICE // rows), torch.empty

    def watched(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        return waits.pin(made) if pin_memory else made

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: waits.pin(tensor))
    monkeypatch.setattr(torch, "empty", watched)
    with FakeTensorMode(allow_non_fake_inputs=True), waits:
        found = ItemEncoder(Numbers(log), ChunkBudget(rows, 10**6), torch.device("cuda"))(TEXTS, "document")
    assert waits.counts == {}, "nothing waits but for the events"
    started = [*calls, "copy"]
    assert log == [*started, *[*started, "wait"] * (NUM_SLICES - 1), "wait"]
    assert found.shape == (len(TEXTS), 4)
