"""Export a model: load, write, read back, compare, and only then give the folder its name; and the page serve.md in it.

1. The source is loaded in float32 and encodes the samples.
2. Its weights are rounded to the type that is stored; the samples are encoded again.
3. The folder is written under a hidden name, with the caller's files.
4. It is loaded again, by vembed and, for a sentence-transformers folder, by that library where it is installed; either
   must give the vectors of step 2. What rounding alone changed is step 2 against step 1, and is only told.

serve.md has the commands that serve the folder, by what text-embeddings-inference, vLLM and Infinity read of its files.
Each model has its own, since a server that doesn't know a model's pooling or type gives other vectors without an error.
Sources: the routers of text-embeddings-inference 1.9, vLLM's list of pooling models, Infinity's list of tested models.
"""

from __future__ import annotations

import importlib.util
import io
import json
import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import PIL.Image
import torch
from safetensors import SafetensorError, safe_open

from vembed.errors import ConfigError, MachineError, NonFiniteError
from vembed.files import new_folder
from vembed.models.exportable import TEXTS, largest_difference, sample_pngs, sample_vectors, writable_forms
from vembed.models.formats import GENERAL_FILE, MODULES_FILE, PROMPT_NAMES, TRANSFORMER_FILE
from vembed.models.hub import DTYPES, ModelFiles, quiet_loading, save_background
from vembed.models.keys import ModelKeys
from vembed.models.load import encoder_classes, load_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vembed.models.encoder import Encoder
    from vembed.models.export_formats import ExportFormat
    from vembed.models.exportable import Form, Vectors

TOLERANCE = 1e-5
"""Most by which a component of a unit vector may differ when a model is read back; float32 adds up to less."""

SOURCE_SETTINGS = ("is_local", "local_files_only", "name_or_path")
"""What transformers notes in a tokenizer's settings of the place that it was loaded from."""

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of floating-point numbers by the name that safetensors has for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """A model, the folder to write it to, and the form and type of its weights there."""

    keys: ModelKeys  # the model; its torch_dtype is not read
    output: Path
    form: Form | Literal["auto"] = "auto"
    dtype: torch.dtype | None = None  # of the stored weights; None for that of the source
    overwrite: bool = False  # a model at the output may be replaced
    format: ExportFormat | None = None  # writes further files into the folder
    format_options: object = None  # what it gets to know
    served_as: str = ""  # what serve.md calls the folder; empty for its own name


@dataclass(frozen=True, slots=True)
class Exported:
    """The form that was written, and how far its vectors are from those of the source."""

    form: Form
    dtype: torch.dtype  # of the stored weights
    difference: float  # the largest of a vector, read back against written
    rounding: float  # the largest difference that rounding the weights made, 0 where none was rounded
    num_items: int  # sample items that were compared
    readers: tuple[str, ...]  # what read it back, with versions
    added: tuple[object, ...] = ()  # what a format wrote into the folder, each printing as a line


def export_model(
    request: ExportRequest,
    extra_files: Callable[[Encoder, Form], Mapping[str, str]],
    *,
    poll: Callable[[], None] = lambda: None,
) -> Exported:
    """Write a model as a folder that its library loads.

    Args:
        extra_files: Given the encoder as it is stored and its form, returns further files (name -> text), e.g. a card.
        poll: Called between the steps; may raise to stop.

    Raises:
        ConfigError: The form or the output folder won't do; nothing was written.
        MachineError: The disk refused, or what was read back gives other vectors; nothing stays.
        NonFiniteError: The model gives NaN or infinity, or does so once its weights are rounded.
    """
    output = request.output.expanduser().resolve()
    local = Path(request.keys.model_name)
    source = local.resolve() if local.is_dir() else None
    refuse_taken(output, overwrite=request.overwrite, source=source)
    stored = stored_dtype(request.keys)
    dtype = request.dtype or stored
    encoder = load_encoder(request.keys.model_copy(update={"torch_dtype": _computing(dtype, stored)})).eval()
    return write_encoder(encoder, request, dtype, extra_files, poll=poll)


def write_encoder(
    encoder: Encoder,
    request: ExportRequest,
    dtype: torch.dtype,
    extra_files: Callable[[Encoder, Form], Mapping[str, str]],
    *,
    poll: Callable[[], None],
) -> Exported:
    """Write an encoder that was loaded as the request's keys say, whatever its weights are now; it is used up.

    Args:
        dtype: Of the stored weights.
        extra_files: As in `export_model`.

    Raises:
        ConfigError: The form won't do; nothing was written.
        MachineError: As `export_model`.
        NonFiniteError: As `export_model`.
    """
    output, computing = request.output.expanduser().resolve(), _computing(dtype, next(encoder.parameters()).dtype)
    if request.format is not None and (obstacle := request.format.obstacle(encoder)):
        raise ConfigError(f"--format {request.format.name}: {obstacle}")
    form = choose_form(encoder, request.form)
    # Rounded in place, so that only one copy of the weights is in memory, and still computed with in the wider type:
    # what differs from `before` is the rounding of the weights alone.
    before = sample_vectors(encoder)
    poll()
    round_weights(encoder, dtype)
    wanted = sample_vectors(encoder) if dtype != DTYPES[computing] else before
    if not all(np.isfinite(vectors_NE).all() for vectors_NE in before.values()):
        raise NonFiniteError("the model gives vectors with NaN or infinity: its weights are damaged")
    if not all(np.isfinite(vectors_NE).all() for vectors_NE in wanted.values()):
        name = str(dtype).removeprefix("torch.")
        raise NonFiniteError(f"rounded to {name}, the model gives NaN or infinity; export it with --dtype bfloat16")
    poll()
    with new_model_folder(output) as folder, quiet_loading():
        encoder.to(dtype)  # exact by now
        write_form(encoder, form, folder)
        page = {SERVE_FILE: serve_page(folder, request.served_as or output.name)}
        for name, text in (page | dict(extra_files(encoder, form))).items():
            (folder / name).write_text(text, "utf-8")
        several = encoder.multi_vector
        del encoder  # of a large model only one copy has room
        poll()
        # As others read the folder: what the user said about the source must be in its files by now.
        kept = {name: getattr(request.keys, name) for name in ("trust_remote_code", "attn_implementation")}
        again = ModelKeys.model_validate({"model_name": str(folder), "torch_dtype": computing, **kept})
        stored = load_encoder(again).eval()
        read_back: dict[str, Vectors] = {"vembed": sample_vectors(stored)}
        poll()
        if form == "sentence-transformers":
            read_back |= _by_sentence_transformers(folder, wanted, again, several=several)
        differences = {reader: largest_difference(wanted, vectors) for reader, vectors in read_back.items()}
        for reader, difference in differences.items():
            if difference > TOLERANCE:  # infinite where a number isn't finite
                raise MachineError(
                    f"{output} was not written: read back by {reader} {version(reader)}, the model gives other vectors "
                    f"(they differ by up to {difference:.2g}, allowed are {TOLERANCE:g}). Try another --format, or "
                    f"other versions of the libraries"
                )
        # Last, as a format may leave the encoder changed, and still within the folder that may come to nothing.
        added = () if request.format is None else tuple(request.format.write(stored, folder, request.format_options))
    readers = tuple(f"{reader} {version(reader)}" for reader in read_back)
    rounding = largest_difference(before, wanted)
    num_items = sum(len(vectors) for vectors in wanted.values())
    return Exported(form, dtype, max(differences.values()), rounding, num_items, readers, added)


def _computing(dtype: torch.dtype, stored: torch.dtype) -> str:
    """Return the type to compute in, by name."""
    return "float64" if torch.float64 in (dtype, stored) else "float32"


def refuse_taken(output: Path, *, overwrite: bool, source: Path | None) -> None:
    """Refuse an output folder that holds something which an export must not replace.

    Args:
        source: Folder that the model is read from, resolved; None for a hub id.

    Raises:
        ConfigError: It is the source or holds it, or it isn't empty and can't be overwritten.
    """
    if source is not None and (output == source or output in source.parents):
        raise ConfigError(f"--output {output} is, or holds, the folder that the model is read from; choose another one")
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"--output {output} is a file; name a folder")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"--output {output} is not empty; choose another folder, or replace it with --overwrite")
    if (output / ".git").exists():
        raise ConfigError(
            f"--output {output} is a Git checkout, which --overwrite would replace as a whole; export beside it and "
            f"copy the files"
        )
    # Only what looks like a model is ever replaced: a wrong --output must not cost a folder of other files.
    marks = {"config.json", "modules.json", *(encoder.marker for encoder in encoder_classes() if encoder.marker)}
    if not any((output / mark).is_file() for mark in marks):
        raise ConfigError(
            f"--output {output} holds no model, and --overwrite replaces nothing but models; choose another folder"
        )


@contextmanager
def new_model_folder(output: Path) -> Iterator[Path]:
    """Give a hidden folder to write a model into, which takes the output's name whole or not at all.

    Raises:
        MachineError: The disk refuses.
    """
    try:
        with new_folder(output) as temporary:
            yield temporary
    except OSError as error:
        raise MachineError(
            f"{output}: the model can't be written: {error}. Free some space, or choose another folder"
        ) from error


def choose_form(encoder: Encoder, wanted: Form | Literal["auto"]) -> Form:
    """Return the form to write; "auto" is the family's own.

    Another one is offered only where it gives the same vectors: a folder that loads and embeds differently is worse
    than none.

    Raises:
        ConfigError: The encoder can't be written so; the message names the nearest form that it can.
    """
    possible = writable_forms(encoder)
    if wanted == "auto" or wanted in possible:
        return possible[0] if wanted == "auto" else wanted
    if possible[0] == "vembed":
        raise ConfigError(
            f"--format {wanted}: no library but vembed runs {encoder.name}; leave --format out for vembed's own form"
        )
    obstacle = encoder.forms().get(wanted) or f"{encoder.name} is a model of {possible[0]}"
    raise ConfigError(f"--format {wanted}: {obstacle}; write --format {possible[0]}")


def write_form(encoder: Encoder, form: Form, folder: Path) -> None:
    """Write an encoder, its weights as they are to be stored, without a trace of the place that it was loaded from."""
    encoder.write_form(form, folder)
    save_background(encoder, folder)
    # transformers notes where a tokenizer came from: a path of this machine has no business in a published folder.
    for path in folder.rglob("tokenizer_config.json"):
        settings = json.loads(path.read_text("utf-8"))
        kept = {key: value for key, value in settings.items() if key not in SOURCE_SETTINGS}
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")


@torch.no_grad()
def round_weights(encoder: Encoder, dtype: torch.dtype) -> None:
    """Give every stored floating-point number the value that it has in a narrower type, keeping its own type."""
    for tensor in encoder.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(dtype).to(tensor.dtype))


def stored_dtype(keys: ModelKeys) -> torch.dtype:
    """Return the type that the weights of a model are stored in, one that holds all where several occur.

    What neither its weights nor its config.json say is float32.
    """
    local, names = Path(keys.model_name), set()
    for path in sorted(local.rglob("*.safetensors")) if local.is_dir() else ():
        try:
            with safe_open(path, "pt") as file:  # reads the header alone
                names |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ConfigError(f"{path} is broken: {error}") from error
    if types := {STORED[name] for name in names if name in STORED}:
        return reduce(torch.promote_types, types)
    if any(encoder.prefix and keys.model_name.startswith(encoder.prefix) for encoder in encoder_classes()):
        return torch.float32  # no folder and no hub id
    config_file = ModelFiles(keys).read("config.json")
    try:
        config = {} if config_file is None else json.loads(config_file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{config_file} is broken: {error}") from error
    named = str(config.get("dtype") or config.get("torch_dtype"))
    return DTYPES.get(named.removeprefix("torch."), torch.float32)


def _by_sentence_transformers(folder: Path, wanted: Vectors, keys: ModelKeys, *, several: bool) -> dict[str, Vectors]:
    """Encode the samples with sentence-transformers itself; nothing where it isn't installed.

    Args:
        several: Whether the model gives several vectors for each text, which version 6 and later do.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        return {}
    import sentence_transformers

    model_class = getattr(sentence_transformers, "MultiVectorEncoder" if several else "SentenceTransformer", None)
    if model_class is None:
        return {}
    model: Any = model_class(
        str(folder),
        device="cpu",
        trust_remote_code=keys.trust_remote_code,
        local_files_only=True,
        model_kwargs={"dtype": DTYPES[keys.torch_dtype]},
    )

    def pictures() -> list[PIL.Image.Image]:
        return [PIL.Image.open(io.BytesIO(data)).convert("RGB") for data in sample_pngs()]

    # The library cuts behind its last module and leaves a vector shorter than one; the cosine doesn't see that.
    is_cut = getattr(model, "truncate_dim", None) is not None and model.similarity_fn_name == "cosine"
    options = {"show_progress_bar": False, **({"normalize_embeddings": True} if is_cut else {})}
    encoders = {
        "query texts": lambda: model.encode_query(list(TEXTS), **options),
        "document texts": lambda: model.encode_document(list(TEXTS), **options),
        "pictures": lambda: model.encode(pictures(), **options),
    }
    encoded = {name: encoders[name]() for name in wanted}
    if several:
        encoded = {name: torch.cat(vectors).float().cpu().numpy() for name, vectors in encoded.items()}
    return {"sentence-transformers": {name: vectors.astype(np.float64) for name, vectors in encoded.items()}}


# --- serve.md ---------------------------------------------------------------------------------------------------------

SERVE_FILE = "serve.md"

# Types of models by config.json that a server runs.
TEI_TYPES = frozenset(
    {"bert", "camembert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "qwen2", "qwen3", "mistral"}
    | {"gemma3_text"}
)
VLLM_TYPES = frozenset(
    {"bert", "roberta", "xlm-roberta", "modernbert", "qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text"}
)
PAIR_TYPES = frozenset({"clip", "siglip"})
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last token",
}
EXAMPLE = "a red fox in the snow"
ONLY_POOLS = "the server pools only by cls, mean or the last token, over all tokens"
INTRODUCTION = (
    "Commands for the folder that holds this file, or for the same files on the hub. Each server reads pooling, "
    "prompts, length and type from the files here."
)


@dataclass(frozen=True, slots=True)
class Served:
    """The facts that a server reads of a folder."""

    model_type: str  # of config.json
    modules: tuple[str, ...]  # kinds of modules.json, in order; empty where there is none
    pooling: str  # "" where it isn't one that servers know
    prompts: Mapping[str, str]
    max_length: int | None
    dtype: str
    lower_case: bool
    truncate_dim: int | None  # leading dimensions of a vector that are kept

    @property
    def is_text(self) -> bool:
        """True for a transformer of texts with one vector for each."""
        return self.modules[:2] == ("Transformer", "Pooling")


def read_served(folder: Path) -> Served:
    """Read what servers read: nothing here asks the encoder, as they know the files alone."""

    def read(name: str) -> Any:
        path = folder / name
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}

    config, general, text = read("config.json"), read(GENERAL_FILE), read(TRANSFORMER_FILE)
    # Servers know one pooling, by these flags, over all tokens: anything else is none to them.
    flags = read("1_Pooling/config.json")
    named = [POOLINGS.get(key, "") for key, on in flags.items() if on is True and key.startswith("pooling_mode_")]
    return Served(
        model_type=str(config.get("model_type", "")),
        modules=tuple(str(module["type"]).rpartition(".")[2] for module in read(MODULES_FILE)),
        pooling=named[0] if len(named) == 1 and flags.get("include_prompt", True) else "",
        prompts={
            side: prompt for side, prompt in (general.get("prompts") or {}).items() if side in PROMPT_NAMES and prompt
        },
        max_length=text.get("max_seq_length"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        lower_case=bool(text.get("do_lower_case", False)),
        truncate_dim=general.get("truncate_dim"),
    )


def serve_page(folder: Path, name: str) -> str:
    """Return the page.

    Args:
        name: What the folder is called where it is served, or an id of the hub.
    """
    served = read_served(folder)
    address = name if "/" in name else f"./{name}"
    duties = [
        f"- Put `{_plain(json.dumps(prompt, ensure_ascii=False))}` before each {side}."
        for side, prompt in served.prompts.items()
    ]
    if served.lower_case:
        duties.append("- Lower-case the texts: the servers don't.")
    if served.truncate_dim is not None:
        unit = " and divide them by their length" if "Normalize" in served.modules else ""
        duties.append(f"- Keep the first {served.truncate_dim} numbers of each vector{unit}: the servers give all.")
    if "Dense" in served.modules and served.is_text:
        duties.append(
            "- The model has Dense layers: compare one vector with the model's own, as older releases leave them out."
        )
    parts = [f"# Serving {_plain(name)}", INTRODUCTION]
    parts += ["## What your client does", "\n".join(duties)] if duties else []
    sections = {"text-embeddings-inference": _tei, "vLLM": _vllm, "Infinity": _infinity}
    for server, section in sections.items():
        obstacle, lines = section(served, address)
        parts += [f"## {server}", *([f"Not for this model: {obstacle}."] if obstacle else lines)]
    return "\n\n".join(parts) + "\n"


def _not_served(served: Served, takes: str) -> str:
    """Return why a server that takes texts and perhaps more doesn't take a model."""
    if not served.modules and served.model_type not in PAIR_TYPES:
        return "the server needs modules.json, which only the form sentence-transformers has (`vembed export --format`)"
    return f"the server takes only {takes}, with one vector for each"


def _tei(served: Served, address: str) -> tuple[str, list[str]]:
    """Return why text-embeddings-inference can't serve a model, "" where it can, and its section."""
    if not served.is_text:
        return _not_served(served, "transformers of texts"), []
    if served.model_type not in TEI_TYPES:
        return f"the server doesn't read {_plain(served.model_type)} in the settings of transformers", []
    if not served.pooling:
        return ONLY_POOLS, []
    image = "ghcr.io/huggingface/text-embeddings-inference"
    where = f'-v "$PWD"/{shlex.quote(address[2:])}:/model' if address.startswith("./") else "-e HF_TOKEN"
    model = "/model" if address.startswith("./") else shlex.quote(address)
    body: dict[str, Any] = {"inputs": [EXAMPLE], "truncate": True, "normalize": "Normalize" in served.modules}
    if "query" in served.prompts:
        body["prompt_name"] = "query"
    lines = [
        _shell(
            f"docker run --rm -p 8080:80 {where} {image}:cpu-1.9 --model-id {model} --dtype float32",
            _curl("http://localhost:8080/embed", body),
        ),
        f"On a GPU take the image `{image}:1.9` with `--gpus all`, and leave `--dtype` out for float16.",
    ]
    if served.prompts:
        sides = " or ".join(f"`{side}`" for side in served.prompts)
        lines.append(
            f"`prompt_name` ({sides}) puts the prompt before the text; on `/v1/embeddings` your client does it."
        )
    if "Normalize" not in served.modules:
        lines.append('Keep `"normalize": false`: this model compares by the dot product, and lengths count.')
    return "", lines


def _vllm(served: Served, address: str) -> tuple[str, list[str]]:
    """Return why vLLM can't serve a model, "" where it can, and its section."""
    if served.model_type not in PAIR_TYPES:
        if not served.is_text:
            return _not_served(served, "transformers of texts, CLIP and SigLIP"), []
        if served.model_type not in VLLM_TYPES:
            kind = _plain(served.model_type)
            return f"its list of embedding models has no {kind} in the settings of transformers", []
        if not served.pooling:
            return ONLY_POOLS, []
    length = "" if served.max_length is None else f" --max-model-len {served.max_length}"
    text = served.prompts.get("query", "") + EXAMPLE
    body = {"model": address, "input": [text], "truncate_prompt_tokens": -1}
    lines = [
        _shell(
            f"vllm serve {shlex.quote(address)} --runner pooling --dtype {served.dtype}{length}",
            _curl("http://localhost:8000/v1/embeddings", body),
        )
    ]
    if served.model_type in PAIR_TYPES:
        lines.append(
            "A picture is a message of one `image_url` in place of `input`; a text and a picture are two requests."
        )
    lines.append(
        "Trained with `mrl_dims`? With `--hf-overrides '{\"is_matryoshka\": true}'` a request may ask for `dimensions`."
    )
    return "", lines


def _infinity(served: Served, address: str) -> tuple[str, list[str]]:
    """Return why Infinity can't serve a model, "" where it can, and its section."""
    if served.model_type not in PAIR_TYPES:
        if not served.is_text:
            return _not_served(served, "transformers of texts, CLIP and SigLIP"), []
        if "Normalize" not in served.modules:
            return "the server gives every vector unit length, and this model's lengths count", []
    body: dict[str, Any] = {"model": address, "input": [served.prompts.get("query", "") + EXAMPLE]}
    dtype = served.dtype if served.dtype in ("float32", "float16", "bfloat16") else "float32"
    lines = [
        _shell(
            "pip install 'infinity-emb[all]'",
            f"infinity_emb v2 --model-id {shlex.quote(address)} --engine torch --dtype {dtype} --port 7997",
            _curl("http://localhost:7997/embeddings", body),
        )
    ]
    if served.model_type in PAIR_TYPES:
        lines.append('For pictures send their addresses as `input`, with `"modality": "image"`.')
    return "", lines


def _curl(address: str, body: Mapping[str, Any]) -> str:
    return f"curl {address} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _shell(*commands: str) -> str:
    """Return a block of commands, which nothing in them can end."""
    return "```bash\n" + "\n".join(command.replace("```", "`` `") for command in commands) + "\n```"


def _plain(text: str) -> str:
    """Return a text of one line without what Markdown would read."""
    return " ".join(text.split()).replace("`", "'").replace("<", "&lt;")
