"""The options of commands that read rows of training data, under the names of the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from vembed.config.messages import checked_section
from vembed.data.keys import DataKeys, LabelKind
from vembed.errors import ConfigError

if TYPE_CHECKING:
    import argparse


def add_row_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command."""
    parser.add_argument("--split", help="split of the data; default: the training split")
    parser.add_argument(
        "--column-mapping",
        nargs="+",
        action="extend",
        default=[],
        metavar="THEIRS=OURS",
        help="rename columns, e.g. title=positive; THEIRS=null drops one",
    )
    parser.add_argument("--label-kind", choices=get_args(LabelKind), default="auto", help="what numbers in label mean")
    parser.add_argument(
        "--image-root", metavar="DIR", help="folder that picture paths start from; default: the data's folder"
    )


def row_keys(parsed: argparse.Namespace) -> DataKeys:
    """Return how the data are read, as a configuration with the same keys would have it.

    Raises:
        ConfigError: An option is wrong.
    """
    mapping: dict[str, str | None] = {}
    for word in parsed.column_mapping:
        theirs, equals, ours = word.rpartition("=")
        if not equals or not theirs:
            raise ConfigError(f"--column-mapping: {word!r} must read THEIRS=OURS, e.g. title=positive")
        mapping[theirs] = None if ours == "null" else ours
    given: dict[str, Any] = {"column_mapping": mapping, "label_kind": parsed.label_kind}
    given |= {"image_root": parsed.image_root, "max_image_pixels": parsed.max_image_pixels}
    if getattr(parsed, "skip_invalid", None) is not None:
        given |= {"skip_invalid_records": True, "max_invalid_records": parsed.skip_invalid}
    return checked_section(DataKeys, given)
