"""Token ids travel in 32 bits, pixels as bytes: on the device these become what the model's own processor makes.

Equal to the last bit where the processor computes with torchvision, and within 1e-6 (values are up to 3) where it
computes with NumPy. A GPU divides by multiplying with the reciprocal: there a value may be off by its last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
import torch
from kit.picture_models import PICTURES, SIDE, opened, vectors, write_open_clip, write_picture_model
from kit.text_models import TEXTS, edit_json, load_any, write_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BitImageProcessorPil,
    CLIPImageProcessor,
    CLIPImageProcessorPil,
    DINOv3ViTImageProcessor,
    SiglipImageProcessor,
)

from vembed.models.pictures import Normalisation, last_step, normalised, run_processor
from vembed.vectors.provenance import model_key

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from vembed.models.encoder import Encoder

KINDS = ("clip", "siglip", "siglip2", "vit", "dinov2")
SQUARE = {"height": SIDE, "width": SIDE}


def inputs_of(encoder: Encoder) -> dict[str, Tensor]:
    features = encoder.featurize(PICTURES, "document")
    return encoder.collate(features, np.arange(len(PICTURES)), int(features.lengths.max()))


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_bytes_until_the_device_makes_of_them_what_transformers_makes(tmp_path: Path, kind: str) -> None:
    encoder = load_any(write_picture_model(tmp_path, kind))
    inputs = inputs_of(encoder)
    assert inputs["pixel_values"].dtype == torch.uint8
    own = encoder.image_processor(images=opened(PICTURES), return_tensors="pt")["pixel_values"]  # type: ignore[operator]
    own = own[:, : inputs["pixel_values"].shape[1]]  # SigLIP 2 pads each picture to the most patches that it allows
    pixels = normalised(inputs, encoder.normalisation)
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, own)
    assert encoder.picture_bytes() < own[0].nbytes / 2


def test_pixels_are_bytes_until_the_device_makes_of_them_what_open_clip_makes(tmp_path: Path) -> None:
    import open_clip

    folder = write_open_clip(tmp_path / "model")
    encoder = load_any(folder)
    _, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    inputs = inputs_of(encoder)
    assert inputs["pixel_values"].dtype == torch.uint8
    own = torch.stack([preprocess(picture) for picture in opened(PICTURES)])
    assert torch.equal(normalised(inputs, encoder.normalisation), own)
    assert encoder.picture_bytes() == own[0].nbytes / 4


def test_dinov3_resizes_floats_and_keeps_them(tmp_path: Path) -> None:
    encoder = load_any(write_picture_model(tmp_path, "dinov3"))
    inputs = inputs_of(encoder)
    own = encoder.image_processor(images=opened(PICTURES), return_tensors="pt")["pixel_values"]  # type: ignore[operator]
    assert encoder.normalisation is None
    assert inputs["pixel_values"].dtype == torch.float32
    assert torch.equal(normalised(inputs, None), own)


PROCESSORS: dict[str, tuple[Any, float | None]] = {
    "NumPy's CLIP": (CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SQUARE), 1e-6),
    "NumPy's DINOv2": (BitImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SQUARE), 1e-6),
    "one number for all channels": (SiglipImageProcessor(size=SQUARE, image_mean=0.4, image_std=0.3), 0.0),
    "rescales alone": (SiglipImageProcessor(size=SQUARE, do_normalize=False), 1e-6),
    "neither": (SiglipImageProcessor(size=SQUARE, do_normalize=False, do_rescale=False), 0.0),
    "normalises bytes": (
        CLIPImageProcessor(
            size={"shortest_edge": SIDE},
            crop_size=SQUARE,
            do_rescale=False,
            image_mean=[120.0, 110, 100],
            image_std=[60.0] * 3,
        ),
        0.0,
    ),
    "another scale": (
        CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SQUARE, rescale_factor=1 / 127.5),
        0.0,
    ),
    "pads at last": (
        CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SQUARE, do_pad=True, pad_size=SQUARE),
        None,
    ),
    "resizes floats": (DINOv3ViTImageProcessor(size=SQUARE), None),
    "a function": (lambda images, return_tensors: {"pixel_values": torch.zeros(len(images), 3, 4, 4)}, None),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_last_step_of_a_processor_is_known_or_left_to_it(name: str) -> None:
    processor, tolerance = PROCESSORS[name]
    step = last_step(processor, "a model")
    assert (step is None) == (tolerance is None)
    if step is not None:
        pictures = [PIL.Image.fromarray(np.random.default_rng(7).integers(0, 256, (44, 40, 3), dtype=np.uint8))]
        made = run_processor(processor, pictures, in_bytes=True)["pixel_values"]
        own = run_processor(processor, pictures)["pixel_values"]
        assert made.dtype == np.uint8
        assert np.abs(step(torch.from_numpy(made)).numpy() - own).max() <= (tolerance or 0.0)


class Copies(TorchDispatchMode):
    """Counts what goes from one device to another."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = (kwargs or {}).get("device")
        self.count += function.name() == "aten::_to_copy" and there is not None and args[0].device.type != there.type
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(5, 3, 8, 8), (5, 4, 12)], ids=["pictures", "patches"])
def test_normalising_sends_nothing_to_the_device(shape: tuple[int, ...]) -> None:
    step = Normalisation(mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0), divisor=255.0)
    with FakeTensorMode(), Copies() as copies:
        torch.zeros(3).to("cuda")
        assert copies.count == 1
        x = step(torch.zeros(shape, dtype=torch.uint8, device="cuda"))
    assert (x.dtype, x.shape, x.device.type) == (torch.float32, shape, "cuda")
    assert copies.count == 1


def test_patches_have_the_values_of_a_pixel_side_by_side() -> None:
    step = Normalisation(mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0))
    pictures = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    patches = pictures.permute(0, 2, 3, 1).reshape(2, 4, 12)
    assert torch.equal(step(patches), step(pictures).permute(0, 2, 3, 1).reshape(2, 4, 12))


@pytest.mark.parametrize("kind", ["bert", "clip", "siglip", "open_clip"])
def test_token_ids_travel_in_32_bits_and_every_model_gets_64(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models compute with ids, by hashing them or as indices, and 32 bits may be too few or refused."""
    write = {"bert": write_model, "open_clip": lambda folder, _: write_open_clip(folder)}.get(kind, write_picture_model)
    encoder = load_any(write(tmp_path / "model", kind)).eval()
    features = encoder.featurize(TEXTS, "query")
    inputs = encoder.collate(features, np.arange(len(TEXTS)), int(features.lengths.max()))
    assert {name: each.dtype for name, each in inputs.items() if name in ("input_ids", "lengths")} == {
        name: torch.int32 for name in ("input_ids", "lengths") if name in inputs
    }
    seen = []
    embedding = torch.nn.functional.embedding

    def looked_up(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(ids.dtype)
        return embedding(ids, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "embedding", looked_up)
    with torch.no_grad():
        encoder(inputs)
    assert set(seen) == {torch.int64}


def test_another_mean_gives_other_vectors_and_another_key(tmp_path: Path) -> None:
    """The bytes are the same; what is kept of an evaluation must not be taken for that of the other model."""
    one = load_any(write_picture_model(tmp_path, "vit"))
    edit_json(tmp_path / "preprocessor_config.json", image_mean=[0.4, 0.5, 0.6])
    other = load_any(tmp_path)
    assert not torch.allclose(vectors(one, PICTURES), vectors(other, PICTURES), atol=1e-3)
    assert model_key(one)["weights"] == model_key(other)["weights"]
    assert model_key(one)["encoder"] != model_key(other)["encoder"]
