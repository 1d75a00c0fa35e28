"""Overrides of the command line, `key=value`, read by the rules of the file.

The value is everything after the first `=`. Brackets and quotes open a YAML list, mapping or text; anything else is one
word (null, a boolean, a number) or a text taken as it stands, so that `query_prompt=query: ` needs no quotes.
"""

from collections.abc import Sequence

from vembed.config.redact import MASK, names_secret, shown
from vembed.config.schema import ALIASES, fields
from vembed.config.sources import Entry, Place, Problem, Refused
from vembed.config.yaml_text import read_flow, read_plain

_SYNTAX = "write key=value, such as batch_size=32"
_RESERVED = "!&*|>%@`#"
"""Characters that open something other than a text in YAML."""


def parse_overrides(overrides: Sequence[str]) -> tuple[list[Entry], list[Problem]]:
    """Read overrides in their order.

    Args:
        overrides: Texts of the form `key=value` or `mapping_key.part=value`.

    Returns:
        The entries, and one problem for each text that is none. Keys are not judged here.
    """
    entries = []
    problems = []
    for number, text in enumerate(overrides):
        place = Place(1, number, f"override {shown_override(text)}")
        try:
            entries.append(_parse(text, place))
        except Refused as refused:
            problems.append(Problem(place, refused.text))
    return entries, problems


def _parse(text: str, place: Place) -> Entry:
    name, equals, word = text.partition("=")
    name = name.strip()
    if not equals:
        raise Refused(0, f"there is no '='; {_SYNTAX}")
    if not name:
        raise Refused(0, f"there is no key before '='; {_SYNTAX}")
    if not word.strip():
        raise Refused(0, f"there is no value after '='; write {name}='' for an empty text or {name}=null for none")
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


def shown_override(text: str) -> str:
    """Return `key=value` as a message may show it: cut, on one line, without a value that looks like a secret."""
    name, equals, _ = text.partition("=")
    known = name.partition(".")[0].strip() in {*fields(), *ALIASES}
    return shown(text) if known or not names_secret(name) else shown(f"{name}{equals}{MASK}")
