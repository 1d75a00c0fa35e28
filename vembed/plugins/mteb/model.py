"""Our models under the interface that MTEB gives encoders, and runs of its benchmarks and tasks.

MTEB brings the data, searches and scores. A model brings vectors: queries and documents under its own prompts, and
texts that are neither (classification, similarity of sentences) as queries.
Results are MTEB's own files, `results/MODEL/REVISION/TASK.json`. The revision is a hash of the weights and of what else
the vectors depend on, so that a rerun does only what is new, and a changed model is measured again.
"""

from __future__ import annotations

import difflib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Composed, Image, modality_words
from vembed.data.python_rows import as_png
from vembed.errors import ConfigError, DataError, MachineError
from vembed.models.exportable import sample_kinds
from vembed.models.names import MODEL_FOLDER
from vembed.redact import redact
from vembed.registry import import_extra
from vembed.vectors.encode import PICTURE_SLICE_ROWS, SLICE_ROWS
from vembed.vectors.provenance import digest, features_digest, model_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.api.model import EmbeddingModel
    from vembed.batch import Modality, Side
    from vembed.data.python_rows import ItemInput

EXTRA = "mteb"
UNSET = ("license", "open_weights", "public_training_code", "public_training_data", "release_date", "languages")
UNKNOWN = dict.fromkeys((*UNSET, "memory_usage_mb", "training_datasets"))
"""Fields of MTEB's card that a model's files don't tell."""

MODALITIES: Mapping[Modality, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("image",),
    "image+text": ("image", "text"),
}


class MtebModel:
    """A model of `vembed.load` under the interface that MTEB gives encoders: `mteb.evaluate(MtebModel(model), tasks)`.

    MTEB takes the model itself as well, which makes one of these when MTEB first asks it for anything.
    """

    def __init__(self, model: EmbeddingModel) -> None:
        self._model = model

    @cached_property
    def mteb_model_meta(self) -> Any:
        """Facts about the model, an `mteb.models.ModelMeta`.

        Raises:
            ConfigError: MTEB isn't installed.
        """
        model, encoder = self._model, self._model.item_encoder(1).encoder
        meta = import_extra("mteb.models", EXTRA, "the model card of MTEB").ModelMeta
        # OWNER/MODEL: a hub id as it is, of a folder the last two parts that tell something.
        parts = [part for part in Path(model.name).parts if part != "/"]
        if len(parts) > 1 and parts[-1] == MODEL_FOLDER:
            parts.pop()
        # The revision is a hash of everything that the vectors depend on, but for the device: it changes their last
        # bits alone, and results should survive a move to another machine.
        options = {key: value for key, value in model.options.items() if key != "device" and value is not None}
        features = {name: features_digest(encoder, items, side) for name, items, side in sample_kinds(encoder)}
        revision = digest([model_key(encoder), encoder.similarity, features, options])[:16]
        known = {
            "loader": None,
            "name": redact("/".join(["local", *parts][-2:])),
            "revision": revision,
            "n_parameters": sum(parameter.numel() for parameter in encoder.parameters()),
            "max_tokens": model.max_length,
            "embed_dim": model.dimension,
            "similarity_fn_name": str(model.similarity),
            "use_instructions": any(model.prompts.values()),
            "framework": ["PyTorch"],
            "modalities": sorted({name for taken in model.takes for name in MODALITIES[taken]}, reverse=True),
        }
        return meta(**known, **UNKNOWN)

    def encode(
        self, batches: Iterable[Mapping[str, Any]], *, batch_size: int, prompt_type: str | None = None, **_: Any
    ) -> NDArray[np.float32]:
        """Return the vectors of MTEB's batches, (rows, dimension).

        Args:
            batches: Columns `text`, `image` or both.
            prompt_type: Names a side in retrieval alone; elsewhere texts are alike and count as queries.
        """
        # MTEB's names of sides are texts of an enumeration, which compare as texts do.
        side: Side = "document" if prompt_type == "document" else "query"
        model = self._model
        parts = [model.encode(rows, side, batch_size=batch_size) for rows in _slices(batches, model)]
        return np.concatenate(parts) if parts else np.zeros((0, model.dimension), dtype=np.float32)

    def similarity(self, queries: Any, documents: Any) -> NDArray[np.float32]:
        """Return the score of each query for each document."""
        return self._model.similarity(queries, documents)

    def similarity_pairwise(self, queries: Any, documents: Any) -> NDArray[np.float32]:
        """Return the score of each query for the document of the same row."""
        return self._model.similarity_pairwise(queries, documents)


def _slices(batches: Iterable[Mapping[str, Any]], model: EmbeddingModel) -> Iterator[list[ItemInput]]:
    """Yield many texts, which are sorted by length together, or as many pictures as may stand in memory."""
    rows: list[ItemInput] = []
    # MTEB's batches are small; ours are gathered up, so that texts of like length are padded together.
    for batch in batches:
        texts, pictures = batch.get("text"), batch.get("image")
        if pictures is None and texts is None:
            raise DataError(f"{model.name} takes texts and pictures, and this task has {', '.join(batch)}")
        if pictures is None:
            rows.extend(texts or ())
        elif texts is None:
            rows.extend(pictures)
        else:
            rows.extend(
                Composed((Image("a picture of the task", as_png(picture, "a picture", model.image_limits)),), text)
                for picture, text in zip(pictures, texts, strict=True)
            )
        if len(rows) >= (SLICE_ROWS if pictures is None else PICTURE_SLICE_ROWS):
            yield rows
            rows = []
    if rows:
        yield rows


def find_tasks(names: Sequence[str]) -> list[Any]:
    """Return MTEB's tasks of these names, those of a benchmark all together, each once.

    Raises:
        ConfigError: MTEB isn't installed, or has no such task or benchmark.
    """
    mteb = import_extra("mteb", EXTRA, "--mteb")
    tasks: dict[str, Any] = {}
    for name in names:
        try:
            named = list(mteb.get_benchmark(name).tasks)
        except KeyError:
            named = [_task_named(mteb, name)]
        for task in named:
            tasks.setdefault(task.metadata.name, task)  # a task may be part of several benchmarks
    return list(tasks.values())


def _task_named(mteb: Any, name: str) -> Any:
    try:
        return mteb.get_task(name)
    except KeyError as error:
        benchmarks, tasks = mteb.get_benchmarks(), mteb.get_tasks()
        known = [*(benchmark.name for benchmark in benchmarks), *(task.metadata.name for task in tasks)]
        lower = {entry.lower(): entry for entry in reversed(known)}  # of equal names the benchmark stays
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"--mteb: MTEB has no benchmark or task {name!r}; did you mean {lower[near]!r}? `mteb available-tasks` and "
            f"`mteb available-benchmarks` list them"
        ) from error


def run_tasks(
    model: EmbeddingModel, tasks: Iterable[Any], output: Path, *, batch_size: int
) -> Iterator[tuple[str, str, float]]:
    """Evaluate a model on one task of MTEB after the other; those whose results are there and true are read.

    Args:
        output: Gets MTEB's files.

    Yields:
        The task, its main measure as we write it ("ndcg@10"), and the mean over the task's splits and subsets.

    Raises:
        ConfigError: The model takes nothing of what a task has.
        DataError: MTEB can't read the data of a task.
        MachineError: The data of a task aren't on this machine, and the hub can't be reached.
    """
    from datasets.exceptions import DatasetNotFoundError

    mteb = import_extra("mteb", EXTRA, "--mteb")
    cache = mteb.ResultCache(cache_path=output)
    taken = set(model.mteb_model_meta.modalities)
    # One task at a time: its score is printed and its file written before the next one begins.
    for task in tasks:
        name, path, needed = task.metadata.name, task.metadata.dataset["path"], task.metadata.modalities
        if not taken.intersection(needed):
            raise ConfigError(
                f"{name} is a task of {' and '.join(needed)}, and {redact(model.name)} takes "
                f"{modality_words(model.takes)}; leave one of them out"
            )
        try:
            results = mteb.evaluate(
                model,
                task,
                cache=cache,
                encode_kwargs={"batch_size": batch_size},
                show_progress_bar=False,
                co2_tracker=False,
            )
        except ConnectionError as error:
            raise MachineError(
                f"{name}: its data set {path!r} is not in the local cache and the hub can't be reached. Download "
                f"it where there is a network (`hf download {path} --repo-type dataset`), and copy the cache (HF_HOME)"
            ) from error
        except DatasetNotFoundError as error:
            raise DataError(
                f"{name}: the hub has no data set {path!r}, or it is private or gated: log in with `hf auth login`"
            ) from error
        (result,) = results.task_results
        yield name, task.metadata.main_score.replace("_at_", "@"), float(result.get_score())
