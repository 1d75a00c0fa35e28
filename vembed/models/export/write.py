"""Export a model: load, write, read back, compare, and only then give the folder its name.

1. The source is loaded in float32 and encodes the samples.
2. Its weights are rounded to the type that is stored; the samples are encoded again.
3. The folder is written under a hidden name, with the caller's files.
4. It is loaded again, by vembed and, for a sentence-transformers folder, by that library where it is installed; either
   must give the vectors of step 2. What rounding alone changed is step 2 against step 1, and is only told.
"""

from __future__ import annotations

import importlib.util
import io
import json
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
from vembed.models.export.graph import Graph, GraphRequest, write_graphs
from vembed.models.export.serve import SERVE_FILE, serve_page
from vembed.models.exportable import TEXTS, largest_difference, sample_pngs, sample_vectors, writable_forms
from vembed.models.hub import DTYPES, ModelFiles, quiet_loading, save_background
from vembed.models.keys import ModelKeys
from vembed.models.load import encoder_classes, load_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vembed.models.encoder import Encoder
    from vembed.models.exportable import Form, Vectors

TOLERANCE = 1e-5
"""Most by which a component of a unit vector may differ when a model is read back; float32 adds up to less."""

SOURCE_SETTINGS = ("is_local", "local_files_only", "name_or_path")
"""What transformers notes in a tokenizer's settings of the place that it was loaded from."""

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of floating-point numbers by the name that safetensors has for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and how."""

    keys: ModelKeys  # the model; its torch_dtype is not read
    output: Path
    form: Form | Literal["auto"] = "auto"
    dtype: torch.dtype | None = None  # of the stored weights; None for that of the source
    overwrite: bool = False  # whether a model at the output may be replaced
    graphs: GraphRequest | None = None  # ONNX graphs to write into the folder
    served_as: str = ""  # what serve.md calls the folder; empty for its own name


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    form: Form
    dtype: torch.dtype  # of the stored weights
    difference: float  # the largest of a vector, read back against written
    rounding: float  # the largest difference that rounding the weights made, 0 where none was rounded
    num_items: int  # sample items that were compared
    readers: tuple[str, ...]  # what read it back, with versions
    graphs: tuple[Graph, ...] = ()


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
    poll: Callable[[], None] = lambda: None,
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
    if request.graphs is not None and (why := encoder.why_no_graph()):
        raise ConfigError(f"--format onnx: {why}")
    form = choose_form(encoder, request.form)
    before = sample_vectors(encoder)
    poll()
    round_weights(encoder, dtype)
    wanted = sample_vectors(encoder) if dtype != DTYPES[computing] else before
    _refuse_nonfinite(before, wanted, dtype)
    poll()
    with new_model_folder(output) as folder, quiet_loading():
        encoder.to(dtype)
        write_form(encoder, form, folder)
        page = {SERVE_FILE: serve_page(folder, request.served_as or output.name)}
        for name, text in (page | dict(extra_files(encoder, form))).items():
            (folder / name).write_text(text, "utf-8")
        several = encoder.multi_vector
        del encoder  # of a large model only one copy has room
        poll()
        again = _plain_keys(request.keys, folder, computing)
        stored = load_encoder(again).eval()
        found: dict[str, Vectors] = {"vembed": sample_vectors(stored)}
        poll()
        if form == "sentence-transformers":
            found |= _by_sentence_transformers(folder, wanted, again, several=several)
        differences = {reader: largest_difference(wanted, vectors) for reader, vectors in found.items()}
        _refuse_different(differences, output)
        graphs = () if request.graphs is None else write_graphs(stored, folder, request.graphs)
    readers = tuple(f"{reader} {version(reader)}" for reader in found)
    rounding = largest_difference(before, wanted)
    num_items = sum(len(vectors) for vectors in wanted.values())
    return Exported(form, dtype, max(differences.values()), rounding, num_items, readers, graphs)


def _plain_keys(keys: ModelKeys, folder: Path, computing: str) -> ModelKeys:
    """Return how others read a folder: what was said about the source must be in its files by now."""
    kept = {name: getattr(keys, name) for name in ("trust_remote_code", "attn_implementation")}
    return ModelKeys.model_validate({"model_name": str(folder), "torch_dtype": computing, **kept})


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
    marks = {"config.json", "modules.json", *(each.marker for each in encoder_classes() if each.marker)}
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
    for path in folder.rglob("tokenizer_config.json"):
        settings = json.loads(path.read_text("utf-8"))
        kept = {key: value for key, value in settings.items() if key not in SOURCE_SETTINGS}
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _refuse_nonfinite(before: Vectors, after: Vectors, dtype: torch.dtype) -> None:
    if not all(np.isfinite(vectors_NE).all() for vectors_NE in before.values()):
        raise NonFiniteError("the model gives vectors with NaN or infinity: its weights are damaged")
    if not all(np.isfinite(vectors_NE).all() for vectors_NE in after.values()):
        name = str(dtype).removeprefix("torch.")
        raise NonFiniteError(f"rounded to {name}, the model gives NaN or infinity; export it with --dtype bfloat16")


def _refuse_different(differences: Mapping[str, float], output: Path) -> None:
    for reader, difference in differences.items():
        if not difference <= TOLERANCE:
            raise MachineError(
                f"{output} was not written: read back by {reader} {version(reader)}, the model gives other vectors "
                f"(they differ by up to {difference:.2g}, allowed are {TOLERANCE:g}). Try another --format, or other "
                f"versions of the libraries"
            )


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
    local = Path(keys.model_name)
    if local.is_dir() and (found := _stored_types(local)):
        return reduce(torch.promote_types, found)
    if any(each.prefix and keys.model_name.startswith(each.prefix) for each in encoder_classes()):
        return torch.float32  # no folder and no hub id
    path = ModelFiles(keys).read("config.json")
    try:
        config = {} if path is None else json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is broken: {error}") from error
    named = str(config.get("dtype") or config.get("torch_dtype"))
    return DTYPES.get(named.removeprefix("torch."), torch.float32)


def _stored_types(folder: Path) -> set[torch.dtype]:
    """Return the floating-point types of all weights below a folder, from the headers of their files."""
    found = set()
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                found |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ConfigError(f"{path} is broken: {error}") from error
    return {STORED[name] for name in found if name in STORED}


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
    encoders = {
        "query texts": lambda: model.encode_query(list(TEXTS), show_progress_bar=False),
        "document texts": lambda: model.encode_document(list(TEXTS), show_progress_bar=False),
        "pictures": lambda: model.encode(_opened(), show_progress_bar=False),
    }
    encoded = {name: encoders[name]() for name in wanted}
    if several:
        encoded = {name: torch.cat(vectors).float().cpu().numpy() for name, vectors in encoded.items()}
    vectors = {name: each.astype(np.float64) for name, each in encoded.items()}
    return {"sentence-transformers": vectors}


def _opened() -> list[PIL.Image.Image]:
    return [PIL.Image.open(io.BytesIO(data)).convert("RGB") for data in sample_pngs()]
