"""How a picture encoder sums a picture up: by the key, by the folder, by the family; and MAE without masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kit.picture_models import PICTURES, opened, vectors, write_picture_model
from kit.text_models import load_any, write_model
from sentence_transformers import SentenceTransformer
from transformers import AutoImageProcessor, AutoModel, ViTMAEModel

from vembed.errors import ConfigError
from vembed.models.adapters import add_adapters
from vembed.models.keys import AdapterKeys
from vembed.models.vision import VisionEncoder

if TYPE_CHECKING:
    from pathlib import Path


OTHERS = [
    ("vit", "mean"), ("vit", "head"), ("dinov2", "mean"), ("dinov3", "mean"), ("dinov3 convnext", "mean"),
    ("mae", "cls"), ("siglip vision", "mean"),
]  # fmt: skip
"""Poolings that aren't their family's own."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pooling")
    return {kind: write_picture_model(root / kind.replace(" ", "-"), kind) for kind in dict(OTHERS)}


def load(folder: Path, **keys: Any) -> VisionEncoder:
    encoder = load_any(folder, **keys)
    assert isinstance(encoder, VisionEncoder)
    return encoder.eval()


@pytest.mark.parametrize(("kind", "pooling"), OTHERS)
def test_the_key_decides_and_the_written_folder_says_so(
    folders: dict[str, Path], tmp_path: Path, kind: str, pooling: str
) -> None:
    unmasked = {"mask_ratio": 0.0} if kind == "mae" else {}
    model = AutoModel.from_pretrained(folders[kind], **unmasked).eval()
    pixels = AutoImageProcessor.from_pretrained(folders[kind])(images=opened(PICTURES), return_tensors="pt")
    with torch.no_grad():
        outputs = model(**pixels)
    hidden_RTH = outputs.last_hidden_state
    summed = {"cls": hidden_RTH[:, 0], "mean": hidden_RTH.mean(1), "head": outputs.get("pooler_output")}[pooling]
    encoder = load(folders[kind], pooling_method=pooling)
    found = vectors(encoder, PICTURES)
    assert (found - F.normalize(summed, dim=-1)).abs().max() <= 1e-5
    assert (vectors(load(folders[kind]), PICTURES) - found).abs().max() > 1e-3
    assert encoder.describe()["pooling"] == f"{pooling} (pooling_method)"
    encoder.save(tmp_path)
    assert torch.equal(vectors(load(tmp_path), PICTURES), found)
    encoder.write_form("sentence-transformers", tmp_path / "theirs")
    theirs = SentenceTransformer(str(tmp_path / "theirs"), device="cpu").encode(
        opened(PICTURES), convert_to_tensor=True
    )
    assert (theirs - found).abs().max() <= 1e-5


def test_an_attention_of_timm_that_reads_its_weights_past_the_layer_gets_no_adapter_there(tmp_path: Path) -> None:
    folder = write_picture_model(tmp_path, "timm eva02")
    with pytest.raises(ConfigError, match=r"qkv of .* past which its attention reads the weights"):
        add_adapters(load(folder), AdapterKeys(lora_target_modules=["qkv"]))
    encoder = load(folder)
    add_adapters(encoder, AdapterKeys())
    assert "on fc1, fc2, proj of the vision tower" in encoder.trained.words


def test_mae_masks_nothing_and_draws_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    masked = ViTMAEModel.from_pretrained(folders["mae"]).eval()
    assert masked.config.mask_ratio == 0.75
    encoder = load(folders["mae"])
    before = torch.get_rng_state()
    first = vectors(encoder, PICTURES)
    assert torch.equal(vectors(encoder, PICTURES), first)
    assert torch.equal(torch.get_rng_state(), before)
    encoder.save(tmp_path)
    written = AutoModel.from_pretrained(tmp_path).eval()
    pixels = AutoImageProcessor.from_pretrained(tmp_path)(images=opened(PICTURES), return_tensors="pt")
    with torch.no_grad():
        hidden_RTH, hidden = written(**pixels).last_hidden_state, masked(**pixels).last_hidden_state
    assert hidden.shape[1] < hidden_RTH.shape[1] == 17
    assert (F.normalize(hidden_RTH.mean(1), dim=-1) - first).abs().max() <= 1e-5


def test_a_pooling_that_a_model_hasnt_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pooling head \(pooling_method\) is none of those for dinov2: cls, mean"):
        load(folders["dinov2"], pooling_method="head")
    with pytest.raises(ConfigError, match="pools tokens; pooling_method head is for picture"):
        load_any(write_model(tmp_path / "bert", "bert"), pooling_method="head")
    headless = AutoModel.from_pretrained(folders["vit"], add_pooling_layer=False)
    headless.save_pretrained(tmp_path / "vit")
    AutoImageProcessor.from_pretrained(folders["vit"]).save_pretrained(tmp_path / "vit")
    load(tmp_path / "vit")
    with pytest.raises(ConfigError, match="pooling_method head: its files hold no such layer"):
        load(tmp_path / "vit", pooling_method="head")
