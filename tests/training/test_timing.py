"""The parts of a step, and how far ranks lie apart."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from vembed.distributed.ranks import Ranks
from vembed.gradcache.stopwatch import Stopwatch
from vembed.training.timing import RankMeter, peak_memory_bytes, seconds_of_parts, summarise

if TYPE_CHECKING:
    from kit.ranks import RankPool

CPU = torch.device("cpu")


def test_the_peak_of_memory_is_told_where_the_kernel_does_not_count_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """gVisor, in which many clouds run containers, has no such line."""
    expected = peak_memory_bytes(CPU)
    monkeypatch.setattr(Path, "read_text", lambda *_: "Name:\tpython\nVmRSS:\t1024 kB\n")
    assert expected / 2 < peak_memory_bytes(CPU) < 2**45


def test_the_stopwatch_adds_up_each_part_also_one_that_raises_and_begins_anew_when_read() -> None:
    watch, start = Stopwatch(CPU), time.perf_counter()
    for _ in range(2):
        with pytest.raises(RuntimeError), watch.part("encode"):  # noqa: PT012
            time.sleep(0.02)
            raise RuntimeError("out of memory")
    with watch.part("loss"):
        pass
    seconds = watch.read()
    assert seconds["encode"] >= 0.04
    assert seconds.keys() == {"encode", "loss"}
    assert sum(seconds.values()) <= time.perf_counter() - start
    assert watch.read() == {}


class Event:
    """A CUDA event whose work ends when the test says so."""

    clock = 0.0
    waited = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.done = False

    def record(self) -> None:
        Event.clock += 1.0
        self.at = Event.clock

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)

    def synchronize(self) -> None:
        Event.waited = True


def test_on_a_gpu_nothing_waits_and_what_is_not_finished_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []

    def event(enable_timing: bool) -> Event:
        made.append(Event(enable_timing))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited for the device"))
    watch = Stopwatch(torch.device("cuda"))
    with watch.part("encode"):
        pass
    with watch.part("update"):
        pass
    made[1].done = True
    assert watch.read() == {"encode": 1.0}, "the update still runs"
    made[3].done = True
    assert watch.read() == {"update": 1.0}
    assert not Event.waited


def test_the_row_of_a_step_has_its_parts_in_seconds() -> None:
    parts = {"encode": 0.5, "wait": 0.25}
    row = seconds_of_parts(parts, step_seconds=1.0, data_seconds=0.1, alone=False)
    assert row == {"step_seconds": 1.0, "data_seconds": 0.1, "encode_seconds": 0.5, "wait_seconds": 0.25}
    alone = seconds_of_parts(parts, step_seconds=1.0, data_seconds=0.1, alone=True)
    assert "wait_seconds" not in alone, "one process waits for nobody"


def test_one_process_has_nothing_to_compare() -> None:
    meter = RankMeter(Ranks(), CPU)
    meter.add({"step_seconds": 1.0, "encode_seconds": 0.5}, tokens=100, loss=0.7)
    by_rank, summary = meter.read()
    assert summary == {}
    assert by_rank["tokens"] == (100.0,)
    assert by_rank["loss"] == (0.7,)
    assert by_rank["peak_memory_bytes"][0] > 1e7
    assert "utilisation" not in by_rank, "a CPU has no such counter"
    assert meter.read()[0]["tokens"] == (0.0,), "each reading begins anew"


NUMBERS = {
    "step_seconds": (2.0, 2.0),
    "encode_seconds": (1.0, 1.8),
    "wait_seconds": (0.8, 0.0),
    "reduce_seconds": (0.1, 0.1),
    "tokens": (100.0, 300.0),
    "peak_memory_bytes": (5.0, 7.0),
}


def test_the_summary_says_how_far_processes_lie_apart() -> None:
    assert summarise(NUMBERS) == pytest.approx(
        {
            "token_imbalance": 1.5,
            "encode_imbalance": 1.8 / 1.4,
            "slowest_rank": 1,
            "largest_rank_memory_bytes": 7.0,
            "scaling_efficiency": 1 - (0.9 / 2 + 0.1 / 2) / 2,
        }
    )
    loads = summarise(NUMBERS | {"utilisation": (0.9, math.nan)})
    assert (loads["device_utilisation"], loads["least_device_utilisation"]) == (0.9, 0.9)


def read_uneven(rank: int) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    meter = RankMeter(Ranks.of_this_process(), CPU)
    for _ in range(3):
        meter.add({"step_seconds": 1.0, "encode_seconds": 0.25 + 0.5 * rank}, tokens=10 + 20 * rank, loss=1.0 + rank)
    return meter.read()


def test_every_rank_reads_the_numbers_of_all(two_ranks: RankPool) -> None:
    (first, summary), (second, same) = two_ranks.run(read_uneven)
    assert first == second
    assert summary == same
    assert first["tokens"] == (10.0, 30.0), "of a step"
    assert first["loss"] == (1.0, 2.0), "the latest, not the sum"
    assert summary["token_imbalance"] == 1.5
    assert summary["slowest_rank"] == 1
