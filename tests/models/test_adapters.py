"""What trains of an encoder: parts of it, adapters, exactly, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import (
    BUDGET,
    assert_exact,
    assert_same,
    make_loss,
    partly_trained,
    picture_batch,
    step_of_a_rank,
    take,
    text_batch,
    trainable_of,
    wake,
)
from kit.picture_models import DUAL_BUILDERS, TINY, VISION_BUILDERS, pools_of, write_open_clip, write_picture_model
from kit.text_models import FAMILY_BUILDERS, load_any, write_model

from vembed.errors import ConfigError, MachineError
from vembed.gradcache.chunks import RowAssignment
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure
from vembed.models.adapters import add_adapters, freeze
from vembed.models.from_scratch import TinyClip
from vembed.models.hub import four_bit_config
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import load_encoder
from vembed.models.tables import NgramBag, NgramBagConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kit.ranks import RankPool

    from vembed.models.encoder import Encoder

PICTURE_KINDS = [*DUAL_BUILDERS, *VISION_BUILDERS, "open_clip"]
OFTEN = ("bert", "gpt2", "clip", "siglip", "open_clip")
"""Kinds that differ in what they consist of; the others are tested with the slow tests."""

KINDS = [
    kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in (*FAMILY_BUILDERS, *PICTURE_KINDS)
]


class Folders(dict[str, "Path"]):
    """Models of each kind, written when they are asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, kind: str) -> Path:
        write = write_model if kind in FAMILY_BUILDERS else write_picture_model
        folder = self.root / kind.replace(" ", "-")
        self[kind] = write_open_clip(folder) if kind == "open_clip" else write(folder, kind)
        return self[kind]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Folders(tmp_path_factory.mktemp("parts"))


def load(folder: Path) -> Encoder:
    return load_encoder(ModelKeys(model_name=str(folder)))


UNCALLED = {"timm eva02": "attn.qkv"}
"""Layers whose weights the attention reads without calling them: an adapter beside them would do nothing."""


def in_layers(encoder: Encoder, name: str, *, last: bool | None = None) -> bool:
    """Return whether a name is of the layers: of any, of a tower's last one, or of one before it."""
    for tower in encoder.towers():
        if name.startswith(f"{tower.layers}."):
            is_last = int(name[len(tower.layers) + 1 :].split(".")[0]) == len(encoder.get_submodule(tower.layers)) - 1  # type: ignore[arg-type]
            return last is None or last == is_last
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layers_and_what_is_behind_them_train(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    freeze(encoder, "last_1_layers")
    trainable = trainable_of(encoder)
    last = {name for name, _ in encoder.named_parameters() if in_layers(encoder, name, last=True)}
    assert last
    behind = trainable.keys() - last
    assert trainable.keys() >= last
    words = ("norm", "ln_", "head", "proj")
    assert all(any(word in name.lower() for word in words) for name in behind), behind
    before = {name for name, _ in encoder.named_parameters() if in_layers(encoder, name, last=False) or "embed" in name}
    assert before
    assert not before & trainable.keys()
    count = sum(parameter.numel() for parameter in trainable.values())
    assert encoder.describe()["trains"].startswith(f"last 1 layers: {count:,} of ")


def test_all_leaves_everything_as_it_was_and_is_counted(folders: dict[str, Path]) -> None:
    encoder, other = load(folders["clip"]), load(folders["clip"])
    freeze(encoder, "all")
    assert trainable_of(encoder).keys() == trainable_of(other).keys()
    assert encoder.describe()["trains"] == "all: 50,304 of 50,305 parameters (100%)"
    assert "trains" not in other.describe()
    assert all(module.training for module in encoder.train().modules())


@pytest.mark.parametrize("kind", ["clip", "siglip", "open_clip"])
@pytest.mark.parametrize("what", ["vision", "text", "projection"])
def test_a_part_of_two_towers_trains_alone(folders: dict[str, Path], kind: str, what: str) -> None:
    encoder = load(folders[kind])
    everything = trainable_of(encoder).keys()
    freeze(encoder, what)
    found = trainable_of(encoder).keys()
    vision = {name for name in everything if "visual" in name or "vision" in name}
    ends = ("_projection.weight", "_projection", "visual.proj")
    projection = {name for name in everything if name.endswith(ends) or "_model.head." in name}
    assert projection
    assert len(projection) < len(vision)
    assert found == {"vision": vision, "text": everything - vision, "projection": projection}[what]


@pytest.mark.parametrize("what", ["text", "lora text", "last_1_layers"])
def test_frozen_parts_stay_in_evaluation_mode_while_the_rest_trains(folders: dict[str, Path], what: str) -> None:
    encoder = partly_trained(folders["clip"], what)
    for _ in range(2):  # an evaluation in between, as at every dev set
        encoder.eval()
        assert not any(module.training for module in encoder.modules())
        encoder.train()
    modes = {name: module.training for name, module in encoder.named_modules()}
    trains = {name: any(p.requires_grad for p in module.parameters()) for name, module in encoder.named_modules()}
    layers = [f"model.{tower}_model.encoder.layers.{place}" for tower in ("text", "vision") for place in (0, 1)]
    assert {name: modes[name] for name in layers} == {name: trains[name] for name in layers}
    assert {modes[name] for name in layers} == {True, False}
    assert all(not modes[name] for name in modes if name.startswith("model.vision_model.encoder.layers.0"))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_stand_beside_every_linear_layer_of_the_layers_and_nothing_else_trains(
    folders: dict[str, Path], kind: str
) -> None:
    plain, encoder = load(folders[kind]), load(folders[kind])
    add_adapters(encoder, AdapterKeys(lora_r=3))
    adapted = {name.split(".lora_")[0] for name in trainable_of(encoder)}
    linear = {
        name
        for name, module in plain.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and in_layers(plain, name)
    }
    if kind in UNCALLED:
        linear = {name for name in linear if not name.endswith(UNCALLED[kind])}
    assert adapted == linear
    assert len(linear) >= 4
    count = sum(
        3 * sum(plain.get_submodule(name).weight.shape)  # type: ignore[arg-type, union-attr]
        for name in linear
    )
    total = count + sum(parameter.numel() for parameter in plain.parameters())
    assert f"{count:,} of {total:,} parameters" in encoder.describe()["trains"]
    assert "rank 3, scale 2" in encoder.describe()["trains"]


def test_named_layers_of_one_tower_get_adapters(folders: dict[str, Path]) -> None:
    encoder = load(folders["clip"])
    options = AdapterKeys(
        lora_r=2,
        lora_alpha=5.0,
        lora_target_modules=["q_proj", "layers.1.mlp.fc1", "visual_projection"],
        lora_towers="vision",
    )
    add_adapters(encoder, options)
    assert {name.split(".lora_")[0] for name in trainable_of(encoder)} == {
        "model.vision_model.encoder.layers.0.self_attn.q_proj",
        "model.vision_model.encoder.layers.1.self_attn.q_proj",
        "model.vision_model.encoder.layers.1.mlp.fc1",
        "model.visual_projection",
    }
    assert "scale 2.5, on fc1, q_proj, visual_projection of the vision tower" in encoder.describe()["trains"]


def test_adapters_are_float32_beside_bfloat16_weights_and_double_beside_double_ones(folders: dict[str, Path]) -> None:
    for base, expected in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        encoder = load_any(folders["bert"], dtype=base)
        add_adapters(encoder, AdapterKeys(lora_r=2))
        assert {parameter.dtype for parameter in trainable_of(encoder).values()} == {expected}
        assert {p.dtype for name, p in encoder.named_parameters() if "lora" not in name} == {base}


def test_adapters_need_no_memory_on_the_meta_device(folders: dict[str, Path]) -> None:
    encoder = load(folders["bert"]).to("meta")
    add_adapters(encoder, AdapterKeys(lora_r=2))
    assert all(parameter.is_meta for parameter in encoder.parameters())
    assert sum(parameter.numel() for parameter in trainable_of(encoder).values()) == 2 * 2 * 448


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *(("clip", what) for what in ("lora text", "vision", "text", "projection", "last_1_layers")),
        ("bert", "last_1_layers"),
        ("open_clip", "last_1_layers"),
    ],
)
def test_the_engine_has_the_gradients_of_the_plain_step_where_a_part_trains(
    folders: dict[str, Path], kind: str, what: str
) -> None:
    encoder = partly_trained(folders[kind], what)
    wake(encoder)
    assert_exact(encoder, text_batch() if kind == "bert" else picture_batch())


@pytest.mark.parametrize(
    ("kind", "what"),
    [("bert", "lora dropout"), ("clip", "lora dropout"), pytest.param("clip", "last_1_layers", marks=pytest.mark.slow)],
)
def test_gradient_checkpointing_trains_what_trains_without_it(folders: dict[str, Path], kind: str, what: str) -> None:
    batch = text_batch() if kind == "bert" else picture_batch()
    gradients = []
    for checkpointed in (False, True):
        encoder, loss = partly_trained(folders[kind], what, gradient_checkpointing=checkpointed), make_loss()
        wake(encoder)
        torch.manual_seed(5)
        reference_step(pools_of(encoder, batch), BatchStructure.of(batch), loss, budget=BUDGET)
        gradients.append(take(encoder, loss))
    assert_same(gradients[1], gradients[0])
    assert max(gradient.norm() for name, gradient in gradients[1].items() if name != "log_scale") > 0


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one_where_a_tower_is_frozen(
    two_ranks: RankPool, folders: dict[str, Path]
) -> None:
    """Rank 0 has pictures alone, of whose tower nothing trains: no rank waits for its gradients."""
    batch = picture_batch()
    assignment = RowAssignment((np.array([5, 7, 9]), np.array([0, 1, 2, 3, 4, 6, 8])))
    reductions = {}
    for what in ("lora text", "vision"):
        encoder, loss = partly_trained(folders["clip"], what).eval(), make_loss()
        wake(encoder)
        value = reference_step(pools_of(encoder, batch), BatchStructure.of(batch), loss)
        expected = take(encoder, loss)
        answers: list[Any] = two_ranks.run(step_of_a_rank, folders["clip"], what, assignment)
        for found_value, found, _ in answers:
            assert found_value == pytest.approx(value.item(), rel=1e-11)
            own = {name: gradient for name, gradient in expected.items() if name in found}
            assert own.keys() == expected.keys() - {"log_scale"}
            assert_same(found, own)
        reductions[what] = {count for _, _, count in answers}
    assert reductions["lora text"] == reductions["vision"], "reductions depend on what trains"
    assert len(reductions["vision"]) == 1


@pytest.mark.parametrize(
    ("kind", "trainable", "message"),
    [
        ("bert", "vision", r"has no vision tower; it has all, text, last_1_layers to last_2_layers$"),
        ("bert", "projection", r"has no projection; it has all, text, last_1"),
        ("vit", "text", r"has no text tower; it has all, vision, last_1"),
        ("clip", "last_3_layers", r"the text tower of .* has 2 layers, not 3; write last_2_layers, or all"),
    ],
)
def test_a_part_that_is_not_there_is_refused(folders: dict[str, Path], kind: str, trainable: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        freeze(load(folders[kind]), trainable)
    freeze(load(folders[kind]), "last_2_layers")


def test_encoders_from_scratch_have_parts_but_no_layers_for_adapters() -> None:
    for encoder, projection in ((NgramBag(NgramBagConfig(dimension=4, buckets=8)), False), (TinyClip(TINY), True)):
        with pytest.raises(
            ConfigError, match="has no transformer layers to put adapters beside; set use_lora to false"
        ):
            add_adapters(encoder, AdapterKeys())
        with pytest.raises(
            ConfigError, match=r"tower of .* has no list of layers to count from the end; it has all, text"
        ):
            freeze(encoder, "last_1_layers")
        if projection:
            freeze(encoder, "projection")
            assert trainable_of(encoder).keys() == {"vision.9.weight", "vision.9.bias"}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("bert", {"lora_target_modules": ["querry"]}, r"has no linear layer querry; did you mean query\?"),
        (
            "bert",
            {"lora_target_modules": ["word_embeddings"]},
            r"word_embeddings of .* is Embedding or outside of lora_towers",
        ),
        ("bert", {"lora_towers": "vision"}, r"lora_towers: .* has no vision tower; it has text: write all"),
        (
            "clip",
            {"lora_towers": "text", "lora_target_modules": ["visual_projection"]},
            r"is Linear or outside of lora_towers",
        ),
        ("open_clip", {"lora_target_modules": ["out_proj"]}, r"reads its weights past the layer.*take c_fc, c_proj"),
        ("open_clip", {"lora_target_modules": ["attn"]}, r"belongs to torch's MultiheadAttention"),
        ("siglip", {"lora_target_modules": ["attention.out_proj"]}, r"belongs to torch's MultiheadAttention"),
    ],
)
def test_layers_that_can_not_have_adapters_are_refused(
    folders: dict[str, Path], kind: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        add_adapters(load(folders[kind]), AdapterKeys(**options))  # type: ignore[arg-type]
    add_adapters(load(folders[kind]), AdapterKeys())


def test_four_bits_are_refused_without_their_package_or_a_device(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ModelKeys(model_name=str(folders["bert"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"needs bitsandbytes, which is missing: pip install 'vembed\[qlora\]'"):
        load_encoder(keys, load_in_4bit=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MachineError, match="needs a CUDA device, and this machine has none"):
        load_encoder(keys, load_in_4bit=True)
    with pytest.raises(ConfigError, match="load_in_4bit has no effect with"):
        load_any("builtin:ngram-bag", load_in_4bit=True)
    with pytest.raises(ConfigError, match="load_in_4bit has no effect with"):
        load_any(folders["open_clip"], load_in_4bit=True)


def test_four_bits_are_normal_floats_whose_constants_have_few_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = four_bit_config()
    assert (config.load_in_4bit, config.load_in_8bit) == (True, False)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
