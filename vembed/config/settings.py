"""Settings that don't come from a file: overrides of the command line, `key=value`, and values of Python code.

The value of an override is everything after the first `=`. Brackets and quotes open a YAML list, mapping or text;
anything else is one word (null, a boolean, a number) or a text taken as it stands, so that `query_prompt=query: ` needs
no quotes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from vembed.config.schema import fields
from vembed.config.sources import Entry, Layer, Place, Problem, Refused
from vembed.config.synonyms import ALIASES
from vembed.config.text import MAX_DEPTH, MAX_NODES, TOO_MANY, read_flow, read_plain
from vembed.redact import MASK, names_secret, shown

_SYNTAX = "write key=value, such as batch_size=32"
_RESERVED = "!&*|>%@`#"
"""Characters that open something other than a text in YAML."""

_MOST_BITS = 3_000
"""Larger integers are infinite to us, as in a file."""


def parse_overrides(overrides: Sequence[str]) -> Layer:
    """Read texts of the form `key=value` or `mapping_key.part=value`; keys are not judged here."""
    layer = Layer([], [])
    if len(overrides) > MAX_NODES:
        return Layer([], [Problem(Place(1, 0, "overrides"), TOO_MANY)])
    for number, text in enumerate(overrides):
        place = Place(1, number, f"override {_shown(text)}")
        try:
            layer.entries.append(_parse(text, place))  # type: ignore[union-attr]
        except Refused as refused:
            layer.problems.append(Problem(place, refused.text))
    return layer


def read_values(values: Mapping[Any, object], *, layer: int) -> Layer:
    """Read settings of Python code; keys are not judged here.

    Args:
        values: Key -> text, number, boolean, None, path, or lists and mappings of those.
        layer: 0 for a configuration, 1 for what is laid over it.
    """
    entries, problems = [], []
    left = iter(range(MAX_NODES))
    for number, (name, given) in enumerate(values.items(), start=1):
        try:
            value, refusal = _plain(given, MAX_DEPTH, left), None
        except Refused as refused:
            value, refusal = "...", refused.text
        place = Place(layer, number, f"override {_shown(f'{name}={value}')}" if layer else "configuration")
        if not isinstance(name, str):
            problems.append(Problem(place, f"{shown(repr(name))} is no text; a key is one, such as 'batch_size'"))
        elif refusal is not None:
            problems.append(Problem(place, refusal, shown(name)))
        else:
            entries.append(Entry(name, value, place))
    return Layer(entries, problems)


def _parse(text: str, place: Place) -> Entry:
    name, equals, word = text.partition("=")
    name = name.strip()
    if not equals:
        raise Refused(0, f"there is no '='; {_SYNTAX}")
    if not name:
        raise Refused(0, f"there is no key before '='; {_SYNTAX}")
    if not word.strip():
        key = shown(name)
        raise Refused(0, f"there is no value after '='; write {key}='' for an empty text or {key}=null for none")
    name, dot, part = name.partition(".")
    if dot and not (name and part):
        raise Refused(0, "write mapping_key.part=value, such as column_mapping.text=query")
    return Entry(name, _read(word), place, part=part or None)


def _read(word: str) -> object:
    first = word.lstrip()[0]
    if first in "'\"[{":
        try:
            return read_flow(word.strip())
        except Refused as refused:
            raise Refused(0, f"the value is not valid YAML: {refused.text}") from refused
    if first in _RESERVED:
        raise Refused(0, f"a value that starts with {first} means something else in YAML; put it in quotes")
    return read_plain(word)


def _plain(value: object, depth: int, left: Iterator[int]) -> object:
    """Return a value of Python as a file would hold it, of the plain types; each part takes one of those left."""
    if depth == 0:
        raise Refused(0, f"nested over {MAX_DEPTH} levels deep; no key needs more than two")
    if next(left, None) is None:
        raise Refused(0, TOO_MANY)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int.__int__(value)  # an enumeration or another subclass may print as something else
        return number if number.bit_length() <= _MOST_BITS else math.inf if number > 0 else -math.inf
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(part, depth - 1, left) for part in value]
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise Refused(0, "a key must be a text")
        return {str.__str__(name): _plain(part, depth - 1, left) for name, part in value.items()}
    raise Refused(0, f"a {type(value).__name__} is no setting; give a text, a number, a boolean, None or a path")


def _shown(text: str) -> str:
    """Return `key=value` as a message may show it: cut, on one line, without a value that looks like a secret."""
    name, equals, _ = text.partition("=")
    known = name.partition(".")[0].strip() in {*fields(), *ALIASES}
    return shown(text) if known or not names_secret(name) else shown(f"{name}{equals}{MASK}")
