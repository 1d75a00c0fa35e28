"""Let a process that fails say why, though its launcher already ends it for the failure of another one.

A launcher that sees one process die sends SIGTERM to the others at once. Those have just lost a collective and are
finding out whom they lost: killed there, they would leave no exit.json.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


def keep_last_words() -> None:
    """Let SIGTERM end this process as usual, but not while it handles an error: then it is about to end by itself.

    Does nothing outside the main thread, and where a program has its own way with SIGTERM.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_unless_failing)


def forget_last_words() -> None:
    """Undo `keep_last_words`."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _end_unless_failing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_unless_failing(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature that signal calls
    if sys.exc_info()[0] is not None:  # of the interrupted code, clean-up on the way out included
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
