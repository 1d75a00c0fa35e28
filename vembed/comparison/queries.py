"""Queries won and lost against the baseline: those that changed most, with what each model put first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vembed.data.images import ImageLimits
from vembed.data.keys import DataKeys, listed
from vembed.data.retrieval_sources import load_retrieval
from vembed.data.splits import SourceOptions
from vembed.errors import VembedError
from vembed.evaluation.report.examples import Example, example_of, paired_values, picture_captions
from vembed.redact import redact
from vembed.training.inputs import content_hash, load_run_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.comparison.runs import Run, SetResult
    from vembed.data.retrieval import RetrievalData

MOST_CHANGES, FEWEST_CHANGES = 5, 1
"""Queries shown of each kind, for two runs and for very many."""

SHOWN_IN_ALL = 40
"""Queries shown on a page of many runs, about."""


@dataclass(frozen=True, slots=True)
class Change:
    """A query whose value changed, with what both models put first."""

    run: Example
    baseline: Example

    @property
    def gain(self) -> float:
        """How far the query's value rose."""
        return self.run.final - self.run.baseline


@dataclass(frozen=True, slots=True)
class Changes:
    """What a run wins and loses against the baseline."""

    run: str
    won: tuple[Change, ...]  # the largest gains first
    lost: tuple[Change, ...]
    num_won: int
    num_lost: int
    num_queries: int


def find_changes(
    baseline: SetResult, partners: Sequence[tuple[str, SetResult]], task: RetrievalData, metric: str
) -> list[Changes]:
    """Return the most changed queries of each run."""
    shown = max(FEWEST_CHANGES, min(MOST_CHANGES, SHOWN_IN_ALL // (2 * max(1, len(partners)))))
    captions = picture_captions(task)
    found = []
    for name, each in partners:
        pairs = paired_values(baseline.final, each.final, metric)
        gains = {query: after - before for query, (before, after) in pairs.items()}
        won = sorted((query for query in gains if gains[query] > 0), key=lambda query: (-gains[query], query))
        lost = sorted((query for query in gains if gains[query] < 0), key=lambda query: (gains[query], query))

        def change(query: str, each: SetResult = each, pairs: dict[str, tuple[float, float]] = pairs) -> Change:
            before, after = pairs[query]
            one = example_of(query, task, (baseline.final, each.final), (before, after), captions)
            other = example_of(query, task, (each.final, baseline.final), (after, before), captions)
            return Change(run=_with_first(one), baseline=_with_first(other))

        found.append(
            Changes(
                name,
                tuple(map(change, won[:shown])),
                tuple(map(change, lost[:shown])),
                len(won),
                len(lost),
                len(pairs),
            )
        )
    return found


def _with_first(example: Example) -> Example:
    return replace(example, hits=example.hits[:1], missed=())


def load_task(run: Run, found: SetResult) -> tuple[RetrievalData | None, str]:
    """Read the set of a run's verdict again, for its texts and pictures.

    Returns:
        The set, or None and why it can't be shown.
    """
    config = run.config
    try:
        keys = DataKeys.model_validate({name: config[name] for name in DataKeys.model_fields if name in config})
        if found.key == "test":
            task = load_retrieval(
                listed(keys.test_data_path)[0], SourceOptions("test", keys.test_data_split, keys), takes_pairs=True
            )
        elif keys.val_data_path is not None:
            task = load_retrieval(
                keys.val_data_path, SourceOptions("validation", keys.val_data_split, keys), takes_pairs=True
            )
        else:
            held_out = load_run_data(keys, needs_dev=True).dev
            assert held_out is not None
            task = held_out
        if found.content and content_hash(task) != found.content:
            return None, "The texts aren't shown: the set has changed since the run."
    except (VembedError, ValueError, OSError) as error:
        reason = redact(str(error).strip().partition("\n")[0])
        return None, f"The texts aren't shown, as the set can't be read any more: {reason}"
    if not task.queries.keys() >= found.final.per_query[next(iter(found.final.per_query))].keys():
        return None, "The texts aren't shown: the set has changed since the run."
    return task, ""


def image_limits(run: Run) -> ImageLimits:
    """Return which pictures of a run's data may be decoded."""
    pixels = run.config.get("max_image_pixels")
    return ImageLimits(max_pixels=pixels) if isinstance(pixels, int) else ImageLimits()
