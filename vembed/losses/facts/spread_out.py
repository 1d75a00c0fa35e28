"""What the spread-out regulariser says of itself."""

from __future__ import annotations

from vembed.config.fields import NonNegative, key
from vembed.config.keys.loss import PrefixKeys, TileKeys
from vembed.losses.registry import LossFacts


class SpreadOutKeys(TileKeys, PrefixKeys):
    """Keys of the spread-out regulariser."""

    spread_out_mean: NonNegative = key(1.0, "Weight of the squared mean of the similarities of different rows.")
    spread_out_second_moment: NonNegative = key(
        1.0, "Weight of what their mean square has over 1 / dim, the mean square of random directions."
    )


FACTS = LossFacts(
    name="spread_out",
    title="the spread-out regulariser",
    summary="queries as far from each other as random directions, and so documents; only among added_losses",
    loss="vembed.losses.spread_out:SpreadOutLoss",
    keys=SpreadOutKeys,
    takes=(),
    memory="gram",
    formula="L = mean over both sides of spread_out_mean M1^2 + spread_out_second_moment max(0, M2 - 1/E), "
    "M1 and M2 the mean and the mean square of <x, y> over different rows",
    source='Zhang et al., 2017, "Learning Spread-out Local Feature Descriptors"',
    citation="""@inproceedings{zhang2017learning,
  title     = {Learning Spread-out Local Feature Descriptors},
  author    = {Zhang, Xu and Yu, Felix X. and Kumar, Sanjiv and Chang, Shih-Fu},
  booktitle = {Proceedings of the IEEE International Conference on Computer Vision},
  year      = {2017}
}""",
)
