"""What the squared error of cosines says of itself."""

from __future__ import annotations

from vembed.config.keys.loss import PrefixKeys, TileKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts


class CosineMseKeys(TileKeys, PrefixKeys):
    """Keys of the squared error of cosines."""


FACTS = LossFacts(
    name="cosine_mse",
    title="the squared error of cosines",
    summary="the cosine of each graded pair as near as can be to its grade",
    loss="vembed.losses.cosine_mse:CosineMseLoss",
    keys=CosineMseKeys,
    columns=(WEIGHT_COLUMN,),
    takes=("pairs",),
    score_bounds=(-1, 1),  # of a cosine
    memory="pairs",
    formula="L = mean over graded pairs a of (S_a - y_a)^2",
    source='Reimers & Gurevych, 2019, "Sentence-BERT: Sentence Embeddings using Siamese BERT-Networks"',
    citation="""@inproceedings{reimers2019sentence,
  title     = {Sentence-{BERT}: Sentence Embeddings using Siamese {BERT}-Networks},
  author    = {Reimers, Nils and Gurevych, Iryna},
  booktitle = {Proceedings of the 2019 Conference on Empirical Methods in Natural Language Processing},
  year      = {2019}
}""",
)
