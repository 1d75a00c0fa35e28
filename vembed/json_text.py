"""JSON that a run continues from, read with suspicion: bounded in size and depth, finite, and of a given shape."""

from __future__ import annotations

import json
import math
import stat
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import TypeAdapter

Kind = TypeVar("Kind")

MOST_BYTES: Final = 64 * 2**20
"""Of a file: the optimizer's names of a hundred thousand tensors."""

MOST_DEPTH: Final = 32


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        OSError: It can't be read.
        ValueError: It is no such file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is no regular file")
    # Before it is read: a file that isn't ours must not fill the memory.
    if status.st_size > MOST_BYTES:
        raise ValueError(f"{path.name} has {status.st_size} bytes, and {MOST_BYTES} are the most")
    try:
        found = parse_json(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds a {type(found).__name__} instead of an object")
    return found


def parse_json(text: str) -> object:
    """Return what a JSON text holds.

    Raises:
        ValueError: It isn't JSON, nests too deeply, or holds a number that isn't finite.
    """
    try:
        # `parse_constant` gets NaN and Infinity; `parse_float` gets numbers such as 1e999, which overflow to infinity.
        found = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nests too deeply") from None
    # Level by level: a walk by recursion would itself fail on a file that nests too deeply.
    level: list[object] = [found]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return found
    raise ValueError(f"nests more than {MOST_DEPTH} deep")


def fit(kind: type[Kind], value: object, *, where: str) -> Kind:
    """Return a JSON value as the type that it is meant for: a dataclass of an object, a tuple of a list.

    Raises:
        ValueError: It hasn't that shape; nothing is converted.
    """
    from pydantic import ValidationError

    try:
        # As JSON text: there pydantic's strict mode takes a list for a tuple, which it refuses of Python objects.
        return cast("Kind", _adapter(cast("Any", kind)).validate_json(json.dumps(value), strict=True))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = "".join(f"[{part!r}]" for part in first["loc"])
        raise ValueError(f"{where}{place}: {first['msg']}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # here, as an optimizer that nobody restores needs no pydantic

    return TypeAdapter(kind)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:30]} isn't finite")
    return number
