"""What the triplet loss says of itself."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vembed.config.fields import BrokenRules, key
from vembed.config.keys.loss import CellKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts


class TripletKeys(CellKeys):
    """Keys of the triplet loss."""

    triplet_margin: Annotated[float, Field(gt=0, le=2)] = key(
        0.2, "How much farther than the positive, in cosine distance, a negative is to be; 0.2 as in VSE++."
    )
    triplet_negatives: Literal["all", "hardest", "listed"] = key(
        "all",
        "Negatives of a query. all: every document of the batch, averaged over the triplets within the margin. "
        "hardest: the most similar one. listed: the hard negatives of its own row, averaged over all triplets; rows "
        "without any add nothing.",
    )

    @model_validator(mode="after")
    def _named_negatives_are_not_filtered(self) -> Self:
        if self.triplet_negatives == "listed" and self.false_negative_filter != "identity":
            sentence = (
                f"false_negative_filter {self.false_negative_filter} chooses among the documents of the batch, and "
                "triplet_negatives listed learns from those that the rows name; set triplet_negatives to all or hardest"
            )
            raise BrokenRules([(("false_negative_filter", "triplet_negatives"), sentence)])
        return self


FACTS = LossFacts(
    name="triplet",
    title="the triplet loss",
    summary="each negative farther from the query than its positive by a margin",
    loss="vembed.losses.triplet:TripletLoss",
    keys=TripletKeys,
    columns=(WEIGHT_COLUMN,),
    memory="tiles",
    blocks=lambda keys: (3 + keys.filter_blocks, 0),  # the logits, the excess of some pairs, and the violations
    # Rows of pairs whose similarity is known first; triplets of rows are differentiated by themselves.
    copies=lambda keys: 1 if keys.triplet_negatives == "all" else 6,
    reads_negatives=lambda keys: "triplet_negatives listed" if keys.triplet_negatives == "listed" else "",
    formula="L = mean over i, p in P(i), j in N(i) of max(0, triplet_margin - S_ip + S_ij)",
    source='Hermans et al., 2017, "In Defense of the Triplet Loss for Person Re-Identification"',
    citation="""@article{hermans2017defense,
  title   = {In Defense of the Triplet Loss for Person Re-Identification},
  author  = {Hermans, Alexander and Beyer, Lucas and Leibe, Bastian},
  journal = {arXiv preprint arXiv:1703.07737},
  year    = {2017}
}""",
    hints={
        "temperature": "triplet compares similarities as they are: set triplet_margin",
        "loss_bidirectional": "triplet asks in one direction, from queries to documents",
    },
)
