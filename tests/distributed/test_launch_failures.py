"""Several processes for real: started, failing in every way, and what is left of the run then."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vembed.distributed.launch import launch

JOB = Path(__file__).with_name("launch_job.py")
ROOT = Path(__file__).parents[2]
MISSED_SECONDS = 6 + 75  # the timeout, and the 30 s that torch's launcher gives a stopped process before it kills it


@dataclass(frozen=True)
class Fault:
    """One way to fail, and what becomes of the run."""

    code: int  # exit code of the launch
    rank: int | None  # whose failure exit.json holds; None leaves no file
    message: str = ""  # a part of it
    stderr: tuple[str, ...] = ()  # parts of what is said; {host} is the machine's name
    silent: tuple[str, ...] = ()  # what isn't said
    timeout_seconds: int = 600  # of a collective
    within: float = 300  # seconds for the whole launch, on a busy machine
    num_processes: int = 2


SILENCE = "stopped answering, last seen in vembed/"
FAULTS = {
    "error": Fault(
        3, 1, "rows.jsonl:3: the text is empty",
        ("error: rank 1 on {host}: rows.jsonl:3: the text is empty", "rank 0: leaves after the failure of rank 1"),
        ("Traceback",),
    ),
    "bug": Fault(1, 1, "ZeroDivisionError: a bug", ("ZeroDivisionError: a bug",)),
    "differ": Fault(2, 0, "batch_size: 16 on rank 1", ("8 on rank 0",)),
    "kill": Fault(5, 1, SILENCE, ("error: rank 1 on {host}: " + SILENCE,), timeout_seconds=6, within=MISSED_SECONDS),
    "stop": Fault(5, 1, SILENCE, ("error: rank 1 on {host}: " + SILENCE,), timeout_seconds=6, within=MISSED_SECONDS),
    "hang": Fault(
        5, 1, "last seen in vembed/entrypoints/command.py", ("error: rank 1 on {host}: " + SILENCE,),
        timeout_seconds=6, within=MISSED_SECONDS,
    ),
    "kill alone": Fault(5, 0, "stopped answering", within=25),  # neither the timeout nor the launcher's patience
    "work alone": Fault(0, None, timeout_seconds=6),
    "nothing": Fault(0, None, num_processes=3),
}  # fmt: skip
"""What the job does at its fourth step -> what becomes of the run."""

ONCE = {"bug": "Traceback", "differ": "the processes of this run differ"}
"""What is said once, although several processes could say it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_fails_on_one_process_ends_on_all_with_one_cause(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, folder = FAULTS[name], tmp_path / "out"
    folder.mkdir()
    (folder / "exit.json").write_text("of an earlier attempt")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = [name, str(folder), str(fault.timeout_seconds)]
    started = time.monotonic()
    code = launch(JOB, words, num_processes=fault.num_processes, called="python run.py", stop_seconds=30)
    seconds = time.monotonic() - started
    out, err = capfd.readouterr()
    assert code == fault.code, err
    ranks = {line.split(",")[0] for line in out.splitlines() if f" of {fault.num_processes}" in line}
    assert ranks == {f"rank {rank} of {fault.num_processes}" for rank in range(fault.num_processes)}
    assert seconds < fault.within
    if name == "work alone":
        assert seconds > 2 * fault.timeout_seconds, "longer than a collective may wait"
    if name == "nothing":
        assert [path.name for path in folder.iterdir()] == ["done"], "the others waited for the last"
    if fault.rank is None:
        assert not (folder / "exit.json").exists()
        return
    found: dict[str, Any] = json.loads((folder / "exit.json").read_text("utf-8"))
    assert (found["code"], found["rank"]) == (fault.code, fault.rank)
    assert fault.message in found["message"]
    assert found["host"] == os.uname().nodename
    for part in fault.stderr:
        assert part.format(host=found["host"]) in err
    for part in fault.silent:
        assert part not in err
    if name in ONCE:
        assert err.count(ONCE[name]) == 1, "all say the same: once is enough"
