"""What can be told before torch is imported is told before, and an exit.json without a folder takes one line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from kit.runs import ROOT, Site, environment, write_config

from vembed.distributed.watchdog import EXIT_FILE, ExitFiles, Failure

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CALL = """
import contextlib, io, json, sys
from vembed.registry import COMMANDS

for command, *words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = int(COMMANDS.load(command)(words, program=command))
    print(json.dumps([code, said.getvalue(), "torch" in sys.modules]))
"""


def test_wrong_paths_are_told_before_torch_is_imported(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = str(tmp_path / "wrong.jsonl")
    configs = [
        write_config(tmp_path, site.keys(**{key: wrong}), f"{key}.yaml")
        for key in ("data_path", "val_data_path", "test_data_path")
    ]
    unwritable = write_config(tmp_path, site.keys(output_dir=str(tmp_path / "file" / "out")), "unwritable.yaml")
    output = ["--output", str(tmp_path / "out")]
    calls = [
        *(["train", str(config)] for config in configs),
        ["train", str(configs[0]), "--plan"],
        ["evaluate", "bm25", "--data", wrong, *output],
        ["encode", str(site.bert), "--data", wrong, *output],
        ["train", str(unwritable)],
        ["encode", str(site.bert), "--data", str(site.train), "--output", str(tmp_path / "file" / "a" / "b")],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CALL, json.dumps(calls)],
        capture_output=True, text=True, cwd=ROOT, env=environment(), check=True,
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _, _ in told] == [3, 3, 3, 3, 3, 3, 5, 5]
    for code, words, has_torch in told:
        assert "wrong.jsonl doesn't exist" in words if code == 3 else "can't be written" in words
        assert words.count("\n") == 1
        assert not has_torch, words
    assert not (tmp_path / "out").exists()


def test_exit_json_of_a_folder_that_was_moved_takes_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "out").mkdir()
    files = ExitFiles()
    files.own(tmp_path / "out", is_main=True)
    files.write(Failure(5, 0, "here", "first"), to_folder=True)
    assert json.loads((tmp_path / "out" / EXIT_FILE).read_text())["message"] == "first"
    (tmp_path / "out").rename(tmp_path / "moved")
    files.write(Failure(5, 0, "here", "second"), to_folder=True)
    assert caplog.messages == [f"{tmp_path / 'out' / EXIT_FILE} is not written: the folder was moved or deleted"]
    assert not (tmp_path / "out").exists()
