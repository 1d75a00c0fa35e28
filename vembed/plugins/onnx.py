"""`vembed export --format onnx`: a text encoder as an ONNX graph too, which onnxruntime runs without torch.

1. The encoder is traced with free axes for rows and tokens: `onnx/model.onnx` takes `input_ids` and `attention_mask`,
   int64 (R, T) padded at the right, and gives `last_hidden_state` (R, T, H), which sentence-transformers and
   text-embeddings-inference pool, and `sentence_embedding` (R, E), the vectors of the model itself.
2. `onnx/model_quantized.onnx` has weights of 8 bits; numbers between layers are rounded as they come.
3. onnxruntime encodes texts of many lengths, each alone and all at once. The least cosine to the encoder's own vectors,
   and the largest difference in length, decide whether the folder is written.

Graphs are a part of a sentence-transformers folder, whose library picks them up by their names.

Shape legend: R rows, T tokens, H hidden dim, E embedding dim; 2: each row alone, and all at once.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vembed.entrypoints.options import AddedOptions
from vembed.errors import ConfigError, MachineError
from vembed.models.export_formats import ExportFormat
from vembed.pages.text import bytes_text
from vembed.section import option

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from vembed.batch import Side
    from vembed.models.encoder import Encoder

LEAST = 0.999
"""Of cosines, and of a shorter length to the longer one; a dot product counts both."""
LARGEST_FILE = 1_900_000_000  # bytes; a message of protobuf holds less than 2 GiB
GRAPH, QUANTIZED = "onnx/model.onnx", "onnx/model_quantized.onnx"
LENGTHS = (1, 2, 4, 7, 12, 30)
"""Of sentences in a text, beside the samples of every export: a graph must take many lengths."""


class OnnxOptions(AddedOptions):
    """Options of `vembed export` for graphs."""

    headings: ClassVar = {
        "for --format onnx: a sentence-transformers folder with ONNX graphs in onnx/": ("int8", "opset", "allow_lower")
    }

    int8: bool = option(False, "also write a graph with 8-bit weights")
    opset: int | None = option(None, "ONNX operator set version; default: that of torch", metavar="N")
    allow_lower: bool = option(False, "accept a graph whose vectors have a cosine below 0.999 to the model's")

    def run(self, options: Any) -> None:
        """Refuse the options without the format.

        Raises:
            ConfigError: One is set for another format.
        """
        # A graph's option without a graph would be dropped in silence.
        if options.format != "onnx" and (self.int8 or self.opset is not None or self.allow_lower):
            raise ConfigError("--int8, --opset and --allow-lower are for graphs; add --format onnx")


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph that was written."""

    name: str  # path in the model's folder
    num_bytes: int
    cosine: float  # the least, of onnxruntime's vectors to the encoder's own
    length: float  # the least, of the shorter of two such vectors to the longer
    num_texts: int

    def __str__(self) -> str:
        """Return what the command tells."""
        text = (
            f"{self.name}, {bytes_text(self.num_bytes)}: its vectors have a cosine of at least {self.cosine:.7f} "
            f"to the model's ({self.num_texts} texts, each alone and all at once)"
        )
        if self.length < LEAST:
            text += f"\n{self.name}: lengths of vectors differ from the model's by up to {1 - self.length:.2%}"
        return text


def write_graphs(encoder: Encoder, folder: Path, options: OnnxOptions) -> list[Graph]:
    """Write the graphs of an encoder into its folder; the encoder is used up.

    Raises:
        MachineError: torch can't write the model as a graph, or a graph's vectors differ too much.
    """
    import numpy as np  # in functions, as are torch and ONNX: `vembed export --help` has the options of this file
    import torch

    from vembed.models.exportable import TEXTS

    texts = (*TEXTS, *("the quick brown fox jumps over a lazy dog " * count for count in LENGTHS))
    # Only where the prompts differ are the texts of both sides put in differently.
    sides: tuple[Side, ...] = ("query",) if len(set(encoder.prompts.values())) == 1 else ("query", "document")
    wanted: dict[Side, NDArray[np.float64]] = {}
    inputs: dict[Side, list[NDArray[np.int64]]] = {}
    for side in sides:
        features = encoder.featurize(texts, side)
        ids = features.columns["input_ids"]
        inputs[side] = [np.asarray(row, dtype=np.int64) for row in np.split(ids.values, ids.offsets[1:-1])]
        with torch.no_grad():
            call = encoder.collate(features, np.arange(len(texts)), int(features.lengths.max()))
            wanted[side] = encoder(call).double().numpy()
    (folder / GRAPH).parent.mkdir()
    _trace(encoder, inputs["query"][:3], folder / GRAPH, options.opset)
    names = [GRAPH]
    if options.int8:
        _quantize(folder / GRAPH, folder / QUANTIZED)
        names.append(QUANTIZED)
    graphs = []
    for name in names:
        pairs = [_agreement(folder / name, inputs[side], wanted[side]) for side in wanted]
        cosine, length = np.min(pairs, axis=0).tolist()
        files = [folder / name, *(folder / name).parent.glob(f"{(folder / name).name}[._]data")]
        size = sum(path.stat().st_size for path in files)
        graphs.append(Graph(name, size, cosine, length, len(wanted) * len(texts)))
        if not min(cosine, length) >= LEAST and not options.allow_lower:
            what = "cosine" if not cosine >= LEAST else "ratio of lengths"
            raise MachineError(
                f"{name}: the {what} of its vectors to the model's is {min(cosine, length):.5f} at the least, below "
                f"{LEAST}; nothing was written. Measure what that costs on your data, and write it with --allow-lower"
            )
    return graphs


def _padded(rows: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids and mask (R, T); what the mask leaves out may be any token."""
    import numpy as np

    width = max(map(len, rows))
    ids_RT = np.stack([np.pad(row, (0, width - len(row)), mode="edge") for row in rows])
    mask_RT = (np.arange(width) < np.array([[len(row)] for row in rows])).astype(np.int64)
    return ids_RT, mask_RT


def _trace(encoder: Encoder, rows: list[NDArray[np.int64]], path: Path, opset: int | None) -> None:
    """Write the graph of an encoder, traced on a few rows."""
    import onnx
    import torch

    # Several rows of several lengths: the tracer takes an axis of 1 for a constant.
    example = tuple(torch.from_numpy(values) for values in _padded(rows))
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:  # they warn about each operator that they rewrite
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                encoder.graph().float().eval(),
                example,
                dynamo=True,
                opset_version=opset,
                input_names=["input_ids", "attention_mask"],
                output_names=["last_hidden_state", "sentence_embedding"],
                dynamic_shapes={"input_ids": axes, "attention_mask": axes},
                verbose=False,
            )
    except Exception as error:  # it has no common base: the tracer, the translator and the model itself fail here
        why = next(
            (line for line in reversed(str(error).splitlines()) if "Error" in line), str(error).partition("\n")[0]
        )
        raise MachineError(f"{encoder.name} can't be written as an ONNX graph: {why.strip()}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert program is not None
    model = program.model_proto
    # Beyond protobuf's limit the weights go to a file beside the graph, as 4 bytes each.
    big = sum(parameter.numel() * 4 for parameter in encoder.parameters()) > LARGEST_FILE
    onnx.save_model(model, str(path), save_as_external_data=big, location=f"{path.name}_data" if big else None)


def _quantize(source: Path, output: Path) -> None:
    """Write a graph with weights of 8 bits."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    large = source.stat().st_size > LARGEST_FILE or source.with_name(f"{source.name}_data").exists()
    root = logging.getLogger()
    level = root.level
    try:
        root.setLevel(logging.ERROR)  # it logs advice of its own there
        quantize_dynamic(source, output, weight_type=QuantType.QInt8, per_channel=True, use_external_data_format=large)
    finally:
        root.setLevel(level)


def _agreement(path: Path, rows: list[NDArray[np.int64]], wanted_RE: NDArray[np.float64]) -> tuple[float, float]:
    """Return the least cosine of a graph's vectors to those wanted, and the least ratio of their lengths.

    Each row is put in alone, and all rows in one call: a graph that took a size for a constant differs in one of them.
    """
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(batch: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        ids_RT, mask_RT = _padded(batch)
        vectors_RE: NDArray[np.float64] = session.run(
            ["sentence_embedding"], {"input_ids": ids_RT, "attention_mask": mask_RT}
        )[0].astype(np.float64)
        return vectors_RE

    vectors_2RE = np.stack([np.concatenate([run([row]) for row in rows]), run(rows)])
    lengths_2R, own_R = np.linalg.norm(vectors_2RE, axis=-1), np.linalg.norm(wanted_RE, axis=1)
    cosines_2R = (vectors_2RE * wanted_RE).sum(axis=-1) / (lengths_2R * own_R)
    ratios_2R = np.minimum(lengths_2R / own_R, own_R / lengths_2R)
    return float(cosines_2R.min()), float(ratios_2R.min())


ONNX = ExportFormat(
    name="onnx",
    write=write_graphs,
    form="sentence-transformers",
    obstacle=lambda encoder: encoder.why_no_graph(),
    packages=("onnx", "onnxruntime", "onnxscript"),
    extra="onnx",
)
