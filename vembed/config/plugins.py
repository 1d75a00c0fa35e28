"""Code of the user's own: modules that register losses, encoders, data sets and the like under a name."""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from vembed import registry
from vembed.config.fields import Name, Section, key
from vembed.errors import ConfigError
from vembed.redact import printable

_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


class PluginKeys(Section):
    """Code of your own."""

    plugins: list[Name] = key(
        [],
        "Python modules that are imported before anything else is read, so that their vembed.register_* take effect; "
        "searched in the current folder, in PYTHONPATH and among the installed packages.",
    )


def import_plugins(names: object) -> None:
    """Import the modules that the key `plugins` names; one that is imported already is left as it is.

    Args:
        names: The key's value as it was written; what is no list of texts is left to the schema to refuse.

    Raises:
        ConfigError: There is no such module, or it can't be imported.
    """
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name not in sys.modules:
                _import(name)


def plugin_lines(names: list[str]) -> list[str]:
    """Return for each plugin where it is and what it registered, for the plan."""
    lines = []
    for name in names:
        added = [f"{table.kind} {entry}" for table, entry in _registered(name)]
        file = getattr(sys.modules.get(name), "__file__", None) or "built in"
        lines.append(f"plugins: {name} ({file}) registers {', '.join(added) or 'nothing'}")
    return lines


def adds_only_trackers(name: str) -> bool:
    """Tell whether nothing that a run computes can depend on a plugin: trackers are all that it registered."""
    tables = [table for table, _ in _registered(name)]
    return bool(tables) and all(table is registry.TRACKERS for table in tables)


def _registered(name: str) -> list[tuple[registry.Registry, str]]:
    """Return what a plugin registered, each name with its table."""
    tables = [each for each in vars(registry).values() if isinstance(each, registry.Registry)]
    return [
        (table, entry)
        for table in tables
        for entry, module in table.plugins().items()
        if module == name or module.startswith(f"{name}.")
    ]


def _import(name: str) -> ModuleType:
    if not _MODULE.fullmatch(name) or name.endswith(".py"):
        raise ConfigError(f"plugins: {printable(name)!r} is no name of a module; write the file's name without .py")
    with _current_folder_first():
        importlib.invalidate_caches()
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise ConfigError(_failure(name, error)) from error
            raise ConfigError(
                f"plugins: there is no module {error.name}; searched in the current folder ({Path.cwd()}), PYTHONPATH "
                f"({os.environ.get('PYTHONPATH') or 'not set'}) and the installed packages"
            ) from error
        except (Exception, SystemExit) as error:
            raise ConfigError(_failure(name, error)) from error


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Search the current folder first, as `python -m` does; afterwards last, for what a plugin imports later."""
    folder = str(Path.cwd())
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)


def _failure(name: str, error: BaseException) -> str:
    """Say why a plugin can't be imported, with the line of its code that failed."""
    if isinstance(error, SyntaxError):
        return f"plugins: {name} can't be imported: {error.filename}:{error.lineno}: {error.msg}"
    machinery = ("<", f"{Path(importlib.__file__).parent}{os.sep}", f"{Path(registry.__file__).parent}{os.sep}")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(machinery)]
    where = ""
    if frames:  # the deepest line of the plugin's own, not of a library that it calls
        home = frames[0].filename.removesuffix("__init__.py")
        last = [frame for frame in frames if frame.filename.startswith(home)][-1]
        where = f"{last.filename}:{last.lineno}: "
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"plugins: {name} can't be imported: {where}{kind}{printable(str(error))}"
