"""The commands that a user is likely to want after a run, ready to be copied."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vembed.data.documents import CORPUS_FILES
from vembed.data.keys import BUILTIN_PREFIX, listed
from vembed.data.presets import preset_path
from vembed.models.names import is_run
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Mapping


def next_commands(run: Path, config: Mapping[str, Any]) -> list[str]:
    """Return at most four commands: compare the run, evaluate its model, search with it, write it for other libraries.

    Args:
        run: Output folder of the run.
        config: Key -> value.
    """
    if config["trust_remote_code"]:
        return []  # each would need the commit whose code the user has read
    vembed = f"vembed --plugins {shlex.quote(','.join(config['plugins']))}" if config["plugins"] else "vembed"
    decides = "test" if config["test_data_path"] else "val"
    sets, split = listed(config[f"{decides}_data_path"]), config[f"{decides}_data_split"]
    commands = []
    # The latest run beside this one that has ended with a report and was judged on the same data.
    reports = [path for path in run.parent.glob("*/report/report.json") if path.parents[1] != run]
    reports.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    folders = [path.parents[1] for path in reports if is_run(path.parents[1])]
    if other := next((folder for folder in folders if _judges_alike(folder, config)), None):
        commands.append(f"{vembed} compare {shlex.join([str(other), str(run), '--output', f'{run}-comparison'])}")
    if sets and not config["column_mapping"]:  # `vembed evaluate` takes no mapping
        reading = {"--split": split, "--image-root": config["image_root"], "--label-kind": config["label_kind"]}
        options = [word for name, value in reading.items() if value not in (None, "auto") for word in (name, value)]
        words = [f"{run}/model", "--data", *sets, *options, "--output", f"{run}-evaluation"]
        commands.append(f"{vembed} evaluate {shlex.join(words)}")
    if corpus := next(filter(_is_corpus, [*sets, *listed(config["data_path"])]), None):
        words = [str(run), "--data", corpus, "--output", f"{run}-index"]
        commands.append(f"{vembed} encode {shlex.join(words)} && {vembed} search {shlex.quote(f'{run}-index')}")
    commands.append(f"{vembed} export {shlex.join([str(run), '--output', f'{run}-export'])}")
    return list(map(redact, commands))


def _judges_alike(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return True where a run's verdict is on the set of a configuration, or on rows held out of the same data."""
    try:
        other = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    if not isinstance(other, dict):
        return False
    # The first of these that is set decides. Those before it must be empty in both: the other run was judged by them.
    keys = ["test_data_path", "val_data_path", "data_path", "data"]
    decides = next(key for key in keys if config[key] or key == "data")
    return all(other.get(key) == config[key] for key in keys[: keys.index(decides) + 1])


def _is_corpus(path: str) -> bool:
    """Return True where `vembed encode` takes a set of the run as a corpus: rows of pairs have other columns."""
    is_named = path.startswith(BUILTIN_PREFIX) or preset_path(path) is not None
    return is_named or any((Path(path) / name).is_file() for name in CORPUS_FILES)
