"""What a run keeps of its configuration: the file in the output folder, and one hash."""

import hashlib
import json

from vembed.config.fields import facts_of
from vembed.config.keys.sources import loss_names
from vembed.config.schema import SECTIONS, Config, fields, key_names, section_keys
from vembed.config.text import write_mapping
from vembed.redact import redact_value
from vembed.registry import LOSSES


def plain_values(config: Config) -> dict[str, object]:
    """Return every key with its value as YAML and JSON know it, redacted, in the order of the sections."""
    values: dict[str, object] = {}
    given = config.model_dump()
    for name in key_names():
        if name in given and not _of_another_plugin(name, config):
            plain = redact_value(given[name])
            values[name] = dict(sorted(plain.items())) if isinstance(plain, dict) else plain
    return values


def _of_another_plugin(name: str, config: Config) -> bool:
    """Return whether only losses of plugins have a key, and none of them is the run's."""
    losses = facts_of(fields()[name]).get("acts_with", {}).get("loss_type", ())
    return (
        bool(losses)
        and not {config.loss_type, *loss_names(config)} & set(losses)
        and LOSSES.plugins().keys() >= set(losses)
    )


def dump_config(config: Config) -> str:
    """Write a configuration as the YAML that loads as an equal one.

    `auto` stays `auto`. Equal configurations have equal bytes. A secret in a URL is written as `***`.
    """
    values = plain_values(config)
    sections = [
        f"# {title}\n{write_mapping({name: values[name] for name in section_keys(title) if name in values})}"
        for title in SECTIONS
    ]
    return "\n".join(sections)


def config_hash(config: Config) -> str:
    """Return a SHA-256 of the keys that decide the result of a run, in hex."""
    values = _hashed(config)
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def hashed_values(config: Config) -> dict[str, str]:
    """Return the keys that decide the result of a run, each with its value as text."""
    return {name: json.dumps(value, sort_keys=True) for name, value in _hashed(config).items()}


def _hashed(config: Config) -> dict[str, object]:
    return {name: value for name, value in plain_values(config).items() if name not in Config.NOT_HASHED}
