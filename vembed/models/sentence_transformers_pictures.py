"""The folders of sentence-transformers for encoders of pictures: written, and recognised when they are loaded again.

Since version 5.4 its Transformer module runs any model of transformers: sentence_bert_config.json names the method that
each modality calls (`modality_config`) and the output that the next module reads. CLIP-like models end in their own
projection and need no Pooling; a picture transformer is pooled at its first token, over its patches, or by its head.

Such a folder is a transformers folder too. What decides the vectors stands in `Pipeline`; a folder whose description
says anything else than vembed would run is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vembed.errors import ConfigError
from vembed.models.dual import DUAL_FAMILIES, DualEncoder
from vembed.models.vision import VISION_FAMILIES, VisionEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.huggingface import ModelFiles

MODULES_FILE = "modules.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
GENERAL_FILE = "config_sentence_transformers.json"
MODULE_PREFIX = "sentence_transformers.models."
"""The import path under which every version finds its modules; newer ones map it to the new place."""

HARMLESS = ("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name")
"""Settings of a Transformer module that are compared elsewhere, or that pictures and these tokenizers don't see."""

_SENTENCE = "sentence_embedding"
_TOKENS = "token_embeddings"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What sentence-transformers must do to give an encoder's vectors.

    Attributes:
        modalities: Modality -> (method of the model, output of it).
        output: What the Transformer module calls its result: tokens to be pooled, or the embedding itself.
        pooling: Mode of the Pooling module, None where there is none.
        processing: Modality -> arguments for the tokenizer or the image processor.
        needs_processing: Whether those decide the vectors, rather than say what holds anyway.
        max_length: Longest text in tokens, None without texts.
    """

    modalities: dict[str, tuple[str, str]]
    output: str
    pooling: str | None
    processing: dict[str, dict[str, object]]
    needs_processing: bool
    max_length: int | None

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules, in order."""
        return ("Transformer", *(("Pooling",) if self.pooling else ()), "Normalize")

    def transformer_config(self) -> dict[str, object]:
        """Return what stands in sentence_bert_config.json."""
        config: dict[str, object] = {} if self.max_length is None else {"max_seq_length": self.max_length}
        config["transformer_task"] = "feature-extraction"
        config["modality_config"] = {
            modality: {"method": method, "method_output_name": output}
            for modality, (method, output) in self.modalities.items()
        }
        config["module_output_name"] = self.output
        if self.processing:
            config["processing_kwargs"] = self.processing
        return config


def pipeline_of(encoder: DualEncoder | VisionEncoder) -> Pipeline:
    """Return what sentence-transformers must do to give the encoder's vectors."""
    return _dual_pipeline(encoder) if isinstance(encoder, DualEncoder) else _vision_pipeline(encoder)


def _dual_pipeline(encoder: DualEncoder) -> Pipeline:
    """CLIP and SigLIP: both towers by their own methods; texts unmasked, as `DualEncoder` reads them."""
    text: dict[str, object] = {"padding_side": "right", "return_attention_mask": False}
    if encoder.family.pads_texts:
        side = encoder.tokenizer.padding_side
        text |= {"padding": "max_length", "max_length": encoder.max_length, "padding_side": side}
    processing = {"text": text}
    # The processor of SigLIP 2 has sizes of its own that would win over those of the image processor's file.
    sizes = {
        key: value
        for key in ("patch_size", "max_num_patches")
        if (value := getattr(encoder.image_processor, key, None)) is not None
    }
    if sizes:
        processing["image"] = sizes
    return Pipeline(
        modalities={
            "text": ("get_text_features", "pooler_output"),
            "image": ("get_image_features", "pooler_output"),
        },
        output=_SENTENCE,
        pooling=None,
        processing=processing,
        needs_processing=encoder.family.pads_texts or bool(sizes),
        max_length=encoder.max_length,
    )


def _vision_pipeline(encoder: VisionEncoder) -> Pipeline:
    """ViT, DINO and picture towers: their tokens pooled, or what their head makes of them."""
    pooling = encoder.family.pooling
    by_head = pooling == "head"
    return Pipeline(
        modalities={"image": ("forward", "pooler_output" if by_head else "last_hidden_state")},
        output=_SENTENCE if by_head else _TOKENS,
        pooling=None if by_head else pooling,
        processing={},
        needs_processing=False,
        max_length=None,
    )


def write_picture_pipeline(encoder: DualEncoder | VisionEncoder, folder: Path) -> None:
    """Write a folder that sentence-transformers (5.4 and later), transformers and vembed load.

    Args:
        encoder: The encoder.
        folder: Where to; made where it is missing.
    """
    encoder.save(folder)
    pipeline = pipeline_of(encoder)
    _write_json(folder / TRANSFORMER_FILE, pipeline.transformer_config())
    general = {"prompts": dict(encoder.prompts), "default_prompt_name": None, "similarity_fn_name": "cosine"}
    _write_json(folder / GENERAL_FILE, general)
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(pipeline.modules) if number)]
    for path, kind in zip(paths, pipeline.modules, strict=True):
        if kind == "Pooling":
            pooling = {"word_embedding_dimension": encoder.dimension, "pooling_mode": pipeline.pooling}
            _write_json(folder / path / "config.json", pooling)
        elif kind == "Normalize":
            (folder / path).mkdir(exist_ok=True)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{MODULE_PREFIX}{kind}"}
        for number, (path, kind) in enumerate(zip(paths, pipeline.modules, strict=True))
    ]
    _write_json(folder / MODULES_FILE, modules)


def names_picture_model(files: ModelFiles) -> bool:
    """Return whether a folder of sentence-transformers holds one of the families with an image tower."""
    modules = _read_json(files, MODULES_FILE)
    first = modules[0] if isinstance(modules, list) and modules else None
    if not isinstance(first, dict) or first.get("path") or not str(first.get("type")).endswith(".Transformer"):
        return False
    config = _read_json(files, "config.json")
    return isinstance(config, dict) and config.get("model_type") in {*DUAL_FAMILIES, *VISION_FAMILIES}


def refuse_other_pipeline(encoder: DualEncoder | VisionEncoder, files: ModelFiles) -> None:
    """Refuse a folder of sentence-transformers that describes other vectors than the encoder gives.

    Args:
        encoder: What was loaded from the folder.
        files: The folder.

    Raises:
        ConfigError: It does; the message says where they differ.
    """
    expected = pipeline_of(encoder)
    modules = _read_json(files, MODULES_FILE)
    assert isinstance(modules, list)
    kinds = tuple(str(module["type"]).rpartition(".")[2] for module in modules)
    transformer = _read_json(files, TRANSFORMER_FILE)
    general = _read_json(files, GENERAL_FILE)
    assert isinstance(transformer, dict)
    assert isinstance(general, dict)
    found: dict[str, tuple[object, object]] = {}
    # Without a Normalize, vectors that are compared by their angle are the same.
    is_cosine = general.get("similarity_fn_name") in (None, "cosine")
    wanted = expected.modules if "Normalize" in kinds or not is_cosine else expected.modules[:-1]
    found[f"the modules of {MODULES_FILE}"] = (kinds, wanted)
    if expected.pooling:
        path = next((module["path"] for module in modules if str(module["type"]).endswith(".Pooling")), "")
        pooling = _read_json(files, f"{path}/config.json")
        assert isinstance(pooling, dict)
        found["pooling_mode"] = (pooling.get("pooling_mode"), expected.pooling)
    own = expected.transformer_config()
    for key in ("modality_config", "module_output_name"):
        found[key] = (transformer.get(key), own[key])
    processing = transformer.get("processing_kwargs") or {}
    if processing or expected.needs_processing:
        found["processing_kwargs"] = (processing, expected.processing)
    others = {key: value for key, value in transformer.items() if key not in HARMLESS and value not in (None, {})}
    others.pop("processing_kwargs", None)
    found["other settings"] = (others, {})
    if any(dict(general.get("prompts") or {}).values()):
        found["prompts"] = (general["prompts"], {})
    for what, (there, here) in found.items():
        if there != here:
            raise ConfigError(
                f"{files.options.name}: {what} say {there!r}, and vembed runs {here!r} for this family. Ignoring that "
                f"would give other vectors"
            )


def _read_json(files: ModelFiles, file: str) -> Any:
    """Return what a file of a model holds, an empty object where there is no such file."""
    path = files.read(file)
    if path is None:
        return {}
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is broken: {error}") from error
    wanted = list if file == MODULES_FILE else dict
    if not isinstance(loaded, wanted):
        raise ConfigError(f"{path} must hold a {wanted.__name__}, and holds a {type(loaded).__name__}")
    return loaded


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
