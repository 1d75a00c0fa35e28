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
from dataclasses import dataclass, replace
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import PIL.Image
import torch
import transformers
from safetensors import SafetensorError, safe_open

from vembed.errors import ConfigError, MachineError, NonFiniteError
from vembed.models.export.folder import new_model_folder, refuse_taken
from vembed.models.export.forms import choose_form, write_form
from vembed.models.export.samples import TEXTS, largest_difference, num_items, picture_bytes, sample_vectors
from vembed.models.huggingface import ModelFiles
from vembed.models.registry import load_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from vembed.models.encoder import Encoder
    from vembed.models.export.forms import Form
    from vembed.models.export.samples import Vectors
    from vembed.models.huggingface import ModelOptions

TOLERANCE = 1e-5
"""Most by which a component of a unit vector may differ when a model is read back; float32 adds up to less."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types that weights are exported in, by name."""

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of floating-point numbers by the name that safetensors has for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and how.

    Attributes:
        options: The model; its dtype is not read.
        output: The folder to write.
        form: The library to write for, or "auto".
        dtype: Type of the stored weights, None for that of the source.
        overwrite: Whether a model at the output may be replaced.
    """

    options: ModelOptions
    output: Path
    form: Form | Literal["auto"] = "auto"
    dtype: torch.dtype | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        form: The library that it is for.
        dtype: Type of the stored weights.
        difference: Largest difference of a vector, read back against written.
        rounding: Largest difference that rounding the weights made, 0 where none was rounded.
        num_items: Sample items that were compared.
        readers: What read it back, with versions.
    """

    form: Form
    dtype: torch.dtype
    difference: float
    rounding: float
    num_items: int
    readers: tuple[str, ...]


def export_model(
    request: ExportRequest,
    extra_files: Callable[[Encoder, Form], Mapping[str, str]],
    *,
    poll: Callable[[], None] = lambda: None,
) -> Exported:
    """Write a model as a folder that its library loads.

    Args:
        request: What to export, and how.
        extra_files: Given the encoder as it is stored and its form, returns further files (name -> text), e.g. a card.
        poll: Called between the steps; may raise to stop.

    Raises:
        ConfigError: The form or the output folder won't do; nothing was written.
        MachineError: The disk refused, or what was read back gives other vectors; nothing stays.
        NonFiniteError: The model gives NaN or infinity, or does so once its weights are rounded.
    """
    output = request.output.expanduser().resolve()
    local = Path(request.options.name)
    source = local.resolve() if local.is_dir() else None
    refuse_taken(output, overwrite=request.overwrite, source=source)
    stored = stored_dtype(request.options)
    dtype = request.dtype or stored
    computing = torch.float64 if torch.float64 in (dtype, stored) else torch.float32
    encoder = load_encoder(replace(request.options, dtype=computing)).eval()
    form = choose_form(encoder, request.form)
    before = sample_vectors(encoder)
    poll()
    round_weights(encoder, dtype)
    wanted = sample_vectors(encoder) if dtype != computing else before
    _refuse_nonfinite(before, wanted, dtype)
    poll()
    with new_model_folder(output) as folder, _quiet_loading():
        encoder.to(dtype)
        write_form(encoder, form, folder)
        for name, text in extra_files(encoder, form).items():
            (folder / name).write_text(text, "utf-8")
        del encoder  # of a large model only one copy has room
        poll()
        again = replace(request.options, name=str(folder), revision=None, dtype=computing)
        found = {"vembed": sample_vectors(load_encoder(again).eval())}
        poll()
        if form == "sentence-transformers":
            found |= _by_sentence_transformers(folder, wanted, again)
        differences = {reader: largest_difference(wanted, vectors) for reader, vectors in found.items()}
        _refuse_different(differences, output)
    readers = tuple(f"{reader} {version(reader)}" for reader in found)
    rounding = largest_difference(before, wanted)
    return Exported(form, dtype, max(differences.values()), rounding, num_items(wanted), readers)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Keep transformers from telling which weights a folder lacks: what matters of that is refused or compared here."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


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


def stored_dtype(options: ModelOptions) -> torch.dtype:
    """Return the type that the weights of a model are stored in, one that holds all where several occur.

    Args:
        options: The model. What neither its weights nor its config.json say is float32.
    """
    local = Path(options.name)
    if local.is_dir() and (found := _stored_types(local)):
        return reduce(torch.promote_types, found)
    if options.name.startswith("open_clip:"):
        return torch.float32
    path = ModelFiles(options).read("config.json")
    try:
        config = {} if path is None else json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is broken: {error}") from error
    named = str(config.get("dtype") or config.get("torch_dtype"))
    return {"float64": torch.float64, **DTYPES}.get(named.removeprefix("torch."), torch.float32)


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


def _by_sentence_transformers(
    folder: Path, wanted: Vectors, options: ModelOptions
) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Encode the samples with sentence-transformers itself; nothing where it isn't installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return {}
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(
        str(folder),
        device="cpu",
        trust_remote_code=options.trust_remote_code,
        local_files_only=True,
        model_kwargs={"dtype": options.dtype},
    )
    encoders = {
        "query texts": lambda: model.encode_query(list(TEXTS), show_progress_bar=False),
        "document texts": lambda: model.encode_document(list(TEXTS), show_progress_bar=False),
        "pictures": lambda: model.encode(_opened(), show_progress_bar=False),
    }
    vectors = {name: encoders[name]().astype(np.float64) for name in wanted}
    return {"sentence-transformers": vectors}


def _opened() -> list[PIL.Image.Image]:
    return [PIL.Image.open(io.BytesIO(data)).convert("RGB") for data in picture_bytes()]
