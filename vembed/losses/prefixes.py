"""Matryoshka training: the loss of the first numbers of each embedding, for several lengths at once.

Each prefix is normalised on its own, as a search over cut embeddings would do it. The loss is the weighted mean over
the prefixes, so that gradient norms stay those of one loss.

Source: Kusupati et al., 2022, "Matryoshka Representation Learning".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.functional import normalize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from vembed.config.keys.loss import PrefixKeys

NORM_EPSILON = 1e-12
"""A shorter vector is divided by this instead of its norm: zero stays zero."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """How many leading numbers of an embedding are trained, and how much each length counts."""

    dims: tuple[int, ...]  # lengths, ascending
    weights: tuple[float, ...]  # one for each length; they sum to 1

    @classmethod
    def of_keys(cls, keys: PrefixKeys) -> Prefixes | None:
        """Return what a loss's keys ask for; None where they ask for the embeddings as they are."""
        return None if keys.mrl_dims is None else cls.of(keys.mrl_dims, keys.mrl_weights)

    @classmethod
    def of(cls, dims: Sequence[int], weights: Sequence[float] | None = None) -> Prefixes:
        """Sort lengths and turn weights into shares.

        Args:
            weights: Weight of each, in the same order; None weighs all alike.

        Raises:
            ValueError: They can't be trained: none, the same twice, not positive, or not as many weights.
        """
        given = [1.0] * len(dims) if weights is None else list(weights)
        if not dims or min(dims) < 1 or len(set(dims)) < len(dims):
            raise ValueError(f"prefixes are different positive lengths, got {list(dims)}")
        if len(given) != len(dims) or min(given) <= 0:
            raise ValueError(f"{len(dims)} prefixes need as many positive weights, got {given}")
        total = sum(given)
        pairs = sorted(zip(dims, given, strict=True))
        return cls(tuple(dim for dim, _ in pairs), tuple(weight / total for _, weight in pairs))


def weighted_similarities(q_QE: Tensor, d_DE: Tensor, prefixes: Prefixes | None) -> Iterator[tuple[float, Tensor]]:
    """Return each prefix's weight and whole similarity matrix (Q, D), for the definition of a loss.

    Args:
        prefixes: None takes the embeddings as they are, with weight 1.
    """
    if prefixes is None:
        yield 1.0, q_QE @ d_DE.T
        return
    for dim, weight in zip(prefixes.dims, prefixes.weights, strict=True):
        q, d = (normalize(each[:, :dim], dim=-1, eps=NORM_EPSILON) for each in (q_QE, d_DE))
        yield weight, q @ d.T


def pair_similarity(q_PE: Tensor, d_PE: Tensor, dim: int | None) -> Tensor:
    """Return the similarity of each query with the document of the same row (P,); None takes embeddings as they are."""
    if dim is not None:
        q_PE, d_PE = (normalize(each[:, :dim], dim=-1, eps=NORM_EPSILON) for each in (q_PE, d_PE))
    return (q_PE * d_PE).sum(dim=1)
