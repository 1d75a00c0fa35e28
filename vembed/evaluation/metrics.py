"""Score a run with trec_eval, so that every number can be compared with BEIR's, MTEB's and a paper's.

| name        | trec_eval        | meaning                                                                             |
|-------------|------------------|-------------------------------------------------------------------------------------|
| ndcg@k      | ndcg_cut         | graded; the gain is the grade itself, the discount log2(rank + 1)                   |
| recall@k    | recall           | share of the relevant documents among the first k                                   |
| precision@k | P                | share of the first k that is relevant; divides by k even where fewer were found     |
| mrr@k       | recip_rank       | 1 / rank of the first relevant document, 0 where it is not among the first k        |
| map@k       | map_cut          | average precision of the first k, divided by the number of all relevant documents   |
| hit@k       | success          | 1 where a relevant document is among the first k                                    |

Relevant means grade 1 or more. A relevant document that was not found counts as missed, in the corpus or not.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytrec_eval

from vembed.errors import ConfigError
from vembed.registry import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Metric: TypeAlias = Callable[[Sequence[int], Sequence[int], int], float]

HEADLINE = ("ndcg@10", "recall@1", "mrr@10", "map@100")
"""The metrics that a report leads with."""

DEFAULT_KS = (1, 3, 5, 10, 100)
"""Cut-offs that metrics are computed at."""


@dataclass(frozen=True, slots=True)
class TrecMeasure:
    """A metric that trec_eval computes."""

    name: str  # trec_eval's own
    takes_cuts: bool = True  # else it is of the whole run, and a value below 1 / k counts as 0


NDCG = TrecMeasure("ndcg_cut")
RECALL = TrecMeasure("recall")
PRECISION = TrecMeasure("P")
MRR = TrecMeasure("recip_rank", takes_cuts=False)
MAP = TrecMeasure("map_cut")
HIT = TrecMeasure("success")


def register_metric(function: Metric) -> Metric:
    """Add a metric under the name of its function; also a decorator.

    It is computed for each query as `function(ranked, judged, k)` and stands in every result as `NAME@k`; larger is
    better.

    Args:
        function: Takes the grades of the documents in the order found (0 where nobody judged), the grades of all judged
            documents, and the cut-off; returns a finite number.

    Raises:
        ConfigError: The name is taken.
    """
    METRICS.register(function.__name__, function, module=function.__module__)
    return function


def trec_order(scored: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Return one query's documents in the order that trec_eval ranks them, whatever order a file has.

    Scores are compared as float32, largest first; equal scores by document id, last one first. Python compares ids by
    code point and trec_eval by UTF-8 byte, which is the same order.

    Returns:
        The same pairs, best first.

    Source:
        trec_eval 9, form_res_rels.c, comp_sim_docno.
    """
    pairs = tuple(scored)
    single = np.asarray([score for _, score in pairs], dtype=np.float32).tolist()
    keyed = sorted(
        ((score, document_id, pair) for score, (document_id, _), pair in zip(single, pairs, pairs, strict=True)),
        key=itemgetter(0, 1),
        reverse=True,
    )
    return tuple(pair for _, _, pair in keyed)


def tie_ranks(document_ids: Sequence[str]) -> NDArray[np.int64]:
    """Return each document's place among equal scores (D,), 0 for the first, as `trec_order` has it."""
    ranks_D = np.empty(len(document_ids), dtype=np.int64)
    ranks_D[sorted(range(len(document_ids)), key=document_ids.__getitem__, reverse=True)] = np.arange(len(document_ids))
    return ranks_D


def with_relevant(qrels: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Return the queries that have a relevant document: the ones that a mean can be over."""
    return {query_id: grades for query_id, grades in qrels.items() if any(grade > 0 for grade in grades.values())}


def score_run(
    run: Mapping[str, Sequence[tuple[str, float]]],
    qrels: Mapping[str, Mapping[str, int]],
    ks: Sequence[int] = DEFAULT_KS,
) -> dict[str, dict[str, float]]:
    """Score each query that has a relevant document.

    Args:
        run: Query id -> (document id, score) in any order. A query that is missing here found nothing and scores 0.

    Returns:
        Metric name ("ndcg@10") -> query id -> value between 0 and 1; the same queries for every metric.

    Raises:
        ValueError: A cut-off is below 1, or there is none.
        ConfigError: A metric that is a function failed, or returned no finite number.
    """
    cuts = sorted(set(ks))
    if not cuts or cuts[0] < 1:
        raise ValueError(f"ks is {tuple(ks)}; give at least one cut-off, each 1 or more, e.g. {DEFAULT_KS}.")
    judged = with_relevant(qrels)
    joined = ",".join(str(cut) for cut in cuts)
    entries = {name: METRICS.load(name) for name in METRICS.names()}
    ours = {name: entry for name, entry in entries.items() if isinstance(entry, TrecMeasure)}
    measures = {f"{each.name}.{joined}" if each.takes_cuts else each.name for each in ours.values()}
    evaluator = pytrec_eval.RelevanceEvaluator(judged, measures)
    scored = evaluator.evaluate({query_id: dict(run.get(query_id, ())) for query_id in judged})
    per_query = {
        f"{name}@{cut}": {query_id: float(scored[query_id][f"{measure.name}_{cut}"]) for query_id in judged}
        for name, measure in ours.items()
        if measure.takes_cuts
        for cut in cuts
    }
    for cut in cuts:
        # The reciprocal rank is that of the first relevant document: cutting the run at k keeps it or makes it 0.
        ranks = {query_id: float(scored[query_id][MRR.name]) for query_id in judged}
        per_query[f"mrr@{cut}"] = {query_id: rank if rank >= 1.0 / cut else 0.0 for query_id, rank in ranks.items()}
    for name in entries.keys() - ours.keys():
        per_query |= _by_function(name, run, judged, cuts)
    return per_query


def _by_function(
    name: str,
    run: Mapping[str, Sequence[tuple[str, float]]],
    judged: Mapping[str, Mapping[str, int]],
    cuts: Sequence[int],
) -> dict[str, dict[str, float]]:
    """Score each query by a metric that is a function, such as a plugin's.

    Raises:
        ConfigError: It failed, or returned no finite number.
    """
    function, owner = METRICS.load(name), METRICS.plugins().get(name, "vembed")
    scored: dict[str, dict[str, float]] = {f"{name}@{cut}": {} for cut in cuts}
    for query_id, grades in judged.items():
        ranked = [grades.get(document, 0) for document, _ in trec_order(run.get(query_id, ()))]
        for cut in cuts:
            try:
                value = function(ranked, list(grades.values()), cut)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                raise ConfigError(
                    f"the metric {name} of {owner} failed for query {query_id!r} at k = {cut}: "
                    f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}"
                ) from error
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(
                    f"the metric {name} of {owner} returned {value!r} for query {query_id!r} at k = {cut}; it must "
                    "return a finite number"
                )
            scored[f"{name}@{cut}"][query_id] = float(value)
    return scored
