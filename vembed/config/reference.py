"""Text generated from the schema: pages of the documents, and the typed keyword arguments of Python's functions.

`python -m vembed.config.reference docs` writes docs/configuration.md and pages of docs/reference/
`python -m vembed.config.reference keys > vembed/api/keys.py`
"""

import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from vembed.config.documents import write_mapping
from vembed.config.load import MAX_FILE_BYTES, MAX_TEXT_BYTES
from vembed.config.messages import expectation, key_schemas
from vembed.config.names import ALIASES, ANY_VALUE, FOREIGN, OTHER_KEYS, VALUES_ELSEWHERE
from vembed.config.record import on_resume
from vembed.config.schema import SECTIONS, fields, key_names, rules, section_keys
from vembed.models.keys import ModelKeys
from vembed.registry import LOSSES
from vembed.section import LARGEST_COUNT, facts_of
from vembed.text import one_of
from vembed.vectors.keys import IndexKeys

_WRITTEN = "<!-- Written by `make docs`; change the sections of keys, not this file. -->"

_INTRODUCTION = f"""# Configuration

{_WRITTEN}

One YAML or JSON file describes a run. Only `model_name` is required; every other key has a default.

```yaml
model_name: sentence-transformers/all-MiniLM-L6-v2
data_path: builtin:stdlib-code
learning_rate: 1e-4
```

| Command | Gives |
|---|---|
| `vembed init DATA` | a file for your data, with a comment on each key |
| `vembed train CONFIG --validate` | every problem of the file, its paths and its columns, with line and fix |
| `vembed train CONFIG --plan` | the value of each `auto`, and why |
| `vembed explain KEY` | what this reference says about a key |

`--config_override learning_rate=2e-5 epochs=3` on the command line wins over the file. The tables below have every key;
follow a key for its values, meaning and rules. [Details](#details) has the fine print.
"""

_DETAILS = f"""## Details

### Overrides

- The value is everything after the first `=`: `output_dir=a=b` sets `a=b`.
- `null`, `true`, numbers, `[a, b]`, `{{a: b}}` and quoted texts work as in the file. Anything else is a text:
  `"query_prompt=query: "`.
- `key=''` sets an empty text. `key=` is an error.
- `column_mapping.title=query` sets one entry of a mapping and keeps the others.
- To give a key twice, also by an alias, is an error.

### What a file may hold

A file (`.yaml`, `.yml` or `.json`) is UTF-8 with one mapping, at most {MAX_FILE_BYTES // 2**10} KiB. Its values take
at most {MAX_TEXT_BYTES // 2**10} KiB. Unknown and duplicate keys, YAML anchors, aliases and tags, several documents,
NUL characters, NaN and infinity are refused.

Types are strict: `"3"` and `true` are not integers. Integers go up to {LARGEST_COUNT:,} unless the key says otherwise.
Words follow YAML 1.2: `1e-5` is a number, `no` and `on` are texts, and booleans are `true` and `false`.

### Secrets

vembed replaces user names, passwords and tokens by `***` in messages, plans, reports and the `config.yaml` of the
output folder. A file that still has a `***` is refused; write the secret itself.

### Resuming

`config.yaml` in the output folder holds every key and keeps `auto`. When a run resumes, only keys that are *harmless*
may change. Any other change is *refused*, and the error shows both values.
"""

_OTHER_NAMES = f"""# Names of other trainers

{_WRITTEN}

What users of other trainers may write, and what vembed makes of it. `vembed explain NAME` answers for one name.
"""


def render_pages() -> dict[str, str]:
    """Return the pages of the reference: path below docs/ -> text."""
    pages = {"configuration.md": render_reference(), "reference/other_names.md": _render_other_names()}
    return pages | {page_of(title): _render_section(title) for title in SECTIONS}


def page_of(title: str) -> str:
    """Return the page of a section, below docs/."""
    return f"reference/keys-{title.lower()}.md"


def render_reference() -> str:
    """Return the text of docs/configuration.md: how a file is written, and every key in one line."""
    lines = [_INTRODUCTION]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", f"{(section.__doc__ or '').strip()} [In full]({page_of(title)})", ""]
        lines += ["| Key | Default | In short |", "|---|---|---|"]
        for name in section_keys(title):
            facts = key_facts(name)
            short = re.split(r"(?<=[.;])\s", facts["Meaning"], maxsplit=1)[0]
            if len(short) > 120:
                short = short.partition(": ")[0]
            lines.append(_row(f"[`{name}`]({page_of(title)}#{name})", facts["Default"], short.rstrip(";.") + "."))
        lines.append("")
    return "\n".join([*lines, "[Names of other trainers](reference/other_names.md) are answered too.", "", _DETAILS])


def _render_section(title: str) -> str:
    """Return the page of a section: each key with its values, meaning and rules."""
    doc = (SECTIONS[title].__doc__ or "").strip()
    lines = [f"# {title}", "", _WRITTEN, "", f"{doc} How a file is written: [Configuration](../configuration.md)."]
    for name in section_keys(title):
        facts = key_facts(name)
        meaning = _by_exception(facts.pop("Meaning"))
        given = {label: text for label, text in facts.items() if text}
        lines += ["", f"## `{name}`", "", meaning, ""]
        lines += [_row(*given), "|" + "---|" * len(given), _row(*given.values())]
        # The meaning already says with which losses a key acts.
        idle = f"`{name}` has an effect only with `loss_type: "
        sentences = [rule.sentence for rule in rules() if rule.keys[0] == name]
        if told := [f"- {sentence}" for sentence in sentences if not sentence.startswith(idle)]:
            lines += ["", *told]
    return "\n".join([*lines, ""])


def _by_exception(meaning: str) -> str:
    """Return a meaning with the losses that a key doesn't act with, where those that it does act with are most."""

    def shorter(match: re.Match[str]) -> str:
        others = [name for name in LOSSES.names() if name not in re.split(", | or ", match[1])]
        return match[0] if len(others) * 2 > len(LOSSES.names()) else f"Not with loss_type {one_of(others)}."

    return re.sub(r"Only with loss_type ([\w, ]+)\.", shorter, meaning)


def _render_other_names() -> str:
    """Return the page of aliases, other names, and values of other trainers."""
    lines = [_OTHER_NAMES, "## Aliases", "", "An alias sets a key. Both together are an error.", ""]
    lines += ["| Alias | Sets |", "|---|---|"]
    for alias, targets in ALIASES.items():
        lines.append(_row(f"`{alias}`", " and ".join(f"`{target}`" for target in targets)))

    lines += ["", "## Names that are refused", "", "The error says the name here.", ""]
    lines += ["| Here | Elsewhere |", "|---|---|"]
    elsewhere: dict[str, list[str]] = {}
    for name, key in OTHER_KEYS.items():
        elsewhere.setdefault(f"`{key}`", []).append(f"`{name}`")
    for key, values in VALUES_ELSEWHERE.items():
        for ours, names in values.items():
            elsewhere[f"`{key}: {ours}`"] = [f"`{name}`" for name in names.split()]
    lines += [_row(here, ", ".join(there)) for here, there in elsewhere.items()]

    lines += ["", "## Keys and values that are accepted or refused", ""]
    lines += ["The plan has a line for what is accepted. What is refused is an error with this text.", ""]
    lines += ["| Here | As other trainers have it |", "|---|---|"]
    outcomes: dict[str, list[str]] = {}
    for row in FOREIGN:
        outcome = f"the same as `{_yaml(row.ours)}`" if row.verdict == "same" else f"{row.verdict}: {row.text}"
        value = "" if row.value is ANY_VALUE else f": {_yaml(row.value)}"
        outcomes.setdefault(outcome, []).append(f"`{row.key}{value}`")
    lines += [_row(here, ", ".join(there)) for here, there in outcomes.items()]
    return "\n".join([*lines, ""])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
    if sys.argv[1:] == ["keys"]:
        sys.stdout.write(render_keys())
    else:
        for path, text in render_pages().items():
            (Path(sys.argv[1]) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(sys.argv[1]) / path).write_text(text, "utf-8")
