"""What a family of vision-language models states, and what several of them do alike.

Shape legend: R rows of a call, T tokens of a row, P patches or tokens of all pictures of the call, H hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vembed.models.pictures import run_processor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import PIL.Image
    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Ragged
    from vembed.models.pooling import PoolingMode


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
    blank: Callable[
        [Any, int], tuple[dict[str, NDArray[Any]], int]
    ]  # (network, most tokens) -> arrays of a square picture and its tokens, for the plan
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
    taps: str = ""  # attribute of `vision`: the layers of which the language model's first layers take vectors, too
    flattest: int | None = None  # most that the longer side of a picture may be of the shorter one
    pooling: PoolingMode = "lasttoken"
    instruction: str = ""  # system message of every item, unless the user says otherwise
    ends_instruction: bool = (
        False  # whether an instruction ends with punctuation: a full stop is added where it doesn't
    )


def flat_pictures(network: Any, arrays: Mapping[str, Ragged]) -> dict[str, Tensor]:  # noqa: ARG001
    """Lay the pictures of all rows one after the other."""
    return {name: torch.from_numpy(ragged.values) for name, ragged in arrays.items()}


def put_in_places(x_RTH: Tensor, places_P: Tensor, seen_PH: Tensor) -> Tensor:
    """Put what was seen of pictures in the places of their tokens."""
    return x_RTH.flatten(0, 1).index_copy(0, places_P, seen_PH.to(x_RTH.dtype)).view_as(x_RTH)
