"""Write the keyword arguments of `vembed.train` from the schema, so that editors complete and check them.

`python -m vembed.config.typed_keys > vembed/api/keys.py`
"""

import sys
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from vembed.config.schema import fields, key_names
from vembed.config.synonyms import ALIASES

_ARGUMENTS = ("data",)
"""Keys that `vembed.train` takes as arguments of its own."""

_NAMES_A_PATH = ("_path", "_dir", "_root", "_cache", "model_name", "resume")
"""How the keys end whose text may be given as a `pathlib.Path`."""

_HEAD = '''"""The keyword arguments of `vembed.train`: every key of the configuration with its type.

Written by `python -m vembed.config.typed_keys`; change the schema, not this file. docs/configuration.md says what the
keys mean.
"""
# fmt: off
# ruff: noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class TrainKeys(TypedDict, total=False):
    """Keys of the configuration, and other names of the same; those of losses of your own are taken as well."""

'''


def render_keys() -> str:
    """Return the text of vembed/api/keys.py."""
    own = {name: name for name in key_names() if name not in _ARGUMENTS}
    others = {alias: targets[0] for alias, targets in ALIASES.items()}
    return _HEAD + "".join(f"    {name}: {_of_key(key)}\n" for name, key in {**own, **others}.items())


def _of_key(key: str) -> str:
    kinds = _alternatives(fields()[key].annotation)
    if key == "loss_type":
        kinds.append("str")  # a loss of a plugin
    if "str" in kinds and key.endswith(_NAMES_A_PATH):
        kinds.insert(kinds.index("str") + 1, "Path")
    return " | ".join(kinds)


def _alternatives(kind: Any) -> list[str]:
    """Return what a value may be, as Python writes it."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _alternatives(parts[0])
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(each for part in parts for each in _alternatives(part)))
    if origin is Literal:
        words = ", ".join(f'"{each}"' for each in parts)
        return [f"Literal[{words}]"]
    inner = ", ".join(" | ".join(_alternatives(part)) for part in parts)
    if origin is list:
        return [f"Sequence[{inner}]"]
    if origin in (dict, Mapping):
        return [f"Mapping[{inner}]"]
    return ["None" if kind is type(None) else kind.__name__]


if __name__ == "__main__":
    sys.stdout.write(render_keys())
