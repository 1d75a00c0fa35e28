"""Commands in processes of their own that need not import torch first: each is forked from a server that has."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.context import ForkServerProcess

PRELOAD = [
    "vembed.training.run", "vembed.models.export", "vembed.workflows.search.serve", "vembed.evaluation.benchmark",
    "transformers.models.bert.modeling_bert", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure",
    "pandas", "faiss",
]  # fmt: skip

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(PRELOAD)


class WarmProcess:
    """A started command, used like subprocess.Popen.

    The process is as real as any: its own id, signals, exit code and files. Two things differ from a fresh interpreter:
    torch and vembed are imported already, so environment variables that they read when imported have no effect; and
    its parent is the server. A test of either starts a fresh one.

    Args:
        words: What stands behind `python`: a program's file or `-m MODULE`, and its arguments.
        output: File that gets standard output, at its end; errors go to `errors`, or to the same file.
    """

    def __init__(
        self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: Path, errors: Path | None = None
    ) -> None:
        self._process: ForkServerProcess = WARM.Process(
            target=_run, args=(list(words), cwd, dict(env), output, errors or output)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a command", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_warm(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], scratch: Path, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its output passes through two files in the folder `scratch`."""
    output, errors = scratch / "warm-output.txt", scratch / "warm-errors.txt"
    process = WarmProcess(words, cwd=cwd, env=env, output=output, errors=errors)
    try:
        code = process.wait(timeout)
        return subprocess.CompletedProcess(list(words), code, output.read_text("utf-8"), errors.read_text("utf-8"))
    finally:
        process.kill()
        for path in (output, errors):
            path.unlink(missing_ok=True)


def _run(words: list[str], cwd: Path, env: dict[str, str], output: Path, errors: Path) -> None:
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, str(cwd))
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing leaves them out
