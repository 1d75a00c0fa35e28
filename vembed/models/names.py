"""Model names before anything of the model is read: a folder, a run, or a model of the hub. No torch."""

from __future__ import annotations

import difflib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vembed.errors import ConfigError
from vembed.files import home_path, is_file, is_folder

_log = logging.getLogger(__name__)

BUILTIN_PREFIX = "builtin:"

COMMIT = re.compile(r"[0-9a-f]{40}")
"""Revision of the hub that no push can move: the only one whose code may run."""

PAIR_SIGN = " + "
"""Joins the names of two towers where both are called by one name."""

RUN_MARKS = ("plan.json", "train.log")
"""A folder that holds one of these is a run's. The other names are common: a project's own `model/`, `config.yaml`."""

MODEL_FOLDER = "model"
"""Folder of the model in that of a run."""

_OWNERS = {
    "sentence-transformers": (
        "all-minilm all-mpnet all-distilroberta all-roberta multi-qa paraphrase- msmarco- distiluse- labse gtr-t5 "
        "sentence-t5 clip-vit-b-32 clip-vit-b-16 clip-vit-l-14 static-retrieval static-similarity nli- stsb-"
    ),
    "BAAI": "bge-",
    "intfloat": "e5- multilingual-e5",
    "thenlper": "gte-small gte-base gte-large",
    "Alibaba-NLP": "gte-modernbert gte-qwen gte-multilingual",
    "Qwen": "qwen",
    "google": "embeddinggemma siglip",
    "nomic-ai": "nomic-embed modernbert-embed",
    "answerdotai": "modernbert- answerai-colbert",
    "mixedbread-ai": "mxbai-",
    "jinaai": "jina-",
    "Snowflake": "snowflake-arctic",
    "openai": "clip-vit-base clip-vit-large",
    "facebook": "dinov2 dinov3 vit-mae contriever",
    "colbert-ir": "colbertv2",
    "vidore": "colpali colqwen colsmol",
}
"""Owner on the hub -> how the names of its models begin, in lower case; the longest beginning decides."""


SCRATCH_RATES = {"builtin:": 2e-3, "builtin:static": 5e-2, "open_clip:": 5e-4}
"""Beginning of the name of a model that starts from random weights -> a peak learning rate that it learns with; the
longest beginning decides. Measured for ngram-bag, tiny-clip and static (benchmarks/RESULTS.md#learning-rates); for
CLIP of Radford et al., 2021.
"""


def scratch_rate(name: str) -> float | None:
    """Return a peak learning rate for a model that starts from random weights; None for one that doesn't."""
    if name.startswith("open_clip:") and name.count(":") > 1:  # pretrained weights, or a folder
        return None
    fitting = [begin for begin in SCRATCH_RATES if name.startswith(begin)]
    return SCRATCH_RATES[max(fitting, key=len)] if fitting else None


class Located(NamedTuple):
    """A model by what it is loaded by."""

    name: str  # a folder, a hub id, or a name that a family of models takes
    run: Path | None = None  # the output folder that was named in place of the model in it

    @property
    def note(self) -> str | None:
        """A line that says which model was taken, where a run was named."""
        return None if self.run is None else f"{self.run} is a run: its model is {self.name}"


def is_builtin(name: str) -> bool:
    """Return whether a model name asks for an encoder from scratch."""
    return name.startswith(BUILTIN_PREFIX)


def locate(name: str) -> Located:
    """Return what a model is loaded by; the output folder of a run stands for the model in it.

    Raises:
        ConfigError: A path leads to no folder, a run has no model yet, or a name of the hub lacks its owner.
    """
    folder = home_path(name)
    if is_folder(folder):
        if not is_run(folder):
            return Located(str(folder) if name.startswith("~") else name)
        if not is_folder(folder / MODEL_FOLDER):
            raise ConfigError(
                f"{name} is a run that has not finished: it has no {MODEL_FOLDER}/ yet. Resume it first, with the "
                f"command that started it"
            )
        return Located(str(folder / MODEL_FOLDER), folder)
    begin, slash, _ = name.partition("/")
    if is_file(folder) or ":" in begin or PAIR_SIGN in name:  # of a shape, `builtin:NAME`, two towers
        return Located(name)
    # A name of the hub is OWNER/NAME; all else with a slash, and what is there but no folder, was meant as a path.
    is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or os.path.lexists(folder)
    if is_path or (slash and begin not in _OWNERS and is_folder(begin)):  # the hub takes minutes to say so, offline
        raise ConfigError(f"there is no folder {name}{nearest_folder(folder)}; name that of a model, or of a run")
    # The hub's own answer to a name without an owner reads as if a login were missing.
    begins = {begin: owner for owner, names in _OWNERS.items() for begin in names.split()}
    known = [] if slash else [begin for begin in begins if name.lower().startswith(begin)]
    if known:
        owner = begins[max(known, key=len)]
        raise ConfigError(f"{name} is no folder, and a name of the hub has an owner; did you mean {owner}/{name}?")
    return Located(name)


def is_run(folder: Path) -> bool:
    """Return whether a folder is the output of a run."""
    return any(is_file(folder / mark) for mark in RUN_MARKS)


def nearest_folder(path: Path) -> str:
    """Return ` (did you mean X?)` for a folder that isn't there, or nothing where no name is near."""
    names: list[str] = []
    for parent in path.parents:
        if is_folder(parent):
            below = path.relative_to(parent).parts
            with suppress(OSError):
                names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
            near = difflib.get_close_matches(below[0], names, n=1)
            if not near:
                return ""
            whole = parent.joinpath(near[0], *below[1:])  # the rest of the path may be right, or wrong too
            return f" (did you mean {whole if is_folder(whole) else parent / near[0]}?)"
    return ""


def locate_model(path_or_name: str | Path) -> tuple[str, Path | None]:
    """Return what a model is loaded by, and the run that it is of.

    The output folder of a run stands for its model; a folder is named by its absolute path.

    Returns:
        A hub id or a path; and the output folder of the run, None for a model that is not in one.

    Raises:
        ConfigError: There is no such folder, the run has no model yet, or the name is of a model to train from scratch.
    """
    name = str(path_or_name)
    if is_builtin(name):
        raise ConfigError(
            f"{name} is a model to be trained from scratch; train it, then name the output folder of the run"
        )
    located = locate(name)
    if not is_folder(located.name):
        if isinstance(path_or_name, Path) or os.path.lexists(home_path(name)):
            raise ConfigError(f"there is no folder {name}; name that of a model, or of a run")
        return name, None
    if located.run is not None:
        _log.info("%s", located.note)
        run = located.run.resolve()
        return str(run / MODEL_FOLDER), run
    folder = Path(located.name).resolve()
    return str(folder), folder.parent if folder.name == MODEL_FOLDER and is_run(folder.parent) else None
