"""Packages that only an extra installs, imported where they are first needed."""

from __future__ import annotations

import importlib
from typing import Any

from vembed.errors import ConfigError


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module of an extra.

    Args:
        what: What needs it, for the message: "--mteb".

    Raises:
        ConfigError: The package isn't installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f'{what} needs {module.partition(".")[0]}, which is missing: pip install "vembed[{extra}]"'
        ) from error
