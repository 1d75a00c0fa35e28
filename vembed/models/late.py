"""From the hidden states of tokens to the vectors of late interaction: several for each item.

1. Tokens that don't count are left out: padding, punctuation of documents.
2. Dense layers map each of the others to the space of the vectors, where it gets unit length.
3. `topk_tokens`: of each item those vectors stay that were the longest before, in the order of the tokens.
4. `pool_factor`: vectors of a document that are near each other become one, their mean, of unit length again.

How many vectors an item has follows from its tokens alone, so that it is known before any is computed. Which ones stay
follows from the hidden states without any further random number, so that a replay chooses as the first pass did.

Source: Khattab & Zaharia, 2020, "ColBERT"; Clavié et al., 2024, "Reducing the Footprint of Multi-Vector Retrieval with
Minimal Performance Impact via Token Pooling".
Shape legend: R rows, T tokens of a padded row, H hidden dim, C tokens of all rows that count, V vectors, E their dim.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vembed.batch import Features, Ragged, ranges
from vembed.errors import ConfigError
from vembed.models.formats import Dense
from vembed.models.plannable import ROWS
from vembed.models.pooling import unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Side
    from vembed.models.hub import ModelFiles
    from vembed.models.plannable import TowerInputs

NEW_DIMENSION = 128
"""Of the vectors of a model that is new to late interaction."""

COUNTED = "counted_tokens"
"""Column of features: the places of the tokens of an item that count, ascending."""

VECTORS = "num_vectors"
"""Entry of the features with the number of vectors that each row will have."""


class TokenHead(nn.Module):
    """Dense layers behind the tokens of an encoder, and the choice of those that become vectors.

    Args:
        layers: At least one; each takes what the one before gives.
        topk_tokens: Most vectors of an item; None keeps all.
        pool_factor: A document keeps one vector for so many; 1 keeps all.
        protected: First vectors of a document that are never merged: [CLS].
        is_new: Whether no file holds the layers, so that they must train.
    """

    inputs: ClassVar[frozenset[str]] = frozenset(
        {COUNTED, "row_of_token", "longest_tokens", "vectors_before_and_after", "vectors"}
    )  # what `collate` makes

    def __init__(
        self,
        layers: Sequence[Dense],
        *,
        topk_tokens: int | None = None,
        pool_factor: float = 1.0,
        protected: int = 1,
        is_new: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dimension = layers[-1].linear.out_features
        self.topk_tokens = topk_tokens
        self.pool_factor = pool_factor
        self.protected = protected
        self.is_new = is_new

    def with_vectors(self, features: Features, counted: Ragged, side: Side) -> Features:
        """Return features that say which tokens count and how many vectors each item of a side will have.

        Args:
            counted: Places of tokens in their row, ascending, at least one a row.
        """
        counts = self._counts(counted.lengths, pooled=side == "document")
        return replace(
            features,
            columns={**features.columns, COUNTED: counted},
            per_row={**features.per_row, VECTORS: counts},
        )

    def num_vectors(self, features: Features) -> NDArray[np.int64]:
        """Return how many vectors `forward` gives for each row, (n,)."""
        return features.per_row[VECTORS]

    def index_size(self, tokens: int) -> str:
        """Say what an index takes for documents of so many tokens that count."""
        (count,) = self._counts(np.array([tokens]), pooled=True).tolist()
        gigabytes = 4 * count * self.dimension / 1000  # of a million documents, in float32
        return f"at most {count} for each document: an index of a million documents takes up to {gigabytes:,.0f} GB"

    def _counts(self, counted: NDArray[np.int64], *, pooled: bool) -> NDArray[np.int64]:
        """Return the vectors of items with so many tokens that count."""
        kept = counted if self.topk_tokens is None else np.minimum(counted, self.topk_tokens)
        if not pooled or self.pool_factor == 1.0:
            return kept
        rest = np.maximum(kept - self.protected, 0)
        groups = np.maximum((rest // self.pool_factor).astype(np.int64), 1)
        return kept - rest + np.minimum(rest, groups)

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Make what `forward` takes beside the hidden states, on the CPU.

        Args:
            features: Those of `with_vectors`.
            rows: The R rows of the call.
            width: T.
        """
        counted, wanted = features.columns[COUNTED].take(rows), features.per_row[VECTORS][rows]
        lengths = counted.lengths
        row_C = np.repeat(np.arange(len(rows)), lengths)
        inputs = {COUNTED: torch.from_numpy(row_C * width + counted.values)}
        kept = self._counts(lengths, pooled=False)
        if (kept < lengths).any():
            inputs["row_of_token"] = torch.from_numpy(row_C)
            inputs["longest_tokens"] = torch.from_numpy(ranges(counted.offsets[:-1], kept))
        if (wanted < kept).any():
            inputs["vectors_before_and_after"] = torch.from_numpy(np.stack([kept, wanted]))
            inputs["vectors"] = torch.empty(0, int(wanted.sum()), dtype=torch.int8)  # its shape says how many
        return inputs

    def measured(self, tokens: TowerInputs) -> TowerInputs:
        """Return what a tower is measured with where each of its tokens gives a vector."""

        def make() -> dict[str, Tensor]:
            counted = Ragged.from_rows([np.arange(tokens.width)] * ROWS)
            features = self.with_vectors(Features({}, counted.lengths), counted, "document")
            inputs = self.collate(features, np.arange(ROWS), tokens.width)
            return tokens.make() | {name: tensor.to("meta") for name, tensor in inputs.items()}

        return replace(tokens, make=make)

    def forward(self, hidden_RTH: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the vectors of all rows, one row after the other, (V, E), of unit length, at least float32."""
        with torch.autocast(hidden_RTH.device.type, enabled=False):
            x_CE = hidden_RTH.flatten(0, 1).index_select(0, inputs[COUNTED])
            x_CE = x_CE.to(torch.promote_types(x_CE.dtype, torch.float32))
            for layer in self.layers:
                x_CE = layer(x_CE)
            if "longest_tokens" in inputs:
                # By length over all rows, equal ones by the first token, then by row: the second sort is stable, so
                # that within a row the order by length stays. Which places of it are taken is known on the CPU already,
                # so that nothing is read back. No gradient goes through the choice.
                order_C = x_CE.detach().norm(dim=1).sort(descending=True, stable=True).indices
                order_C = order_C[inputs["row_of_token"][order_C].sort(stable=True).indices]
                x_CE = x_CE.index_select(0, order_C[inputs["longest_tokens"]].sort().values)
            z_VE = unit(x_CE)
            if "vectors" in inputs:
                order_V, sizes = torch.ops.vembed.nearest_groups(
                    z_VE.detach(), inputs["vectors_before_and_after"], inputs["vectors"].shape[1], self.protected
                )
                # One thread adds up a group in order, so that equal calls give equal bits.
                means_VE = torch.segment_reduce(z_VE.index_select(0, order_V), "mean", lengths=sizes, unsafe=True)
                z_VE = unit(means_VE)
            return z_VE


def refuse_pooling(files: ModelFiles) -> None:
    """Refuse a pooling that would leave one vector of an item."""
    method = files.keys.pooling_method
    if method not in ("auto", "none"):
        raise ConfigError(
            f"{files.name} gives several vectors for each item; pooling_method {method} would pool them. Leave it out"
        )


def make_head(
    files: ModelFiles,
    layers: Sequence[Dense],
    *,
    hidden: int,
    protected: int,
    saved: Mapping[str, Any],
) -> TokenHead:
    """Return the head of a model, by the user's word, else by its files.

    Args:
        layers: Those of its files; empty for a model that is new to late interaction.
        hidden: Of the network.
        protected: First vectors of a document that are never merged.
        saved: What its files say of `topk_tokens` and `pool_factor`.

    Raises:
        ConfigError: The user wants another dimension than the layers have, or they are of another network.
    """
    keys = files.keys
    if layers and layers[0].linear.in_features != hidden:
        raise ConfigError(
            f"{files.name}: its head takes {layers[0].linear.in_features} values, and its network gives {hidden}: "
            f"they are of two models. Copy the folder again"
        )
    if not layers:
        with files.device:
            new = new_layer(hidden, NEW_DIMENSION if keys.projection_dim == "auto" else keys.projection_dim)
    head = TokenHead(
        [layer.to(files.dtype) for layer in layers or [new]],
        topk_tokens=saved.get("topk_tokens") if keys.topk_tokens == "auto" else keys.topk_tokens,
        pool_factor=(saved.get("pool_factor") or 1.0) if keys.pool_factor == "auto" else keys.pool_factor,
        protected=protected,
        is_new=not layers,
    )
    if keys.projection_dim not in ("auto", head.dimension):
        raise ConfigError(
            f"projection_dim {keys.projection_dim}: the vectors of {files.name} have {head.dimension} dimensions; "
            "leave it out"
        )
    return head


def new_layer(in_features: int, out_features: int) -> Dense:
    """Return the linear layer of a model that has none yet: no bias, the same weights in every process and run."""
    layer = Dense(in_features, out_features, bias=False, activation=nn.Identity())
    weight = layer.linear.weight
    if not weight.is_meta:
        bound = 1 / math.sqrt(in_features)
        nn.init.uniform_(weight, -bound, bound, generator=torch.Generator(weight.device).manual_seed(0))
    return layer


# An operator of its own, so that the plan can run it on fake tensors: they lack the values that clustering reads.
@torch.library.custom_op(
    "vembed::nearest_groups",
    mutates_args=(),
    schema="(Tensor x, Tensor counts, int num_vectors, int protected) -> (Tensor, Tensor)",
)
def _nearest_groups(x: Tensor, counts: Tensor, num_vectors: int, protected: int) -> tuple[Tensor, Tensor]:
    """Group the vectors of each row by Ward's clustering of their cosines, on the CPU.

    Args:
        x: All vectors, row after row, of unit length.
        counts: Vectors of each row before and after, (2, R).
        num_vectors: Sum of those after.
        protected: First vectors of a row that stay by themselves.

    Returns:
        The vectors ordered by group, and the size of each group.
    """
    # Waits for the device and copies all vectors to the host, where scipy clusters them.
    (before, after), vectors = counts.cpu().tolist(), x.cpu().numpy()
    parts, first = [], 0
    for length, wanted in zip(before, after, strict=True):
        labels = np.arange(length)
        if wanted < length:
            labels[protected:] = protected + _ward(vectors[first + protected : first + length], wanted - protected)
        parts.append(labels)
        first += length
    # Numbered through over all rows, groups lie in the order of the vectors that they become.
    starts = np.cumsum([0, *after[:-1]])
    group_V = np.concatenate([part + start for part, start in zip(parts, starts, strict=True)])
    order_V, sizes = np.argsort(group_V, kind="stable"), np.bincount(group_V, minlength=num_vectors)
    return torch.from_numpy(order_V).to(x.device), torch.from_numpy(sizes).to(x.device)


@_nearest_groups.register_fake
def _shapes_of_groups(x: Tensor, counts: Tensor, num_vectors: int, protected: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return counts.new_empty(len(x), dtype=torch.int64), counts.new_empty(num_vectors, dtype=torch.int64)


def _ward(x_VE: NDArray[np.floating], num_groups: int) -> NDArray[np.int64]:
    """Return the group of each vector, exactly as many groups as asked for, numbered as sentence-transformers does."""
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    apart = np.nan_to_num(1.0 - x_VE @ x_VE.T, nan=2.0)  # vectors that aren't finite stay so, and are found later
    distances = squareform(apart.clip(0.0, 2.0), checks=False)
    tree = hierarchy.linkage(distances, "ward")
    labels: NDArray[np.int64] = hierarchy.fcluster(tree, num_groups, "maxclust").astype(np.int64) - 1
    if labels.max() + 1 < num_groups:  # of equal distances it cuts all or none
        labels = hierarchy.cut_tree(tree, n_clusters=num_groups)[:, 0].astype(np.int64)
    return labels
