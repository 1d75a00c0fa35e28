"""From a file and overrides to one checked `Config`, or to every problem at once with the place it stands.

1. The file and the overrides are read, each by itself, and the plugins that they name are imported.
2. Unknown keys and an alias beside its key are told; overrides are laid over the file.
3. Keys that only other trainers have become a note or a problem.
4. The schema judges the result; the rules between keys are judged even where other keys are wrong.
"""

import difflib
import json
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vembed.config.fields import BrokenRules, word
from vembed.config.messages import explain, explain_entry, show_value, unknown_key
from vembed.config.plugins import import_plugins
from vembed.config.schema import Config, fields
from vembed.config.settings import parse_overrides, read_values
from vembed.config.sources import Entry, Layer, Place, Problem, Refused, raise_problems
from vembed.config.synonyms import Foreign, foreign, is_foreign, targets
from vembed.config.text import MAX_NODES, Pairs, read_mapping, resolve
from vembed.errors import ConfigError
from vembed.redact import MASK, lacks_secret, printable, shown

MAX_FILE_BYTES = 2**18
"""Bounds the time that parsing takes: most of a second."""

MAX_TEXT_BYTES = 2**16
"""Of all values together, so that a configuration can be written as a file that is read again."""

MAX_SUGGESTIONS = 20
"""Unknown keys that get the nearest one; a file with more of them is no configuration."""

_SUFFIXES = (".yaml", ".yml", ".json")
_PLACEHOLDER_MODEL = "builtin:none"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration and where each value comes from."""

    config: Config
    sources: Mapping[str, str]  # key -> `configs/a.yaml:3` or "override"; a key that isn't there has its default
    path: Path | None  # the file, if there is one
    notes: tuple[str, ...] = ()  # what keys of other trainers come to here, one line for each that was given


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a configuration file and lay overrides over it.

    Args:
        path: A `.yaml`, `.yml` or `.json` file of at most 256 KiB; None when overrides say everything.
        overrides: `key=value` texts; they win over the file.

    Raises:
        ConfigError: One line for each problem of the file, of the overrides and of their combination.
    """
    return _check(Layer([], []) if path is None else _read_file(path), parse_overrides(overrides), path)


def load_values(base: Path | Mapping[str, object], overrides: Mapping[str, object]) -> LoadedConfig:
    """Check a configuration that Python code gives, by the rules and with the messages of the command line.

    Args:
        base: A file as for `load_config`, or key -> value.

    Raises:
        ConfigError: One line for each problem.
    """
    top = read_values(overrides, layer=1)
    if isinstance(base, Path):
        return _check(_read_file(base), top, base)
    return _check(read_values(base, layer=0), top, None)


def file_values(path: Path) -> dict[str, object]:
    """Return what a configuration file sets, unchecked.

    Raises:
        ConfigError: The file can't be read.
    """
    layer = _read_file(path)
    raise_problems(layer.problems)
    return {entry.name: entry.value for entry in layer.entries or ()}


def _check(lower: Layer, upper: Layer, path: Path | None) -> LoadedConfig:
    """Lay one layer over the other and judge the result."""
    _import_plugins(lower, upper)
    base, base_problems = _settle(lower.entries or [])
    top, top_problems = _settle(upper.entries or [])
    settings = _lay_over(base, top)
    start = Place(0, 0, "configuration" if path is None else printable(str(path)))
    raise_problems(_unwritable(settings, start))
    notes, foreign_problems = _judge_foreign(settings)
    settings = {name: setting for name, setting in settings.items() if not _is_only_foreign(name)}
    config, schema_problems = _validate(settings, start, complete=lower.entries is not None)
    problems = [*lower.problems, *upper.problems, *base_problems, *top_problems]
    problems += [*foreign_problems, *schema_problems]
    raise_problems([*problems, *_masked(settings)])
    assert config is not None  # a Config is missing only beside a problem
    return LoadedConfig(config, {key: setting.place.source for key, setting in settings.items()}, path, notes)


def _is_only_foreign(name: str) -> bool:
    return name not in fields() and is_foreign(name)


def _judge_foreign(settings: Mapping[str, Entry]) -> tuple[tuple[str, ...], list[Problem]]:
    """Return a note or a problem for each key that only other trainers have; null asks for nothing."""
    notes, problems = [], []
    for name, setting in settings.items():
        if not _is_only_foreign(name) or setting.value is None:
            continue
        row, value = foreign(name, setting.value), show_value(setting.value)
        if row is None:
            text = f"must be true or false, got {value}; it is a key of other trainers, and decides nothing here"
        elif row.verdict == "refused":
            text = f"{value}: {row.text}"
        elif contradiction := _lacks_company(row, settings):
            text = contradiction
        else:
            notes.append(f"{name} {value}: {row.text}")
            continue
        problems.append(Problem(setting.place, text, name))
    return tuple(notes), problems


def _lacks_company(row: Foreign, settings: Mapping[str, Entry]) -> str | None:
    """Say what contradicts a key that only repeats whether another one is set."""
    other = row.goes_with
    if other is None or (other in settings and settings[other].value is not None) == row.value:
        return None
    fix = "set" if row.value else "remove"
    return f"{word(row.value)} contradicts {other}, which alone decides; {fix} {other}"


def _import_plugins(lower: Layer, upper: Layer) -> None:
    named = [entry for layer in (lower, upper) for entry in layer.entries or () if entry.name == "plugins"]
    if named:
        try:
            import_plugins(named[-1].value)
        except ConfigError as error:
            raise_problems([Problem(named[-1].place, str(error).removeprefix("plugins: "), "plugins")])


def _read_file(path: Path) -> Layer:
    label = printable(str(path))
    refused: list[Refused] = []
    try:
        if path.is_dir():
            raise Refused(0, f"a folder; name a configuration, a file that ends in {', '.join(_SUFFIXES)}")
        if path.suffix.lower() not in _SUFFIXES:
            way = f"rename the file to match what it holds; of data, vembed init {label} writes one"
            raise Refused(0, f"a configuration ends in {', '.join(_SUFFIXES)}; {way}")
        pairs = read_mapping(_read_text(path), is_json=path.suffix.lower() == ".json")
        values = resolve(pairs, refused)
    except Refused as error:
        return Layer(None, [Problem(_line_place(label, error.line), error.text)])
    assert isinstance(values, dict)
    first = {name: (line, value) for name, line, value in reversed(pairs) if name is not None}
    entries = [
        Entry(name, value, _line_place(label, first[name][0]), part_places=_part_places(label, first[name][1]))
        for name, value in values.items()
    ]
    return Layer(entries, [Problem(_line_place(label, each.line), each.text) for each in refused])


def _part_places(label: str, value: object) -> dict[str, Place]:
    """Return where each key of a mapping stands."""
    pairs = reversed(value) if isinstance(value, Pairs) else ()
    return {name: _line_place(label, line) for name, line, _ in pairs if name is not None}


def _line_place(label: str, line: int) -> Place:
    return Place(0, line, f"{label}:{line}" if line else label)


def _read_text(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Refused(0, "not a regular file; name a configuration file")
        if status.st_size > MAX_FILE_BYTES:
            raise Refused(0, f"{status.st_size:,} bytes; a configuration has at most {MAX_FILE_BYTES:,} (256 KiB)")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)  # it may have grown
    except FileNotFoundError as error:
        raise Refused(0, f"no such file{_nearest_file(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise Refused(0, f"can't be read: {getattr(error, 'strerror', None) or error}") from error
    if b"\0" in content:
        raise Refused(content.count(b"\n", 0, content.index(b"\0")) + 1, "there is a NUL byte; this is no text file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Refused(line, "not valid UTF-8; save the file as UTF-8") from error


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return "; its folder does not exist either"
    try:
        names = [each.name for each in path.parent.iterdir() if each.suffix.lower() in _SUFFIXES]
    except OSError as error:
        return f"; its folder can't be listed: {error.strerror}"
    nearest = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {printable(str(path.with_name(nearest[0])))}?" if nearest else ""


def _is_mapping(key: str) -> bool:
    return key in fields() and isinstance(fields()[key].default, Mapping)


def _settle(entries: Iterable[Entry]) -> tuple[dict[str, Entry], list[Problem]]:
    """Resolve the aliases of one layer; parts stand under `key.part`."""
    settled: dict[str, Entry] = {}
    problems = []
    num_unknown = 0
    for entry in entries:
        names = targets(entry.name)
        unknown = [target for target in names if target not in fields() and not is_foreign(target)]
        if unknown:
            text = unknown_key(entry.name, suggest=num_unknown < MAX_SUGGESTIONS)
            problems.append(Problem(entry.place, text, shown(entry.name)))
            num_unknown += 1
            continue
        for target in names:
            if entry.part is not None and not _is_mapping(target):
                text = f"{target} is one value and has no parts; write {target}=VALUE"
                problems.append(Problem(entry.place, text, entry.name))
                break
            name = target if entry.part is None else f"{target}.{entry.part}"
            clash = _clash(settled, target, name)
            if clash is not None:
                problems.append(Problem(entry.place, _told_twice(entry, clash, target), entry.name))
                break
            settled[name] = entry
    return settled, problems


def _clash(settled: Mapping[str, Entry], target: str, name: str) -> Entry | None:
    """Find an earlier entry that sets the same key, the whole of this part, or a part of this whole."""
    for other, entry in settled.items():
        if other in (name, target) or (name == target and other.startswith(f"{target}.")):
            return entry
    return None


def _told_twice(entry: Entry, earlier: Entry, target: str) -> str:
    if entry.name != earlier.name:
        return f"{entry.name} and {earlier.name} both set {target} (see {earlier.place.label}); keep one of them"
    return f"{target} is already set (see {earlier.place.label}); keep one of them"


def _lay_over(base: Mapping[str, Entry], top: Mapping[str, Entry]) -> dict[str, Entry]:
    """Lay one layer over another; `key.part` merges into a mapping."""
    settings = dict(base)
    for name, entry in top.items():
        key = name.partition(".")[0]
        if entry.part is None:
            settings[key] = entry
            continue
        under = settings.get(key)
        whole = {} if under is None else under.value
        if not isinstance(whole, dict):
            continue  # the schema refuses what the file says; a part can't mend it
        part_places = {**(under.part_places if under else {}), entry.part: entry.place}
        settings[key] = entry._replace(value={**whole, entry.part: entry.value}, part_places=part_places)
    return settings


def _unwritable(settings: Mapping[str, Entry], start: Place) -> list[Problem]:
    """Return why the settings would make a file that is refused: it holds every key, each with its name."""
    values = [setting.value for setting in settings.values()]
    texts = sum(len(json.dumps(value)) for value in values)
    room = MAX_NODES - 2 * len(fields()) - 1
    if texts > MAX_TEXT_BYTES:
        return [Problem(start, f"the values take {texts:,} bytes; a configuration has at most {MAX_TEXT_BYTES:,}")]
    if sum(map(_count_parts, values)) > room:
        return [Problem(start, f"there are more than {room:,} values in lists and mappings; this is no configuration")]
    return []


def _count_parts(value: object) -> int:
    if isinstance(value, dict):
        return sum(2 + _count_parts(part) for part in value.values())
    return sum(1 + _count_parts(part) for part in value) if isinstance(value, list) else 0


def _masked(settings: Mapping[str, Entry]) -> list[Problem]:
    """Refuse to take the mask of a secret, from a file that a run wrote, for the value."""
    return [
        Problem(
            setting.place, f"{MASK} stands where a secret was left out; write the secret itself, or override {key}", key
        )
        for key, setting in settings.items()
        if lacks_secret(setting.value)
    ]


def _validate(settings: Mapping[str, Entry], start: Place, *, complete: bool) -> tuple[Config | None, list[Problem]]:
    """Judge the values; an incomplete set (its file could not be read) only key by key."""
    values = {key: setting.value for key, setting in settings.items()}
    if not complete:
        values = _named(values)
    config, errors = _try_config(values)
    field_errors = [error for error in errors if error["loc"]]
    problems = _field_problems(field_errors, settings, start)
    if not complete:
        return None, problems
    wrong = {str(error["loc"][0]) for error in field_errors}
    if wrong:  # judge the rules between the other keys
        sound = {key: value for key, value in values.items() if key not in wrong}
        _, errors = _try_config(_named(sound))
    return config, problems + _rule_problems(errors, settings, wrong, start)


def _named(values: dict[str, object]) -> dict[str, object]:
    """Return values with a model, so that a name that is missing or wrong hides no other problem."""
    given = {"text_model_name", "image_model_name"} & values.keys()
    return values if given else {"model_name": _PLACEHOLDER_MODEL, **values}


def _try_config(values: Mapping[str, object]) -> tuple[Config | None, list[ErrorDetails]]:
    try:
        return Config.model_validate(values), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _field_problems(errors: Sequence[ErrorDetails], settings: Mapping[str, Entry], start: Place) -> list[Problem]:
    grouped: dict[tuple[str, Any], list[ErrorDetails]] = {}
    for error in errors:
        key = str(error["loc"][0])
        part: Any = error["loc"][1] if len(error["loc"]) > 1 and _is_mapping(key) else None
        if len(error["loc"]) > 2 and isinstance(error["loc"][1], int):  # a key of an entry of a list
            part = error["loc"][1:3]
        grouped.setdefault((key, part), []).append(error)
    problems = []
    for (key, part), group in grouped.items():
        setting = settings.get(key)
        if setting is None:
            problems.append(Problem(start, explain(key, group, None), key))
            continue
        value: object = setting.value
        place = setting.place
        subject = setting.name
        if isinstance(part, tuple):
            (number, name), entries = part, value
            value = entries[number].get(name)  # type: ignore[index]
            text = explain_entry(key, str(name), group, value)
            problems.append(Problem(place, text, shown(f"{subject}[{number}].{name}")))
            continue
        if part is not None:
            value = part if "[key]" in group[0]["loc"] else setting.value[part]  # type: ignore[index]
            place = setting.part_places.get(str(part), place)
            subject = shown(f"{key}.{part}")
        problems.append(Problem(place, explain(key, group, value), subject))
    return problems


def _rule_problems(
    errors: Sequence[ErrorDetails], settings: Mapping[str, Entry], wrong: set[str], start: Place
) -> list[Problem]:
    problems = []
    for error in errors:
        broken = error.get("ctx", {}).get("error")
        if not isinstance(broken, BrokenRules):
            continue
        for keys, sentence in broken.broken:
            given = [key for key in keys if key in settings]
            if not wrong.isdisjoint(keys):
                continue
            others = [f"{key} is set at {settings[key].place.label}" for key in given[1:]]
            text = f"{sentence} ({', '.join(others)})" if others else sentence
            place, name = (settings[given[0]].place, settings[given[0]].name) if given else (start, keys[0])
            problems.append(Problem(place, text, name))
    return problems
