"""Which models of open_clip can be loaded: names, folders, and what is refused before open_clip reads anything."""

from __future__ import annotations

import difflib
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.errors import ConfigError
from vembed.models import checked_files
from vembed.models.checked_files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.models.hub import ModelFiles

OPEN_CLIP_PREFIX = "open_clip:"
CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
SCHEMES = ("hf-hub:", "local-dir:")


def is_open_clip_folder(folder: Path | None) -> bool:
    """Return whether a folder is one of open_clip and not of transformers too."""
    return folder is not None and (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def config_of(files: ModelFiles) -> dict[str, Any]:
    """Return the model_cfg that open_clip knows for a name or finds in a folder."""
    import open_clip

    name = files.name.removeprefix(OPEN_CLIP_PREFIX)
    if is_open_clip_folder(files.folder):
        name = f"local-dir:{files.folder}"
    elif "://" not in name and not name.startswith(SCHEMES):
        name = name.partition(":")[0]
    config: dict[str, Any] | None = open_clip.get_model_config(name)
    if config is None:
        raise ConfigError(f"open_clip has no model {name!r}")
    return config


def check_tokenizer(open_clip: Any, tokenizer: Any, config: dict[str, Any], files: ModelFiles) -> None:
    """Refuse a tokenizer that open_clip chose by the model's name: from a saved folder it would choose another one."""
    named = config.get("text_cfg", {}).get("hf_tokenizer_name")
    if not named and not isinstance(tokenizer, open_clip.SimpleTokenizer):
        raise ConfigError(
            f"{files.name} takes {type(tokenizer).__name__}, which its configuration doesn't name: once saved, it "
            f"would load with another tokenizer. Use the model's Hugging Face form"
        )


def check_name(open_clip: Any, name: str, tag: str, files: ModelFiles) -> None:
    """Refuse a name or a tag that open_clip doesn't know, and weights that are a pickle."""
    known = open_clip.list_models()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(f"open_clip has no model {name!r}; did you mean {OPEN_CLIP_PREFIX}{close[0]}?")
    if not tag:
        return
    pickled = Path(tag).suffix != ".safetensors"
    if not Path(tag).is_file():
        tags = open_clip.list_pretrained_tags_by_model(name)
        if tag not in tags:
            listed = ", ".join(tags) or "none"
            raise ConfigError(f"open_clip has no weights {tag!r} of {name}; it has: {listed}")
        pickled = not open_clip.get_pretrained_cfg(name, tag).get("hf_hub")
    if pickled and not files.keys.allow_pickle:
        raise ConfigError(
            f"{files.name} has its weights only as a pickle, which can run code when it is read; set "
            f"allow_pickle: true to read it with weights_only"
        )


def check_folder(folder: Path, files: ModelFiles) -> None:
    """Refuse a folder without a readable description or without weights: open_clip would make random ones."""
    config = read_json(folder / CONFIG_FILE)
    checked_files.check_folder(folder, weights=files.has_weights)
    if "model_cfg" not in config:
        raise ConfigError(f"{folder / CONFIG_FILE} has no model_cfg")
    if not isinstance(config.get("preprocess_cfg", {}), dict):  # open_clip would take its own settings in silence
        raise checked_files.broken(folder / CONFIG_FILE, "preprocess_cfg is no object")
    if not files.has_weights or any(folder.glob("*.safetensors")):
        return
    if not any((*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))):
        raise ConfigError(f"{folder} holds no weights; {WEIGHTS_FILE} is missing")
    if not files.keys.allow_pickle:
        raise ConfigError(
            f"{folder} has its weights only as a pickle, which can run code when it is read; set allow_pickle: true "
            f"to read it with weights_only, or convert it to safetensors"
        )


@contextmanager
def quiet_about_weights(files: ModelFiles) -> Iterator[None]:
    """Keep open_clip from warning of random weights where none are wanted."""
    before = logging.root.manager.disable
    logging.disable(before if files.has_weights else logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
