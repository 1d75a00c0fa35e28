"""Bent checkpoints: refused or fallen back from in words, and never another state than one that was saved."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoint_cases import reseal
from fuzz_limits import fuzzed, within_limits
from hypothesis import given
from hypothesis import strategies as st
from kit.runs import make_site, run_keys

import vembed.training.run as assembly
from vembed.distributed.runtime import Runtime, describe_machine
from vembed.errors import ConfigError, MachineError
from vembed.training.output import OutputFolder
from vembed.training.planning import read_back
from vembed.training.run import find_checkpoint as resume_point
from vembed.training.saving import module_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.training.saving import RunCheckpoints

pytestmark = pytest.mark.usefixtures("undrawn")

JSON_FILES = ("manifest.json", "state.json")
FILES = (*JSON_FILES, "model.safetensors", "optimizer.safetensors", "loss.safetensors")
STEPS = (1, 2)


class Reader:
    """A run of two steps with a checkpoint of each, what its parts are after each of them, and what reads them."""

    def __init__(self, folder: Path, run: Any, checkpoints: RunCheckpoints) -> None:
        self.folder, self.config, self.plan, self.checkpoints = folder, run.config, run.plan, checkpoints
        self.states: dict[int, dict[str, Any]] = {}
        self.restored: dict[str, Any] = {}
        self._settings = [{**group} for group in checkpoints.optimizer.adamw.param_groups]

    def snapshot(self, state: Any) -> dict[str, Any]:
        """Return everything that a checkpoint restores."""
        tensors, packed = self.checkpoints.optimizer.state()
        parts = {"model": module_tensors(self.checkpoints.encoder), "loss": module_tensors(self.checkpoints.loss)}
        return copy.deepcopy({**parts, "optimizer": tensors, "updater": packed, "run": state.to_json()})

    def resume(self, folder: Path) -> int | None:
        """Do what a resumed run does with its checkpoints; return the step that it stands at."""
        output = OutputFolder(folder)
        device = torch.device("cpu")
        loaded = resume_point(self.config, Runtime(device, describe_machine(device)), output)
        if loaded is None:
            return None
        read_back(self.plan, loaded, self.config)
        for group, settings in zip(self.checkpoints.optimizer.adamw.param_groups, self._settings, strict=True):
            group.clear()  # of what an example before this one left
            group.update(settings)
        state = self.checkpoints.restore(loaded)
        self.restored = self.snapshot(state)
        return state.step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    site = make_site(tmp_path_factory.mktemp("site"))
    folder = tmp_path_factory.mktemp("run")
    parts: list[Any] = []
    train = assembly._train

    def train_and_keep(run: assembly.Run, *words: Any) -> Any:
        parts.extend([run, run.checkpoints])
        return train(run, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "_train", train_and_keep)
        keys = site.keys(max_steps=2, save_steps=1, eval_strategy="no", eval_steps=None, learn_temperature=True)
        outcome = run_keys(folder, keys)
    assert outcome.code == 0, outcome.err
    reader = Reader(outcome.folder, *parts)
    for step in STEPS[::-1]:
        one = folder / f"only-{step}"
        shutil.copytree(outcome.folder / "checkpoints" / name_of(step), one / "checkpoints" / name_of(step))
        assert reader.resume(one) == step
        reader.states[step] = reader.restored
    return reader


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


@pytest.fixture
def copy_of(saved: Reader, tmp_path: Path) -> Any:
    """Return what copies the run's checkpoints, again for each example."""

    def copied() -> Path:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(saved.folder / "checkpoints", tmp_path / "run" / "checkpoints")
        return tmp_path / "run"

    return copied


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


ODD_VALUES = st.sampled_from(
    [None, True, -1, 0, 0.5, 10**30, 1e308, float("nan"), "", "x", "\ud800", "\x1b[2J", [], {}, [None], {"": None}]
) | st.integers(20, 400).map(nested)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if len(path) > 8:
        return []
    return [place for key, each in inner for place in ((*path, key), *places(each, (*path, key)))]


def bend(content: Any, data: st.DataObject) -> None:
    """Replace, delete or rename one value of a JSON object."""
    *path, key = data.draw(st.sampled_from(places(content)))
    for each in path:
        content = content[each]
    how = data.draw(st.sampled_from(["replace", "replace", "delete", "rename"]))
    if how == "delete":
        del content[key]
    elif how == "rename" and isinstance(content, dict):
        content[data.draw(st.sampled_from(["x", "../x", "\ud800", "a" * 300]))] = content.pop(key)
    else:
        content[key] = data.draw(ODD_VALUES)


def check(saved: Reader, folder: Path, caplog: pytest.LogCaptureFixture, *, is_exact: bool) -> None:
    """Resume, and fail unless it is refused in our words, falls back in words, or is a state that was saved."""
    caplog.clear()
    try:
        with within_limits(), caplog.at_level(logging.WARNING):
            step = saved.resume(folder)
    except (MachineError, ConfigError):
        return
    assert step is not None, "a run that has checkpoints starts anew"
    if step == STEPS[0]:
        assert f"{name_of(STEPS[1])} skipped" in caplog.text
    if is_exact or step == STEPS[0]:
        assert same(saved.restored, saved.states[step])


@pytest.mark.slow
@fuzzed(1.5)
@given(data=st.data())
def test_bent_json_is_refused_or_skipped_although_its_checksums_are_right(
    saved: Reader, copy_of: Any, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    folder = copy_of()
    newest = folder / "checkpoints" / name_of(STEPS[1])
    path = newest / data.draw(st.sampled_from(JSON_FILES))
    content = json.loads(path.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        if places(content):
            bend(content, data)
    path.write_text(json.dumps(content))
    sealed = data.draw(st.booleans())
    if sealed:
        try:
            reseal(newest)
        except (KeyError, TypeError, AttributeError, OSError, ValueError):
            sealed = False
    check(saved, folder, caplog, is_exact=not sealed)


@pytest.mark.slow
@fuzzed(1.0)
@given(data=st.data())
def test_wrong_bytes_are_refused_or_skipped(
    saved: Reader, copy_of: Any, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    folder = copy_of()
    newest = folder / "checkpoints" / name_of(STEPS[1])
    path = newest / data.draw(st.sampled_from(FILES))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(200, len(content) - 1)))
    how = data.draw(st.sampled_from(["bit", "bit", "cut", "insert", "utf-8", "deep", "header"]))
    if how == "bit":
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[position:]
    elif how == "header":
        content[:8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    elif how == "deep":
        content = bytearray(b"[" * 100_000)
    else:
        content[position:position] = b"\xff\xfe" if how == "utf-8" else data.draw(st.binary(min_size=1, max_size=9))
    path.write_bytes(content)
    is_tensors = path.suffix == ".safetensors"
    if is_tensors and data.draw(st.booleans()):
        reseal(newest)
        check(saved, folder, caplog, is_exact=False)
    else:
        check(saved, folder, caplog, is_exact=True)


KINDS = ("missing", "folder", "fifo", "link to itself", "link to zero", "link to nothing", "file")


@fuzzed(1.0)
@given(kind=st.sampled_from(KINDS), name=st.sampled_from(["", *FILES]))
def test_what_stands_in_the_place_of_a_file_or_a_folder_is_refused_or_skipped(
    saved: Reader, copy_of: Any, caplog: pytest.LogCaptureFixture, kind: str, name: str
) -> None:
    folder = copy_of()
    path = folder / "checkpoints" / name_of(STEPS[1]) / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("{}")
    elif kind.startswith("link"):
        path.symlink_to({"itself": path.name, "zero": "/dev/zero", "nothing": "/nowhere"}[kind.split()[-1]])
    if kind == "missing" and not name:
        assert saved.resume(folder) == STEPS[0]
    else:
        check(saved, folder, caplog, is_exact=True)
