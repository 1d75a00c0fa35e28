"""Signals in real processes: the flag, the second request, who else has a use for a signal, forks and threads."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import vembed.checkpoint.tensors as checkpoint_tensors
from vembed.checkpoint.manager import CheckpointManager
from vembed.distributed.signals import AGAIN_SECONDS, SAME_SECONDS, LeaveNow, StopSignal, alone
from vembed.errors import PreemptedError
from vembed.files import fsync_path

# Prints "ready", then loops in the way that a trainer does. Exit 10: left by the flag; 11: left by poll, with its code.
LOOP = """
import sys, time
from vembed.errors import PreemptedError
from vembed.distributed.signals import StopSignal

mode = sys.argv[1]
with StopSignal() as stop:
    print("ready", flush=True)
    for _ in range(2000):
        time.sleep(0.01)
        if mode == "flag" and stop.requested:
            sys.exit(10)
        if mode == "poll":
            try:
                stop.poll()
            except PreemptedError as error:
                print(error, flush=True)
                sys.exit(error.exit_code)
        if mode == "deaf" and stop.requested:
            print("first", flush=True)
            mode = "deaf for good"
"""


def start(mode: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, mode], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_the_first_signal_sets_a_flag_and_the_loop_ends_by_itself(number: signal.Signals) -> None:
    process = start("flag")
    process.send_signal(number)
    assert process.wait(timeout=10) == 10


def test_poll_leaves_a_long_loop_with_the_exit_code_of_a_preemption() -> None:
    process = start("poll")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 75
    assert "SIGTERM" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGTERM, signal.SIGTERM, 75), (signal.SIGINT, signal.SIGINT, 130), (signal.SIGTERM, signal.SIGINT, 130)],
)
def test_the_second_signal_leaves_at_once(first: signal.Signals, second: signal.Signals, code: int) -> None:
    process = start("deaf")
    process.send_signal(first)
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"
    if second == signal.SIGTERM:
        time.sleep(SAME_SECONDS)
    process.send_signal(second)
    _, errors = process.communicate(timeout=10)  # else it runs on for ever
    assert process.returncode == code
    assert f"{second.name} again" in errors


def test_a_sigterm_that_arrives_twice_is_one_request() -> None:
    """A batch system sends it to every process of a job, and the launcher sends it on."""
    process = start("deaf")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "SIGTERM again" not in errors


def test_signals_of_two_kinds_are_one_request_when_they_arrive_together() -> None:
    """SLURM sends its own to the launcher, which sends it on, and to every process as well."""
    with StopSignal() as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        with pytest.raises(PreemptedError, match=r"^stopped by SIGUSR1$"):
            stop.poll()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_is_ignored_or_used_by_others_stays_theirs(number: signal.Signals) -> None:
    heard: list[int] = []
    for theirs in (signal.SIG_IGN, lambda received, frame: heard.append(received)):
        before = signal.signal(number, theirs)
        try:
            with StopSignal(at_once=True) as stop:
                os.kill(os.getpid(), number)
                assert signal.getsignal(number) is theirs
                assert not stop.requested
        finally:
            signal.signal(number, before)
    assert heard == [number]


def test_faulthandler_keeps_its_signal_although_python_does_not_know_of_it(tmp_path: Path) -> None:
    with (tmp_path / "stacks.txt").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
            with StopSignal() as stop:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert not stop.requested
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert "test_faulthandler_keeps" in (tmp_path / "stacks.txt").read_text("utf-8")


def test_before_anything_asks_a_signal_leaves_at_once_but_not_out_of_the_handling_of_an_error() -> None:
    done = []

    def body() -> None:
        with StopSignal(at_once=True) as stop:
            with stop.asking(alone):
                os.kill(os.getpid(), signal.SIGHUP)
                assert stop.requested
            stop._received = None
            try:
                raise OSError("an error that is told")
            except OSError:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(3 * AGAIN_SECONDS)
                done.append("told")
            time.sleep(3 * AGAIN_SECONDS)
            done.append("and continued")

    with pytest.raises(LeaveNow, match=r"^stopped by SIGTERM$") as caught:
        body()
    assert done == ["told"]
    assert caught.value.exit_code == 75
    assert not isinstance(caught.value, Exception), "no library catches it"
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)]


def test_handlers_are_restored_when_the_context_ends_even_by_an_exception() -> None:
    before = handlers()

    def body() -> None:
        with StopSignal():
            assert handlers() != before
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        body()
    assert handlers() == before


def test_without_a_signal_nothing_is_requested_and_the_flag_stays_once_set() -> None:
    with StopSignal() as stop:
        assert not stop.requested
        stop.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.requested
        with pytest.raises(PreemptedError, match="SIGTERM") as caught:
            stop.poll()
    assert caught.value.exit_code == 75
    assert stop.requested


def test_a_signal_in_the_middle_of_a_save_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[Path] = []

    def signal_and_sync(path: Path) -> None:
        if not signalled:  # a second one would leave at once
            os.kill(os.getpid(), signal.SIGTERM)
        signalled.append(path)
        fsync_path(path)

    monkeypatch.setattr(checkpoint_tensors, "fsync_path", signal_and_sync)
    manager = CheckpointManager(tmp_path)
    stamp: dict[str, Any] = {"config_hash": "c0ffee", "strategy": "single", "world_size": 1}
    with StopSignal() as stop:
        outcome = manager.save(4, tensors={}, state={"epoch": 1}, stamp=stamp, best=False)
        assert stop.requested
    assert signalled
    assert outcome
    loaded = manager.load("auto")
    assert loaded is not None
    assert loaded.state == {"epoch": 1}


def test_a_signal_to_any_rank_stops_all() -> None:
    asked: list[bool] = []

    def other_rank_was_signalled(ok: bool) -> bool:
        asked.append(ok)
        return False

    with StopSignal(agree=other_rank_was_signalled) as stop:
        assert stop.requested
        with pytest.raises(PreemptedError, match="another process"):
            stop.poll()
    assert asked == [True, True]


def test_outside_the_main_thread_it_does_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[bool] = []

    def body() -> None:
        with StopSignal() as stop:
            seen.append(stop.requested)
            stop.poll()

    with caplog.at_level("INFO"):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGTERM) is before
    assert "Not in the main thread" in caplog.text


def test_a_forked_worker_leaves_ctrl_c_to_its_parent_and_dies_of_sigterm() -> None:
    with StopSignal() as stop:
        read_end, write_end = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            os.write(write_end, b"alive")
            time.sleep(20)
            os._exit(0)
        os.close(write_end)  # or a worker that died would leave the read waiting
        assert os.read(read_end, 5) == b"alive"
        os.kill(worker, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(worker, 0)[1]) == signal.SIGTERM
        assert not stop.requested
