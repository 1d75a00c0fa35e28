"""The evaluator: its rules on small sets whose answers are plain to see, and what a set may say of the ranking."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from vembed.batch import Composed, Image, Ragged
from vembed.data.judged import RetrievalData
from vembed.errors import DataError, PreemptedError
from vembed.evaluation.benchmark.stored import task_key
from vembed.evaluation.evaluate import EvaluationOptions, evaluate, same_item
from vembed.vectors.provenance import changed_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.evaluation.results import EvaluationResult


ANGLES = RetrievalData(
    name="tiny",
    queries={"q1": "0", "q2": "90"},
    documents={"near": "10", "far": "80", "opposite": "180"},
    qrels={"q1": {"near": 1}, "q2": {"near": 1, "opposite": 0}},
)


TWO_DEEP = EvaluationOptions(system="angles", ks=(1, 2), depth=2)


def encode_angles(texts: Sequence[str], side: Side) -> NDArray[np.float32]:
    """A text is an angle in degrees: cosine similarity falls with the distance of two angles."""
    radians = np.deg2rad(np.array([float(text) for text in texts]))
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def names_of(result_run: Sequence[tuple[str, float]]) -> list[str]:
    return [document for document, _ in result_run]


def random_states() -> tuple[str, str, list[int]]:
    return str(random.getstate()), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_documents_are_ranked_by_similarity_and_scored() -> None:
    result = evaluate(encode_angles, ANGLES, TWO_DEEP)
    assert {query: names_of(hits) for query, hits in result.run.items()} == {
        "q1": ["near", "far"],
        "q2": ["far", "near"],
    }
    assert result.run["q1"][0][1] == pytest.approx(np.cos(np.deg2rad(10)))
    assert result.per_query["mrr@2"] == {"q1": 1.0, "q2": 0.5}
    assert result.metrics["mrr@2"] == 0.75
    assert (result.task, result.system, result.num_queries, result.num_documents) == ("tiny", "angles", 2, 3)
    assert result.notes == ()
    assert result.seconds > 0


def test_a_query_that_finds_itself_is_dropped_and_leaves_the_list_full() -> None:
    task = replace(ANGLES, documents={**ANGLES.documents, "q1": "0"})
    result = evaluate(encode_angles, task, TWO_DEEP)
    assert names_of(result.run["q1"]) == ["near", "far"]
    assert result.notes == ("1 hit is the query itself (same id and content): dropped.",)


def test_ids_that_meet_by_chance_drop_no_document() -> None:
    """Both sides are numbered from 1: document 1 is a wrong answer to query 1; dropping it would flatter the score."""
    task = RetrievalData(
        "numbered", {"1": "0", "2": "90"}, {"1": "5", "2": "80", "3": "10"}, {"1": {"3": 1}, "2": {"2": 1}}
    )
    result = evaluate(encode_angles, task, TWO_DEEP)
    assert names_of(result.run["1"]) == ["1", "3"]
    assert result.per_query["mrr@2"] == {"1": 0.5, "2": 1.0}
    assert result.notes == ("1 hit has the id of the query and other content: kept, as another item.",)


@pytest.mark.parametrize(
    ("query", "document", "same"),
    [
        ("a red fox", "a red fox ", True),
        ("a red fox runs by", "Animals a red fox runs by", True),  # the document behind its title
        ("Animals a red fox runs by", "a red fox runs by", True),  # the same set, reversed
        ("a red fox runs by", "a red fox runs bye", False),
        ("a red fox runs by", "Theta red fox runs by", False),
        ("fox", "a red fox", False),  # a word at the end of another document
        ("", "a red fox", False),
        (Image("a.png", b"one"), Image("b.png", b"one"), True),
        (Image("a.png", b"one"), Image("a.png", b"two"), False),
        (Image("a.png", b"one"), "a.png", False),
        (Composed((Image("a.png", b"one"),), "red"), Composed((Image("a.png", b"one"),), "red"), True),
        (Composed((Image("a.png", b"one"),), "red"), Image("a.png", b"one"), False),
    ],
)
def test_a_document_is_the_query_itself_by_content(query: Item, document: Item, same: bool) -> None:
    assert same_item(query, document) is same


def test_a_query_whose_own_document_is_judged_keeps_it() -> None:
    task = replace(ANGLES, documents={**ANGLES.documents, "q1": "0"}, qrels={**ANGLES.qrels, "q1": {"q1": 1}})
    result = evaluate(encode_angles, task, TWO_DEEP)
    assert names_of(result.run["q1"]) == ["q1", "near"]
    assert result.per_query["hit@1"]["q1"] == 1.0
    assert result.notes == ()


def test_a_document_with_the_id_of_another_query_is_kept() -> None:
    task = replace(ANGLES, documents={**ANGLES.documents, "q2": "1"})
    assert names_of(evaluate(encode_angles, task, TWO_DEEP).run["q1"]) == ["q2", "near"]


LEFT_OUT = "2 queries have no relevant document: left out."
UNASKED = {**ANGLES.queries, "q3": "not an angle", "q4": "nor this"}


@pytest.mark.parametrize(
    ("changes", "options", "note", "recall"),
    [
        ({"queries": UNASKED, "qrels": {**ANGLES.qrels, "q3": {"far": 0}}}, {}, LEFT_OUT, 1.0),
        ({"qrels": {**ANGLES.qrels, "q9": {"near": 1}}}, {}, "1 judged query has no text: left out.", 1.0),
        ({"qrels": {**ANGLES.qrels, "q1": {"near": 1, "lost": 1}}}, {},
         "1 judged document is not in the corpus: what is relevant there counts as missed.", 0.75),
        ({}, {"ks": (2, 100), "depth": 100},
         "k = 100 is over the size of the corpus: at most 3 documents are ranked.", 1.0),
    ],
    ids=["no relevant document", "no text", "not in the corpus", "small corpus"],
)  # fmt: skip
def test_what_a_set_lacks_is_noted_behind_the_notes_of_the_set(
    changes: dict[str, Any], options: dict[str, Any], note: str, recall: float
) -> None:
    task = replace(ANGLES, notes=("7 rows skipped.",), **changes)
    result = evaluate(encode_angles, task, replace(TWO_DEEP, **options))
    assert result.notes == ("7 rows skipped.", note)
    assert (result.num_queries, result.metrics["recall@2"]) == (2, recall)
    assert result.metrics == {metric: fmean(values.values()) for metric, values in result.per_query.items()}


def test_two_evaluations_are_equal_and_leave_every_random_state_alone() -> None:
    rng = np.random.default_rng(0)
    task = RetrievalData(
        name="random",
        queries={f"q{n}": str(angle) for n, angle in enumerate(rng.uniform(0, 360, 40))},
        documents={f"d{n}": str(angle) for n, angle in enumerate(rng.uniform(0, 360, 500))},
        qrels={f"q{n}": {f"d{n}": 1} for n in range(40)},
    )
    before = random_states()
    first = evaluate(encode_angles, task, EvaluationOptions(system="angles"))
    second = evaluate(encode_angles, task, EvaluationOptions(system="angles"))
    assert replace(first, seconds=0) == replace(second, seconds=0)
    assert random_states() == before


def test_an_approximate_index_is_noted_and_may_find_fewer() -> None:
    task = RetrievalData("arc", {"q": "0"}, {f"d{n}": str(n) for n in range(60)}, {"q": {"d0": 1}})
    options = EvaluationOptions(system="angles", ks=(1,), depth=60, index_factory="IVF4,Flat")
    result = evaluate(encode_angles, task, options)
    assert 0 < len(result.run["q"]) < 60
    assert set(names_of(result.run["q"])) <= task.documents.keys()
    (note,) = result.notes
    assert '"IVF4,Flat"' in note


@pytest.mark.parametrize("side", ["document", "query"])
def test_an_encoder_that_loses_a_row_is_refused(side: str) -> None:
    def encode(texts: Sequence[str], encoded_side: Side) -> NDArray[np.float32]:
        return encode_angles(texts, encoded_side)[side == encoded_side :]

    with pytest.raises(ValueError, match=side):
        evaluate(encode, ANGLES, TWO_DEEP)


@pytest.mark.parametrize("changes", [{"documents": {}}, {"queries": {}}, {"qrels": {}}, {"qrels": {"q1": {"near": 0}}}])
def test_a_task_with_nothing_to_search_or_to_score_is_a_data_error(changes: dict[str, object]) -> None:
    with pytest.raises(DataError, match="tiny: "):
        evaluate(encode_angles, replace(ANGLES, **changes), TWO_DEEP)  # type: ignore[arg-type]


def test_a_cut_off_over_the_depth_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="set depth to 10"):
        evaluate(encode_angles, ANGLES, replace(TWO_DEEP, ks=(1, 10)))
    evaluate(encode_angles, ANGLES, replace(TWO_DEEP, ks=(1, 10), depth=10))


def test_poll_can_stop_an_evaluation() -> None:
    def poll() -> None:
        raise PreemptedError("stop")

    with pytest.raises(PreemptedError):
        evaluate(encode_angles, ANGLES, replace(TWO_DEEP, poll=poll))


NUM = 300


LINE = RetrievalData(
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
    assert ranked(LINE) == ["d0", "d1", "d2", "d3", "d4"]
    task = replace(LINE, excluded={"q": frozenset({"d0", "d2", "d1"})})
    assert ranked(task) == ["d3", "d4", "d5", "d6", "d7"]
    assert ranked(task, "r")[0] == ranked(LINE, "r")[0] == "d1"
    assert evaluate(encode, task, EvaluationOptions(system="s")).per_query["hit@1"]["q"] == 1.0


def test_only_candidates_are_ranked_however_far_they_are() -> None:
    task = replace(LINE, candidates={"q": frozenset({"d3", "d299", "d200"})})
    assert ranked(task) == ["d3", "d200", "d299"]
    assert ranked(task, "r") == ranked(LINE, "r"), "a query without candidates ranks all"
    both = replace(task, excluded={"q": frozenset({"d3"})})
    assert ranked(both) == ["d200", "d299"]


def test_cut_offs_of_the_set_are_scored_beside_the_usual_ones_and_deepen_the_list() -> None:
    usual = evaluate(encode, LINE, EvaluationOptions(system="s"))
    assert usual.per_query["hit@100"]["r"] == 0.0
    assert "hit@2" not in usual.metrics
    task = replace(LINE, cutoffs=(2, 200))
    found = evaluate(encode, task, EvaluationOptions(system="s"))
    assert found.per_query["hit@200"]["r"] == 1.0
    assert found.metrics.keys() - usual.metrics.keys() == {
        f"{name}@{k}" for name in ("ndcg", "recall", "precision", "map", "hit", "mrr") for k in (2, 200)
    }
    assert {name: found.metrics[name] for name in usual.metrics} == usual.metrics
    assert len(found.run["q"]) == 200


@pytest.mark.parametrize("several", [False, True])
def test_the_order_of_the_corpus_decides_nothing_among_equal_scores(several: bool) -> None:
    """60 documents share each of 5 vectors, so that the end of every list cuts through equal scores."""

    def alike(items: Sequence[Item], side: Side) -> NDArray[np.float32] | Ragged:
        vectors = encode([str(int(str(item)) % 5) for item in items], side)
        return Ragged(vectors, np.arange(len(vectors) + 1)) if several else vectors

    def found(order: list[str]) -> EvaluationResult:
        task = replace(LINE, documents={name: LINE.documents[name] for name in order})
        return evaluate(alike, task, EvaluationOptions(system="s", ks=(1, 10), depth=10))

    names = list(LINE.documents)
    first, *others = (found(order) for order in (names, names[::-1], sorted(names)))
    equal = sorted((name for name in names if int(name[1:]) % 5 == 0), reverse=True)
    assert [name for name, _ in first.run["q"]] == equal[:10], "as trec_eval orders them"
    for other in others:
        assert (other.run, other.metrics) == (first.run, first.metrics)


@pytest.mark.parametrize("field", ["excluded", "candidates", "cutoffs"])
def test_a_stored_result_is_of_the_same_limits(field: str) -> None:
    limit = (7,) if field == "cutoffs" else {"q": frozenset({"d1"})}
    changed = replace(LINE, **{field: limit})
    key = task_key(LINE, with_texts=False)
    assert changed_parts(key, task_key(changed, with_texts=False)) == ["ranking"]
    assert changed_parts(key, task_key(replace(LINE), with_texts=False)) == []
