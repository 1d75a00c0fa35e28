"""The evaluator: its rules on small tasks whose answers are plain to see."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from vembed.batch import Composed, Image
from vembed.data.judged import RetrievalData
from vembed.errors import ConfigError, DataError, NonFiniteError, PreemptedError
from vembed.evaluation.evaluate import EvaluationOptions, evaluate, same_item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item, Side

TASK = RetrievalData(
    name="tiny",
    queries={"q1": "0", "q2": "90"},
    documents={"near": "10", "far": "80", "opposite": "180"},
    qrels={"q1": {"near": 1}, "q2": {"near": 1, "opposite": 0}},
)
OPTIONS = EvaluationOptions(system="angles", ks=(1, 2), depth=2)


def encode_angles(texts: Sequence[str], side: Side) -> NDArray[np.float32]:
    """A text is an angle in degrees: cosine similarity falls with the distance of two angles."""
    radians = np.deg2rad(np.array([float(text) for text in texts]))
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def ranked(result_run: Sequence[tuple[str, float]]) -> list[str]:
    return [document for document, _ in result_run]


def random_states() -> tuple[str, str, list[int]]:
    return str(random.getstate()), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_documents_are_ranked_by_similarity_and_scored() -> None:
    result = evaluate(encode_angles, TASK, OPTIONS)
    assert {query: ranked(hits) for query, hits in result.run.items()} == {"q1": ["near", "far"], "q2": ["far", "near"]}
    assert result.run["q1"][0][1] == pytest.approx(np.cos(np.deg2rad(10)))
    assert result.per_query["mrr@2"] == {"q1": 1.0, "q2": 0.5}
    assert result.metrics["mrr@2"] == 0.75
    assert (result.task, result.system, result.num_queries, result.num_documents) == ("tiny", "angles", 2, 3)
    assert result.notes == ()
    assert result.seconds > 0


def test_documents_are_encoded_before_queries_each_with_its_side() -> None:
    seen = []

    def encode(texts: Sequence[str], side: Side) -> NDArray[np.float32]:
        seen.append((side, list(texts)))
        return encode_angles(texts, side)

    evaluate(encode, TASK, OPTIONS)
    assert seen == [("document", ["10", "80", "180"]), ("query", ["0", "90"])]


def test_every_mean_is_over_the_judged_queries() -> None:
    result = evaluate(encode_angles, TASK, OPTIONS)
    assert result.metrics == {metric: fmean(values.values()) for metric, values in result.per_query.items()}
    assert result.metrics.keys() >= {"ndcg@1", "recall@2", "precision@1", "map@2", "hit@1", "mrr@1"}


def test_a_query_that_finds_itself_is_dropped_and_leaves_the_list_full() -> None:
    task = replace(TASK, documents={**TASK.documents, "q1": "0"})
    result = evaluate(encode_angles, task, OPTIONS)
    assert ranked(result.run["q1"]) == ["near", "far"]
    assert result.notes == ("1 hit is the query itself (same id and content): dropped.",)


def test_ids_that_meet_by_chance_drop_no_document() -> None:
    """Both sides are numbered from 1: document 1 is a wrong answer to query 1; dropping it would flatter the score."""
    task = RetrievalData(
        "numbered", {"1": "0", "2": "90"}, {"1": "5", "2": "80", "3": "10"}, {"1": {"3": 1}, "2": {"2": 1}}
    )
    result = evaluate(encode_angles, task, OPTIONS)
    assert ranked(result.run["1"]) == ["1", "3"]
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
    task = replace(TASK, documents={**TASK.documents, "q1": "0"}, qrels={**TASK.qrels, "q1": {"q1": 1}})
    result = evaluate(encode_angles, task, OPTIONS)
    assert ranked(result.run["q1"]) == ["q1", "near"]
    assert result.per_query["hit@1"]["q1"] == 1.0
    assert result.notes == ()


def test_a_document_with_the_id_of_another_query_is_kept() -> None:
    task = replace(TASK, documents={**TASK.documents, "q2": "1"})
    assert ranked(evaluate(encode_angles, task, OPTIONS).run["q1"]) == ["q2", "near"]


def test_queries_without_a_relevant_document_are_not_encoded_and_noted() -> None:
    task = replace(
        TASK, queries={**TASK.queries, "q3": "not an angle", "q4": "nor this"}, qrels={**TASK.qrels, "q3": {"far": 0}}
    )
    result = evaluate(encode_angles, task, OPTIONS)
    assert result.metrics == evaluate(encode_angles, TASK, OPTIONS).metrics
    assert result.num_queries == 2
    assert result.notes == ("2 queries have no relevant document: left out.",)


def test_judged_queries_without_a_text_are_noted() -> None:
    result = evaluate(encode_angles, replace(TASK, qrels={**TASK.qrels, "q9": {"near": 1}}), OPTIONS)
    assert result.num_queries == 2
    assert result.notes == ("1 judged query has no text: left out.",)


def test_a_relevant_document_outside_the_corpus_counts_as_missed_and_is_noted() -> None:
    result = evaluate(encode_angles, replace(TASK, qrels={**TASK.qrels, "q1": {"near": 1, "lost": 1}}), OPTIONS)
    assert result.per_query["recall@2"]["q1"] == 0.5
    assert result.notes == ("1 judged document is not in the corpus: what is relevant there counts as missed.",)


def test_a_cut_off_over_the_corpus_ranks_all_of_it_and_is_noted() -> None:
    result = evaluate(encode_angles, TASK, EvaluationOptions(system="angles"))
    assert all(sorted(ranked(hits)) == ["far", "near", "opposite"] for hits in result.run.values())
    assert result.metrics["recall@100"] == 1.0
    assert result.notes == ("k = 100 is over the size of the corpus: at most 3 documents are ranked.",)


def test_the_notes_of_the_task_come_first() -> None:
    result = evaluate(encode_angles, replace(TASK, notes=("7 rows skipped.",)), EvaluationOptions(system="angles"))
    assert result.notes[0] == "7 rows skipped."
    assert len(result.notes) == 2


def test_ties_stand_in_trec_order() -> None:
    task = replace(TASK, documents={"a": "10", "c": "10", "b": "10"}, qrels={"q1": {"a": 1}})
    result = evaluate(encode_angles, task, EvaluationOptions(system="angles", ks=(3,)))
    assert ranked(result.run["q1"]) == ["c", "b", "a"]
    assert result.metrics["mrr@3"] == 1 / 3


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
    documents = {f"d{n}": str(n) for n in range(60)}
    task = RetrievalData(name="arc", queries={"q": "0"}, documents=documents, qrels={"q": {"d0": 1}})
    options = EvaluationOptions(system="angles", ks=(1,), depth=60, index_factory="IVF4,Flat")
    result = evaluate(encode_angles, task, options)
    assert 0 < len(result.run["q"]) < 60
    assert set(ranked(result.run["q"])) <= set(documents)
    assert result.notes == ('Searched with the FAISS index "IVF4,Flat", which may miss documents.',)


def test_nan_embeddings_are_refused() -> None:
    def encode(texts: Sequence[str], side: Side) -> NDArray[np.float32]:
        return encode_angles(texts, side) * np.float32(np.nan if side == "query" else 1)

    with pytest.raises(NonFiniteError, match="2 of 2 query vectors"):
        evaluate(encode, TASK, OPTIONS)


@pytest.mark.parametrize("side", ["document", "query"])
def test_an_encoder_that_loses_a_row_is_refused(side: str) -> None:
    def encode(texts: Sequence[str], encoded_side: Side) -> NDArray[np.float32]:
        return encode_angles(texts, encoded_side)[side == encoded_side :]

    with pytest.raises(ValueError, match=rf"\d {side} texts"):
        evaluate(encode, TASK, OPTIONS)


@pytest.mark.parametrize("changes", [{"documents": {}}, {"queries": {}}, {"qrels": {}}, {"qrels": {"q1": {"near": 0}}}])
def test_a_task_with_nothing_to_search_or_to_score_is_a_data_error(changes: dict[str, object]) -> None:
    with pytest.raises(DataError, match="tiny: "):
        evaluate(encode_angles, replace(TASK, **changes), OPTIONS)  # type: ignore[arg-type]


def test_a_cut_off_over_the_depth_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="set depth to 10"):
        evaluate(encode_angles, TASK, replace(OPTIONS, ks=(1, 10)))
    evaluate(encode_angles, TASK, replace(OPTIONS, ks=(1, 10), depth=10))


def test_a_misspelt_index_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="Flatt"):
        evaluate(encode_angles, TASK, replace(OPTIONS, index_factory="Flatt"))


def test_poll_can_stop_an_evaluation() -> None:
    def poll() -> None:
        raise PreemptedError("stop")

    with pytest.raises(PreemptedError):
        evaluate(encode_angles, TASK, replace(OPTIONS, poll=poll))
