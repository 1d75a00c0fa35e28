"""Read and write the folders of sentence-transformers.

The folder names its modules in modules.json: a Transformer, a Pooling, any number of Dense, and Normalize. Those are
understood, in the present form and in the one of versions 2 to 5; any other module is refused by name, because leaving
one out would give other vectors. Written is the older form, which every version reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vembed.errors import ConfigError
from vembed.models.files import WEIGHTS_FILE, save_weights
from vembed.models.older_readers import add_older_names
from vembed.models.pooling import POOLING_MODES, PoolingMode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from vembed.batch import Side
    from vembed.models.files import ModelFiles
    from vembed.models.text import TextEncoder

MODULES_FILE = "modules.json"

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.SiLU": nn.SiLU,
    "torch.nn.modules.activation.Sigmoid": nn.Sigmoid,
}
"""Activations by the import path that Dense folders name; nothing else is imported from a file's word."""

LEGACY_POOLING: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags of older folders, in the order in which several are concatenated."""

TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Where a Transformer module keeps its settings: the first file that exists. The oldest folders name the family."""

TRANSFORMER_DEFAULTS: dict[str, tuple[object, ...]] = {
    "transformer_task": (None, "feature-extraction"),
    "processing_kwargs": (None, {}),
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
}
"""Settings of a Transformer module that would change its vectors, with the values that don't."""


class Dense(nn.Module):
    """A linear layer behind the pooling, with an activation that has no parameters."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return activation(W x + b) in the type of x, which may be wider than that of the weights."""
        bias = None if self.linear.bias is None else self.linear.bias.to(x.dtype)
        result: Tensor = self.activation(F.linear(x, self.linear.weight.to(x.dtype), bias))
        return result


@dataclass(frozen=True, slots=True)
class SentenceTransformersFolder:
    """What a folder says."""

    transformer_path: str  # subfolder of the transformer, "" for the folder itself
    pooling: tuple[PoolingMode, ...]
    include_prompt: bool  # whether prompt tokens are pooled
    dense_paths: tuple[str, ...]  # subfolders of the Dense layers, in order
    normalize: bool  # a Normalize module, or a similarity that isn't the dot product
    prompts: dict[Side, str]  # of the sides that it says something about, "" for none
    max_length: int | None  # None when the folder leaves it to the tokenizer
    lower_case: bool  # whether texts are lower-cased first


def read_sentence_transformers(files: ModelFiles) -> SentenceTransformersFolder | None:
    """Read the description of a sentence-transformers model; None when it has no modules.json.

    Raises:
        ConfigError: It has a module or a pooling that isn't understood.
    """
    if files.read(MODULES_FILE) is None:
        return None
    name = files.name
    paths = module_paths(files.read_json(MODULES_FILE, list), name)
    transformer_path = paths["Transformer"][0]
    pooling, include_prompt = _read_pooling(files.read_json(f"{paths['Pooling'][0]}/config.json"), name)
    prefix = f"{transformer_path}/" if transformer_path else ""
    transformer = read_transformer(files, prefix)
    general = files.read_json("config_sentence_transformers.json")
    return SentenceTransformersFolder(
        transformer_path=transformer_path,
        pooling=pooling,
        include_prompt=include_prompt,
        dense_paths=tuple(paths["Dense"]),
        normalize=bool(paths["Normalize"]) or is_cosine(general, name),
        prompts=read_prompts(general, name),
        max_length=transformer.get("max_seq_length"),
        lower_case=bool(transformer.get("do_lower_case", False)),
    )


def is_cosine(config: dict[str, Any], name: str) -> bool:
    """Return whether embeddings that no Normalize module normalises are compared by their angle."""
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity in ("dot", "dot_score"):
        return False
    if similarity == "cosine":
        return True
    raise ConfigError(f"{name} is compared by {similarity} distance; vembed knows cosine and the dot product")


def read_transformer(files: ModelFiles, prefix: str, *, follows: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of the Transformer module; refuse those that vembed doesn't follow.

    Args:
        follows: Settings that the caller follows, though not every encoder does.
    """
    file = next((file for file in TRANSFORMER_FILES if files.read(prefix + file) is not None), TRANSFORMER_FILES[0])
    config: dict[str, Any] = files.read_json(prefix + file)
    for key, harmless in TRANSFORMER_DEFAULTS.items():
        if key not in follows and config.get(key) not in harmless:
            raise ConfigError(
                f"{files.name}: {prefix}{file} sets {key} to {config[key]!r}, which vembed doesn't follow. Leaving it "
                f"out would give other vectors."
            )
    return config


def first_module(files: ModelFiles) -> str:
    """Return the kind of the first module of a sentence-transformers model, such as "Transformer"; "" for others."""
    if files.read(MODULES_FILE) is None:
        return ""
    modules = files.read_json(MODULES_FILE, list)
    return str(modules[0].get("type")).rpartition(".")[2] if modules and isinstance(modules[0], dict) else ""


def module_paths(
    modules: list[dict[str, Any]],
    name: str,
    *,
    kinds: Sequence[str] = ("Transformer", "Pooling", "Dense", "Normalize"),
    once: Sequence[str] = ("Transformer", "Pooling"),
    libraries: tuple[str, ...] = ("sentence_transformers.",),
) -> dict[str, list[str]]:
    """Return the subfolders by kind of module, in order.

    Args:
        kinds: Those that are run, in the order in which they are.
        once: Those of which there is one.
        libraries: What the import path of a module begins with.

    Raises:
        ConfigError: There are others, or in another order.
    """
    paths: dict[str, list[str]] = {kind: [] for kind in kinds}
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in paths or not str(module["type"]).startswith(libraries):
            raise ConfigError(
                f"{name}: modules.json names {module['type']}, which vembed doesn't run (it runs {', '.join(paths)}). "
                f"Leaving it out would give other vectors."
            )
        paths[kind].append(str(module["path"]))
    if any(len(paths[kind]) != 1 for kind in once):
        raise ConfigError(f"{name}: modules.json must name one {' and one '.join(once)}")
    order = [str(module["type"]).rpartition(".")[2] for module in modules]
    if order != sorted(order, key=list(paths).index):
        raise ConfigError(f"{name}: modules.json names {', '.join(order)}; vembed runs them as {', '.join(paths)}")
    return paths


def _read_pooling(config: dict[str, Any], name: str) -> tuple[tuple[PoolingMode, ...], bool]:
    """Return the pooling modes of either form and whether the prompt is pooled."""
    named = config.get("pooling_mode")
    if named is None:
        flagged = tuple(mode for key, mode in LEGACY_POOLING.items() if config.get(key))
        return flagged or ("mean",), bool(config.get("include_prompt", True))
    modes: list[PoolingMode] = [named] if isinstance(named, str) else list(named)  # type: ignore[list-item]
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown:
        raise ConfigError(f"{name}: pooling {unknown[0]!r} is none of {', '.join(POOLING_MODES)}")
    return tuple(modes), bool(config.get("include_prompt", True))


def read_prompts(config: dict[str, Any], name: str) -> dict[Side, str]:
    """Return the prompt of each side that the file names, or that the model's default one is for."""
    prompts = config.get("prompts") or {}
    default_name = config.get("default_prompt_name")
    if default_name is not None and default_name not in prompts:
        raise ConfigError(f"{name}: default_prompt_name {default_name!r} is none of its prompts: {', '.join(prompts)}")
    names: dict[Side, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
    found: dict[Side, str] = {}
    for side in names:
        named = [prompts[name] for name in names[side] if name in prompts]
        if named:  # with an empty prompt it wants none, not the default
            found[side] = next((prompt for prompt in named if prompt), "")
        elif default_name is not None:
            found[side] = prompts[default_name]
    return found


def load_dense(files: ModelFiles, path: str, *, of: str = "sentence_embedding") -> Dense:
    """Load a Dense layer with its weights.

    Args:
        of: What it must take and give, where its config says.

    Raises:
        ConfigError: When its activation or form isn't known, or its weights aren't safetensors.
    """
    config = files.read_json(f"{path}/config.json")
    activation = ACTIVATIONS.get(str(config.get("activation_function")))
    names = (config.get("module_input_name"), config.get("module_output_name"))
    if not {*names} <= {None, of}:
        raise ConfigError(f"{files.name}: {path} maps {names[0]} to {names[1]}; only {of} to itself is known")
    if activation is None or config.get("use_residual"):
        form = "a residual connection" if config.get("use_residual") else f"{config.get('activation_function')}"
        raise ConfigError(f"{files.name}: {path} uses {form}; known activations: {', '.join(ACTIVATIONS)}")
    weights = files.read(f"{path}/{WEIGHTS_FILE}")
    if weights is None:
        raise ConfigError(f"{files.name}: {path} has no model.safetensors; convert its pickled weights first")
    layer = Dense(config["in_features"], config["out_features"], bias=config.get("bias", True), activation=activation())
    layer.load_state_dict(safetensors.torch.load_file(weights))
    return layer


def write_sentence_transformers(encoder: TextEncoder, folder: Path) -> None:
    """Write an encoder as a sentence-transformers folder, which is a transformers folder too."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = encoder.spec
    encoder.backbone.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    add_older_names(folder)
    write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": encoder.max_length, "do_lower_case": spec.lower_case}
    )
    hidden = encoder.backbone.config.get_text_config().hidden_size
    write_json(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": hidden,
            **_pooling_config(spec.pooling),
            "include_prompt": spec.include_prompt,
        },
    )
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_modules(folder, modules, encoder.dense, prompts=spec.prompts, normalize=spec.normalize)


def write_modules(
    folder: Path,
    modules: list[tuple[str, str]],
    dense: Iterable[nn.Module],
    *,
    prompts: Mapping[Side, str],
    normalize: bool,
) -> None:
    """Write what is behind the first modules, and the files that name them all.

    Args:
        modules: Kind and subfolder of those that are written already.
    """
    for layer in dense:
        assert isinstance(layer, Dense)
        path = f"{len(modules)}_Dense"
        write_dense(layer, folder / path)
        modules = [*modules, ("Dense", path)]
    if normalize:
        modules = [*modules, ("Normalize", f"{len(modules)}_Normalize")]
        (folder / modules[-1][1]).mkdir(exist_ok=True)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": dict(prompts),
            "default_prompt_name": None,
            "similarity_fn_name": "cosine" if normalize else "dot",
        },
    )
    write_json(
        folder / MODULES_FILE,
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(modules)
        ],
    )


def _pooling_config(modes: tuple[PoolingMode, ...]) -> dict[str, object]:
    """Return the older form's flags; they can't say an order, so another order than theirs takes the newer form."""
    flags = {key: mode in modes for key, mode in LEGACY_POOLING.items()}
    flagged = tuple(mode for key, mode in LEGACY_POOLING.items() if flags[key])
    return dict(flags) if flagged == modes else {"pooling_mode": list(modes)}


def write_dense(layer: Dense, folder: Path, **names: str) -> None:
    """Write a Dense layer: its config, with what it takes and gives where that is named, and its weights."""
    folder.mkdir(exist_ok=True)
    kind = type(layer.activation)
    write_json(
        folder / "config.json",
        {
            "in_features": layer.linear.in_features,
            "out_features": layer.linear.out_features,
            "bias": layer.linear.bias is not None,
            "activation_function": f"{kind.__module__}.{kind.__qualname__}",
            **names,
        },
    )
    save_weights(layer, folder, metadata={"format": "pt"})


def write_json(path: Path, content: object) -> None:
    """Write a file of a model's folder, which is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
