"""Write the page of the models from what the encoder classes state and what the plan predicts.

`python -m vembed.training.models_page > docs/models.md`
"""

from __future__ import annotations

import sys
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
    from vembed.models.encoder import Encoder

SHAPES = Path(vembed.__file__).parents[1] / "configs" / "shapes"
DEVICES = "1xA100-80GB"
RECORDS = 50_000

MEMORY = "## Memory"

_INTRODUCTION = """# Models

<!-- Written by `python -m vembed.training.models_page`; change the classes, not this file. -->

`model_name` decides: the classes below are asked in this order, and the first whose files or name it is takes it.
`encoder_mode` refuses a model of another family. `configs/models/` has a tested example of each.
"""


def render_models() -> str:
    """Return the text of docs/models.md."""
    lines = [
        render_classes(),
        MEMORY,
        "",
        f"What the plan predicts on {DEVICES} with the default of every key, for the shapes in `configs/shapes`: the",
        "way that it takes, which fills the memory with graphs that it needn't compute again. Activations go as",
        "gradients come, so that together is less than the sum.",
        "",
        "| Shape | Parameters | Way | Weights | Gradients and optimizer | Activations | Together |",
        "|---|---|---|---|---|---|---|",
    ]
    devices = parse_devices(DEVICES)
    for path in sorted(SHAPES.glob("*.json")):
        config = Config(model_name=str(path))
        made = plan_elsewhere(config, devices, shape=None, num_records=RECORDS)
        size = measured_model(config, devices.machine(1))
        taken = made.bytes_per_device
        cells = (
            f"`{path.stem}`",
            show_count(size.num_parameters),
            f"{made.way}{'' if made.fits else ', too large'}",
            show_bytes(taken.parameters),
            show_bytes(taken.gradients + taken.optimizer),
            show_bytes(taken.activations + taken.loss),
            show_bytes(taken.total),
        )
        lines.append(_row(*cells))
    return "\n".join([*lines, ""])


def render_classes() -> str:
    """Return the page without the memory, which takes a minute to predict."""
    classes: list[type[Encoder]] = [ENCODERS.load(name) for name in ENCODERS.names() if name not in ENCODERS.plugins()]
    lines = [
        _INTRODUCTION,
        "| Models | What decides | Pooling | Prompts | `trainable` | `model/` is written for |",
        "|---|---|---|---|---|---|",
    ]
    for encoder_class in classes:
        about = encoder_class.about
        if about is not None:
            cells = [about.models, about.decides, about.pooling, about.prompts]
            lines.append(_row(*cells, about.trainable, about.writes))
    lines += [
        "",
        "`trainable: text+projection` freezes the image tower alone, `all-projection` the projections; other sums and",
        "differences are in [adapters.md](adapters.md). Low-rank adapters (`use_lora`) go into the transformer layers",
        "of all but the tables and the tiny ones; with `lora_towers: text+projection` into the projections too.",
        "",
        "## Prompts known by name",
        "",
        "Used where neither `query_prompt` and `document_prompt` nor a file of the model says which.",
        "",
        "| Family | Types | Query | Document |",
        "|---|---|---|---|",
    ]
    for family in PROMPT_FAMILIES:
        types = ", ".join(sorted(family.types))
        lines.append(_row(family.name, types, _quoted(family.query), _quoted(family.document)))
    lines += [
        "",
        "## Vision-language families",
        "",
        "| Family | `model_type` | Pooling | Most tokens of a picture | Instruction |",
        "|---|---|---|---|---|",
    ]
    for kind in FAMILIES.names():
        vision_language = FAMILIES.load(kind)
        count = vision_language.most_image_tokens
        most = "its processor's" if count is None else f"{count:,}"
        instruction = _quoted(vision_language.instruction)
        lines.append(_row(vision_language.name, kind, vision_language.pooling, most, instruction))
    return "\n".join([*lines, ""])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _quoted(prompt: str) -> str:
    return f"`{prompt!r}`" if prompt else ""


if __name__ == "__main__":
    sys.stdout.write(render_models())
