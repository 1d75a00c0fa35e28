"""Find the judged queries that a training row holds with their answer: no verdict may rest on them.

1. Queries of the judged sets and the documents that are relevant to them, their answers, are numbered by content: texts
   without regard to case, spaces, punctuation and compatible forms of a character (NFKC), pictures by their bytes.
2. Training queries are looked up among them by a sum over the bytes of their letters and digits, documents by content
   id. Only those that share one, and the documents beside them, become Python strings and are compared as texts.
3. A query is trained on where a row pairs it with an answer, whichever of the two asks there. The query must be equal
   but for case and spaces; in its answer punctuation doesn't count either: titles are joined with and without a full
   stop. A query or an answer that stands in the rows alone is counted: corpora are shared, and known questions may be
   asked of new documents.
4. `find_near` looks for pairs that nearly equal one of training, which takes longer; the caller says how long it may.

Shape legend: N training rows, P (query, document) pairs of them, I items of their table, M items that are looked at.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vembed.batch import content_id
from vembed.data.near import SIMILAR, alike_between, jaccard, normalised, sketches
from vembed.data.table import TEXT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.judged import RetrievalData
    from vembed.data.table import ItemTable, RecordTable

SKETCH_SECONDS, COMPARISON_SECONDS, MATCH_SECONDS = 1.5e-7, 1.5e-7, 2e-9
"""CPU time of `find_near` for each character of a training query, of a pair that is compared, of a document."""

BLOCK_BYTES = 1 << 17
"""Bytes of texts whose letters are added up at a time."""

# Both cases of a letter weigh the same, spaces and punctuation nothing. The order of letters doesn't count: anagrams
# are compared for nothing.
_WEIGHTS = np.random.default_rng(20_261_124).integers(1, 2**63, 256, dtype=np.uint64)
_WEIGHTS[ord("a") : ord("z") + 1] = _WEIGHTS[ord("A") : ord("Z") + 1]
_WEIGHTS[[code for code in range(128) if not chr(code).isalnum()]] = 0


@dataclass(frozen=True, slots=True)
class Overlap:
    """Queries and answers that a judged set shares with the rows that are trained on."""

    num_queries: int  # with a relevant document
    num_answers: int  # documents that are relevant to one of them
    trained: Mapping[str, Sequence[int]]  # query id -> training rows that pair it with an answer
    asked: frozenset[str]  # further queries that training rows ask, with other documents
    num_shared: int  # answers that training rows have as documents
    near: Mapping[str, int] | None = None  # query id -> row that it and an answer nearly equal; None: not compared

    @property
    def line(self) -> str:
        """The counts, for people."""
        counts = {
            "trained on with an answer": len(self.trained),
            "nearly trained on": len(self.near or ()),
            "trained on with other documents": len(self.asked - (self.near or {}).keys()),
        }
        parts = [f"{count:,} {words}" for words, count in counts.items() if count] or ["no query trained on"]
        if self.num_shared:
            parts.append(f"{self.num_shared:,} of {self.num_answers:,} answers are training documents")
        return ", ".join(parts)


class JudgedSets:
    """Judged sets by name, and the training items that equal one of their queries or answers.

    Cost: a sum over the bytes of all training queries, and Python for the few items whose sum is that of a judged one.
    Training texts are never all in memory. The result is kept: `overlaps` of other rows of the same table, after some
    were held out, looks nothing up again.

    Args:
        tasks: The sets.
        records: All rows that may be trained on.

    Raises:
        ImageError: A picture can't be read any more.
    """

    def __init__(self, tasks: Mapping[str, RetrievalData], records: RecordTable) -> None:
        self._tasks = tasks
        self._queries: dict[str, dict[str, int]] = {}  # set -> query id -> number of its content
        self._answers: dict[str, dict[str, list[int]]] = {}  # set -> query id -> numbers of its answers
        self._number_of: dict[str | int, int] = {}  # content -> number
        self._items: list[Item] = []  # by number
        for name, task in tasks.items():
            queries, answers = self._queries.setdefault(name, {}), self._answers.setdefault(name, {})
            documents: dict[str, int] = {}
            for query, grades in task.qrels.items():
                relevant = [one for one, grade in grades.items() if grade > 0 and one in task.documents]
                if not relevant or query not in task.queries:
                    continue
                for document in relevant:
                    if document not in documents:
                        documents[document] = self._number(task.documents[document])
                queries[query] = self._number(task.queries[query])
                answers[query] = [documents[document] for document in relevant]
        self._content_I = np.full(len(records.items), -1, dtype=np.int32)  # training item -> number, -1: not judged
        self._exact: dict[int, str | int] = {}  # training item that is judged -> content, punctuation included
        texts = [f"{item} " for item in self._items if isinstance(item, str)]  # a space: no text may be empty
        self._sums = letter_sums(pa.array(texts, pa.large_string()))

        # First queries, by their letters; then the documents beside those that matched, as texts, since punctuation
        # doesn't count; then all other documents and pictures, by content id, which is exact and costs no text.
        items, query_N, (rows_P, documents_P) = records.items, records.numbers("query")[1], _documents(records)
        self._match_texts(items, query_N)
        self._match(items, documents_P[self._content_I[query_N][rows_P] >= 0])
        ids = np.fromiter(map(content_id, self._items), np.int64, len(self._items)).view(np.uint64)
        others = np.concatenate([query_N[items.modalities[query_N] != TEXT], documents_P])
        self._match(items, others[_among(items.ids[others].view(np.uint64), ids)])

    def _number(self, item: Item) -> int:
        number = self._number_of.setdefault(_content(item), len(self._items))
        if number == len(self._items):
            self._items.append(item)
        return number

    def _match(self, items: ItemTable, candidates: NDArray[np.int64]) -> None:
        """Keep those of some training items that equal a judged one."""
        candidates = np.unique(candidates[self._content_I[candidates] < 0])
        for number, item in zip(candidates.tolist(), items.walk(candidates), strict=True):
            if (content := self._number_of.get(_content(item))) is not None:
                self._content_I[number], self._exact[number] = content, _exact(item)

    def _match_texts(self, items: ItemTable, numbers: NDArray[np.int64]) -> None:
        """Keep those of some training items that are texts and equal a judged one."""
        is_wanted_I = np.zeros(len(items), dtype=np.bool_)
        is_wanted_I[numbers] = True
        for numbers_M, texts_M in items.text_blocks(np.flatnonzero(is_wanted_I)):
            self._match(items, numbers_M[_among(letter_sums(texts_M), self._sums)])

    def overlaps(self, records: RecordTable) -> dict[str, Overlap]:
        """Return what each set shares with rows, which are all or some of those that were looked at."""
        query_N, (rows_P, documents_P) = records.numbers("query")[1], _documents(records)
        asked, documents = (set(self._content_I[numbers].tolist()) for numbers in (query_N, documents_P))
        query_P, document_P = self._content_I[query_N][rows_P], self._content_I[documents_P]
        known_P = (query_P >= 0) & (document_P >= 0)
        pairs = [part[known_P].tolist() for part in (rows_P, query_N[rows_P], documents_P, query_P, document_P)]
        # Two contents -> rows that pair them, with the item that is the first of the two. Both orders: a judged query
        # may stand in the rows as the document and its answer as the query.
        rows_of: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for row, query_item, document_item, query, document in zip(*pairs, strict=True):
            rows_of[query, document].append((row, query_item))
            rows_of[document, query].append((row, document_item))
        paired = {one for one, _ in rows_of}

        overlaps = {}
        for name, queries in self._queries.items():
            trained: dict[str, list[int]] = {}
            for query, number in queries.items():
                if number not in paired:  # most are in no row: they are spared a look at each of their answers
                    continue
                # The numbers are equal without punctuation; the query must be equal with it ("C" is not "C++").
                exact, answers = _exact(self._tasks[name].queries[query]), self._answers[name][query]
                pairing = [pair for answer in answers for pair in rows_of.get((number, answer), ())]
                if rows := {row for row, item in pairing if self._exact[item] == exact}:
                    trained[query] = sorted(rows)
            also_asked = frozenset(query for query, number in queries.items() if number in asked) - trained.keys()
            answers_of_set = {number for numbers in self._answers[name].values() for number in numbers}
            num_shared = len(answers_of_set & documents)
            overlaps[name] = Overlap(len(queries), len(answers_of_set), trained, also_asked, num_shared)
        return overlaps

    def find_near(self, records: RecordTable, *, seconds: float) -> tuple[dict[str, Overlap], float]:
        """Find judged pairs that nearly equal a training row: both query and answer are equal, or nearly so.

        Rows that hold a judged query or answer are compared with its pair; texts of queries are compared with all
        training queries, by MinHash. Pictures are equal or not.

        Args:
            seconds: CPU time that it may take at most, by a rough estimate.

        Returns:
            The overlap of each set with the rows, `near` being None where the search would take longer; and the
            estimate. It is made twice: of sketches alone, and once the pairs to compare are known.
        """
        items, query_N, (rows_P, documents_P) = records.items, records.numbers("query")[1], _documents(records)
        distinct_M = np.unique(query_N)
        # Mean characters of a query and of a document, by some of them.
        query_size, document_size = (
            float(np.mean([len(one) if isinstance(one, str) else 0 for one in items.at(some[:: len(some) // 256 + 1])]))
            for some in (distinct_M, documents_P)
        )
        estimate = len(distinct_M) * query_size * SKETCH_SECONDS + len(documents_P) * document_size * MATCH_SECONDS
        if estimate > seconds:
            return self.overlaps(records), estimate
        self._match_texts(items, documents_P)  # so far only documents beside a judged query were compared as texts
        overlaps = self.overlaps(records)
        judged = [
            (name, query)
            for name, queries in self._queries.items()
            for query in queries
            if query not in overlaps[name].trained
        ]
        judged_with: defaultdict[int, list[int]] = defaultdict(list)  # content -> positions in `judged` that have it
        weights = np.zeros(len(self._items))  # characters that are compared for a row with this content
        for position, (name, query) in enumerate(judged):
            answers = self._answers[name][query]
            for number in {self._queries[name][query], *answers}:
                judged_with[number].append(position)
                weights[number] += query_size + len(answers) * document_size
        content_M = self._content_I[np.concatenate([query_N, documents_P])]
        rows_M = np.concatenate([np.arange(len(records)), rows_P])[content_M >= 0]
        content_M = content_M[content_M >= 0]
        estimate += COMPARISON_SECONDS * float(weights[content_M].sum())
        if estimate > seconds:
            return overlaps, estimate

        # (position in `judged`, row): rows with a judged query or one of its answers, and rows whose query is alike.
        candidates = {
            (position, row)
            for row, number in zip(rows_M.tolist(), content_M.tolist(), strict=True)
            for position in judged_with[number]
        }
        candidates |= self._rows_alike(records, judged, distinct_M)
        rows = sorted({row for _, row in candidates})
        record_of = dict(zip(rows, records.take(rows), strict=True))
        near: dict[str, dict[str, int]] = {name: {} for name in overlaps}
        for position, row in sorted(candidates):
            name, query = judged[position]
            record, documents = record_of[row], [self._items[number] for number in self._answers[name][query]]
            if query in near[name] or not _alike(self._items[self._queries[name][query]], record.query):
                continue
            if any(_alike(one, other) for other in record.positives for one in documents):
                near[name][query] = row
        return {name: replace(overlap, near=near[name]) for name, overlap in overlaps.items()}, estimate

    def _rows_alike(
        self, records: RecordTable, judged: Sequence[tuple[str, str]], numbers_M: NDArray[np.int64]
    ) -> set[tuple[int, int]]:
        """Return (position in `judged`, row) of texts of queries that nearly equal each other.

        Args:
            numbers_M: The distinct queries of the rows.
        """
        items = [self._items[self._queries[name][query]] for name, query in judged]
        positions = [position for position, item in enumerate(items) if isinstance(item, str)]
        queries = [normalised(item) for item in items if isinstance(item, str)]
        # The judged queries stand before those of training; of the latter only sketches are kept, 40 bytes a text, and
        # the texts of candidates are read again.
        numbers, bands = [numbers_M[:0]], [sketches(queries)]
        for block_M, texts_M in records.items.text_blocks(numbers_M):
            numbers.append(block_M)
            bands.append(sketches([normalised(text) for text in texts_M.to_pylist()]))
        numbers_M = np.concatenate(numbers)

        def texts(at: NDArray[np.int64]) -> list[str]:
            trained = iter(records.items.at(numbers_M[at[at >= len(queries)] - len(queries)]))
            return [queries[one] if one < len(queries) else normalised(str(next(trained))) for one in at.tolist()]

        alike = alike_between(np.concatenate(bands, axis=1), len(queries), texts)
        # A query may stand in many rows: rows sorted by their query hold them as one slice.
        query_N = records.numbers("query")[1]
        order = np.argsort(query_N, kind="stable")
        numbers_P = numbers_M[alike.second_P - len(queries)]
        begins, ends = (np.searchsorted(query_N[order], numbers_P, side=side) for side in ("left", "right"))
        return {
            (positions[first], row)
            for first, begin, end in zip(alike.first_P.tolist(), begins.tolist(), ends.tolist(), strict=True)
            for row in order[begin:end].tolist()
        }


def _content(item: Item) -> str | int:
    """Return the identity of an item, case, spaces and punctuation aside."""
    return normalised(item) if isinstance(item, str) else content_id(item)


def _exact(item: Item) -> str | int:
    """Return the identity of an item, case and spaces aside."""
    if not isinstance(item, str):
        return content_id(item)
    return " ".join(unicodedata.normalize("NFKC", item).casefold().split())


def _documents(records: RecordTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (row, item) of every document that a row pairs with its query: positives, and all whose pair is graded."""
    rows, items = records.numbers("positives")
    is_graded_N = records.lists("scores")[0] > 0
    if not is_graded_N.any():
        return rows, items
    further_rows, further_items = records.numbers("negatives")
    is_graded_P = is_graded_N[further_rows]
    return (
        np.concatenate([rows, further_rows[is_graded_P]]),
        np.concatenate([items, further_items[is_graded_P]]),
    )


def letter_sums(texts_M: pa.Array) -> NDArray[np.uint64]:
    """Return a hash of the letters and digits of each text, (M,): equal where `_content` is, but for rare foldings.

    No text may be empty.
    """
    sums_M = _byte_sums(texts_M)
    further = np.flatnonzero(~pc.string_is_ascii(texts_M).to_numpy(zero_copy_only=False))
    if len(further):  # about ten times as slow: only those that need it
        plain = pc.utf8_normalize(texts_M.take(pa.array(further)), "NFKC")
        sums_M[further] = _byte_sums(pc.utf8_upper(pc.replace_substring_regex(plain, r"[^\pL\pN]+", " ")))
    return sums_M


def _byte_sums(texts_M: pa.Array) -> NDArray[np.uint64]:
    """Return the sum of the weights of each text's bytes, (M,)."""
    if not len(texts_M):
        return np.empty(0, dtype=np.uint64)
    _, offsets, content = texts_M.buffers()
    cuts = np.frombuffer(offsets, np.int64)[texts_M.offset :][: len(texts_M) + 1]
    codes = np.frombuffer(content, np.uint8)
    # A block of whole texts at a time: weights that stay in a core's cache are added up four times as fast.
    ends = np.unique(np.searchsorted(cuts, np.arange(cuts[0], cuts[-1], BLOCK_BYTES), side="right"))
    sums = []
    for begin, end in pairwise([0, *ends.tolist(), len(texts_M)]):
        part = cuts[begin : end + 1]
        if begin < end:  # the last block may be empty
            sums.append(np.add.reduceat(np.take(_WEIGHTS, codes[part[0] : part[-1]]), part[:-1] - part[0]))
    return np.concatenate(sums)


def _among(values_M: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which hashes are among some few wanted ones.

    The low 20 bits settle nearly all of them by one look-up in a table of 1 MiB; only the rest is searched for.
    """
    is_low = np.zeros(1 << 20, dtype=np.bool_)
    is_low[wanted & np.uint64(len(is_low) - 1)] = True
    among_M: NDArray[np.bool_] = is_low[values_M & np.uint64(len(is_low) - 1)]
    among_M[among_M] = np.isin(values_M[among_M], wanted)
    return among_M


def _alike(one: Item, other: Item) -> bool:
    """Return whether two texts are equal or nearly so, or two pictures equal."""
    if not isinstance(one, str) or not isinstance(other, str):
        return type(one) is type(other) and content_id(one) == content_id(other)
    one, other = normalised(one), normalised(other)
    return one == other or jaccard(one, other) >= SIMILAR
