"""A compiled encoder computes what the eager one does: gradients, random masks, names, whatever the shapes.

Most tests compile by `aot_eager`, which traces and differentiates as Inductor does but runs torch's own kernels: a
second each instead of ten. What Inductor makes of the graphs is tested where there is a C++ compiler.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import packing_cases
import pytest
import torch
from adapter_cases import CPU, make_loss, partly_trained, picture_batch, text_batch, trainable_of, wake
from kit.picture_models import pools_of, write_open_clip, write_picture_model
from kit.text_models import write_model
from packing_cases import batch
from torch._dynamo.utils import counters

from vembed.errors import ConfigError, MachineError
from vembed.gradcache.chunks import ChunkBudget, Pool
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.losses.base import BatchStructure
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.training import compiling
from vembed.training.compiling import compile_errors_explained, compile_layers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vembed.batch import Features
    from vembed.gradcache.engine import StepResult
    from vembed.models.encoder import Encoder

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on a CPU needs g++")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Forget what was compiled and what was set, before and after."""
    torch._dynamo.reset()
    counters.clear()
    limit = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=limit, suppress_errors=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def by_aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SETTINGS", {"backend": "aot_eager"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("compiling")
    return {
        "bert": write_model(root / "bert", "bert"),
        "qwen3": write_model(root / "qwen3", "qwen3"),
        "modernbert": write_model(root / "modernbert", "modernbert"),
        "clip": write_picture_model(root / "clip", "clip"),
        "open_clip": write_open_clip(root / "open_clip"),
    }


def build(folders: dict[str, Path], kind: str, what: str = "all", *, checkpointed: bool = False) -> Encoder:
    encoder = partly_trained(folders[kind], what)
    wake(encoder)
    if checkpointed:
        encoder.enable_gradient_checkpointing()
    return encoder


def step(
    encoder: Encoder, *, rows: int = 2, retain: float = 0.0, autocast: torch.dtype | None = None
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Do a step, take the gradients out and clear them."""
    batch = picture_batch() if "image" in encoder.modalities else text_batch()
    options = EngineOptions(ChunkBudget(rows, 10**6), CPU, retain=retain, autocast_dtype=autocast)
    trainable = trainable_of(encoder)
    torch.manual_seed(5)
    result = GradCacheEngine(make_loss(), options, list(trainable.values())).step(
        pools_of(encoder, batch), BatchStructure.of(batch)
    )
    found = {}
    for name, parameter in trainable.items():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad.clone(), None
    return result, found


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a gradient, beside the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    return max(float((found[name] - gradient).norm() / largest) for name, gradient in expected.items())


def assert_equals_eager(encoder: Encoder, *, bound: float = 1e-10, **options: Any) -> None:
    """Compare the gradients of a step before and after compiling; both draw the same random masks."""
    _, expected = step(encoder, **options)
    compile_layers(encoder, strict=True)
    result, found = step(encoder, **options)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    assert result.replay_drift <= 1e-10
    assert error(found, expected) <= bound


@needs_compiler
@pytest.mark.slow
def test_inductor_has_the_gradients_and_the_random_masks_of_the_eager_layers(folders: dict[str, Path]) -> None:
    encoder = build(folders, "bert")
    assert encoder.backbone.config.hidden_dropout_prob > 0, "else no mask is replayed"  # type: ignore[union-attr]
    assert_equals_eager(encoder, rows=5)


@needs_compiler
@pytest.mark.slow
def test_inductor_rounds_norms_that_compute_in_float32_otherwise(folders: dict[str, Path]) -> None:
    """Qwen3's do in float64 models too: alike in both passes, but not as the eager layers."""
    assert_equals_eager(build(folders, "qwen3"), bound=2e-6)


@needs_compiler
@pytest.mark.slow
def test_inductor_under_autocast_differs_by_rounding(folders: dict[str, Path]) -> None:
    encoder = build(folders, "qwen3").float()
    _, truth = step(encoder)
    _, rounded = step(encoder, autocast=torch.bfloat16)
    compile_layers(encoder, strict=True)
    result, found = step(encoder, autocast=torch.bfloat16)
    assert counters["stats"]["unique_graphs"] > 0
    assert result.replay_drift < 5e-2
    assert error(found, truth) < 2 * error(rounded, truth)


@needs_compiler
@pytest.mark.slow
def test_inductor_is_exact_with_adapters_and_gradient_checkpointing_too(folders: dict[str, Path]) -> None:
    assert_equals_eager(build(folders, "bert", "lora dropout", checkpointed=True))


@pytest.mark.slow
@pytest.mark.usefixtures("by_aot_eager")
@pytest.mark.parametrize(
    ("kind", "what", "checkpointed"),
    [
        ("bert", "all", True),
        ("bert", "lora dropout", False),
        ("bert", "last_1_layers", False),
        ("qwen3", "all", False),
        ("modernbert", "all", False),
        ("clip", "lora dropout", False),
        ("open_clip", "all", True),
    ],
)
def test_graphs_are_exact_for_every_family_and_whatever_trains(
    folders: dict[str, Path], kind: str, what: str, checkpointed: bool
) -> None:
    assert_equals_eager(build(folders, kind, what, checkpointed=checkpointed))


@pytest.mark.slow
@pytest.mark.usefixtures("by_aot_eager")
def test_neither_layers_nor_shapes_nor_retention_compile_again(folders: dict[str, Path]) -> None:
    """Without gradients, with them, evaluation; each with a mask, without one, and for a single row."""
    encoder = build(folders, "bert")
    compile_layers(encoder, strict=True)
    shapes = set()
    encoder.backbone.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda _, __, inputs: shapes.add(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    for rows in (2, 3, 4, 5, 10):
        for retain in (0.0, 0.5):
            step(encoder, rows=rows, retain=retain)
    assert len(shapes) >= 8
    assert 0 < counters["stats"]["unique_graphs"] <= 6
    encoder.eval()
    features = encoder.featurize(["a b", "sea", "a much longer text of many words", "b"], "query")
    with torch.inference_mode():
        for places in ([0, 1, 2], [0, 1], [2, 3, 1, 0]):
            chosen = np.array(places)
            encoder(encoder.collate(features, chosen, int(features.lengths[chosen].max())))
    assert 0 < counters["stats"]["unique_graphs"] <= 8


@pytest.mark.slow
@pytest.mark.usefixtures("by_aot_eager")
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_rows_end_to_end_share_graphs_too(kind: str) -> None:
    """ModernBERT has two kinds of layers, with a window and without."""
    encoder = packing_cases.build(kind).train()
    encoder.pack()
    features, structure = batch()
    lengths = set()

    def packed_step() -> tuple[StepResult, dict[str, torch.Tensor]]:
        options = EngineOptions(ChunkBudget(5, 48), CPU)
        pool = Pool(encoder, collate, features, np.arange(len(features)), packs=True)
        result = GradCacheEngine(make_loss(), options, list(encoder.parameters())).step([pool], structure)
        found = {name: each.grad.clone() for name, each in encoder.named_parameters() if each.grad is not None}
        encoder.zero_grad()
        return result, found

    def collate(features: Features, rows: Any, width: int) -> dict[str, torch.Tensor]:
        inputs = encoder.collate(features, rows, width)
        lengths.add(inputs["input_ids"].numel())
        return inputs

    _, expected = packed_step()
    compile_layers(encoder, strict=True)
    result, found = packed_step()
    assert len(lengths) >= 4
    assert 0 < counters["stats"]["unique_graphs"] <= (8 if kind == "modernbert" else 4)
    assert result.replay_drift <= 1e-10
    assert error(found, expected) <= 1e-10


@pytest.mark.slow
@pytest.mark.usefixtures("by_aot_eager")
def test_a_compiled_encoder_has_the_same_gradients_names_and_files(folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = build(folders, "bert")
    assert encoder.backbone.config.hidden_dropout_prob > 0, "else no mask is replayed"  # type: ignore[union-attr]
    _, expected = step(encoder, rows=5)
    names = list(encoder.state_dict())
    encoder.save(tmp_path / "eager")
    compile_layers(encoder, strict=True)
    result, found = step(encoder, rows=5)
    assert counters["stats"]["unique_graphs"] > 0
    assert result.replay_drift <= 1e-10
    assert error(found, expected) <= 1e-10
    assert list(encoder.state_dict()) == names
    encoder.save(tmp_path / "compiled")
    files = {path.name: path.read_bytes() for path in (tmp_path / "eager").rglob("*") if path.is_file()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "compiled").rglob("*") if path.is_file()}


def test_what_has_no_layers_is_refused() -> None:
    encoder = load_encoder(ModelKeys(model_name="builtin:ngram-bag"))
    with pytest.raises(ConfigError, match="no list of equal layers to compile; set compile: false"):
        compile_layers(encoder, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_layer_that_cant_be_compiled_ends_the_run_or_computes_as_without(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    tried = []

    def broken(graph: Any, inputs: Any, **options: Any) -> Any:
        tried.append(graph)
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiling, "SETTINGS", {"backend": broken})
    encoder = build(folders, "bert")
    _, expected = step(encoder)
    compile_layers(encoder, strict=strict)
    if strict:
        with (
            pytest.raises(MachineError, match=r"can't be compiled .*no compiler here.*; set compile: false"),
            compile_errors_explained(),
        ):
            step(encoder)
    else:
        _, found = step(encoder)
        assert error(found, expected) == 0
    assert tried
