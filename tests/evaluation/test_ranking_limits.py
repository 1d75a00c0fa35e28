"""What a set may say of the ranking: documents that a query never ranks, its only candidates, cut-offs of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vembed.batch import Ragged
from vembed.data.judged import RetrievalData
from vembed.evaluation.benchmark.stored import task_key
from vembed.evaluation.evaluate import EvaluationOptions, RunBuilder, evaluate
from vembed.vectors.provenance import changed_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.evaluation.results import EvaluationResult

NUM = 300
TASK = RetrievalData(
    "line",
    {"q": "0", "r": "1"},
    {f"d{place}": str(place) for place in range(NUM)},
    {"q": {"d3": 1}, "r": {"d150": 1}},
)


def encode(items: Sequence[Item], side: Side) -> NDArray[np.float32]:
    """Put item i at angle i on an arc: the nearest document has the number of the query, then come its neighbours."""
    angles = np.array([int(str(item)) for item in items]) * np.pi / NUM
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def ranked(task: RetrievalData, query: str = "q", depth: int = 5) -> list[str]:
    result = evaluate(encode, task, EvaluationOptions(system="s", ks=(1, 3), depth=depth))
    return [name for name, _ in result.run[query]]


def test_excluded_documents_are_left_out_and_the_list_is_full_all_the_same() -> None:
    assert ranked(TASK) == ["d0", "d1", "d2", "d3", "d4"]
    task = replace(TASK, excluded={"q": frozenset({"d0", "d2", "d1"})})
    assert ranked(task) == ["d3", "d4", "d5", "d6", "d7"]
    assert ranked(task, "r")[0] == ranked(TASK, "r")[0] == "d1"
    assert evaluate(encode, task, EvaluationOptions(system="s")).per_query["hit@1"]["q"] == 1.0


def test_only_candidates_are_ranked_however_far_they_are() -> None:
    task = replace(TASK, candidates={"q": frozenset({"d3", "d299", "d200"})})
    assert ranked(task) == ["d3", "d200", "d299"]
    assert ranked(task, "r") == ranked(TASK, "r"), "a query without candidates ranks all"
    both = replace(task, excluded={"q": frozenset({"d3"})})
    assert ranked(both) == ["d200", "d299"]


def test_cut_offs_of_the_set_are_scored_beside_the_usual_ones_and_deepen_the_list() -> None:
    usual = evaluate(encode, TASK, EvaluationOptions(system="s"))
    assert usual.per_query["hit@100"]["r"] == 0.0
    assert "hit@2" not in usual.metrics
    task = replace(TASK, cutoffs=(2, 200))
    found = evaluate(encode, task, EvaluationOptions(system="s"))
    assert found.per_query["hit@200"]["r"] == 1.0
    assert found.metrics.keys() - usual.metrics.keys() == {
        f"{name}@{k}" for name in ("ndcg", "recall", "precision", "map", "hit", "mrr") for k in (2, 200)
    }
    assert {name: found.metrics[name] for name in usual.metrics} == usual.metrics
    assert len(found.run["q"]) == 200


def test_a_plain_set_asks_for_one_hit_more_than_the_depth() -> None:
    assert RunBuilder(TASK).hits_wanted == 101
    assert RunBuilder(replace(TASK, excluded={"q": frozenset({"d1", "d2"})})).hits_wanted == 103
    assert RunBuilder(replace(TASK, candidates={"q": frozenset({"d1"})})).hits_wanted == NUM


@pytest.mark.parametrize("several", [False, True])
def test_the_order_of_the_corpus_decides_nothing_among_equal_scores(several: bool) -> None:
    """60 documents share each of 5 vectors, so that the end of every list cuts through equal scores."""

    def alike(items: Sequence[Item], side: Side) -> NDArray[np.float32] | Ragged:
        vectors = encode([str(int(str(item)) % 5) for item in items], side)
        return Ragged(vectors, np.arange(len(vectors) + 1)) if several else vectors

    def found(order: list[str]) -> EvaluationResult:
        task = replace(TASK, documents={name: TASK.documents[name] for name in order})
        return evaluate(alike, task, EvaluationOptions(system="s", ks=(1, 10), depth=10))

    names = list(TASK.documents)
    first, *others = (found(order) for order in (names, names[::-1], sorted(names)))
    equal = sorted((name for name in names if int(name[1:]) % 5 == 0), reverse=True)
    assert [name for name, _ in first.run["q"]] == equal[:10], "as trec_eval orders them"
    for other in others:
        assert (other.run, other.metrics) == (first.run, first.metrics)


@pytest.mark.parametrize("field", ["excluded", "candidates", "cutoffs"])
def test_a_stored_result_is_of_the_same_limits(field: str) -> None:
    limit = (7,) if field == "cutoffs" else {"q": frozenset({"d1"})}
    changed = replace(TASK, **{field: limit})
    key = task_key(TASK, with_texts=False)
    assert changed_parts(key, task_key(changed, with_texts=False)) == ["ranking"]
    assert changed_parts(key, task_key(replace(TASK), with_texts=False)) == []
