"""Settings that Python code gives, as entries like those of a file or of the command line."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from vembed.config.overrides import shown_override
from vembed.config.redact import shown
from vembed.config.sources import MAX_DEPTH, Entry, Place, Problem, Refused


def read_values(values: Mapping[Any, object], *, layer: int) -> tuple[list[Entry], list[Problem]]:
    """Read settings in their order.

    Args:
        values: Key -> text, number, boolean, None, path, or lists and mappings of those.
        layer: 0 for a configuration, 1 for what is laid over it.

    Returns:
        The entries, and one problem for each value that no file could hold. Keys are not judged here.
    """
    entries = []
    problems = []
    for number, (name, value) in enumerate(values.items(), start=1):
        label = "configuration" if layer == 0 else f"override {shown_override(f'{name}={value}')}"
        place = Place(layer, number, label)
        if not isinstance(name, str):
            problems.append(Problem(place, f"{shown(repr(name))} is no text; a key is one, such as 'batch_size'"))
            continue
        try:
            entries.append(Entry(name, _plain(value, MAX_DEPTH), place))
        except Refused as refused:
            problems.append(Problem(place, refused.text, shown(name)))
    return entries, problems


def _plain(value: object, depth: int) -> object:
    """Return a value as a file would hold it."""
    if depth == 0:
        raise Refused(0, f"nested over {MAX_DEPTH} levels deep; no key needs more than two")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(part, depth - 1) for part in value]
    if isinstance(value, Mapping):
        return {name: _plain(part, depth - 1) for name, part in value.items()}
    raise Refused(0, f"a {type(value).__name__} is no setting; give a text, a number, a boolean, None or a path")
