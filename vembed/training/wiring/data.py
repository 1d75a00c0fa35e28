"""The data of a run, as its configuration names them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vembed.data.images import ImageLimits
from vembed.data.sources import SourceOptions
from vembed.errors import DataError
from vembed.training.inputs import DataPaths, RunData

if TYPE_CHECKING:
    from vembed.config.schema import Config
    from vembed.data.splits import Role


SUGGESTED_SET = "builtin:stdlib-code"


def data_paths(config: Config) -> DataPaths:
    """Return where the data is and how it is read.

    Raises:
        DataError: No training data is named.
    """
    if config.data_path is None:
        raise DataError(f"data_path is not set; --config_override data_path={SUGGESTED_SET} trains on a built-in set")

    def source(path: str, role: Role, split: str | None) -> tuple[str, SourceOptions]:
        options = SourceOptions(
            role=role,
            split=split,
            column_mapping=config.column_mapping,
            image_root=None if config.image_root is None else Path(config.image_root),
            image_limits=image_limits(config),
            skip_invalid=config.skip_invalid_records,
            max_invalid=config.max_invalid_records,
        )
        return path, options

    dev, test = config.val_data_path, config.test_data_path
    return DataPaths(
        train=source(config.data_path, "train", config.data_split),
        dev=None if dev is None else source(dev, "validation", config.val_data_split),
        test=None if test is None else source(test, "test", config.test_data_split),
        needs_dev=config.eval_strategy != "no" or test is None,
        mode=config.retrieval_mode,
    )


def image_limits(config: Config) -> ImageLimits:
    """Return what a picture may be."""
    return ImageLimits(max_pixels=config.max_image_pixels)


def measures_both_directions(config: Config, data: RunData) -> bool:
    """Return whether the verdict's set is measured in reverse too; auto does where texts and pictures meet."""
    if config.eval_both_directions != "auto":
        return config.eval_both_directions
    task = data.test or data.dev
    return task is not None and task.crosses_modalities
