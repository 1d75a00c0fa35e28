"""Two towers of different origin: their vectors, what trains of them, and what is left of them on disk."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from adapter_cases import assert_exact, partly_trained, picture_batch, trainable_of, wake
from kit.picture_models import PICTURES, opened, vectors, write_picture_model
from kit.text_models import TEXTS, load_any, write_model
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from vembed.batch import Composed
from vembed.distributed.fsdp import transformer_blocks
from vembed.errors import ConfigError
from vembed.models.adapters import add_adapters, save_trained
from vembed.models.composed import ComposedTowers
from vembed.models.exportable import sample_vectors, writable_forms
from vembed.models.keys import AdapterKeys, ModelKeys
from vembed.models.load import encoder_classes, load_encoder
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model

if TYPE_CHECKING:
    from pathlib import Path


PAIRS = {
    "bert + dinov2": ("bert", "dinov2"),
    "modernbert + siglip": ("modernbert", "siglip vision"),
    "gpt2 + the image tower of clip": ("gpt2", "clip"),
}
MODELS = ("bert", "modernbert", "gpt2"), ("dinov2", "siglip vision", "clip", "siglip2", "vit")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Single models, and folders of pairs with projections to 24 dims of 2 layers."""
    root = tmp_path_factory.mktemp("composed")
    found = {kind: write_model(root / kind, kind) for kind in MODELS[0]}
    found |= {kind: write_picture_model(root / kind.replace(" ", "-"), kind) for kind in MODELS[1]}
    for number, (pair, names) in enumerate(PAIRS.items()):
        folder = root / f"pair-{number}"
        compose(found, names, projection_dim=24, projection_layers=2).save(folder)
        found[pair] = folder
    return found


def compose(folders: dict[str, Path], names: tuple[str, str], **keys: Any) -> Any:
    keys["torch_dtype"] = str(keys.pop("dtype", torch.float32)).removeprefix("torch.")
    text, image = (str(folders[name]) for name in names)
    return load_encoder(ModelKeys(text_model_name=text, image_model_name=image, **keys)).eval()  # type: ignore[call-arg]


@torch.no_grad()
def projected(x: torch.Tensor, weights: dict[str, torch.Tensor], part: str, num_layers: int) -> torch.Tensor:
    """Apply the published rule step by step."""
    x = F.normalize(x, dim=-1) * math.sqrt(x.shape[-1])
    for number in range(num_layers):
        weight, bias = (weights[f"{part}.{2 * number}.{kind}"] for kind in ("weight", "bias"))
        x = x @ weight.T.to(x.dtype) + bias.to(x.dtype)
        x = F.gelu(x) if number + 1 < num_layers else x
    return F.normalize(x, dim=-1)


@pytest.mark.parametrize("pair", PAIRS)
def test_vectors_are_those_of_the_towers_projected_step_by_step(folders: dict[str, Path], pair: str) -> None:
    encoder = load_any(folders[pair], dtype=torch.float64).eval()
    weights = load_file(folders[pair] / "projections.safetensors")
    text, image = PAIRS[pair]
    texts = vectors(load_any(folders[text], dtype=torch.float64).eval(), TEXTS)
    model = AutoModel.from_pretrained(folders[image], dtype=torch.float64)
    processor = AutoImageProcessor.from_pretrained(folders[image])
    pixels = processor(images=opened(PICTURES), return_tensors="pt")["pixel_values"].double()
    with torch.no_grad():
        outputs = getattr(model, "vision_model", model)(pixel_values=pixels)
    pictures = outputs.last_hidden_state[:, 0] if image == "dinov2" else outputs.pooler_output
    expected = torch.cat([projected(texts, weights, "text", 2), projected(pictures, weights, "image", 2)])
    found = vectors(encoder, [*TEXTS, *PICTURES])
    assert found.shape == (10, 24)
    assert (found - expected).abs().max() < 1e-5
    distinct = found[[0, 1, 2, 3, 5, 6, 7, 8, 9]]  # but for "Sea", which a tokenizer may lower
    assert torch.pdist(distinct).min() > 1e-3, "two items have one vector"
    both = vectors(encoder, [Composed((PICTURES[1],), TEXTS[2])])
    assert torch.allclose(both[0], F.normalize(found[2] + found[6], dim=-1), atol=1e-9)


def test_a_single_layer_to_the_same_dimension_starts_as_the_identity(folders: dict[str, Path]) -> None:
    encoder = compose(folders, ("bert", "dinov2"))
    assert encoder.dimension == 32
    for part, items in ((encoder.text, TEXTS), (encoder.image, PICTURES)):
        assert torch.allclose(vectors(encoder, items), vectors(part, items), atol=1e-6)


def test_projections_start_alike_whatever_was_drawn_before(folders: dict[str, Path]) -> None:
    one, two = (compose(folders, ("bert", "dinov2"), projection_dim=16, projection_layers=3) for _ in range(2))
    weights = one.projections.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in two.projections.state_dict().items())
    assert not torch.equal(weights["text.0.weight"], weights["image.0.weight"])
    bound = math.sqrt(3 / 32)
    assert 0.9 * bound < weights["text.0.weight"].abs().max() <= bound


@pytest.mark.parametrize(
    "what", ["lora dropout", "lora text", "text", "projection", pytest.param("last_1_layers", marks=pytest.mark.slow)]
)
def test_a_part_that_trains_has_exact_gradients(folders: dict[str, Path], what: str) -> None:
    encoder = partly_trained(folders["modernbert + siglip"], what)
    wake(encoder)
    names = trainable_of(encoder).keys()
    image = {name for name in names if name.startswith(("image.", "projections.image."))}
    assert bool(image) == (what in ("lora dropout", "projection", "last_1_layers"))
    if "lora" in what:
        assert "projections.text.0.weight" in names, "what was never trained trains beside adapters"
    assert_exact(encoder, picture_batch())


def test_blocks_of_both_towers_are_gathered_one_at_a_time(folders: dict[str, Path]) -> None:
    blocks = transformer_blocks(load_any(folders["bert + dinov2"]))
    assert sorted({type(block).__name__ for block in blocks}) == ["BertLayer", "Dinov2Layer"]
    assert len(blocks) == 4


@pytest.mark.parametrize("pair", PAIRS)
def test_each_tower_of_what_is_saved_is_a_model_of_its_own_library(
    folders: dict[str, Path], tmp_path: Path, pair: str
) -> None:
    encoder = load_any(folders[pair]).eval()
    encoder.save(tmp_path / "again")
    again = load_any(tmp_path / "again").eval()
    assert isinstance(again, ComposedTowers)
    assert again.names == (PAIRS[pair][0], PAIRS[pair][1].replace(" ", "-"))
    for part, own in (("text", TEXTS), ("image", PICTURES)):
        assert torch.equal(
            vectors(load_any(tmp_path / "again" / part).eval(), own), vectors(encoder.parts()[part], own)
        )
        AutoModel.from_pretrained(tmp_path / "again" / part)
    AutoTokenizer.from_pretrained(tmp_path / "again" / "text")
    AutoImageProcessor.from_pretrained(tmp_path / "again" / "image")


@pytest.mark.parametrize("towers", ["all", "text"])
def test_adapters_of_each_tower_are_saved_by_themselves_and_merged(
    folders: dict[str, Path], tmp_path: Path, towers: Any
) -> None:
    encoder = load_any(folders["bert + dinov2"])
    add_adapters(encoder, AdapterKeys(lora_r=2, lora_towers=towers))
    wake(encoder)
    expected = vectors(encoder.eval(), [*TEXTS, *PICTURES])
    save_trained(encoder, tmp_path / "model", tmp_path / "adapter")
    found = vectors(load_any(tmp_path / "model").eval(), [*TEXTS, *PICTURES])
    assert (found - expected).abs().max() < 1e-5
    written = {path.parent.name for path in tmp_path.joinpath("adapter").glob("*/adapter_model.safetensors")}
    assert written == ({"text", "image"} if towers == "all" else {"text"})
    from peft import PeftModel

    base = AutoModel.from_pretrained(folders["bert"])
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter/text").eval()
    tokens = AutoTokenizer.from_pretrained(folders["bert"])(list(TEXTS), padding=True, return_tensors="pt")
    merged = AutoModel.from_pretrained(tmp_path / "model/text")
    with torch.no_grad():
        assert torch.allclose(adapted(**tokens).last_hidden_state, merged(**tokens).last_hidden_state, atol=1e-4)


def test_a_frozen_image_tower_keeps_its_vectors(folders: dict[str, Path]) -> None:
    encoder = partly_trained(folders["bert + dinov2"], "text")
    assert all(name.startswith(("text.", "projections.text.")) for name in trainable_of(encoder))
    modes = {part: each.backbone.training for part, each in encoder.parts().items()}
    assert modes == {"text": True, "image": False}, "what is frozen drops nothing"


@pytest.mark.slow
def test_the_plan_counts_adapters_of_both_towers_and_their_projections(folders: dict[str, Path]) -> None:
    keys, lora = ModelKeys(model_name=str(folders["bert + dinov2"])), AdapterKeys(lora_r=2)
    adapted = profile_model(keys, ProfileTarget(), lora=lora).adapted
    encoder = load_encoder(keys)
    add_adapters(encoder, lora)
    assert adapted is not None
    assert adapted.num_trainable == sum(each.numel() for each in trainable_of(encoder).values())


def test_keys_reach_the_tower_that_reads_them(folders: dict[str, Path]) -> None:
    encoder = compose(
        folders,
        ("bert", "dinov2"),
        query_prompt="find: ",
        max_seq_length=9,
        image_background="black",
        pooling_method="cls",
    )
    assert encoder.prompts["query"] == "find: "
    assert encoder.max_length == encoder.text.max_length == 9
    assert encoder.text.spec.pooling == ("cls",)
    assert encoder.image.image_background == encoder.image_background == "black"
    one = vectors(encoder, ["sea"])
    assert not torch.equal(one, vectors(compose(folders, ("bert", "dinov2")), ["sea"]))


def test_the_background_of_a_pictures_folder_is_kept_and_written_again(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    encoder = compose(folders, ("bert", "dinov2"), image_background="black")
    save_trained(encoder, tmp_path / "pair", tmp_path / "adapter")
    assert load_any(tmp_path / "pair").image_background == "black"
    names = {"bert": folders["bert"], "image": tmp_path / "pair/image"}
    assert compose(names, ("bert", "image")).image_background == "black"


def test_the_samples_of_an_export_are_of_both_kinds(folders: dict[str, Path]) -> None:
    encoder = load_any(folders["bert + dinov2"]).eval()
    assert sample_vectors(encoder).keys() == {"query texts", "document texts", "pictures"}
    assert tuple(writable_forms(encoder)) == ("vembed",)


@pytest.mark.parametrize(
    ("text", "image", "keys", "message"),
    [
        ("clip", "dinov2", {}, "text_model_name: .*clip reads texts and pictures; name a model that reads texts alone"),
        ("bert", "siglip2", {}, "image_model_name: .*siglip2 reads texts and pictures; name .* pictures alone"),
        ("bert", "modernbert", {}, "image_model_name: .*modernbert reads texts; name a model that reads pictures"),
        ("dinov2", "vit", {}, "text_model_name: .*dinov2 reads pictures; name a model that reads texts"),
        ("bert", "dinov2", {"pooling_method": "none"}, "text_model_name: .*bert gives several vectors for each row"),
        ("bert", "dinov2", {"freeze_batch_norm": True}, "has no batch normalisation"),
    ],
)
def test_a_tower_that_reads_something_else_is_refused(
    folders: dict[str, Path], text: str, image: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(folders, (text, image), **keys)


def test_keys_that_contradict_the_folder_are_refused(folders: dict[str, Path]) -> None:
    folder = folders["bert + dinov2"]
    assert load_any(folder, projection_dim=24, projection_layers=2, encoder_mode="composed").dimension == 24
    with pytest.raises(ConfigError, match=r"projection_dim 16: the projections of .* have 24; leave it out"):
        load_any(folder, projection_dim=16)
    with pytest.raises(ConfigError, match="projection_layers has no effect with"):
        load_any(folders["bert"], projection_layers=2)


@pytest.mark.parametrize(
    ("kind", "mode", "reason"),
    [
        ("bert", "bert", ""),
        ("bert", "bge", ""),
        ("bert", "qwen", "say bert; write bert, bge or e5, or leave encoder_mode out"),
        ("dinov2", "dino", ""),
        ("dinov2", "dinov2", ""),
        ("dinov2", "dinov3", "say dinov2; write dino or dinov2"),
        ("vit", "vit", ""),
        ("vit", "bert", "say vit; write dino or vit"),
        ("clip", "clip", ""),
        ("clip", "siglip", "say clip; write clip"),
        ("siglip2", "siglip", ""),
        ("gpt2", "bert", "say gpt2; leave encoder_mode out"),
        ("bert", "composed", "is one model; name two by text_model_name and image_model_name"),
        ("builtin:tiny-transformer", "bert", ""),
        ("builtin:tiny-clip", "clip", ""),
        ("builtin:tiny-clip", "bert", "builtin:tiny-clip is of another family"),
        ("open_clip:ViT-B-32", "bert", "open_clip:ViT-B-32 is of another family"),
    ],
)
def test_a_mode_that_the_files_contradict_is_refused(
    folders: dict[str, Path], kind: str, mode: str, reason: str
) -> None:
    name = str(folders.get(kind, kind))
    if not reason:
        plain, forced = load_any(name, ["a text"]), load_any(name, ["a text"], encoder_mode=mode)
        assert type(forced) is type(plain)
        return
    with pytest.raises(ConfigError, match=f"^encoder_mode {mode}: .*{reason}"):
        load_any(name, encoder_mode=mode)


def test_every_mode_is_one_of_a_class() -> None:
    stated = {mode for each in encoder_classes() for mode in each.modes}
    assert {"auto", *stated} == set(get_args(ModelKeys.model_fields["encoder_mode"].annotation))


def test_what_a_folder_says_of_its_towers_holds_no_path(folders: dict[str, Path]) -> None:
    content = json.loads((folders["bert + dinov2"] / "vembed_composed.json").read_text("utf-8"))
    assert content == {
        "text_model_name": "bert",
        "image_model_name": "dinov2",
        "projection_dim": 24,
        "projection_layers": 2,
    }
