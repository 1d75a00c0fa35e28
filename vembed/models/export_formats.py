"""Formats of `vembed export` that plugins add: a folder of one of our forms, with more files in it.

A format is a function that writes files beside a model that was exported and read back. Ours are the forms that an
encoder can be written as (vembed/models/exportable.py), which no plugin adds. Nothing here imports torch, since the
help of the command lists the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vembed.errors import ConfigError
from vembed.registry import EXPORTS, import_extra

if TYPE_CHECKING:
    from vembed.models.encoder import Encoder
    from vembed.models.exportable import Form

OUR_FORMS = ("auto", "sentence-transformers", "transformers", "open_clip", "pylate")
"""What --format takes without any plugin; "auto" is the model's own form."""

WriteFiles: TypeAlias = Callable[["Encoder", Path, Any], Sequence[object]]
"""Encoder, folder, options of the format -> what it wrote, each printing as a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """Folder of one of our forms with more files in it: `vembed export --format NAME`."""

    name: str
    write: WriteFiles  # called last: the encoder was read back from the folder, is in float32, and is used up
    form: Form | Literal["auto"] = "auto"  # of the folder that gets the files
    obstacle: Callable[[Encoder], str] = lambda _: ""  # why an encoder can't be written so, "" where it can
    packages: tuple[str, ...] = ()  # modules to be found before a model is loaded
    extra: str = ""  # extra of vembed that brings them

    def refuse_missing(self) -> None:
        """Refuse the format where a package isn't installed.

        Raises:
            ConfigError: It names the package and how to get it.
        """
        for package in self.packages:
            import_extra(package, self.extra, f"--format {self.name}")


def register_export(
    name: str,
    *,
    form: Form | Literal["auto"] = "auto",
    obstacle: Callable[[Encoder], str] = lambda _: "",
    packages: Sequence[str] = (),
) -> Callable[[WriteFiles], WriteFiles]:
    """Add a format of `vembed export --format`; a decorator of the function that writes its files.

    The function gets the encoder, the folder, which holds the model in the form `form` and was read back, and the
    options that stand under the name "export.NAME" (`register_options`), None without any. It writes further files and
    returns what is printed, an object for each line. What it raises leaves no folder behind.

    Args:
        name: What --format takes.
        form: Library that the folder is written for; "auto" for the model's own.
        obstacle: Returns why an encoder can't be written so, "" where it can.
        packages: Modules that the format needs; where one is missing, the export is refused before a model is loaded.

    Raises:
        ConfigError: The name is taken.
    """

    def register(write: WriteFiles) -> WriteFiles:
        if name in OUR_FORMS:
            raise ConfigError(f"export format {name!r} of {write.__module__} is already that of vembed")
        entry = ExportFormat(name=name, write=write, form=form, obstacle=obstacle, packages=tuple(packages))
        EXPORTS.register(name, entry, module=write.__module__)
        return write

    return register
