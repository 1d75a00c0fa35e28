"""The shape of the house: imports run downward, every room says what lives in it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vembed"
LINT = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")

needs_lint = pytest.mark.skipif(LINT is None, reason="import-linter is not installed: pip install -e .[dev]")


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the import contracts of a tree."""
    assert LINT is not None
    return subprocess.run(
        [LINT, "--no-cache"], cwd=root, capture_output=True, text=True, env={"PYTHONPATH": str(root)}, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package with its contracts, to plant mistakes in."""
    shutil.copytree(PACKAGE, tmp_path / "vembed", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(root: Path, module: str, line: str) -> None:
    path = root / module
    text = path.read_text("utf-8")
    path.write_text(text.replace("\nimport ", f"\n{line}\nimport ", 1) if "\nimport " in text else f"{text}\n{line}\n")
    assert line in path.read_text("utf-8")


@needs_lint
def test_imports_run_downward() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@needs_lint
@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("vembed/losses/base.py", "import vembed.training.loop", "Imports run downward only"),
        ("vembed/config/schema.py", "import torch", "Configuration, plan and errors need no torch"),
        ("vembed/gradcache/engine.py", "import vembed.config.schema", "read Config"),
        ("vembed/training/loop.py", "import accelerate", "Only distributed imports accelerate"),
    ],
)
def test_a_planted_import_breaks_its_contract(copy: Path, module: str, line: str, contract: str) -> None:
    plant(copy, module, line)
    done = lint(copy)
    assert done.returncode != 0
    broken = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(contract in text for text in broken), done.stdout


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


PAGE = ROOT / "docs" / "architecture.md"
ROOM = re.compile(r"^\| `(\w+)/` \|.*\|([^|]*)\|$", re.MULTILINE)
"""A row of the table of rooms in docs/architecture.md: the room, and in the last column the rooms that it imports."""


def drawn_imports() -> dict[str, list[str]]:
    """Return the table of rooms: room -> the rooms that it imports, both from top to bottom.

    A cell is `none`, a list of rooms, or `all below`, which may be followed by `except` and a list of rooms.
    """
    cells = {room: cell.strip() for room, cell in ROOM.findall(PAGE.read_text("utf-8"))}
    rooms = list(cells)
    drawn = {}
    for number, (room, cell) in enumerate(cells.items()):
        written = re.fullmatch(r"(?:(?P<all>all below)(?: except )?)?(?P<names>\w+(?:, \w+)*)?", cell)
        assert written, f"{room}: {cell}"
        names = [] if written["names"] in (None, "none") else written["names"].split(", ")
        below = rooms[number + 1 :]
        assert set(names) <= set(below), f"{room}: {cell}"
        drawn[room] = [other for other in below if (other in names) != bool(written["all"])]
    return drawn


def imports(path: Path) -> set[str]:
    """Return what a file imports when it runs: modules, and names of modules. Imports for types alone don't count."""
    tree = ast.parse(path.read_text("utf-8"))
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in for_types:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {f"{module}{alias.name}" for alias in node.names}
    return names


def test_the_picture_of_the_house_has_every_arrow_between_rooms_and_no_other() -> None:
    drawn = drawn_imports()
    rooms = list(drawn)
    assert set(rooms) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    taken: dict[str, set[str]] = {room: set() for room in rooms}
    for path in sources():
        room = path.relative_to(PACKAGE).parts[0]
        if room in taken:
            modules = {tuple(name.split(".")[:2]) for name in imports(path)}
            taken[room] |= {other for other in rooms if other != room and ("vembed", other) in modules}
    expected = {room: [other for other in rooms if other in taken[room]] for room in rooms}
    assert drawn == expected


def test_the_rooms_stand_in_the_order_of_the_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    rooms = list(drawn_imports())
    assert [layer for layer in layers if layer.removeprefix("vembed.") in rooms] == [f"vembed.{room}" for room in rooms]


def test_the_page_names_every_file_beside_the_rooms() -> None:
    text = PAGE.read_text("utf-8")
    beside = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert {name for name in beside if f"/vembed/{name})" not in text and f"`{name}`" not in text} == set()


def test_the_page_leads_to_the_file_of_each_arrow_and_question() -> None:
    text = PAGE.read_text("utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| (?:\d|.*\?)", line)]
    arrows = {number for line in rows for number in re.findall(r"\d+", line.split("|")[1])}
    assert arrows == {str(number) for number in range(1, 18)} == set(re.findall(r"─(\d+)─▶", text))
    for line in rows:
        assert len(re.findall(r"\]\(\.\./vembed/", line)) == 1, line


def test_every_folder_says_what_lives_in_it() -> None:
    folders = {path.parent for path in sources()}
    assert len(folders) > 10
    for folder in sorted(folders):
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8")))
        assert docstring, folder


def test_every_module_and_public_function_has_a_docstring_and_annotations() -> None:
    for path in sources():
        tree = ast.parse(path.read_text("utf-8"))
        assert ast.get_docstring(tree) or not tree.body, path
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.returns is not None, f"{path}:{node.lineno} {node.name}"


def test_losses_and_the_engine_know_no_ranks() -> None:
    for room in ("losses", "gradcache"):
        for path in (PACKAGE / room).rglob("*.py"):
            text = path.read_text("utf-8")
            assert "import torch.distributed" not in text, path
            assert "from torch import distributed" not in text, path
            assert "from torch.distributed" not in text, path


TALKS_TO_ITS_WORKERS = "vembed/training/loading.py"
"""A message between a process and one that it forked is pickled, as multiprocessing does; no file ever is."""


def test_no_file_is_pickled_and_no_error_is_swallowed() -> None:
    for path in sources():
        may_pickle = path.as_posix().endswith(TALKS_TO_ITS_WORKERS)
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = {alias.name for alias in node.names}
                assert may_pickle or not modules & {"pickle", "dill", "cloudpickle"}, path
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno} catches everything"
                assert not all(isinstance(each, ast.Pass) for each in node.body), f"{path}:{node.lineno}"
