"""The data of a run, as its configuration names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.data.arrangements import ByClass, Contents, WithoutRepeats
from vembed.data.images import ImageLimits
from vembed.data.sampler import GlobalSampler
from vembed.losses.registry import loss_facts
from vembed.training.inputs import load_run_data

if TYPE_CHECKING:
    from vembed.config.keys.sampling import SamplingKeys
    from vembed.config.schema import Config
    from vembed.data.arrangements import Arrangement
    from vembed.data.records import RecordTable
    from vembed.training.inputs import RunData


def load_data(config: Config) -> RunData:
    """Read and check the data of a run.

    Raises:
        DataError: No training data is named, or some of it can't be used.
    """
    needs_dev = config.eval_strategy != "no" or config.test_data_path is None
    return load_run_data(config, needs_dev=needs_dev, loss=loss_facts(config.loss_type))


def build_sampler(config: Config, records: RecordTable, batch_size: int) -> GlobalSampler:
    """Return what says which records make up each batch.

    Args:
        batch_size: Records of all devices.

    Raises:
        DataError: The records don't allow such batches.
    """
    return GlobalSampler(
        len(records),
        batch_size=batch_size,
        seed=config.seed,
        drop_last=config.drop_last,
        arrangement=_arrangement(config, records, batch_size),
    )


def _arrangement(keys: SamplingKeys, records: RecordTable, batch_size: int) -> Arrangement | None:
    if keys.batch_sampling == "no_duplicates":
        return WithoutRepeats(Contents.of_records(records))
    if keys.batch_sampling == "classes":
        return ByClass.of_records(records, keys.samples_per_class, batch_size)
    return None


def image_limits(config: Config) -> ImageLimits:
    """Return what a picture may be."""
    return ImageLimits(max_pixels=config.max_image_pixels)


def measures_both_directions(config: Config, data: RunData) -> bool:
    """Return whether the verdict's set is measured in reverse too; auto does where texts and pictures meet."""
    if config.eval_both_directions != "auto":
        return config.eval_both_directions
    task = data.test or data.dev
    return task is not None and task.crosses_modalities
