"""Options of a merge: how weights are mixed, and the sets that choose them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vembed.section import Count, Section, option

WEIGHT_NOISE = 1e-6
"""By which the sum of weights that were written with a few digits may differ from 1."""


class MergeKeys(Section):
    """Weights of a merge, given or to be chosen on sets."""

    method: Literal["linear", "slerp"] = option("linear", "how weights are mixed; default: linear")
    weights: list[float] | None = option(None, "weight of each model; their sum is 1", metavar="W", one_of="weights!")
    data: list[str] | None = option(None, "dev sets to choose the weights on", metavar="SET", one_of="weights!")
    guard: list[str] = option([], "sets on which the merged model must stay as good as the first", metavar="SET")
    split: str | None = option(None, "split of the sets of --data; default: their validation split", metavar="SPLIT")
    guard_split: str | None = option(None, "split of the sets of --guard; default: that of --split", metavar="SPLIT")
    metric: str = option("ndcg@10", "metric to choose by; default: ndcg@10", metavar="M")
    steps: Annotated[int, Field(ge=1)] = option(10, "try weights in steps of 1/N; default: 10", metavar="N")
    batch_size: Count = option(256, "largest number of items per encoder call", metavar="N")
    overwrite: bool = option(False, "replace the model that DIR holds")

    @property
    def targets(self) -> list[str]:
        """Sets to win on; none where the weights are given."""
        return self.data or []

    @property
    def sets(self) -> list[tuple[str, str | None]]:
        """Path and split of each set: those to win on, then those to keep."""
        guard_split = self.split if self.guard_split is None else self.guard_split
        return [*((path, self.split) for path in self.targets), *((path, guard_split) for path in self.guard)]


def work_folder(output: Path) -> Path:
    """Return the folder that keeps the evaluations of the choice until the model is written."""
    return output.with_name(f".{output.name}.merging")
