"""Run a command of vembed, and kill it right behind the rename that gives a file or folder its name.

python kill_behind.py NAME WORD ...
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

name, sys.argv = sys.argv[1], ["vembed", *sys.argv[2:]]
is_there = False


def kill_behind_rename(event: str, values: tuple[object, ...]) -> None:
    """Kill this process at its first file operation once the name is taken; an event comes before its operation."""
    global is_there
    if is_there and event in {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}:
        os.kill(os.getpid(), signal.SIGKILL)
    is_there |= event == "os.rename" and Path(str(values[1])).name == name


sys.addaudithook(kill_behind_rename)

from vembed.__main__ import main  # noqa: E402

sys.exit(main())
