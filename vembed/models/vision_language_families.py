"""What differs between families of vision-language models; all else is `VisionLanguageEncoder`'s.

A family is a row of FAMILIES, by the model_type of config.json. A row says how an item is put into words, how large
pictures may be, what a call needs beside the pixels, and how the network is run.

Shape legend: R rows of a call, T tokens of a row, P patches of all pictures of the call, H hidden dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import PIL.Image
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Ragged
    from vembed.models.pooling import PoolingMode

LENGTHS = frozenset({"vision_cu_seqlens", "vision_cu_window_seqlens"})
"""Inputs that attention may read by value: the plan's have values."""

LAYOUT = "vision_"
"""Begins the names of the inputs that say how pictures lie in a call; the rest of a name is transformers' own."""


@dataclass(frozen=True, slots=True)
class VisionLanguageFamily:
    """What members of a family have in common."""

    name: str  # for the plan
    vision: str  # module of the network that sees pictures
    merger: tuple[str, ...]  # modules that turn patches into tokens of the language model
    language: str  # the language model
    most_image_tokens: int | None  # of one picture, unless the user says otherwise; None: as the image processor says
    limit_images: Callable[
        [Any, int | None, int | None], int
    ]  # (processor, most tokens, longest side): most of a picture
    pictures: Callable[
        [Any, Mapping[str, Ragged]], dict[str, Tensor]
    ]  # (network, arrays of R rows) -> inputs of a call
    hidden_states: Callable[[Any, dict[str, Tensor]], Tensor]  # (network, inputs of a call) -> (R, T, H)
    positions: Callable[[Any, NDArray[np.int32], Mapping[str, NDArray[Any]]], NDArray[np.int32]] | None = None
    # (network, ids (T,), arrays of the row) -> positions in time, height and width (T, 3); None: 0, 1, 2, ...
    prepare: Callable[[Any], None] = lambda network: None  # noqa: ARG005  # once, when the network is there
    wording: Callable[[Any, str, int, str], str] | None = None
    # (processor, instruction, number of pictures, text) -> what is read, with a placeholder for each picture; None: a
    # conversation by the processor's chat template
    process: Callable[[Any, list[PIL.Image.Image], bool], dict[str, NDArray[Any]]] = (
        lambda processor, images, in_bytes: run_processor(processor, images, in_bytes=in_bytes)
    )  # (image processor, pictures of an item, whether in bytes) -> arrays
    placeholder: Callable[[Any, Mapping[str, NDArray[Any]], int], str] = lambda processor, arrays, place: str(
        processor.replace_image_token(arrays, place)
    )  # (processor, arrays of the item, which of its pictures) -> what stands for each of its tokens
    causal: bool = True  # whether every token sees those before it and no other
    blank: Callable[[Any, int], tuple[dict[str, NDArray[Any]], int]] | None = None
    # (network, most tokens) -> arrays of a square picture and its tokens, for the plan; None: a blank picture's
    taps: str = ""  # attribute of `vision`: the layers of which the language model's first layers take vectors, too
    patches: int = 1  # of a token of a picture
    flattest: int | None = None  # most that the longer side of a picture may be of the shorter one
    pooling: PoolingMode = "lasttoken"
    instruction: str = ""  # system message of every item, unless the user says otherwise
    ends_instruction: bool = (
        False  # whether an instruction ends with punctuation: a full stop is added where it doesn't
    )


def flat_pictures(network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:  # noqa: ARG001
    """Lay the pictures of all rows one after the other."""
    return {name: torch.from_numpy(ragged.values) for name, ragged in arrays.items()}


def whole_network(network: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Run a network by its own forward, which waits for the device where it looks into its inputs."""
    own = {name: tensor for name, tensor in inputs.items() if name not in ("positions", "image_places", "lengths")}
    hidden_RTH: Tensor = network(**own).last_hidden_state
    return hidden_RTH


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
        x_RTH = x_RTH.flatten(0, 1).index_copy(0, places, seen.pooler_output.to(x_RTH.dtype)).view_as(x_RTH)
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


def _gemma3_pictures(network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:  # noqa: ARG001
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
        seen_PH = network.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1).to(x_RTH.dtype)
        x_RTH = x_RTH.flatten(0, 1).index_copy(0, inputs["image_places"], seen_PH).view_as(x_RTH)
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


def _idefics3_pictures(network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:  # noqa: ARG001
    return {"pixel_values": torch.from_numpy(arrays["pixel_values"].values)[None]}


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
    size = processor.image_processor.size
    side = size["height"] if "height" in size else size["shortest_edge"]
    shapes = processor.image_processor.image_grid_pinpoints
    tokens = max(processor._get_number_of_features(*shape, side, side) for shape in shapes)
    _refuse_limit(tokens, most_tokens, longest_side)
    return int(tokens)


def _prepare_llava(network: Any) -> None:
    """Leave out of training what stands behind the layer whose hidden states are taken."""
    network.vision_tower.post_layernorm.requires_grad_(requires_grad=False)


def _siglip(name: str, **own: Any) -> VisionLanguageFamily:
    """Return a family of a SigLIP, a projector and a language model, run by transformers' own forward."""
    parts = {"vision": "vision_tower", "merger": ("multi_modal_projector",), "language": "language_model"}
    known = {"limit_images": _fixed_tokens, "pictures": flat_pictures, "hidden_states": whole_network}
    return VisionLanguageFamily(name=name, most_image_tokens=None, **(parts | known | own))


def _idefics3(name: str) -> VisionLanguageFamily:
    return _siglip(
        name,
        vision="vision_model",
        merger=("connector",),
        language="text_model",
        limit_images=_limit_squares,
        pictures=_idefics3_pictures,
        process=_idefics3_arrays,
        placeholder=_idefics3_placeholder,
    )


def _qwen(name: str, **own: Any) -> VisionLanguageFamily:
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
        patches=4,
        **own,
    )


FAMILIES: Mapping[str, VisionLanguageFamily] = {
    "qwen2_vl": _qwen("Qwen2-VL", merger=("visual.merger",), most_image_tokens=1280),
    "qwen2_5_vl": _qwen("Qwen2.5-VL", merger=("visual.merger",), most_image_tokens=1280),
    "qwen3_vl": _qwen(
        "Qwen3-VL",
        merger=("visual.merger", "visual.deepstack_merger_list"),
        taps="deepstack_visual_indexes",
        most_image_tokens=1800,
        instruction="Represent the user's input.",
        ends_instruction=True,
    ),
    "idefics3": _idefics3("Idefics3"),
    "smolvlm": _idefics3("SmolVLM"),
    "llava_onevision": _siglip(
        "LLaVA-OneVision",
        merger=("multi_modal_projector", "image_newline"),
        limit_images=_most_of_llava,
        pictures=_llava_pictures,
        prepare=_prepare_llava,
        process=_llava_arrays,
        placeholder=_llava_placeholder,
    ),
    "gemma3": _siglip("Gemma3", pictures=_gemma3_pictures, hidden_states=_gemma3_hidden_states, causal=False),
    "paligemma": _siglip("PaliGemma", hidden_states=_paligemma_hidden_states, wording=_prefix_words, causal=False),
}
"""A new family's row goes here. `flat_pictures` and `whole_network` serve one that transformers runs as it is."""
