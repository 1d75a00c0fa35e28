"""What InfoNCE over the hardest negatives says of itself."""

from __future__ import annotations

from vembed.config.fields import Count, key
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.facts.infonce import FACTS as INFONCE
from vembed.losses.facts.infonce import SoftmaxKeys, softmax_blocks
from vembed.losses.registry import LossFacts


class InBatchHardKeys(SoftmaxKeys):
    """Keys of InfoNCE over the hardest negatives."""

    hard_topk: Count = key(
        8,
        "Negatives of the batch that a query learns from, the most similar ones; its listed negatives compete too.",
        unit="items",
        acts_with={"use_all_negatives": (False,)},
    )
    use_all_negatives: bool = key(False, "Learn from all negatives instead, as infonce does.")


def _listed(keys: InBatchHardKeys) -> tuple[int, int]:
    """Return what stays of each query and document: logits and places of each prefix, and the slopes of one."""
    if keys.use_all_negatives:
        return 0, 0
    of_each = keys.hard_topk * (2 * len(keys.mrl_dims or [0]) + 4)
    return of_each, of_each if keys.loss_bidirectional else 0


FACTS = LossFacts(
    name="in_batch_hard",
    title="the InfoNCE loss over the hardest negatives",
    summary="InfoNCE over the hard_topk negatives that are most similar to the query",
    loss="vembed.losses.in_batch_hard:InBatchHard",
    keys=InBatchHardKeys,
    columns=(WEIGHT_COLUMN,),
    memory="tiles",
    blocks=lambda keys: softmax_blocks(keys) if keys.use_all_negatives else (4 + keys.filter_blocks, 0),
    listed=_listed,
    formula="L_i = -log( sum over j in P(i) of exp(l_ij)  /  sum over j in P(i) and H(i) of exp(l_ij) )",
    source=INFONCE.source,
    citation=INFONCE.citation,
    hints=INFONCE.hints,
)
