"""The errors that a user sees, each with the exit code that scripts can act on.

A message says what is wrong, where (file:line, key), why, and the fix. Entrypoints print it without a traceback;
everything else that escapes is a bug of ours and keeps its traceback.
"""

from enum import IntEnum

from vembed.redact import redact
from vembed.text import cut

MOST_SHOWN = 5_000
"""Characters of one line of a message: a value of a broken file may have millions."""


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    CONFIG = 2
    DATA = 3
    NON_FINITE = 4
    ENVIRONMENT = 5
    # EX_TEMPFAIL of sysexits.h: the same command may succeed later, so a scheduler may start it again.
    PREEMPTED = 75
    # 128 + SIGINT, as a shell reports a program that Ctrl-C ended.
    INTERRUPTED = 130


class VembedError(Exception):
    """Base of the errors that are the user's to fix.

    Messages quote settings and data: secrets are left out here, once for all, what could steer a terminal becomes
    visible, and a line that is too long is cut.
    """

    exit_code = ExitCode.ENVIRONMENT

    def __init__(self, *parts: object) -> None:
        # Line by line: a long value in one line must not hide the lines behind it.
        shown = (
            "\n".join(cut(line, MOST_SHOWN) for line in redact(part).split("\n")) if isinstance(part, str) else part
            for part in parts
        )
        super().__init__(*shown)


class ConfigError(VembedError):
    """A key, a value or a combination that can't be run; the message lists every problem at once."""

    exit_code = ExitCode.CONFIG


class DataError(VembedError):
    """A missing, broken or inconsistent data file; the message names file:line, column and id."""

    exit_code = ExitCode.DATA


class NonFiniteError(VembedError):
    """A loss, gradient, weight or embedding that is NaN or infinite."""

    exit_code = ExitCode.NON_FINITE


class MachineError(VembedError):
    """The machine or its software can't do it: disk, memory, a missing package, an unreachable hub."""

    exit_code = ExitCode.ENVIRONMENT


class PreemptedError(VembedError):
    """A signal asked the run to stop; what could be saved is saved."""

    exit_code = ExitCode.PREEMPTED
