"""Mix the weights of models that were trained from the same one.

Linear: each number is the weighted mean of the models' own. Slerp: each tensor goes along the arc between two, which
keeps its length where the mean would shorten it; more than two are taken one after the other.

Source: Wortsman et al., 2022, "Model soups"; Xiao et al., 2023, "LM-Cocktail" (a tuned model with the one that it was
tuned from); slerp as in Shoemake, 1985, "Animating rotation with quaternion curves".
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from vembed.errors import ConfigError
from vembed.models.exportable import TEXTS, largest_difference, sample_vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from vembed.models.encoder import Encoder

Method = Literal["linear", "slerp"]

ALIKE = 1e-4
"""Largest difference between vectors of two models with equal weights, beyond rounding."""

NARROW_ARC = 1e-6
"""Angle in radians under which an arc is a line to all digits."""


class Mixture:
    """Models of one architecture, and an encoder that takes on any mixture of their weights.

    Args:
        encoders: At least two, on the CPU, in evaluation mode; the first one takes the mixtures, and the others are
            used up.
        names: What to call them in messages.

    Raises:
        ConfigError: They aren't of one architecture, turn the same text into other inputs, or give other vectors with
            equal weights.
    """

    @torch.no_grad()
    def __init__(self, encoders: Sequence[Encoder], names: Sequence[str]) -> None:
        self.encoder = encoders[0]
        for encoder, name in zip(encoders[1:], names[1:], strict=True):
            _refuse_unlike(self.encoder, encoder, (names[0], name))
        self._states = [
            {name: tensor.detach().cpu().clone() for name, tensor in encoder.state_dict().items()}
            for encoder in encoders
        ]
        # Shapes don't tell how many heads a layer has, or whether attention is causal, and the mixture runs all weights
        # by the settings of the first.
        vectors = sample_vectors(self.encoder)
        for encoder, name in zip(encoders[1:], names[1:], strict=True):
            for key, tensor in encoder.state_dict().items():
                tensor.copy_(self._states[0][key])
            if largest_difference(vectors, sample_vectors(encoder)) > ALIKE:
                raise ConfigError(
                    f"{names[0]} and {name} can't be merged: with equal weights they give other vectors, so they "
                    f"differ in attention, heads or another setting; merge models that were trained from the same one"
                )

    @torch.no_grad()
    def take(self, weights: Sequence[float], method: Method) -> None:
        """Put a mixture into the encoder; of a model with weight 1 every bit is its own.

        Args:
            weights: One for each model, at least 0, with the sum 1.
        """
        used = [(weight, state) for weight, state in zip(weights, self._states, strict=True) if weight]
        for name, tensor in self.encoder.state_dict().items():
            tensor.copy_(mixed([(weight, state[name]) for weight, state in used], method))


def mixed(parts: Sequence[tuple[float, Tensor]], method: Method) -> Tensor:
    """Return the mixture of some tensors by their weights, computed in float64; whole numbers are those of the first.

    A single one is returned as it is.
    """
    first = parts[0][1]
    if len(parts) == 1 or not first.is_floating_point():
        return first
    if method == "linear":
        total = sum(weight for weight, _ in parts)
        return torch.stack([tensor.double() * (weight / total) for weight, tensor in parts]).sum(dim=0).to(first.dtype)
    # In order: slerp isn't associative, so the order of the models is a part of the result.
    _, mean = reduce(_along_arc, [(weight, tensor.double()) for weight, tensor in parts])
    return mean.to(first.dtype)


def _along_arc(one: tuple[float, Tensor], other: tuple[float, Tensor]) -> tuple[float, Tensor]:
    """Return the point between two tensors on their arc, and the weight of both."""
    total = one[0] + other[0]
    share, (start, end) = other[0] / total, (one[1], other[1])
    if not start.any() or not end.any():  # zero has no direction
        return total, torch.lerp(start, end, share)
    units = start / start.norm(), end / end.norm()
    # By half the angle: the arc cosine of a product would have lost its digits where both are nearly alike.
    angle = 2 * torch.atan2((units[0] - units[1]).norm(), (units[0] + units[1]).norm())
    # Alike, the arc is the line; opposite, every arc is as short as any other, and sin(angle) is 0.
    if angle < NARROW_ARC or math.pi - angle < NARROW_ARC:
        return total, torch.lerp(start, end, share)
    near, far = (torch.sin(part * angle) / torch.sin(angle) for part in (1 - share, share))
    return total, near * start + far * end


def _refuse_unlike(first: Encoder, other: Encoder, names: tuple[str, str]) -> None:
    """Refuse two models whose weights don't mean the same.

    Raises:
        ConfigError: Says what differs.
    """
    both = f"{names[0]} and {names[1]} can't be merged"
    checks: dict[str, Callable[[Encoder], object]] = {
        "class": lambda encoder: type(encoder).__name__,
        "similarity": lambda encoder: encoder.similarity,
        "query prompt": lambda encoder: encoder.prompts.get("query", ""),
        "document prompt": lambda encoder: encoder.prompts.get("document", ""),
        "pooling": lambda encoder: encoder.describe().get("pooling", "").partition(" (")[0],
    }
    for what, value in checks.items():
        if value(first) != value(other):
            raise ConfigError(f"{both}: their {what} differs ({value(first)!r} and {value(other)!r})")
    shapes, theirs = _shapes(first), _shapes(other)
    if shapes != theirs:
        name = min(set(shapes.items()) ^ set(theirs.items()))[0]
        one, two = (known.get(name, "missing") for known in (shapes, theirs))
        raise ConfigError(
            f"{both}: {name} has the shape {one} in the first and {two} in the other; merge models that were trained "
            f"from the same one"
        )
    if "text" in first.modalities:
        # By their effect on a few texts: files of one tokenizer may differ by version and cut alike.
        ours, others = (encoder.featurize(TEXTS, "document").columns for encoder in (first, other))
        if set(ours) != set(others) or not all(np.array_equal(ours[name].values, others[name].values) for name in ours):
            raise ConfigError(f"{both}: they cut texts into other tokens; merge models with one tokenizer")


def _shapes(encoder: Encoder) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}
