"""What the AnglE loss says of itself."""

from __future__ import annotations

from vembed.config.fields import Positive, key
from vembed.config.keys.loss import PrefixKeys, TileKeys
from vembed.data.columns import WEIGHT_COLUMN
from vembed.losses.registry import LossFacts


class AngleKeys(TileKeys, PrefixKeys):
    """Keys of the AnglE loss."""

    angle_scale: Positive = key(20.0, "Factor on differences of the similarities of angles, as 1 / temperature is.")


FACTS = LossFacts(
    name="angle",
    title="the AnglE loss",
    summary="CoSENT over the angles of graded pairs in the complex plane",
    loss="vembed.losses.angle:AngleLoss",
    keys=AngleKeys,
    columns=(WEIGHT_COLUMN,),
    takes=("pairs",),
    memory="pairs",
    formula="L = log(1 + sum over pairs a, b with y_a > y_b of exp(angle_scale (A_b - A_a))), "
    "A the absolute sum of both parts of x conj(y)",
    source='Li & Li, 2024, "AoE: Angle-optimized Embeddings for Semantic Textual Similarity"',
    citation="""@inproceedings{li2024aoe,
  title     = {{AoE}: Angle-optimized Embeddings for Semantic Textual Similarity},
  author    = {Li, Xianming and Li, Jing},
  booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational Linguistics},
  year      = {2024}
}""",
    hints={
        "temperature": lambda value: f"for the same factor set angle_scale to {1 / value:.4g}",
        "cosent_scale": lambda value: f"for the same factor set angle_scale to {value:.4g}",
    },
)
