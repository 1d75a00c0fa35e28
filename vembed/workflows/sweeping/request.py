"""What a sweep was asked for, kept in its folder: the same command continues it, another one is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from vembed.config.record import plain_values, resume_differences
from vembed.distributed.lock import LOCK_FILE
from vembed.errors import ConfigError, MachineError
from vembed.files import replace_text
from vembed.json_text import fit, read_object
from vembed.redact import redact

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.config.schema import Config

REQUEST_FILE = "request.json"
_NOBODYS = (LOCK_FILE, "plan.json", "config.yaml")
"""What the lock and `--plan` leave in a folder that nothing was trained in."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for."""

    asked: tuple[str, ...]  # the words that decide the trials, each "--try learning_rate=1e-5,2e-5"
    config: dict[str, Any]  # key -> value of the configuration without what is tried
    steps: dict[str, int] = field(default_factory=dict)  # of each trial by name, once they are counted

    @classmethod
    def of(cls, asked: tuple[str, ...], config: Config, tried: set[str]) -> Self:
        """Return what a command asks for.

        Args:
            config: Of any trial.
            tried: Keys whose values differ from trial to trial.
        """
        values = {name: value for name, value in plain_values(config).items() if name not in tried}
        return cls(tuple(map(redact, asked)), values)

    def go_on(self, folder: Path, config: Config) -> Request:
        """Return what the folder was begun with, after checking that it is the same; write it where it is new.

        Raises:
            ConfigError: The folder holds another sweep, or other files.
            MachineError: It can't be written.
        """
        path = folder / REQUEST_FILE
        if not path.exists():
            if folder.exists() and any(each.name not in _NOBODYS for each in folder.iterdir()):
                raise ConfigError(f"{folder} holds other files; choose an empty folder, or a new one")
            self.write(folder)
            return self
        try:
            before = fit(Request, read_object(path), where=REQUEST_FILE)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: can't be read: {error}; choose another folder") from error
        differences = [
            f"  {each.key}: {each.old!r} before, {each.new!r} now"
            for each in resume_differences(before.config, config)
            if each.kind == "refused" and each.key in self.config
        ]
        if before.asked != self.asked:
            was, now = (" ".join(each.asked) for each in (before, self))
            differences.insert(0, f"  {was} before, {now} now")
        if differences:
            listed = "\n".join(differences)
            raise ConfigError(
                f"{folder} was begun with something else:\n{listed}\nSet this back to continue it, choose another "
                f"folder, or delete it to start anew"
            )
        return replace(self, steps=before.steps)

    def write(self, folder: Path) -> None:
        """Write it into the folder.

        Raises:
            MachineError: The folder can't be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / REQUEST_FILE, json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            raise MachineError(f"{folder} can't be written: {error}; choose another folder") from error
