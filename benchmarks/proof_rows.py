"""What a proof finds: a row for each finding, written as JSON lines and as a Markdown table the moment it is known."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

State: TypeAlias = Literal["held", "FAILED", "measured", "skipped", "unfinished"]
"""Whether what must be true is; "measured" where there are only figures to read, "unfinished" where time ran out."""

NO_VERDICT = 75
"""Exit code where nothing failed and something wasn't finished: a busy machine, or a step that hangs."""

LONGEST_WORDS = 400
"""Most characters of a reason or an error in a row; the log has the whole of an error."""


class Skipped(Exception):  # noqa: N818 - no error: the proof continues
    """This machine, or what is installed on it, can't do a step; the message says why."""


class Unfinished(Exception):  # noqa: N818 - no error: the machine may only be busy
    """A program that a step started took too long; the message says which and how long."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a step runs."""

    device: str  # "cpu" or "cuda"
    folder: Path  # for what it writes

    @property
    def stack_file(self) -> Path:
        """File into which a step's process writes where it is, when it is asked."""
        return self.folder / "stack.txt"

    @property
    def is_small(self) -> bool:
        """Whether shapes are tiny: a CPU shows that the steps work, not how fast a GPU is."""
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a step found in one case."""

    case: str
    figures: dict[str, Any]
    held: bool | None = None  # None where there is nothing that must be true
    why_not: str = ""  # why the case can't run here; empty where it ran
    late: str = ""  # how long it was waited for; empty where it ended

    @property
    def state(self) -> State:
        """The word of its row."""
        if self.why_not:
            return "skipped"
        if self.late:
            return "unfinished"
        return "measured" if self.held is None else "held" if self.held else "FAILED"


@dataclass(frozen=True, slots=True)
class Step:
    """One part of the proof."""

    group: str
    name: str
    run: Callable[[Setting], Iterable[Finding]]
    seconds: int  # about what it takes on a GPU; with less time left it isn't begun
    needs: tuple[str, ...] = ()  # modules beside those of torch
    limit_seconds: int = 240  # it is ended after so long

    @property
    def missing(self) -> list[str]:
        """The modules that aren't installed."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the proof."""

    step: str
    case: str
    state: State
    figures: dict[str, Any]
    words: str = ""  # why it was skipped, or what the error was
    seconds: float = 0.0  # since the row before of the same step


WHEELS: Mapping[str, str] = {
    "PIL": "pillow",
    "Stemmer": "PyStemmer",
    "bm25s": "bm25s",
    "datasets": "datasets dill multiprocess xxhash pandas python-dateutil six",
    "faiss": "faiss-cpu",
    "jinja2": "jinja2 markupsafe",
    "matplotlib": "matplotlib contourpy cycler fonttools kiwisolver pyparsing python-dateutil six",
    "open_clip": "open_clip_torch timm ftfy wcwidth",
    "peft": "peft",
    "pyarrow": "pyarrow",
    "pydantic": "pydantic pydantic-core annotated-types typing-inspection",
    "pytrec_eval": "pytrec-eval-terrier",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "sentence_transformers": "sentence-transformers scikit-learn scipy joblib threadpoolctl",
    "transformers": "transformers tokenizers huggingface-hub regex pyyaml tqdm packaging",
    "accelerate": "accelerate psutil",
    "torchvision": "torchvision",
    "werkzeug": "werkzeug",
    "yaml": "pyyaml",
}
"""Module -> the packages that bring it to a machine with torch and what torch itself needs."""


def how_to_carry(modules: Iterable[str]) -> str:
    """Return the command that fetches the wheels of modules for this machine, on one with a network."""
    packages = dict.fromkeys(package for name in modules for package in WHEELS.get(name, name).split())
    python, machine = "{}.{}".format(*sys.version_info[:2]), platform.machine()
    tags = " ".join(f"--platform manylinux{version}_{machine}" for version in ("_2_28", "_2_27", "2014"))
    return (
        f"python -m pip download --no-deps --only-binary=:all: --python-version {python} {tags} "
        f"-d WHEELS {' '.join(packages)}"
    )


def unpack_wheels(wheels: Path, site: Path) -> None:
    """Install the wheels of a folder into another one, and let this process and its children import from there.

    Raises:
        SystemExit: There are none, or pip refuses one: it is of another Python, or of another kind of machine.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        sys.exit(f"--wheels {wheels}: no file there ends in .whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    done = subprocess.run([*pip, "--target", str(site), *map(str, files)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"--wheels {wheels}: {done.stderr.strip()}")
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


class Report:
    """Writes rows into a folder: `rows.jsonl` and `proof.md`, both whole after each row.

    Args:
        folder: Is made where it is missing; a proof in it is replaced.
        title: First line of the table's file.
    """

    def __init__(self, folder: Path, title: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._lines, self._table = folder / "rows.jsonl", folder / "proof.md"
        self._lines.write_text("", "utf-8")
        self._table.write_text(f"# {title}\n\n| step | case | | figures | s |\n|---|---|---|---|---|\n", "utf-8")

    def add(self, row: Row) -> None:
        """Write a row and print it."""
        self.rows.append(row)
        content = {name: getattr(row, name) for name in Row.__slots__}
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(content, default=str) + "\n")
        said = "; ".join(filter(None, [show_figures(row.figures), row.words[:LONGEST_WORDS]]))
        cells = (row.step, row.case, row.state, said, f"{row.seconds:.1f}")
        with self._table.open("a", encoding="utf-8") as table:
            table.write("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |\n")
        print(f"{row.state:9} {row.step}: {row.case}  {said}", flush=True)

    def close(self) -> int:
        """Write how many rows there are of each state.

        Returns:
            The exit code: 1 where something failed, NO_VERDICT where nothing did and something wasn't finished.
        """
        states = [row.state for row in self.rows]
        words: tuple[State, ...] = ("held", "FAILED", "measured", "skipped", "unfinished")
        summary = ", ".join(f"{states.count(word)} {word}" for word in words)
        with self._table.open("a", encoding="utf-8") as table:
            table.write(f"\n{summary}\n")
        print(summary)
        return 1 if "FAILED" in states else NO_VERDICT if "unfinished" in states else 0


def show_figures(figures: dict[str, Any]) -> str:
    """Return figures as words: `name 1.2, other 3`; bytes as GiB, seconds and ratios with three digits."""
    return ", ".join(f"{name.removesuffix('_bytes')} {_show(name, value)}" for name, value in figures.items())


def _show(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"({show_figures(value)})"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return f"{value / (1 << 30):.3g} GiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
