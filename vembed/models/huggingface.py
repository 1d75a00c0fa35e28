"""Read the files of a model from a hub id or a folder, and load a text encoder from them.

A text encoder follows sentence-transformers' description first, else its family's.

Nothing runs that a model's files bring along unless the user says so: remote code needs `trust_remote_code` and a
pinned revision, pickled weights need `allow_pickle` (and are then read with weights_only).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoImageProcessor, AutoModelForTextEncoding, AutoTokenizer
from transformers.utils.hub import cached_file

from vembed.data.images import ImageLimits
from vembed.errors import ConfigError, MachineError
from vembed.models.adapters.quantized import four_bit_config
from vembed.models.families import family_of
from vembed.models.sentence_transformers_format import load_dense, read_sentence_transformers
from vembed.models.text import TextEncoder, TextSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from vembed.batch import Side
    from vembed.models.pooling import PoolingMode
    from vembed.models.sentence_transformers_format import SentenceTransformersFolder
    from vembed.models.text import Dense

FALLBACK_MAX_LENGTH = 512
"""Where neither the tokenizer nor the config of a model names a longest input."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a user may say about a model; None and False leave it to the model's own files.

    Attributes:
        name: Hub id, local folder or `builtin:NAME`.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Whether code that the model brings along may run.
        allow_pickle: Whether weights may be read from pickled files.
        dtype: Type of the weights.
        attn_implementation: "sdpa", "eager", "flash_attention_2", or None.
        pooling: "mean", "cls", "last_token", or None.
        max_length: Longest input in tokens, or None.
        prompts: Prompts of the sides that the user gave.
        pad_token: Token to pad with, for tokenizers that have none.
        gradient_checkpointing: Whether activations are recomputed in backward.
        image_limits: What a picture may be.
        load_in_4bit: Whether the weights of linear layers are held in 4 bits.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    dtype: torch.dtype = torch.float32
    attn_implementation: str | None = None
    pooling: str | None = None
    max_length: int | None = None
    prompts: Mapping[Side, str] | None = None
    pad_token: str | None = None
    gradient_checkpointing: bool = False
    image_limits: ImageLimits = field(default_factory=ImageLimits)
    load_in_4bit: bool = False


def load_text_encoder(options: ModelOptions, source: ModelFiles | None = None) -> TextEncoder:
    """Load a transformer and everything around it.

    Args:
        options: What the user said about the model.
        source: Its files, where they are read otherwise than by `ModelFiles`.

    Raises:
        ConfigError: When the model needs something that isn't allowed or isn't known; the message names the key to set.
        MachineError: When the hub can't be reached or a package is missing.
    """
    source = source or ModelFiles(options)
    described = read_sentence_transformers(source.read, options.name)
    subfolder = described.transformer_path if described is not None else ""
    config = source.config(subfolder)
    tokenizer = source.tokenizer(subfolder)
    backbone = source.backbone(subfolder, config, family_of(config).auto_class)
    spec = _spec(options, described, config, tokenizer)
    # The backbone has its type from loading; .to would also round the rotary frequencies, which stay float32.
    dense = [
        load_dense(source.read, path, options.name).to(options.dtype)
        for path in (described.dense_paths if described else ())
    ]
    _check_dense(dense, backbone, spec, options.name)
    return TextEncoder(options.name, backbone=backbone, tokenizer=tokenizer, spec=spec, dense=dense)


def _check_dense(dense: list[Dense], backbone: PreTrainedModel, spec: TextSpec, name: str) -> None:
    """Refuse dense layers that don't take what comes before them: pooling_method may have been overridden."""
    width = int(backbone.config.get_text_config().hidden_size) * len(spec.pooling)
    for layer in dense:
        if layer.linear.in_features != width:
            raise ConfigError(
                f"{name}: a Dense layer takes {layer.linear.in_features} values, pooling {' + '.join(spec.pooling)} "
                f"leaves {width}; leave pooling_method out"
            )
        width = layer.linear.out_features


class ModelFiles:
    """The files of one model, local or on the hub."""

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.local = Path(options.name) if Path(options.name).is_dir() else None

    def read(self, file: str) -> Path | None:
        """Return the local path of one of the model's files, or None when it has no such file."""
        if self.local is not None:
            path = self.local / file
            return path if path.is_file() else None
        try:
            found = cached_file(
                self.options.name,
                file,
                revision=self.options.revision,
                _raise_exceptions_for_missing_entries=False,
            )
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error
        return None if found is None else Path(found)

    def _unreachable(self, error: Exception) -> MachineError:
        return MachineError(
            f"model_name {self.options.name!r} is no folder here and could not be read from the hub: "
            f"{_first_line(error)}. Check the spelling, log in for a private model, or name a local folder; "
            f"a model that was loaded once works offline with HF_HUB_OFFLINE=1."
        )

    def config(self, subfolder: str) -> PreTrainedConfig:
        """Load config.json."""
        loaded: PreTrainedConfig = self._load(AutoConfig, subfolder)
        return loaded

    def tokenizer(self, subfolder: str) -> PreTrainedTokenizerBase:
        """Load the tokenizer; it must be able to pad."""
        tokenizer: PreTrainedTokenizerBase = self._load(AutoTokenizer, subfolder)
        self._refuse_empty(tokenizer, f"{subfolder}/" if subfolder else "")
        if self.options.pad_token is not None:
            if self.options.pad_token not in tokenizer.get_vocab():
                raise ConfigError(
                    f"pad_token {self.options.pad_token!r} is not in the vocabulary of {self.options.name}"
                )
            tokenizer.pad_token = self.options.pad_token
        if tokenizer.pad_token_id is None:
            named = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
            suggestion = named or tokenizer.convert_ids_to_tokens(0)
            raise ConfigError(
                f"the tokenizer of {self.options.name} has no pad token; set pad_token: {suggestion!r} (padding is "
                f"masked, so any token of its vocabulary will do)"
            )
        return tokenizer

    def _refuse_empty(self, tokenizer: PreTrainedTokenizerBase, prefix: str) -> None:
        """Refuse a tokenizer that no file describes: transformers makes one that knows special tokens only."""
        own = tuple(tokenizer.vocab_files_names.values())  # empty where there is no vocabulary, as with bytes
        usual = ("tokenizer.json", "tokenizer.model", "tekken.json")
        if own and not any(self.read(prefix + file) for file in (*usual, *own)):
            raise ConfigError(
                f"{self.options.name} has no tokenizer: none of {', '.join(dict.fromkeys((*own, *usual)))} is there. "
                f"Copy the tokenizer's files beside its config.json"
            )

    def image_processor(self) -> Any:
        """Load the image processor: the sizes, crops and means that the model was trained with."""
        return self._load(AutoImageProcessor, "")

    def backbone(self, subfolder: str, config: PreTrainedConfig, auto_class: type) -> PreTrainedModel:
        """Load the transformer in the wanted type and attention."""
        self._refuse_pickle(f"{subfolder}/" if subfolder else "")
        extra: dict[str, Any] = {"dtype": self.options.dtype, "use_safetensors": not self.options.allow_pickle}
        if self.options.allow_pickle:
            extra["use_safetensors"] = None  # prefer safetensors, take pickled weights with weights_only otherwise
        if self.options.load_in_4bit:
            extra["quantization_config"] = four_bit_config()
        if self.options.attn_implementation is not None:
            extra["attn_implementation"] = self.options.attn_implementation
        backbone: PreTrainedModel
        backbone, loading = self._load(auto_class, subfolder, config=config, output_loading_info=True, **extra)
        prepare_backbone(backbone)
        self._refuse_missing(backbone, sorted(loading["missing_keys"]))
        return backbone

    def _refuse_missing(self, backbone: PreTrainedModel, missing: list[str]) -> None:
        """Refuse weights that no file holds and that would be random; a pooler alone is left out."""
        needed = [key for key in missing if not key.startswith("pooler.")]
        if needed:
            raise ConfigError(
                f"{self.options.name}: {len(needed)} weights of {type(backbone).__name__} are in none of its files, "
                f"first {needed[0]}; they would be random"
            )
        if missing and "add_pooling_layer" in inspect.signature(type(backbone)).parameters:
            # As add_pooling_layer=False: otherwise random numbers would be saved with the model.
            backbone.pooler = None  # type: ignore[assignment]

    def _refuse_pickle(self, prefix: str) -> None:
        if self.options.allow_pickle:
            return
        safe = (f"{prefix}model.safetensors", f"{prefix}model.safetensors.index.json")
        pickled = (f"{prefix}pytorch_model.bin", f"{prefix}pytorch_model.bin.index.json")
        if not any(self.read(file) for file in safe) and any(self.read(file) for file in pickled):
            raise ConfigError(
                f"{self.options.name} has its weights only as a pickle, which can run code when it is read; set "
                f"allow_pickle: true to read it with weights_only, or convert it to safetensors"
            )

    def _load(self, auto_class: Any, subfolder: str, **extra: Any) -> Any:
        try:
            return auto_class.from_pretrained(
                self.options.name,
                subfolder=subfolder,
                revision=self.options.revision,
                trust_remote_code=self.options.trust_remote_code,
                **extra,
            )
        except ImportError as error:
            raise MachineError(f"{self.options.name}: {_first_line(error)}") from error
        except (OSError, ValueError, KeyError, SafetensorError, UnpicklingError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> Exception:
        """Turn the library's error into one that names our key."""
        if "trust_remote_code" in str(error):
            return ConfigError(
                f"{self.options.name} brings code of its own that would run on this machine; read it, then set "
                f"trust_remote_code: true and model_revision to the commit that you read"
            )
        if isinstance(error, UnpicklingError):  # the library's own text advises to switch the protection off
            return ConfigError(
                f"{self.options.name}: its pickled weights hold something else than tensors, which could run code; "
                f"convert them to safetensors"
            )
        if self.local is None and isinstance(error, OSError):
            return self._unreachable(error)
        return ConfigError(f"{self.options.name} could not be loaded: {_first_line(error)}")


def prepare_backbone(backbone: PreTrainedModel) -> None:
    """Switch off what an embedding has no use for."""
    pooler = getattr(backbone, "pooler", None)
    if isinstance(pooler, torch.nn.Module):
        pooler.requires_grad_(requires_grad=False)  # a head of pre-training: no part of the embedding
    for config in (backbone.config, backbone.config.get_text_config()):
        if getattr(config, "use_cache", False):
            config.use_cache = False  # keys and values of past tokens: nothing here generates text


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _spec(
    options: ModelOptions,
    described: SentenceTransformersFolder | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> TextSpec:
    """Decide pooling, length and prompts: the user's word, else sentence-transformers' files, else the family."""
    if described is not None:
        spec = TextSpec(
            pooling=described.pooling,
            max_length=0,
            prompts=described.prompts,
            include_prompt=described.include_prompt,
            normalize=described.normalize,
            lower_case=described.lower_case,
            origin={"pooling": "modules.json", "similarity": "modules.json"},
        )
    else:
        family = family_of(config)
        if getattr(config, "is_encoder_decoder", False) and family.auto_class is not AutoModelForTextEncoding:
            raise ConfigError(
                f"{options.name} is an encoder-decoder ({config.model_type}) whose encoder half transformers doesn't "
                f"load alone; its output would be the decoder's. Take an encoder, a decoder or a T5-like model"
            )
        spec = TextSpec(pooling=(family.pooling,), max_length=0, origin={"pooling": f"{family.name}: {family.reason}"})
    max_length, length_origin = _max_length(options, described, config, tokenizer)
    origin = {**spec.origin, "max_seq_length": length_origin}
    spec = replace(spec, max_length=max_length, prompts={**spec.prompts, **(options.prompts or {})})
    if options.pooling is not None:
        wanted: PoolingMode = "lasttoken" if options.pooling == "last_token" else options.pooling  # type: ignore[assignment]
        spec = replace(spec, pooling=(wanted,))
        origin["pooling"] = "pooling_method"
    return replace(spec, origin=origin)


def _max_length(
    options: ModelOptions,
    described: SentenceTransformersFolder | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[int, str]:
    """Return the longest input and where it was read."""
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and positions < 1:
        positions = None
    offset = _position_offset(config)
    limit = None if positions is None else positions - offset
    if options.max_length is not None:
        if limit is not None and options.max_length > limit:
            raise ConfigError(
                f"max_seq_length {options.max_length} is over the {limit} positions that {options.name} was built with"
            )
        return options.max_length, "max_seq_length"
    if described is not None and described.max_length is not None:
        if limit is not None and offset and described.max_length > limit:
            return limit, "config.json"  # the file forgot the positions that this family loses
        return described.max_length, "sentence_bert_config.json"
    candidates = {"tokenizer_config.json": tokenizer.model_max_length, "config.json": limit}
    known = {file: length for file, length in candidates.items() if length is not None and length < 1_000_000}
    if not known:
        return FALLBACK_MAX_LENGTH, "no file names one"
    file = min(known, key=lambda name: known[name])
    return known[file], file


def _position_offset(config: PreTrainedConfig) -> int:
    """Return how many positions RoBERTa-like models lose: theirs start behind the padding id."""
    roberta_like = {
        *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "xmod"),
        *("mpnet", "longformer", "data2vec-text", "ibert", "luke"),
    }
    if config.model_type not in roberta_like:
        return 0
    pad = getattr(config, "pad_token_id", None)
    return (pad if isinstance(pad, int) else 1) + 1
