"""Record of a run's configuration: the file in its folder, a hash, and the differences when it is resumed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from vembed.config.documents import write_mapping
from vembed.config.schema import SECTIONS, Config, default_of, fields, key_names, section_keys
from vembed.data.keys import loss_names
from vembed.redact import redact_value
from vembed.registry import LOSSES, adds_only_trackers
from vembed.section import Affects, facts_of


class ResumeDifference(NamedTuple):
    """Key whose value isn't the one that the run began with."""

    key: str
    old: object  # in the checkpoint
    new: object  # None where the key no longer exists
    kind: Literal["harmless", "refused"]  # harmless: it touches neither the weights nor the order of the samples


def plain_values(config: Config) -> dict[str, object]:
    """Return every key with its value as YAML and JSON know it, redacted, in the order of the sections.

    Keys of a plugin's losses are there only where one of these acts, so that installing a plugin changes no other run.
    """
    # A mapping is sorted, so that configurations that are equal have equal bytes, and equal hashes.
    given = config.model_dump()
    acting, of_plugins = {config.loss_type, *loss_names(config)}, LOSSES.plugins().keys()
    values: dict[str, object] = {}
    for name in key_names():
        owners = _owners(name)
        if name in given and not (owners and owners <= of_plugins and not owners & acting):
            plain = redact_value(given[name])
            values[name] = dict(sorted(plain.items())) if isinstance(plain, dict) else plain
    return values


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
    """Return a SHA-256 of the keys that affect the result of a run, in hex: equal for runs with equal results."""
    values = {name: value for name, value in plain_values(config).items() if affects(name) == "result"}
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def shared_values(config: Config) -> dict[str, str]:
    """Return the keys that all processes of a run must have alike, each with its value as JSON."""
    values = plain_values(config)
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items() if affects(name) != "process"}


def affects(key: str) -> Affects:
    """Return how far a key reaches, as its declaration says."""
    reach: Affects = facts_of(fields()[key])["affects"]
    return reach


def on_resume(key: str) -> Literal["harmless", "refused"]:
    """Return what a change of a key means for a resumed run."""
    return "refused" if affects(key) == "result" else "harmless"


def resume_differences(old: Mapping[str, object], new: Config) -> list[ResumeDifference]:
    """Compare the configuration of a checkpoint, key -> value, with the present one.

    A key that the checkpoint doesn't have had its default; one that no longer exists is refused. Keys of losses that
    don't act are left out: they may have another default now.
    """
    differences = []
    acting = set(loss_names(new))
    for key, value in plain_values(new).items():
        # Both sides are without secrets, as a checkpoint keeps none: another password is no difference.
        before = redact_value(old[key]) if key in old else default_of(key)
        is_same = before == value and isinstance(before, bool) == isinstance(value, bool)  # True is not 1
        owners = _owners(key)
        if is_same or (owners and not owners & acting):
            continue
        # A plugin may change anything, so `plugins` affects the result, but for one that brings trackers and no more.
        kind = on_resume(key)
        if key == "plugins":
            earlier = before if isinstance(before, list) else []
            added = [name for name in new.plugins if name not in earlier]
            kept = [name for name in new.plugins if name in earlier]
            if kept == earlier and all(map(adds_only_trackers, added)):
                kind = "harmless"
        differences.append(ResumeDifference(key, before, value, kind))
    # Of a key that no longer exists nobody can say any more what it did.
    gone = [key for key in old if key not in fields()]
    return differences + [ResumeDifference(key, redact_value(old[key]), None, "refused") for key in gone]


def _owners(key: str) -> set[str]:
    """Return the losses whose key it is; empty for a key of every run."""
    return set(facts_of(fields()[key]).get("acts_with", {}).get("loss_type", ()))
