"""What trackers are told at the end of a run, and what TensorBoard shows of it."""

from __future__ import annotations

import errno
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracker_contract import SECRET, tell_end

from vembed.training.tensorboard import TensorBoardTracker
from vembed.training.trackers import Tracker, closing, open_trackers, tell, track_start

if TYPE_CHECKING:
    from pathlib import Path


class Memory(Tracker):
    """Remembers the tables and texts that it gets."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[Any, Any]] = {}
        self.texts: dict[str, str] = {}
        self.values: dict[str, float] = {}
        self.ends: list[object] = []

    def log_text(self, step: int, name: str, text: str) -> None:
        self.texts[name] = text

    def log_result(self, step: int, values: Any) -> None:
        self.values |= values

    def log_table(self, step: int, name: str, columns: Any, rows: Any) -> None:
        self.tables[name] = (columns, rows)

    def log_stop(self, error: BaseException) -> None:
        self.ends.append(error)

    def close(self) -> None:
        self.ends.append("closed")


def test_the_end_tells_examples_with_small_pictures_and_main_metrics_of_each_set_and_no_secret(tmp_path: Path) -> None:
    tracker = Memory()
    track_start([tracker], 0, plan=f"model https://me:{SECRET}@host/m")
    tell_end([tracker], tmp_path)
    columns, rows = tracker.tables["examples"]
    assert columns == [
        *("kind", "query id", "query", "ndcg@10 before", "ndcg@10 after", "relevant picture"),
        *("rank before", "rank after", "found first picture", "found first is"),
    ]
    assert [row[:5] for row in rows] == [
        ["Improved most", "q1", "a blue | ball, token=***", 0.25, 0.75],
        [rows[1][0], "q2", "blue", 0.5, 0.5],
    ]
    wanted, found = rows[0][5], rows[0][8]
    assert [picture.size for picture in (wanted, found)] == [(160, 100), (160, 100)]
    assert (wanted.getpixel((50, 50)), found.getpixel((50, 50))) == ((0, 0, 255), (255, 0, 0))
    assert (rows[0][6:8], rows[0][9]) == (["2", "2"], "not relevant")
    assert ["balls", "test", "ndcg@10", 0.375, 0.625, 0.25] in tracker.tables["results"][1]
    assert "ndcg@10 0.375 -> 0.625" in tracker.texts["verdict"]
    assert SECRET not in str((tracker.tables, tracker.texts))
    of_first = {"baseline/ndcg@10": 0.375, "final/ndcg@10": 0.625, "baseline/recall@1": 0.5, "final/recall@1": 0.5}
    of_second = {"test-1/baseline/spearman": 0.2, "test-1/final/spearman": 0.3}  # the metric that decides there
    assert tracker.values == pytest.approx(of_first | of_second)


def test_tensorboard_shows_configuration_plan_result_tables_and_pictures(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "tensorboard", config={"seed": 3, "data": None})
    assert not tracker.folder.exists()
    track_start([tracker], 0, plan="plan\n  batch  256")
    tell_end([tracker], tmp_path)
    tracker.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()

    def text(tag: str) -> str:
        (event,) = shown.Tensors(f"{tag}/text_summary")
        return str(event.tensor_proto.string_val[0].decode())

    assert text("configuration") == "| key | value |\n| --- | --- |\n| seed | 3 |\n| data |  |"
    assert text("plan") == "```\nplan\n  batch  256\n```"
    assert "ndcg@10 0.375 -> 0.625" in text("verdict")
    assert "| balls | test | ndcg@10 | 0.375 | 0.625 | 0.25 |" in text("results")
    first = text("examples").splitlines()[2]
    assert "| a blue &#124; ball, token=*** |" in first
    assert "| examples/1/relevant picture |" in first
    (picture,) = shown.Images("examples/1/relevant picture")
    assert (picture.width, picture.height, picture.step) == (160, 100, 8)
    assert [(each.step, each.value) for each in shown.Scalars("result/final/ndcg@10")] == [(8, 0.625)]


def test_a_disk_that_fills_up_under_tensorboard_is_one_warning_and_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    trackers: list[Tracker] = [TensorBoardTracker(tmp_path)]
    tell(trackers, "log", 1, {"loss": 1.0})
    failed = threading.Event()

    def fail(self: object, data: bytes) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", fail)
    tell(trackers, "log", 2, {"loss": 1.0})
    assert failed.wait(20)
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    tell(trackers, "close")
    (record,) = caplog.records
    assert record.message.startswith("Tracker tensorboard failed and is switched off; training continues")
    assert record.message.endswith("OSError: [Errno 28] No space left on device")
    assert len(shown) == 1, "of the thread that isn't TensorBoard's"


def test_an_error_reaches_every_tracker_before_it_is_closed() -> None:
    trackers, error = [Memory(), Memory()], KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), closing(trackers):
        raise error
    with closing(trackers[:1]):
        pass
    assert [tracker.ends for tracker in trackers] == [[error, "closed", "closed"], [error, "closed"]]


def test_a_model_that_no_tracker_takes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    open_trackers("tensorboard", tmp_path, resume_step=0, config={"log_model": False})
    assert not caplog.records
    open_trackers("tensorboard", tmp_path, resume_step=0, config={"log_model": True})
    assert "log_model: no tracker of report_to takes a model" in caplog.text
