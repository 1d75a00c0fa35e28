"""Write the tables of docs/models.md from what the encoder classes state and what the plan predicts.

`python -m vembed.training.models_page` rewrites what is between the marks of the page and keeps the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import vembed
from vembed.config.schema import Config
from vembed.models.text_spec import PROMPT_FAMILIES
from vembed.plan.devices import parse_devices
from vembed.registry import ENCODERS, FAMILIES
from vembed.text import show_bytes, show_count
from vembed.training.planning import measured_model, plan_elsewhere

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vembed.models.encoder import Encoder

ROOT = Path(vembed.__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
SHAPES = ROOT / "configs" / "shapes"
DEVICES = "1xA100-80GB"
RECORDS = 50_000
END = "<!-- end of table -->"


def render_page(page: str, names: Iterable[str]) -> str:
    """Return the page with these of its tables written anew.

    Raises:
        ValueError: The page has no place for a table.
    """
    for name in names:
        begin = f"<!-- table of {name} -->"
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(END)
        if not mark:
            raise ValueError(f"the page has no table between {begin} and {END}")
        page = f"{before}{begin}\n\n{TABLES[name]()}\n\n{END}{after}"
    return page


def class_table() -> str:
    """Return a row for each of our encoder classes, in the order in which they are asked."""
    classes: list[type[Encoder]] = [ENCODERS.load(name) for name in ENCODERS.names() if name not in ENCODERS.plugins()]
    rows = [
        (about.models, about.decides, about.pooling, about.prompts, about.trainable, about.writes)
        for encoder_class in classes
        if (about := encoder_class.about) is not None
    ]
    return _table("Models|Chosen by|Pooling|Prompts|`trainable`|`model/` is written for", rows)


def prompt_table() -> str:
    """Return the prompts of the families that are known by name."""
    rows = [
        (family.name, ", ".join(sorted(family.types)), _quoted(family.query), _quoted(family.document))
        for family in PROMPT_FAMILIES
    ]
    return _table("Family|`model_type`|Query|Document", rows)


def family_table() -> str:
    """Return the vision-language families."""
    rows = []
    for kind in FAMILIES.names():
        family = FAMILIES.load(kind)
        count = family.most_image_tokens
        most = "set by its processor" if count is None else f"{count:,}"
        rows.append((family.name, kind, family.pooling, most, _quoted(family.instruction)))
    return _table("Family|`model_type`|Pooling|Most tokens of a picture|Instruction", rows)


def memory_table() -> str:
    """Return what the plan predicts for each shape, which takes a minute."""
    devices = parse_devices(DEVICES)
    rows = []
    for path in sorted(SHAPES.glob("*.json")):
        config = Config(model_name=str(path))
        made = plan_elsewhere(config, devices, shape=None, num_records=RECORDS)
        taken = made.bytes_per_device
        rows.append(
            (
                f"`{path.stem}`",
                show_count(measured_model(config, devices.machine(1)).num_parameters),
                f"{made.way}{'' if made.fits else ', too large'}",
                show_bytes(taken.parameters),
                show_bytes(taken.gradients + taken.optimizer),
                show_bytes(taken.activations + taken.loss),
                show_bytes(taken.total),
            )
        )
    return _table("Shape|Parameters|Way|Weights|Gradients and optimizer|Activations|Total", rows)


TABLES = {"classes": class_table, "prompts": prompt_table, "families": family_table, "memory": memory_table}


def _table(heads: str, rows: Iterable[tuple[str, ...]]) -> str:
    columns = heads.split("|")
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in [columns, *cells]]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])


def _quoted(prompt: str) -> str:
    return f"`{prompt!r}`" if prompt else ""


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text("utf-8"), TABLES), "utf-8")
