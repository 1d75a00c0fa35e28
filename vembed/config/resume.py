"""What a changed configuration means for a run that is resumed."""

from collections.abc import Mapping
from typing import NamedTuple

from vembed.config.dump import plain_values
from vembed.config.fields import OnResume, facts_of
from vembed.config.keys.sources import loss_names
from vembed.config.plugins import adds_only_trackers
from vembed.config.schema import Config, default_of, fields
from vembed.redact import redact_value


class ResumeDifference(NamedTuple):
    """A key whose value isn't the one that the run began with."""

    key: str
    old: object  # in the checkpoint
    new: object  # now; None where the key no longer exists
    kind: OnResume  # "harmless" when it touches neither the weights nor the order of the samples


def on_resume(key: str) -> OnResume:
    """Return what a change of a key means for a resumed run, as its field says."""
    return "harmless" if facts_of(fields()[key])["on_resume"] == "harmless" else "refused"


def resume_differences(old: Mapping[str, object], new: Config) -> list[ResumeDifference]:
    """Compare the configuration of a checkpoint, key -> value, with the present one.

    A key that the checkpoint hasn't had its default; one that no longer exists is refused. A key of losses that don't
    act has its default, which may be another one now.
    """
    differences = []
    for key, value in plain_values(new).items():
        before = redact_value(old[key]) if key in old else default_of(key)
        if not _same(before, value) and _acts(key, new):
            kind = "harmless" if key == "plugins" and _more_trackers(before, new.plugins) else on_resume(key)
            differences.append(ResumeDifference(key, before, value, kind))
    gone = [key for key in old if key not in fields()]
    return differences + [ResumeDifference(key, redact_value(old[key]), None, "refused") for key in gone]


def _acts(key: str, config: Config) -> bool:
    """Return whether a key isn't one of losses alone of which none acts."""
    losses = facts_of(fields()[key]).get("acts_with", {}).get("loss_type", [])
    return not losses or any(name in losses for name in loss_names(config))


def _more_trackers(before: object, now: list[str]) -> bool:
    """Return whether plugins were only added, and those only for their trackers."""
    known = before if isinstance(before, list) else []
    added = [name for name in now if name not in known]
    return [name for name in now if name in known] == known and all(map(adds_only_trackers, added))


def _same(old: object, new: object) -> bool:
    """Compare values, keeping True apart from 1."""
    return old == new and isinstance(old, bool) == isinstance(new, bool)
