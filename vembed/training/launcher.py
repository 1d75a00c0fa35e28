"""Settings of the launcher, laid under the configuration: override > file > the launcher's own file > auto."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from vembed.config.schema import Config
from vembed.distributed.accelerate import accelerate_settings
from vembed.distributed.process_env import process_env
from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


_PARTS_OF_SHARDING = {"sharding_factor", "fsdp_mode", "cpu_offload"}


def under_launcher(config: Config, sources: Mapping[str, str]) -> tuple[Config, str, tuple[str, ...]]:
    """Lay what the launcher asks for under a configuration.

    Returns:
        The configuration, with the launcher's values of keys that the user left alone; the launcher that started this
        process as one of several, with the file that it read, empty without one; and a line for each setting of it.

    Raises:
        ConfigError: The launcher asks for what this program has not, or for what contradicts the configuration.
    """
    process = process_env()
    asked = accelerate_settings(process)
    if asked is None:
        return config, process.launcher, ()
    origin, settings = asked
    added: dict[str, object] = {}
    notes = []
    for setting in settings:
        taken, kept = _judge(config, setting.keys, sources)
        added |= taken
        shown = ", ".join(f"{key}: {_show(value)}" for key, value in taken.items())
        remark = setting.remark if taken or not setting.keys else ""  # of nothing where the user's word wins
        parts = [part for part in (shown, *kept, remark) if part]
        notes.append(f"{origin} says {setting.words}: {'; '.join(parts)}")
    if added:
        # Only what was set: defaults would count as the user's own words from here on.
        try:
            config = Config.model_validate(config.model_dump(include=config.model_fields_set) | added)
        except ValidationError as error:
            reasons = "; ".join(str(part.get("ctx", {}).get("error", part["msg"])) for part in error.errors())
            raise ConfigError(f"{origin} and the configuration contradict each other: {reasons}") from error
    return config, origin, tuple(notes)


def _judge(
    config: Config, keys: Mapping[str, object], sources: Mapping[str, str]
) -> tuple[dict[str, object], list[str]]:
    """Return what of a setting acts, and a sentence for each key that the user has decided otherwise."""
    taken: dict[str, object] = {}
    kept = []
    for key, value in keys.items():
        # A key that the user wrote wins, even with its default as value; `auto` leaves the choice to whoever has one.
        configured = getattr(config, key)
        if key not in config.model_fields_set or configured == "auto":
            taken[key] = value
        elif configured != value:
            kept.append(f"the configuration says {key}: {_show(configured)} ({sources.get(key, 'set')}), which wins")
    off = config.use_fsdp is False or config.sharding_factor == 1
    if off and (keys.get("use_fsdp") is True or keys.keys() & _PARTS_OF_SHARDING):  # which have nothing to act on then
        where = "use_fsdp" if config.use_fsdp is False else "sharding_factor"
        return {}, [f"the configuration says {where}: {_show(getattr(config, where))}, which wins"]
    return taken, kept


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
