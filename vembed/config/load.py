"""From a file and overrides to one checked `Config`, or to every problem at once with the place where it stands.

1. Read: a file, `key=value` words or values of Python become settings, each with its origin.
2. Import the plugins that they name, which may bring keys.
3. Settle: aliases become keys; unknown keys and keys that are set twice are problems.
4. Lay the overrides over the file.
5. Take out keys that only other trainers have: each becomes a note or a problem.
6. Validate: the type and bounds of each key, then the rules between the keys that are right by themselves.

The error has one line for each problem, in reading order, the file before the overrides:

    configs/a.yaml:5: fp16: bf16 and fp16 are both true, ...; set fp16 to false (bf16 is set at configs/a.yaml:4)
    override learning_rate=-1: must be > 0, got -1
"""

import codecs
import difflib
import json
import math
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vembed.config import names
from vembed.config.documents import MAX_DEPTH, MAX_VALUES, TOO_MANY, Unreadable, read_document, read_flow, read_word
from vembed.config.messages import explain, explain_entry, show_value, unknown_key
from vembed.config.schema import BrokenRules, Config, fields, import_named
from vembed.errors import ConfigError
from vembed.redact import MASK, lacks_secret, names_secret, printable, shown
from vembed.section import written

MAX_FILE_BYTES = 2**18
MAX_TEXT_BYTES = 2**16  # of all values together
MAX_SUGGESTIONS = 20  # unknown keys that get the nearest one, each in a millisecond
MAX_LINES = 100  # of an error; further problems are counted

_SUFFIXES = (".yaml", ".yml", ".json")
_OVERRIDE_SYNTAX = "write key=value, such as batch_size=32"
_NO_PLAIN_START = "!&*|>%@`#"  # open something other than a text in YAML


class Origin(NamedTuple):
    """Place where a setting was written; origins sort in reading order, the file before the overrides."""

    layer: int  # 0 for the file, 1 for overrides
    number: int  # line in the file (0 for the file as a whole), or position of the override
    label: str  # "configs/a.yaml:7", "override learning_rate=-1", "argument learning_rate=-1"


class Setting(NamedTuple):
    """Key or alias with its value, as one source has it."""

    name: str
    value: object
    origin: Origin
    part: str | None = None  # "text" in the override column_mapping.text=query
    origins_of_parts: Mapping[str, Origin] = {}  # of a mapping: its own keys -> where they stand


class Problem(NamedTuple):
    """One thing to fix: what is wrong, why, and the fix."""

    origin: Origin
    text: str
    subject: str | None = None  # the key; an override names it already

    def __str__(self) -> str:
        """Return the line that a user reads."""
        named = self.subject is not None and self.origin.layer == 0
        return f"{self.origin.label}: {self.subject}: {self.text}" if named else f"{self.origin.label}: {self.text}"


class Layer(NamedTuple):
    """Settings and problems of one source."""

    settings: list[Setting]
    problems: list[Problem]
    is_readable: bool = True  # false: a file that can't be read, so that keys that seem to be missing may be in it


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """Checked configuration with the source of each value."""

    config: Config
    sources: Mapping[str, str]  # key -> "configs/a.yaml:3" or "override"; a key that isn't there has its default
    path: Path | None  # the file, if there is one
    notes: tuple[str, ...] = ()  # one line for each key of another trainer: what it comes to here


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a configuration file and lay `key=value` overrides over it; None where the overrides say everything.

    Raises:
        ConfigError: One line for each problem of the file, of the overrides and of their combination.
    """
    return _check(Layer([], []) if path is None else _read_file(path), read_overrides(overrides), path)


def load_values(base: Path | Mapping[str, object], overrides: Mapping[str, object]) -> LoadedConfig:
    """Check a configuration that Python code gives, by the rules and with the messages of the command line.

    Raises:
        ConfigError: One line for each problem.
    """
    top = _read_values(overrides, layer=1)
    if isinstance(base, Path):
        return _check(_read_file(base), top, base)
    return _check(_read_values(base, layer=0), top, None)


def file_values(path: Path) -> dict[str, object]:
    """Return the values of a configuration file, unchecked.

    Raises:
        ConfigError: The file can't be read.
    """
    layer = _read_file(path)
    raise_problems(layer.problems)
    return {setting.name: setting.value for setting in layer.settings}


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise all problems as one ConfigError, in reading order, if there are any."""
    lines = list(dict.fromkeys(str(problem) for problem in sorted(problems, key=lambda problem: problem.origin[:2])))
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"... and {len(lines) - MAX_LINES} more problems"]
    if lines:
        raise ConfigError("\n".join(lines))


def _check(lower: Layer, upper: Layer, path: Path | None) -> LoadedConfig:
    """Lay one layer over the other and judge the result: steps 2 to 6."""
    start = Origin(0, 0, "configuration" if path is None else printable(str(path)))
    problems = [*lower.problems, *upper.problems]
    last = {(setting.name, setting.part): setting for setting in (*lower.settings, *upper.settings)}
    for (name, part), setting in sorted(last.items(), key=lambda row: row[0][0] != "plugins"):
        try:
            import_named({name: setting.value if part is None else {part: setting.value}})
        except ConfigError as error:
            raise_problems([Problem(setting.origin, str(error).removeprefix("plugins: "), name)])
    known = fields()
    settings = _lay_over(_settle(lower.settings, known, problems), _settle(upper.settings, known, problems))
    foreign = {name: setting for name, setting in settings.items() if name not in known}
    notes = [note for name, setting in foreign.items() if (note := _judge_foreign(name, setting, settings, problems))]
    settings = {name: setting for name, setting in settings.items() if name not in foreign}
    config = _validate(settings, start, problems, is_whole=lower.is_readable)
    for key, setting in settings.items():
        if lacks_secret(setting.value):  # a config.yaml that a run wrote, with *** in place of a token
            fix = f"{MASK} replaces a secret; write the secret itself, or override {key}"
            problems.append(Problem(setting.origin, fix, key))
    # A run writes every key into its config.yaml, escapes and all, and must be able to read that again.
    values, room = [setting.value for setting in settings.values()], MAX_VALUES - 2 * len(known) - 1
    if (size := sum(len(json.dumps(value)) for value in values)) > MAX_TEXT_BYTES:
        text = f"the values take {size:,} bytes; a configuration has at most {MAX_TEXT_BYTES:,}"
        problems.append(Problem(start, text))
    elif sum(map(_count_inner, values)) > room:
        text = f"there are more than {room:,} values in lists and mappings; this is no configuration"
        problems.append(Problem(start, text))
    raise_problems(problems)
    assert config is not None  # a Config is missing only beside a problem
    sources = {
        key: setting.origin.label if setting.origin.layer == 0 else "override" for key, setting in settings.items()
    }
    return LoadedConfig(config, sources, path, tuple(notes))


def _count_inner(value: object) -> int:
    """Return the keys and values inside a value, at any depth."""
    if isinstance(value, Mapping):
        return sum(2 + _count_inner(part) for part in value.values())
    return sum(1 + _count_inner(part) for part in value) if isinstance(value, list) else 0


# 1. Read


def _read_file(path: Path) -> Layer:
    label = printable(str(path))

    def origin(line: int) -> Origin:
        return Origin(0, line, f"{label}:{line}" if line else label)

    try:
        if path.is_dir():
            raise Unreadable(0, f"a folder; name a configuration, a file that ends in {', '.join(_SUFFIXES)}")
        if path.suffix.lower() not in _SUFFIXES:
            fix = f"rename the file to match its content; if it holds data, vembed init {label} writes a configuration"
            raise Unreadable(0, f"a configuration ends in {', '.join(_SUFFIXES)}; {fix}")
        document = read_document(_read_text(path), is_json=path.suffix.lower() == ".json")
    except Unreadable as error:
        return Layer([], [Problem(origin(error.line), error.text)], is_readable=False)
    settings = []
    for name, value in document.values.items():
        parts = value if isinstance(value, dict) else {}
        origins = {part: origin(document.lines[name, part]) for part in parts}
        settings.append(Setting(name, value, origin(document.lines[name,]), origins_of_parts=origins))
    return Layer(settings, [Problem(origin(line), text) for line, text in document.problems])


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(0, "not a regular file; name a configuration file")
        if status.st_size > MAX_FILE_BYTES:
            raise Unreadable(0, f"{status.st_size:,} bytes; a configuration has at most {MAX_FILE_BYTES:,} (256 KiB)")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise Unreadable(0, f"no such file{_nearest_file(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise Unreadable(0, f"can't be read: {getattr(error, 'strerror', None) or error}") from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # as PowerShell's > writes
        raise Unreadable(1, "the file is UTF-16; save it as UTF-8")
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise Unreadable(line, "there is a NUL byte; this isn't a text file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Unreadable(line, "not valid UTF-8; save the file as UTF-8") from error


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return "; its folder does not exist either"
    try:
        siblings = [sibling.name for sibling in path.parent.iterdir() if sibling.suffix.lower() in _SUFFIXES]
    except OSError as error:
        return f"; its folder can't be listed: {error.strerror}"
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {printable(str(path.with_name(nearest[0])))}?" if nearest else ""


def read_overrides(overrides: Sequence[str]) -> Layer:
    """Read `key=value` or `mapping_key.part=value` words; keys are not judged here.

    The value is everything after the first `=`. Brackets and quotes open a YAML list, mapping or text; anything else is
    one word (null, a boolean, a number) or a text as it stands, so that `query_prompt=query: ` needs no quotes.
    """
    layer = Layer([], [])
    if len(overrides) > MAX_VALUES:
        return Layer([], [Problem(Origin(1, 0, "overrides"), TOO_MANY)])
    for number, text in enumerate(overrides):
        origin = Origin(1, number, f"override {_shown_override(text)}")
        try:
            layer.settings.append(_read_override(text, origin))
        except Unreadable as error:
            layer.problems.append(Problem(origin, error.text))
    return layer


def _read_override(text: str, origin: Origin) -> Setting:
    name, equals, word = text.partition("=")
    name, dot, part = name.strip().partition(".")
    if not equals:
        raise Unreadable(0, f"there is no '='; {_OVERRIDE_SYNTAX}")
    if not name and not dot:
        raise Unreadable(0, f"there is no key before '='; {_OVERRIDE_SYNTAX}")
    if not word.strip():
        key = shown(f"{name}{dot}{part}")
        raise Unreadable(0, f"there is no value after '='; write {key}='' for an empty text or {key}=null for none")
    if dot and not (name and part):
        raise Unreadable(0, "write mapping_key.part=value, such as column_mapping.text=query")
    # Only quotes and brackets are read as YAML: `query_prompt=query: ` and `data_path=C: x` are texts as they stand.
    first = word.lstrip()[0]
    if first in _NO_PLAIN_START:
        raise Unreadable(0, f"a value that starts with {first} means something else in YAML; put it in quotes")
    if first not in "'\"[{":
        return Setting(name, read_word(word), origin, part or None)
    try:
        return Setting(name, read_flow(word.strip()), origin, part or None)
    except Unreadable as error:
        raise Unreadable(0, f"the value is not valid YAML: {error.text}") from error


def _shown_override(text: str) -> str:
    """Return `key=value` for a message: on one line, cut, and without the value of an unknown key like `api_token`."""
    name, equals, _ = text.partition("=")
    is_known = name.partition(".")[0].strip() in {*fields(), *names.ALIASES}
    return shown(text if is_known or not names_secret(name) else f"{name}{equals}{MASK}")


def _read_values(values: Mapping[Any, object], *, layer: int) -> Layer:
    """Read settings of Python code, 0 for a configuration and 1 for what is laid over it; keys are not judged here."""
    settings, problems = [], []
    left = iter(range(MAX_VALUES))
    for number, (name, given) in enumerate(values.items(), start=1):
        try:
            value, reason = _plain(given, MAX_DEPTH, left), None
        except Unreadable as error:
            value, reason = "...", error.text
        origin = Origin(layer, number, f"argument {_shown_override(f'{name}={value}')}" if layer else "configuration")
        if not isinstance(name, str):
            problems.append(Problem(origin, f"{shown(repr(name))} is no text; a key is one, such as 'batch_size'"))
        elif reason is not None:
            problems.append(Problem(origin, reason, shown(name)))
        else:
            settings.append(Setting(name, value, origin))
    return Layer(settings, problems)


def _plain(value: object, depth: int, left: Iterable[int]) -> object:
    """Return a value of Python as a file would hold it; each part of it takes one of `left`."""
    if depth == 0:
        raise Unreadable(0, f"nested over {MAX_DEPTH} levels deep; no key needs more than two")
    if next(iter(left), None) is None:
        raise Unreadable(0, TOO_MANY)
    # The base classes' own conversions: an enumeration may print as something else than its value.
    match value:
        case None | bool():
            return value
        case int():
            number = int.__int__(value)
            return number if number.bit_length() <= 3_000 else math.copysign(math.inf, number > 0 or -1)
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)
        case PurePath():
            return str(value)
        case list() | tuple():
            return [_plain(part, depth - 1, left) for part in value]
        case Mapping():
            if not all(isinstance(name, str) for name in value):
                raise Unreadable(0, "a key must be a text")
            return {str.__str__(name): _plain(part, depth - 1, left) for name, part in value.items()}
    raise Unreadable(0, f"a {type(value).__name__} is no setting; give a text, a number, a boolean, None or a path")


# 2. to 5. From what was written to one setting for each key


def _settle(settings: Iterable[Setting], known: Mapping[str, FieldInfo], problems: list[Problem]) -> dict[str, Setting]:
    """Resolve the aliases of one layer; a part of a mapping stands under `key.part`."""
    settled: dict[str, Setting] = {}
    first_of_key: dict[str, Setting] = {}  # key -> the first setting of the whole or of a part
    num_unknown = 0
    for setting in settings:
        keys = names.targets(setting.name)
        if not all(key in known or names.is_foreign(key) for key in keys):
            text = unknown_key(setting.name, suggest=num_unknown < MAX_SUGGESTIONS)
            problems.append(Problem(setting.origin, text, shown(setting.name)))
            num_unknown += 1
            continue
        for key in keys:
            if setting.part is not None and not (key in known and isinstance(known[key].default, Mapping)):
                text = f"{key} is one value and has no parts; write {key}=VALUE"
                problems.append(Problem(setting.origin, text, setting.name))
                break
            name = key if setting.part is None else f"{key}.{setting.part}"
            # A whole contradicts any earlier part of it, a part only the whole and itself.
            earlier = first_of_key.get(key) if setting.part is None else settled.get(key) or settled.get(name)
            if earlier is not None:
                same = f"{key} is already set" if setting.name == earlier.name else ""
                text = f"{same or f'{setting.name} and {earlier.name} both set {key}'} (see {earlier.origin.label})"
                problems.append(Problem(setting.origin, f"{text}; keep one of them", setting.name))
                break
            settled[name] = setting
            first_of_key.setdefault(key, setting)
    return settled


def _lay_over(base: Mapping[str, Setting], top: Mapping[str, Setting]) -> dict[str, Setting]:
    """Lay one layer over another; `key.part` merges into the mapping below."""
    merged = dict(base)
    for name, setting in top.items():
        key = name.partition(".")[0]
        below = merged.get(key)
        if setting.part is None:
            merged[key] = setting
        elif below is None or isinstance(below.value, dict):
            whole = below.value if below is not None and isinstance(below.value, dict) else {}
            origins = {**(below.origins_of_parts if below else {}), setting.part: setting.origin}
            merged[key] = setting._replace(value={**whole, setting.part: setting.value}, origins_of_parts=origins)
        # else: the schema refuses the value below, which a part can't mend
    return merged


def _judge_foreign(name: str, setting: Setting, settings: Mapping[str, Setting], problems: list[Problem]) -> str | None:
    """Return the note on a key that only other trainers have, or add a problem; null asks for nothing."""
    if setting.value is None:
        return None
    row, value = names.foreign(name, setting.value), show_value(setting.value)
    are_set = {key for key, other in settings.items() if other.value is not None}
    if row is None:
        text = f"must be true or false, got {value}; it is a key of other trainers and has no effect here"
    elif row.verdict == "refused":
        text = f"{value}: {row.text}"
    elif row.goes_with is not None and (row.goes_with in are_set) != row.value:
        fix = "set" if row.value else "remove"
        text = f"{written(row.value)} contradicts {row.goes_with}, which alone decides; {fix} {row.goes_with}"
    else:
        return f"{name} {value}: {row.text}"
    problems.append(Problem(setting.origin, text, name))
    return None


# 6. Validate


def _validate(
    settings: Mapping[str, Setting], start: Origin, problems: list[Problem], *, is_whole: bool
) -> Config | None:
    """Judge the keys one by one and then the rules between them.

    Args:
        is_whole: False where the file can't be read: then only the overrides are there, and no rule can be judged.
    """
    values = {key: setting.value for key, setting in settings.items()}
    config, errors = _try_config(values if is_whole else _with_a_model(values))
    key_errors = [error for error in errors if error["loc"]]
    problems += _key_problems(key_errors, settings, start)
    if not is_whole:
        return None
    wrong = {str(error["loc"][0]) for error in key_errors}
    if wrong:  # pydantic judges no rule then: judge those between the other keys
        _, errors = _try_config(_with_a_model({key: value for key, value in values.items() if key not in wrong}))
    for error in errors:
        broken = error.get("ctx", {}).get("error")
        if isinstance(broken, BrokenRules):
            for keys, text in broken.broken:
                if not wrong.isdisjoint(keys):
                    continue
                # A broken rule stands at the first of its keys that is set, and names where the others are set.
                given = [key for key in keys if key in settings]
                origins = [f"{key} is set at {settings[key].origin.label}" for key in given[1:]]
                text = f"{text} ({', '.join(origins)})" if origins else text
                first = settings[given[0]] if given else None
                problems.append(Problem(first.origin if first else start, text, first.name if first else keys[0]))
    return config


def _try_config(values: Mapping[str, object]) -> tuple[Config | None, list[ErrorDetails]]:
    try:
        return Config.model_validate(values), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _with_a_model(values: dict[str, object]) -> dict[str, object]:
    """Return values with a model, so that a name that is missing or wrong hides no other problem."""
    has_towers = {"text_model_name", "image_model_name"} & values.keys()
    return values if has_towers else {"model_name": "builtin:none", **values}


def _key_problems(errors: Sequence[ErrorDetails], settings: Mapping[str, Setting], start: Origin) -> list[Problem]:
    """Explain pydantic's errors, one problem for each key, each entry of a mapping, and each key of a list's entry."""
    groups: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for error in errors:
        # A union reports an error for each of its members; all of one key belong to one problem.
        key, *inner = error["loc"]  # further parts name a member of a union, or where in the value it is
        where: tuple[int | str, ...]
        if len(inner) > 1 and isinstance(inner[0], int):
            where = (key, inner[0], inner[1])  # data[2].weight
        elif inner and isinstance(fields()[str(key)].default, Mapping):
            where = (key, inner[0])  # column_mapping.text
        else:
            where = (key,)
        groups.setdefault(where, []).append(error)
    problems = []
    for (key, *inner), group in groups.items():
        setting = settings.get(key)
        if setting is None:
            problems.append(Problem(start, explain(key, group, None), key))
        elif len(inner) == 2:
            number, name = inner
            value = setting.value[number].get(name)  # type: ignore[index]
            text = explain_entry(key, str(name), group, value)
            problems.append(Problem(setting.origin, text, shown(f"{setting.name}[{number}].{name}")))
        elif inner:
            (part,) = inner
            value = part if "[key]" in group[0]["loc"] else setting.value[part]  # type: ignore[index]
            origin = setting.origins_of_parts.get(str(part), setting.origin)
            problems.append(Problem(origin, explain(key, group, value), shown(f"{key}.{part}")))
        else:
            problems.append(Problem(setting.origin, explain(key, group, setting.value), setting.name))
    return problems
