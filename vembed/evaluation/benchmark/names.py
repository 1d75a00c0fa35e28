"""Names of models and sets: short enough to read, and different wherever two things are."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.files import is_folder
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPORT_FOLDER = "model"
"""Last part of the path of every model that a run exports: a name that says nothing without the part before it."""


def model_labels(names: Sequence[str], *, taken: Sequence[str] = ()) -> list[str]:
    """Return what people call each model: a hub id as it is, a folder by as many last parts as tell it apart.

    Args:
        taken: What other systems are called, from which a folder is told apart too.

    Raises:
        ConfigError: When a model is named twice.
    """
    parts = [Path(name).resolve().parts if is_folder(name) else tuple(name.split("/")) for name in names]
    if len(set(parts)) < len(parts):
        repeated = next(name for name, own in zip(names, parts, strict=True) if parts.count(own) > 1)
        raise ConfigError(f"{repeated} is named twice")
    others = [*parts, *(tuple(label.split("/")) for label in taken)]
    return _without_secrets(["/".join(_last_parts(own, [other for other in others if other != own])) for own in parts])


def set_labels(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return what people call each set: its name, with the path behind it where two sets have the same name.

    Raises:
        ConfigError: When a set is named twice.
    """
    for path, count in Counter(str(Path(path)) for path in paths).items():
        if count > 1:
            raise ConfigError(f"--data: {path} is named twice")
    counts = Counter(names)
    return _without_secrets(
        [f"{name} ({path})" if counts[name] > 1 else name for name, path in zip(names, paths, strict=True)]
    )


def unique_folders(labels: Sequence[str], *, taken: Sequence[str] = ()) -> list[str]:
    """Return a plain folder name for each label; where two labels would share one, a short hash keeps them apart."""
    plain = [re.sub(r"[^A-Za-z0-9.-]+", "_", label).strip("._") or "model" for label in labels]
    counts = Counter([*plain, *taken])
    return [
        f"{name}-{hashlib.sha256(label.encode()).hexdigest()[:8]}" if counts[name] > 1 else name
        for name, label in zip(plain, labels, strict=True)
    ]


def _without_secrets(labels: Sequence[str]) -> list[str]:
    """Redact labels; those that only a secret told apart are numbered."""
    shown = [redact(label) for label in labels]
    return [f"{label} #{number}" if shown.count(label) > 1 else label for number, label in enumerate(shown, start=1)]


def _last_parts(own: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return as many last parts of a path as none of the others ends in; all parts of a name that is no path."""
    if not Path("/".join(own)).is_absolute():
        return own
    # Two parts of RUN/model from the start, and as many more as another path ends in as well.
    length = min(2 if own[-1] == EXPORT_FOLDER else 1, len(own) - 1)
    while any(other[-length:] == own[-length:] for other in others) and length < len(own) - 1:
        length += 1
    return own[-length:]
