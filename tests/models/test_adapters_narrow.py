"""Frozen matrices in bfloat16 under mixed precision: the same numbers from half the bytes, and none of it in a file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_cases import partly_trained, wake
from kit.picture_models import PICTURES, vectors, write_open_clip, write_picture_model
from kit.text_models import TEXTS, write_model

from vembed.config.load import load_config
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.models.adapters import merge_adapters, narrow_frozen
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model
from vembed.plan.devices import parse_devices
from vembed.plan.plan import make_plan
from vembed.plan.problem import DataSize
from vembed.training.saving import gather_encoder, model_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.encoder import Encoder

TEXT_KINDS = ("bert", "modernbert", "qwen3", "gpt2", "t5", "bidirectional gemma3")
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("narrow")
    made = {kind: write_model(root / kind, kind) for kind in TEXT_KINDS}
    made |= {kind: write_picture_model(root / kind, kind) for kind in ("clip", "siglip", "vit")}
    return made | {"open_clip": write_open_clip(root / "open_clip")}


def adapted(folder: Path, what: str = "lora") -> Encoder:
    encoder = partly_trained(folder, what, dtype=torch.float32).eval()
    if what == "lora":
        wake(encoder)
    return encoder


def computed(encoder: Encoder) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return embeddings and gradients in mixed precision."""
    items = (*(TEXTS if "text" in encoder.modalities else ()), *(PICTURES if "image" in encoder.modalities else ()))
    with torch.autocast("cpu", HALF):
        z = vectors.__wrapped__(encoder, items)  # type: ignore[attr-defined]  # it switches gradients off
    z.float().square().cumsum(0).sum().backward()
    return z.detach(), {name: each.grad for name, each in encoder.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("what", ["lora", pytest.param("last_1_layers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*TEXT_KINDS, "clip", "siglip", "vit", "open_clip"])
def test_no_embedding_and_no_gradient_differs_by_a_bit(folders: dict[str, Path], kind: str, what: str) -> None:
    plain, narrow = adapted(folders[kind], what), adapted(folders[kind], what)
    count = narrow_frozen(narrow, HALF)
    assert count > 0
    held = {parameter.dtype for parameter in narrow.parameters() if not parameter.requires_grad}
    assert held == {HALF, torch.float32}
    assert all(parameter.dtype == torch.float32 for parameter in narrow.parameters() if parameter.requires_grad)
    names = {name for name, parameter in narrow.named_parameters() if parameter.dtype == HALF}
    assert not [name for name in names if "norm" in name.lower() or "embed" in name or name.endswith("bias")]
    (z, gradients), (narrow_z, narrow_gradients) = computed(plain), computed(narrow)
    assert torch.equal(z, narrow_z)
    assert gradients.keys() == narrow_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient is None) == (narrow_gradients[name] is None)
        assert gradient is None or torch.equal(gradient, narrow_gradients[name]), name
    assert model_bytes(narrow) == model_bytes(plain), "what is written is not narrowed"


def test_nothing_is_narrowed_without_mixed_precision_or_where_all_trains(folders: dict[str, Path]) -> None:
    for dtype in (None, torch.float16):
        assert narrow_frozen(adapted(folders["bert"]), dtype) == 0
    assert narrow_frozen(load_encoder(ModelKeys(model_name=str(folders["bert"]))), HALF) == 0


def test_what_is_written_has_the_weights_of_the_files_and_float32_sums(folders: dict[str, Path]) -> None:
    plain, narrow = adapted(folders["bert"]), adapted(folders["bert"])
    narrow_frozen(narrow, HALF)
    fresh = partly_trained(folders["bert"], "lora", dtype=torch.float32).eval()
    whole = gather_encoder(narrow, Ranks(), lambda: fresh)
    assert whole is fresh
    for encoder in (plain, whole):
        merge_adapters(encoder)
    expected = plain.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.state_dict().items())
    assert {tensor.dtype for tensor in whole.state_dict().values()} == {torch.float32}


def test_weights_that_were_changed_behind_a_run_are_not_merged_with_its_adapters(folders: dict[str, Path]) -> None:
    narrow, fresh = (partly_trained(folders["bert"], "lora", dtype=torch.float32) for _ in range(2))
    narrow_frozen(narrow, HALF)
    narrow.trained = replace(narrow.trained, base="of the start")
    fresh.trained = replace(fresh.trained, base="of today")
    with pytest.raises(ConfigError, match="is no longer the model that training began with"):
        gather_encoder(narrow, Ranks(), lambda: fresh)


@pytest.mark.slow
def test_the_plan_counts_two_bytes_for_each_and_says_so(folders: dict[str, Path]) -> None:
    keys = ModelKeys(model_name=str(folders["qwen3"]))
    sizes = [profile_model(keys, ProfileTarget("cuda", dtype), lora=AdapterKeys()) for dtype in (HALF, None)]
    half, full = (size.adapted for size in sizes)
    assert half is not None
    assert full is not None
    encoder = adapted(folders["qwen3"])
    assert half.narrowed == narrow_frozen(encoder, HALF) > 0
    assert full.narrowed == sizes[0].narrowed == 0
    without = replace(sizes[0], adapted=replace(half, narrowed=0))
    config = load_config(None, ["model_name=m", "use_lora=true", "bf16=true"]).config
    spread = parse_devices("1xA100-40GB")
    machine, data = spread.machine(8), DataSize(100, 1.0)
    plans = [make_plan(config, machine, size, data, devices=spread) for size in (sizes[0], without)]
    weights, before = (plan.bytes_per_device.parameters for plan in plans)
    assert before - weights == 2 * half.narrowed
    assert [sum(reason.startswith("frozen weights: ") for reason in plan.reasons) for plan in plans] == [1, 0]
