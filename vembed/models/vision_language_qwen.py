"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size, cut into patches that lie end to end.

Shape legend: R rows of a call, T tokens of a row, P patches of all pictures of the call, H hidden dim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from vembed.errors import ConfigError
from vembed.models import attention
from vembed.models.pictures import run_processor
from vembed.models.vision_language_family import VisionLanguageFamily, flat_pictures, put_in_places

if TYPE_CHECKING:
    from collections.abc import Mapping

    import PIL.Image
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Ragged

LAYOUT = "vision_"
"""Begins the names of the inputs that say how pictures lie in a call; the rest of a name is transformers' own."""


def _limit_area(processor: Any, most_tokens: int | None, longest_side: int | None) -> int:
    """Bound the area of a picture: 4 tokens at least, each a square of merged patches."""
    image_processor = processor.image_processor
    side = image_processor.patch_size * image_processor.merge_size
    if most_tokens is None:
        most_tokens = int(image_processor.size["longest_edge"]) // side**2
        if longest_side is None:
            return most_tokens
    if most_tokens < 4:
        raise ConfigError(f"image_tokens {most_tokens}: a picture takes at least 4 tokens in this family")
    if longest_side is not None:
        if longest_side < 2 * side:
            raise ConfigError(f"max_image_size {longest_side}: a picture takes at least {2 * side} in this family")
        most_tokens = min(most_tokens, longest_side**2 // side**2)
    image_processor.size = {"shortest_edge": 4 * side**2, "longest_edge": most_tokens * side**2}
    return most_tokens


def _qwen_arrays(processor: Any, images: list[PIL.Image.Image], in_bytes: bool) -> dict[str, NDArray[Any]]:
    """Return patches of pictures, within the bound: a flat picture's own shape would take more tokens than it."""
    return run_processor(processor, [_within_bound(processor, image) for image in images], in_bytes=in_bytes)


def _within_bound(processor: Any, image: PIL.Image.Image) -> PIL.Image.Image:
    """Shorten a picture that the processor would give too many tokens, because each side has one at least."""
    merge, side = processor.merge_size**2, processor.patch_size * processor.merge_size
    most = int(processor.size["longest_edge"]) // side**2
    if processor.get_number_of_image_patches(image.height, image.width) <= most * merge:
        return image
    short = max(1, round(math.sqrt(most * min(image.size) / max(image.size))))
    sides = most // short * side, short * side
    return image.resize(sides if image.width > image.height else sides[::-1])


def _qwen_pictures(network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:
    """Lay patches one after the other, and compute beside them what the network would read back from the device."""
    inputs = flat_pictures(network, arrays)
    grid_N3, config = inputs["image_grid_thw"], network.config.vision_config
    visual, merge = network.visual, config.spatial_merge_size
    layout = {
        "position_ids": get_vision_position_ids(grid_N3, merge),
        "cu_seqlens": get_vision_cu_seqlens(grid_N3),
    }
    if hasattr(visual, "num_grid_per_side"):  # a learned table of positions, resampled to each picture's grid
        layout["interp_indices"], layout["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid_N3,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    if hasattr(config, "window_size"):
        layout["window_index"], layout["cu_window_seqlens"] = get_vision_window_index(
            grid_N3, spatial_merge_size=merge, window_size=config.window_size, patch_size=config.patch_size
        )
        layout["max_window_seqlen"] = _as_shape(layout["cu_window_seqlens"])
    layout["max_seqlen"] = _as_shape(layout["cu_seqlens"])
    return inputs | {LAYOUT + name: tensor for name, tensor in layout.items()}


def _as_shape(starts_S1: Tensor) -> Tensor:
    """Return a tensor that holds nothing, and the longest segment in its shape: known on a device without a wait."""
    return torch.empty(0, int(starts_S1.diff().max()), dtype=torch.int32)


def _qwen_hidden_states(network: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Run both stacks of a Qwen model: tokens of pictures take the places of their placeholders."""
    language = network.language_model
    x_RTH = language.embed_tokens(inputs["input_ids"].long())
    extra: dict[str, Any] = {}
    if "pixel_values" in inputs:
        layout: dict[str, Any] = {
            name.removeprefix(LAYOUT): each for name, each in inputs.items() if name.startswith(LAYOUT)
        }
        layout |= {name: layout[name].shape[1] for name in ("max_seqlen", "max_window_seqlen") if name in layout}
        seen = network.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], **layout)
        places = inputs["image_places"]
        x_RTH = put_in_places(x_RTH, places, seen.pooler_output)
        if "positions" in inputs:
            extra["position_ids"] = inputs["positions"].permute(2, 0, 1).long()
        if getattr(seen, "deepstack_features", None):
            extra |= {"visual_pos_masks": places, "deepstack_visual_embeds": seen.deepstack_features}
    hidden_RTH: Tensor = language(
        inputs_embeds=x_RTH, attention_mask=inputs["attention_mask"], **extra
    ).last_hidden_state
    return hidden_RTH


def _qwen_blank(network: Any, most_tokens: int) -> tuple[dict[str, NDArray[Any]], int]:
    """Return a square of at most 8 x 8 tokens, which fills whole windows."""
    config = network.config.vision_config
    side = min(8, math.isqrt(most_tokens))
    patches = (side * config.spatial_merge_size) ** 2
    values = 3 * config.temporal_patch_size * config.patch_size**2
    grid = np.array([[1, side * config.spatial_merge_size, side * config.spatial_merge_size]])
    return {"pixel_values": np.zeros((patches, values), dtype=np.uint8), "image_grid_thw": grid}, side**2


def _qwen_positions(network: Any, ids_T: NDArray[np.int32], arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int32]:
    """Return what the network itself computes of one row."""
    ids_1T = torch.from_numpy(ids_T.astype(np.int64))[None]
    kinds_1T = (ids_1T == network.config.image_token_id).int()
    grid_N3 = torch.from_numpy(arrays["image_grid_thw"])
    positions_31T, _ = network.get_rope_index(ids_1T, mm_token_type_ids=kinds_1T, image_grid_thw=grid_N3)
    return positions_31T[:, 0].T.numpy().astype(np.int32)  # type: ignore[no-any-return]


def _prepare_qwen(network: Any) -> None:
    """Let both stacks attend, and take pictures at several depths, without waiting for the device."""
    attention.spare_splits(network.visual)
    if hasattr(network.language_model, "_deepstack_process"):
        network.language_model._deepstack_process = _add_at


def _add_at(x_RTH: Tensor, places: Tensor, seen: Tensor) -> Tensor:
    """Add vectors of pictures at the places of their tokens."""
    return x_RTH.flatten(0, 1).index_add(0, places, seen.to(x_RTH.dtype)).view_as(x_RTH)


def qwen(name: str, **own: Any) -> VisionLanguageFamily:
    """Return a family whose network sees patches of pictures of any size."""
    return VisionLanguageFamily(
        name=name,
        vision="visual",
        language="language_model",
        limit_images=_limit_area,
        pictures=_qwen_pictures,
        process=_qwen_arrays,
        flattest=200,
        hidden_states=_qwen_hidden_states,
        positions=_qwen_positions,
        prepare=_prepare_qwen,
        blank=_qwen_blank,
        **own,
    )
