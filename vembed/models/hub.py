"""The model that a name means, and its files: a folder, a model of the hub, or a description without weights.

`ModelFiles` reads configs, tokenizers and weights; `SkeletonFiles` gives the same model without any weights, for the
plan. Below stand the files that families of our own write, and fingerprints, which tell one model from another.

Nothing runs that a model's files bring along unless the user says so: remote code needs `trust_remote_code` and a
pinned revision, pickled weights need `allow_pickle` (and are then read with weights_only).
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import time
from collections.abc import Mapping  # noqa: TC003
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, get_args

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from vembed.batch import Background, Side
from vembed.errors import ConfigError, MachineError
from vembed.files import home_path, is_file, is_folder
from vembed.models.checked_files import (
    CONFIG_KINDS,
    KINDS,
    Module,
    check_folder,
    load_module,
    load_weights,
    make_module,
    read_json,
)
from vembed.models.encoder import Similarity  # noqa: TC001 - read by pydantic in ModelIdentity
from vembed.models.names import locate, nearest_folder
from vembed.text import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from vembed.models.encoder import Encoder
    from vembed.models.keys import ModelKeys

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of weights by the names of the configuration."""

WEIGHTS_FILE = "model.safetensors"
"""File of the weights of encoders in vembed's own form."""

PICTURES_FILE = "vembed_pictures.json"
"""Says on what background pictures stood in training, where that wasn't white."""

PICTURE_SIDE = 224
"""In pixels, where the config of an image tower names none."""

SECONDS_PER_ANSWER = 60
"""How long an answer to whether the hub can be reached holds."""

_log = logging.getLogger(__name__)

READ_BY = {
    "AutoConfig": "config.json",
    "AutoTokenizer": "tokenizer.json and tokenizer_config.json",
    "AutoImageProcessor": "preprocessor_config.json",
    "AutoProcessor": "processor_config.json, preprocessor_config.json, chat_template.jinja, tokenizer.json and "
    "tokenizer_config.json",
}
"""Class of transformers -> the files that it reads, for messages; other classes read config.json and the weights."""


class ModelFiles:
    """A model by its name: what the user said about it, and its files."""

    def __init__(self, keys: ModelKeys, *, load_in_4bit: bool = False) -> None:
        self.name = locate(keys.model_name).name  # hub id, folder, or another name that a family of models takes
        self.keys = keys if self.name == keys.model_name else keys.model_copy(update={"model_name": self.name})
        self.load_in_4bit = load_in_4bit  # the weights of linear layers
        self.folder = Path(self.name) if is_folder(self.name) else None
        self.dtype = DTYPES[keys.torch_dtype]
        self.device = torch.device("cpu")  # where parameters are made
        self.has_weights = True  # weights are read; else parameters stay as they are made
        self.reads_items = True  # items will be read by tokenizer and image processor
        self.image_tower = False  # only the image tower of a model of two is meant
        self.shape: Mapping[str, Any] = {}  # the config of a model of which there is nothing else
        self._configs: dict[str, PreTrainedConfig] = {}  # by subfolder

    def of_part(self, keys: ModelKeys) -> ModelFiles:
        """Return the files of a model that this one is a part of, to be loaded alike."""
        return ModelFiles(keys, load_in_4bit=self.load_in_4bit)

    def in_folder(self, file: str) -> bool:
        """Return whether the model is a folder with such a file, damaged or not: what reads it refuses a folder."""
        return self.folder is not None and os.path.lexists(self.folder / file)

    def reading(self) -> AbstractContextManager[None]:
        """Let a library read the model in the block: a folder as it is, a model of the hub as `hub_or_cache` says."""
        return nullcontext() if self.folder is not None else hub_or_cache()

    def read(self, file: str) -> Path | None:
        """Return the local path of one of the model's files, or None when it has no such file.

        Raises:
            ConfigError: The model is a file.
            MachineError: The model is no folder, and the hub can't be reached.
        """
        if self.shape:
            return None
        if self.folder is not None:
            return self.folder / file if self.in_folder(file) else None
        from transformers.utils.hub import cached_file

        try:
            with self.reading():
                path = cached_file(
                    self.name, file, revision=self.keys.model_revision, _raise_exceptions_for_missing_entries=False
                )
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error
        return None if path is None else Path(path)

    def read_json(self, file: str, kind: type[dict[str, Any]] | type[list[Any]] = dict, *, others: bool = False) -> Any:
        """Return what one of the model's JSON files holds; an empty object or list where there is no such file.

        Args:
            others: Whether its settings are those of code that vembed doesn't know, and may be anything.

        Raises:
            ConfigError: It is broken, or holds something else.
        """
        settings = CONFIG_KINDS if others or file == "config.json" else KINDS
        path = self.read(file)
        return kind() if path is None else read_json(path, kind, settings)

    def load_module(
        self, make: Callable[[], Module], file: str = WEIGHTS_FILE, dtype: torch.dtype | None = None
    ) -> Module:
        """Make a module of ours, with what `save_weights` wrote where the model is a folder and weights are wanted.

        Args:
            dtype: Of its parameters; by default the one that the user wants.

        Raises:
            ConfigError: The file is damaged, or holds other tensors.
        """
        wanted = dtype or self.dtype
        if self.has_weights and self.folder is not None:
            return load_module(lambda: make().to(wanted), self.folder / file)
        return make_module(make, self.device, self.name).to(wanted)

    def load_weights(self, module: nn.Module, file: str = WEIGHTS_FILE) -> None:
        """Load what `save_weights` wrote; nothing where the model starts from scratch or no weights are wanted.

        Raises:
            ConfigError: The file is damaged, or holds other tensors.
        """
        if self.has_weights and self.folder is not None:
            load_weights(module, self.folder / file)

    def _unreachable(self, error: Exception) -> ConfigError | MachineError:
        if is_file(home_path(self.name)):
            return ConfigError(f"{self.name} is a file; name the folder that a model lies in")
        near = nearest_folder(Path(self.name)) if is_folder(Path(self.name).parent) else ""
        return MachineError(
            f"model_name {self.name!r} is no folder here{near} and could not be read from the hub: "
            f"{first_line(error)}. Check the spelling, log in for a private model, or name a local folder; "
            f"without a network, a model that was loaded once is read from the local cache."
        )

    def config(self, subfolder: str = "") -> PreTrainedConfig:
        """Load config.json, once; that of the image tower where only it is meant."""
        from transformers import AutoConfig

        if subfolder not in self._configs:  # a request to the hub, and several classes ask before one takes the model
            # transformers would load the adapter's base, freeze all of it, and write nothing but the adapter again.
            adapter_file = f"{subfolder}/adapter_config.json".removeprefix("/")
            if self.read(adapter_file) is not None:
                base = self.read_json(adapter_file, others=True).get("base_model_name_or_path") or "another model"
                raise ConfigError(
                    f"{self.name} holds an adapter for {base} ({adapter_file}), and vembed loads whole models; merge "
                    f"the two with peft's merge_and_unload, save the result, and name its folder"
                )
            self._configs[subfolder] = self._load(AutoConfig, subfolder)
        config = self._configs[subfolder]
        return getattr(config, "vision_config", config) if self.image_tower else config

    def tokenizer(self, subfolder: str = "") -> PreTrainedTokenizerBase:
        """Load the tokenizer; it must be able to pad."""
        from transformers import AutoTokenizer

        return self._checked(self._load(AutoTokenizer, subfolder), f"{subfolder}/" if subfolder else "")

    def processor(self, *, pads_count: bool = False) -> Any:
        """Load the tokenizer, which must be able to pad, the image processor and the chat template.

        Args:
            pads_count: The model was trained with its padding token within texts: another would change their vectors.

        Raises:
            ConfigError: A file is damaged, or `pad_token` doesn't fit.
        """
        from transformers import AutoProcessor

        processor = self._load(AutoProcessor, "")
        own, wanted = processor.tokenizer.pad_token, self.keys.pad_token
        if pads_count and own is not None and wanted not in (None, own):
            raise ConfigError(
                f"pad_token {wanted!r}: {self.name} was trained with {own!r} at the end of each query, where it gives "
                f"vectors, and another token would change them; leave pad_token out"
            )
        self._checked(processor.tokenizer, "")
        return processor

    def _checked(self, tokenizer: PreTrainedTokenizerBase, prefix: str) -> PreTrainedTokenizerBase:
        """Return a tokenizer with the padding token that the user wants, and refuse one that no file describes."""
        known = tuple(tokenizer.vocab_files_names.values())  # empty where there is no vocabulary, as with bytes
        usual = ("tokenizer.json", "tokenizer.model", "tekken.json")
        if known and not any(self.read(prefix + file) for file in (*usual, *known)):
            raise ConfigError(
                f"{self.name} has no tokenizer: none of {', '.join(dict.fromkeys((*known, *usual)))} is there. "
                f"Copy the tokenizer's files beside its config.json"
            )
        if (pad_token := self.keys.pad_token) is not None:
            if pad_token not in tokenizer.get_vocab():
                raise ConfigError(f"pad_token {pad_token!r} is not in the vocabulary of {self.name}")
            tokenizer.pad_token = pad_token
        if tokenizer.pad_token_id is None:
            named = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
            suggestion = named or tokenizer.convert_ids_to_tokens(0)
            raise ConfigError(
                f"the tokenizer of {self.name} has no pad token; set pad_token: {suggestion!r} (padding is "
                f"masked, so any token of its vocabulary will do), or copy its tokenizer_config.json again"
            )
        return tokenizer

    def image_processor(self, subfolder: str = "") -> Any:
        """Load the image processor: the sizes, crops and means that the model was trained with."""
        from transformers import AutoImageProcessor

        return self._load(AutoImageProcessor, subfolder)

    def backbone(self, subfolder: str, config: PreTrainedConfig, auto_class: Any) -> PreTrainedModel:
        """Load the transformer in the wanted type and attention."""
        prefix = f"{subfolder}/" if subfolder else ""
        safe = (f"{prefix}model.safetensors", f"{prefix}model.safetensors.index.json")
        pickled = (f"{prefix}pytorch_model.bin", f"{prefix}pytorch_model.bin.index.json")
        if not self.keys.allow_pickle and not any(map(self.read, safe)) and any(map(self.read, pickled)):
            raise ConfigError(
                f"{self.name} has its weights only as a pickle, which can run code when it is read; set "
                f"allow_pickle: true to read it with weights_only, or convert it to safetensors"
            )
        # None prefers safetensors and takes pickled weights, with weights_only, where there are no others.
        extra: dict[str, Any] = {"dtype": self.dtype, "use_safetensors": None if self.keys.allow_pickle else True}
        if self.load_in_4bit:
            extra["quantization_config"] = four_bit_config()
        backbone: PreTrainedModel
        with quiet_loading():
            backbone, loading = self._load(
                auto_class, subfolder, config=config, output_loading_info=True, **extra, **self._attention()
            )
        prepare_backbone(backbone)
        # transformers fills weights that no file holds with random numbers and goes on. A pooler alone is left out:
        # many checkpoints lack it, and no embedding needs it.
        missing = sorted(loading["missing_keys"])
        needed = [key for key in missing if not key.startswith("pooler.")]
        if needed:
            raise ConfigError(
                f"{self.name}: {len(needed)} weights of {type(backbone).__name__} are in none of its files, "
                f"first {needed[0]}; they would be random. Its config.json or model.safetensors is damaged, or of "
                f"another model: copy the folder again"
            )
        if missing:
            _leave_pooler_out(backbone)
        return backbone

    def _attention(self) -> dict[str, str]:
        wanted = self.keys.attn_implementation
        return {} if wanted == "auto" else {"attn_implementation": wanted}

    def _load(self, auto_class: Any, subfolder: str, **extra: Any) -> Any:
        # Before the library reads them: its own errors seldom name the file that is damaged.
        if self.folder is not None:
            check_folder(self.folder / subfolder, weights=self.has_weights)
        try:
            with self.reading():
                return auto_class.from_pretrained(
                    self.name,
                    subfolder=subfolder,
                    revision=self.keys.model_revision,
                    trust_remote_code=self.keys.trust_remote_code,
                    **extra,
                )
        except ImportError as error:
            raise MachineError(f"{self.name}: {first_line(error)}") from error
        except Exception as error:  # whatever a library makes of a file that it doesn't expect
            raise self._explain(error, auto_class, subfolder) from error

    def _explain(self, error: Exception, auto_class: Any, subfolder: str) -> Exception:
        """Turn the library's error into one that names our key."""
        if "trust_remote_code" in str(error):
            return ConfigError(
                f"{self.name} brings code of its own that would run on this machine; read it, then set "
                f"trust_remote_code: true and model_revision to the commit that you read"
            )
        if isinstance(error, UnpicklingError):  # the library's own text advises to switch the protection off
            return ConfigError(
                f"{self.name}: its pickled weights hold something else than tensors, which could run code; "
                f"convert them to safetensors"
            )
        if self.folder is None and isinstance(error, OSError):
            return self._unreachable(error)
        hint = ""
        if self.folder is not None:
            read = READ_BY.get(auto_class.__name__, "config.json and its weights")
            hint = f". It was read from {read} in {self.folder / subfolder}; if one is damaged, copy the folder again"
            try:
                names_a_type = self.in_folder("modules.json") or "model_type" in self.read_json("config.json")
            except ConfigError:  # a broken file is one of a library all the same
                names_a_type = True
            if not names_a_type:
                hint = (
                    ". A folder says what its model is in config.json, modules.json, open_clip_config.json or "
                    "vembed_*.json: copy it again if that is missing. A model of a plugin needs the plugin: plugins: "
                    "[MODULE], or vembed --plugins MODULE"
                )
        reason = first_line(error)
        if "ignore_mismatched_sizes" in reason:
            reason = "config.json says other shapes than its weights have"
        elif not isinstance(error, OSError | ValueError):  # not meant for users, often no more than a name: 'silu2'
            reason = f"{type(error).__name__}: {reason}"
        return ConfigError(f"{self.name} could not be loaded: {reason}{hint}")


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Read what lies on the hub of Hugging Face; where it can't be reached, what the local cache has of it.

    Without a network, its library asks six times within 23 seconds for each file that the cache doesn't have. A model
    has a dozen files that it may lack, so even one that is in the cache would take minutes to load.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or _hub_answers(int(time.monotonic()) // SECONDS_PER_ANSWER):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False  # and not what it was: another thread may have set it in the meantime


@lru_cache(maxsize=1)
def _hub_answers(_period: int) -> bool:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError

    network_error: type[Exception] = HfHubHTTPError.__bases__[0]  # of the HTTP library, which is another one by version
    reason = ""
    for wait in (0, 1):  # a single request may be lost
        time.sleep(wait)
        try:
            # Whatever it answers: a mirror may refuse its own address, or lead to one that can't be reached from here.
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT, follow_redirects=False)
        except (network_error, OSError) as error:
            reason = first_line(error)
        else:
            return True
    _log.warning("%s can't be reached (%s): models are read from the local cache", constants.ENDPOINT, reason)
    return False


class SkeletonFiles(ModelFiles):
    """A model whose weights are left where they are: its parameters are made on the meta device, which takes no memory.

    Args:
        keys: What the user said. The name may also be a JSON file with the shape of a model: the config.json of
            transformers, or the model_cfg of open_clip.
        device: Another one gives the same model with random weights, which is what a prediction is compared with.
        reads_items: Whether the model will train, with weights from elsewhere; the plan takes its shape alone.
    """

    def __init__(self, keys: ModelKeys, *, device: str = "meta", reads_items: bool = False) -> None:
        super().__init__(keys)
        self.device = torch.device(device)
        self.has_weights = False
        self.reads_items = reads_items
        path = Path(self.name)
        if path.suffix == ".json" and path.is_file():
            self.shape = read_json(path)
            if not self.shape.keys() & {"model_type", "vision_cfg"}:
                raise ConfigError(
                    f"{self.name} is no shape of a model: it has neither model_type (transformers) nor vision_cfg "
                    f"(open_clip)"
                )

    def of_part(self, keys: ModelKeys) -> SkeletonFiles:
        """Return the files of a part, without its weights too."""
        return SkeletonFiles(keys, device=str(self.device), reads_items=self.reads_items)

    def config(self, subfolder: str = "") -> PreTrainedConfig:
        """Load config.json, or make the config that the shape is."""
        if not self.shape:
            return super().config(subfolder)
        from transformers import AutoConfig

        content = dict(self.shape)
        try:
            config: PreTrainedConfig = AutoConfig.for_model(content.pop("model_type"), **content)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.name} is no config of transformers: {error}") from error
        return getattr(config, "vision_config", config) if self.image_tower else config

    def tokenizer(self, subfolder: str = "") -> Any:
        """Load the tokenizer; of a shape, return what encoders read of one."""
        return tokenizer_facts(int(1e30)) if self.shape else super().tokenizer(subfolder)

    def image_processor(self, subfolder: str = "") -> Any:
        """Load the image processor; of a shape, return what makes pictures of the size that the config names."""
        if not self.shape:
            return super().image_processor(subfolder)
        config = self.config()
        side = getattr(getattr(config, "vision_config", config), "image_size", PICTURE_SIDE)

        def process(images: list[Any], return_tensors: str) -> dict[str, torch.Tensor]:  # noqa: ARG001
            return {"pixel_values": torch.zeros(len(images), 3, side, side, dtype=torch.uint8)}

        return process

    def backbone(self, subfolder: str, config: PreTrainedConfig, auto_class: Any) -> PreTrainedModel:
        """Make the transformer by its config alone."""
        # A copy, as from_config notes its choice of attention in the config.
        with self.device:
            backbone: PreTrainedModel = auto_class.from_config(
                copy.deepcopy(config),
                dtype=self.dtype,
                trust_remote_code=self.keys.trust_remote_code,
                **self._attention(),
            )
        prepare_backbone(backbone)
        # Without its weights, a local folder tells by the names in its headers whether it holds a pooler, which costs
        # no read of a tensor. A pickle doesn't, and the hub would have to be asked; a pooler is small.
        names: list[str] = []
        for path in [] if self.folder is None else sorted((self.folder / subfolder).glob("model*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    names += file.keys()
            except (OSError, SafetensorError):  # a pointer of Git LFS: there is a plan without the weights
                names = []
                break
        if names and not any(".pooler." in f".{name}" for name in names):
            _leave_pooler_out(backbone)
        return backbone


def tokenizer_facts(max_length: int) -> Any:
    """Return what encoders read of a tokenizer that tokenizes nothing."""
    return SimpleNamespace(pad_token_id=0, model_max_length=max_length, padding_side="right")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers from telling which weights a folder lacks: what matters of that is refused here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _leave_pooler_out(backbone: PreTrainedModel) -> None:
    """Do as add_pooling_layer=False does: a pooler that no file holds would be random, and saved with the model."""
    if "add_pooling_layer" in inspect.signature(type(backbone)).parameters:
        backbone.pooler = None  # type: ignore[assignment]


def prepare_backbone(backbone: PreTrainedModel) -> None:
    """Switch off what an embedding doesn't need."""
    pooler = getattr(backbone, "pooler", None)
    if isinstance(pooler, torch.nn.Module):
        pooler.requires_grad_(requires_grad=False)  # a head of pre-training: no part of the embedding
    for config in (backbone.config, backbone.config.get_text_config()):
        if getattr(config, "use_cache", False):
            config.use_cache = False  # keys and values of past tokens: nothing here generates text


def four_bit_config() -> BitsAndBytesConfig:
    """Return how transformers loads weights in 4 bits: NormalFloat, its constants quantized too, bfloat16 products.

    Raises:
        MachineError: bitsandbytes or a CUDA device is missing.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MachineError(
            "load_in_4bit needs bitsandbytes, which is missing: pip install 'vembed[qlora]', or set load_in_4bit: false"
        )
    if not torch.cuda.is_available():
        raise MachineError("load_in_4bit needs a CUDA device, and this machine has none: set load_in_4bit: false")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


# --- Files of our own -------------------------------------------------------------------------------------------------


def save_weights(
    module: nn.Module, folder: Path, file: str = WEIGHTS_FILE, metadata: dict[str, str] | None = None
) -> None:
    """Write the weights of a module as safetensors into a folder, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: tensor.detach().cpu().contiguous() for key, tensor in module.state_dict().items()}
    safetensors.torch.save_file(weights, folder / file, metadata=metadata)


def save_background(encoder: Encoder, folder: Path) -> None:
    """Write beside a model's files on what background its pictures stand; nothing where that is white."""
    if encoder.image_background != "white":
        (folder / PICTURES_FILE).write_text(json.dumps({"image_background": encoder.image_background}), "utf-8")


def saved_background(files: ModelFiles) -> Background:
    """Return the background that a model was trained with, white where its files don't say.

    Raises:
        ConfigError: The file names another one than there are.
    """
    # Without asking the hub: such a name would cost a request that finds nothing.
    if ":" in files.name and files.folder is None:  # a name of open_clip or a built-in one: no folder of ours
        return "white"
    background = files.read_json(PICTURES_FILE).get("image_background", "white")
    if background not in get_args(Background):
        raise ConfigError(
            f"{files.name}: {PICTURES_FILE} names the image_background {background!r}; set image_background"
        )
    return cast("Background", background)


# --- Fingerprints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model as an index of its vectors remembers it."""

    name: str  # what it was loaded by: a hub id, or the absolute path of a folder
    weights_sha256: str  # `tensors_sha256` of its encoder's state, in the order of the names
    dimension: int
    similarity: Similarity
    prompts: Mapping[Side, str]
    max_length: int | None  # longest input in tokens, None where there is no limit


def identify(encoder: Encoder, *, name: str) -> ModelIdentity:
    """Return the identity of an encoder, on any device; its weights are read once."""
    return ModelIdentity(
        name=name,
        weights_sha256=tensors_sha256(sorted(encoder.state_dict().items())),
        dimension=encoder.dimension,
        similarity=encoder.similarity,
        prompts=encoder.prompts,
        max_length=encoder.max_length,
    )


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]], *, sampled_values: int | None = None) -> str:
    """Return the SHA-256 (hex) over name, type, shape and bytes of tensors, the same on every device.

    Args:
        sampled_values: Hash an even sample of about so many values of each tensor instead of all of them.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        values = tensor.detach().reshape(-1)
        if sampled_values is not None:
            values = values[:: max(1, values.numel() // sampled_values)]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # As bytes: numpy has no bfloat16. After sampling, so that little is copied from the device.
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
