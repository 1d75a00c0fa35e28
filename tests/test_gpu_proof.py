"""The proof of benchmarks/: its rows, its time, the packages that it needs; slow: all of it on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

STEPS = """
import os, time
from proof_rows import Finding, Skipped, Unfinished

def good(setting):
    yield Finding("measured", {"peak_bytes": 3 << 29, "tokens/s": 123456})
    yield Finding("true", {"error": 1e-12}, held=True)
    yield Finding("impossible", {}, why_not="no | such kernel")

def bad(setting):
    yield Finding("before", {}, held=True)
    raise RuntimeError("no kernel\\nand more")

def wrong(setting):
    yield Finding("untrue", {"error": 0.5}, held=False)

def unable(setting):
    raise Skipped("no GPU")

def late(setting):
    yield Finding("one", {}, late="2 ranks weren't done after 120 s")
    raise Unfinished("no step 3 after 200 s")

def carried(setting):
    import carried_package
    yield Finding("version", {"version": carried_package.VERSION}, held=carried_package.VERSION == 3)

def bare(setting):
    import a_package_that_nobody_has

def moved(setting):
    import vembed.no_such_room

def dies(setting):
    yield Finding("before", {}, held=True)
    os._exit(9)

def hangs(setting):
    yield Finding("before", {}, held=True)
    time.sleep(600)
"""


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "proof_cases.py").write_text(STEPS)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(tmp_path))
    import gpu_proof

    return gpu_proof


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]


def states(rows: list[dict[str, Any]]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(row["state"])
    return found


def run_steps(proof: Any, folder: Path, names: str, *, seconds: float) -> int:
    import proof_cases

    report = proof.Report(folder, "Proof")
    steps = [proof.Step("first", name, getattr(proof_cases, name), 5) for name in names.split()]
    proof.prove(steps, report, "cpu", time.monotonic() + seconds)
    code: int = report.close()
    return code


@pytest.mark.slow
def test_what_fails_is_a_row_and_the_next_step_goes_on(
    proof: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_steps(proof, tmp_path, "bad wrong unable bare moved dies good", seconds=60) == 1
    rows = rows_in(tmp_path)
    assert states(rows) == {
        "bad": ["held", "FAILED"],
        "wrong": ["FAILED"],
        "unable": ["skipped"],
        "bare": ["skipped"],
        "moved": ["FAILED"],
        "dies": ["held", "FAILED"],
        "good": ["measured", "held", "skipped"],
    }
    words = {row["step"]: row["words"] for row in rows}
    assert words["bad"] == "RuntimeError: no kernel (proof_cases.py:12)"
    assert words["bare"] == "not installed: a_package_that_nobody_has; see --wheels"
    assert words["dies"] == "its process ended with code 9"
    assert "no kernel" in capfd.readouterr().err, "the whole error is in the log"
    table = (tmp_path / "proof.md").read_text("utf-8")
    assert "| good | measured | measured | peak 1.5 GiB, tokens/s 123,456 |" in table
    assert "no / such kernel" in table
    assert table.endswith("\n3 held, 4 FAILED, 1 measured, 3 skipped, 0 unfinished\n")


@pytest.mark.slow
def test_a_busy_machine_fails_no_row(proof: Any, tmp_path: Path) -> None:
    assert run_steps(proof, tmp_path, "late", seconds=60) == 75
    rows = rows_in(tmp_path)
    assert states(rows) == {"late": ["unfinished", "unfinished"]}
    assert [row["words"] for row in rows] == ["2 ranks weren't done after 120 s", "no step 3 after 200 s"]


def test_a_step_names_all_that_it_lacks_before_it_starts(
    proof: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import proof_cases

    step = proof.Step("feed", "lacks two", proof_cases.wrong, 5, ("json", "one_that_nobody_has", "another_one"))
    report = proof.Report(tmp_path, "Proof")
    proof.prove([step], report, "cpu", time.monotonic() + 60)
    assert report.close() == 0
    assert rows_in(tmp_path)[0]["words"] == "not installed: one_that_nobody_has, another_one; see --wheels"
    monkeypatch.setattr(proof, "STEPS", (step,))
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", "--list"])
    assert proof.main() == 0
    carry = capsys.readouterr().out.splitlines()[-1]
    assert carry.endswith("-d WHEELS one_that_nobody_has another_one; then --wheels WHEELS")
    assert f"--python-version {sys.version_info[0]}.{sys.version_info[1]} " in carry


def test_the_first_group_takes_150_seconds(proof: Any) -> None:
    assert sum(step.seconds for step in proof.STEPS if step.group == "first") <= 150
    assert {step.group for step in proof.STEPS} == set(proof.GROUPS)


def wheel(folder: Path, python: str) -> None:
    """Write the wheel of a package of one file."""
    name = "carried_package-3"
    with zipfile.ZipFile(folder / f"{name}-{python}-none-any.whl", "w") as archive:
        archive.writestr("carried_package.py", "VERSION = 3\n")
        archive.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried-package\nVersion: 3\n")
        tags = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {python}-none-any\n"
        archive.writestr(f"{name}.dist-info/WHEEL", tags)
        archive.writestr(f"{name}.dist-info/RECORD", "")


@pytest.mark.slow
def test_carried_wheels_are_used_by_the_steps(proof: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("PYTHONPATH", "")
    wheel(tmp_path, "py3")
    proof.unpack_wheels(tmp_path, tmp_path / "site")
    assert run_steps(proof, tmp_path, "carried", seconds=60) == 0
    child = "import carried_package; print(carried_package.VERSION)"
    assert subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout == "3\n"


def test_a_wheel_of_another_python_is_refused_by_name(proof: Any, tmp_path: Path) -> None:
    wheel(tmp_path, "cp27")
    with pytest.raises(SystemExit, match=r"carried_package-3-cp27-none-any\.whl is not a supported wheel"):
        proof.unpack_wheels(tmp_path, tmp_path / "site")
    with pytest.raises(SystemExit, match=r"no file there ends in \.whl"):
        proof.unpack_wheels(tmp_path / "site", tmp_path / "site")


def test_what_stands_for_keys_has_their_defaults(proof: Any) -> None:
    from memory_step import ADAMW
    from proof_models import LORA

    from vembed.models.keys import AdapterKeys
    from vembed.plan.keys import OptimisationKeys

    for stand_in, section in ((ADAMW, OptimisationKeys()), (LORA, AdapterKeys())):
        assert vars(stand_in) == {name: getattr(section, name) for name in vars(stand_in)}


FIVE = ("torch", "numpy", "transformers", "safetensors", "accelerate")
ELSEWHERE = ("pydantic", "PIL", "pyarrow", "faiss", "peft", "open_clip", "datasets", "sentence_transformers")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python that has five packages and what they require, as links to those that are installed here.

    Pydantic is left out: only a command-line tool of a newer huggingface_hub requires it, and imports it late.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    done, todo = {"pydantic", "pydantic-core"}, [*FIVE]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in done:
            continue
        done.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # optional here, or of another platform
            continue
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / part).is_symlink():
                (site / part).symlink_to(distribution.locate_file(part))
        needs = map(Requirement, distribution.requires or ())
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return folder / "bin" / "python"


def run_bare(python: Path, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, *map(str, words)], env=environment, text=True, check=False, **options)


def test_engine_losses_and_text_encoders_need_five_packages(bare_python: Path) -> None:
    modules = "gradcache.engine losses.infonce losses.sigmoid models.text models.adapters training.optimizer"
    modules += " training.loading distributed.fsdp"
    imports = "; ".join(f"import vembed.{module}" for module in modules.split())
    absent = f"import importlib.util as u; print([n for n in {ELSEWHERE} if u.find_spec(n)])"
    done = run_bare(bare_python, "-c", f"{imports}; {absent}", capture_output=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.slow
def test_the_time_ends_a_step_that_hangs_and_skips_the_rest(proof: Any, tmp_path: Path) -> None:
    started = time.monotonic()
    assert run_steps(proof, tmp_path, "hangs good", seconds=20) == 75
    assert time.monotonic() - started < 60
    rows = rows_in(tmp_path)
    assert states(rows) == {"hangs": ["held", "unfinished"], "good": ["skipped"]}
    assert re.fullmatch(r"it wasn't done after \d+ s; it stood at proof_cases\.py:\d+ < .*", rows[1]["words"])
    assert rows[2]["words"].startswith("no time: 0 s are left")


@pytest.mark.slow
def test_a_proof_in_which_all_held_ends_well(proof: Any, tmp_path: Path) -> None:
    assert run_steps(proof, tmp_path, "good unable", seconds=60) == 0


@pytest.mark.slow
def test_every_step_runs_on_a_cpu_or_says_why_not(proof: Any, bare_python: Path, tmp_path: Path) -> None:
    """Each step that needs no more than five packages runs with these alone, the others with all."""
    words = (BENCHMARKS / "gpu_proof.py", "--device", "cpu", "--minutes", "30", "--output")
    further = [step.name for step in proof.STEPS if not {*step.needs} <= {*FIVE}]
    assert run_bare(bare_python, *words, tmp_path / "five").returncode == 0
    all_words = map(str, (sys.executable, *words, tmp_path / "all", "--only", *further))
    assert subprocess.run([*all_words], cwd=tmp_path, check=False).returncode == 0
    with_five, with_all = rows_in(tmp_path / "five"), rows_in(tmp_path / "all")
    assert [row for row in (*with_five, *with_all) if row["state"] == "FAILED"] == []
    lacking = {row["step"]: row["words"] for row in with_five if "not installed" in row["words"]}
    assert list(lacking) == further
    for step in proof.STEPS:
        if step.name in lacking:
            assert all(module in lacking[step.name] for module in step.needs if module in ELSEWHERE), step.name
    assert list(states(with_five)) == [step.name for step in proof.STEPS]
    found = {**states(with_five), **states(with_all)}
    for name in ("exactness", "LoRA", "one rank", "out of memory", "plan", "two ranks", "killed rank", "commands"):
        assert "held" in found[name], name
    assert "held" in found["loader against step"]
    for name in ("waits and busy share", "retention at equal memory", "sweep BERT", "sweep Qwen3"):
        assert "measured" in found[name], name
    idle = [name for name in found if set(found[name]) == {"skipped"}]
    assert idle == ["8B", *(name for name in found if name.startswith("sweep") and "compile" in name)]
