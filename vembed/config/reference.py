"""Text generated from the schema: docs/configuration.md, and the typed keyword arguments of Python's functions.

`python -m vembed.config.reference > docs/configuration.md`
`python -m vembed.config.reference keys > vembed/api/keys.py`
"""

import sys
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vembed.config.documents import write_mapping
from vembed.config.load import MAX_FILE_BYTES, MAX_TEXT_BYTES
from vembed.config.messages import expectation, key_schemas
from vembed.config.names import ALIASES, ANY_VALUE, FOREIGN, OTHER_KEYS, VALUES_ELSEWHERE
from vembed.config.record import on_resume
from vembed.config.schema import SECTIONS, fields, key_names, rules, section_keys
from vembed.models.keys import ModelKeys
from vembed.section import LARGEST_COUNT, facts_of
from vembed.vectors.keys import IndexKeys

_INTRODUCTION = f"""# Configuration

<!-- Written by `python -m vembed.config.reference`; change the schema, not this file. -->

A run is described by one YAML file (`.yaml`, `.yml`) or JSON file (`.json`): flat keys, each with one default. Only
`model_name` is required.

```yaml
model_name: sentence-transformers/all-MiniLM-L6-v2
data_path: builtin:stdlib-code
learning_rate: 1e-4
```

`vembed train CONFIG --validate` checks a file, its paths, the columns of its data, and whether the model reads the
pictures among them, without training. Every problem of the file is listed at once, with its line and its fix.
`vembed explain KEY` prints what stands here of a key.

## Precedence

An override wins over the file, the file over the default, and `auto` is decided by the plan, which says why. The
`config.yaml` in the output folder holds every key and keeps `auto`.

## Overrides

`--config_override key=value [key=value ...]`

- The value is everything after the first `=`: `output_dir=a=b` sets `a=b`.
- `null`, `true`, `false` and numbers are read as in the file; `[a, b]`, `{{a: b}}` and quoted texts as in YAML.
  Anything else is a text, taken as it stands: `"query_prompt=query: "`.
- `key=''` sets an empty text and `key=null` sets null; `key=` is an error.
- `column_mapping.title=query` sets one entry of a mapping and keeps the others.
- The same key twice, also by an alias, is an error.

## What a file may hold

UTF-8, at most {MAX_FILE_BYTES // 2**10} KiB with {MAX_TEXT_BYTES // 2**10} KiB of values, one mapping. Refused:
unknown and duplicate keys, YAML anchors, aliases and tags, several documents, NUL characters, NaN and infinity. Types
are strict: `"3"` and `true` are no integers; an integer is fine for a number. Integers go up to {LARGEST_COUNT:,}
unless the table says otherwise. Words are read as in YAML 1.2: `1e-5` is a number, `no` and `on` are texts, booleans
are `true` and `false`.

User names, passwords and tokens, in URLs and in any other text, are replaced by `***` in messages, in the plan, in
reports and in the `config.yaml` of the output folder. A file with such a `***` is refused until the secret is back.

## Resuming

The last column says what a changed value means when a run is resumed: *harmless* keys may change, as they touch neither
the weights nor the order of the samples; a change of any other key is *refused*, and the error shows the difference.
"""


def render_reference() -> str:
    """Return the text of docs/configuration.md."""
    lines = [_INTRODUCTION]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", (section.__doc__ or "").strip(), ""]
        lines += ["| Key | Values | Default | Unit | Meaning | Aliases | On resume |", "|---|---|---|---|---|---|---|"]
        for name in section_keys(title):
            cells = [f"`{name}`", *key_facts(name).values()]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")

    lines += ["## Aliases", "", "An alias beside a key that it sets is an error.", "", "| Alias | Sets |", "|---|---|"]
    for alias, targets in ALIASES.items():
        lines.append(f"| `{alias}` | {' and '.join(f'`{target}`' for target in targets)} |")

    lines += ["", "## Names that other trainers have", ""]
    lines += ["They are errors that say the name here. Values are written as `key: value`.", ""]
    lines += ["| Here | Elsewhere |", "|---|---|"]
    elsewhere: dict[str, list[str]] = {}
    for name, key in OTHER_KEYS.items():
        elsewhere.setdefault(f"`{key}`", []).append(f"`{name}`")
    for key, values in VALUES_ELSEWHERE.items():
        for ours, names in values.items():
            elsewhere[f"`{key}: {ours}`"] = [f"`{name}`" for name in names.split()]
    lines += [f"| {here} | {', '.join(there)} |" for here, there in elsewhere.items()]

    lines += ["", "## Keys and values of other trainers", ""]
    lines += ["What is accepted is a line of the plan; what is refused is an error, with this text.", ""]
    lines += ["| Here | As other trainers have it |", "|---|---|"]
    outcomes: dict[str, list[str]] = {}
    for row in FOREIGN:
        outcome = f"the same as `{_yaml(row.ours)}`" if row.verdict == "same" else f"{row.verdict}: {row.text}"
        value = "" if row.value is ANY_VALUE else f": {_yaml(row.value)}"
        outcomes.setdefault(outcome, []).append(f"`{row.key}{value}`")
    lines += [f"| {here} | {', '.join(there)} |" for here, there in outcomes.items()]

    order = key_names()
    listed = sorted(rules(), key=lambda rule: order.index(rule.keys[0]))
    lines += ["", "## Rules between keys", "", *(f"- {rule.sentence}" for rule in listed), ""]
    return "\n".join(lines)


def key_facts(name: str) -> dict[str, str]:
    """Return what the reference says of a key: the column of its table -> the cell, in Markdown."""
    schema = key_schemas()[name]
    return {
        "Values": expectation(schema),
        "Default": f"`{_yaml(schema['default'])}`" if "default" in schema else "required",
        "Unit": schema.get("unit", ""),
        "Meaning": schema["description"],
        "Aliases": ", ".join(f"`{alias}`" for alias, targets in ALIASES.items() if name in targets),
        "On resume": on_resume(name),
    }


def example(name: str) -> Any:
    """Return a value that a key takes: not its default where its type names another one."""
    schema = key_schemas()[name]
    default, members = schema.get("default"), schema.get("anyOf", (schema,))
    named = [choice for member in members for choice in (*member.get("enum", ()), *member.get("choices", ()))]
    if others := [choice for choice in (*schema.get("choices", ()), *named) if choice not in (default, "auto")]:
        return others[0]
    if isinstance(default, bool):
        return not default
    if default not in (None, "auto", [], {}):
        return default
    typed = (member for member in members if member.get("type") not in (None, "null") and "const" not in member)
    return _of_type(next(typed))


def _of_type(member: Mapping[str, Any]) -> Any:
    """Return a value of a JSON schema, of its first alternative."""
    member = member.get("anyOf", (member,))[0]
    if "enum" in member:
        return member["enum"][0]
    if member["type"] == "array":
        first = _of_type(member["items"])
        # Numbers that differ: a list of seeds, which has two or more, holds none twice.
        return [first + step if isinstance(first, int) else first for step in range(max(1, member.get("minItems", 1)))]
    if member["type"] == "object":
        inner = member.get("properties", {"NAME": member.get("additionalProperties")})
        return {part: _of_type(inner[part]) for part in member.get("required", inner)}
    if member["type"] == "number":
        return member.get("maximum", member.get("exclusiveMaximum", 2.0)) / 2
    return {"boolean": True, "integer": member.get("minimum", 1), "string": "NAME"}[member["type"]]


def _yaml(value: object) -> str:
    return write_mapping({"value": value}).removeprefix("value: ").strip()


# vembed/api/keys.py

_ARGUMENTS = ("data",)
"""Keys that `vembed.train` takes as arguments of its own."""

_NAMES_A_PATH = ("_path", "_dir", "_root", "_cache", "model_name", "resume")
"""Ends of the keys whose text may be given as a `pathlib.Path`."""

_HEAD = '''"""Keyword arguments of `vembed.train`, `vembed.load` and `vembed.build_index`, made from the sections.

Written by `python -m vembed.config.reference keys`; change the sections, not this file. docs/configuration.md says what
the keys mean.
"""
# fmt: off
# ruff: noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
'''

_LOAD_ONLY = {"device": "str | None", "bf16": "bool"}
"""Arguments of `vembed.load` that are no keys of a model; of `device`, the default is the one that training takes."""


def render_keys() -> str:
    """Return the text of vembed/api/keys.py."""
    keys = {name: name for name in key_names() if name not in _ARGUMENTS}
    aliases = {alias: targets[0] for alias, targets in ALIASES.items()}
    train = {name: _of_key(key, fields()[key]) for name, key in {**keys, **aliases}.items()}
    taken = [name for name, info in ModelKeys.model_fields.items() if "load" in facts_of(info)]
    load = {name: _of_key(name, fields()[name]) for name in (*taken, "max_image_pixels")}
    for name, kinds in load.items():
        if kinds != "bool" and not kinds.endswith("None"):  # None leaves a key at its default
            load[name] = f"{kinds} | None"
    index = {name: _of_key(name, info) for name, info in IndexKeys.model_fields.items()}
    return _HEAD + "".join(
        (
            _typed(
                "TrainKeys",
                "Keys of the configuration, and other names of the same; those of your own losses are taken too.",
                train,
            ),
            _typed(
                "LoadKeys", "Options of a model that is loaded; None leaves it to the model's files.", load | _LOAD_ONLY
            ),
            _typed("BuildIndexKeys", "Options of `vembed encode`, whose help says what they mean.", index),
        )
    )


def _typed(name: str, meaning: str, types: Mapping[str, str]) -> str:
    lines = [f"class {name}(TypedDict, total=False):", f'    """{meaning}"""', ""]
    return "\n".join(["", "", *lines, *(f"    {key}: {kind}" for key, kind in types.items()), ""])


def _of_key(key: str, info: FieldInfo) -> str:
    kinds = _alternatives(info.annotation)
    if key == "loss_type":
        kinds.append("str")  # a loss of a plugin
    if "str" in kinds and key.endswith(_NAMES_A_PATH):
        kinds.insert(kinds.index("str") + 1, "Path")
    if "Path" in kinds and "str" not in kinds:
        kinds.insert(kinds.index("Path"), "str")
    return " | ".join(kinds)


def _alternatives(kind: Any) -> list[str]:
    """Return the types of an annotation, as Python writes them."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _alternatives(parts[0])
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(kind for part in parts for kind in _alternatives(part)))
    if origin is Literal:
        words = ", ".join(f'"{text}"' for text in parts)
        return [f"Literal[{words}]"]
    inner = ", ".join(" | ".join(_alternatives(part)) for part in parts)
    if origin is list:
        return [f"Sequence[{inner}]"]
    if origin in (dict, Mapping):
        return [f"Mapping[{inner}]"]
    return ["None" if kind is type(None) else kind.__name__]


if __name__ == "__main__":
    sys.stdout.write(render_keys() if sys.argv[1:] == ["keys"] else render_reference())
