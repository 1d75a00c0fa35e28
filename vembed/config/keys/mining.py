"""Keys of the mining of hard negatives."""

from typing import Annotated, Literal

from pydantic import Field

from vembed.config.fields import LARGEST_COUNT, Count, Name, NonNegative, Section, Share, key


class MiningKeys(Section):
    """Which of the documents that a model finds become hard negatives."""

    mine_negatives: Count = key(4, "Most hard negatives that are mined for each row.", unit="documents")
    mine_range_min: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = key(
        0, "The nearest documents that are passed over: with 10, the 11th is the first candidate.", unit="documents"
    )
    mine_range_max: Count = key(
        100, "How far down the ranking candidates are looked for; known positives don't count.", unit="documents"
    )
    mine_relative_margin: Share | None = key(
        0.05,
        "A candidate must score at most (1 - this) times the score of the query's best positive (0.05: 95%); null "
        "takes all.",
    )
    mine_absolute_margin: NonNegative | None = key(
        None, "A candidate must score at least this much below the query's best positive; null asks for nothing."
    )
    mine_min_score: float | None = key(None, "Candidates that score less are left out; null leaves none out.")
    mine_max_score: float | None = key(None, "Candidates that score more are left out; null leaves none out.")
    mine_sampling: Literal["top", "random"] = key(
        "top", "Which candidates are taken: the nearest ones, or some at random (the same for the same seed)."
    )
    mine_index: Name = key(
        "Flat", "FAISS index that is searched: Flat is exact; IVF4096,Flat:nprobe=32 suits millions of documents."
    )
    mine_replace: bool = key(False, "Drop the negatives that the rows have; else the mined ones stand behind them.")
