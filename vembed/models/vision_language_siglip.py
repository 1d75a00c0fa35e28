"""Families of a SigLIP, a projector and a language model: pictures are squares of one size, one or several each.

Shape legend: R rows of a call, T tokens of a row, P tokens of all pictures of the call, H hidden dim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vembed.errors import ConfigError
from vembed.models.vision_language_family import VisionLanguageFamily, flat_pictures, put_in_places

if TYPE_CHECKING:
    from collections.abc import Mapping

    import PIL.Image
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Ragged


def _fixed_tokens(processor: Any, most_tokens: int | None, longest_side: int | None) -> int:
    """Return what each picture takes, which can't be changed."""
    tokens = int(processor.image_seq_length)
    _refuse_limit(tokens, most_tokens, longest_side)
    return tokens


def _refuse_limit(tokens: int, most_tokens: int | None, longest_side: int | None) -> None:
    if longest_side is not None or (most_tokens is not None and most_tokens != tokens):
        raise ConfigError(
            f"a picture takes up to {tokens} tokens in this family, whatever its size; leave image_tokens and "
            "max_image_size out"
        )


def _prefix_words(processor: Any, instruction: str, num_pictures: int, text: str) -> str:
    """Return an item as PaliGemma's processor words a task: pictures, the start, the text and a line end."""
    said = " ".join(part for part in (instruction, text) if part)
    return f"{processor.image_token * num_pictures}{processor.tokenizer.bos_token}{said}\n"


def _paligemma_hidden_states(network: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Let every token see all others."""
    return _seeing(network, inputs, torch.zeros_like(inputs["input_ids"]))


def _squares(network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:  # noqa: ARG001
    """Lay the squares of all rows one after the other."""
    return {"pixel_values": torch.from_numpy(arrays["pixel_values"].values)}


def _gemma3_hidden_states(network: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Let tokens of one picture see each other."""
    kinds = (inputs["input_ids"] == network.config.image_token_id).long()
    return _seeing(network, inputs, kinds)


def _seeing(network: Any, inputs: dict[str, Tensor], kinds: Tensor) -> Tensor:
    """Put pictures in the places of their tokens, and run a network whose tokens see others by their kinds."""
    ids = inputs["input_ids"].long()
    x_RTH = network.get_input_embeddings()(ids.masked_fill(ids == network.config.image_token_id, 0))
    if "pixel_values" in inputs:
        seen_PH = network.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1)
        x_RTH = put_in_places(x_RTH, inputs["image_places"], seen_PH)
    hidden_RTH: Tensor = network(
        inputs_embeds=x_RTH, attention_mask=inputs["attention_mask"], token_type_ids=kinds
    ).last_hidden_state
    return hidden_RTH


def _idefics3_arrays(processor: Any, images: list[PIL.Image.Image], in_bytes: bool) -> dict[str, NDArray[Any]]:  # noqa: ARG001
    """Return the squares that pictures are cut into, each picture whole behind its own, and how many there are."""
    made = processor(images=[images], return_tensors="pt", return_row_col_info=True)
    places = {name: np.asarray(made[name], dtype=np.int32).reshape(-1) for name in ("rows", "cols")}
    return {"pixel_values": made["pixel_values"][0].numpy(), **places}


def _idefics3_placeholder(processor: Any, arrays: Mapping[str, NDArray[Any]], place: int) -> str:
    return str(processor.replace_image_token({name: [arrays[name].tolist()] for name in ("rows", "cols")}, place))


def _idefics3_hidden_states(network: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Run both stacks on squares without padding: transformers looks for padding, and waits for the device."""
    x_RTH = network.get_input_embeddings()(inputs["input_ids"].long())
    if "pixel_values" in inputs:
        visual, pixels = network.vision_model, inputs["pixel_values"]
        sides = (pixels.shape[2] // visual.patch_size, pixels.shape[3] // visual.patch_size)
        filled = torch.ones(len(pixels), *sides, dtype=torch.bool, device=pixels.device)
        patches = visual.embeddings(pixel_values=pixels, patch_attention_mask=filled)
        seen = visual.post_layernorm(visual.encoder(inputs_embeds=patches, attention_mask=None).last_hidden_state)
        x_RTH = put_in_places(x_RTH, inputs["image_places"], network.connector(seen).flatten(0, 1))
    hidden_RTH: Tensor = network.text_model(
        inputs_embeds=x_RTH, attention_mask=inputs["attention_mask"]
    ).last_hidden_state
    return hidden_RTH


def _blank_square(network: Any, most_tokens: int) -> tuple[dict[str, NDArray[Any]], int]:  # noqa: ARG001
    """Return a picture of one square, in bytes."""
    side = network.config.vision_config.image_size
    return {"pixel_values": np.zeros((1, 3, side, side), dtype=np.uint8)}, square_tokens(network.config)


def _idefics3_blank(network: Any, most_tokens: int) -> tuple[dict[str, NDArray[Any]], int]:
    """Return the same as its processor makes them."""
    arrays, tokens = _blank_square(network, most_tokens)
    return {"pixel_values": arrays["pixel_values"].astype(np.float32)}, tokens


def square_tokens(config: Any) -> int:
    """Return the tokens of a square by the config of its network."""
    patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    return int(getattr(config, "mm_tokens_per_image", patches // getattr(config, "scale_factor", 1) ** 2))


def _limit_squares(processor: Any, most_tokens: int | None, longest_side: int | None) -> int:
    """Bound how many squares a picture is cut into: k x k and the whole of it, or the whole alone."""
    image_processor, length = processor.image_processor, int(processor.image_seq_len)
    side = int(image_processor.max_image_size["longest_edge"])
    count = int(image_processor.size["longest_edge"]) // side if image_processor.do_image_splitting else 1

    def tokens(count: int) -> int:
        return length + 3 + (count**2 * (length + 2) + count + 1 if count > 1 else 0)

    while count > 1 and (
        tokens(count) > (most_tokens or tokens(count)) or count * side > (longest_side or count * side)
    ):
        count -= 1
    if side > (longest_side or side):
        raise ConfigError(f"max_image_size {longest_side}: a picture takes at least {side} in this family")
    if tokens(count) > (most_tokens or tokens(count)):
        raise ConfigError(f"image_tokens {most_tokens}: a picture takes at least {tokens(count)} tokens in this family")
    image_processor.size = {"longest_edge": count * side}
    return tokens(count)


def _llava_arrays(processor: Any, images: list[PIL.Image.Image], in_bytes: bool) -> dict[str, NDArray[Any]]:  # noqa: ARG001
    """Return the squares of pictures: of a single one several, of each of many one."""
    made = processor(images=[images], return_tensors="pt")
    return {"pixel_values": made["pixel_values"].flatten(0, 1).numpy(), "image_sizes": made["image_sizes"].numpy()}


def _llava_placeholder(processor: Any, arrays: Mapping[str, NDArray[Any]], place: int) -> str:
    sizes = arrays["image_sizes"]
    inputs = {"pixel_values": arrays["pixel_values"][None], "image_sizes": sizes, "batch_num_images": [len(sizes)]}
    return str(processor.replace_image_token(inputs, place))


def _llava_pictures(network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:
    counts = torch.from_numpy(arrays["image_sizes"].lengths)
    return {**flat_pictures(network, arrays), "batch_num_images": counts}


def _most_of_llava(processor: Any, most_tokens: int | None, longest_side: int | None) -> int:
    """Return what the picture of most tokens takes, which can't be changed."""
    side = processor.image_processor.size
    side = side["height"] if "height" in side else side["shortest_edge"]
    grids = [(height // side, width // side) for height, width in processor.image_processor.image_grid_pinpoints]
    tokens = max(_llava_tokens(*grid, processor.num_image_tokens, processor.vision_aspect_ratio) for grid in grids)
    _refuse_limit(tokens, most_tokens, longest_side)
    return tokens


def _llava_tokens(height: int, width: int, square: int, most_squares: str) -> int:
    """Return the tokens of a picture of so many squares, and of the whole of it: with one at the end of each line.

    Args:
        square: Tokens of a square.
        most_squares: What a picture of more is shrunk to, as the config says it: anyres_max_9.
    """
    side = math.isqrt(square)
    height, width = height * side, width * side
    ratio = math.sqrt(height * width / (int(most_squares.removeprefix("anyres_max_")) * side**2))
    if ratio > 1.1:
        height, width = int(height // ratio), int(width // ratio)
    return square + height * (width + 1)


def _llava_blank(network: Any, most_tokens: int) -> tuple[dict[str, NDArray[Any]], int]:  # noqa: ARG001
    """Return the picture of most squares: where it is shrunk, its tokens cost most."""
    config, side = network.config, network.config.vision_config.image_size
    size = max(config.image_grid_pinpoints, key=math.prod)
    height, width = (each // side for each in size)
    arrays = {"pixel_values": np.zeros((height * width + 1, 3, side, side), dtype=np.float32)}
    tokens = _llava_tokens(height, width, square_tokens(config), config.vision_aspect_ratio)
    return arrays | {"image_sizes": np.array([size])}, tokens


def _llava_hidden_states(network: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Run both stacks; how pictures lie in their squares is read back from the device."""
    x_RTH = network.get_input_embeddings()(inputs["input_ids"].long())
    if "pixel_values" in inputs:
        layout = {name: inputs[name].tolist() for name in ("image_sizes", "batch_num_images")}
        seen = network.get_image_features(inputs["pixel_values"], **layout).pooler_output
        x_RTH = put_in_places(x_RTH, inputs["image_places"], torch.cat(seen))
    hidden_RTH: Tensor = network.language_model(
        inputs_embeds=x_RTH, attention_mask=inputs["attention_mask"]
    ).last_hidden_state
    return hidden_RTH


def _prepare_llava(network: Any) -> None:
    """Leave out of training what stands behind the layer whose hidden states are taken."""
    network.vision_tower.post_layernorm.requires_grad_(requires_grad=False)


def siglip(name: str, **own: Any) -> VisionLanguageFamily:
    """Return a family of pictures that are one square each."""
    parts = {"vision": "vision_tower", "merger": ("multi_modal_projector",), "language": "language_model"}
    known = {"limit_images": _fixed_tokens, "pictures": _squares, "blank": _blank_square}
    return VisionLanguageFamily(name=name, most_image_tokens=None, **(parts | known | own))


def idefics3(name: str) -> VisionLanguageFamily:
    """Return a family of pictures that are cut into squares, each picture whole behind its own."""
    return siglip(
        name,
        vision="vision_model",
        merger=("connector",),
        language="text_model",
        limit_images=_limit_squares,
        hidden_states=_idefics3_hidden_states,
        blank=_idefics3_blank,
        process=_idefics3_arrays,
        placeholder=_idefics3_placeholder,
    )


def llava_onevision(name: str) -> VisionLanguageFamily:
    """Return the family whose pictures lie in the squares of a grid that suits their shape."""
    return siglip(
        name,
        merger=("multi_modal_projector", "image_newline"),
        limit_images=_most_of_llava,
        pictures=_llava_pictures,
        hidden_states=_llava_hidden_states,
        blank=_llava_blank,
        prepare=_prepare_llava,
        process=_llava_arrays,
        placeholder=_llava_placeholder,
    )


def gemma3(name: str) -> VisionLanguageFamily:
    """Return the family in which tokens of one picture see each other."""
    return siglip(name, hidden_states=_gemma3_hidden_states, causal=False)


def paligemma(name: str) -> VisionLanguageFamily:
    """Return the family in which every token sees all others."""
    return siglip(name, hidden_states=_paligemma_hidden_states, wording=_prefix_words, causal=False)
