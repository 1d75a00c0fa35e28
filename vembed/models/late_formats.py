"""Read and write the folders of late interaction on texts: sentence-transformers', PyLate's, and that of ColBERTv2.

| Folder | What says so | Where it says what |
|---|---|---|
| sentence-transformers (6) | model_type MultiVectorEncoder | settings of the Transformer and MultiVectorMask modules |
| PyLate | model_type ColBERT | config_sentence_transformers.json; mask and unit length are understood |
| ColBERTv2 | architecture HF_ColBERT | artifact.metadata; the linear layer is a weight of the transformer's file |

A transformer of any other folder gets a linear layer of its own, and the markers [Q] and [D] as tokens that train.
Written is sentence-transformers' form, and PyLate's where that is asked for.
"""

from __future__ import annotations

import json
import shutil
import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vembed.errors import ConfigError
from vembed.models.checked_files import broken, load_tensors
from vembed.models.formats import (
    GENERAL_FILE,
    MODULES_FILE,
    TRANSFORMER_FILE,
    Dense,
    TextFolder,
    TextSpec,
    load_dense,
    module_paths,
    read_modules,
    read_prompts,
    read_text_folder,
    read_transformer,
    write_backbone,
    write_dense,
    write_json,
    write_module_list,
)
from vembed.models.hub import WEIGHTS_FILE
from vembed.models.late import new_layer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from vembed.batch import Side
    from vembed.models.colbert import ColbertEncoder
    from vembed.models.hub import ModelFiles

TOKENS = "token_embeddings"
MARKERS: Mapping[Side, str] = {"query": "[Q] ", "document": "[D] "}
"""Tokens before the texts of a side in a model that is new to late interaction, named as in PyLate."""

PUNCTUATION = tuple(string.punctuation)
QUERY_LENGTH = 32
DOCUMENT_LENGTH = 180
FOLLOWED = ("query_length", "document_length", "query_expansion")
"""Settings of sentence-transformers' Transformer that say how queries are filled up."""


@dataclass(frozen=True, slots=True)
class LateSpec:
    """Lengths, filling and choice of vectors of late interaction on texts."""

    query_length: int = QUERY_LENGTH  # longest query in tokens, special ones included
    expand_to: int = QUERY_LENGTH  # shorter queries are filled up to so many tokens, which all give vectors; 0: none
    attends: bool = False  # the other tokens of a query see those that fill it up
    filling: str | None = None  # the token that fills up; None: the mask, where there is none the end of a text
    skipped: tuple[str, ...] = PUNCTUATION  # tokens of documents that give no vector
    topk_tokens: int | None = None  # most vectors of an item
    pool_factor: float = 1.0  # of vectors of a document that become one
    protected: int = 1  # first vectors of a document that are never merged
    markers: Mapping[Side, str] = field(default_factory=dict)  # tokens that prompts begin with


@dataclass(frozen=True, slots=True)
class LateFolder:
    """The description of a model of late interaction in its folder."""

    text: TextFolder | None  # transformer, prompts and lengths; None: the transformer's own files
    spec: LateSpec
    dense_paths: tuple[str, ...] = ()  # subfolders of the layers
    is_new: bool = False  # it was no model of late interaction
    has_inline_layer: bool = False  # the layer is a weight of the transformer's file


def is_late(files: ModelFiles) -> bool:
    """Return whether a model's files say that it gives several vectors for each text."""
    if files.read_json(GENERAL_FILE).get("model_type") in ("MultiVectorEncoder", "ColBERT"):
        return True
    return "HF_ColBERT" in (files.read_json("config.json").get("architectures") or [])


def read_late(files: ModelFiles) -> LateFolder:
    """Read what a model's files say about late interaction.

    Raises:
        ConfigError: They say something that vembed doesn't follow.
    """
    general = files.read_json(GENERAL_FILE)
    kind = general.get("model_type")
    if kind == "MultiVectorEncoder":
        return _read_multi_vector(files, general)
    if kind == "ColBERT":
        return _read_pylate(files, general)
    if "HF_ColBERT" in (files.read_json("config.json").get("architectures") or []):
        return _read_stanford(files)
    return LateFolder(read_text_folder(files), LateSpec(markers=MARKERS), is_new=True)


def _read_multi_vector(files: ModelFiles, general: dict[str, Any]) -> LateFolder:
    """Read sentence-transformers' own form."""
    name = files.name
    once = ("Transformer", "MultiVectorMask", "Normalize")
    kinds = ("Transformer", "Dense", "MultiVectorMask", "Normalize", "HierarchicalTokenPooling")
    paths = module_paths(read_modules(files), name, kinds=kinds, once=once)
    transformer = read_transformer(files, _prefix(paths), follows=FOLLOWED)
    mask = files.read_json(f"{paths['MultiVectorMask'][0]}/config.json")
    pooling = [files.read_json(f"{path}/config.json") for path in paths["HierarchicalTokenPooling"]]
    documents_alone = (None, "document", ["document"])  # ways to write the library's default
    # Settings that would give other vectors -> the value that does, empty where it doesn't.
    others = {
        "keep_only_token_ids": mask.get("keep_only_token_ids") or None,
        "skiplist_tasks": None if mask.get("skiplist_tasks", ["document"]) == ["document"] else mask["skiplist_tasks"],
        "similarity_fn_name": None if general.get("similarity_fn_name") in (None, "maxsim") else "meanmaxsim",
        "tasks of HierarchicalTokenPooling": [s["tasks"] for s in pooling if s.get("tasks") not in documents_alone],
        "normalize_embeddings": [False for step in pooling if not step.get("normalize_embeddings", False)],
    }
    for key, value in others.items():
        if value:
            raise ConfigError(
                f"{name}: {GENERAL_FILE} or the config.json of a module sets {key} to {value}, which vembed doesn't "
                f"follow"
            )
    if len(pooling) > 1:
        raise ConfigError(f"{name}: modules.json names HierarchicalTokenPooling {len(pooling)} times; once is known")
    # With the strategy "fixed" all queries have the length of the filling; else they may be longer than it.
    expansion = transformer.get("query_expansion") or {}
    expand_to = int(expansion.get("length", 0))
    longest = expand_to if expansion.get("strategy") == "fixed" else int(transformer.get("query_length") or 0)
    prompts, ours = read_prompts(general, name), general.get("vembed") or {}
    spec = LateSpec(
        query_length=max(longest, expand_to),
        expand_to=expand_to,
        attends=bool(expansion.get("attend", False)),
        filling=expansion.get("token"),
        skipped=tuple(mask.get("skiplist_words") or ()),
        topk_tokens=ours.get("topk_tokens"),
        pool_factor=float(pooling[0].get("pool_factor", 1.0)) if pooling else 1.0,
        protected=int(pooling[0].get("num_protected_tokens", 1)) if pooling else 1,
        markers=ours.get("markers") or {},
    )
    length = transformer.get("document_length") or transformer.get("max_seq_length")
    return LateFolder(_text(paths, transformer, prompts, length), spec, tuple(paths["Dense"]))


def _read_pylate(files: ModelFiles, general: dict[str, Any]) -> LateFolder:
    """Read the form of PyLate up to version 3: its markers are tokens, put in by their ids."""
    paths = module_paths(
        read_modules(files),
        files.name,
        kinds=("Transformer", "Dense"),
        once=("Transformer",),
        libraries=("sentence_transformers.", "pylate.models."),
    )
    transformer = read_transformer(files, _prefix(paths))
    markers: dict[Side, str] = {
        "query": _setting(general, "query_prefix", MARKERS["query"]),
        "document": _setting(general, "document_prefix", MARKERS["document"]),
    }
    prompts = read_prompts(general, files.name)
    prompts = {side: marker + prompts.get(side, "").removeprefix(marker) for side, marker in markers.items()}
    length = int(_setting(general, "query_length", QUERY_LENGTH))
    expands = bool(_setting(general, "do_query_expansion", True))
    spec = LateSpec(
        query_length=length,
        expand_to=length if expands else 0,
        attends=expands and bool(_setting(general, "attend_to_expansion_tokens", False)),
        skipped=tuple(_setting(general, "skiplist_words", PUNCTUATION)),
        markers=markers,
    )
    document_length = int(_setting(general, "document_length", DOCUMENT_LENGTH))
    return LateFolder(_text(paths, transformer, prompts, document_length), spec, tuple(paths["Dense"]))


def _read_stanford(files: ModelFiles) -> LateFolder:
    """Read the form of ColBERTv2."""
    settings = files.read_json("artifact.metadata")
    length = int(settings.get("query_maxlen") or QUERY_LENGTH)
    markers: dict[Side, str] = {
        "query": _setting(settings, "query_token_id", "[unused0]") + " ",
        "document": _setting(settings, "doc_token_id", "[unused1]") + " ",
    }
    spec = LateSpec(
        query_length=length,
        expand_to=length,
        attends=bool(settings.get("attend_to_mask_tokens")),
        skipped=PUNCTUATION if settings.get("mask_punctuation", True) else (),
        markers=markers,
    )
    text = _text({"Transformer": [""]}, {}, markers, int(settings.get("doc_maxlen") or DOCUMENT_LENGTH))
    return LateFolder(text, spec, has_inline_layer=True)


def _setting(config: dict[str, Any], key: str, default: Any) -> Any:
    """Return a setting; the default where it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def _prefix(paths: Mapping[str, list[str]]) -> str:
    path = paths["Transformer"][0]
    return f"{path}/" if path else ""


def _text(
    paths: Mapping[str, list[str]], transformer: dict[str, Any], prompts: Mapping[Side, str], length: int | None
) -> TextFolder:
    spec = TextSpec(("mean",), max_length=length or 0, lower_case=bool(transformer.get("do_lower_case", False)))
    return TextFolder(spec, transformer_path=paths["Transformer"][0], prompts=prompts)


def load_layers(files: ModelFiles, folder: LateFolder) -> list[Dense]:
    """Load the layers behind the tokens; those of a new model are none.

    Raises:
        ConfigError: Their form isn't known, or their weights aren't safetensors.
    """
    if not folder.has_inline_layer:
        return [load_dense(files, path, of=TOKENS) for path in folder.dense_paths]
    path = files.read(WEIGHTS_FILE)
    if path is None:
        raise ConfigError(
            f"{files.name} has no {WEIGHTS_FILE} with its linear layer; convert its pickled weights first"
        )
    # transformers leaves it out when it loads the BERT around it, and says so only in its log.
    weight = load_tensors(path, "linear.weight")["linear.weight"]
    if weight.ndim != 2 or not weight.is_floating_point():
        raise broken(path, f"linear.weight is {weight.dtype} {tuple(weight.shape)}")
    layer = new_layer(weight.shape[1], weight.shape[0])
    layer.linear.weight = torch.nn.Parameter(weight)
    return [layer]


def write_late(encoder: ColbertEncoder, folder: Path) -> None:
    """Write an encoder as sentence-transformers' MultiVectorEncoder loads it, which transformers loads too."""
    folder.mkdir(parents=True, exist_ok=True)
    late, spec = encoder.late, encoder.spec
    encoder.tokenizer.padding_side = "right"  # what fills a query up stands behind it, whatever its family does
    write_backbone(encoder, folder)
    settings: dict[str, object] = {"do_lower_case": spec.lower_case, "document_length": spec.max_length}
    if late.expand_to != late.query_length:
        settings["query_length"] = late.query_length
    if late.expand_to:
        strategy = "fixed" if late.expand_to == late.query_length else "min"
        settings["query_expansion"] = {
            "strategy": strategy,
            "attend": late.attends,
            "token": late.filling,
            "length": late.expand_to,
        }
    write_json(folder / TRANSFORMER_FILE, settings)
    general: dict[str, object] = {
        "model_type": "MultiVectorEncoder",
        "prompts": dict(encoder.prompts),
        "default_prompt_name": None,
        "similarity_fn_name": "maxsim",
    }
    ours: dict[str, object] = (
        {"markers": dict(late.markers)} if late.markers else {}
    )  # the library has no key for these
    if late.topk_tokens is not None:
        ours["topk_tokens"] = late.topk_tokens
    if ours:
        general["vembed"] = ours
    write_json(folder / GENERAL_FILE, general)
    modules = [("base.modules.transformer.Transformer", "")]
    for layer in encoder.head.layers:
        assert isinstance(layer, Dense)
        path = f"{len(modules)}_Dense"
        write_dense(layer, folder / path, module_input_name=TOKENS, module_output_name=TOKENS)
        modules.append(("base.modules.dense.Dense", path))

    def add(kind: str, config: dict[str, object]) -> None:
        path = f"{len(modules)}_{kind.rpartition('.')[2]}"
        write_json(folder / path / "config.json", config)
        modules.append((kind, path))

    add("multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", {"skiplist_words": list(late.skipped)})
    add("base.modules.normalize.Normalize", {"module_input_name": TOKENS, "module_output_name": TOKENS})
    if late.pool_factor != 1.0:
        pooling = {"pool_factor": late.pool_factor, "num_protected_tokens": late.protected, "tasks": ["document"]}
        kind = "multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"
        add(kind, {**pooling, "normalize_embeddings": True})
    write_module_list(folder, [(f"sentence_transformers.{kind}", path) for kind, path in modules])


def fits_pylate(encoder: ColbertEncoder) -> bool:
    """Return whether PyLate's files say all that decides the vectors of an encoder."""
    late = encoder.late
    fills_all = late.expand_to in (0, late.query_length) and late.filling is None
    return fills_all and late.pool_factor == 1.0 and bool(late.markers) and dict(encoder.prompts) == late.markers


def turn_to_pylate(encoder: ColbertEncoder, folder: Path) -> None:
    """Turn a folder that `write_late` wrote into one that PyLate 1 loads, on sentence-transformers 5."""
    # PyLate masks and normalises by itself and knows no such modules; its markers are settings, not prompts.
    late, spec = encoder.late, encoder.spec
    modules = []
    for module in json.loads((folder / MODULES_FILE).read_text("utf-8")):
        kind, path = module["type"].rpartition(".")[2], module["path"]
        if kind not in ("Transformer", "Dense"):
            shutil.rmtree(folder / path)
            continue
        if kind == "Dense":
            settings = json.loads((folder / path / "config.json").read_text("utf-8"))
            kept = {key: value for key, value in settings.items() if not key.startswith("module_")}
            write_json(folder / path / "config.json", {**kept, "use_residual": False})
        older = "sentence_transformers.models.Transformer" if kind == "Transformer" else "pylate.models.Dense.Dense"
        modules.append({**module, "type": older})
    write_json(folder / MODULES_FILE, modules)
    write_json(folder / TRANSFORMER_FILE, {"max_seq_length": spec.max_length, "do_lower_case": spec.lower_case})
    write_json(
        folder / GENERAL_FILE,
        {
            "model_type": "ColBERT",
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "MaxSim",
            "query_prefix": late.markers["query"],
            "document_prefix": late.markers["document"],
            "query_length": late.query_length,
            "document_length": spec.max_length,
            "do_query_expansion": late.expand_to > 0,
            "attend_to_expansion_tokens": late.attends,
            "skiplist_words": list(late.skipped),
        },
    )
