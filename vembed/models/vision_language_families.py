"""Families of vision-language models: the contract of one, and those that train here.

A family states in one class how its items are put into words, how large pictures may be, what a call needs beside the
pixels, and how the network is run; all else is `VisionLanguageEncoder`'s. Facts are class attributes; of the methods
most families override some of these five:

| Method | Runs | Says |
|---|---|---|
| `limit_images` | once, when the model is loaded | the most tokens that a picture takes, after setting that limit |
| `process` | on the CPU, once an item | the arrays that its pictures become |
| `placeholder` | on the CPU, once a picture | the text that stands for each of its tokens |
| `pictures` | on the CPU, once a call | the inputs that the pictures of all rows become |
| `hidden_states` | on the device, twice a chunk under gradient caching | the hidden states of all tokens |

The defaults are those of pictures that are one square of one size each. `register_family` adds a family of your own;
ours stand in `FAMILIES` of vembed/registry.py.

Shape legend: R rows of a call, T tokens of a row, P tokens of all pictures of the call, N its pictures, S segments of
its patches that see each other, H hidden dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)
from typing_extensions import override

from vembed.errors import ConfigError
from vembed.models import attention
from vembed.models.pictures import run_processor, side_of
from vembed.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import PIL.Image
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Ragged
    from vembed.models.pooling import PoolingMode

    Arrays = Mapping[str, NDArray[Any]]  # of an item's pictures, by the names of its image processor

UNTRAINED = frozenset({"llava", "llava_next"})
"""Types of models that are refused by name: the text encoder would take them for one of texts."""

FamilyClass = TypeVar("FamilyClass", bound="type[VisionLanguageFamily]")


def register_family(family: FamilyClass) -> FamilyClass:
    """Let vision-language models be trained by a family of your own. Usable as a decorator.

    Args:
        family: Its `model_type` is that of the models' config.json.

    Raises:
        ConfigError: It lacks something that every family states, or there is such a family.
    """
    missing = [fact for fact in ("model_type", "name") if not getattr(family, fact, "")]
    missing += sorted(family.__abstractmethods__)
    if missing:
        raise ConfigError(f"family {family.__name__}: state {', '.join(missing)} in the class")
    FAMILIES.register(family.model_type, family, module=family.__module__)
    return family


class VisionLanguageFamily(ABC):
    """Facts of a family, and how it reads pictures and runs its network. It has no state of its own."""

    model_type: ClassVar[str]  # of config.json
    name: ClassVar[str]  # for people

    # Modules of the network, which has no head.
    vision: ClassVar[str] = "vision_tower"
    merger: ClassVar[tuple[str, ...]] = ("multi_modal_projector",)  # turns patches into tokens of the language model
    language: ClassVar[str] = "language_model"
    taps: ClassVar[str] = ""  # attribute of `vision`: its layers whose vectors the language model's first layers add
    causal: ClassVar[bool] = True  # every token sees those before it and no other

    # How items are read, unless the user or a model's folder says otherwise.
    most_image_tokens: ClassVar[int | None] = None  # of one picture; None: as the image processor says
    flattest: ClassVar[int | None] = None  # most that the longer side of a picture may be of the shorter one
    needs_chat_template: ClassVar[bool] = True  # `words` lays items out by it
    pads_count: ClassVar[bool] = False  # `words` puts padding tokens into a text, and they give vectors
    instruction: ClassVar[str] = ""  # system message of every item
    ends_instruction: ClassVar[bool] = False  # a full stop is added to an instruction without punctuation at its end
    pooling: ClassVar[PoolingMode] = "lasttoken"

    read_by_value: ClassVar[frozenset[str]] = frozenset()  # inputs that the network reads on the host: never on "meta"

    def limit_images(self, processor: Any, most_tokens: int | None, longest_side: int | None) -> int:
        """Bound pictures by setting the processor, and return the most tokens that one takes.

        Args:
            most_tokens: Of a picture; None leaves it to the processor.
            longest_side: In pixels; None without such a limit.

        Raises:
            ConfigError: The family's pictures can't be so small, or have one size.
        """
        tokens = int(processor.image_seq_length)
        _refuse_limits(tokens, most_tokens, longest_side)
        return tokens

    def process(self, processor: Any, images: list[PIL.Image.Image], *, in_bytes: bool) -> dict[str, NDArray[Any]]:
        """Return the arrays of an item's pictures; those of several blocks of pictures are laid end to end.

        Args:
            processor: The image processor.
            in_bytes: Leave the last step, from bytes to float32, to the device.
        """
        return run_processor(processor, images, in_bytes=in_bytes)

    def placeholder(self, processor: Any, arrays: Arrays, index: int) -> str:
        """Return the text that stands for each token of one of an item's pictures."""
        return str(processor.replace_image_token(arrays, index))

    def words(self, processor: Any, instruction: str, num_pictures: int, text: str) -> str:
        """Return an item as it is read, with one placeholder for each picture: a conversation by the chat template."""
        content: list[dict[str, str]] = [{"type": "image"}] * num_pictures
        if text:
            content = [*content, {"type": "text", "text": text}]
        system = {"role": "system", "content": [{"type": "text", "text": instruction}]}
        messages = [*([system] if instruction else []), {"role": "user", "content": content}]
        words: str = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return words

    def positions(self, network: Any, ids_T: NDArray[np.int32], arrays: Arrays) -> NDArray[np.int32] | None:  # noqa: ARG002
        """Return a row's positions in time, height and width, (T, 3); None counts tokens: 0, 1, 2, ..."""
        return None

    def pictures(self, network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return what the pictures of R rows become in a call."""
        return {"pixel_values": torch.from_numpy(arrays["pixel_values"].values)}

    @abstractmethod
    def hidden_states(self, network: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Run the network, and return the hidden states of its last layer, (R, T, H).

        Args:
            inputs: `input_ids` and `attention_mask` (R, T), and where the call has pictures those of `pictures`, with
                pixels in the network's type, and `image_places`, where their tokens are in the flattened ids, (P,).
        """

    def prepare(self, network: Any) -> None:  # noqa: B027
        """Change a network that was just loaded; by default nothing of it."""

    def blank(self, network: Any, most_tokens: int) -> tuple[dict[str, NDArray[Any]], int]:  # noqa: ARG002
        """Return the arrays of a square picture and its tokens, for the plan, which has no processor to ask."""
        side = side_of(network.config.vision_config.image_size)
        return {"pixel_values": np.zeros((1, 3, side, side), dtype=np.uint8)}, square_tokens(network.config)


def put_in_places(x_RTH: Tensor, places_P: Tensor, seen_PH: Tensor) -> Tensor:
    """Put what was seen of pictures in the places of their tokens."""
    return x_RTH.flatten(0, 1).index_copy(0, places_P, seen_PH.to(x_RTH.dtype)).view_as(x_RTH)


def end_to_end(arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:
    """Lay the arrays of all rows one after the other, without a copy."""
    return {name: torch.from_numpy(ragged.values) for name, ragged in arrays.items()}


def square_tokens(config: Any) -> int:
    """Return the tokens of a square by the config of its network."""
    patches = (side_of(config.vision_config.image_size) // side_of(config.vision_config.patch_size)) ** 2
    return int(getattr(config, "mm_tokens_per_image", patches // getattr(config, "scale_factor", 1) ** 2))


def _refuse_limits(tokens: int, most_tokens: int | None, longest_side: int | None) -> None:
    if longest_side is not None or (most_tokens is not None and most_tokens != tokens):
        raise ConfigError(
            f"a picture takes up to {tokens} tokens in this family, whatever its size; leave image_tokens and "
            "max_image_size out"
        )


# --- Qwen: pictures of any size, cut into patches that lie end to end -------------------------------------------------


LAYOUT = "vision_"
"""Begins the names of the inputs that say how pictures lie in a call; the rest of a name is transformers' own."""


class Qwen2VL(VisionLanguageFamily):
    """Qwen2-VL. A token stands for a square of merged patches, so a picture costs its area."""

    model_type = "qwen2_vl"
    name = "Qwen2-VL"
    vision = "visual"
    merger: ClassVar[tuple[str, ...]] = ("visual.merger",)
    most_image_tokens: ClassVar[int | None] = 1280
    flattest = 200
    read_by_value = frozenset({"vision_cu_seqlens", "vision_cu_window_seqlens"})

    @override
    def limit_images(self, processor: Any, most_tokens: int | None, longest_side: int | None) -> int:
        image_processor = processor.image_processor
        side = image_processor.patch_size * image_processor.merge_size  # of a token's square, in pixels
        if most_tokens is None:
            most_tokens = int(image_processor.size["longest_edge"]) // side**2  # both edges are areas, in pixels
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

    @override
    def process(self, processor: Any, images: list[PIL.Image.Image], *, in_bytes: bool) -> dict[str, NDArray[Any]]:
        # The processor keeps the shape of a picture and gives each side one token at least: a flat one would take more
        # than the bound. Such a picture is squeezed to the sides that fit.
        merge, side = processor.merge_size**2, processor.patch_size * processor.merge_size
        most = int(processor.size["longest_edge"]) // side**2
        within = []
        for image in images:
            if processor.get_number_of_image_patches(image.height, image.width) <= most * merge:
                within.append(image)
                continue
            short = max(1, round(math.sqrt(most * min(image.size) / max(image.size))))  # tokens along the shorter side
            sides = most // short * side, short * side
            within.append(image.resize(sides if image.width > image.height else sides[::-1]))
        return run_processor(processor, within, in_bytes=in_bytes)

    @override
    def positions(self, network: Any, ids_T: NDArray[np.int32], arrays: Arrays) -> NDArray[np.int32] | None:
        # As the network itself counts them: tokens of a picture by row and column of its grid, words in a line. It
        # would find the placeholders on the device, and wait for it.
        ids_1T = torch.from_numpy(ids_T.astype(np.int64))[None]
        kinds_1T = (ids_1T == network.config.image_token_id).int()
        grid_N3 = torch.from_numpy(arrays["image_grid_thw"])
        positions_31T, _ = network.get_rope_index(ids_1T, mm_token_type_ids=kinds_1T, image_grid_thw=grid_N3)
        return positions_31T[:, 0].T.numpy().astype(np.int32)  # type: ignore[no-any-return]

    @override
    def pictures(self, network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:
        # Patches lie one after the other; beside them stands what the network would read back from the device: where
        # each picture and each window begins, and where a patch is in its grid.
        inputs = end_to_end(arrays)
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

        def longest(starts_S1: Tensor) -> Tensor:  # in the shape of a tensor of no values: known without a wait
            return torch.empty(0, int(starts_S1.diff().max()), dtype=torch.int32)

        if hasattr(config, "window_size"):
            layout["window_index"], layout["cu_window_seqlens"] = get_vision_window_index(
                grid_N3, spatial_merge_size=merge, window_size=config.window_size, patch_size=config.patch_size
            )
            layout["max_window_seqlen"] = longest(layout["cu_window_seqlens"])
        layout["max_seqlen"] = longest(layout["cu_seqlens"])
        return inputs | {LAYOUT + name: tensor for name, tensor in layout.items()}

    @override
    def hidden_states(self, network: Any, inputs: dict[str, Tensor]) -> Tensor:
        # transformers' own forward looks for the placeholders and compares counts, each of which waits for the device:
        # both stacks are called here, with the places that `collate` knew.
        language = network.language_model
        x_RTH = language.embed_tokens(inputs["input_ids"].long())
        extra: dict[str, Any] = {}
        if "pixel_values" in inputs:
            layout: dict[str, Any] = {
                name.removeprefix(LAYOUT): tensor for name, tensor in inputs.items() if name.startswith(LAYOUT)
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

    @override
    def prepare(self, network: Any) -> None:
        # Attention over the segments of patches would be split by lengths that are read from the device.
        attention.spare_splits(network.visual)

    @override
    def blank(self, network: Any, most_tokens: int) -> tuple[dict[str, NDArray[Any]], int]:
        # At most 8 x 8 tokens, which fills whole windows: the plan scales from there.
        config = network.config.vision_config
        side = min(8, math.isqrt(most_tokens))
        patches = side * config.spatial_merge_size
        values = 3 * config.temporal_patch_size * config.patch_size**2
        grid = np.array([[1, patches, patches]])
        return {"pixel_values": np.zeros((patches**2, values), dtype=np.uint8), "image_grid_thw": grid}, side**2


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL: most of its layers let patches see those of their window alone."""

    model_type = "qwen2_5_vl"
    name = "Qwen2.5-VL"


class Qwen3VL(Qwen2VL):
    """Qwen3-VL: the first layers of the language model add vectors of pictures from several depths."""

    model_type = "qwen3_vl"
    name = "Qwen3-VL"
    merger = ("visual.merger", "visual.deepstack_merger_list")
    taps = "deepstack_visual_indexes"
    most_image_tokens = 1800
    instruction = "Represent the user's input."
    ends_instruction = True

    @override
    def prepare(self, network: Any) -> None:
        super().prepare(network)

        # transformers adds by a mask, whose tokens it counts on the device, and waits for it.
        def add_at(x_RTH: Tensor, places_P: Tensor, seen_PH: Tensor) -> Tensor:
            return x_RTH.flatten(0, 1).index_add(0, places_P, seen_PH.to(x_RTH.dtype)).view_as(x_RTH)

        network.language_model._deepstack_process = add_at


# --- A SigLIP, a projector and a language model: pictures are squares of one size, one or several each ----------------


class Idefics3(VisionLanguageFamily):
    """Idefics3. A picture is cut into k x k squares, and the whole of it stands behind them as one more."""

    model_type = "idefics3"
    name = "Idefics3"
    vision = "vision_model"
    merger = ("connector",)
    language = "text_model"

    @override
    def limit_images(self, processor: Any, most_tokens: int | None, longest_side: int | None) -> int:
        image_processor, length = processor.image_processor, int(processor.image_seq_len)
        side = int(image_processor.max_image_size["longest_edge"])  # of a square, in pixels
        count = int(image_processor.size["longest_edge"]) // side if image_processor.do_image_splitting else 1

        def tokens(count: int) -> int:
            # The whole picture stands between two tokens, behind a third that says so. A square has two before it, and
            # a line break ends each row of squares and all of them.
            return length + 3 + (count**2 * (length + 2) + count + 1 if count > 1 else 0)

        while count > 1 and (
            tokens(count) > (most_tokens or tokens(count)) or count * side > (longest_side or count * side)
        ):
            count -= 1
        if side > (longest_side or side):
            raise ConfigError(f"max_image_size {longest_side}: a picture takes at least {side} in this family")
        if tokens(count) > (most_tokens or tokens(count)):
            raise ConfigError(
                f"image_tokens {most_tokens}: a picture takes at least {tokens(count)} tokens in this family"
            )
        image_processor.size = {"longest_edge": count * side}
        return tokens(count)

    @override
    def process(self, processor: Any, images: list[PIL.Image.Image], *, in_bytes: bool) -> dict[str, NDArray[Any]]:
        # Squares of all pictures lie end to end; rows and columns say how many each picture has.
        made = processor(images=[images], return_tensors="pt", return_row_col_info=True)
        counts = {name: np.asarray(made[name], dtype=np.int32).reshape(-1) for name in ("rows", "cols")}
        return {"pixel_values": made["pixel_values"][0].numpy(), **counts}

    @override
    def placeholder(self, processor: Any, arrays: Arrays, index: int) -> str:
        return str(processor.replace_image_token({name: [arrays[name].tolist()] for name in ("rows", "cols")}, index))

    @override
    def hidden_states(self, network: Any, inputs: dict[str, Tensor]) -> Tensor:
        x_RTH = network.get_input_embeddings()(inputs["input_ids"].long())
        if "pixel_values" in inputs:
            # The squares have no padding. transformers looks for some, and waits for the device.
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

    @override
    def blank(self, network: Any, most_tokens: int) -> tuple[dict[str, NDArray[Any]], int]:
        arrays, tokens = super().blank(network, most_tokens)
        return {"pixel_values": arrays["pixel_values"].astype(np.float32)}, tokens  # as its processor makes them


class SmolVLM(Idefics3):
    """SmolVLM, which reads pictures as Idefics3 does."""

    model_type = "smolvlm"
    name = "SmolVLM"


class LlavaOneVision(VisionLanguageFamily):
    """LLaVA-OneVision. A picture lies in the squares of a grid that suits its shape, the whole of it as one more.

    A single picture of an item is cut up so; of several each is one square.
    """

    model_type = "llava_onevision"
    name = "LLaVA-OneVision"
    merger = ("multi_modal_projector", "image_newline")
    read_by_value = frozenset({"image_sizes", "batch_num_images"})

    @override
    def limit_images(self, processor: Any, most_tokens: int | None, longest_side: int | None) -> int:
        side = processor.image_processor.size
        side = side["height"] if "height" in side else side["shortest_edge"]
        grids = [(height // side, width // side) for height, width in processor.image_processor.image_grid_pinpoints]
        tokens = max(grid_tokens(*grid, processor.num_image_tokens, processor.vision_aspect_ratio) for grid in grids)
        _refuse_limits(tokens, most_tokens, longest_side)
        return tokens

    @override
    def process(self, processor: Any, images: list[PIL.Image.Image], *, in_bytes: bool) -> dict[str, NDArray[Any]]:
        made = processor(images=[images], return_tensors="pt")
        return {"pixel_values": made["pixel_values"].flatten(0, 1).numpy(), "image_sizes": made["image_sizes"].numpy()}

    @override
    def placeholder(self, processor: Any, arrays: Arrays, index: int) -> str:
        sizes = arrays["image_sizes"]
        inputs = {"pixel_values": arrays["pixel_values"][None], "image_sizes": sizes, "batch_num_images": [len(sizes)]}
        return str(processor.replace_image_token(inputs, index))

    @override
    def pictures(self, network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:
        # How many pictures each row has: a single one has the squares of a grid.
        return {**end_to_end(arrays), "batch_num_images": torch.from_numpy(arrays["image_sizes"].lengths)}

    @override
    def hidden_states(self, network: Any, inputs: dict[str, Tensor]) -> Tensor:
        x_RTH = network.get_input_embeddings()(inputs["input_ids"].long())
        if "pixel_values" in inputs:
            # How pictures lie in their squares is read back from the device.
            layout = {name: inputs[name].tolist() for name in ("image_sizes", "batch_num_images")}
            seen = network.get_image_features(inputs["pixel_values"], **layout).pooler_output
            x_RTH = put_in_places(x_RTH, inputs["image_places"], torch.cat(seen))
        hidden_RTH: Tensor = network.language_model(
            inputs_embeds=x_RTH, attention_mask=inputs["attention_mask"]
        ).last_hidden_state
        return hidden_RTH

    @override
    def prepare(self, network: Any) -> None:
        # It stands behind the layer whose hidden states are taken, and would never train.
        network.vision_tower.post_layernorm.requires_grad_(requires_grad=False)

    @override
    def blank(self, network: Any, most_tokens: int) -> tuple[dict[str, NDArray[Any]], int]:
        # The picture of most squares: where it is shrunk, its tokens cost most.
        config, side = network.config, network.config.vision_config.image_size
        size = max(config.image_grid_pinpoints, key=math.prod)
        height, width = (pixels // side for pixels in size)
        arrays = {"pixel_values": np.zeros((height * width + 1, 3, side, side), dtype=np.float32)}
        tokens = grid_tokens(height, width, square_tokens(config), config.vision_aspect_ratio)
        return arrays | {"image_sizes": np.array([size])}, tokens


def grid_tokens(height: int, width: int, square: int, most_squares: str) -> int:
    """Return the tokens of LLaVA-OneVision's picture of so many squares, and of the whole of it.

    Args:
        square: Tokens of a square.
        most_squares: What a picture of more is shrunk to, as the config says it: anyres_max_9.
    """
    side = math.isqrt(square)
    height, width = height * side, width * side
    ratio = math.sqrt(height * width / (int(most_squares.removeprefix("anyres_max_")) * side**2))
    if ratio > 1.1:
        height, width = int(height // ratio), int(width // ratio)
    return square + height * (width + 1)  # one token at the end of each line


class PaliGemma(VisionLanguageFamily):
    """PaliGemma, in which every token sees all others."""

    model_type = "paligemma"
    name = "PaliGemma"
    causal = False
    needs_chat_template = False

    @override
    def words(self, processor: Any, instruction: str, num_pictures: int, text: str) -> str:
        # As its processor words a task: pictures, the start, the text and a line end.
        task = " ".join(part for part in (instruction, text) if part)
        return f"{processor.image_token * num_pictures}{processor.tokenizer.bos_token}{task}\n"

    @override
    def hidden_states(self, network: Any, inputs: dict[str, Tensor]) -> Tensor:
        return _run_by_kinds(network, inputs, torch.zeros_like(inputs["input_ids"]))  # a prefix: all see each other


class Gemma3(VisionLanguageFamily):
    """Gemma 3, in which tokens of one picture see each other, and every token those before it."""

    model_type = "gemma3"
    name = "Gemma3"
    causal = False

    @override
    def hidden_states(self, network: Any, inputs: dict[str, Tensor]) -> Tensor:
        return _run_by_kinds(network, inputs, (inputs["input_ids"] == network.config.image_token_id).long())


def _run_by_kinds(network: Any, inputs: dict[str, Tensor], kinds_RT: Tensor) -> Tensor:
    """Put pictures in the places of their tokens, and run a network whose tokens see others by their kinds."""
    ids_RT = inputs["input_ids"].long()
    # The placeholder may have no row in the table of embeddings: token 0 stands for it until its picture is put there.
    x_RTH = network.get_input_embeddings()(ids_RT.masked_fill(ids_RT == network.config.image_token_id, 0))
    if "pixel_values" in inputs:
        seen_PH = network.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1)
        x_RTH = put_in_places(x_RTH, inputs["image_places"], seen_PH)
    hidden_RTH: Tensor = network(
        inputs_embeds=x_RTH, attention_mask=inputs["attention_mask"], token_type_ids=kinds_RT
    ).last_hidden_state
    return hidden_RTH
