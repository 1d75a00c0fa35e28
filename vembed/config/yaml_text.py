"""A small, safe part of YAML, read with line numbers and written back.

Refused: duplicate keys, anchors and aliases (a few lines can stand for gigabytes), tags (they name Python objects),
several documents, deep nesting. Plain words are read as in YAML 1.2: `1e-5` is a number; `no`, `on` and `2024-01-01`
are texts.
"""

import re
from collections.abc import Mapping

import yaml

from vembed.config.redact import printable, shown
from vembed.config.sources import MAX_DEPTH, MAX_NODES, FileItem, Refused

_MAX_DIGITS = 1000
"""Integers with more digits are infinite to us; a float ends at 309."""

_PLAIN = {
    "tag:yaml.org,2002:null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "tag:yaml.org,2002:int": (re.compile(r"^[-+]?(?:0|[1-9](?:_?[0-9])*+)$"), list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        re.compile(
            r"^(?:[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
            r"|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
}
_RESOLVERS = {
    first: [(tag, pattern) for tag, (pattern, firsts) in _PLAIN.items() if first in firsts]
    for first in sorted({first for _, firsts in _PLAIN.values() for first in firsts})
}


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses what can blow up or construct objects, before it is composed."""

    yaml_implicit_resolvers = _RESOLVERS

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        self._num_nodes += 1
        if getattr(event, "anchor", None) is not None:  # an alias names an anchor, too
            raise Refused(line, "anchors (&) and aliases (*) are refused; write the value out, or quote the text")
        if getattr(event, "tag", None) is not None:
            raise Refused(line, "tags (!) are refused; write a plain value, or quote the text")
        if self._depth >= MAX_DEPTH:
            raise Refused(line, f"lists and mappings are nested more than {MAX_DEPTH} deep")
        if self._num_nodes > MAX_NODES:
            raise Refused(line, f"there are more than {MAX_NODES} values; this is no configuration")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever the loader above would not read as text."""

    yaml_implicit_resolvers = _RESOLVERS

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Only the double-quoted style keeps every kind of line break.
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def read_mapping(text: str) -> tuple[list[FileItem], list[Refused]]:
    """Read a file that is one mapping.

    Args:
        text: The file.

    Returns:
        The keys in their order, and the problems of single keys; of a duplicate the first is returned.

    Raises:
        Refused: The file can't be read as a whole.
    """
    node = _compose(text)
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        raise Refused(0, "the file is empty; write at least model_name: NAME")
    if not isinstance(node, yaml.MappingNode):
        raise Refused(node.start_mark.line + 1, "a configuration is a mapping; write `key: value` lines")
    refused: list[Refused] = []
    items = []
    for key_node, value_node in _distinct(node, refused):
        part_lines = {}
        if isinstance(value_node, yaml.MappingNode):
            part_lines = {each.value: each.start_mark.line + 1 for each, _ in _distinct(value_node, [])}
        value = _construct(value_node, refused)
        items.append(FileItem(key_node.value, value, key_node.start_mark.line + 1, part_lines))
    return items, refused


def read_flow(text: str) -> object:
    """Read a quoted text, `[a, list]` or `{a: mapping}` that stands on its own.

    Args:
        text: Starts with a quote or a bracket.

    Returns:
        The value.

    Raises:
        Refused: It is anything else, or something follows it.
    """
    node = _compose(text)
    quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
    if node is None or not (quoted or getattr(node, "flow_style", False)):
        raise Refused(0, "something follows the closing quote or bracket")
    refused: list[Refused] = []
    value = _construct(node, refused)
    if refused:
        raise refused[0]
    return value


def read_plain(text: str) -> object:
    """Read an unquoted word: null, a boolean, a number, or the text itself.

    Args:
        text: The word.

    Returns:
        The value.
    """
    word = text.strip()
    for tag, (pattern, _) in _PLAIN.items():
        if pattern.match(word):
            return _scalar(tag, word)
    return text


def write_mapping(values: Mapping[str, object]) -> str:
    """Write keys that `read_mapping` reads as the same values.

    Args:
        values: Scalars, lists and dicts.

    Returns:
        YAML, one key per line, in the given order.
    """
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)


def _compose(text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Refused(line, f"the character U+{error.character:04X} is not allowed; remove it") from error
    except yaml.composer.ComposerError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise Refused(line, "a second YAML document starts here; a configuration is one document") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        because = ", ".join(each for each in (error.context, error.problem) if each)
        raise Refused(line, f"not valid YAML: {printable(because)}") from error


def _distinct(node: yaml.MappingNode, refused: list[Refused]) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    first_lines: dict[str, int] = {}
    pairs = []
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
            refused.append(Refused(line, "a key must be a text; put it in quotes"))
        elif key_node.value in first_lines:
            first = first_lines[key_node.value]
            refused.append(
                Refused(line, f"{shown(key_node.value)}: duplicate key, first set in line {first}; keep one")
            )
        else:
            first_lines[key_node.value] = line
            pairs.append((key_node, value_node))
    return pairs


def _construct(node: yaml.Node, refused: list[Refused]) -> object:
    if isinstance(node, yaml.MappingNode):
        return {key_node.value: _construct(value_node, refused) for key_node, value_node in _distinct(node, refused)}
    if isinstance(node, yaml.SequenceNode):
        return [_construct(each, refused) for each in node.value]
    return _scalar(node.tag, node.value)


def read_integer(word: str) -> int | float:
    """Read an integer of any length; Python itself refuses more than 4,300 digits.

    Args:
        word: Digits, with a sign or not.

    Returns:
        The integer, or infinity, which no key takes.
    """
    return int(word) if len(word) < _MAX_DIGITS else float(word)


def _scalar(tag: str, word: str) -> object:
    kind = tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return word.lower() == "true"
    if kind == "int":
        return read_integer(word.replace("_", ""))
    if kind == "float":
        return float(word.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return word
