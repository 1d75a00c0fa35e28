"""The names that a configuration may use for code: one table for each kind, for our own entries and for plugins alike.

A built-in entry is a text, "module:attribute", imported when it is first asked for, so that a list of names costs no
import. A plugin registers the thing itself, by `vembed.register_loss` and its siblings.
"""

from __future__ import annotations

import importlib
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


class Registry:
    """Entries of one kind by name.

    Args:
        kind: What an entry is, for messages: "loss", "tracker".
        builtin: Name -> "module:attribute" of our own entries.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str]) -> None:
        self.kind = kind
        self._builtin = dict(builtin)
        self._entries: dict[str, Any] = {}
        self._plugins: dict[str, str] = {}  # name -> module that registered it

    def register(self, name: str, entry: Any, *, module: str) -> None:
        """Add an entry of a plugin; the same module may add it again, as a notebook cell does.

        Args:
            name: Lower-case letters, digits, "-", "_" and ".".
            entry: What `load` returns.
            module: Where it comes from, for the plan and the report.

        Raises:
            ConfigError: The name is taken, or not one that a configuration can use.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{self.kind} {name!r}: use lower-case letters, digits, '-', '_' and '.'")
        if name in self._builtin or self._plugins.get(name, module) != module:
            owner = "vembed" if name in self._builtin else self._plugins[name]
            raise ConfigError(f"{self.kind} {name!r} of {module} is already that of {owner}; choose another name")
        self._entries[name] = entry
        self._plugins[name] = module

    def names(self) -> tuple[str, ...]:
        """Return all names, our own first."""
        return (*self._builtin, *self._plugins)

    def plugins(self) -> dict[str, str]:
        """Return the names that plugins added, each with its module."""
        return dict(self._plugins)

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._plugins

    def load(self, name: str) -> Any:
        """Return an entry; a built-in one is imported now.

        Raises:
            ConfigError: There is none of that name; the message has the nearest one.
        """
        if name not in self:
            near = get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"no {self.kind} {name!r}{hint} There are: {', '.join(self.names())}")
        if name not in self._entries:
            module, attribute = self._builtin[name].split(":")
            self._entries[name] = getattr(importlib.import_module(module), attribute)
        return self._entries[name]


LOSSES = Registry(
    "loss",
    {
        "infonce": "vembed.losses.facts.infonce:FACTS",
        "sigmoid": "vembed.losses.facts.sigmoid:FACTS",
        "colbert": "vembed.losses.facts.colbert:FACTS",
        "triplet": "vembed.losses.facts.triplet:FACTS",
        "cosent": "vembed.losses.facts.cosent:FACTS",
        "in_batch_hard": "vembed.losses.facts.in_batch_hard:FACTS",
        "supcon": "vembed.losses.facts.supcon:FACTS",
        "angle": "vembed.losses.facts.angle:FACTS",
        "cosine_mse": "vembed.losses.facts.cosine_mse:FACTS",
        "margin_mse": "vembed.losses.facts.margin_mse:FACTS",
        "kl": "vembed.losses.facts.kl:FACTS",
        "spread_out": "vembed.losses.facts.spread_out:FACTS",
        "distillation": "vembed.losses.facts.distillation:FACTS",
    },
)
"""`loss_type` -> a `LossFacts` (vembed/losses/registry.py)."""

METRICS = Registry(
    "metric",
    {
        "ndcg": "vembed.evaluation.metrics:NDCG",
        "recall": "vembed.evaluation.metrics:RECALL",
        "precision": "vembed.evaluation.metrics:PRECISION",
        "mrr": "vembed.evaluation.metrics:MRR",
        "map": "vembed.evaluation.metrics:MAP",
        "hit": "vembed.evaluation.metrics:HIT",
    },
)
"""What stands before the @ of a metric's name."""

COMMANDS = Registry(
    "command",
    {
        name: f"vembed.entrypoints.{name}:main"
        for name in (
            *("init", "explain", "train", "plan", "evaluate", "compare", "mine", "merge", "encode", "search", "doctor"),
            *("export", "push", "data", "sweep"),
        )
    },
)
"""`vembed NAME`; the first line of a function's docstring is what the list of commands says."""

TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": "vembed.training.trackers.tensorboard:TensorBoardTracker",
        "wandb": "vembed.training.trackers.wandb:WandbTracker",
        "mlflow": "vembed.training.trackers.mlflow:MlflowTracker",
        "trackio": "vembed.training.trackers.trackio:TrackioTracker",
        "swanlab": "vembed.training.trackers.swanlab:SwanlabTracker",
    },
)
"""Names that `report_to` takes -> a `Tracker` class (vembed/training/trackers/base.py)."""

ENCODERS = Registry(
    "encoder",
    {
        "ngram-bag": "vembed.models.ngram_bag:NgramBag",
        "tiny-clip": "vembed.models.tiny_clip:TinyClip",
        "tiny-transformer": "vembed.models.tiny_transformer:TinyTransformer",
        "composed": "vembed.models.composed_towers:ComposedTowers",
        "tiny-qwen3-vl": "vembed.models.tiny_vision_language:TinyVisionLanguage",
        "open_clip": "vembed.models.open_clip_encoder:OpenClipEncoder",
        "static": "vembed.models.static:StaticEncoder",
        "vision-late": "vembed.models.vision_late:VisionLateEncoder",
        "vision_language": "vembed.models.vision_language:VisionLanguageEncoder",
        "dual": "vembed.models.dual:DualEncoder",
        "patches": "vembed.models.patches:PatchEncoder",
        "vision": "vembed.models.vision:VisionEncoder",
        "colbert": "vembed.models.colbert:ColbertEncoder",
        "sentence_transformers": "vembed.models.sentence_transformers_encoder:SentenceTransformersEncoder",
        "text": "vembed.models.text:TextEncoder",
    },
)
"""Classes of `Encoder`, in the order in which they are asked for a model."""

BUILTIN_MODELS = ("ngram-bag", "tiny-clip", "tiny-transformer", "tiny-qwen3-vl", "static")
"""Those of ENCODERS that `builtin:NAME` means, beside plugins."""

DATASETS = Registry(
    "data set",
    {
        "pages": "vembed.data.builtin.pages:SET",
        "shapes": "vembed.data.builtin.shapes:SET",
        "stdlib-code": "vembed.data.builtin.stdlib_code:SET",
    },
)
"""Name after `builtin:` in data_path -> a `BuiltinSet` (vembed/data/builtin/__init__.py)."""
