"""BM25: equal to the formula, under the evaluator's rules, and at the published level on SciFact."""

from __future__ import annotations

import csv
import json
import logging
import os
from dataclasses import replace
from math import log
from pathlib import Path
from typing import get_args

import pytest

from vembed.data.judged import RetrievalData
from vembed.data.read import read
from vembed.errors import DataError, PreemptedError
from vembed.evaluation.bm25 import evaluate_bm25
from vembed.evaluation.keys import Bm25Language

TASK = RetrievalData(
    name="animals",
    queries={"q1": "Where is the CAT?", "q2": "a dog, fast"},
    documents={"d1": "The cat sat", "d2": "A dog ran fast", "d3": "cat dog cat", "d4": "of the"},
    qrels={"q1": {"d1": 1}, "q2": {"d2": 1}},
)
ENGLISH = "BM25 reads words as English: stemmed, without English stop words (bm25_language: english)."
WORDS = {"d1": ["cat", "sat"], "d2": ["dog", "ran", "fast"], "d3": ["cat", "dog", "cat"], "d4": []}


def by_formula(query: list[str], document: str) -> float:
    """Lucene's BM25: inverse document frequency times saturated, length-normalised term frequency."""
    mean_length = sum(map(len, WORDS.values())) / len(WORDS)
    total = 0.0
    for word in query:
        frequency = sum(word in words for words in WORDS.values())
        count = WORDS[document].count(word)
        norm = 0.9 * (1 - 0.4 + 0.4 * len(WORDS[document]) / mean_length)
        total += log(1 + (len(WORDS) - frequency + 0.5) / (frequency + 0.5)) * count / (count + norm)
    return total


def test_scores_equal_the_formula_and_documents_without_a_word_are_not_found() -> None:
    result = evaluate_bm25(TASK, (1, 3))
    assert {query: [document for document, _ in hits] for query, hits in result.run.items()} == {
        "q1": ["d3", "d1"],
        "q2": ["d2", "d3"],
    }
    for query, words in {"q1": ["cat"], "q2": ["dog", "fast"]}.items():
        for document, score in result.run[query]:
            assert score == pytest.approx(by_formula(words, document), rel=1e-5)
    assert result.per_query["mrr@3"] == {"q1": 0.5, "q2": 1.0}
    assert (result.system, result.task, result.num_documents, result.notes) == ("BM25", "animals", 4, (ENGLISH,))


@pytest.mark.parametrize("text", ["zebra", "the of", "?!", ""])
def test_a_query_without_a_known_word_finds_nothing_and_still_counts(text: str) -> None:
    result = evaluate_bm25(replace(TASK, queries={**TASK.queries, "q2": text}), (1, 3))
    assert result.run["q2"] == ()
    assert result.per_query["ndcg@3"]["q2"] == 0.0
    assert result.num_queries == 2
    assert result.metrics["mrr@3"] == 0.25
    assert result.notes == (ENGLISH, "1 query shares no word with the corpus: nothing found.")


def test_a_corpus_without_a_word_scores_zero() -> None:
    result = evaluate_bm25(replace(TASK, documents={"d1": "🐈", "d2": "the"}), (1,))
    assert set(result.metrics.values()) == {0.0}
    assert result.notes == (ENGLISH, "2 queries share no word with the corpus: nothing found.")


def test_the_self_match_rule_is_the_evaluators() -> None:
    task = replace(TASK, documents={**TASK.documents, "q1": "Where is the CAT?"})
    dropped = evaluate_bm25(task, (1, 3))
    assert "q1" not in dict(dropped.run["q1"])
    assert dropped.notes[1:] == ("1 hit is the query itself (same id and content): dropped.",)
    judged = evaluate_bm25(replace(task, qrels={**TASK.qrels, "q1": {"q1": 1}}), (1, 3))
    assert judged.per_query["hit@1"]["q1"] == 1.0
    other = evaluate_bm25(replace(TASK, documents={**TASK.documents, "q1": "another cat"}), (1, 3))
    assert "q1" in dict(other.run["q1"])
    assert other.notes[1:] == ("1 hit has the id of the query and other content: kept, as another item.",)


def test_the_list_is_cut_to_the_depth_with_ties_in_trec_order() -> None:
    documents = {f"d{number}": "same words" for number in range(10, 40)}
    task = RetrievalData("ties", {"q": "same"}, documents, {"q": {"d39": 1}})
    result = evaluate_bm25(task, (1, 5), depth=5)
    assert [document for document, _ in result.run["q"]] == ["d39", "d38", "d37", "d36", "d35"]


def test_a_task_with_nothing_to_score_is_a_data_error() -> None:
    with pytest.raises(DataError, match="animals: "):
        evaluate_bm25(replace(TASK, qrels={}), (1,))


def test_poll_can_stop_bm25() -> None:
    def poll() -> None:
        raise PreemptedError("stop")

    with pytest.raises(PreemptedError):
        evaluate_bm25(TASK, (1,), poll=poll)


def test_nothing_is_printed_or_logged(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        evaluate_bm25(TASK, (1,))
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def found(query: str, document: str, language: Bm25Language) -> bool:
    """Return whether a query finds the only document of a corpus."""
    task = RetrievalData("one", {"q": query}, {"d": document}, {"q": {"d": 1}})
    return evaluate_bm25(task, (1,), language=language).metrics["hit@1"] == 1.0


def test_words_are_stemmed_in_english_and_plain_ones_are_not() -> None:
    assert found("listing files", "lists a file", "english")
    assert not found("listing files", "lists a file", "plain")
    assert found("who calls open file", "open_file()", "english")
    assert not found("who calls open file", "open_file()", "plain")
    assert not found("the of and", "the of and", "english"), "stop words"
    assert not found("the of and", "the of and", "plain"), "stop words"
    assert evaluate_bm25(TASK, (1,), language="plain").notes == (
        "BM25 reads words as they are written, without English stop words (bm25_language: plain).",
    )


def test_another_language_has_its_own_stems_and_stop_words() -> None:
    assert found("die Häuser", "ein Haus", "german")
    assert not found("die Häuser", "ein Haus", "english")
    assert not found("nicht ohne", "nicht ohne", "german"), "stop words"
    assert found("nicht ohne", "nicht ohne", "english")


@pytest.mark.parametrize("language", get_args(Bm25Language))
def test_every_language_that_the_key_names_is_one_of_the_stemmer_and_of_the_stop_words(language: Bm25Language) -> None:
    result = evaluate_bm25(TASK, (1,), language=language)
    assert result.run["q2"][0][0] == "d2"
    assert f"(bm25_language: {language})" in result.notes[0]


@pytest.mark.skipif("VEMBED_TEST_DATA" not in os.environ, reason="VEMBED_TEST_DATA names no folder with tldr/")
def test_stems_and_parted_names_find_more_of_tldr_than_plain_words() -> None:
    task = read(str(Path(os.environ["VEMBED_TEST_DATA"]) / "tldr"), "test").judged()
    assert evaluate_bm25(task).metrics["ndcg@10"] == pytest.approx(0.489, abs=0.002)
    assert evaluate_bm25(task, language="plain").metrics["ndcg@10"] == pytest.approx(0.432, abs=0.002)


@pytest.mark.skipif("VEMBED_TEST_DATA" not in os.environ, reason="VEMBED_TEST_DATA names no folder with scifact/")
def test_scifact_is_at_the_published_level() -> None:
    folder = Path(os.environ["VEMBED_TEST_DATA"]) / "scifact"

    def rows(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]

    qrels: dict[str, dict[str, int]] = {}
    with (folder / "qrels" / "test.tsv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            qrels.setdefault(row["query-id"], {})[row["corpus-id"]] = int(row["score"])
    task = RetrievalData(
        name="scifact/test",
        queries={row["_id"]: row["text"] for row in rows("queries.jsonl") if row["_id"] in qrels},
        documents={row["_id"]: f"{row['title']} {row['text']}" for row in rows("corpus.jsonl")},
        qrels=qrels,
    )
    result = evaluate_bm25(task)
    assert (result.num_queries, result.num_documents) == (300, 5183)
    assert 0.65 < result.metrics["ndcg@10"] < 0.72
    assert result.notes == (ENGLISH,)
