"""A folder that appears whole or not at all, and never in place of what it must not replace."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from vembed.errors import ConfigError, MachineError
from vembed.files import new_folder
from vembed.models.registry import encoder_classes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def refuse_taken(output: Path, *, overwrite: bool, source: Path | None) -> None:
    """Refuse an output folder that holds something which an export must not replace.

    Args:
        source: Folder that the model is read from, resolved; None for a hub id.

    Raises:
        ConfigError: It is the source or holds it, or it isn't empty and can't be overwritten.
    """
    if source is not None and (output == source or output in source.parents):
        raise ConfigError(f"--output {output} is, or holds, the folder that the model is read from; choose another one")
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"--output {output} is a file; name a folder")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"--output {output} is not empty; choose another folder, or replace it with --overwrite")
    if (output / ".git").exists():
        raise ConfigError(
            f"--output {output} is a Git checkout, which --overwrite would replace as a whole; export beside it and "
            f"copy the files"
        )
    marks = {"config.json", "modules.json", *(each.marker for each in encoder_classes() if each.marker)}
    if not any((output / mark).is_file() for mark in marks):
        raise ConfigError(
            f"--output {output} holds no model, and --overwrite replaces nothing but models; choose another folder"
        )


@contextmanager
def new_model_folder(output: Path) -> Iterator[Path]:
    """Give a hidden folder to write a model into, which takes the output's name whole or not at all.

    Raises:
        MachineError: The disk refuses.
    """
    try:
        with new_folder(output) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise MachineError(
            f"{output}: the model can't be written: {error}. Free some space, or choose another folder"
        ) from error
