"""InfoNCE over in-batch negatives and hard negatives, with one or several positives per query.

Query to document, for each query i with positives P(i) and the documents N(i) that are neither positive nor masked:

    L_i = -log( sum over j in P(i) of exp(s S_ij)  /  sum over j in P(i) and N(i) of exp(s S_ij) )

S is the matrix of similarities, s the logit scale (1 / temperature). Hard negatives are documents like any other: they
join the in-batch negatives of every query. Document to query is the same over the columns of the documents that are
some query's positive; bidirectional training averages both. `supcon` gives each positive of a query a loss of its own
and averages them: the mean over p in P(i) of -log( exp(s S_ip) / the same denominator ).

Two options weigh what is hard. `hardness` multiplies exp(s S_ij) of a query's negatives by exp(strength S_ij), from
query to document alone. `focal_gamma` multiplies each loss by (1 - exp(-L_i))^focal_gamma, in both directions. Neither
factor is differentiated.

The loss of a batch is the mean over its queries, weighted by the weights of their rows. A query without positives adds
0, and still counts in the mean. Document to query, the mean is over the documents that are some query's positive, each
weighted by the mean weight of those queries. With Matryoshka prefixes (embeddings cut to several lengths) the loss is
the weighted sum of the losses of the prefixes.

`SoftmaxLoss.loss_of_similarities` is this definition, over the whole matrix and by autograd: read it first. Training
never makes that matrix: streamed.py walks over its tiles, with the sums and slopes of softmax_sweep.py. Tests hold the
two together, in value and gradient.

Source: van den Oord et al., 2018, "Representation Learning with Contrastive Predictive Coding"; the two directions as
in Radford et al., 2021 (CLIP); a sum over positives inside the logarithm as in Miech et al., 2020 (MIL-NCE); each
positive by itself as in Khosla et al., 2020, "Supervised Contrastive Learning".
Shape legend: Q queries and D documents of all ranks, E width of an embedding, R x C that matrix or its transpose, M its
rows with a positive. In the methods that streamed.py calls, Q are the queries of this rank, K is the number of
prefixes, and P are this rank's positive pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from vembed.losses import MAX_LOGIT_SCALE, MIN_LOGIT_SCALE
from vembed.losses.base import document_shares, query_shares
from vembed.losses.cells import CellMap, own_negatives_mask, positive_mask
from vembed.losses.softmax_sweep import InfoNCESweep, SoftmaxSweep
from vembed.losses.streamed import CellLoss, LogSumExp, Statistics, Sweep, streamed_options
from vembed.losses.tiles import longest_row, read_numbers, weighted_similarities

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vembed.losses.base import BatchStructure, LossCommon
    from vembed.losses.keys import InfoNCEKeys, SoftmaxKeys
    from vembed.losses.streamed import StreamedBatch, StreamedOptions
    from vembed.losses.tiles import SimilarityTiles


class Hardness(NamedTuple):
    """Makes some of a query's negatives count more, the more similar they are.

    Each gets the factor exp(strength S), below 1 where S is negative. The factor isn't differentiated.
    """

    # Negatives that get the factor. hard_negatives: those of the query's own row. in_batch_negatives: all others.
    mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
    # At least 0 (keys.py checks it): the sweep multiplies logits by 1 + strength / s, and -inf must stay -inf.
    strength: float

    def added_logits(self, similarity_QD: Tensor, positive_QD: Tensor, structure: BatchStructure) -> Tensor:
        """Return strength x S on the negatives that the mode names, else 0, (Q, D), without gradient."""
        own_negatives_QD = own_negatives_mask(structure)
        is_weighed_QD = {
            "in_batch_negatives": ~own_negatives_QD,
            "hard_negatives": own_negatives_QD,
            "all_negatives": torch.ones_like(own_negatives_QD),
        }[self.mode]
        return self.strength * similarity_QD.detach() * (is_weighed_QD & ~positive_QD)


class SoftmaxLoss(CellLoss):
    """InfoNCE over similarities that a subclass computes: `InfoNCE` by dot products, `ColbertLoss` by MaxSim.

    Args:
        temperature: 1 / logit scale; where it is learned, its first value.
        learn_temperature: Whether the logit scale is a parameter, kept within [1, 100].
        bidirectional: Whether the loss of document to query counts as much as that of query to document.
        dtype: Type of the logit scale, which has at least float32.
        hardness: Which negatives count more, the more similar they are; None: none.
        focal_gamma: Each query's (document's) loss is multiplied by the negatives' share of its softmax to this power.
        options: Those of `StreamedLoss`.
    """

    positives_apart: ClassVar[bool] = False
    """True gives each positive of a query (or document) a loss of its own, and takes their mean; False sums them."""

    def __init__(
        self,
        *,
        temperature: float,
        learn_temperature: bool = False,
        bidirectional: bool = False,
        dtype: torch.dtype = torch.float32,
        hardness: Hardness | None = None,
        focal_gamma: float = 0.0,
        **options: Unpack[StreamedOptions],
    ) -> None:
        super().__init__(**options)
        assert not (self.positives_apart and focal_gamma), (
            "focal_gamma weighs the one loss of a query or document, and positives_apart gives it several"
        )
        log_scale = torch.tensor(math.log(1.0 / temperature), dtype=torch.promote_types(dtype, torch.float32))
        self.log_scale: Tensor
        # A fixed temperature, exactly as it was given; reading log_scale would wait for its device.
        self._fixed_temperature = None if learn_temperature else temperature
        if learn_temperature:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale, persistent=False)
        self.bidirectional, self.hardness, self.focal_gamma = bidirectional, hardness, focal_gamma

    def loss_of_similarities(
        self, similarities_of_prefixes: Iterable[tuple[float, Tensor]], structure: BatchStructure
    ) -> Tensor:
        """Return the mean loss over queries, averaged with that over positive documents when bidirectional.

        Args:
            similarities_of_prefixes: Weight and whole matrix of similarities (Q, D) of each prefix.
        """
        positive_QD = positive_mask(structure)
        # Each adds up to 1 over the batch, so that a sum of share x loss is a mean.
        shares_Q, shares_D = query_shares(structure), document_shares(structure)
        losses = []
        for prefix_weight, similarity_QD in similarities_of_prefixes:
            masked_QD = self.masked(structure, similarity_QD, positive_QD)
            logits_QD = (similarity_QD * self.log_scale.exp()).masked_fill(masked_QD, -math.inf)
            query_logits_QD = logits_QD
            if self.hardness is not None:  # the negatives of a query weigh more, those of a document don't
                query_logits_QD = logits_QD + self.hardness.added_logits(similarity_QD, positive_QD, structure)
            loss = self._one_direction(query_logits_QD, positive_QD, shares_Q)
            if self.bidirectional:
                loss = (loss + self._one_direction(logits_QD.T, positive_QD.T, shares_D)) / 2
            losses.append(prefix_weight * loss)
        return torch.stack(losses).sum()

    def _one_direction(self, logits_RC: Tensor, positive_RC: Tensor, shares_R: Tensor) -> Tensor:
        """Return the sum over rows of share x loss, a scalar.

        loss = logsumexp(all) - logsumexp(positives) (or - mean(positives) with `positives_apart`), times
        (1 - exp(-loss))^focal_gamma. Rows without positives add 0.
        """
        has_positive_R = positive_RC.any(dim=1)
        logits_MC, positive_MC = logits_RC[has_positive_R], positive_RC[has_positive_R]
        if self.positives_apart:
            of_positives_M = logits_MC.masked_fill(~positive_MC, 0.0).sum(dim=1) / positive_MC.sum(dim=1)
        else:
            of_positives_M = logits_MC.masked_fill(~positive_MC, -math.inf).logsumexp(dim=1)
        losses_M = logits_MC.logsumexp(dim=1) - of_positives_M
        if self.focal_gamma:
            # 1 - exp(-loss) = the negatives' share of the softmax, exact for tiny losses.
            losses_M = losses_M * (-torch.expm1(-losses_M.detach())).pow(self.focal_gamma)
        return (losses_M * shares_R[has_positive_R].to(losses_M.dtype)).sum()

    @torch.no_grad()
    @override
    def constrain(self) -> None:
        """Clamp a learned logit scale to [1, 100]."""
        if isinstance(self.log_scale, nn.Parameter):
            self.log_scale.clamp_(math.log(MIN_LOGIT_SCALE), math.log(MAX_LOGIT_SCALE))

    @property
    @override
    def temperature(self) -> float:
        """1 / logit scale; a learned one is read from its device."""
        return math.exp(-self.log_scale.item()) if self._fixed_temperature is None else self._fixed_temperature

    # What streamed.py asks for: the sweep of a batch, its tiles, and the sums that ranks merge ------------------------

    @property
    @override
    def needs_statistics(self) -> bool:
        """True with both directions: a column needs the sums of all ranks, while a rank has all of each of its rows."""
        return self.bidirectional

    @override
    def sweep(self, batch: StreamedBatch) -> InfoNCESweep:
        """Begin the sums of a batch."""
        return InfoNCESweep(self, batch, self.make_scaled_tiles(batch))

    @override
    def statistics_to_merge(self, sweep: SoftmaxSweep) -> Statistics:
        """Return the sums over each document's negatives and over its positives, (2, K, D)."""
        assert sweep.column_sums is not None  # asked for only with both directions
        cell_map = sweep.tiles.cell_map
        positives = LogSumExp.scattered(sweep.positives_KP, cell_map.pair_columns, cell_map.num_columns)
        return Statistics(sweep, LogSumExp.stack([sweep.column_sums.without_idle_maxima(), positives]))

    @override
    def parameter_gradients(self, sweep: Sweep, scale_gradient: Tensor) -> dict[str, Tensor]:
        """Return the gradient of the log scale; the engine takes it only where that is a parameter."""
        return {"log_scale": scale_gradient.to(self.log_scale.dtype)}

    @override
    def make_cell_map(self, batch: StreamedBatch) -> CellMap:
        """Index the positives, excluded cells and, with hardness, the hard negatives of the queries' own rows."""
        return CellMap(
            batch.structure,
            batch.queries,
            mask_false_negatives=self.mask_false_negatives,
            device=batch.q_QE.device,
            with_own_negatives=self.hardness is not None,
        )

    def make_scaled_tiles(self, batch: StreamedBatch) -> SimilarityTiles:
        """Return the tiles of a batch; the scale and the bound of a logit are read from the device together."""
        # Prefixes are normalised, so that the scale alone bounds their logits.
        norms = () if self.prefixes is not None else (longest_row(batch.q_QE), longest_row(batch.d_DE))
        scale, *longest = read_numbers(self.log_scale.exp(), *norms)
        return self.make_tiles(batch, scale=scale, longest=math.prod(longest))  # 1 where there are no norms


def softmax_options(keys: SoftmaxKeys, common: LossCommon) -> dict[str, Any]:
    """Return the arguments that InfoNCE, SupCon and InBatchHard share, from the keys of a run."""
    return {
        "temperature": keys.temperature,
        "learn_temperature": keys.learn_temperature,
        "bidirectional": keys.loss_bidirectional,
        "dtype": common.dtype,
        **streamed_options(keys, common),
    }


class InfoNCE(SoftmaxLoss):
    """InfoNCE over the documents of the batch."""

    @classmethod
    def from_keys(cls, keys: InfoNCEKeys, common: LossCommon) -> InfoNCE:
        """Make the loss of a run; with `loss_directions` its subclass that has them in one softmax."""
        hardness = None
        if keys.hardness_mode != "none":
            hardness = Hardness(keys.hardness_mode, keys.hardness_strength)
        options = {**softmax_options(keys, common), "hardness": hardness, "focal_gamma": keys.focal_gamma}
        if keys.loss_directions is None:
            return cls(**options)
        from vembed.losses.joint import JointInfoNCE  # imported here, as it derives from this class

        return JointInfoNCE(directions=keys.loss_directions, **options)

    @override
    def forward(self, q_QE: Tensor, d_DE: Tensor, structure: BatchStructure) -> Tensor:
        """Return the loss over the whole matrix."""
        return self.loss_of_similarities(weighted_similarities(q_QE, d_DE, self.prefixes), structure)


class SupCon(InfoNCE):
    """InfoNCE of each positive by itself, for rows of one class."""

    positives_apart = True

    @classmethod
    def from_keys(cls, keys: SoftmaxKeys, common: LossCommon) -> Self:
        """Make the loss of a run."""
        return cls(**softmax_options(keys, common))
