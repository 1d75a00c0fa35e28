"""What InfoNCE says of itself."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vembed.config.fields import BrokenRules, NonNegative, key
from vembed.config.keys.loss import CellKeys, DirectionKeys, TemperatureKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts
from vembed.plan.memory import LOSS_STRIP_TILES


class SoftmaxKeys(CellKeys, TemperatureKeys, DirectionKeys):
    """Keys of InfoNCE over any negatives."""


Direction = Literal["query_to_document", "document_to_query", "query_to_query", "document_to_document"]
"""What competes with a query's positive."""


class InfoNCEKeys(SoftmaxKeys):
    """Keys of InfoNCE."""

    loss_directions: Annotated[list[Direction], Field(min_length=1)] | None = key(
        None,
        "What competes with a query's positive in one softmax: the documents of the batch (query_to_document, which "
        "always do; null is these alone), other queries (query_to_query), the queries that its positive is compared "
        "with (document_to_query), other documents (document_to_document). loss_bidirectional averages two softmaxes "
        "instead.",
    )
    hardness_mode: Literal["none", "in_batch_negatives", "hard_negatives", "all_negatives"] = key(
        "none",
        "Which negatives count more for a query, the more similar they are: those of other rows, the hard negatives of "
        "its own row, or all.",
    )
    hardness_strength: NonNegative = key(
        5.0,
        "A negative of similarity S counts exp(hardness_strength S) times; 9 as in LLaVE, 5 as in EmbeddingGemma.",
        acts_with={"hardness_mode": ("all_negatives", "in_batch_negatives", "hard_negatives")},
    )
    focal_gamma: NonNegative = key(
        0.0,
        "Weigh a query by (1 - p)^focal_gamma, p being the softmax's share of its positives: what is learned counts "
        "less. 0.5 as in KaLM-Embedding-V2; 0 weighs all alike.",
    )

    @model_validator(mode="after")
    def _one_softmax_has_all_directions(self) -> Self:
        given, sentence = self.loss_directions, ""
        if given is not None and ("query_to_document" not in given or len(set(given)) < len(given)):
            sentence = "loss_directions names query_to_document, and each direction once"
        elif given is not None and self.loss_bidirectional:
            sentence = "loss_directions is one softmax, and loss_bidirectional averages two; set one of them"
        elif given is not None and self.false_negative_filter != "identity":
            sentence = (
                f"false_negative_filter {self.false_negative_filter} judges queries and documents, and "
                "loss_directions compares more; set false_negative_filter to identity, or remove loss_directions"
            )
        if sentence:
            raise BrokenRules([(("loss_directions", "loss_bidirectional", "false_negative_filter"), sentence)])
        return self


def softmax_blocks(keys: SoftmaxKeys) -> tuple[int, int]:
    """Return the logits' block and one to compute in; one direction alone has a strip in the place of the former."""
    is_one_sweep = not keys.loss_bidirectional and keys.mrl_dims is None
    return (1 + keys.filter_blocks, LOSS_STRIP_TILES) if is_one_sweep else (2 + keys.filter_blocks, 0)


FACTS = LossFacts(
    name="infonce",
    title="the InfoNCE loss",
    summary="InfoNCE over the documents of the batch",
    loss="vembed.losses.infonce:InfoNCE",
    keys=InfoNCEKeys,
    columns=(WEIGHT_COLUMN,),
    memory="tiles",
    blocks=lambda keys: (4, 0) if keys.loss_directions else softmax_blocks(keys),
    # The positives of a device and their gradients, while documents are compared with documents.
    copies=lambda keys: 2 if "document_to_document" in (keys.loss_directions or ()) else 0,
    reads_negatives=lambda keys: "hardness_mode hard_negatives" if keys.hardness_mode == "hard_negatives" else "",
    formula="L_i = -log( sum over j in P(i) of exp(l_ij)  /  sum over j in P(i) and N(i) of exp(l_ij) )",
    source='van den Oord et al., 2018, "Representation Learning with Contrastive Predictive Coding"',
    citation="""@article{oord2018representation,
  title   = {Representation Learning with Contrastive Predictive Coding},
  author  = {van den Oord, A{\\"a}ron and Li, Yazhe and Vinyals, Oriol},
  journal = {arXiv preprint arXiv:1807.03748},
  year    = {2018}
}""",
    hints={
        "cosent_scale": lambda value: f"for the same factor set temperature to {1 / value:.4g}",
        "init_logit_scale": lambda value: f"for the same factor set temperature to {math.exp(-value):.4g}",
        "use_all_negatives": "infonce always learns from all of them",
    },
)
