"""Encoders with an image tower: the library's own vectors, exact gradients, exact reloading, clear refusals."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kit.picture_models import (
    DUAL_BUILDERS,
    EVA_CONFIG,
    PATCH,
    PICTURES,
    SIDE,
    TINY,
    VISION_BUILDERS,
    opened,
    vectors,
    write_open_clip,
)
from kit.picture_models import write_picture_model as write
from kit.text_models import TEXTS, edit_json, load_any, write_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoImageProcessor, AutoModel

from vembed.batch import ImageLimits
from vembed.errors import ConfigError, DataError, MachineError
from vembed.models.from_scratch import TinyClip
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder, load_skeleton
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model
from vembed.models.vision import VisionEncoder

if TYPE_CHECKING:
    from pathlib import Path

SLOW_KINDS = {"dinov3", "dinov3 convnext", "timm naflex", "clip vision", "siglip vision without a head"}
KINDS = [
    pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW_KINDS else kind
    for kind in (*DUAL_BUILDERS, *VISION_BUILDERS, "tiny-clip", "open_clip", "open_clip eva02")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pictures")
    written = {kind: write(root / kind.replace(" ", "-"), kind) for kind in (*DUAL_BUILDERS, *VISION_BUILDERS)}
    torch.manual_seed(0)
    TinyClip(TINY).save(root / "tiny-clip")
    written |= {"open_clip": write_open_clip(root / "open_clip")}
    written |= {"open_clip eva02": write_open_clip(root / "open_clip-eva02", EVA_CONFIG)}
    return {**written, "tiny-clip": root / "tiny-clip"}


def load(folder: Path, **options: Any) -> Any:
    return load_any(folder, **options).eval()


@pytest.mark.parametrize("kind", VISION_BUILDERS)
def test_picture_encoders_give_the_vectors_of_transformers(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    assert isinstance(encoder, VisionEncoder)
    unmasked = {"mask_ratio": 0.0} if kind == "mae" else {}
    model = AutoModel.from_pretrained(folders[kind], **unmasked).eval()
    pixels = AutoImageProcessor.from_pretrained(folders[kind])(images=opened(PICTURES), return_tensors="pt")
    with torch.no_grad():
        outputs = model(**pixels)
    expected = {
        "mae": lambda: outputs.last_hidden_state.mean(1),
        "timm eva02": lambda: outputs.pooler_output,
        "timm naflex": lambda: outputs.pooler_output,
        "siglip vision without a head": lambda: outputs.last_hidden_state.mean(1),
        "siglip vision": lambda: outputs.pooler_output,
        "clip vision": lambda: outputs.pooler_output,
    }.get(kind, lambda: outputs.last_hidden_state[:, 0])()
    assert (vectors(encoder, PICTURES) - F.normalize(expected, dim=-1)).abs().max() <= 1e-5


def test_a_clip_in_a_folder_of_sentence_transformers_reads_pictures_too(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    # As clip-ViT-B-32 of sentence-transformers lies on the hub: all files in a module's own folder.
    shutil.copytree(folders["clip"], tmp_path / "0_CLIPModel")
    module = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    encoder = load(tmp_path)
    for items in (TEXTS, PICTURES):
        assert torch.equal(vectors(encoder, items), vectors(load(folders["clip"]), items))
    library = SentenceTransformer(str(tmp_path))
    for items, wanted in ((TEXTS, library.encode(list(TEXTS))), (PICTURES, library.encode(opened(PICTURES)))):
        torch.testing.assert_close(vectors(encoder, items), F.normalize(torch.tensor(wanted)), rtol=0, atol=1e-5)
    size = profile_model(ModelKeys(model_name=str(tmp_path)), ProfileTarget("cpu"))
    assert (size.estimated, size.modalities) == (False, encoder.modalities)


@pytest.mark.parametrize("kind", [*DUAL_BUILDERS, "clip vision", "vit", "dinov2", "dinov3"])
def test_dropout_is_on_while_training(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind]).train()
    assert not torch.equal(vectors(encoder, PICTURES), vectors(encoder, PICTURES))
    assert torch.equal(vectors(encoder.eval(), PICTURES), vectors(encoder, PICTURES))


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_costs_its_patches(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    features = encoder.featurize(PICTURES, "document")
    own = {"tiny-clip": (TINY.image_size // 8) ** 2, **dict.fromkeys(("timm naflex", "open_clip eva02"), 5)}
    patches = own.get(kind, (SIDE // PATCH) ** 2 + 1)
    if kind == "siglip2":  # keeps each picture's shape, within so many patches
        costs = features.per_row["spatial_shapes"].prod(axis=1) + 1
        assert costs.max() == patches > costs.min()
        assert features.lengths.tolist() == costs.tolist()
    else:
        assert features.lengths.tolist() == [patches] * len(PICTURES)


def test_siglip_texts_are_padded_to_the_full_length_and_clip_texts_are_not(folders: dict[str, Path]) -> None:
    assert set(load(folders["siglip"]).featurize(TEXTS, "query").lengths) == {64}
    clip = load(folders["clip"]).featurize(TEXTS, "query").lengths
    assert clip.max() < 64
    assert len(set(clip)) > 2


def test_a_model_refuses_what_it_has_no_tower_for(folders: dict[str, Path], tmp_path: Path) -> None:
    text_only = load(write_model(tmp_path / "bert", "bert"))
    with pytest.raises(
        DataError, match="bert takes text, and 5 items of the data are pictures: choose a model for both"
    ):
        text_only.by_modality([*TEXTS, *PICTURES])
    assert len(text_only.by_modality(TEXTS)) == 1
    with pytest.raises(DataError, match="vit takes image, and 5 items of the data are texts"):
        load(folders["vit"]).by_modality([*TEXTS, *PICTURES])
    assert [modality for modality, _ in load(folders["clip"]).by_modality([*TEXTS, *PICTURES])] == ["image", "text"]


def test_attention_may_be_chosen_where_transformers_runs_it(folders: dict[str, Path]) -> None:
    assert load(folders["clip"], attn_implementation="eager").describe()["attention"] == "eager"
    assert load(folders["vit"], attn_implementation="eager").describe()["attention"] == "eager"
    with pytest.raises(ConfigError, match="attn_implementation has no effect with "):
        load(folders["tiny-clip"], attn_implementation="eager")


@pytest.mark.parametrize("kind", ["clip", "vit", "open_clip", "tiny-clip"])
def test_the_limits_of_pictures_reach_the_decoder(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind], image_limits=ImageLimits(max_pixels=100))
    with pytest.raises(DataError, match=r"picture-0\.png"):
        encoder.featurize(PICTURES, "document")
    load(folders[kind], image_limits=ImageLimits(max_pixels=64 * 64)).featurize(PICTURES, "document")


def test_the_temperature_of_the_model_file_is_told_and_frozen(folders: dict[str, Path]) -> None:
    for kind in ("clip", "siglip", "open_clip"):
        encoder = load(folders[kind])
        assert "not used: the loss has its own" in encoder.describe()["logit_scale of the model file"]
        frozen = {name for name, p in encoder.named_parameters() if not p.requires_grad}
        assert {name.rpartition(".")[2] for name in frozen} <= {"logit_scale", "logit_bias"}
        assert frozen


def test_missing_weights_of_a_tower_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "clip")
    load(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="1 weights of CLIPModel are in none of its files, first visual_projection"):
        load(folder)


def test_a_model_without_its_image_processor_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "vit")
    load(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="could not be loaded"):
        load(folder)


@pytest.mark.parametrize("kind", ["dinov2", "clip"])
def test_an_image_processor_that_keeps_the_shape_of_pictures_is_refused(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path, kind)
    edit_json(folder / "preprocessor_config.json", do_center_crop=False, size={"shortest_edge": SIDE})
    with pytest.raises(ConfigError, match=f"square picture becomes {SIDE} x {SIDE} .* {SIDE} x {2 * SIDE}, "):
        load(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("open_clip:ViT-B-23", "no model 'ViT-B-23'; did you mean open_clip:ViT-B-32"),
        ("open_clip:ViT-B-32:opnai", "no weights 'opnai' of ViT-B-32; it has: openai, "),
    ],
)
def test_a_misspelt_open_clip_name_is_refused_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_encoder(ModelKeys(model_name=name))


@pytest.mark.parametrize("name", ["EVA02-B-16", "PE-Core-T-16-384", "MobileCLIP2-S0", "ViTamin-S", "convnext_tiny"])
def test_the_plan_builds_open_clips_towers_of_timm_without_the_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    skeleton = load_skeleton(ModelKeys(model_name=f"open_clip:{name}"))
    assert {tower.name for tower in skeleton.towers()} == {"text", "vision"}
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_a_text_tower_that_cant_be_fetched_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    def unreachable(**shape: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your connection")

    monkeypatch.setattr(open_clip, "CustomTextCLIP", unreachable)
    with pytest.raises(MachineError, match=r"roberta-ViT-B-32 could not be loaded by open_clip: We couldn't connect"):
        load_skeleton(ModelKeys(model_name="open_clip:roberta-ViT-B-32"))


def test_an_open_clip_tokenizer_that_a_saved_folder_would_lose_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    folder = write_open_clip(tmp_path)
    assert load(folder).modalities == {"text", "image", "image+text"}
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda name: tokenizer.encode)
    with pytest.raises(ConfigError, match="load with another tokenizer"):
        load(folder)


def test_an_open_clip_folder_with_pickled_or_no_weights_is_refused(tmp_path: Path) -> None:
    folder = write_open_clip(tmp_path)
    expected = vectors(load(folder), PICTURES)
    torch.save(load_file(folder / "open_clip_model.safetensors"), folder / "open_clip_pytorch_model.bin")
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"only as a pickle.*allow_pickle: true"):
        load(folder)
    assert torch.equal(vectors(load(folder, allow_pickle=True), PICTURES), expected)
    (folder / "open_clip_pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"holds no weights; open_clip_model\.safetensors is missing"):
        load(folder)


def test_a_missing_open_clip_names_the_package(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load(folders["open_clip"])
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(MachineError, match="pip install open_clip_torch"):
        load(folders["open_clip"])


def test_an_unknown_image_model_is_not_taken_for_one_with_two_towers(tmp_path: Path) -> None:
    folder = write(tmp_path, "vit")
    edit_json(folder / "config.json", model_type="no-such-thing")
    with pytest.raises(ConfigError, match="could not be loaded"):
        load(folder)
