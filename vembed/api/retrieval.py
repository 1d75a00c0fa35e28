"""Evaluate a model, index a corpus and search it, from Python."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from vembed.api.arguments import errors_name_arguments, path_of
from vembed.api.loading import LoadOptions, refuse_unknown
from vembed.api.model import DEFAULT_BATCH_SIZE, EmbeddingModel, checked_side, load
from vembed.batch import ImageLimits
from vembed.data.corpus import Corpus, CorpusOptions
from vembed.data.keys import DataKeys
from vembed.data.retrieval_sources import load_retrieval
from vembed.data.splits import SourceOptions
from vembed.distributed.lock import hold_output
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.evaluation.evaluator import EvaluationOptions
from vembed.evaluation.evaluator import evaluate as evaluate_task
from vembed.evaluation.result import EvaluationResult
from vembed.evaluation.store import write_evaluation
from vembed.files import home_path, is_folder
from vembed.redact import redact
from vembed.search.build import BuildOptions, write_index
from vembed.search.format import IndexMeta
from vembed.search.index import Hit, SearchIndex
from vembed.search.output import output_form, refuse_taken
from vembed.search.ray_job import RayJob
from vembed.search.searcher import Searcher
from vembed.search.tables import is_table, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable

    from vembed.batch import Side
    from vembed.data.keys import LabelKind
    from vembed.data.python_rows import RowsInput
    from vembed.evaluation.encode import ItemEncoder
    from vembed.search.output import Format

__all__ = ["EvaluationResult", "Hit", "IndexMeta", "Searcher", "build_index", "evaluate", "open_index"]

VECTOR_OPTIONS = (
    "model_revision",
    "pooling_method",
    "projection_dim",
    "topk_tokens",
    "pool_factor",
    "query_length",
    "query_expansion",
    "bidirectional",
    "max_seq_length",
    "query_prompt",
    "document_prompt",
    "pad_token",
    "image_background",
    "image_tokens",
    "max_image_size",
)
"""Options that change the vectors: an index keeps them, and its queries are encoded under the same."""


class IndexOptions(TypedDict, total=False):
    """How an index is built."""

    side: Side  # which prompt the documents get; "document" unless they are queries
    # FAISS index string; "Flat" is exact, "HNSW32" or "IVF1024,Flat" are faster and may miss documents; or "int8" and
    # "binary", which find candidates in less memory
    index: str
    # "index" (a folder), or its rows as a "parquet" file or a "lancedb" table; by default what the output's name tells
    format: Format
    ranks: Ranks | None  # the processes that encode together; all must make the call
    batch_size: int  # most documents of one encoder call
    overwrite: bool  # whether an index that is there may be replaced
    id_column: str | None  # column of the ids; default: _id, id, docid or doc_id
    text_column: str | None  # column of the texts; default: text, document, passage, contents or content
    # column of the pictures; default: image, positive_image or image_path, and none where only `text_column` is given
    image_column: str | None
    # folder that pictures' paths start from and must stay in; default: the corpus file's own
    image_root: str | Path | None
    poll: Callable[[], None]  # called between encoder calls; may raise to stop
    ray: str | None  # HOST:PORT of a Ray cluster that encodes the texts; "" is the one that Ray finds or starts here
    ray_workers: int | None  # its workers; default: one for each GPU, or for each 4 CPUs


def evaluate(
    model: EmbeddingModel | str | Path,
    data: RowsInput | str | Path,
    *,
    split: str | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    output: Path | str | None = None,
    image_root: Path | str | None = None,
    label_kind: LabelKind = "auto",
) -> EvaluationResult:
    """Evaluate a model on a retrieval set: encode, search exactly with FAISS, score with trec_eval.

    Args:
        model: What `load` returned, or takes.
        data: BEIR folder, file of rows, hub id or `builtin:SET`; or rows in memory, as `train` takes them.
        split: Split of the set; its test split by default.
        output: A folder that gets metrics.json, per_query.json and run.trec.
        image_root: Folder that pictures' paths start from and must stay in; default: the set's own.
        label_kind: What numbers in the column `label` of rows say: class, pair or grade (docs/data.md).

    Raises:
        VembedError: The set or the model can't be loaded, or the vectors aren't finite.
    """
    limits = model.image_limits if isinstance(model, EmbeddingModel) else ImageLimits()
    root = None if image_root is None else str(image_root)
    keys = DataKeys(image_root=root, max_image_pixels=limits.max_pixels, label_kind=label_kind)
    with path_of(data, limits) as path:
        task = load_retrieval(path, SourceOptions("test", split, keys, named=("data", "split")))
    if not isinstance(data, (str, Path)):
        task = replace(task, name="data")
    loaded = model if isinstance(model, EmbeddingModel) else load(model)
    encode = loaded.item_encoder(batch_size)
    result = evaluate_task(encode, task, EvaluationOptions(system=redact(loaded.name)))
    cut = [
        f"{count} texts on the {side} side are longer than the model's {encode.encoder.longest_text(side)} tokens and "
        "were cut."
        for side, count in encode.num_truncated.items()
        if count
    ]
    result = replace(result, notes=(*result.notes, *cut))
    if output is not None:
        with hold_output(Path(output), beside=True):
            write_evaluation(Path(output), result)
    return result


def build_index(
    model: EmbeddingModel | str | Path,
    data: RowsInput | str | Path,
    output: str | Path,
    **options: Unpack[IndexOptions],
) -> IndexMeta:
    """Encode a corpus into a folder that `open_index` and `vembed search` read.

    Args:
        data: BEIR folder, folder of pictures, file with ids and texts or pictures, text file with one document a line,
            or `builtin:SET`; or texts, dictionaries or a table in memory. Texts get their number, from 0, as id.
        output: The folder, or FILE.parquet; it appears complete or not at all.

    Raises:
        VembedError: The corpus, the model or the folder can't be used.
    """
    refuse_unknown(options, IndexOptions, "build_index")
    with errors_name_arguments(options={*IndexOptions.__annotations__, "output"}):
        return index_corpus(model, data, output, **options)


def index_corpus(
    model: EmbeddingModel | str | Path,
    data: RowsInput | str | Path,
    output: str | Path,
    **options: Unpack[IndexOptions],
) -> IndexMeta:
    """Do what `build_index` does, with errors that name the options of `vembed encode`."""
    side: Side = options.get("side", "document")
    checked_side(side)
    folder, ranks = home_path(output), options.get("ranks") or Ranks()
    limits = model.image_limits if isinstance(model, EmbeddingModel) else ImageLimits()
    with ExitStack() as stack:
        options["format"] = output_form(folder, options.get("format"))
        ranks.from_first(lambda: stack.enter_context(hold_output(folder, beside=True)))
        path = stack.enter_context(path_of(data, limits))
        refuse_taken(folder, path, overwrite=options.get("overwrite", False))
        source = redact(path) if isinstance(data, (str, Path)) else "rows in memory"
        return _build_index(model, path, source, folder, side, limits, options)


def _build_index(
    model: EmbeddingModel | str | Path,
    path: str,
    source: str,
    folder: Path,
    side: Side,
    limits: ImageLimits,
    options: IndexOptions,
) -> IndexMeta:
    corpus_options = CorpusOptions(
        id=options.get("id_column"),
        text=options.get("text_column"),
        image=options.get("image_column"),
        image_root=_folder(options.get("image_root")),
        image_limits=limits,
    )
    corpus = Corpus(path, corpus_options)
    loaded = model if isinstance(model, EmbeddingModel) else load(model)
    encode = loaded.item_encoder(options.get("batch_size", DEFAULT_BATCH_SIZE), poll=options.get("poll"))
    encode.ranks = options.get("ranks") or Ranks()
    return write_index(
        folder,
        corpus,
        encode,
        BuildOptions(
            model=loaded.identity,
            model_options=_vector_options(loaded),
            source=source,
            side=side,
            factory=options.get("index", "Flat"),
            form=options["format"],
            job=_ray_job(loaded, options),
        ),
    )


def _ray_job(loaded: EmbeddingModel, options: IndexOptions) -> RayJob | None:
    address, num_workers = options.get("ray"), options.get("ray_workers")
    if address is None:
        return None
    if not (options.get("ranks") or Ranks()).is_one:
        raise ConfigError("--ray starts workers itself; start vembed encode without torchrun or accelerate launch")
    # A worker takes the device that Ray gives it.
    given = cast("LoadOptions", {key: value for key, value in loaded.options.items() if key != "device"})
    make = partial(_worker_encoder, loaded.name, given, options.get("batch_size", DEFAULT_BATCH_SIZE))
    return RayJob(make=make, address=address, num_workers=num_workers)


def _worker_encoder(name: str, options: LoadOptions, batch_size: int) -> ItemEncoder:
    return load(name, **options).item_encoder(batch_size)


def open_index(
    folder: str | Path,
    /,
    *,
    model: EmbeddingModel | str | Path | None = None,
    rescored: int | None = None,
    **options: Unpack[LoadOptions],
) -> Searcher:
    """Open an index for searching.

    Args:
        folder: What `build_index` wrote: a folder, a Parquet file or a LanceDB table.
        model: The model for the queries; by default the one that the index names, under the options that it was built
            with. Its weights must be those that made the vectors.
        rescored: Candidates for each hit that are ranked by the full vectors; by default 4 where the index is of few
            bits (int8, binary), else 0, which ranks none again. Not for an index of several vectors.
        options: See `LoadOptions`; they win over the options that the index was built with. Code and pickles are
            allowed here or not at all: an index can't allow them.

    Raises:
        ConfigError: The index is missing or damaged, the model is another one than its own, or there is nothing to
            rescore.
        MachineError: The model can't be reached.
    """
    refuse_unknown(options, LoadOptions, "open_index")
    with errors_name_arguments(options=("model", "overwrite")):
        return open_for_queries(home_path(folder), model, rescored, **options)


def open_for_queries(
    path: Path, model: EmbeddingModel | str | Path | None, rescored: int | None, **options: Unpack[LoadOptions]
) -> Searcher:
    """Do what `open_index` does, with errors that name the options of `vembed search`."""
    if rescored is not None and rescored < 0:
        raise ConfigError(f"rescored is {rescored}; it is at least 0")
    index = SearchIndex(unpacked(path) if is_table(path) else path, rescored=rescored, place=path)
    meta = index.meta
    if not isinstance(model, EmbeddingModel):
        kept = {name: value for name, value in meta.model_options.items() if name in VECTOR_OPTIONS}
        if model is not None:
            kept.pop("model_revision", None)  # it is of the other model
        merged = cast("LoadOptions", {**kept, **options})
        model = load(_named_model(meta, path) if model is None else model, **merged)
    elif options:
        raise TypeError(f"open_index: {next(iter(options))} belongs to load: the model is loaded already")
    encode = model.item_encoder(DEFAULT_BATCH_SIZE)
    index.check_model(model.identity, encode)
    return Searcher(index, encode, model.image_limits)


def _folder(path: str | Path | None) -> Path | None:
    return None if path is None else home_path(path)


def _named_model(meta: IndexMeta, folder: Path) -> str:
    """Return the model that an index names, if it is still there."""
    name = meta.model.name
    if Path(name).is_absolute() and not is_folder(name):
        raise ConfigError(f"{folder} was made by {name}, which isn't there any more; name its new place with --model")
    return name


def _vector_options(model: EmbeddingModel) -> dict[str, str | float]:
    """Return what the user said about a model that changes its vectors."""
    options: dict[str, Any] = dict(model.options)
    return {name: options[name] for name in VECTOR_OPTIONS if options.get(name) is not None}
