"""Recipes of CONTRIBUTING.md as files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def recipe(name: str) -> str:
    """Return the code block of the page that begins with the comment `# NAME.py`."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if block.startswith(f"# {name}.py\n")]
    return code


def write_recipe(folder: Path, name: str) -> None:
    """Write the recipe NAME to a file of that name."""
    (folder / f"{name}.py").write_text(recipe(name))


def run_recipe(name: str) -> dict[str, Any]:
    """Run the recipe NAME in this process, under that name, and return what it defines."""
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(recipe(name), f"{name}.py", "exec", dont_inherit=True), scope)  # without annotations as texts
    return scope
