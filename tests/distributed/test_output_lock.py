"""One writer for each output folder: who is second is refused and harms nothing; who is killed holds nothing."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vembed.distributed.lock import LOCK_FILE, FolderInUseError, Writer, hold_output, machine_name
from vembed.errors import ExitCode, MachineError

HOLD = """
import os, sys, time
from pathlib import Path
from vembed.distributed.lock import hold_output

with hold_output(Path(sys.argv[1]), beside=sys.argv[2] == "beside"):
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds `tmp_path/out`, and has forked another one."""
    process = start(tmp_path / "out", "fork")
    yield process
    os.killpg(process.pid, signal.SIGKILL)  # with what it forked
    process.communicate()


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    """Start a process that holds a folder until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_process_is_refused_and_told_whom_it_met(other: subprocess.Popen[str], tmp_path: Path) -> None:
    before = contents(tmp_path)
    started = time.monotonic()
    with pytest.raises(FolderInUseError) as refused, hold_output(tmp_path / "out"):
        pass
    assert time.monotonic() - started < 10
    assert refused.value.exit_code == ExitCode.CONFIG
    written = json.loads((tmp_path / "out" / LOCK_FILE).read_text())
    for part in (f"process {other.pid} on {os.uname().nodename}", written["since"], str(tmp_path / "out"), " fork"):
        assert part in str(refused.value)
    assert contents(tmp_path) == before


def test_what_a_kill_leaves_is_taken_over_at_once_though_a_child_lives_on(
    other: subprocess.Popen[str], tmp_path: Path
) -> None:
    other.kill()
    other.wait()
    assert (tmp_path / "out" / LOCK_FILE).is_file()
    with hold_output(tmp_path / "out"):
        assert json.loads((tmp_path / "out" / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / "out").joinpath(LOCK_FILE).exists()


def test_a_writer_that_ends_leaves_nothing(tmp_path: Path) -> None:
    for beside in (False, True):
        with hold_output(tmp_path / "a" / "b", beside=beside):
            assert contents(tmp_path)
        assert not [*tmp_path.iterdir()]
    with hold_output(tmp_path / "a"):
        (tmp_path / "a" / "kept").touch()
    assert [*tmp_path.rglob("*")] == [tmp_path / "a", tmp_path / "a" / "kept"]


def test_reading_the_file_or_forking_drops_nothing(tmp_path: Path) -> None:
    with hold_output(tmp_path):
        contents(tmp_path)
        child = os.fork()
        if child == 0:
            raise_in_child(tmp_path)
        assert os.waitpid(child, 0)[1] == 0
        code = "import sys; from pathlib import Path; from vembed.distributed.lock import hold_output\n"
        code += "with hold_output(Path(sys.argv[1])): pass"
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
        assert f"process {os.getpid()} on" in done.stderr


def raise_in_child(folder: Path) -> None:
    """Be refused as any other process is, and leave."""
    try:
        with hold_output(folder):
            os._exit(1)
    except FolderInUseError:
        os._exit(0)
    os._exit(2)


def test_blocks_of_one_thread_are_one_and_another_thread_is_refused(tmp_path: Path) -> None:
    met: list[object] = []

    def second() -> None:
        try:
            with hold_output(tmp_path):
                met.append("held")
        except FolderInUseError as error:
            met.append(error)

    with hold_output(tmp_path):
        with hold_output(tmp_path):
            pass
        assert (tmp_path / LOCK_FILE).is_file()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert "another thread" in str(met[0])
    second()
    assert met[1] == "held"


def test_a_folder_that_is_replaced_as_a_whole_is_held_beside_its_place(tmp_path: Path) -> None:
    process = start(tmp_path / "out", "beside")
    with pytest.raises(FolderInUseError), hold_output(tmp_path / "out", beside=True):
        pass
    process.communicate("\n")
    with hold_output(tmp_path / "out", beside=True):
        assert not (tmp_path / "out").exists()
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_was_moved_or_deleted_meanwhile_ends_without_noise(tmp_path: Path) -> None:
    with hold_output(tmp_path / "out"):
        (tmp_path / "out").rename(tmp_path / "moved")
        with hold_output(tmp_path / "out" / "sub"):
            pass
    assert (tmp_path / "moved" / LOCK_FILE).is_file(), "it is where nobody asks for it, and held by nobody"
    with hold_output(tmp_path / "moved"):
        pass


def test_a_folder_that_cannot_be_written_is_an_error_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(MachineError, match=r"/file can't be written: it is a file\. Choose"),
        hold_output(tmp_path / "file"),
    ):
        pass
    with (
        pytest.raises(MachineError, match=rf"/in can't be written: {tmp_path}/file is a file\. Choose"),
        hold_output(tmp_path / "file" / "out" / "in"),
    ):
        pass
    (tmp_path / "out").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "out" / LOCK_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(MachineError, match="can't be written"), hold_output(tmp_path / "out"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_folder_that_cannot_be_looked_at_is_refused_each_time(tmp_path: Path) -> None:
    """As under a folder that this user may not enter: looking whether it is there is an error, too."""
    for _ in range(2):
        with (
            pytest.raises(MachineError, match=r"can't be written: File name too long\. Choose"),
            hold_output(tmp_path / ("x" * 300) / "out"),
        ):
            pass


def test_secrets_of_the_command_line_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "https://user:canary@host/model"])
    with hold_output(tmp_path):
        written = (tmp_path / LOCK_FILE).read_text()
    assert "host/model" in written
    assert "canary" not in written


def test_a_file_system_without_locks_is_warned_of_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / LOCK_FILE).write_text(Writer(host="far").to_text())  # of a run that was killed, or of one at work
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with hold_output(tmp_path):
            written = Writer.from_text((tmp_path / LOCK_FILE).read_text())
            assert written is not None
            assert written.pid == os.getpid()
            with hold_output(tmp_path):
                pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [
        f"{tmp_path} lies on a file system without locks: a second run that writes there would not be seen"
    ]
    assert not [*tmp_path.iterdir()]
    caplog.clear()
    with hold_output(tmp_path):
        pass
    assert not caplog.records


def test_a_writer_on_another_machine_is_told_with_the_file_to_delete(
    other: subprocess.Popen[str], tmp_path: Path
) -> None:
    path = tmp_path / "out" / LOCK_FILE
    for machine, is_told in (("another boot", True), (machine_name(), False)):
        path.write_text(replace(Writer(), host="far", machine=machine).to_text())
        with pytest.raises(FolderInUseError, match=" on far, since") as refused, hold_output(tmp_path / "out"):
            pass
        assert (f"if that machine is gone, delete {path}" in str(refused.value)) == is_told
    assert other.poll() is None


PUBLISH = """
import os, shutil, signal, sys
from pathlib import Path
from vembed.files import clean_beside, new_file, new_folder
from vembed.distributed.lock import hold_for_command

OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
output, words = Path("made/out"), ["--output", "made/out"]
count, last = 0, None

def command(words):
    work = output.with_name(".out.work")
    with hold_for_command(output, words) as is_whole:
        if is_whole:
            clean_beside(output)
        elif output.exists() and "--overwrite" not in words:
            return 2
        else:
            work.mkdir(parents=True, exist_ok=True)
            with new_folder(output) as folder:
                (folder / "content").write_text("whole")
        shutil.rmtree(work, ignore_errors=True)
    return 0

def hook(event, values):
    global count
    if event in OPERATIONS and last is not None and str(values[0]).find("made") >= 0:
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

def run(words, operation):
    global last
    child = os.fork()
    if child == 0:
        last = operation
        os._exit(command(words))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

sys.addaudithook(hook)
kept = "--overwrite" in sys.argv
for operation in range(1000):
    shutil.rmtree("made", ignore_errors=True)
    if kept:
        words = ["--output", "made/out", "--overwrite"]
        output.mkdir(parents=True)
        (output / "content").write_text("old")
    killed = run(words, operation)
    if killed == 0:
        break
    again = run(words, None)
    left = sorted(str(path) for path in Path("made").rglob("*"))
    other = run(["--other"], None)  # another command is refused, whatever stands there
    print(killed, again, left == ["made/out", "made/out/content"], (output / "content").read_text(), other)
"""


@pytest.mark.parametrize("words", [[], ["--overwrite"]])
def test_the_same_command_ends_well_wherever_it_was_killed(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PUBLISH, *words], cwd=tmp_path, check=True, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) > 12, "moments of a kill"
    assert set(lines) == {f"{-signal.SIGKILL} 0 True whole 2"}, lines
