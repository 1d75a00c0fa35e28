"""ONNX graphs: onnxruntime gives the model's vectors for any number of rows and tokens, or nothing is written."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.picture_models import write_picture_model
from kit.text_models import TEXTS, edit_json, load, load_any, write_model

import vembed
from vembed.entrypoints.export import main
from vembed.errors import ConfigError, MachineError
from vembed.models.export import Exported, ExportRequest, export_model
from vembed.models.formats import Dense
from vembed.models.keys import ModelKeys
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.models.text import TextEncoder
from vembed.plugins import onnx as plugin
from vembed.plugins.onnx import GRAPH, ONNX, QUANTIZED, OnnxOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

MISSING = "the extra onnx isn't installed: pip install 'vembed[onnx]'"
ONNXRUNTIME: Any = pytest.importorskip("onnxruntime", reason=MISSING)
pytest.importorskip("onnxscript", reason=MISSING)

ROOT = Path(__file__).parents[2]
MANY = (*TEXTS, "word " * 11, "a", "The river " * 5)


def export(source: Path, output: Path, **changes: Any) -> Exported:
    request = ExportRequest(
        keys=ModelKeys(model_name=str(source)),
        output=output,
        form=ONNX.form,
        format=ONNX,
        format_options=OnnxOptions(**changes),
    )
    return export_model(request, lambda encoder, form: {})


def run(path: Path, encoder: TextEncoder, texts: tuple[str, ...]) -> NDArray[np.float32]:
    ids = encoder.featurize(texts, "query").columns["input_ids"]
    width = int(ids.lengths.max())
    mask = (np.arange(width) < ids.lengths[:, None]).astype(np.int64)
    session = ONNXRUNTIME.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = {"input_ids": ids.padded(width, encoder._pad_id).astype(np.int64), "attention_mask": mask}
    found: NDArray[np.float32] = session.run(["sentence_embedding"], inputs)[0]
    return found


def vectors(encoder: TextEncoder, texts: tuple[str, ...]) -> NDArray[np.float32]:
    features = encoder.featurize(texts, "query")
    with torch.no_grad():
        found: NDArray[np.float32] = encoder(encoder.collate(features, np.arange(len(texts)), 64)).numpy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["bert", "mpnet", "roberta", "modernbert", "qwen3", "gemma2", "bidirectional gemma3", "t5"]
)
def test_a_graph_gives_the_models_vectors_for_any_rows_and_tokens(tmp_path: Path, kind: str) -> None:
    done = export(write_model(tmp_path / "bare", kind), tmp_path / "out")
    assert [(each.name, each.cosine > 0.999999, each.num_texts) for each in done.added] == [(GRAPH, True, 10)]
    encoder = load(tmp_path / "out")
    for texts in (MANY, MANY[:1], MANY[5:6], ("a", "b"), ("word " * 80,)):
        assert np.abs(run(tmp_path / "out" / GRAPH, encoder, texts) - vectors(encoder, texts)).max() <= 1e-5


@pytest.mark.slow
def test_a_graph_holds_pooling_dense_layers_and_lengths_that_count(tmp_path: Path) -> None:
    bare = load(write_model(tmp_path / "bare", "bert"))
    TextEncoder(
        "x",
        backbone=bare.backbone,
        tokenizer=bare.tokenizer,
        spec=replace(bare.spec, pooling=("mean", "cls"), normalize=False),
        prompts={"query": "find: ", "document": ""},
        dense=(Dense(64, 8, bias=True, activation=torch.nn.Tanh()),),
    ).save(tmp_path / "in")
    done = export(tmp_path / "in", tmp_path / "out")
    assert done.added[0].num_texts == 20, "both sides have their own texts"
    encoder = load(tmp_path / "out")
    found = run(tmp_path / "out" / GRAPH, encoder, MANY)
    assert np.abs(found - vectors(encoder, MANY)).max() <= 1e-5
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() > 0.1


@pytest.mark.slow
def test_a_graph_below_the_bound_is_refused_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "bare", "bert")
    done = export(source, tmp_path / "out", int8=True, allow_lower=True)
    exact, small = done.added
    assert small.name == QUANTIZED
    assert small.cosine < exact.cosine
    assert small.cosine > 0.9
    monkeypatch.setattr(plugin, "LEAST", (small.cosine + exact.cosine) / 2)
    with pytest.raises(MachineError, match=r"model_quantized.onnx: the cosine .* nothing was written.*--allow-lower"):
        export(source, tmp_path / "other", int8=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "out"]


@pytest.mark.slow
def test_a_graph_with_other_lengths_is_refused_though_its_directions_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = load(write_model(tmp_path / "bare", "bert"))
    spec = replace(bare.spec, normalize=False)
    TextEncoder("x", backbone=bare.backbone, tokenizer=bare.tokenizer, spec=spec).save(tmp_path / "in")

    class LongerVectors(ONNXRUNTIME.InferenceSession):  # type: ignore[misc]
        def run(self, *arguments: Any) -> list[NDArray[np.float32]]:
            return [1.01 * vectors for vectors in super().run(*arguments)]

    monkeypatch.setattr(ONNXRUNTIME, "InferenceSession", LongerVectors)
    with pytest.raises(MachineError, match=r"onnx/model.onnx: the ratio of lengths .* is 0.990\d+ at the least"):
        export(tmp_path / "in", tmp_path / "out")
    (done,) = export(tmp_path / "in", tmp_path / "out", allow_lower=True).added
    assert (done.cosine > 0.999999, round(done.length, 4)) == (True, 0.9901)


@pytest.mark.slow
def test_the_program_of_the_docs_runs_without_vembed_and_gives_its_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(write_model(tmp_path / "bare", "bert"), prompts={"query": "find: ", "document": "text: "}).save(
        tmp_path / "in"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["in", "--output", "my-model", "--format", "onnx"], program="vembed export") == 0
    assert re.search(r"onnx/model.onnx, [\d.]+ [KM]iB: .* cosine of at least (1.0|0.99999)", capsys.readouterr().out)
    programs = re.findall(r"```python\n(.*?)^```$", (ROOT / "docs" / "export.md").read_text(), re.DOTALL | re.MULTILINE)
    (program,) = [each for each in programs if "onnxruntime" in each]
    assert "vembed" not in program
    found: dict[str, Any] = {}
    exec(compile(program, "docs/export.md", "exec"), found)
    model = vembed.load(tmp_path / "my-model")
    texts = ["sea", "The river runs, to the sea.", " word " * 80]
    for side in ("query", "document"):
        assert np.abs(found["encode"](texts, side) - model.encode(texts, side)).max() <= 1e-5  # type: ignore[call-overload]


def test_what_torch_cannot_write_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*words: Any, **options: Any) -> None:
        raise RuntimeError("Failed to decompose\n## Exception summary\n<class 'ValueError'>: Cannot view a tensor")

    source = write_model(tmp_path / "bare", "bert")
    monkeypatch.setattr(torch.onnx, "export", failing)
    with pytest.raises(MachineError, match=r"can't be written as an ONNX graph: <class 'ValueError'>: Cannot view"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_gives_no_graph_is_refused_by_name(tmp_path: Path) -> None:
    NgramBag(NgramBagConfig(dimension=16, buckets=512)).save(tmp_path / "bag")
    write_picture_model(tmp_path / "clip", "clip")
    load(write_model(tmp_path / "bert", "bert")).save(tmp_path / "unpooled")
    edit_json(tmp_path / "unpooled" / "1_Pooling" / "config.json", include_prompt=False)
    late = load_any(tmp_path / "bert", pooling_method="none", query_expansion=False)
    late.save(tmp_path / "late")
    cases = {
        "bag": "is no transformer that gives one vector",
        "clip": "is no transformer that gives one vector",
        "unpooled": "leaves the tokens of its prompt out of the pooling",
        "late": "gives several vectors for each text",
    }
    for name, words in cases.items():
        with pytest.raises(ConfigError, match=f"--format onnx: .*{words}"):
            export(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_options_of_graphs_need_a_graph_and_a_graph_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "bert", "bert")
    words = [str(tmp_path / "bert"), "--output", str(tmp_path / "out")]
    assert main([*words, "--int8"], program="vembed export") == 2
    assert "add --format onnx" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main([*words, "--format", "onnx"], program="vembed export") == 2
    assert '--format onnx needs onnxruntime, which is missing: pip install "vembed[onnx]"' in capsys.readouterr().err
