"""Run the benchmark: every model on every set, each corpus encoded once, each result kept as it comes.

1. Read all sets, and refuse what can't be done with them before the first model is loaded.
2. For each model: hash it, then go through the sets. What is on disk and made of the same is read; the rest is done.
3. Vectors are encoded when the first result asks for them, so that a rerun without news encodes nothing.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import bm25s
import faiss
import numpy as np
import Stemmer
import torch

from vembed.batch import Ragged
from vembed.data.judged import REVERSED
from vembed.data.keys import DataKeys, LabelKind
from vembed.data.read import DataSource
from vembed.errors import ConfigError
from vembed.evaluation.benchmark.names import model_labels, set_labels, unique_folders
from vembed.evaluation.benchmark.stored import (
    VARIANTS_FOLDER,
    VECTORS_FOLDER,
    Cost,
    plugin_metrics_key,
    read_stored,
    task_key,
    write_stored,
)
from vembed.evaluation.benchmark.variants import (
    REFERENCE,
    build_searcher,
    check_model,
    check_sizes,
    size_note,
    time_queries,
)
from vembed.evaluation.bm25 import K1, B, evaluate_bm25, why_no_bm25
from vembed.evaluation.bm25 import SYSTEM as BM25
from vembed.evaluation.evaluate import EXACT, RunBuilder, asking_rows, count_truncated, sides_agree
from vembed.evaluation.metrics import DEFAULT_DEPTH, DEFAULT_KS, tie_ranks
from vembed.evaluation.results import approximate_note
from vembed.models.load import load_encoder
from vembed.redact import redact
from vembed.vectors.encode import ItemEncoder, encoding_budget, rows_of, values_of
from vembed.vectors.index import check_finite
from vembed.vectors.provenance import digest, item_id, model_key, vectors_key
from vembed.vectors.store import VectorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.data.judged import RetrievalData
    from vembed.evaluation.benchmark.variants import Variant
    from vembed.evaluation.keys import Bm25Language
    from vembed.evaluation.results import EvaluationResult
    from vembed.models.encoder import Encoder
    from vembed.models.keys import ModelKeys
    from vembed.vectors.encode import Vectors
    from vembed.vectors.provenance import Key


UNTRAINED_SEED = 0
"""Seed of models without trained weights, so that they too are the same at every run."""

UNIT_TOLERANCE = 1e-3
"""How far from 1 the length of a vector may be that counts as normalised: bfloat16 keeps 3 digits."""

_logger = logging.getLogger(__name__)


# Vectors of a set -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SideVectors:
    """The vectors of one side of a set, and its items in order, each known by its exact bytes."""

    title: str  # model and set, for messages
    encode: ItemEncoder
    items: Sequence[Item]
    side: Side
    made_of: Key  # model, preprocessing and precision
    folder: Path | None  # where they are kept; None keeps them in memory only
    # Of a reversed set: the side of the set itself that has these vectors already; they take no time of their own.
    source: SideVectors | None = None
    source_rows: NDArray[np.int64] | None = None  # which of the source's, in order; None is all

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The content of each item."""
        return np.fromiter(map(item_id, self.items), dtype=np.int64, count=len(self.items))

    def take(self, rows: NDArray[np.int64]) -> list[Item]:
        """Return the items of some rows."""
        return [self.items[row] for row in rows.tolist()]

    @cached_property
    def key(self) -> Key:
        """Key of the vectors, the items among it."""
        return {**self.made_of, "texts": hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()}

    @cached_property
    def vectors(self) -> tuple[Vectors, int, float]:
        """The vectors, how many items were cut, and the seconds of encoding; encoded or read when first asked for.

        Raises:
            MachineError: They can't be written.
            NonFiniteError: A vector holds NaN or infinity; its block isn't kept.
        """
        encode, side = self.encode, self.side
        if self.source is not None:
            vectors, num_truncated, _ = self.source.vectors
            if self.source_rows is None:
                return vectors, num_truncated, 0.0
            if num_truncated:  # tokenized again to count those of these rows
                num_truncated = count_truncated(encode.encoder, self.items, side)
            return rows_of(vectors, self.source_rows), num_truncated, 0.0
        if self.folder is not None and not encode.encoder.multi_vector:
            names = {"document": "documents", "query": "queries"}
            what = f"{self.title}: vectors of the {names[side]}"
            # Several vectors for each item aren't kept: they take dozens of times the space.
            store = VectorStore(self.folder, names[side], self.made_of, what, "add --no-keep-vectors")
            vectors_NE = store.get(self, lambda lists: encode.stream(lists, side), encode.ranks)
            return np.asarray(vectors_NE), *store.totals(self)
        before, started = encode.num_truncated[side], time.perf_counter()
        vectors = encode(self.items, side)
        check_finite(values_of(vectors), side)
        return vectors, encode.num_truncated[side] - before, time.perf_counter() - started


# The work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """Settings of a benchmark."""

    device: torch.device  # where the encoders run
    batch_rows: int  # most texts of one encoder call
    split: str | None  # split of the sets; None is their test split
    autocast_dtype: torch.dtype | None  # type of mixed precision, or None
    bm25_language: Bm25Language | None  # of the BM25 that is evaluated too; None: it isn't
    poll: Callable[[], None]  # called in long loops; raises to stop
    ks: tuple[int, ...] = DEFAULT_KS  # cut-offs of the metrics
    variants: tuple[Variant, ...] = (REFERENCE,)  # forms of the vectors to search, the reference first
    keep_vectors: bool = True  # whether vectors are kept on disk
    image_root: Path | None = None  # folder that the paths of pictures start from; None is each set's own
    label_kind: LabelKind = "auto"  # what numbers in the column label of rows say
    both_directions: bool = False  # whether sets that cross from texts to pictures are also searched in reverse

    @property
    def depth(self) -> int:
        """Documents kept per query: the usual number, or as many as the largest cut-off asks for."""
        return max(DEFAULT_DEPTH, *self.ks)


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One form of the vectors: its quality, its cost, its folder below the output."""

    variant: Variant
    result: EvaluationResult
    cost: Cost
    folder: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One system on one set."""

    system: str  # what the system is called on the leaderboard
    task: str  # what the set is called there
    result: EvaluationResult  # metrics, per-query values and the run
    folder: str  # folder below the output
    variants: tuple[VariantResult, ...] = ()  # forms of the vectors, the reference first; none for word matching
    resumed: bool = False  # whether nothing had to be done
    reverse_of: str = ""  # what the set is called that this is the reverse of; empty for a set as it was given


@dataclass(frozen=True, slots=True)
class _Set:
    """A set, its name on the leaderboard, its folder below a model's, and the set that it is the reverse of."""

    task: RetrievalData
    label: str
    folder: str
    forward: _Set | None = None


def run_benchmark(
    models: Sequence[ModelKeys], paths: Sequence[str], output: Path, options: BenchmarkOptions
) -> Iterator[Entry]:
    """Evaluate every model on every set; results are written as they come.

    Raises:
        VembedError: When a set or a model can't be loaded, or an option doesn't fit one; all sets are read and checked
            before the first model is loaded.
    """
    names = [model.model_name for model in models]
    labels = model_labels(names, taken=(BM25,))
    folders = unique_folders(labels, taken=(BM25,))
    sets = _load_sets(paths, options)
    if any(variant.dimension for variant in options.variants) and len(models) > 1:
        for model, label in zip(models, labels, strict=True):  # seconds now, against hours of encoding lost on it later
            check_model(options.variants, label, load_model(model))
    if not models and all(why_no_bm25(searched.task) for searched in sets):
        raise ConfigError("bm25 alone can't evaluate a set with pictures, and no other set is named: add a model")
    if options.bm25_language is not None:
        for searched in sets:
            if searched.forward is not None:  # a reversed set has pictures on one side: nothing for words
                continue
            if reason := why_no_bm25(searched.task):
                _logger.info("%s", reason)
            else:
                yield _bm25_entry(searched, output, options, options.bm25_language)
    for model, label, folder in zip(models, labels, folders, strict=True):
        encoder = load_model(model)
        check_model(options.variants, label, encoder)
        run = _ModelRun(encoder, options, system=redact(model.model_name), label=label)
        for searched in sets:
            yield run.entry(searched, output, folder=folder)
        del encoder, run
        gc.collect()  # two large models don't fit at once


def _load_sets(paths: Sequence[str], options: BenchmarkOptions) -> list[_Set]:
    """Read the sets, and refuse an index that one of them is too small for."""
    root = None if options.image_root is None else str(options.image_root)
    keys = DataKeys(image_root=root, label_kind=options.label_kind)
    tasks = [
        DataSource(path, "test", keys, split=options.split, user_names=("--data", "--split")).judged() for path in paths
    ]
    labels = set_labels([task.name for task in tasks], paths)
    wanted = []
    for task, label in zip(tasks, labels, strict=True):
        wanted.append((task, label, False))
        if options.both_directions and task.crosses_modalities:
            wanted.append((task.reversed(), f"{label} {REVERSED}", True))
        elif options.both_directions:
            _logger.info("%s: searched in one direction, as %s", label, task.direction)
    if options.both_directions and len(wanted) == len(tasks):
        raise ConfigError(
            "--both-directions: no set is one of texts that search pictures or pictures that search texts; leave the "
            "option out, or name such a set"
        )
    # The reverse of a set stands right behind it, so that its vectors are taken from the run before.
    sets: list[_Set] = []
    folders = unique_folders([label for _, label, _ in wanted])
    for (task, label, is_reverse), folder in zip(wanted, folders, strict=True):
        check_sizes(options.variants, label, len(task.documents))
        sets.append(_Set(task, label, folder, sets[-1] if is_reverse else None))
    return sets


def load_model(model: ModelKeys) -> Encoder:
    """Load a model; the program's random numbers continue as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(UNTRAINED_SEED)
        return load_encoder(model)


def _bm25_entry(each: _Set, output: Path, options: BenchmarkOptions, language: Bm25Language) -> Entry:
    """Return what word matching finds in a set."""
    folder = f"{BM25}/{each.folder}"
    versions = {"bm25s": bm25s.__version__, "stemmer": Stemmer.version()}
    read = {"language": language, "unicode": "NFC"}
    settings = {"k1": K1, "b": B, **read, **versions, "ks": list(options.ks), "depth": options.depth}
    key = {**task_key(each.task, with_texts=True), **plugin_metrics_key(), "search": digest(settings)}
    title = f"{BM25} on {each.label}"
    stored, reason = read_stored(output / folder, key, system=BM25)
    if stored is not None:
        _logger.info("%s: done and unchanged, skipped", title)
        return Entry(BM25, each.label, stored[0], folder, resumed=True)
    if reason:
        _logger.info("%s: done again (%s)", title, reason)
    result = evaluate_bm25(each.task, options.ks, depth=options.depth, language=language, poll=options.poll)
    write_stored(output / folder, result, None, key)
    return Entry(BM25, each.label, result, folder)


class _ModelRun:
    """One model on one set after the other."""

    def __init__(self, encoder: Encoder, options: BenchmarkOptions, *, system: str, label: str) -> None:
        self.key = model_key(encoder)
        budget = encoding_budget(encoder, options.device, options.batch_rows)
        self.encode = ItemEncoder(
            encoder.to(options.device), budget, options.device, options.autocast_dtype, poll=options.poll
        )
        self.options = options
        self.system = system
        self.label = label
        self._forward: _SetRun | None = None

    def entry(self, each: _Set, output: Path, *, folder: str) -> Entry:
        """Return every variant on one set: read where it is done, else done now."""
        folder = f"{folder}/{each.folder}"
        work = _SetRun(self, each, output / folder, None if each.forward is None else self._forward)
        # The reversed set comes next, if there is one, and takes its vectors from this one.
        self._forward = work if self.options.both_directions else None
        results, num_done = [], 0
        for variant in self.options.variants:
            place = folder if variant.is_reference else f"{folder}/{VARIANTS_FOLDER}/{variant.folder}"
            key = work.key(variant)
            stored, reason = read_stored(output / place, key, system=self.system)
            if stored is None:
                if reason:
                    _logger.info("%s, %s: done again (%s)", work.title, variant.name, reason)
                stored = work.search(variant)
                write_stored(output / place, *stored, key)
                num_done += 1
            result, cost = stored
            assert cost is not None
            results.append(VariantResult(variant, result, cost, place))
        if not num_done:
            _logger.info("%s: done and unchanged, skipped", work.title)
        reverse_of = "" if each.forward is None else each.forward.label
        return Entry(self.label, each.label, results[0].result, folder, tuple(results), not num_done, reverse_of)


class _SetRun:
    """One model on one set: keys, vectors, and results made of them."""

    def __init__(self, run: _ModelRun, each: _Set, folder: Path, forward: _SetRun | None) -> None:
        self.title = f"{run.label} on {each.label}"
        self._run = run
        self._task = each.task
        query_ids = self._builder().query_ids
        documents = list(each.task.documents.values())
        queries = [each.task.queries[query_id] for query_id in query_ids]
        self._documents = self._side(documents, "document", folder)
        self._queries = self._side(queries, "query", folder)
        if forward is not None:
            # A prompt on one side alone makes the same item two texts: then that side is encoded by itself.
            encoder = run.encode.encoder
            if sides_agree(encoder, documents):
                self._documents = replace(self._documents, source=forward._queries)
            if sides_agree(encoder, queries):
                rows = asking_rows(forward._task, each.task)
                self._queries = replace(self._queries, source=forward._documents, source_rows=rows)
        self._task_key = task_key(each.task, with_texts=False)

    def _builder(self) -> RunBuilder:
        return RunBuilder(self._task, ks=self._run.options.ks, depth=self._run.options.depth)

    def _side(self, items: Sequence[Item], side: Side, folder: Path) -> SideVectors:
        run = self._run
        key = vectors_key(run.encode.encoder, run.key, side, autocast_dtype=run.options.autocast_dtype)
        kept = folder / VECTORS_FOLDER if run.options.keep_vectors else None
        return SideVectors(self.title, run.encode, items, side, key, kept)

    def key(self, variant: Variant) -> Key:
        """Return what the result of a variant is made of."""
        search = {
            "dimension": variant.dimension,
            "precision": variant.precision,
            "index": variant.index,
            "rescored": variant.rescored,
            "ks": list(self._run.options.ks),
            "depth": self._run.options.depth,
            "faiss": faiss.__version__,
            "ties": "as trec_eval orders them",  # what was kept before has those that FAISS chose
        }
        # Of the vectors' keys all that the two sides may differ in; the model's parts stand once, for both.
        vectors = {
            f"{side} {name}": value
            for side, vectors in (("document", self._documents), ("query", self._queries))
            for name, value in vectors.key.items()
            if name not in (*self._run.key, "side")
        }
        return {**self._task_key, **self._run.key, **vectors, **plugin_metrics_key(), "search": digest(search)}

    def search(self, variant: Variant) -> tuple[EvaluationResult, Cost]:
        """Search a variant, score what it finds, and time it."""
        documents, cut_documents, document_seconds = self._documents.vectors
        queries, cut_queries, query_seconds = self._queries.vectors
        builder, poll = self._builder(), self._run.options.poll
        # The seconds of a result are those of searching and of encoding in all runs that made the vectors.
        started = time.perf_counter()
        searcher = build_searcher(documents, variant, tie_ranks(list(self._task.documents)))
        scores_Qk, rows_Qk = searcher.search(queries, k=builder.hits_wanted, poll=poll)
        seconds = time.perf_counter() - started + document_seconds + query_seconds
        builder.add_search(scores_Qk, rows_Qk)
        sides: tuple[tuple[Side, int], ...] = (("query", cut_queries), ("document", cut_documents))
        notes = [
            f"{num_truncated} texts on the {side} side are longer than the model's "
            f"{self._run.encode.encoder.longest_text(side)} tokens and were cut."
            for side, num_truncated in sides
            if num_truncated
        ]
        notes += _variant_notes(variant, documents)
        result = builder.result(self._run.system, seconds=seconds, notes=notes)
        if not variant.is_reference:
            _logger.info("%s: searched as %s", self.title, variant.name)
        timing = time_queries(searcher, queries, k=builder.hits_wanted, poll=poll)
        cost = Cost(
            dimension=variant.dimension or self._run.encode.encoder.dimension,
            bytes_per_document=searcher.bytes_per_document,
            milliseconds_per_query=timing.p50,
            milliseconds_p95=timing.p95,
            milliseconds_p99=timing.p99,
            num_timed=timing.num_timed,
            rescoring_bytes=searcher.rescoring_bytes,
        )
        return result, cost


def _variant_notes(variant: Variant, documents_DE: Vectors) -> list[str]:
    """Return what is particular about a variant on these documents."""
    if isinstance(documents_DE, Ragged):
        mean = len(documents_DE.values) / len(documents_DE.lengths)
        return [f"Searched by exact MaxSim over {mean:.1f} vectors per document."]
    notes = []
    if variant.index != EXACT:
        notes.append(approximate_note(variant.index))
    if note := size_note(variant, len(documents_DE)):
        _logger.warning(note)
        notes.append(note)
    if variant.dimension is not None and np.abs(np.linalg.norm(documents_DE, axis=1) - 1).max() > UNIT_TOLERANCE:
        notes.append("The model's vectors are not of unit length; the shortened ones are: they compare by cosine.")
    return notes
