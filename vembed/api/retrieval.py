"""Evaluate a model, index a corpus and search it, from Python."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from vembed.api.arguments import checked_side, errors_name_arguments, path_of, refuse_unknown
from vembed.api.keys import BuildIndexKeys, LoadKeys
from vembed.api.model import DEFAULT_BATCH_SIZE, EmbeddingModel, load
from vembed.batch import ImageLimits
from vembed.config.messages import make_section
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.distributed.lock import hold_output
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError
from vembed.evaluation.evaluate import EvaluationOptions
from vembed.evaluation.evaluate import evaluate as evaluate_task
from vembed.evaluation.results import EvaluationResult, refuse_other_files, write_evaluation
from vembed.files import home_path, is_folder
from vembed.models.keys import ModelKeys
from vembed.redact import redact
from vembed.registry import ADAPTERS
from vembed.section import facts_of
from vembed.vectors.keys import IndexKeys
from vembed.workflows.search.build import BuildOptions, write_index
from vembed.workflows.search.format import IndexMeta
from vembed.workflows.search.index import Hit, Searcher, SearchIndex
from vembed.workflows.search.output import output_form, refuse_taken, table_format
from vembed.workflows.search.tables import unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vembed.data.keys import LabelKind
    from vembed.data.python_rows import RowsInput
    from vembed.vectors.encode import ItemEncoder
    from vembed.workflows.search.build import EncodeTexts

__all__ = ["EvaluationResult", "Hit", "IndexMeta", "Searcher", "build_index", "evaluate", "open_index"]

VECTOR_OPTIONS = (
    "model_revision",
    *(name for name, info in ModelKeys.model_fields.items() if facts_of(info).get("load") == "vectors"),
)
"""Options that change the vectors: an index keeps them, and its queries are encoded under the same."""

_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (*BuildIndexKeys.__annotations__, "output", "model", "bf16", "encode")
}
_ARGUMENT_OF = {
    **{option: name for name, option in _OPTIONS.items()},
    **{f"{name} ({option})": name for name, option in _OPTIONS.items()},  # where a message names both
    "--overwrite": "overwrite=True",
    "--rescore (rescored)": "rescored",
    "vembed encode": "vembed.build_index",
}
"""Words of messages for `vembed encode` and `vembed search` -> those of `build_index` and `open_index`."""


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
        VembedError: The set or the model can't be loaded, the vectors aren't finite, or the output can't be written.
    """
    limits = model.image_limits if isinstance(model, EmbeddingModel) else ImageLimits()
    root = None if image_root is None else str(image_root)
    keys = make_section(DataKeys, {"image_root": root, "max_image_pixels": limits.max_pixels, "label_kind": label_kind})
    folder = None if output is None else home_path(output)
    with ExitStack() as held:
        if folder is not None:  # refused here, not after hours of encoding
            held.enter_context(hold_output(folder, beside=True))
            refuse_other_files(folder)
        # A path and rows in memory are read by the same code: rows are a file in a temporary folder while they are
        # read.
        with path_of(data, limits) as path:
            task = DataSource(path, "test", keys, split=split, user_names=("data", "split")).judged()
        if not isinstance(data, (str, Path)):
            task = replace(task, name="data")
        loaded = model if isinstance(model, EmbeddingModel) else load(model)
        encode = loaded.item_encoder(batch_size)
        result = evaluate_task(encode, task, EvaluationOptions(system=redact(loaded.name)))
        cut = [
            f"{count} texts on the {side} side are longer than the model's {encode.encoder.longest_text(side)} tokens "
            "and were cut."
            for side, count in encode.num_truncated.items()
            if count
        ]
        result = replace(result, notes=(*result.notes, *cut))
        if folder is not None:
            write_evaluation(folder, result)
    return result


def build_index(
    model: EmbeddingModel | str | Path,
    data: RowsInput | str | Path,
    output: str | Path,
    *,
    ranks: Ranks | None = None,
    poll: Callable[[], None] | None = None,
    encode: EncodeTexts | None = None,
    **options: Unpack[BuildIndexKeys],
) -> IndexMeta:
    """Encode a corpus into a folder that `open_index` and `vembed search` read.

    Args:
        data: BEIR folder, folder of pictures, file with ids and texts or pictures, text file with one document a line,
            or `builtin:SET`; or texts, dictionaries or a table in memory. Texts get their number, from 0, as id.
        output: The folder, or FILE.parquet; it appears complete or not at all.
        ranks: The processes that encode together; all must make the call.
        poll: Called between encoder calls; may raise to stop.
        encode: Encodes texts elsewhere than in this process; the call says what it gets and yields
            (`vembed.workflows.search.build.EncodeTexts`).
        options: Those of `vembed encode`: `side`, `index`, `format`, `batch_size`, `overwrite`, the names of columns.

    Raises:
        VembedError: The corpus, the model or the folder can't be used.
    """
    refuse_unknown(options, BuildIndexKeys, "build_index")
    checked_side(options.get("side", "document"))
    with errors_name_arguments(_ARGUMENT_OF):
        output_form(home_path(output), options.get("format"))  # knows more of a wrong format than its section
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if "image_root" in given:
            given["image_root"] = home_path(given["image_root"])
        keys = make_section(IndexKeys, given)
        return index_corpus(model, data, output, keys, ranks=ranks, poll=poll, encode_texts=encode)


def index_corpus(
    model: EmbeddingModel | str | Path,
    data: RowsInput | str | Path,
    output: str | Path,
    keys: IndexKeys,
    *,
    ranks: Ranks | None = None,
    poll: Callable[[], None] | None = None,
    encode_texts: EncodeTexts | None = None,
) -> IndexMeta:
    """Do what `build_index` does, with errors that name the options of `vembed encode`."""
    folder, ranks = home_path(output), ranks or Ranks()
    limits = model.image_limits if isinstance(model, EmbeddingModel) else ImageLimits()
    with ExitStack() as stack:
        form = output_form(folder, keys.format)
        # The first rank holds the folder for all; its refusal is raised on each of them.
        ranks.from_first(lambda: stack.enter_context(hold_output(folder, beside=True)))
        path = stack.enter_context(path_of(data, limits))
        # Everything that can be refused is refused before the model is loaded, which may take minutes.
        refuse_taken(folder, path, overwrite=keys.overwrite)
        root = None if keys.image_root is None else str(keys.image_root)
        source = DataSource(path, "test", DataKeys(image_root=root, max_image_pixels=limits.max_pixels))
        corpus = source.documents(
            id_column=keys.id_column, text_column=keys.text_column, image_column=keys.image_column
        )
        loaded = model if isinstance(model, EmbeddingModel) else load(model)
        encode = loaded.item_encoder(keys.batch_size, poll=poll)
        encode.ranks = ranks
        encoded_by = "--encode" if encode_texts is not None else "--ray"
        if keys.ray is not None:
            if encode_texts is not None:
                raise ConfigError("--encode and --ray both say what encodes; leave one of them out")
            encode_texts = ADAPTERS.load("ray")(keys.ray, keys.ray_workers)
        if encode_texts is not None and not ranks.is_one:
            raise ConfigError(
                f"{encoded_by} starts workers itself; start vembed encode without torchrun or accelerate launch"
            )
        # A worker takes the device that it is given.
        given = cast("LoadKeys", {key: value for key, value in loaded.options.items() if key != "device"})
        said: Mapping[str, Any] = loaded.options
        options = BuildOptions(
            model=loaded.identity,
            model_options={name: said[name] for name in VECTOR_OPTIONS if said.get(name) is not None},
            source=redact(path) if isinstance(data, (str, Path)) else "rows in memory",
            side=keys.side,
            factory=keys.index,
            form=form,
            encode_texts=encode_texts,
            make_encoder=partial(_worker_encoder, loaded.name, given, keys.batch_size),
            encoded_by=encoded_by,
        )
        return write_index(folder, corpus, encode, options)


def _worker_encoder(name: str, options: LoadKeys, batch_size: int) -> ItemEncoder:
    return load(name, **options).item_encoder(batch_size)


def open_index(
    folder: str | Path,
    /,
    *,
    model: EmbeddingModel | str | Path | None = None,
    rescored: int | None = None,
    **options: Unpack[LoadKeys],
) -> Searcher:
    """Open an index for searching.

    Args:
        folder: What `build_index` wrote: a folder, a Parquet file or a LanceDB table.
        model: The model for the queries; by default the one that the index names, under the options that it was built
            with. Its weights must be those that made the vectors.
        rescored: Candidates for each hit that are ranked by the full vectors; by default 4 where the index is of few
            bits (int8, binary), else 0, which ranks none again. Not for an index of several vectors.
        options: See `LoadKeys`; they win over the options that the index was built with. Code and pickles are
            allowed here or not at all: an index can't allow them.

    Raises:
        ConfigError: The index is missing or damaged, the model is another one than its own, or there is nothing to
            rescore.
        MachineError: The model can't be reached.
    """
    refuse_unknown(options, LoadKeys, "open_index")
    with errors_name_arguments(_ARGUMENT_OF):
        return open_for_queries(home_path(folder), model, rescored, **options)


def open_for_queries(
    path: Path, model: EmbeddingModel | str | Path | None, rescored: int | None, **options: Unpack[LoadKeys]
) -> Searcher:
    """Do what `open_index` does, with errors that name the options of `vembed search`."""
    if rescored is not None and rescored < 0:
        raise ConfigError(f"rescored is {rescored}; it is at least 0")
    form = table_format(path)
    index = SearchIndex(path if form is None else unpacked(path, form), rescored=rescored, place=path)
    meta = index.meta
    # An index keeps what was said about its model, as other prompts or lengths would give vectors that don't compare.
    # What allows code or pickles is never read from it: a folder must not be able to allow itself anything.
    if not isinstance(model, EmbeddingModel):
        kept = {name: value for name, value in meta.model_options.items() if name in VECTOR_OPTIONS}
        if model is not None:
            kept.pop("model_revision", None)  # it is of the other model
        else:
            model = meta.model.name
            if Path(model).is_absolute() and not is_folder(model):
                raise ConfigError(
                    f"{path} was made by {model}, which isn't there any more; name its new place with --model"
                )
        model = load(model, **cast("LoadKeys", {**kept, **options}))
    elif options:
        raise TypeError(f"open_index: {next(iter(options))} belongs to load: the model is loaded already")
    encode = model.item_encoder(DEFAULT_BATCH_SIZE)
    index.check_model(model.identity, encode)
    return Searcher(index, encode, model.image_limits)
