"""Parts of every command: lines on the terminal, errors as one message and an exit code, an output that is held."""

from __future__ import annotations

import atexit
import os
import select
import shlex
import signal
import sys
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from vembed.distributed.lock import hold_for_command
from vembed.distributed.process_env import process_env, refuse_copies
from vembed.distributed.signals import LeaveNow, StopSignal, stop_behind
from vembed.distributed.watchdog import LAUNCHER_FOLDER, UNEXPECTED_CODE, Watchdog
from vembed.errors import ConfigError, ExitCode, VembedError
from vembed.redact import redact
from vembed.registry import COMMANDS
from vembed.terminal import open_terminal, printed_lines, write_no_more

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType
    from typing import TypeAlias

    from vembed.distributed.runtime import Runtime
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


def command_line(called: str, words: Sequence[str]) -> str:
    """Return a command as one types it again, without secrets.

    Args:
        called: The program as it was called, e.g. "vembed merge".
    """
    return redact(shlex.join([*called.split(), *words]))


@contextmanager
def held_output(
    output: Path, words: Sequence[str], *, overwrite: bool, clean: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Hold an output that is written as a whole; yield whether it is finished already, and say so.

    It is where an earlier start of the same command was killed between its last write and its end.

    Args:
        overwrite: Whether the output is to be made again all the same.
        clean: Removes what the killed command left beside the output.
    """
    with hold_for_command(output, words) as is_whole:
        is_finished = is_whole and not overwrite
        if is_finished:
            clean()
            shown = redact(str(output))
            print(f"{shown} is whole: this command wrote it and was killed at its end; what it left is removed")
        yield is_finished


def run_with_output(
    body: Callable[[Runtime, StopSignal], None],
    held: Callable[[], AbstractContextManager[bool]],
    *,
    watchdog: Watchdog,
    advice: str,
) -> int:
    """Run the body of a command that one or several processes run together, with its output held by the first one.

    Args:
        body: The work; of several processes each one calls it.
        held: Holds the output and yields whether it is finished, as `held_output` does; it also refuses an output that
            can't be written. Only the first process enters it.
        advice: End of the message where a signal stops the command.
    """
    with ExitStack() as stack:
        is_launched = process_env().is_launched
        # One process asks before it imports torch, which takes seconds; several need torch to agree on the answer.
        if not is_launched and stack.enter_context(held()):
            return ExitCode.OK
        from vembed.distributed.runtime import shut_down, start_runtime

        quiet_libraries()
        runtime = start_runtime(deterministic=False, watchdog=watchdog)
        stop = stack.enter_context(StopSignal(advice=advice))
        if not (is_launched and runtime.ranks.from_first(lambda: stack.enter_context(held()))):
            # A signal reaches each process at another time: they agree at the next question, so that none waits alone.
            stack.enter_context(stop.asking(runtime.ranks.agreement(runtime.device)))
            body(runtime, stop)
    shut_down(watchdog)
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
    watchdog = watchdog or Watchdog()
    with stop or StopSignal(at_once=True):
        try:
            return _run(command, log_to_stderr=log_to_stderr, in_several=in_several, watchdog=watchdog)
        except LeaveNow as left:  # the signal came just before the command began, or just behind its end
            return _end(watchdog, left, code=left.exit_code, message=str(left), prefix="")
        finally:
            # What is registered last runs first when the interpreter ends, which takes libraries a second.
            atexit.unregister(_ignore_one_interrupt)
            atexit.register(_ignore_one_interrupt)


def _ignore_one_interrupt() -> None:
    """Ignore the next Ctrl-C: all is done, and a library that is interrupted in its end prints a traceback.

    Another one ends the process, should a library hang there.
    """
    signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_DFL))


def _run(command: Callable[[], int], *, log_to_stderr: bool, in_several: bool, watchdog: Watchdog) -> int:
    # The tokenizers' threads would deadlock in forked data workers; the library warns on each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        refuse_copies()
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
    # From here on errors end in one message and a code. Nothing of the interpreter's own is printed but for bugs.
    with printed_lines(to_stderr=log_to_stderr, errors_only=process.rank > 0):
        try:
            return _while_read(command)
        except KeyboardInterrupt as error:
            return _end(watchdog, error, code=ExitCode.INTERRUPTED, message="interrupted", prefix=prefix)
        except (Exception, LeaveNow) as error:
            # A signal that arrives within a library's call may come out as that library's error.
            left = stop_behind(error)
            if left is not None:
                return _end(watchdog, left, code=left.exit_code, message=f"{left}{watchdog.words}", prefix=prefix)
            if isinstance(error, VembedError):
                return _end(watchdog, error, code=error.exit_code, message=str(error), prefix=prefix)
            message = redact(f"{type(error).__name__}: {error}")
            # A bug. One process alone shows its traceback through the interpreter; of several, the one that failed
            # first shows it, and the others say whom they follow.
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
        if sys.stdout is None:
            raise
        # Asking costs nothing and writes nothing: a write would be the second SIGPIPE.
        poll = select.poll()
        poll.register(sys.stdout, 0)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise
        write_no_more(sys.stdout)
    return code


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
    # Each process would print the same warnings again.
    if process_env().rank > 0:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if transformers is not None:
            transformers.utils.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
