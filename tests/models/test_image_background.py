"""What stands behind transparent parts: white, black, or what the model's own library makes; saved with the model."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image
import pytest
import torch
from kit.picture_models import SIDE, TINY, write_open_clip, write_picture_model
from kit.text_models import load_any, write_model

import vembed
from vembed.batch import Augmentation, Image, ImageLimits
from vembed.data.images import decode_image
from vembed.errors import ConfigError
from vembed.models.adapters import save_trained
from vembed.models.export import ExportRequest, export_model
from vembed.models.from_scratch import TinyClip
from vembed.models.hub import PICTURES_FILE
from vembed.models.keys import ModelKeys
from vembed.models.pictures import normalised
from vembed.vectors.provenance import model_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.models.encoder import Encoder


def encoded(mode: str, kind: str, **options: object) -> Image:
    """Return noise in a mode as a file in memory, half of its alpha zero."""
    pixels = np.random.default_rng(3).integers(0, 256, (40, 56, len(mode)), dtype=np.uint8)
    if mode == "RGBA":
        pixels[:, ::2, 3] = 0
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels, mode).save(buffer, kind, **options)
    return Image(f"{mode}.{kind}", buffer.getvalue())


def palette() -> Image:
    picture = PIL.Image.fromarray(np.arange(40 * 56, dtype=np.uint8).reshape(40, 56), "P")
    picture.putpalette(np.random.default_rng(5).integers(0, 256, 768, dtype=np.uint8).tobytes())
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", transparency=7)
    return Image("palette.png", buffer.getvalue())


FILES: Mapping[str, Image] = {
    "RGBA": encoded("RGBA", "PNG"),
    "RGBA of WebP": encoded("RGBA", "WEBP", lossless=True, exact=True),
    "CMYK": encoded("CMYK", "JPEG", quality=95),
    "palette": palette(),
    "RGB": encoded("RGB", "PNG"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_open_clip(tmp_path_factory.mktemp("background") / "model")


def pixels_of(encoder: Encoder, image: Image) -> NDArray[np.float32]:
    """Return what the network sees of a picture."""
    inputs = encoder.collate(encoder.featurize([image], "document"), np.arange(1), 1)
    pixels = inputs["pixels"] if isinstance(encoder, TinyClip) else normalised(inputs, encoder.normalisation)
    values: NDArray[np.float32] = pixels[0].numpy()
    return values


def opened(image: Image) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(image.read()))


@pytest.mark.parametrize("name", FILES)
def test_none_has_the_pixels_of_open_clips_own_preprocessing(folder: Path, name: str) -> None:
    import open_clip

    _, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    own = preprocess(opened(FILES[name])).numpy()
    assert np.array_equal(pixels_of(load_any(folder, image_background="none"), FILES[name]), own)
    assert np.array_equal(pixels_of(load_any(folder), FILES[name]), own) == (name == "RGB")  # by default it differs


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["clip", "vit"])
def test_none_has_the_pixels_that_transformers_makes_of_a_converted_picture(
    tmp_path: Path, kind: str, name: str
) -> None:
    encoder = load_any(write_picture_model(tmp_path / kind, kind), image_background="none")
    own = encoder.image_processor(images=[opened(FILES[name]).convert("RGB")], return_tensors="pt")["pixel_values"]  # type: ignore[operator]
    assert np.array_equal(pixels_of(encoder, FILES[name]), own[0].numpy())


@pytest.mark.parametrize(("background", "level"), [("auto", 255), ("white", 255), ("black", 0)])
def test_transparent_parts_have_the_colour_of_the_background(tmp_path: Path, background: str, level: int) -> None:
    TinyClip(TINY).save(tmp_path)
    buffer = io.BytesIO()
    PIL.Image.new("RGBA", (SIDE, SIDE), (10, 200, 30, 0)).save(buffer, "PNG")
    assert (pixels_of(load_any(tmp_path, image_background=background), Image("a", buffer.getvalue())) == level).all()


def test_sixteen_bits_are_scaled_on_every_background_and_augmentation_sees_rgb() -> None:
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16)).save(buffer, "PNG", transparency=0x8000)
    levels = {"white": 255, "black": 0, "none": 128}
    for background, level in levels.items():
        found = decode_image(Image("a", buffer.getvalue()), ImageLimits(), background)  # type: ignore[arg-type]
        assert np.unique(np.asarray(found.convert("RGB"))) == level
    changed = Image("a", FILES["CMYK"].data, Augmentation("light", flip=False, seed=1))
    assert decode_image(changed, ImageLimits(), "none").mode == "RGB"


@pytest.mark.slow
@pytest.mark.parametrize("background", [pytest.param("black", marks=pytest.mark.slow), "none"])
def test_a_trained_model_keeps_its_background_through_saving_reloading_and_export(
    folder: Path, tmp_path: Path, background: str
) -> None:
    encoder = load_any(folder, image_background=background)
    expected = pixels_of(encoder, FILES["RGBA"])
    save_trained(encoder, tmp_path / "model", tmp_path / "adapter")
    for again in (load_any(tmp_path / "model"), load_any(f"{tmp_path / 'model'}", image_background=background)):
        assert np.array_equal(pixels_of(again, FILES["RGBA"]), expected)
    assert not np.array_equal(
        pixels_of(load_any(tmp_path / "model", image_background="white"), FILES["RGBA"]), expected
    )
    request = ExportRequest(keys=ModelKeys(model_name=str(tmp_path / "model")), output=tmp_path / "export")
    export_model(request, lambda encoder, form: {})
    assert np.array_equal(pixels_of(load_any(tmp_path / "export"), FILES["RGBA"]), expected)
    data = FILES["RGBA"].data
    assert data is not None
    one, other = (vembed.load(path).encode([data], side="document") for path in (tmp_path / "model", folder))
    assert not np.allclose(one, other, atol=1e-3)


def test_the_default_writes_no_file_and_leaves_every_key_as_it_was(folder: Path, tmp_path: Path) -> None:
    encoder = load_any(folder)
    save_trained(encoder, tmp_path / "model", tmp_path / "adapter")
    assert not (tmp_path / "model" / PICTURES_FILE).exists()
    keys = {background: model_key(load_any(folder, image_background=background)) for background in ("white", "black")}
    assert model_key(encoder) == keys["white"] != keys["black"]
    assert "image_background" not in encoder.describe()
    assert load_any(folder, image_background="none").describe()["image_background"] == "none"


def test_a_background_that_there_is_not_and_a_model_of_texts_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / PICTURES_FILE).write_text('{"image_background": "pink"}')
    try:
        with pytest.raises(ConfigError, match=r"names the image_background 'pink'; set image_background"):
            load_any(folder)
        assert load_any(folder, image_background="black").image_background == "black"
    finally:
        (folder / PICTURES_FILE).unlink()
    with pytest.raises(ConfigError, match="image_background has no effect with "):
        load_any(write_model(tmp_path / "bert", "bert"), image_background="black")
    assert torch.float32 in {parameter.dtype for parameter in load_any(tmp_path / "bert").parameters()}
