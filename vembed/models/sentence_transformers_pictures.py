"""The folders of sentence-transformers for encoders of pictures: written, and recognised when they are loaded again.

Since version 5.4 its Transformer module runs any model of transformers: sentence_bert_config.json names the method that
each modality calls (`modality_config`) and the output that the next module reads. CLIP-like models end in their own
projection and need no Pooling; a picture transformer is pooled at its first token, over its patches, or by its head.

Such a folder is a transformers folder too. What decides the vectors stands in `Pipeline`; a folder whose description
says anything else than vembed would run is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.models.encoder import Encoder
from vembed.models.sentence_transformers_format import MODULES_FILE, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.encoder import Form
    from vembed.models.files import ModelFiles

TRANSFORMER_FILE = "sentence_bert_config.json"
GENERAL_FILE = "config_sentence_transformers.json"
MODULE_PREFIX = "sentence_transformers.models."
"""The import path under which every version finds its modules; newer ones map it to the new place."""

HARMLESS = ("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name")
"""Settings of a Transformer module that are compared elsewhere, or that pictures and these tokenizers don't see."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What sentence-transformers must do to give an encoder's vectors."""

    modalities: dict[str, tuple[str, str]]  # modality -> method of the model, and output of it
    pooling: str | None = None  # mode of the Pooling module; None where the output is the embedding itself
    processing: dict[str, dict[str, object]] = field(default_factory=dict)  # arguments by modality
    needs_processing: bool = False  # whether those decide the vectors, rather than say what holds anyway
    max_length: int | None = None  # longest text in tokens

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
        config["module_output_name"] = "token_embeddings" if self.pooling else "sentence_embedding"
        if self.processing:
            config["processing_kwargs"] = self.processing
        return config


class TransformersPictures(Encoder):
    """A model of transformers with an image tower, which sentence-transformers (5.4 and later) runs too."""

    marker = "config.json"
    reads = frozenset({"attn_implementation", "model_revision", "load_in_4bit", "image_background"})

    @abstractmethod
    def pipeline(self) -> Pipeline:
        """Return what sentence-transformers must do to give the encoder's vectors."""

    def export_forms(self) -> tuple[Form, ...]:
        """Return transformers and sentence-transformers."""
        return ("transformers", "sentence-transformers")

    def write_form(self, form: Form, folder: Path) -> None:
        """Write a folder of transformers, with sentence-transformers' description where it is for that."""
        self.save(folder)
        if form == "sentence-transformers":
            self.describe_pipeline(folder)

    def describe_pipeline(self, folder: Path) -> None:
        """Write sentence-transformers' description beside the files of transformers."""
        pipeline = self.pipeline()
        write_json(folder / TRANSFORMER_FILE, pipeline.transformer_config())
        general = {"prompts": self.prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        write_json(folder / GENERAL_FILE, general)
        paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(pipeline.modules) if number)]
        for path, kind in zip(paths, pipeline.modules, strict=True):
            if kind == "Pooling":
                pooling = {"word_embedding_dimension": self.dimension, "pooling_mode": pipeline.pooling}
                write_json(folder / path / "config.json", pooling)
            elif kind == "Normalize":
                (folder / path).mkdir(exist_ok=True)
        modules = [
            {"idx": number, "name": str(number), "path": path, "type": f"{MODULE_PREFIX}{kind}"}
            for number, (path, kind) in enumerate(zip(paths, pipeline.modules, strict=True))
        ]
        write_json(folder / MODULES_FILE, modules)


def model_type_of(files: ModelFiles) -> str:
    """Return the model_type of config.json; "" where sentence-transformers keeps its transformer in a subfolder."""
    if files.read(MODULES_FILE) is not None:
        modules = files.read_json(MODULES_FILE, list)
        first = modules[0] if modules else None
        if not isinstance(first, dict) or first.get("path") or not str(first.get("type")).endswith(".Transformer"):
            return ""
    return str(files.config().model_type)


def refuse_other_pipeline(expected: Pipeline, files: ModelFiles) -> None:
    """Refuse a folder of sentence-transformers that describes other vectors than vembed gives.

    Args:
        files: The folder; any other one is fine, and so is one of which only the image tower is meant.

    Raises:
        ConfigError: It describes others; the message says where they differ.
    """
    if files.image_tower or files.read(MODULES_FILE) is None:
        return
    modules = files.read_json(MODULES_FILE, list)
    kinds = tuple(str(module["type"]).rpartition(".")[2] for module in modules)
    transformer = files.read_json(TRANSFORMER_FILE)
    general = files.read_json(GENERAL_FILE)
    found: dict[str, tuple[object, object]] = {}
    # Without a Normalize, vectors that are compared by their angle are the same.
    is_cosine = general.get("similarity_fn_name") in (None, "cosine")
    wanted = expected.modules if "Normalize" in kinds or not is_cosine else expected.modules[:-1]
    found[f"the modules of {MODULES_FILE}"] = (kinds, wanted)
    if expected.pooling:
        path = next((module["path"] for module in modules if str(module["type"]).endswith(".Pooling")), "")
        pooling = files.read_json(f"{path}/config.json")
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
                f"{files.name}: {what} say {there!r}, and vembed runs {here!r} for this family. Ignoring that "
                f"would give other vectors"
            )
