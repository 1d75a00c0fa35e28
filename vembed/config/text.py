"""YAML and JSON as keys with their lines, and YAML written back.

Refused: duplicate keys, anchors and aliases (a few lines can stand for gigabytes), tags (they name Python objects),
several documents, deep nesting. Plain words are read as in YAML 1.2: `1e-5` is a number; `no`, `on` and `2024-01-01`
are texts.
"""

import json
import re
from collections.abc import Iterator, Mapping

import yaml

from vembed.config.sources import Refused
from vembed.redact import printable, shown

MAX_DEPTH = 8
"""Nested lists and mappings; no key needs more than two."""

MAX_NODES = 2_000
"""Keys and values of a file; bounds the time that parsing and explaining them can take."""

_MAX_DIGITS = 1000
"""Integers with more digits are infinite to us: Python refuses over 4,300 of them, and a float ends at 309."""

_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} deep"
TOO_MANY = f"there are more than {MAX_NODES} values; this is no configuration"
_TEXT = "tag:yaml.org,2002:str"
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


class Pairs(list[tuple[str | None, int, object]]):
    """A mapping as it was written: (key, line, value), with what is told twice; a key that is no text is None."""


def read_mapping(text: str, *, is_json: bool) -> Pairs:
    """Read a file that is one mapping.

    Raises:
        Refused: The file can't be read as a whole.
    """
    if is_json:
        return _read_json(text)
    node = _compose(text)
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        raise Refused(0, "the file is empty; write at least model_name: NAME")
    value = _value(node)
    if not isinstance(value, Pairs):
        raise Refused(node.start_mark.line + 1, "a configuration is a mapping; write `key: value` lines")
    return value


def resolve(value: object, refused: list[Refused]) -> object:
    """Turn `Pairs`, at any depth, into dicts; of a duplicate the first stands, and the others are refused."""
    if isinstance(value, Pairs):
        first: dict[str, int] = {}
        found = {}
        for name, line, inner in value:
            if name is None:
                refused.append(Refused(line, "a key must be a text; put it in quotes"))
            elif name in first:
                text = f"{shown(name)}: duplicate key, first set in line {first[name]}; keep one"
                refused.append(Refused(line, text))
            else:
                first[name] = line
                found[name] = resolve(inner, refused)
        return found
    return [resolve(each, refused) for each in value] if isinstance(value, list) else value


def read_flow(text: str) -> object:
    """Read a quoted text, `[a, list]` or `{a: mapping}` that stands on its own.

    Raises:
        Refused: It is anything else, or something follows it.
    """
    node = _compose(text)
    quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
    if node is None or not (quoted or getattr(node, "flow_style", False)):
        raise Refused(0, "something follows the closing quote or bracket")
    refused: list[Refused] = []
    value = resolve(_value(node), refused)
    if refused:
        raise refused[0]
    return value


def read_plain(text: str) -> object:
    """Read an unquoted word: null, a boolean, a number, or the text itself."""
    word = text.strip()
    for tag, (pattern, _) in _PLAIN.items():
        if pattern.match(word):
            return _scalar(tag, word)
    return text


def write_mapping(values: Mapping[str, object]) -> str:
    """Write keys as YAML that is read as the same values, one key per line."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses what can blow up or construct objects, before it is composed."""

    yaml_implicit_resolvers = _RESOLVERS
    depth = num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        self.num_nodes += 1
        self.depth += 1
        if getattr(event, "anchor", None) is not None:  # an alias names an anchor, too
            raise Refused(line, "anchors (&) and aliases (*) are refused; write the value out, or quote the text")
        if getattr(event, "tag", None) is not None:
            raise Refused(line, "tags (!) are refused; write a plain value, or quote the text")
        if self.depth > MAX_DEPTH or self.num_nodes > MAX_NODES:
            raise Refused(line, _TOO_DEEP if self.depth > MAX_DEPTH else TOO_MANY)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever the loader above would not read as text."""

    yaml_implicit_resolvers = _RESOLVERS

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Only the double-quoted style keeps every kind of line break.
        return self.represent_scalar(_TEXT, text, style=None if text.isprintable() else '"')

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def _compose(text: str) -> yaml.Node | None:
    line = 0
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            line = loader.line + 1
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Refused(line, f"the character U+{error.character:04X} is not allowed; remove it") from error
    except yaml.MarkedYAMLError as error:
        raise _refusal(error) from error
    except (ValueError, OverflowError) as error:
        raise Refused(line, "not valid YAML: an escape with \\U stands for no character") from error


_BLAMED: tuple[tuple[str, str], ...] = (
    ("could not find expected ':'", "there is no ': ' in this line; write `key: value`"),
    ("found unexpected end of stream", "the quote that opens in this line is never closed"),
    ("expected ',' or ", "the bracket that opens in this line is not closed before the next key"),
)
"""Problems that the parser notices lines later than where they begin -> what is wrong there."""

_EXPLAINED: tuple[tuple[str, str], ...] = (
    ("mapping values are not allowed here", "; put a text that holds ': ' in quotes, and begin each key at the margin"),
    ("'\\t' that cannot start any token", "; indent with spaces, not tabs"),
    ("that cannot start any token", "; put the value in quotes"),
)


def _refusal(error: yaml.MarkedYAMLError) -> Refused:
    """Say what the parser found, at the line that is to blame."""
    line = error.problem_mark.line + 1 if error.problem_mark else 0
    if isinstance(error, yaml.composer.ComposerError):
        return Refused(line, "a second YAML document starts here; a configuration is one document")
    problem = error.problem or ""
    for words, text in _BLAMED:
        if problem.startswith(words) and error.context_mark is not None and error.context_mark.line < line - 1:
            return Refused(error.context_mark.line + 1, f"not valid YAML: {text}")
    said = printable(", ".join(each for each in (error.context, problem) if each))
    fix = next((text for words, text in _EXPLAINED if words in problem), "")
    return Refused(line, f"not valid YAML: {said}{fix}")


def _value(node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        return Pairs((_key(key), key.start_mark.line + 1, _value(value)) for key, value in node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_value(each) for each in node.value]
    return _scalar(node.tag, node.value)


def _key(node: yaml.Node) -> str | None:
    return str(node.value) if isinstance(node, yaml.ScalarNode) and node.tag == _TEXT else None


def _scalar(tag: str, word: str) -> object:
    kind = tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return word.lower() == "true"
    if kind == "int":
        return _integer(word.replace("_", ""))
    if kind == "float":
        return float(word.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return word


def _integer(word: str) -> int | float:
    return int(word) if len(word) < _MAX_DIGITS else float(word)


_DECODER = json.JSONDecoder(parse_int=_integer, object_pairs_hook=tuple)  # tuples are objects, lists are arrays
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(?P<key>\s*:)?|[^"]+')


def _read_json(text: str) -> Pairs:
    """Read a JSON file; NaN and Infinity come through as numbers, for the schema to refuse with their key."""
    if not text.strip():
        raise Refused(0, 'the file is empty; write at least {"model_name": "NAME"}')
    try:
        document = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Refused(error.lineno, f"not valid JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise Refused(0, _TOO_DEEP) from error
    found = _with_lines(document, _key_lines(text), MAX_DEPTH)
    if not isinstance(found, Pairs):
        raise Refused(1, 'a configuration is an object; write {"key": value}')
    return found


def _key_lines(text: str) -> Iterator[int]:
    """Return the line of each key of valid JSON, in the order of the text."""
    line, count = 1, 0
    for token in _JSON_TOKEN.finditer(text):
        if token["key"] is not None:
            count += 1
            if 2 * count > MAX_NODES:
                raise Refused(line, TOO_MANY)
            yield line
        line += token[0].count("\n")


def _with_lines(value: object, lines: Iterator[int], depth: int) -> object:
    if not isinstance(value, list | tuple):
        return value
    if depth == 0:
        raise Refused(0, _TOO_DEEP)
    if isinstance(value, tuple):
        return Pairs((name, next(lines), _with_lines(inner, lines, depth - 1)) for name, inner in value)
    return [_with_lines(each, lines, depth - 1) for each in value]
