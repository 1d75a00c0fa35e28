"""Which folders an encoder can be written as.

Each family has a form of its own, the one that training writes. Another form is offered only where it gives the same
vectors: a folder that loads and embeds differently is worse than none.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from vembed.errors import ConfigError
from vembed.models.dual import DualEncoder
from vembed.models.families import family_of
from vembed.models.open_clip_encoder import OpenClipEncoder
from vembed.models.sentence_transformers_pictures import write_picture_pipeline
from vembed.models.text import TextEncoder
from vembed.models.vision import VisionEncoder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vembed.models.encoder import Encoder

Form: TypeAlias = Literal["sentence-transformers", "transformers", "open_clip", "vembed"]
"""The library that a folder is written for. Every one of them is loaded by vembed too."""

FORMS: tuple[Form, ...] = get_args(Form)

_TOKENIZER_FILE = "tokenizer_config.json"
_SOURCE_SETTINGS = ("is_local", "local_files_only", "name_or_path")


def forms_of(encoder: Encoder) -> tuple[Form, ...]:
    """Return the forms that an encoder can be written in, its own first."""
    if isinstance(encoder, TextEncoder):
        return (
            ("sentence-transformers",) if lost_in_transformers(encoder) else ("sentence-transformers", "transformers")
        )
    if isinstance(encoder, (DualEncoder, VisionEncoder)):
        return ("transformers", "sentence-transformers")
    if isinstance(encoder, OpenClipEncoder):
        return ("open_clip",)
    return ("vembed",)


def lost_in_transformers(encoder: TextEncoder) -> list[str]:
    """Return what a folder of transformers alone has no place for, in words; nothing where it says it all."""
    spec = encoder.spec
    usual = family_of(encoder.backbone.config).pooling
    facts = {
        f"{' + '.join(spec.pooling)} pooling (its family's is {usual})": spec.pooling != (usual,),
        "Dense layers": len(encoder.dense) > 0,
        "prompts": any(spec.prompts.values()),
        "embeddings that aren't of unit length": not spec.normalize,
        "lower-casing": spec.lower_case,
    }
    return [words for words, holds in facts.items() if holds]


def choose_form(encoder: Encoder, wanted: Form | Literal["auto"]) -> Form:
    """Return the form to write.

    Args:
        encoder: The encoder.
        wanted: A form, or "auto" for the family's own.

    Raises:
        ConfigError: The encoder can't be written so; the message names the nearest form that it can.
    """
    possible = forms_of(encoder)
    if wanted == "auto" or wanted in possible:
        return possible[0] if wanted == "auto" else wanted
    if possible[0] == "vembed":
        raise ConfigError(
            f"--format {wanted}: no library but vembed runs {encoder.name}; leave --format out for vembed's own form"
        )
    reason = f"{encoder.name} is a model of {possible[0]}"
    if isinstance(encoder, TextEncoder) and wanted == "transformers":
        lost = ", ".join(lost_in_transformers(encoder))
        reason = f"a folder of transformers has no place for what {encoder.name} needs: {lost}"
    elif isinstance(encoder, OpenClipEncoder):
        reason = f"{encoder.name} has the layers of open_clip, which {wanted} doesn't run"
    raise ConfigError(f"--format {wanted}: {reason}; write --format {possible[0]}")


def write_form(encoder: Encoder, form: Form, folder: Path) -> None:
    """Write an encoder.

    Args:
        encoder: The encoder, with the weights as they are to be stored.
        form: One of `forms_of(encoder)`.
        folder: Where to.
    """
    if isinstance(encoder, (DualEncoder, VisionEncoder)) and form == "sentence-transformers":
        write_picture_pipeline(encoder, folder)
    else:
        encoder.save(folder)
    if isinstance(encoder, TextEncoder) and form == "transformers":
        _leave_transformers_alone(encoder, folder)
    _forget_source(folder)


def _leave_transformers_alone(encoder: TextEncoder, folder: Path) -> None:
    """Take sentence-transformers' description out of a folder that is one of transformers too."""
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    for module in modules:
        if module["path"]:
            shutil.rmtree(folder / module["path"])
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    path = folder / _TOKENIZER_FILE
    _write_settings(path, json.loads(path.read_text("utf-8")) | {"model_max_length": encoder.max_length})


def _forget_source(folder: Path) -> None:
    """Take out of the tokenizer's settings what transformers notes there of the place that it was loaded from."""
    path = folder / _TOKENIZER_FILE
    if path.is_file():
        settings = json.loads(path.read_text("utf-8"))
        _write_settings(path, {key: value for key, value in settings.items() if key not in _SOURCE_SETTINGS})


def _write_settings(path: Path, settings: Mapping[str, object]) -> None:
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
