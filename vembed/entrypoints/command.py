"""What every command shares: logging to the terminal, and errors as one message and an exit code."""

from __future__ import annotations

import os
import select
import shlex
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.distributed.process_env import process_env
from vembed.distributed.signals import LeaveNow, StopSignal, stop_behind
from vembed.distributed.watchdog import LAUNCHER_FOLDER, UNEXPECTED_CODE, Watchdog
from vembed.errors import ConfigError, ExitCode, VembedError
from vembed.redact import redact
from vembed.registry import COMMANDS
from vembed.terminal import open_terminal, printed_lines, write_no_more

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import TextIO, TypeAlias

    from vembed.distributed.watchdog import Failure

    Command: TypeAlias = Callable[..., int]


def register_command(function: Command) -> Command:
    """Add a command under the name of its function, "_" as "-"; also a decorator.

    `vembed --plugins MODULE NAME ...` calls it as `function(arguments, program=...)`: the words behind its name, and
    how it was called, for its help. It returns an exit code. The list of commands shows the first line of its
    docstring.

    Raises:
        ConfigError: The name is taken.
    """
    COMMANDS.register(function.__name__.replace("_", "-"), function, module=function.__module__)
    return function


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what names a configuration: CONFIG, --config and --config_override."""
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML or JSON file")
    parser.add_argument(
        "--config", dest="config_option", type=Path, metavar="CONFIG", help="the configuration as an option instead"
    )
    parser.add_argument(
        "--config_override",
        "--config-override",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="settings that win over the file, e.g. batch_size=32 learning_rate=1e-5",
    )


def config_path(parsed: argparse.Namespace) -> Path | None:
    """Return the file that `add_config_arguments` was given, if any.

    Raises:
        ConfigError: It is given twice.
    """
    if parsed.config is not None and parsed.config_option is not None:
        raise ConfigError(f"the configuration is given twice: {parsed.config} and --config {parsed.config_option}")
    path: Path | None = parsed.config or parsed.config_option
    return path


def command_line(called: str, words: Sequence[str]) -> str:
    """Return a command as one types it again, without secrets.

    Args:
        called: The program as it was called, e.g. "vembed merge".
    """
    return redact(shlex.join([*called.split(), *words]))


def say_whole(output: Path) -> ExitCode:
    """Print that an earlier start of the command wrote the output, and was killed before it had cleaned up."""
    print(f"{redact(str(output))} is whole: this command wrote it and was killed at its end; what it left is removed")
    return ExitCode.OK


def run_command(
    command: Callable[[], int],
    *,
    log_to_stderr: bool = False,
    in_several: bool = False,
    watchdog: Watchdog | None = None,
    stop: StopSignal | None = None,
) -> int:
    """Run a command and return its exit code.

    Of several processes that run it together only the first prints what it logs; errors come from every one of them,
    with its rank, and the run's first failure is told by the process that it is of.

    Args:
        log_to_stderr: Whether log lines leave the standard output alone.
        watchdog: Tells the other processes how this one fails; the command's body starts it.
        stop: Turns signals into a way out; the command's body asks it where there is something to save.
    """
    with stop or StopSignal(at_once=True):
        return _run(command, log_to_stderr=log_to_stderr, in_several=in_several, watchdog=watchdog or Watchdog())


def _run(command: Callable[[], int], *, log_to_stderr: bool, in_several: bool, watchdog: Watchdog) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        process = process_env()
        if process.world_size > 1 and not in_several:
            several = f"{process.launcher} started {process.world_size} processes"
            raise ConfigError(f"{several}, and this command runs in one")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if process.world_size > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is named here, not by torch's sockets
    prefix = f"rank {process.rank}: " if process.world_size > 1 else ""
    with printed_lines(to_stderr=log_to_stderr, errors_only=process.rank > 0):
        try:
            return _while_read(command)
        except KeyboardInterrupt as error:
            return _end(watchdog, error, code=ExitCode.INTERRUPTED, message="interrupted", prefix=prefix)
        except (Exception, LeaveNow) as error:
            left = stop_behind(error)
            if left is not None:
                return _end(watchdog, left, code=left.exit_code, message=f"{left}{watchdog.words}", prefix=prefix)
            if isinstance(error, VembedError):
                return _end(watchdog, error, code=error.exit_code, message=str(error), prefix=prefix)
            message = redact(f"{type(error).__name__}: {error}")
            reported = watchdog.report(error, code=UNEXPECTED_CODE, message=message)
            if reported is None:
                sys.excepthook = _show_traceback
                raise
            if reported[0].message == message:
                _show_traceback(type(error), error, error.__traceback__)
            return _say(*reported, message, prefix)


def _while_read(command: Callable[[], int]) -> int:
    """Run a command; end it without a word and with code 0 once the reader of its output, such as head, has closed it.

    Raises:
        BrokenPipeError: Another pipe than the standard output broke.
    """
    code: int = ExitCode.OK
    try:
        code = command()
        print(end="", flush=True)  # otherwise the interpreter complains at its exit
    except BrokenPipeError:
        if not _is_closed(sys.stdout):
            raise
        write_no_more(sys.stdout)
    return code


def _is_closed(stream: TextIO | None) -> bool:
    """Return whether a stream is a pipe without a reader."""
    if stream is None:
        return False
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of a bug, without the secrets that its message may hold."""
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _end(watchdog: Watchdog, error: BaseException, *, code: int, message: str, prefix: str) -> int:
    """Say why the command ends and return the exit code."""
    message = redact(message)
    reported = watchdog.report(error, code=code, message=message)
    if reported is not None:
        return _say(*reported, message, prefix)
    if isinstance(error, LeaveNow) and (LAUNCHER_FOLDER in os.environ or process_env().rank > 0):
        return code  # who started this process says it, once for all of them
    _tell("interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {prefix}{message}")
    return code


def _say(first: Failure, is_ours: bool, message: str, prefix: str) -> int:
    """Say what ended a run of several processes and return its exit code: of its first failure, on every process."""
    if is_ours:
        _tell(f"error: {first}")
    elif first.message != message:  # otherwise all failed alike, and the first has said so
        _tell(f"{prefix}leaves after the failure of rank {first.rank}")
    return first.code


def _tell(line: str) -> None:
    with open_terminal(sys.stderr):
        print(line, file=sys.stderr, flush=True)


def quiet_libraries() -> None:
    """Silence the progress bars of the libraries underneath; their warnings stay, once for all processes.

    They read the environment when they are imported, which not every command does; one that is there already is told.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers follows it as well
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    hub, transformers, datasets = map(sys.modules.get, ("huggingface_hub", "transformers", "datasets"))
    if hub is not None and hub.constants.HF_HUB_DISABLE_PROGRESS_BARS is None:  # the user's own word has priority
        hub.utils.disable_progress_bars()
    if transformers is not None:
        transformers.utils.logging.disable_progress_bar()
    if datasets is not None:
        datasets.disable_progress_bars()
    if process_env().rank > 0:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if transformers is not None:
            transformers.utils.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
