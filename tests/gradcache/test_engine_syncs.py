"""How often a step waits for its device: at most twice, whatever the chunks and tiles.

Without a GPU, the loss stage runs on tensors that only pretend to be on one, where every copy to and from it is seen.
The whole step runs on the CPU, where everything that would read a number from a device is counted.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engine_cases import make_case, random_batch
from test_engine import CPU
from test_engine_losses import make
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from vembed.distributed.ranks import Ranks
from vembed.gradcache.chunks import ChunkBudget, RowAssignment
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.loss_stage import LossStage
from vembed.losses import cells, softmax_sweep
from vembed.losses.base import BatchStructure, document_shares
from vembed.losses.colbert import ColbertLoss
from vembed.losses.infonce import InfoNCE
from vembed.plan.keys import OptimisationKeys
from vembed.training.optimizer import Optimizer, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAMED = ["one direction", "both directions", "prefixes", "sigmoid", "sigmoid with prefixes"]
COPIES = ("aten::_to_copy", "aten::copy_", "aten::to.dtype_layout")  # the last one in inference mode
SHAPE_DEPENDS_ON_VALUES = ("nonzero", "masked_select", "_unique")
NUM_QUERIES = 6


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: numbers that are read, and copies that aren't asynchronous.

    They aren't either where they are asked to be, but read memory that isn't page-locked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.pinned: list[torch.Tensor] = []

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the place of `pin_memory`, which needs a device."""
        self.pinned.append(tensor)
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.name(), kwargs or {}
        if name in COPIES:
            here, there = args[0].device, args[1].device if name == "aten::copy_" else kwargs.get("device")
            if there is not None and here != torch.device(there):
                if not (kwargs.get("non_blocking") or args[2:] == (True,)):
                    self.counts["a copy that waits"] += 1
                elif args[0].numel() and not any(args[0] is each for each in self.pinned):
                    self.counts["a copy of pageable memory"] += 1
        elif any(part in name for part in SHAPE_DEPENDS_ON_VALUES):
            self.counts[name] += 1
        elif name == "aten::index.Tensor" and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        ):
            self.counts["a boolean index"] += 1
        elif name == "aten::_local_scalar_dense":
            self.counts["a number"] += 1
            return 1.0
        return function(*args, **kwargs)


def loss_stage_waits(monkeypatch: pytest.MonkeyPatch, kind: str, tile_size: int) -> Counter[str]:
    """Run the loss stage on a GPU that isn't there."""
    structure = BatchStructure.of(random_batch(NUM_QUERIES, [1] * NUM_QUERIES, np.random.default_rng(0)))
    is_late = kind == "late interaction"  # four vectors for each row
    loss = (
        ColbertLoss(temperature=0.1, learn_temperature=True, tile_size=tile_size) if is_late else make(kind, tile_size)
    )
    counts_N = np.full(3 * NUM_QUERIES, 4) if is_late else None
    waits = Waits()

    def from_cpu(values: torch.Tensor) -> Any:
        assert not isinstance(values, FakeTensor), "the structure is read where the losses list their cells"
        with unset_fake_temporarily():
            return values.numpy()

    def to_list(tensor: FakeTensor) -> list[float]:
        waits.counts["a number"] += 1
        return [1.0] * len(tensor)

    def of_structure(structure: BatchStructure) -> torch.Tensor:
        assert not isinstance(structure.positives_P2, FakeTensor), "the structure is on the CPU"
        with unset_fake_temporarily():
            return document_shares(structure)

    monkeypatch.setattr(cells, "_numpy", from_cpu)
    monkeypatch.setattr(softmax_sweep, "document_shares", of_structure)
    monkeypatch.setattr(FakeTensor, "tolist", to_list)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: waits.pin(tensor))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, parameter in list(loss.named_parameters()):
            setattr(loss, name, torch.nn.Parameter(torch.empty((), dtype=parameter.dtype, device="cuda")))
        num_vectors = 3 * NUM_QUERIES if counts_N is None else int(counts_N.sum())
        z_NE = torch.empty(num_vectors, 16, dtype=torch.float64, device="cuda")
        with waits:
            found = LossStage(loss, Ranks()).run(
                z_NE, structure, RowAssignment.alone(len(z_NE)), counts_N=counts_N, gradient_scale=8.0
            )
    assert found.u_VE.device.type == "cuda"
    return waits.counts


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (*STREAMED[1:], "hardest")),
        STREAMED[0],
        "late interaction",
    ],
)
def test_the_loss_stage_reads_from_the_device_once_whatever_the_tiles(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for tile_size in (5, 64):
        assert loss_stage_waits(monkeypatch, kind, tile_size) == {"a number": 1}


def test_a_copy_that_waits_and_a_boolean_index_would_be_seen() -> None:
    waits = Waits()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(3, device="cuda")
        with waits:
            torch.ones(3).to("cuda")
            torch.ones(3).to("cuda", non_blocking=True)
            x.cpu()
            torch.ones(3).copy_(x, non_blocking=True)
            float(x.sum())
            with torch.inference_mode():
                x.cpu()
            waits.pin(torch.ones(3)).to("cuda", non_blocking=True)
    assert waits.counts == {"a copy that waits": 3, "a number": 1, "a copy of pageable memory": 2}
    real = Waits()
    with real:
        y = torch.arange(3)
        y[y > 1]
        y.nonzero()
    assert real.counts.keys() == {"a boolean index", "aten::nonzero"}


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch, *encoders: torch.nn.Module) -> Iterator[Counter[str]]:
    """Count the reads of tensors that would lie on the device: all but the numbers of rows, which never leave the CPU.

    What an encoder itself reads isn't counted: transformers looks at the padding mask of every call.
    """
    counts: Counter[str] = Counter()
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    for encoder in encoders:
        encoder.register_forward_pre_hook(enter)
        encoder.register_forward_hook(leave)

    def counting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not depth and (self.is_floating_point() or self.dtype is torch.bool):
                counts[name] += 1
            return original(self, *args, **kwargs)

        return counted

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, counting(name))
        yield counts


@pytest.mark.parametrize("kind", STREAMED)
def test_a_step_waits_twice_whatever_its_chunks(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for rows, retain in ((1, 0.0), (4, 0.5), (100, 0.0)):
        case = make_case(dropout=0.0, negatives=1)
        parameters = list(case.encoder.parameters())
        engine = GradCacheEngine(make(kind, 5), EngineOptions(ChunkBudget(rows, 10**6), CPU, retain=retain), parameters)
        with counted_reads(monkeypatch, *case.encoder) as counts:
            engine.step(case.pools, case.structure)
        assert counts == {"tolist": 2}


def test_updating_the_weights_waits_once_more_for_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(dropout=0.0, negatives=1)
    loss = InfoNCE(temperature=0.1)
    schedule = Schedule(1e-3, "constant", 0, 3)
    optimizer = Optimizer(case.encoder, loss, OptimisationKeys(), schedule, loss_scaling=False)  # type: ignore[arg-type]
    GradCacheEngine(loss, EngineOptions(ChunkBudget(4, 10**6), CPU)).step(case.pools, case.structure)
    with counted_reads(monkeypatch) as counts:
        assert optimizer.scale.value == 1.0
        assert optimizer.clip_gradients() > 0
        optimizer.step(optimizer.schedule.learning_rate(0))
        optimizer.zero_grad()
        assert loss.temperature == 0.1
    assert counts == {"item": 1}
