"""JSON read with the line of each key."""

import json
import re

from vembed.config.redact import shown
from vembed.config.sources import MAX_DEPTH, MAX_NODES, FileItem, Refused
from vembed.config.yaml_text import read_integer

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_int=read_integer)


def read_mapping(text: str) -> tuple[list[FileItem], list[Refused]]:
    """Read a JSON file that is one object.

    NaN and Infinity come through as numbers, for the schema to refuse with the key that holds them.

    Args:
        text: The file.

    Returns:
        The keys in their order, and the problems of single keys; of a duplicate the first is returned.

    Raises:
        Refused: The file can't be read as a whole.
    """
    if not text.strip():
        raise Refused(0, 'the file is empty; write at least {"model_name": "NAME"}')
    try:
        document = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Refused(error.lineno, f"not valid JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise Refused(0, f"lists and objects are nested more than {MAX_DEPTH} deep") from error
    if _deeper_than(document, MAX_DEPTH):
        raise Refused(0, f"lists and objects are nested more than {MAX_DEPTH} deep")
    if not isinstance(document, dict):
        raise Refused(1, 'a configuration is an object; write {"key": value}')
    return _Walker(text).keys_of_object(_skip_space(text, 0), nested=False)


class _Walker:
    """Finds the keys of a text that is known to be valid JSON; the standard parser doesn't say where they stand."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._counted_to = 0
        self._line = 1
        self._num_nodes = 0

    def keys_of_object(self, start: int, *, nested: bool) -> tuple[list[FileItem], list[Refused]]:
        """List the keys of the object that opens at an offset."""
        text = self._text
        items: dict[str, FileItem] = {}
        refused: list[Refused] = []
        position = _skip_space(text, start + 1)
        while text[position] != "}":
            line = self._line_at(position)
            name, position = _DECODER.raw_decode(text, position)
            position = _skip_space(text, _skip_space(text, position) + 1)
            part_lines: dict[str, int] = {}
            if text[position] == "{" and not nested:  # no key is a mapping of mappings: deeper ones fail in the schema
                parts, refused_parts = self.keys_of_object(position, nested=True)
                part_lines = {part.name: part.line for part in parts}
                refused += refused_parts
            value, position = _DECODER.raw_decode(text, position)
            if name in items:
                refused.append(
                    Refused(line, f"{shown(name)}: duplicate key, first set in line {items[name].line}; keep one")
                )
            else:
                items[name] = FileItem(name, value, line, part_lines)
            position = _skip_space(text, position)
            if text[position] == ",":
                position = _skip_space(text, position + 1)
        return list(items.values()), refused

    def _line_at(self, position: int) -> int:
        self._num_nodes += 2  # a key and its value
        self._line += self._text.count("\n", self._counted_to, position)
        self._counted_to = position
        if self._num_nodes > MAX_NODES:
            raise Refused(self._line, f"there are more than {MAX_NODES // 2} keys; this is no configuration")
        return self._line


def _deeper_than(value: object, depth: int) -> bool:
    """Tell whether lists and objects are nested deeper, without going deeper itself."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_deeper_than(part, depth - 1) for part in parts)


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None  # the pattern matches the empty text
    return found.end()
