"""What a card may say of where things lie: hub ids and last parts of paths, never a whole path or a user's name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind: TypeAlias = Literal["hub", "built-in", "open_clip", "local", "pair"]

HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:[\w.-]+)?", re.ASCII)
MOST_CHARACTERS = 200  # no hub id is longer

# What a file of rows ends in: a relative path of two parts is no hub id then.
FILE_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".tsv", ".parquet", ".tar", ".txt", ".gz", ".zst"})

_PREFIX = re.compile(r"(?P<prefix>[a-z][a-z0-9_]+):(?!//)(?P<rest>.+)", re.DOTALL)
_PATH = re.compile(r"(?<![\w./\\])(?:~\w*|\.{1,2}|[A-Za-z]:)?[/\\](?![/\\\s])[^\s\"'<>|,;()\[\]]*")
_HOME = re.compile(r"(?:[A-Za-z]:)?[/\\](?:home|Users)[/\\][^/\\\s\"'<>|,;()\[\]]+")
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PublicName:
    """What a model or a data set is called in public."""

    kind: Kind
    shown: str  # without the path that leads to it
    hub_id: str | None = None  # owner/name


def public_name(given: str, bases: Iterable[Path] = ()) -> PublicName:
    """Return what may be said of a model or a data set that a user named.

    Args:
        given: A hub id, a path, `builtin:NAME`, `open_clip:NAME`, or a form and a path, e.g. `sop:PATH`.
        bases: Folders that a relative path may start from, beside the present one: a path that exists is no hub id.
    """
    prefixed = _PREFIX.fullmatch(given)
    if prefixed is not None and prefixed["prefix"] == "builtin":
        return PublicName("built-in", given)
    if prefixed is not None and prefixed["prefix"] == "open_clip":
        name, _, tag = prefixed["rest"].partition(":")
        if name in ("hf-hub", "local-dir"):
            found = public_name(tag, bases)
            return PublicName("open_clip", found.shown, found.hub_id if name == "hf-hub" else None)
        return PublicName("open_clip", f"open_clip:{name}" + (f":{last_part(tag)}" if tag else ""))
    if prefixed is not None and len(prefixed["prefix"]) > 1:
        return PublicName("local", f"{prefixed['prefix']}:{last_part(prefixed['rest'])}")
    match = HUB_ID.fullmatch(given) if len(given) <= MOST_CHARACTERS else None
    if match is None or Path(given).suffix.lower() in FILE_SUFFIXES:
        return PublicName("local", last_part(given))
    if any(Path(base, given).exists() for base in (Path(), *bases)):
        return PublicName("local", last_part(given))
    return PublicName("hub", given, match["name"])


def last_part(path: str) -> str:
    """Return the last part of a path or an address of any system; a home folder, named after its user, has none."""
    parts = re.split(r"[/\\]+", _HOME.sub("~", path.split("?")[0]))
    named = [part for part in parts if part not in ("", ".", "..", "~")]
    return named[-1] if named else "unnamed"


def without_paths(text: str, known: Iterable[str] = ()) -> str:
    """Return a text in which the last part stands for every path and every address.

    Args:
        known: Paths that the run was given: they are found even where they hold spaces.
    """
    for path in sorted({path for path in known if "/" in path or "\\" in path}, key=len, reverse=True):
        text = text.replace(path, last_part(path))
    text = _ADDRESS.sub(lambda match: last_part(match.group()), text)
    text = _HOME.sub("~", text)
    return _PATH.sub(lambda match: last_part(match.group()), text)
