"""BM25: equal to the formula, under the evaluator's rules, at the published level on SciFact, and for texts alone."""

from __future__ import annotations

import json
import logging
import os
import unicodedata
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any, get_args

import PIL.Image
import pytest
import torch

from vembed.batch import Image
from vembed.data.judged import RetrievalData
from vembed.data.read import DataSource
from vembed.errors import ConfigError, DataError, PreemptedError
from vembed.evaluation.benchmark.run import BenchmarkOptions, run_benchmark
from vembed.evaluation.bm25 import evaluate_bm25, why_no_bm25
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
    assert (result.num_queries, result.metrics["mrr@3"]) == (2, 0.25)
    assert result.notes == (ENGLISH, "1 query shares no word with the corpus: nothing found.")
    wordless = evaluate_bm25(replace(TASK, documents={"d1": "🐈", "d2": "the"}), (1,))
    assert {*wordless.metrics.values()} == {0.0}


def test_bm25_can_be_stopped_and_refuses_what_it_cannot_score() -> None:
    def poll() -> None:
        raise PreemptedError("stop")

    with pytest.raises(PreemptedError):
        evaluate_bm25(TASK, (1,), poll=poll)
    with pytest.raises(DataError, match="animals: "):
        evaluate_bm25(replace(TASK, qrels={}), (1,))
    with pytest.raises(TypeError):
        evaluate_bm25(replace(TASK, documents=dict.fromkeys(TASK.documents, Image("cat.png", b"bytes"))), (1,))


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


@pytest.mark.parametrize("language", ["german", "plain"])
def test_an_accent_that_is_a_character_of_its_own_parts_no_word(language: Bm25Language) -> None:
    apart = unicodedata.normalize("NFD", "Müller")
    assert apart != "Müller"
    assert found("Müller", apart, language)
    assert found(apart, "Müller", language)
    assert not found("mu", apart, language)


def test_every_language_that_the_key_names_is_one_of_the_stemmer_and_of_the_stop_words() -> None:
    for language in get_args(Bm25Language):
        result = evaluate_bm25(TASK, (1,), language=language)
        assert result.run["q2"][0][0] == "d2", language
        assert f"(bm25_language: {language})" in result.notes[0]


@pytest.mark.slow
@pytest.mark.skipif("VEMBED_TEST_DATA" not in os.environ, reason="VEMBED_TEST_DATA names no folder with tldr/")
def test_stems_and_parted_names_find_more_of_tldr_than_plain_words() -> None:
    task = DataSource(str(Path(os.environ["VEMBED_TEST_DATA"]) / "tldr"), "test").judged()
    assert evaluate_bm25(task).metrics["ndcg@10"] == pytest.approx(0.489, abs=0.002)
    assert evaluate_bm25(task, language="plain").metrics["ndcg@10"] == pytest.approx(0.432, abs=0.002)


@pytest.mark.skipif("VEMBED_TEST_DATA" not in os.environ, reason="VEMBED_TEST_DATA names no folder with scifact/")
def test_scifact_is_at_the_published_level() -> None:
    result = evaluate_bm25(DataSource(str(Path(os.environ["VEMBED_TEST_DATA"]) / "scifact"), "test").judged())
    assert (result.num_queries, result.num_documents) == (300, 5183)
    assert 0.65 < result.metrics["ndcg@10"] < 0.72
    assert result.notes == (ENGLISH,)


TEXTS = RetrievalData("animals", {"q1": "a cat", "q2": "a dog"}, {"d1": "the cat", "d2": "a dog"}, {"q1": {"d1": 1}})


PICTURE = Image("cat.png", b"bytes")


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"documents": {**TEXTS.documents, "d1": PICTURE}}, "1 item "),
        ({"queries": {**TEXTS.queries, "q2": PICTURE}}, "1 item "),
        ({"documents": dict.fromkeys(TEXTS.documents, PICTURE)}, "2 items "),
    ],
    ids=["a document", "a query", "all documents"],
)
def test_a_task_with_a_picture_on_either_side_says_why_in_one_line(changes: dict[str, Any], count: str) -> None:
    assert why_no_bm25(TEXTS) is None
    reason = why_no_bm25(replace(TEXTS, **changes))
    assert reason is not None
    assert count in reason
    assert "\n" not in reason


def test_a_benchmark_leaves_the_set_with_pictures_out_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PIL.Image.new("RGB", (4, 4)).save(tmp_path / "cat.png")
    rows = {"pictures": {"query": "a cat", "positive_image": "cat.png"}, "words": {"query": "a cat", "positive": "cat"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    options = BenchmarkOptions(torch.device("cpu"), 8, None, None, bm25_language="english", poll=lambda: None)
    paths = [str(tmp_path / f"{name}.jsonl") for name in rows]
    with caplog.at_level(logging.INFO, logger="vembed"):
        results = list(run_benchmark([], paths, tmp_path / "out", options))
    assert [result.task for result in results] == ["words.jsonl"]
    assert [record.getMessage().count("BM25 is left out") for record in caplog.records] == [1]
    with pytest.raises(ConfigError, match="bm25 alone"):
        list(run_benchmark([], paths[:1], tmp_path / "out", options))
