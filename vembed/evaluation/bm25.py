"""BM25: what plain word matching finds, the line that an embedding model should be above.

One form, stated so that it can be compared: lower-cased runs of letters and digits in Unicode's NFC,
without the stop words of the language, cut to their stems; Lucene's BM25 with k1 = 0.9 and b = 0.4. A document that
shares no stem with the query is not found. The form "plain" keeps words whole as Python's regular expressions see them,
of two characters or more, with underscores; it finds less, and a model looks better beside it than it is.
Source: Robertson & Zaragoza (2009); parameters and stemming of Anserini, which BEIR's BM25 numbers use; Porter,
Snowball (2001); Lu, BM25S (2024).
"""

from __future__ import annotations

import logging
import time
import unicodedata
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import texts_of
from vembed.evaluation.evaluate import RunBuilder, counted
from vembed.evaluation.metrics import DEFAULT_DEPTH, DEFAULT_KS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import bm25s

    from vembed.batch import Item
    from vembed.data.judged import RetrievalData
    from vembed.evaluation.keys import Bm25Language
    from vembed.evaluation.results import EvaluationResult

SYSTEM = "BM25"
WORDS, PLAIN_WORDS = r"[^\W_]+", r"\b\w\w+\b"
K1 = 0.9
B = 0.4

POLL_QUERIES = 256
"""Queries between two polls: under a second on a corpus of 100,000 documents."""


def why_no_bm25(task: RetrievalData) -> str | None:
    """Return a sentence where a task has nothing to search, or isn't made of texts alone; else None."""
    if task.grades:
        return f"BM25 is left out: {task.name} has graded pairs, and nothing is searched."
    items = (*task.queries.values(), *task.documents.values())
    pictures = sum(not isinstance(item, str) for item in items)
    if not pictures:
        return None
    return (
        f"BM25 is left out: it matches words, and {counted(pictures, 'item is a picture', 'items are pictures')} "
        f"among the {len(items)} queries and documents of {task.name}."
    )


def evaluate_bm25(
    task: RetrievalData,
    ks: Sequence[int] = DEFAULT_KS,
    *,
    depth: int = DEFAULT_DEPTH,
    language: Bm25Language = "english",
    poll: Callable[[], None] | None = None,
) -> EvaluationResult:
    """Evaluate BM25 on one task, under the same rules as an encoder.

    Args:
        depth: Documents kept per query; at least the largest cut-off.
        language: Of the texts, whose stemmer and stop words are used; "plain" is the form without stems.
        poll: Called between batches of queries; it may raise, e.g. `PreemptedError`.

    Returns:
        Metrics, per-query values and the run; a query without a known word has an empty list and scores 0.

    Raises:
        DataError: The task has nothing to search or to score.
        TypeError: The task holds a picture, alone or with a text.
        ValueError: A cut-off is over the depth.
    """
    builder = RunBuilder(task, ks=ks, depth=depth)
    started = time.perf_counter()
    document_ids = list(task.documents)
    # bm25s can't index a corpus without any word (emoji, single letters): then there is no index, and no hit.
    document_words, index = _words(list(task.documents.values()), language), None
    if any(document_words):
        index = _bm25s().BM25(k1=K1, b=B, method="lucene", backend="numpy")
        index.index(document_words, show_progress=False)
    words = _words([task.queries[query_id] for query_id in builder.query_ids], language)
    nothing_found = 0
    for position, (query_id, query_words) in enumerate(zip(builder.query_ids, words, strict=True)):
        if poll is not None and position % POLL_QUERIES == 0:
            poll()
        hits = _hits(index, query_words, wanted=builder.hits_wanted)
        nothing_found += not hits
        builder.add(query_id, ((document_ids[row], score) for row, score in hits))
    seconds = time.perf_counter() - started
    notes = [language_note(language)]
    if nothing_found:
        notes.append(
            f"{counted(nothing_found, 'query shares', 'queries share')} no word with the corpus: nothing found."
        )
    return builder.result(SYSTEM, seconds=seconds, notes=notes)


def language_note(language: Bm25Language) -> str:
    """Return the sentence that says how BM25 read the words."""
    if language == "plain":
        return "BM25 reads words as they are written, without English stop words (bm25_language: plain)."
    name = language.capitalize()
    return f"BM25 reads words as {name}: stemmed, without {name} stop words (bm25_language: {language})."


def _bm25s() -> Any:
    """Import bm25s, and undo that it sets its own logger to DEBUG, which would fill a run's log."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _words(texts: Sequence[Item], language: Bm25Language) -> list[list[str]]:
    """Return the words of each text that count, in order; stop words are taken out before the others are stemmed."""
    import Stemmer

    is_plain = language == "plain"
    words: list[list[str]] = _bm25s().tokenize(
        # An accent behind its letter is no letter to the patterns, and would end the word.
        [unicodedata.normalize("NFC", text) for text in texts_of(texts)],
        lower=True,
        token_pattern=PLAIN_WORDS if is_plain else WORDS,
        stopwords="english" if is_plain else language,
        stemmer=None if is_plain else Stemmer.Stemmer(language),
        return_ids=False,
        show_progress=False,
    )
    return words


def _hits(index: bm25s.BM25 | None, words: list[str], *, wanted: int) -> list[tuple[int, float]]:
    """Return (row, score) of the best documents, in any order: `wanted` of them, and all that tie with the last."""
    if index is None or not words:
        return []
    # A sort of all scores would cost most of the search: partition finds the last one that counts, and ties with it
    # stay, since the order among them is settled by trec_eval's rule later.
    scores_D = index.get_scores(words)
    rows = np.flatnonzero(scores_D > 0)
    if len(rows) > wanted:
        worst_kept = np.partition(scores_D[rows], -wanted)[-wanted]
        rows = rows[scores_D[rows] >= worst_kept]
    return list(zip(rows.tolist(), scores_D[rows].tolist(), strict=True))
