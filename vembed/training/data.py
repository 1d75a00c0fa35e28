"""The data of a run, as its configuration names them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from vembed.batch import ImageLimits
from vembed.data.arrangements import ByClass, Contents, WithoutRepeats
from vembed.data.read import DataSource
from vembed.data.run_data import load_run_data
from vembed.data.sampler import GlobalSampler, Mixture
from vembed.data.table import ItemColumn
from vembed.errors import DataError
from vembed.text import show_duration
from vembed.vectors.items import corpus_items
from vembed.vectors.keys import teacher_gives_scores

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.data.arrangements import Arrangement
    from vembed.data.keys import SourceKeys
    from vembed.data.run_data import RunData
    from vembed.data.table import RecordTable
    from vembed.distributed.ranks import Ranks
    from vembed.models.encoder import Encoder


NEAR_SHARE, START_SECONDS = 0.02, 10.0
"""Share of a run that the search for nearly equal pairs may take, and CPU time of a run beside its steps."""


def load_data(config: Config) -> RunData:
    """Read and check the data of a run.

    Raises:
        DataError: No training data is named, or some of it can't be used.
    """
    chooses = config.eval_strategy != "no"
    needs_dev = chooses or config.test_data_path is None
    data = load_run_data(config, needs_dev=needs_dev, divides=chooses, loss=config.loss_needs())
    if config.mine_corpus is not None:
        corpus = DataSource(config.mine_corpus, "train", config, user_names=("mine_corpus", "mine_corpus")).documents()
        data = data.with_corpus(corpus_items(document.item for document in corpus))
    if config.mine == "never":
        _refuse_missing_negatives(config, data)
    return data


def look_nearer(data: RunData, ranks: Ranks, *, run_seconds: float) -> tuple[RunData, list[str]]:
    """Look for judged pairs that nearly equal training rows where that takes at most `NEAR_SHARE` of the run.

    Args:
        run_seconds: Time of all steps, by a rough estimate.

    Returns:
        The data with what was found, and a note where it would take longer.
    """
    # The first rank searches for all: whether there is time depends on its clock, and plans must not differ.
    judged = data.judged
    assert judged is not None, "some set was given"
    seconds = NEAR_SHARE * (START_SECONDS + run_seconds)
    overlaps, needed = ranks.from_first(lambda: judged.find_near(data.records, seconds=seconds))
    notes: list[str] = []
    if needed > seconds:
        names = " and ".join(task.name for name, task in data.sets.items() if name in overlaps)
        notes.append(
            f"queries of {names} weren't compared with training queries that nearly equal them, which takes about "
            f"{show_duration(needed)}: vembed data check --against does it."
        )
    return replace(data, overlaps=overlaps), notes


def _refuse_missing_negatives(config: Config, data: RunData) -> None:
    """Refuse data without the negatives that a loss learns from; where batches are of one source, each by itself."""
    loss = config.run_loss()
    counts = {
        name: np.bincount(data.records.sources[data.records.numbers(name)[0]], minlength=len(data.sources))
        for name in get_args(ItemColumn)
    }
    parts = [(" and ".join(data.sources), loss, slice(None))]
    if config.source_batches == "single":
        parts = [(path, loss.for_source(place), slice(place, place + 1)) for place, path in enumerate(data.sources)]
    for where, part_loss, rows in parts:
        num_rows, num_positives, num_negatives = (int(counts_S[rows].sum()) for counts_S in counts.values())
        # Scores of a teacher are compared within a row: with one document there is nothing to compare.
        alone = num_positives + num_negatives == num_rows
        if alone and teacher_gives_scores(config) and not {"pairs", "positives"} & set(part_loss.needs().takes):
            raise DataError(
                f"{where}: loss_type {part_loss.name} learns nothing from rows of one document, and all are; add "
                f"the column negatives"
            )
        what = part_loss.row_negatives(config)
        if what and not num_negatives:
            mined = "" if config.label_kind in {"pair", "grade"} else "let the run find some (mine=once), "
            raise DataError(
                f"{where}: {what} learns from the hard negatives of rows, and no row has any; add the column "
                f"negatives, {mined}or set {what.partition(' ')[0]} to another value"
            )


def build_sampler(
    config: Config, records: RecordTable, batch_size: int, arrangement: Arrangement | None = None
) -> GlobalSampler:
    """Return what says which records make up each batch.

    Args:
        batch_size: Records of all devices.
        arrangement: How they are put into batches; None makes it of the records.

    Raises:
        DataError: The records don't allow such batches, or all rows of a source were held out.
    """
    is_single = config.source_batches == "single"
    if arrangement is None and config.batch_sampling == "no_duplicates":
        arrangement = WithoutRepeats(Contents.of_records(records))
    elif arrangement is None and config.batch_sampling == "classes":
        arrangement = ByClass.of_records(records, config.samples_per_class, batch_size, single=is_single)

    mixture = None
    if config.data is not None and len(config.data) > 1:
        sizes = np.bincount(records.sources, minlength=len(config.data)).tolist()
        for source, size in zip(config.data, sizes, strict=True):
            if not size:  # all of them were held out
                raise DataError(
                    f"data: no row of {source.path} is left to train on; give val_data_path, or leave it out"
                )
        mixture = Mixture(
            names=tuple(source.path for source in config.data),
            sizes=tuple(sizes),
            weights=tuple(source.weight for source in config.data),
            temperature=config.source_temperature,
            single=is_single,
        )
    return GlobalSampler(
        len(records),
        batch_size=batch_size,
        seed=config.seed,
        drop_last=config.drop_last,
        arrangement=arrangement,
        mixture=mixture,
    )


def prompted(keys: SourceKeys, encoder: Encoder) -> tuple[Encoder, ...]:
    """Return the encoder as it reads the texts of each source; nothing where no source has prompts of its own.

    Raises:
        ConfigError: The encoder takes no prompts.
    """
    if not any(source.prompts for source in keys.data or ()):
        return ()
    return tuple(encoder.with_prompts(source.prompts) if source.prompts else encoder for source in keys.data or ())


def image_limits(config: Config) -> ImageLimits:
    """Return what a picture may be."""
    return ImageLimits(max_pixels=config.max_image_pixels)


def measures_both_directions(config: Config, data: RunData) -> bool:
    """Return whether the verdict's set is measured in reverse too; auto does where texts and pictures meet."""
    task = data.test or data.dev
    if config.eval_both_directions != "auto":
        return config.eval_both_directions and not (task is not None and task.grades)
    return task is not None and task.crosses_modalities
