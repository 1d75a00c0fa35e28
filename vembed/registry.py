"""Names that a configuration may use for code: one table for each kind, for our own entries and for plugins alike.

A built-in entry is a text, "module:attribute", imported when it is first asked for, so that a list of names costs no
import. A plugin is a module that registers the thing itself, by `vembed.register_loss` and its siblings. It is imported
where the key `plugins` names it, or, of an installed package, when a name is asked for that nothing else has: the
package says which module brings which name, by entry points of the group `vembed.plugins`:

    [project.entry-points."vembed.plugins"]
    loss-table = "their_package.trackers"
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import traceback
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.errors import ConfigError
from vembed.redact import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENTRY_POINTS = "vembed.plugins"

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


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

    def find(self, name: str) -> bool:
        """Return True where there is an entry; where there is none yet, an installed package may bring it now.

        Raises:
            ConfigError: The module of the package can't be imported.
        """
        # Ours and those of `plugins` first: no package that happens to be installed can take one of their names.
        if name not in self._builtin and name not in self._plugins:
            import_installed(name)
        return name in self._builtin or name in self._plugins

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name)

    def load(self, name: str) -> Any:
        """Return an entry; a built-in one is imported now.

        Raises:
            ConfigError: There is none of that name; the message has the nearest one.
        """
        if not self.find(name):
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
        "infonce": "vembed.losses.keys:InfoNCEKeys",
        "sigmoid": "vembed.losses.keys:SigmoidKeys",
        "colbert": "vembed.losses.keys:ColbertKeys",
        "triplet": "vembed.losses.keys:TripletKeys",
        "cosent": "vembed.losses.keys:CosentKeys",
        "in_batch_hard": "vembed.losses.keys:InBatchHardKeys",
        "supcon": "vembed.losses.keys:SupConKeys",
        "angle": "vembed.losses.keys:AngleKeys",
        "cosine_mse": "vembed.losses.keys:CosineMseKeys",
        "margin_mse": "vembed.losses.keys:MarginMseKeys",
        "kl": "vembed.losses.keys:KlKeys",
        "spread_out": "vembed.losses.keys:SpreadOutKeys",
        "distillation": "vembed.losses.keys:DistillationKeys",
    },
)
"""`loss_type` -> the `LossSection` with its keys and facts (vembed/losses/registry.py)."""

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
"""The part of a metric's name before its @."""

SECTIONS = Registry("report section", {})
"""Sections that plugins add to the report of a run (vembed/evaluation/report); our own stand in its `build_page`."""

COMMANDS = Registry(
    "command",
    {
        "init": "vembed.entrypoints.init:main",
        "explain": "vembed.entrypoints.explain:main",
        "train": "vembed.entrypoints.train:main",
        "plan": "vembed.entrypoints.plan:main",
        "evaluate": "vembed.entrypoints.evaluate:main",
        "compare": "vembed.entrypoints.compare:main",
        "mine": "vembed.entrypoints.mine:main",
        "merge": "vembed.plugins.merge.command:main",
        "encode": "vembed.entrypoints.encode:main",
        "search": "vembed.entrypoints.search:main",
        "doctor": "vembed.entrypoints.doctor:main",
        "export": "vembed.entrypoints.export:main",
        "push": "vembed.plugins.push.command:main",
        "data": "vembed.entrypoints.data:main",
        "sweep": "vembed.entrypoints.sweep:main",
    },
)
"""`vembed NAME`; the first line of a function's docstring is what the list of commands says."""

TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": "vembed.training.tensorboard:TensorBoardTracker",
        "wandb": "vembed.plugins.trackers.wandb:WandbTracker",
        "mlflow": "vembed.plugins.trackers.mlflow:MlflowTracker",
        "trackio": "vembed.plugins.trackers.trackio:TrackioTracker",
        "swanlab": "vembed.plugins.trackers.swanlab:SwanlabTracker",
    },
)
"""Names that `report_to` takes -> a `Tracker` class (vembed/training/trackers.py)."""

ENCODERS = Registry(
    "encoder",
    {
        "ngram-bag": "vembed.models.tables:NgramBag",
        "tiny-clip": "vembed.models.from_scratch:TinyClip",
        "tiny-transformer": "vembed.models.from_scratch:TinyTransformer",
        "composed": "vembed.models.composed:ComposedTowers",
        "tiny-qwen3-vl": "vembed.models.from_scratch:TinyVisionLanguage",
        "open_clip": "vembed.models.open_clip:OpenClipEncoder",
        "static": "vembed.models.tables:StaticEncoder",
        "vision-late": "vembed.models.vision_late:VisionLateEncoder",
        "vision_language": "vembed.models.vision_language:VisionLanguageEncoder",
        "dual": "vembed.models.dual:DualEncoder",
        "patches": "vembed.models.vision:PatchEncoder",
        "vision": "vembed.models.vision:VisionEncoder",
        "colbert": "vembed.models.colbert:ColbertEncoder",
        "sentence_transformers": "vembed.models.st_library:SentenceTransformersEncoder",
        "text": "vembed.models.text:TextEncoder",
    },
)
"""Classes of `Encoder`, in the order in which they are asked for a model."""

FAMILIES = Registry(
    "vision-language family",
    {
        "qwen2_vl": "vembed.models.vision_language_families:Qwen2VL",
        "qwen2_5_vl": "vembed.models.vision_language_families:Qwen25VL",
        "qwen3_vl": "vembed.models.vision_language_families:Qwen3VL",
        "idefics3": "vembed.models.vision_language_families:Idefics3",
        "smolvlm": "vembed.models.vision_language_families:SmolVLM",
        "llava_onevision": "vembed.models.vision_language_families:LlavaOneVision",
        "gemma3": "vembed.models.vision_language_families:Gemma3",
        "paligemma": "vembed.models.vision_language_families:PaliGemma",
    },
)
"""model_type of config.json -> a `VisionLanguageFamily` (vembed/models/vision_language_families.py)."""

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

FORMATS = Registry(
    "data format",
    {
        f"{suffix}{packed}": f"vembed.data.formats:{entry}"
        for packed in ("", ".gz")
        for suffix, entry in (
            ("jsonl", "JSONL"),
            ("json", "JSON"),
            ("csv", "TABLE"),
            ("tsv", "TABLE"),
            ("txt", "TABLE"),
        )
    }
    | {suffix: f"vembed.data.formats:{suffix.upper()}" for suffix in ("parquet", "arrow", "tar")},
)
"""Suffix of a file of rows, without its first dot -> a `RowFormat` (vembed/data/formats.py)."""


EXPORTS = Registry("export format", {"onnx": "vembed.plugins.onnx:ONNX"})
"""`vembed export --format NAME`, beside the forms of our own -> an `ExportFormat` (vembed/models/export_formats.py)."""

INDEX_FORMATS = Registry(
    "index format",
    {"parquet": "vembed.workflows.search.output:PARQUET", "lancedb": "vembed.plugins.lancedb:LANCEDB"},
)
"""`vembed encode --format NAME`, beside our own `index` -> an `IndexFormat` (vembed/workflows/search/output.py)."""

OPTIONS = Registry(
    "options",
    {"export.onnx": "vembed.plugins.onnx:OnnxOptions", "evaluate.mteb": "vembed.plugins.mteb.command:MtebOptions"},
)
"""COMMAND.NAME -> the `AddedOptions` of a plugin, which stand in the command's help (vembed/entrypoints/options.py)."""

ADAPTERS = Registry(
    "adapter",
    {
        "mteb": "vembed.plugins.mteb.model:MtebModel",
        "push": "vembed.plugins.push.push:push_model",
        "ray": "vembed.plugins.ray:encode_with_ray",
    },
)
"""Parts of our Python functions that load a plugin when somebody uses them: no import of ours leads up to one."""


def import_plugins(names: object) -> None:
    """Import the modules that the key `plugins` names; one that is imported already is left as it is.

    Args:
        names: The key's value as it was written; what is no list of texts is left to the schema to refuse.

    Raises:
        ConfigError: There is no such module, or it can't be imported.
    """
    for name in names if isinstance(names, list) else []:
        if not isinstance(name, str) or name in sys.modules:
            continue
        if not _MODULE.fullmatch(name) or name.endswith(".py"):
            raise ConfigError(f"plugins: {printable(name)!r} is no name of a module; write the file's name without .py")
        with _current_folder_first():
            # Python keeps a listing of each folder: without this a file that was just written isn't seen.
            importlib.invalidate_caches()
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                # The plugin may be there and import something that isn't: another message, with the plugin's line.
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise ConfigError(f"plugins: {_failure(name, error)}") from error
                raise ConfigError(
                    f"plugins: there is no module {error.name}; searched in the current folder ({Path.cwd()}), "
                    f"PYTHONPATH ({os.environ.get('PYTHONPATH') or 'not set'}) and the installed packages"
                ) from error
            # A script that calls sys.exit() at its end would otherwise end this process, and no error would say why.
            except (Exception, SystemExit) as error:
                raise ConfigError(f"plugins: {_failure(name, error)}") from error


@cache
def installed_names() -> dict[str, dict[str, str]]:
    """Return the names that installed packages bring, each with its modules and the package of each."""
    from importlib.metadata import entry_points  # reads a file of each installed package: 10 ms for a hundred of them

    names: dict[str, dict[str, str]] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        package = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        names.setdefault(entry.name, {})[entry.module] = package
    return names


_imported: list[str] = []  # modules of installed packages, in the order in which they were asked for


def import_installed(name: str) -> None:
    """Import the modules by which installed packages bring a name, where there are any.

    Other modules of theirs stay as they are: an installed plugin costs nothing and changes no run that doesn't name it.

    Raises:
        ConfigError: A module can't be imported.
    """
    for module, package in installed_names().get(name, {}).items():
        if module in _imported:
            continue
        _imported.append(module)  # before the import: the module may ask for the name that it is about to register
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            _imported.remove(module)
            raise ConfigError(f"{name} is of the package {package}: {_failure(module, error)}") from error


def plugin_lines(names: list[str]) -> list[str]:
    """Return for each plugin, named or installed and in use, where it is and what it registered, for the plan."""
    lines = []
    # A plugin may be named in the configuration and installed as well: it gets one line.
    for name in dict.fromkeys([*names, *_imported]):
        added = [f"{table.kind} {entry}" for table, entry in _registered(name)]
        file = getattr(sys.modules.get(name), "__file__", None) or "built in"
        lines.append(f"plugins: {name} ({file}) registers {', '.join(added) or 'nothing'}")
    return lines


def adds_only_trackers(name: str) -> bool:
    """Tell whether nothing that a run computes can depend on a plugin: trackers are all that it registered."""
    tables = [table for table, _ in _registered(name)]
    return bool(tables) and all(table is TRACKERS for table in tables)


def _registered(name: str) -> list[tuple[Registry, str]]:
    """Return what a plugin registered, each name with its table."""
    # All registries of this module, so that a new one can't be forgotten here.
    tables = [table for table in globals().values() if isinstance(table, Registry)]
    return [
        (table, entry)
        for table in tables
        for entry, module in table.plugins().items()
        if module == name or module.startswith(f"{name}.")
    ]


def plugin_of(encoder: object) -> str:
    """Return the module of a plugin that an encoder's class, or its vision-language family, is of; "" for ours."""
    modules = {*ENCODERS.plugins().values(), *FAMILIES.plugins().values()}
    parts = (encoder, getattr(encoder, "family", None))
    return next((type(part).__module__ for part in parts if type(part).__module__ in modules), "")


def module_code(name: str) -> str:
    """Return a hash of a plugin's module, on which what is kept of its work depends; the name where it has no file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else name


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module of an extra.

    Args:
        extra: The extra of vembed that brings it; "" where the package has no extra.
        what: What needs it, for the message: "--mteb".

    Raises:
        ConfigError: The package isn't installed, or can't be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        source = f'"vembed[{extra}]"' if extra else package
        # It may be there and lack a library of its own, such as one of CUDA, which no pip install of it brings.
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        why = "is missing" if is_missing else f"can't be imported ({printable(str(error))})"
        raise ConfigError(f"{what} needs {package}, which {why}: pip install {source}") from error


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Search the current folder first, as `python -m` does; afterwards last, for what a plugin imports later."""
    folder = str(Path.cwd())
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)


def _failure(name: str, error: BaseException) -> str:
    """Say why a plugin can't be imported, with the line of its code that failed."""
    if isinstance(error, SyntaxError):
        return f"{name} can't be imported: {error.filename}:{error.lineno}: {error.msg}"
    # Frames of importlib and of vembed say how the plugin was reached, not what is wrong with it.
    machinery = ("<", f"{Path(importlib.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(machinery)]
    where = ""
    if frames:  # the deepest line of the plugin's own, not of a library that it calls
        home = frames[0].filename.removesuffix("__init__.py")
        last = [frame for frame in frames if frame.filename.startswith(home)][-1]
        where = f"{last.filename}:{last.lineno}: "
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"{name} can't be imported: {where}{kind}{printable(str(error))}"
