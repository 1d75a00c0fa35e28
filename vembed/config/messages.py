"""Sentences about keys and values: what a key expects, what was given, and the nearest thing that works."""

import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vembed.config.fields import LARGEST_COUNT, Section
from vembed.config.schema import Config, config_class, key_names
from vembed.config.synonyms import ALIASES, OTHER_KEYS, foreign, our_value, plain_name
from vembed.errors import ConfigError
from vembed.redact import redact_value, shown

AnySection = TypeVar("AnySection", bound=Section)

_NUMBER = re.compile(r"\s*[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*")
_BOOLEAN_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_BOUND_ERRORS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
_BOUND_NAMES = {">": "gt", ">=": "ge", "<": "lt", "<=": "le"}


def show_value(value: object) -> str:
    """Show a value as a configuration file would write it."""
    if isinstance(value, str):
        return shown(f"'{value}'")
    if isinstance(value, float):
        return repr(value)
    return shown(json.dumps(redact_value(value), ensure_ascii=False))


def key_schemas() -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON schema of every key, in the order of the sections."""
    return _key_schemas(config_class())


@functools.lru_cache(maxsize=1)
def _key_schemas(checked: type[Config]) -> Mapping[str, Mapping[str, Any]]:
    schema = checked.model_json_schema()
    properties: dict[str, dict[str, Any]] = _inlined(schema["properties"], schema.get("$defs", {}))
    return {name: properties[name] for name in key_names()}


def _inlined(schema: Any, parts: Mapping[str, Any]) -> Any:
    """Return a schema with what it refers to in place."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
        return {name: _inlined(value, parts) for name, value in schema.items()}
    return [_inlined(each, parts) for each in schema] if isinstance(schema, list) else schema


def expectation(schema: Mapping[str, Any]) -> str:
    """Say which values a key takes."""
    return _either(_alternatives(schema))


def unknown_key(name: str, *, suggest: bool = True) -> str:
    """Say that a key is unknown, with the nearest key or alias.

    Args:
        suggest: Whether to look for it, which takes most of a millisecond.
    """
    if not suggest:
        return "unknown key"
    word = plain_name(name)
    if word in OTHER_KEYS:
        return f"unknown key; vembed calls it {OTHER_KEYS[word]}"
    nearest = nearest_key(word)
    return (
        "unknown key; docs/configuration.md lists every key"
        if nearest is None
        else f"unknown key; did you mean {nearest}?"
    )


def nearest_key(name: str) -> str | None:
    """Return the key or alias whose name, here or in other trainers, is the nearest."""
    ours = {each: each for each in (*ALIASES, *key_schemas())}  # a plugin's key may bear another trainer's name
    meant = {**OTHER_KEYS, **ours}
    nearest = difflib.get_close_matches(plain_name(name), meant, n=1)
    return meant[nearest[0]] if nearest else None


def explain(name: str, errors: Sequence[ErrorDetails], value: object) -> str:
    """Turn pydantic's errors about one value into a sentence."""
    row = foreign(name, value)
    if row is not None and row.verdict == "refused":
        return f"{show_value(value)}: {row.text}"
    return _explain(name, key_schemas()[name], errors, value)


def explain_entry(name: str, part: str, errors: Sequence[ErrorDetails], value: object) -> str:
    """Turn pydantic's errors about a key of an entry of a list into a sentence."""
    known = next(each["items"] for each in _members(key_schemas()[name]) if "items" in each)["properties"]
    if part not in known:
        return f"unknown key; an entry of {name} has {', '.join(known)}"
    return _explain(part, known[part], errors, value)


def _explain(name: str, schema: Mapping[str, Any], errors: Sequence[ErrorDetails], value: object) -> str:
    errors = [error for error in errors if error["type"] != "list_type"] or errors  # a text is told as a text
    kinds = {error["type"] for error in errors}
    if "missing" in kinds:
        return f"a required key is missing; set it, such as {name}: NAME ({schema['description']})"
    if len(errors[0]["loc"]) > 1 and "additionalProperties" in schema:
        if "[key]" in errors[0]["loc"]:
            return f"a column name must be a text that is not blank, got {show_value(value)}"
        schema = schema["additionalProperties"]
    if len(errors) == 1 and kinds <= {*_BOUND_ERRORS, "value_error", "finite_number"}:
        return f"{_single(errors[0])}, got {show_value(value)}"
    ours = our_value(name, value) if isinstance(value, str) else None
    fix = _fix(schema, value) if ours is None else f"; vembed calls it {ours}"
    return f"must be {expectation(schema)}, got {show_value(value)}{fix}"


def checked_section(section: type[AnySection], values: Mapping[str, Any]) -> AnySection:
    """Make a section of keys from a caller's values; None leaves a key at its default.

    Raises:
        ConfigError: A value isn't one that its key takes.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return section(**given)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        wrong = [each for each in error.errors() if each["loc"][0] == name]
        raise ConfigError(f"{name}: {explain(name, wrong, given.get(name))}") from error


def _single(error: ErrorDetails) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "finite_number":
        return "must be a finite number"
    sign = _BOUND_ERRORS[error["type"]]
    return f"must be {sign} {error['ctx'][_BOUND_NAMES[sign]]:.10g}"


def _fix(schema: Mapping[str, Any], value: object) -> str:
    kinds = _kinds(schema)
    if isinstance(value, str):
        if kinds & {"integer", "number"} and _NUMBER.fullmatch(value):
            return "; remove the quotes"
        if "boolean" in kinds and value.lower() in _BOOLEAN_WORDS:
            return f"; write {_BOOLEAN_WORDS[value.lower()]}"
        nearest = difflib.get_close_matches(value.lower(), _choices(schema), n=1)
        return f"; did you mean {nearest[0]}?" if nearest else ""
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return f"; write {int(value)}"
    if "text" in kinds and isinstance(value, int | float):
        return "; put it in quotes"
    return ""


def _members(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    members: Sequence[Mapping[str, Any]] = schema.get("anyOf", (schema,))
    return members


def _choices(schema: Mapping[str, Any]) -> list[str]:
    found: list[str] = list(schema.get("choices", ()))
    for member in _members(schema):
        found += member.get("enum", ()) or ([member["const"]] if "const" in member else ())
    return found


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    closed = ("enum", "const", "choices")
    return {
        "text"
        if member.get("type") == "string" and not any(each in member for each in closed)
        else str(member.get("type"))
        for member in _members(schema)
    }


def _alternatives(schema: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for member in _members(schema):
        kind = member.get("type")
        if "const" in member or "enum" in member:
            found += _choices(member)
        elif "form" in member:
            found.append(member["form"])
        elif kind == "boolean":
            found += ["true", "false"]
        elif kind in ("integer", "number"):
            found.append(_number(member, "an integer" if kind == "integer" else "a number"))
        elif kind == "array":
            found.append(f"a list [{expectation(member['items'])}, ...]")
        elif "properties" in member:
            found.append(f"{{{', '.join(f'{name}: ...' for name in member['properties'])}}}")
        elif kind == "object":
            found.append(f"a mapping of column names to {expectation(member['additionalProperties'])}")
        else:
            found.append({"string": "a text", "null": "null"}[str(kind)])
    return found


def _number(member: Mapping[str, Any], noun: str) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {member[name]:.10g}"
        for name, sign in signs.items()
        if name in member and member[name] != LARGEST_COUNT
    ]
    return " ".join([noun, " and ".join(bounds)]).strip()


def _either(words: Sequence[str]) -> str:
    return " or ".join(each for each in (", ".join(words[:-1]), words[-1]) if each)
