"""Read a data set of the Hugging Face hub as rows. Code of a data set is never run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vembed.data.splits import Role, missing_split, split_for
from vembed.errors import DataError, MachineError
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vembed.data.lines import RawRow

HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?", re.ASCII)
BATCH_ROWS = 1000
PICTURE_BATCH_ROWS = 64
"""Rows that are Python objects at a time where they hold bytes of pictures."""


def hub_split(hub_id: str, split: str | None, role: Role, *, split_key: str | None = None) -> tuple[str, Any]:
    """Return the name and the rows of one split.

    Args:
        hub_id: `owner/name` or `owner/name:config`.
        split_key: What the user calls the split; the key of the role where that isn't said.

    Returns:
        The split's name and a `datasets.Dataset`.

    Raises:
        DataError: The data set, its config or the split doesn't exist, or it needs code of its own to be read.
        MachineError: The hub can't be reached and the data set is not in the local cache.
    """
    match = HUB_ID.fullmatch(hub_id)
    assert match is not None, hub_id
    splits = _load(match["name"], match["config"])
    chosen = split_for(splits, split, role)
    if chosen is None:
        raise missing_split(hub_id, list(splits), split, role, split_key)
    return chosen, splits[chosen]


def hub_rows(dataset: Any, wanted: Callable[[Sequence[str]], Sequence[str]]) -> Iterator[RawRow]:
    """Yield the rows of a `datasets.Dataset`, counted from 1; columns that nobody wants are not read.

    Args:
        wanted: Given its columns, says which to read.
    """
    names = list(wanted(dataset.column_names))
    number = 0
    chosen, batch_rows = _undecoded(dataset.select_columns(names)) if names else (dataset, BATCH_ROWS)
    for batch in chosen.iter(batch_size=batch_rows) if names else [{}] * bool(len(dataset)):
        for cells in zip(*(batch[name] for name in names), strict=True) if names else [()] * len(dataset):
            number += 1
            yield number, dict(zip(names, cells, strict=True))


def _undecoded(dataset: Any) -> tuple[Any, int]:
    """Return a data set whose pictures come as {"bytes", "path"}, checked here before anything decodes them."""
    import datasets

    def feature_of(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        inner = getattr(feature, "feature", None)
        return type(feature)(datasets.Image(decode=False)) if isinstance(inner, datasets.Image) else feature

    features = {name: feature_of(feature) for name, feature in dataset.features.items()}
    if features == dict(dataset.features):
        return dataset, BATCH_ROWS
    return dataset.cast(datasets.Features(features)), PICTURE_BATCH_ROWS


def _load(name: str, config: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config)
    except datasets.exceptions.DatasetNotFoundError as error:
        msg = (
            f"no data set {name!r} on the hub, and no such local file or folder; if it is private or gated, log in "
            f"with `hf auth login`: {first_line(error)}"
        )
        raise DataError(msg) from error
    except (ConnectionError, TimeoutError, OSError) as error:
        msg = (
            f"the data set {name!r} is not in the local cache and the hub can't be reached: {first_line(error)}. "
            f"Download it where there is a network (`hf download {name} --repo-type dataset`), or give a local file"
        )
        raise MachineError(msg) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        msg = f"the data set {name!r} can't be read: {first_line(error)}"
        raise DataError(msg) from error
