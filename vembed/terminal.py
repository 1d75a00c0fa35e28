"""The lines that a run prints: on the terminal of a command, and from a Python program."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vembed.redact import RedactingFormatter
from vembed.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


@contextmanager
def printed_lines(*, to_stderr: bool = False, errors_only: bool) -> Iterator[None]:
    """Print what is logged inside the block; a program that calls it keeps its own logging.

    Args:
        to_stderr: Whether log lines leave the standard output alone.
        errors_only: Whether another process prints the rest.
    """
    handler = _TerminalHandler(to_stderr=to_stderr)
    if errors_only:
        handler.setLevel(logging.ERROR)
    handler.setFormatter(_TerminalFormatter("%(message)s"))
    logger = logging.getLogger("vembed")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    # Else the handlers of the program that calls would print each line a second time.
    logger.propagate = False
    try:
        with _unencodable_escaped():
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def _unencodable_escaped() -> Iterator[None]:
    """Print escapes for letters that the encoding of the terminal lacks; Python's own answer ends the run."""
    streams = (stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper))
    strict = [stream for stream in streams if stream.errors == "strict"]  # others escape already, or know how to write
    for stream in strict:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream in strict:
            with open_terminal(stream):  # what is buffered is written first
                if not stream.closed:
                    stream.reconfigure(errors="strict")


class _TerminalHandler(logging.Handler):
    """Print log lines without tearing a progress bar apart.

    Args:
        to_stderr: Whether they go to the standard error, where the output is for other programs.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        super().__init__()
        self._to_stderr = to_stderr

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        stream = sys.stderr if self._to_stderr or record.levelno >= logging.ERROR else sys.stdout
        # Looked up, not imported: where nobody has imported tqdm there is no bar.
        bars = sys.modules.get("tqdm")
        with open_terminal(stream):
            if bars is not None and sys.stderr.isatty():
                bars.tqdm.write(line, file=stream)
            else:
                print(line, file=stream, flush=True)


@contextmanager
def open_terminal(stream: TextIO) -> Iterator[None]:
    """Let a run outlive its terminal: what was closed, with a SIGHUP or by the reader of a pipe, is written no more."""
    try:
        yield
    except OSError:
        write_no_more(stream)


def write_no_more(stream: TextIO) -> None:
    """Send what is still written to a stream nowhere."""
    # By descriptor: libraries in C write past sys.stdout, and Python flushes it once more when it ends.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _TerminalFormatter(RedactingFormatter):
    """Show plain lines as they are, and say the level of those that need attention."""

    def format(self, record: logging.LogRecord) -> str:
        message = visible(super().format(record))
        return message if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {message}"
