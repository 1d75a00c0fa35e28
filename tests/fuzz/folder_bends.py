"""A folder of files bent in one place: cut, emptied, deleted, a bit turned over, a value of its JSON replaced.

`ways` lists them in an order that follows from the seed, so that the first few of a folder touch all its files.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**31, 10**9, 10**30, 0.5, float("nan"), float("inf"), "", "x", "\0", "../..", [], ["x"],
    [[-1]], {}, {"x": 1},
)  # fmt: skip
"""What takes the place of a value of JSON."""

MOST_VALUES_OF_A_FILE = 60


@dataclass(frozen=True)
class Bend:
    """One change of a folder."""

    file: str  # its path in the folder
    kind: str
    change: Callable[[Path], object]  # of the file
    seen: bool = True  # whether a reader can tell: nothing says that a bit of a number or a letter of a word is wrong

    def __str__(self) -> str:
        return f"{self.file}: {self.kind}"

    def copy(self, whole: Path, folder: Path) -> Path:
        """Write a bent copy of a folder."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        self.change(folder / self.file)
        return folder


def ways(folder: Path, seed: int = 0) -> Iterator[Bend]:
    """Yield the ways in which a folder can be bent, those of its files in turn."""
    chance = random.Random(seed)
    by_file = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        bends = list(_ways_of_file(path, str(path.relative_to(folder)), chance))
        chance.shuffle(bends)
        by_file.append(bends)
    while by_file := [bends for bends in by_file if bends]:
        for bends in by_file:
            yield bends.pop()


def _ways_of_file(path: Path, file: str, chance: random.Random) -> Iterator[Bend]:
    content = path.read_bytes()

    def written(kind: str, data: bytes, *, seen: bool = True) -> Bend:
        return Bend(file, kind, lambda path: path.write_bytes(data), seen)

    yield Bend(file, "deleted", lambda path: path.unlink())
    yield Bend(file, "a folder", lambda path: (path.unlink(), path.mkdir()))
    yield written("empty", b"")
    yield written("zeros", bytes(len(content)))
    yield written("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    for length in sorted({1, len(content) // 3, len(content) // 2, len(content) - 1}):
        if 0 < length < len(content):
            yield written(f"cut to {length} of {len(content)} bytes", content[:length])
    for _ in range(6 if content else 0):
        at, bit = chance.randrange(len(content)), chance.randrange(8)
        data = bytearray(content)
        data[at] ^= 1 << bit
        yield written(f"bit {bit} of byte {at} turned over", bytes(data), seen=False)
    if path.suffix == ".jsonl":
        yield written("nested deeply", b"[" * 100_000 + b"\n")
        for old, new in ((b"0", b"9" * 15), (b"1", b"-1"), (b":", b": null, "), (b'"', b"")):
            yield written(f"{old!r} is {new!r}", content.replace(old, new))
    if path.suffix in (".json", ".metadata"):
        yield written("nested deeply", b"[" * 100_000)
        yield written("another kind", b"7")
        yield written("an endless number", b'{"x": ' + b"9" * 10_000 + b"}")
        yield from _other_values(file, json.loads(content), chance)
    elif path.suffix == ".safetensors":
        yield from _other_headers(file, content)


def _other_values(file: str, content: Any, chance: random.Random) -> Iterator[Bend]:
    """Replace or delete a value of JSON. A value of the same kind may be a setting that somebody wants."""
    places = list(_places(content))
    for keys in chance.sample(places, min(len(places), MOST_VALUES_OF_A_FILE)):
        old = content
        for key in keys:
            old = old[key]
        for value in chance.sample(VALUES, 3):
            numbers = isinstance(old, int | float) and isinstance(value, int | float) and math.isfinite(value)
            alike = value is None or numbers or isinstance(value, type(old))
            change = _setting(content, keys, value)
            yield Bend(file, f"{'.'.join(map(str, keys))} is {value!r:.40}", change, seen=not alike)
        yield Bend(file, f"{'.'.join(map(str, keys))} is gone", _setting(content, keys, _setting), seen=False)


def _places(content: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inside:
        yield (*keys, key)
        yield from _places(value, (*keys, key))


def _setting(content: Any, keys: tuple[Any, ...], value: Any) -> Callable[[Path], object]:
    """Return what writes JSON with another value at a place, or, for this function itself, with none."""

    def write(path: Path) -> None:
        bent = json.loads(json.dumps(content))
        inner = bent
        for key in keys[:-1]:
            inner = inner[key]
        if value is _setting:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        path.write_text(json.dumps(bent))

    return write


def _other_headers(file: str, content: bytes) -> Iterator[Bend]:
    """Bend the header of safetensors, its tensors left as they are."""
    length = int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8 : 8 + length]), content[8 + length :]

    def written(kind: str, header: Any, num_bytes: int | None = None) -> Bend:
        text = json.dumps(header).encode()
        data = (len(text) if num_bytes is None else num_bytes).to_bytes(8, "little") + text + tensors
        return Bend(file, kind, lambda path: path.write_bytes(data))

    for num_bytes in (0, 2**20, 2**40, 2**64 - 1):
        yield written(f"a header of {num_bytes} bytes", header, num_bytes)
    names = [name for name in header if name != "__metadata__"]
    yield written("without tensors", {})
    for name in (names[0], names[-1]):
        tensor = header[name]
        shape = tensor["shape"]
        yield written(f"{name} renamed", {("x" if key == name else key): value for key, value in header.items()})
        yield written(f"{name} gone", {key: value for key, value in header.items() if key != name})
        for key, value in (
            ("dtype", "I32"),
            ("dtype", "F64"),
            ("dtype", "x"),
            ("shape", shape[::-1] if len(set(shape)) > 1 else [*shape, 1]),
            ("shape", [2**40, *shape]),
            ("shape", [-1]),
            ("shape", []),
            ("data_offsets", [0, 2**50]),
            ("data_offsets", [8, 4]),
        ):
            yield written(f"{name}: {key} is {value!r}", {**header, name: {**tensor, key: value}})
