"""What every command shares: logging to the terminal, and errors as one message and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from vembed.config.redact import redact
from vembed.errors import ExitCode, VembedError

if TYPE_CHECKING:
    from collections.abc import Callable


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
        stream = sys.stderr if self._to_stderr else sys.stdout
        bars = sys.modules.get("tqdm")
        if bars is not None and sys.stderr.isatty():
            bars.tqdm.write(line, file=stream)
        else:
            print(line, file=stream, flush=True)


class _TerminalFormatter(logging.Formatter):
    """Show plain lines as they are, and say the level of those that need attention."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        return message if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {message}"


def run_command(command: Callable[[], int], *, log_to_stderr: bool = False) -> int:
    """Run a command and return its exit code.

    Args:
        command: The command's body, returning an exit code.
        log_to_stderr: Whether log lines leave the standard output alone.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handler = _TerminalHandler(to_stderr=log_to_stderr)
    handler.setFormatter(_TerminalFormatter("%(message)s"))
    logger = logging.getLogger("vembed")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        return command()
    except VembedError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)  # a program that calls the command keeps its own logging
        logger.propagate = propagate


def quiet_libraries(*, with_datasets: bool = True) -> None:
    """Silence the progress bars of the libraries underneath; their warnings stay.

    Args:
        with_datasets: Whether the command reads hub sets; one that doesn't is spared a second of imports.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if with_datasets:
        import datasets

        datasets.disable_progress_bars()
