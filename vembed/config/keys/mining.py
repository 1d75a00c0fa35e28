"""Keys of the mining of hard negatives."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from vembed.config.fields import LARGEST_COUNT, Count, Name, NonNegative, Section, Share, key, rule

if TYPE_CHECKING:
    from vembed.config.schema import Config

_MINES: Mapping[str, tuple[object, ...]] = {"mine": ("once", {"minimum": 1})}


SOURCES = ("mine", "mine_corpus", "mine_teacher")
"""Keys that say when and with what a run mines; `vembed mine` has options of its own for them."""


class MiningKeys(Section):
    """Which of the documents that a model finds become hard negatives."""

    mine: Literal["never", "once"] | Count = key(
        "never",
        "Mine hard negatives with the model as it is, among the documents of the training data: once, before the first "
        "epoch, or every so many epochs.",
        unit="epochs",
    )
    mine_corpus: Name | None = key(
        None,
        "More documents to mine negatives from: a file, folder or set, in the forms of vembed encode --data; null uses "
        "only the documents of the training data.",
        acts_with=_MINES,
    )
    mine_teacher: Name | None = key(
        None,
        "Better model, whose scores the margins and bounds use: hub id or folder of any encoder or cross-encoder of "
        "sentence-transformers (vembed[st]); null uses the scores of the mining model.",
        acts_with=_MINES,
    )
    mine_negatives: Count = key(
        4, "Largest number of hard negatives mined for each row.", unit="documents", acts_with=_MINES
    )
    mine_range_min: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = key(
        0,
        "Number of nearest documents to skip: with 10, the 11th is the first candidate.",
        unit="documents",
        acts_with=_MINES,
    )
    mine_range_max: Count = key(
        100,
        "Rank of the last document that is considered; known positives aren't counted.",
        unit="documents",
        acts_with=_MINES,
    )
    mine_relative_margin: Share | None = key(
        0.05,
        "A candidate must score at most (1 - this) times the score of the query's best positive (0.05: 95%); null "
        "turns this off.",
        acts_with=_MINES,
    )
    mine_absolute_margin: NonNegative | None = key(
        None,
        "A candidate must score at least this much below the query's best positive; null turns this off.",
        acts_with=_MINES,
    )
    mine_min_score: float | None = key(
        None, "Candidates that score less are left out; null turns this off.", acts_with=_MINES
    )
    mine_max_score: float | None = key(
        None, "Candidates that score more are left out; null turns this off.", acts_with=_MINES
    )
    mine_sampling: Literal["top", "random"] = key(
        "top",
        "Which candidates are taken: the nearest ones, or some at random (the same for the same seed).",
        acts_with=_MINES,
    )
    mine_index: Name = key(
        "Flat",
        "FAISS index that is searched: Flat is exact; IVF4096,Flat:nprobe=32 suits millions of documents.",
        acts_with=_MINES,
    )
    mine_replace: bool = key(
        False, "Replace the negatives of the rows; otherwise the mined ones are added after them.", acts_with=_MINES
    )

    def mining(self) -> dict[str, Any]:
        """Return the rules of mining alone; documents and models are known by what they hold."""
        return {name: getattr(self, name) for name in MiningKeys.model_fields if name not in SOURCES}


@rule("mine", "label_kind")
def _mined_rows_have_positives(config: "Config") -> str | None:
    """`mine` needs rows with positives, not scores of pairs."""
    if config.mine == "never" or config.label_kind not in {"pair", "grade"}:
        return None
    return f"mine needs rows with positives, and label_kind {config.label_kind} gives pairs a score; leave one out"
