"""Text models that sentence-transformers itself runs: those whose modules vembed has no code for.

The library tokenizes, adds prompts, pads and computes. vembed cuts the batch into chunks, calls the library for each of
them twice with the same random numbers, and owns loss, gradients and checkpoints, as with its own encoders. What
vembed's own reader understands never comes here: it is faster, packs rows and needs no extra package. A module that
looks at padding, such as its CNN, makes a vector depend on the texts beside it, here as there.

Shape legend: R rows of a chunk, E embedding dim.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vembed.batch import Features, Ragged, texts_of
from vembed.errors import ConfigError
from vembed.models.encoder import About, Encoder
from vembed.models.files import WEIGHTS_FILE, prepare_backbone
from vembed.models.sentence_transformers_format import (
    MODULES_FILE,
    first_module,
    is_cosine,
    load_dense,
    read_prompts,
    read_sentence_transformers,
)
from vembed.models.towers import find_tower, transformer_depth, transformer_period
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.models.encoder import Form, Similarity
    from vembed.models.files import ModelFiles
    from vembed.models.towers import Tower

SIDES: tuple[Side, ...] = ("query", "document")

READ_AT_ONCE = 256
"""Texts that the library tokenizes in one call, padded to the longest of them, to learn their lengths."""

PLACES = "places"
"""Beside a side's inputs: the rows of the chunk that they are."""


class SentenceTransformersEncoder(Encoder):
    """A model of sentence-transformers as that library runs it.

    Args:
        model: A SentenceTransformer.
        reason: Why vembed doesn't run it by itself.
    """

    about = About(
        models="Other folders of sentence-transformers",
        decides="a modules.json that none of these reads",
        pooling="as its modules say",
        prompts="as its files say",
        trainable="all",
        writes="sentence-transformers",
    )
    reads = frozenset({"query_prompt", "document_prompt", "attn_implementation", "model_revision"})

    def __init__(self, name: str, *, model: Any, prompts: Mapping[Side, str], normalize: bool, reason: str) -> None:
        super().__init__()
        self.name = name
        self.model: nn.Module = model
        self.normalize = normalize
        self._prompts = dict(prompts)
        self._reason = reason
        self.max_length = _longest(model.max_seq_length)
        if self.adapter_host() is not None:
            prepare_backbone(model.transformers_model)
        self._settings = {side: self._read(["a"], side)[1] for side in SIDES}
        tensors, settings = self._read(["a"], "query")
        with torch.no_grad():
            self.dimension = int(model({**settings, **tensors}, task="query")["sentence_embedding"].shape[1])

    @classmethod
    def recognises(cls, files: ModelFiles) -> bool:
        """Return whether a model is one of sentence-transformers that vembed's own reader refuses."""
        return bool(_refusal(files))

    @classmethod
    def load(cls, files: ModelFiles, texts: Iterable[str] = ()) -> SentenceTransformersEncoder:  # noqa: ARG003
        """Let the library load the model.

        Raises:
            ConfigError: It can't either, or it isn't installed; the message begins with what vembed's reader refuses.
        """
        reason = _refusal(files)
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ConfigError(f"{reason} Or let sentence-transformers run it: pip install vembed[st]") from error
        general = files.read_json("config_sentence_transformers.json")
        modules = files.read_json(MODULES_FILE, list)
        _refuse_unsafe(files, modules, reason)
        prompts: dict[Side, str] = {"query": "", "document": "", **read_prompts(general, files.name)}
        given: dict[Side, str | None] = {"query": files.keys.query_prompt, "document": files.keys.document_prompt}
        prompts |= {side: prompt for side, prompt in given.items() if prompt is not None}
        normalize = str(modules[-1]["type"]).endswith(".Normalize") or is_cosine(general, files.name)
        how: dict[str, Any] = {"dtype": files.dtype}
        if files.keys.attn_implementation != "auto":
            how["attn_implementation"] = files.keys.attn_implementation
        if not files.keys.allow_pickle:
            how["use_safetensors"] = True
        try:
            model = SentenceTransformer(
                files.name,
                device="cpu",
                revision=files.keys.model_revision,
                trust_remote_code=files.keys.trust_remote_code,
                model_kwargs=how,
            )
            _cast_rest(model, files.dtype)
            if "text" not in model.modalities:
                raise ConfigError(reason)
            model.prompts = {str(side): prompt for side, prompt in prompts.items()}
            model.default_prompt_name = None
            return cls(files.name, model=model, prompts=prompts, normalize=normalize, reason=reason)
        except (OSError, ValueError, LookupError, RuntimeError, ImportError, TypeError, AttributeError) as error:
            first = first_line(error)
            raise ConfigError(f"{reason} sentence-transformers can't run it either: {first}") from error

    @property
    def _library(self) -> Any:
        """The model, for its own methods."""
        return self.model

    @property
    def similarity(self) -> Similarity:
        """The dot product where nothing normalises, else the cosine."""
        return "cosine" if self.normalize else "dot"

    @property
    def prompts(self) -> dict[Side, str]:
        """Text that is put before each side's items."""
        return dict(self._prompts)

    def _read(self, texts: list[str], side: Side) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Let the library tokenize texts; return tensors, and what else its modules read, the same for all texts."""
        made = self._library.preprocess(texts, prompt=self._prompts[side] or None, task=side)
        tensors = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        return tensors, {name: value for name, value in made.items() if name not in tensors}

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        """Keep the texts as they are, with their lengths in tokens; the library tokenizes them chunk by chunk."""
        texts = texts_of(items)
        slices = [texts[start : start + READ_AT_ONCE] for start in range(0, len(texts), READ_AT_ONCE)]
        lengths = np.concatenate([_lengths(self._read(part, side)[0], len(part)) for part in slices])
        # It doesn't say what it cut: texts of just the full length count too.
        num_truncated = 0 if self.max_length is None else int((lengths >= self.max_length).sum())
        encoded = Ragged.from_rows([np.frombuffer(text.encode(), dtype=np.uint8) for text in texts], np.uint8)
        sides = np.full(len(texts), SIDES.index(side), dtype=np.int8)
        return Features({"text": encoded}, lengths.clip(min=1), {"side": sides}, num_truncated)

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Let the library tokenize and pad the rows, those of each side by themselves: prompts may count as lengths."""
        encoded = features.columns["text"].take(rows)
        starts = encoded.offsets.tolist()
        inputs: dict[str, Tensor] = {}
        for number, side in enumerate(SIDES):
            places = np.flatnonzero(features.per_row["side"][rows] == number)
            if len(places):
                texts = [encoded.values[starts[row] : starts[row + 1]].tobytes().decode() for row in places]
                inputs |= {f"{side}.{name}": tensor for name, tensor in self._read(texts, side)[0].items()}
                inputs[f"{side}.{PLACES}"] = torch.from_numpy(places)
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return embeddings (R, E), at least float32."""
        parts, places = [], []
        for side in SIDES:
            own = {name.removeprefix(f"{side}."): each for name, each in inputs.items() if name.startswith(f"{side}.")}
            if own:
                places.append(own.pop(PLACES))
                parts.append(self.model({**self._settings[side], **own}, task=side)["sentence_embedding"])
        z_RE = parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat(places).argsort()]
        z_RE = z_RE.to(torch.promote_types(z_RE.dtype, torch.float32))
        return F.normalize(z_RE, dim=-1) if self.normalize else z_RE

    def save(self, folder: Path) -> None:
        """Let the library write its folder."""
        self._library.save(str(folder), create_model_card=False)

    def describe(self) -> dict[str, str]:
        """Return what runs it and why."""
        kinds = " + ".join(type(module).__name__ for module in self.model.children())
        return {
            "family": f"run by sentence-transformers {version('sentence-transformers')}: {kinds}",
            "why": self._reason,
            "max_seq_length": "none" if self.max_length is None else str(self.max_length),
            "query_prompt": repr(self._prompts["query"]),
            "document_prompt": repr(self._prompts["document"]),
            "similarity": "cosine" if self.normalize else "dot product",
            **self.training_facts(),
        }

    def towers(self) -> tuple[Tower, ...]:
        """Return the one tower."""
        host: Any = self.adapter_host()
        if host is None:
            return (find_tower(self, "text", parts=("model",), period=0),)
        config = host.config.get_text_config()
        depth, period = transformer_depth(config), transformer_period(config)
        return (find_tower(self, "text", parts=("model",), depth=depth, period=period),)

    def adapter_host(self) -> nn.Module | None:
        """Return the transformer, where the model has one."""
        host: nn.Module | None = self._library.transformers_model
        return host

    def export_forms(self) -> tuple[Form, ...]:
        """Return sentence-transformers, which alone runs its modules."""
        return ("sentence-transformers",)


def _refusal(files: ModelFiles) -> str:
    """Return why vembed's own reader of texts refuses a model of sentence-transformers; empty for all other models."""
    if not first_module(files):
        return ""
    try:
        described = read_sentence_transformers(files)
        for path in described.dense_paths if described is not None else ():
            load_dense(files, path)
    except ConfigError as error:
        return f"{str(error).rstrip('.')}."
    return ""


def _refuse_unsafe(files: ModelFiles, modules: list[dict[str, Any]], reason: str) -> None:
    """Refuse pickled weights, and an activation that the library replaces by another one with a word in its log.

    Raises:
        ConfigError: The user doesn't allow what it needs.
    """
    for module in modules:
        prefix = f"{module['path']}/" if module["path"] else ""
        activation = str(files.read_json(f"{prefix}config.json").get("activation_function", "torch."))
        if not activation.startswith("torch.") and not files.keys.trust_remote_code:
            raise ConfigError(reason)
        pickled = files.read(f"{prefix}{WEIGHTS_FILE}") is None and files.read(f"{prefix}pytorch_model.bin") is not None
        if pickled and not files.keys.allow_pickle:
            raise ConfigError(f"{reason} {prefix}pytorch_model.bin is a pickle, which can run code: allow_pickle: true")


@torch.no_grad()
def _cast_rest(model: Any, dtype: torch.dtype) -> None:
    """Give what stands beside the transformer its type, which it has from loading: some of its buffers stay float32."""
    host = model.transformers_model
    inside = set() if host is None else {id(each) for each in (*host.parameters(), *host.buffers())}
    for each in (*model.parameters(), *model.buffers()):
        if id(each) not in inside and each.is_floating_point():
            each.data = each.data.to(dtype)


def _longest(limit: float | None) -> int | None:
    """Return the longest text in tokens as the library says it; it has several words for no limit."""
    return int(limit) if limit is not None and limit < 1_000_000 else None


def _lengths(tensors: Mapping[str, Tensor], count: int) -> NDArray[np.int64]:
    """Return the tokens of each of n texts by what their tokenizer made, 1 where it doesn't say."""
    if "attention_mask" in tensors:
        return tensors["attention_mask"].sum(dim=1).numpy().astype(np.int64)
    if "offsets" in tensors:
        ends = torch.cat([tensors["offsets"], torch.tensor([len(tensors["input_ids"])])])
        return ends.diff().numpy().astype(np.int64)
    return np.ones(count, dtype=np.int64)
