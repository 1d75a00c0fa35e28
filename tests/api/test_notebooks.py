"""The notebooks of the documentation: they run as they stand, and show what they are stored with."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def shown(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Return the kinds of what each cell puts out, but for warnings; printed lines may come in several pieces."""
    kinds = []
    for cell in cells:
        own = []
        for output in cell.get("outputs", ()):
            if output.get("name") != "stderr":
                own += sorted(output.get("data", {output["output_type"]: None}))
        kinds.append([kind for kind, _ in groupby(own)])
    return kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran(path: Path) -> None:
    content = path.read_text("utf-8")
    cells = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert str(Path.home()) not in content
    assert "site-packages" not in content
    assert len(content) < 2**20


def test_the_first_model_takes_fifteen_lines_of_code() -> None:
    cells = json.loads((FOLDER / "first_model.ipynb").read_text("utf-8"))["cells"]
    code = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e .[dev]")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install -e .[dev]")
    import nbformat

    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.from_dict(stored)
    done = client.NotebookClient(fresh, timeout=500, kernel_name="python3").execute(cwd=str(tmp_path))
    assert shown(done.cells) == shown(nbformat.read(path, as_version=4).cells)
    assert {"text/html", "image/png"} <= {kind for kinds in shown(done.cells) for kind in kinds}
