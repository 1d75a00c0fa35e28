"""A model from Python: load it by name, folder or run, and turn texts and pictures into vectors."""

from __future__ import annotations

import logging
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Unpack, cast, overload

import numpy as np
import torch

from vembed.api.arguments import checked_side, device_named, image_limits, refuse_unknown
from vembed.api.keys import LoadKeys
from vembed.batch import Ragged, modality_of
from vembed.config.messages import checked_section
from vembed.data.python_rows import items_of, refuse_other_modalities
from vembed.distributed.runtime import local_device
from vembed.errors import ConfigError, NonFiniteError
from vembed.evaluation.keys import CardKeys
from vembed.models.hub import ModelIdentity, identify
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder
from vembed.models.names import COMMIT, locate_model
from vembed.registry import ADAPTERS
from vembed.vectors.encode import ItemEncoder, encoding_budget, refuse_several_vectors, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Modality, Side
    from vembed.data.python_rows import ItemInput
    from vembed.models.encoder import Encoder, Similarity
    from vembed.plugins.push.push import Pushed
    from vembed.vectors.encode import Vectors

_log = logging.getLogger(__name__)

Quantized: TypeAlias = Literal["int8", "binary"]
Encode = TypeVar("Encode", bound="Callable[..., Any]")

DEFAULT_BATCH_SIZE = 256


def load(path_or_name: str | Path, /, **options: Unpack[LoadKeys]) -> EmbeddingModel:
    """Load a model for encoding.

    Args:
        path_or_name: A model's folder, the output folder of a run (its model/ is taken), or a hub id.
        options: Keys of the model as docs/configuration.md has them; what is left out its own files say. Beside them
            `device`, "cpu", "cuda" or "cuda:1" (default: the one that training would take), and `bf16`, which encodes
            in bfloat16 mixed precision. `trust_remote_code` needs `model_revision` to be a commit.

    Raises:
        ConfigError: There is no such model, or it needs what isn't allowed.
        MachineError: The hub can't be reached.
    """
    refuse_unknown(options, LoadKeys, "load")
    # A run's folder stands for its model/, a short name for a hub id. Code is run from a pinned commit alone: a branch
    # may hold other code tomorrow.
    name, _ = locate_model(path_or_name)
    revision, trusted = options.get("model_revision"), options.get("trust_remote_code", False)
    if trusted and not COMMIT.fullmatch(revision or ""):
        raise ConfigError(
            "trust_remote_code runs the model's code: set model_revision to the commit (40 hex digits) that you read"
        )
    encoder = load_encoder(_model_keys(name, options), image_limits=image_limits(options))
    return EmbeddingModel(encoder, name=name, options=options)


def _model_keys(name: str, options: LoadKeys) -> ModelKeys:
    """Return what was said about a model as keys of a configuration."""
    given = {key: value for key, value in options.items() if key in ModelKeys.model_fields}
    return checked_section(ModelKeys, {"model_name": name, **given})


def _taken_by_mteb(encode: Encode) -> Encode:
    """Let the method that encodes rows of a side also take MTEB's batches, with the keywords that MTEB adds."""

    @wraps(encode)
    def either(model: EmbeddingModel, *given: Any, **named: Any) -> Any:
        # Only MTEB names a task; the plugin that knows its batches is imported then.
        return model._for_mteb.encode(*given, **named) if "task_metadata" in named else encode(model, *given, **named)

    return cast("Encode", either)


class EmbeddingModel:
    """A model that turns texts, pictures or both into vectors; made by `load`."""

    def __init__(self, encoder: Encoder, *, name: str, options: LoadKeys) -> None:
        self.name = name
        self.options = options
        self.image_limits = image_limits(options)
        device = options.get("device")
        self._device = local_device() if device is None else device_named(device)
        self._encoder = encoder.to(self._device).eval()
        self._says_cut = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.dimension} dimensions, {self.similarity}, {self._device}>"

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self._encoder.dimension

    @property
    def takes(self) -> frozenset[Modality]:
        """Kinds of rows it has towers for: "text", "image", and "image+text" for a picture with a text."""
        return self._encoder.modalities

    @property
    def similarity(self) -> Scoring:
        """Comparison of vectors: "cosine" (they have unit length) or "dot". Both are `queries @ documents.T`.

        It is also the function that compares: `model.similarity(queries, documents)`, quantized ones too.
        """
        return Scoring(self._encoder.similarity)

    @property
    def max_length(self) -> int | None:
        """Longest input in tokens; longer texts are cut. None where there is no limit."""
        return self._encoder.max_length

    @property
    def prompts(self) -> Mapping[Side, str]:
        """Text that is put before each side's texts."""
        return self._encoder.prompts

    def similarity_pairwise(self, queries: Any, documents: Any) -> NDArray[np.float32]:
        """Return the score of each query for the document of the same row, (n,) float32; a single vector is a row."""
        pairs = zip(np.atleast_2d(queries), np.atleast_2d(documents), strict=True)
        return np.array([self.similarity(*pair)[0, 0] for pair in pairs], dtype=np.float32)

    @cached_property
    def mteb_model_meta(self) -> Any:
        """Facts about the model that MTEB asks for; with it, `mteb.evaluate(model, tasks)` takes this one as it is."""
        return self._for_mteb.mteb_model_meta

    @cached_property
    def _for_mteb(self) -> Any:
        return ADAPTERS.load("mteb")(self)

    @cached_property
    def identity(self) -> ModelIdentity:
        """Name, hash of the weights, and what else its vectors depend on."""
        return identify(self._encoder, name=self.name)

    @overload
    def encode(
        self,
        rows: Iterable[ItemInput],
        side: Side,
        *,
        batch_size: int = ...,
        normalize: bool = ...,
        dims: int | None = ...,
        quantize: None = ...,
        as_tensor: Literal[False] = ...,
    ) -> NDArray[np.float32]: ...

    @overload
    def encode(
        self,
        rows: Iterable[ItemInput],
        side: Side,
        *,
        batch_size: int = ...,
        normalize: bool = ...,
        dims: int | None = ...,
        quantize: Quantized | None,
        as_tensor: Literal[False] = ...,
    ) -> NDArray[Any]: ...

    @overload
    def encode(
        self,
        rows: Iterable[ItemInput],
        side: Side,
        *,
        batch_size: int = ...,
        normalize: bool = ...,
        dims: int | None = ...,
        quantize: Quantized | None = ...,
        as_tensor: Literal[True],
    ) -> torch.Tensor: ...

    @_taken_by_mteb
    def encode(
        self,
        rows: Iterable[ItemInput],
        side: Side | None = None,  # required, but for the words of `checked_side`
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        normalize: bool = False,
        dims: int | None = None,
        quantize: Quantized | None = None,
        as_tensor: bool = False,
    ) -> NDArray[Any] | torch.Tensor:
        """Turn texts and pictures into vectors.

        Args:
            rows: n texts and pictures, mixed as they come. A `str` is a text; a picture is a `pathlib.Path`, the bytes
                of its file, a `PIL.Image.Image` or a `vembed.batch.Image`.
            side: Whether they are queries or documents: many models put another prompt before each.
            batch_size: Most rows of one encoder call; it changes no more than the speed.
            normalize: Whether the vectors get unit length; those of a model that compares by cosine have it.
            dims: How many of the first numbers are kept, for models trained with `mrl_dims` (Matryoshka).
            quantize: "int8" (a byte for each number) or "binary" (a bit); docs/python.md says what they are.
            as_tensor: Whether the result is a `torch.Tensor` on the CPU.

        Returns:
            (n, E) float32, in the order of the rows; int8, or of bits (n, E / 8) uint8, where they are quantized.

        Raises:
            ConfigError: The model gives several vectors for each row, or int8 would lose lengths that count.
            DataError: A picture is missing, broken or over the limits, or the model has no tower for a row.
            NonFiniteError: A vector holds NaN or infinity.
            TypeError: A row is neither a text nor a picture.
            ValueError: There is no such side or form, or the batch size is below 1.
        """
        refuse_several_vectors(self._encoder)
        vectors = values_of(self._encode(rows, side, batch_size))
        formed = form_of(vectors, self._encoder.similarity, normalize=normalize, dims=dims, quantize=quantize)
        return torch.from_numpy(formed) if as_tensor else formed

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the vectors of documents as lists, as LangChain asks for them."""
        return cast("list[list[float]]", self.encode(texts, "document").tolist())

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query as a list, as LangChain asks for it."""
        return cast("list[float]", self.encode([text], "query")[0].tolist())

    def encode_multi_vector(
        self, rows: Iterable[ItemInput], side: Side, *, batch_size: int = DEFAULT_BATCH_SIZE
    ) -> list[NDArray[np.float32]]:
        """Turn texts and pictures into several vectors each; of a model of one vector, into that one.

        A query's score for a document is MaxSim: `(query @ document.T).max(axis=1).sum()`.

        Returns:
            For each row an array (vectors of the row, E), float32.

        Raises:
            VembedError: As `encode`, which also says what `rows` and the others are.
        """
        vectors = self._encode(rows, side, batch_size)
        if not isinstance(vectors, Ragged):
            return list(vectors[:, None])
        return np.split(vectors.values, vectors.offsets[1:-1]) if len(vectors.lengths) else []

    def _encode(self, rows: Iterable[ItemInput], side: Side | None, batch_size: int) -> Vectors:
        side = checked_side(side)
        items = items_of(rows, self.image_limits)
        refuse_other_modalities(items, self.takes, self.name)
        encode = self.item_encoder(batch_size)
        vectors = encode(items, side)
        # One pass over the vectors finds damaged weights here and not as a ranking that means nothing.
        bad = np.flatnonzero(~np.isfinite(values_of(vectors)).all(axis=1))
        if bad.size:
            row = int(bad[0])
            # Of several vectors a row, `bad` counts vectors: the row is the last one that starts at or before it.
            if isinstance(vectors, Ragged):
                row = int(np.searchsorted(vectors.offsets, row, side="right")) - 1
            raise NonFiniteError(f"{self.name}: the vector of row {row} holds NaN or infinity; its weights are damaged")
        # Said once per model: a program that encodes row by row would otherwise print it for each.
        num_cut = encode.num_truncated[side]
        if num_cut and self._says_cut:
            self._says_cut = False
            _log.warning(
                "%d of %d texts are longer than the %s tokens that %s takes, and were cut; this is said once",
                num_cut, sum(modality_of(item) != "image" for item in items), self._encoder.longest_text(side),
                self.name,
            )  # fmt: skip
        return vectors

    def push_to_hub(
        self,
        repo: str,
        *,
        public: bool = False,
        dry_run: bool = False,
        revision: str | None = None,
        message: str | None = None,
        license: str | None = None,  # noqa: A002 - the hub's own word
        base_model_license: str | None = None,
        language: str | Sequence[str] = (),
    ) -> Pushed:
        """Send the model with its card to the Hugging Face hub, as `vembed push` does.

        What `load` was told about the model (pooling, prompts, lengths) goes with it. A folder that `vembed export`
        wrote is sent as it is, and refused where it was loaded otherwise.

        Args:
            repo: "owner/name"; created if it doesn't exist.
            public: Whether everyone may see it.
            dry_run: Whether to return what would be sent, and send nothing.
            revision: Branch to send to.
            message: Of the commit.
            license: Of the model, e.g. "apache-2.0"; the card says "not stated" without it.
            base_model_license: Of the model that training started from.
            language: A code such as "en", or several.

        Raises:
            VembedError: What the hub refused, and how far the upload came.
        """
        languages = [language] if isinstance(language, str) else [*language]
        owner = {"license": license, "base_model_license": base_model_license, "language": languages}
        pushed: Pushed = ADAPTERS.load("push")(
            self.name,
            repo,
            keys=_model_keys(self.name, self.options),
            owner=checked_section(CardKeys, owner),
            public=public,
            dry_run=dry_run,
            revision=revision,
            message=message,
        )
        return pushed

    def item_encoder(self, batch_size: int, *, poll: Callable[[], None] | None = None) -> ItemEncoder:
        """Return the encoder as evaluation and search see it.

        Raises:
            ValueError: The batch size is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it is at least 1")
        encode = ItemEncoder(
            self._encoder,
            encoding_budget(self._encoder, self._device, batch_size),
            self._device,
            torch.bfloat16 if self.options.get("bf16") else None,
        )
        if poll is not None:
            encode.poll = poll
        return encode


class Predictor:
    """A trained model that turns texts and pictures into vectors; `vembed.load` takes the same options."""

    def __init__(self, path: str | Path, **options: Unpack[LoadKeys]) -> None:
        self.model = load(path, **options)

    def encode(self, rows: Iterable[ItemInput], side: Side = "query", **form: Any) -> NDArray[np.float32]:
        """Turn texts and pictures into vectors, as `EmbeddingModel.encode` does."""
        vectors: NDArray[np.float32] = self.model.encode(rows, side, **form)
        return vectors

    def encode_text(self, texts: Sequence[str], side: Side = "query", **form: Any) -> NDArray[np.float32]:
        """Turn texts into vectors, by default as queries."""
        return self.encode(texts, side, **form)

    def encode_image(self, images: Iterable[ItemInput], side: Side = "document", **form: Any) -> NDArray[np.float32]:
        """Turn pictures into vectors, by default as documents; here a `str` is the path of a file."""
        return self.encode((Path(each) if isinstance(each, str) else each for each in images), side, **form)


# Forms of vectors: shorter, of unit length, in fewer bits; and how they are compared

_LARGEST = 127


def form_of(
    vectors_NE: NDArray[np.float32],
    similarity: Similarity,
    *,
    normalize: bool,
    dims: int | None,
    quantize: Quantized | None,
) -> NDArray[Any]:
    """Return vectors in the form that a caller asked for.

    - dims: the first of their numbers; where the model compares by cosine they get unit length again.
    - int8: each vector is scaled so that its largest number is 127 or -127. Their cosines are those of the vectors to
      about 0.01, so no scale need be kept.
    - binary: one bit for each number, 1 above 0, eight to a byte. E - 2 x Hamming distance is their inner product.

    Raises:
        ConfigError: The lengths of the vectors count, and int8 would lose them.
        ValueError: There are fewer numbers than `dims`, no such quantization, or bits that don't fill bytes.
    """
    size = vectors_NE.shape[1]
    if dims is not None and not 1 <= dims <= size:
        raise ValueError(f"dims is {dims}; the model's vectors have {size} numbers, and 1 to {size} can be kept")
    if quantize not in (None, "int8", "binary"):
        raise ValueError(f"quantize is {quantize!r}; it is 'int8', 'binary' or None")
    if quantize == "int8" and similarity == "dot" and not normalize:
        raise ConfigError(
            "quantize='int8' keeps the direction of a vector and loses its length, which counts for a model that "
            "compares by dot product; add normalize=True if the cosine will do"
        )
    if quantize == "binary" and (dims or size) % 8:
        raise ValueError(f"quantize='binary' packs 8 numbers into a byte: {dims or size} is no multiple of 8; set dims")
    # Cut, then normalise, then quantize: a cut vector is shorter than 1, and bits don't change with its length.
    short_NE = vectors_NE[:, :dims]
    if normalize or (dims is not None and similarity == "cosine"):
        short_NE = unit_length(short_NE)
    if quantize == "binary":
        return np.packbits(short_NE > 0, axis=1)
    if quantize == "int8":
        # tiny keeps a row of zeros from dividing by zero: its codes are zeros.
        largest_N = np.abs(short_NE).max(axis=1, keepdims=True, initial=np.finfo(np.float32).tiny)
        codes_NE: NDArray[np.int8] = np.rint(short_NE / largest_N * _LARGEST).astype(np.int8)
        return codes_NE
    return np.ascontiguousarray(short_NE)


def unit_length(vectors_NE: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors of length 1; one of zeros stays as it is."""
    lengths_N = np.linalg.norm(vectors_NE, axis=1, keepdims=True)
    return (vectors_NE / np.where(lengths_N == 0, 1, lengths_N)).astype(np.float32, copy=False)


class Scoring(str):
    """Comparison of a model's vectors: the word "cosine" or "dot", and the function that does it."""

    __slots__ = ()

    def __call__(self, queries: Any, documents: Any) -> NDArray[np.float32]:
        """Return the score of every query for every document.

        Args:
            queries: Vectors (Q, E) as `encode` gives them, quantized ones and tensors too; or a single one (E,).
            documents: Vectors (D, E) of the same form, or a single one.

        Returns:
            (Q, D) float32, higher is closer.
        """
        arrays = [np.atleast_2d(np.asarray(vectors)) for vectors in (queries, documents)]
        q_QE, d_DE = (
            2 * np.unpackbits(array, axis=1).astype(np.float32) - 1  # packed bits: 1 or -1 each
            if array.dtype == np.uint8
            else array.astype(np.float32)
            for array in arrays
        )
        # int8 codes have lost their length, and all rows of bits have one: both stand for directions, so that dot
        # products of either mean nothing.
        if self == "cosine" or any(array.dtype in (np.int8, np.uint8) for array in arrays):
            q_QE, d_DE = unit_length(q_QE), unit_length(d_DE)
        return q_QE @ d_DE.T
