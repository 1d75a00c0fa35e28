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
from vembed.models.vision_language_families import FAMILIES
from vembed.plan.devices import parse_devices
from vembed.registry import ENCODERS
from vembed.text import show_bytes, show_count
from vembed.training.planning import measured_model, plan_elsewhere

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    return "\n".join([render_classes(), *_memory()])


def render_classes() -> str:
    """Return the page without the memory, which takes a minute to predict."""
    return "\n".join([_INTRODUCTION, *_classes(), *_prompts(), *_vision_language()])


def _classes() -> Iterator[str]:
    classes: list[type[Encoder]] = [ENCODERS.load(name) for name in ENCODERS.names() if name not in ENCODERS.plugins()]
    yield "| Models | What decides | Pooling | Prompts | `trainable` | `model/` is written for |"
    yield "|---|---|---|---|---|---|"
    for each in classes:
        about = each.about
        if about is not None:
            cells = [about.models, about.decides, about.pooling, about.prompts]
            yield _row(*cells, about.trainable, about.writes)
    yield ""
    yield "`trainable: text+projection` freezes the image tower alone, `all-projection` the projections; other sums and"
    yield "differences are in [adapters.md](adapters.md). Low-rank adapters (`use_lora`) go into the transformer layers"
    yield "of all but the tables and the tiny ones; with `lora_towers: text+projection` into the projections too."
    yield ""


def _prompts() -> Iterator[str]:
    yield "## Prompts known by name"
    yield ""
    yield "Used where neither `query_prompt` and `document_prompt` nor a file of the model says which."
    yield ""
    yield "| Family | Types | Query | Document |"
    yield "|---|---|---|---|"
    for family in PROMPT_FAMILIES:
        types = ", ".join(sorted(family.types))
        yield _row(family.name, types, _quoted(family.query), _quoted(family.document))
    yield ""


def _vision_language() -> Iterator[str]:
    yield "## Vision-language families"
    yield ""
    yield "| Family | `model_type` | Pooling | Most tokens of a picture | Instruction |"
    yield "|---|---|---|---|---|"
    for kind, family in FAMILIES.items():
        most = "its processor's" if family.most_image_tokens is None else f"{family.most_image_tokens:,}"
        yield _row(family.name, kind, family.pooling, most, _quoted(family.instruction))
    yield ""


def _memory() -> Iterator[str]:
    yield MEMORY
    yield ""
    yield f"What the plan predicts on {DEVICES} with the default of every key, for the shapes in `configs/shapes`: the"
    yield "way that it takes, which fills the memory with graphs that it needn't compute again. Activations go as"
    yield "gradients come, so that together is less than the sum."
    yield ""
    yield "| Shape | Parameters | Way | Weights | Gradients and optimizer | Activations | Together |"
    yield "|---|---|---|---|---|---|---|"
    devices = parse_devices(DEVICES)
    for path in sorted(SHAPES.glob("*.json")):
        config = Config(model_name=str(path))
        made = plan_elsewhere(config, devices, shape=None, num_records=RECORDS)
        size = measured_model(config, devices.machine(1))
        taken = made.bytes_per_device
        yield _row(
            f"`{path.stem}`",
            show_count(size.num_parameters),
            f"{made.way}{'' if made.fits else ', too large'}",
            show_bytes(taken.parameters),
            show_bytes(taken.gradients + taken.optimizer),
            show_bytes(taken.activations + taken.loss),
            show_bytes(taken.total),
        )
    yield ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _quoted(prompt: str) -> str:
    return f"`{prompt!r}`" if prompt else ""


if __name__ == "__main__":
    sys.stdout.write(render_models())
