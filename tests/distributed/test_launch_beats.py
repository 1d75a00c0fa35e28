"""Whom the beats of processes accuse, and where the main thread is seen to be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from vembed.distributed.failures import (
    Beat,
    ExitFiles,
    Failure,
    LastWords,
    ended_ranks,
    failed_in_collective,
    late_ranks,
    lateness_of,
    look,
    loss_of_store,
    read_failure,
    silence_of,
    silent_ranks,
    write_for_the_dead,
)
from vembed.distributed.process_env import ProcessEnv
from vembed.distributed.ranks import Ranks
from vembed.distributed.runtime import start_runtime
from vembed.distributed.shared_store import SharedStore, StoreLostError
from vembed.distributed.watchdog import Watchdog
from vembed.errors import MachineError

if TYPE_CHECKING:
    from rank_pool import RankPool


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


def test_the_messages_name_the_rank_its_host_and_its_place_and_all_that_share_its_fate() -> None:
    beats = dict(enumerate([beat(), beat(), beat()]))
    for failure in (silence_of([1, 2], beats), lateness_of([1, 2], beats, 600)):
        assert (failure.rank, failure.host, failure.code) == (1, "host", 5)
        assert "vembed/a.py:1 (f)" in failure.message
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


def test_the_loss_of_the_store_names_who_is_gone_and_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    beats = {0: beat(), 1: replace(beat(), pid=ended.pid)}
    words = LastWords()
    words.doing = "training"
    lost = loss_of_store(beats, own=0, is_orphan=True).with_advice(words)
    assert lost.message.endswith("and rank 1 on host are gone (killed from outside?); nothing was saved, and the same "
                                 "command starts again")  # fmt: skip
    assert lost.message.startswith("the launcher on ")
    words.checkpoint = Path("out/checkpoints/step-00000020")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    lost = loss_of_store({0: beat(), 1: beat()}, own=1, is_orphan=False).with_advice(words)
    assert (lost.code, lost.rank) == (5, 1)
    assert lost.message == (
        "the launcher at 10.0.0.1, or its machine or network, is gone (killed from outside?); resume continues from "
        "out/checkpoints/step-00000020"
    )
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert loss_of_store({}, own=1, is_orphan=False).message.startswith("rank 0 at 10.0.0.1, or its machine")


def test_torchs_errors_of_a_store_become_one_of_ours() -> None:
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    broken: Any = Broken()
    with pytest.raises(StoreLostError, match="can't be reached: Broken pipe"):
        SharedStore(broken, rank=0, world_size=2).has("first/1")


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
    assert read_failure(tmp_path / "launcher") == failure


def test_a_launcher_writes_for_processes_that_can_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, output = tmp_path / "launcher", tmp_path / "out"
    launcher.mkdir()
    output.mkdir()
    failure = Failure(5, 0, "a", "was ended by SIGKILL")
    write_for_the_dead(failure, launcher)
    assert list(output.iterdir()) == [], "the run had not begun to write"
    monkeypatch.setenv("VEMBED_EXIT_FOLDER", str(launcher))
    ExitFiles().own(output, is_main=True)
    write_for_the_dead(failure, launcher)
    assert Failure.from_json((output / "exit.json").read_text("utf-8")) == failure
