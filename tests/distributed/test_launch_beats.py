"""Whom the beats of processes accuse, and where the main thread is seen to be."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import RankPool

from vembed.distributed import watchdog as watchdog_module
from vembed.distributed.launch import conclude
from vembed.distributed.lock import machine_name
from vembed.distributed.process_env import ProcessEnv
from vembed.distributed.ranks import Ranks
from vembed.distributed.runtime import start_runtime
from vembed.distributed.watchdog import (
    Beat,
    ExitFiles,
    Failure,
    StoreLostError,
    Watchdog,
    ended_ranks,
    failed_in_collective,
    late_ranks,
    look,
    silence_of,
    silent_ranks,
)  # fmt: skip
from vembed.errors import MachineError


def beat(number: int = 5, *, waits: bool = True, patient: bool = False, collectives: int = 9) -> Beat:
    return Beat(number, "host", "vembed/a.py:1 (f)", waits, patient, collectives, os.getpid(), "here")


def test_a_process_that_told_nothing_between_two_looks_is_silent() -> None:
    before, after = {0: beat(3), 1: beat(7), 2: beat(4)}, {0: beat(6), 1: beat(7), 2: beat(4)}
    assert silent_ranks(before, after, own=0) == [1, 2]
    assert silent_ranks(before, after, own=2) == [1]
    assert silent_ranks(before, {rank: beat(each.number + 1) for rank, each in before.items()}, own=0) == []


@pytest.mark.parametrize(
    ("beats", "late"),
    [
        ([beat(), beat(waits=False), beat()], [1]),
        ([beat(), beat(waits=False), beat(waits=False)], [1, 2]),
        ([beat(), beat(), beat()], []),
        ([beat(), beat(collectives=8), beat()], [1]),
        ([beat(waits=False), beat(waits=False)], []),
        ([beat(waits=False, patient=True), beat(waits=False, patient=True)], []),
    ],
)
def test_late_is_who_is_in_no_collective_or_in_an_earlier_one(beats: list[Beat], late: list[int]) -> None:
    assert late_ranks(dict(enumerate(beats))) == late


def test_a_process_that_the_system_knows_no_more_has_ended_and_only_the_own_system_is_asked() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive, ended = beat(), replace(beat(), pid=dead.pid)
    assert ended_ranks({0: alive, 1: ended}, own=0) == [1]
    assert ended_ranks({0: alive, 1: alive}, own=0) == []
    assert ended_ranks({0: alive, 1: replace(ended, pid_namespace="there")}, own=0) == []
    nameless = {0: replace(alive, pid_namespace=""), 1: replace(ended, pid_namespace="")}
    assert ended_ranks(nameless, own=0) == [], "a system that doesn't say which it is can't be compared"


def test_the_message_names_the_rank_its_host_and_its_line_and_all_that_share_its_fate() -> None:
    beats = dict(enumerate([beat(), beat(), beat()]))
    failure = silence_of([1, 2], beats)
    assert (failure.rank, failure.host, failure.code) == (1, "host", 5)
    assert str(failure).startswith("rank 1 on host: stopped answering, last seen in vembed/a.py:1 (f)")
    assert "rank 2" in failure.message
    assert "rank" not in silence_of([1], beats).message


def test_the_main_thread_is_seen_from_another_one_and_moves_with_its_collectives() -> None:
    seen: list[Any] = []

    def watch() -> None:
        seen.append(look(seen[-1] if seen else None))

    for _ in range(2):
        thread = threading.Thread(target=watch)
        thread.start()
        thread.join()
    first, second = seen
    assert not first.waits
    assert second.since == first.since, "it stands at the same place"
    assert look(second, num_collectives=1).since > first.since


def error_of(function: Any) -> Exception:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
        return error
    raise AssertionError("it did not fail")


def fail_in_and_out_of_a_collective(rank: int) -> tuple[bool, bool]:
    ranks = Ranks.of_this_process()
    wrong: Any = "no tensor"
    inside = error_of(lambda: ranks.sum_(wrong))
    outside = error_of(lambda: 1 / 0)
    assert ranks.sum_(torch.ones(1)).item() == 2
    return failed_in_collective(inside), failed_in_collective(outside)


@pytest.mark.slow
def test_an_error_in_a_collective_is_told_from_one_elsewhere(two_ranks: RankPool) -> None:
    assert two_ranks.run(fail_in_and_out_of_a_collective) == [(True, False)] * 2


def test_the_first_claim_is_the_runs_failure_and_the_second_hears_of_it() -> None:
    store = dist.HashStore()
    watchdogs = [Watchdog() for _ in range(2)]
    for rank, watchdog in enumerate(watchdogs):
        watchdog.start(rank, 2, store, timeout_seconds=60)
    try:
        assert watchdogs[0].first_failure() is None
        mine, other = Failure(75, 1, "b", "stopped"), Failure(5, 0, "a", "lost the others")
        assert watchdogs[1].claim(mine) == (mine, True)
        assert watchdogs[0].claim(other) == (mine, False)
        assert watchdogs[0].first_failure() == mine
    finally:
        for watchdog in watchdogs:
            watchdog.stop(together=False)


class BreakableStore:
    """A store whose keeper can end."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        if self.is_lost:
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)


@pytest.mark.parametrize(
    ("kept_by", "is_ended", "rank", "words"),
    [
        ("rank 0", False, 0, "stopped answering, last seen in vembed/a.py:1 (f)"),
        ("rank 0", True, 0, "stopped answering, last seen in vembed/a.py:1 (f)"),
        ("the launcher", True, 0, "stopped answering, last seen in vembed/a.py:1 (f)"),
        ("the launcher", False, 1, "the launcher at 10.0.0.1 stopped answering"),
    ],
)
def test_the_loss_of_the_store_names_who_is_gone_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, kept_by: str, is_ended: bool, rank: int, words: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(kept_by == "the launcher"))
    monkeypatch.setattr(watchdog_module, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(threading, "Timer", lambda *_: threading.Thread(target=int))  # it would end this process
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    first = replace(beat(), pid=ended.pid if is_ended else os.getpid(), pid_namespace=machine_name())
    store: Any = BreakableStore()
    store.set("beat/0", json.dumps(asdict(first)))
    watchdog = Watchdog()
    watchdog.start(1, 2, store, timeout_seconds=60)
    watchdog.words.doing, watchdog.words.checkpoint = "training", Path("out/checkpoints/step-00000020")
    store.is_lost = True
    error = error_of(lambda: watchdog.await_first())
    assert isinstance(error, StoreLostError)
    assert "can't be reached: Broken pipe" in str(error)
    reported = watchdog.report(error, code=error.exit_code, message=str(error))
    assert reported is not None
    failure, is_ours = reported
    assert (failure.code, failure.rank, is_ours) == (5, rank, True)
    assert failure.message.startswith(words)
    assert failure.message.endswith("; resume continues from out/checkpoints/step-00000020")


def test_a_launcher_that_is_gone_before_its_processes_met_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = ProcessEnv(1, 2, local_rank=1, local_world_size=2, main_port=port)
    for name, value in (process.environment() | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(MachineError, match=r"rank 1 of 2: the launcher at 127\.0\.0\.1 is gone .* start the run again"):
        start_runtime(deterministic=False)
    assert time.monotonic() - start < 20


def test_rank_0_which_may_keep_the_store_leaves_last() -> None:
    store = dist.HashStore()
    left: list[int] = []

    def leave(rank: int) -> None:
        watchdogs[rank].stop()
        left.append(rank)

    watchdogs = [Watchdog() for _ in range(3)]
    for rank, watchdog in enumerate(watchdogs):
        watchdog.start(rank, 3, store, timeout_seconds=60)
    others = [threading.Thread(target=leave, args=(rank,)) for rank in (1, 2)]
    for thread in others:
        thread.start()
    time.sleep(0.25)  # they wait for it now, and look again within a tenth of a second
    leave(0)
    assert left[-1] == 0
    assert sorted(left) == [0, 1, 2]


def test_exit_json_goes_only_into_a_folder_that_is_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEMBED_EXIT_FOLDER", str(tmp_path / "launcher"))
    failure = Failure(3, 1, "b", "no text", "2026-01-01T00:00:00+00:00")
    other, own, missing = tmp_path / "other", tmp_path / "own", tmp_path / "missing"
    for folder in (tmp_path / "launcher", other, own):
        folder.mkdir()
    (other / "plan.json").write_text("of another run")
    (own / "train.log").write_text("of this run")
    for folder in (other, own, missing):
        files = ExitFiles()
        files.expect(folder)
        if folder == own:
            files.own(own, is_main=True)
        files.write(failure, to_folder=True)
    assert not (other / "exit.json").exists()
    assert Failure.from_json((own / "exit.json").read_text("utf-8")) == failure
    assert Failure.from_json((missing / "exit.json").read_text("utf-8")) == failure
    assert [Failure.from_json(path.read_text()) for path in (tmp_path / "launcher").glob("*.json")] == [failure]


def test_a_launcher_writes_for_processes_that_can_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, output = tmp_path / "launcher", tmp_path / "out"
    launcher.mkdir()
    output.mkdir()
    failure = Failure(5, 0, "a", "was ended by SIGKILL")
    assert conclude(launcher, failure) == 5
    assert list(output.iterdir()) == [], "the run had not begun to write"
    monkeypatch.setenv("VEMBED_EXIT_FOLDER", str(launcher))
    ExitFiles().own(output, is_main=True)
    assert conclude(launcher, failure) == 5
    assert Failure.from_json((output / "exit.json").read_text("utf-8")) == failure
    assert capsys.readouterr().err == 2 * "error: rank 0 on a: was ended by SIGKILL\n"
    ExitFiles().write(Failure(3, 1, "b", "no text"), to_folder=False)
    assert conclude(launcher, failure) == 3, "they could say it themselves"
    assert not capsys.readouterr().err
