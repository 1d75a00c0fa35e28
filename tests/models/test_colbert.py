"""Late interaction on texts: vectors by the published rule, sentence-transformers', the folders, and the engine."""

from __future__ import annotations

import json
import shutil
import string
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from kit.late_models import (
    DIMENSION,
    DOCUMENTS,
    HIDDEN,
    QUERIES,
    QUERY_LENGTH,
    rows_of,
    write_bert,
)
from kit.text_models import edit_json, load_any, write_model
from safetensors.torch import load_file, save_file

import vembed
from vembed.batch import Features, Ragged
from vembed.errors import ConfigError
from vembed.models.adapters import freeze
from vembed.models.export import ExportRequest, export_model
from vembed.models.keys import ModelKeys
from vembed.models.late import TokenHead, new_layer
from vembed.models.measure import ProfileTarget
from vembed.models.profile import profile_model

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Side

SIDES: dict[Side, tuple[str, ...]] = {"query": QUERIES, "document": DOCUMENTS}
KEYS = {"pooling_method": "none", "projection_dim": DIMENSION, "query_length": QUERY_LENGTH}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("late") / "bert")


def late(folder: Path, **keys: Any) -> Any:
    torch.manual_seed(1)
    return load_any(folder, **{**KEYS, **keys}).eval()


def by_the_rule(encoder: Any, text: str, side: Side, *, attends: bool = False) -> torch.Tensor:
    """Compute the vectors of one text step by step, as ColBERT describes them."""
    vocabulary = encoder.tokenizer.get_vocab()
    longest = QUERY_LENGTH if side == "query" else 64
    pieces = encoder.tokenizer.tokenize(text)[: longest - 3]
    marker = {"query": "[Q] ", "document": "[D] "}[side]
    tokens = ["[CLS]", marker, *pieces, "[SEP]"]
    seen = [1] * len(tokens)
    if side == "query":
        missing = QUERY_LENGTH - len(tokens)
        tokens, seen = tokens + ["[MASK]"] * missing, seen + [int(attends)] * missing
    ids = torch.tensor([[vocabulary[token] for token in tokens]])
    hidden = encoder.backbone(input_ids=ids, attention_mask=torch.tensor([seen])).last_hidden_state[0]
    vectors = torch.nn.functional.normalize(hidden @ encoder.head.layers[0].linear.weight.T, dim=1)
    kept = [side == "query" or token not in string.punctuation for token in tokens]
    return vectors[kept]


@pytest.mark.parametrize("side", SIDES)
def test_vectors_are_those_of_the_published_rule(bert: Path, side: Side) -> None:
    encoder = late(bert)
    for text, found in zip(SIDES[side], rows_of(encoder, SIDES[side], side), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(found, by_the_rule(encoder, text, side), rtol=0, atol=1e-5)
    assert encoder.dimension == DIMENSION
    flat = [vector for vectors in rows_of(encoder, SIDES[side], side) for vector in vectors[1:2]]
    assert len({tuple(vector.tolist()) for vector in flat}) == len(flat), "different texts give different vectors"


def test_tokens_that_fill_queries_up_are_seen_by_the_others_where_the_model_says_so(bert: Path, tmp_path: Path) -> None:
    encoder = late(bert)
    encoder.save(tmp_path)
    settings = json.loads((tmp_path / "sentence_bert_config.json").read_text())
    edit_json(tmp_path / "sentence_bert_config.json", query_expansion={**settings["query_expansion"], "attend": True})
    attending = load_any(tmp_path).eval()
    [found] = rows_of(attending, QUERIES[:1], "query")
    with torch.no_grad():
        torch.testing.assert_close(found, by_the_rule(encoder, QUERIES[0], "query", attends=True), rtol=0, atol=1e-5)
    assert (found - rows_of(encoder, QUERIES[:1], "query")[0]).abs().max() > 1e-3
    assert "seen by the others" in attending.describe()["max_seq_length"]


def test_a_new_head_trains_with_any_part_and_one_of_files_with_its_own(bert: Path, tmp_path: Path) -> None:
    encoder = late(bert)
    encoder.save(tmp_path)
    freeze(encoder, "text-projection")
    assert encoder.head.layers[0].linear.weight.requires_grad
    assert encoder.trained.words.startswith("text-projection and head: ")
    again = load_any(tmp_path)
    freeze(again, "text-projection")
    assert not again.head.layers[0].linear.weight.requires_grad
    assert again.trained.words.startswith("text-projection: ")


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_tokens_that_fill_queries_up_see_none_of_them_in_a_decoder(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path / kind, kind)
    encoders = {how: late(folder, attn_implementation=how) for how in ("auto", "sdpa", "eager")}
    for side, texts in SIDES.items():
        wanted = rows_of(encoders["eager"], texts, side)
        for how in ("auto", "sdpa"):
            for one, other in zip(rows_of(encoders[how], texts, side), wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert "sdpa" in encoders["auto"].describe()["attention"]
    encoders["auto"].save(tmp_path / "saved")
    assert_same_as_sentence_transformers(tmp_path / "saved", load_any(tmp_path / "saved").eval())


def test_a_prompt_comes_behind_the_marker_of_a_saved_model_too(bert: Path, tmp_path: Path) -> None:
    wanted = late(bert, query_prompt="find: ")
    late(bert).save(tmp_path)
    found = load_any(tmp_path, query_prompt="find: ").eval()
    assert found.prompts == wanted.prompts == {"query": "[Q] find: ", "document": "[D] "}
    assert late(bert).with_prompts({"query": "find: "}).prompts == wanted.prompts  # as an entry of data sets them
    found.save(tmp_path / "again")
    assert load_any(tmp_path / "again").prompts == found.prompts
    edit_json(tmp_path / "config_sentence_transformers.json", model_type="ColBERT", prompts={}, query_prefix="[Q] ")
    for path in ("2_MultiVectorMask", "3_Normalize"):
        shutil.rmtree(tmp_path / path)
    modules = json.loads((tmp_path / "modules.json").read_text())[:2]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text("{}")
    assert load_any(tmp_path, query_prompt="find: ").prompts == wanted.prompts


def test_a_query_longer_than_the_positions_is_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"query_length 65 is over the 64 positions .* set query_length: 64 or less"):
        late(bert, query_length=65)
    late(bert, query_length=16, query_expansion=False).save(tmp_path)
    settings = next(path for path in tmp_path.rglob("*.json") if '"query_length": 16' in path.read_text("utf-8"))
    settings.write_text(settings.read_text("utf-8").replace('"query_length": 16', '"query_length": 66'))
    with pytest.raises(ConfigError, match=r"query_length 66 is over the 64 positions .* set query_length: 64 or less"):
        load_any(tmp_path)
    assert load_any(tmp_path, query_length=64).late.query_length == 64


def test_vectors_that_are_not_finite_are_merged_as_they_are() -> None:
    head = TokenHead([new_layer(6, 4)], pool_factor=2.0)
    counted = Ragged.from_rows([np.arange(7), np.arange(7)])
    features = head.with_vectors(Features({}, counted.lengths), counted, "document")
    hidden = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0))
    hidden[0] = torch.nan
    found = head(hidden, head.collate(features, np.arange(2), 7)).split(head.num_vectors(features).tolist())
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_queries_may_be_longer_than_documents(bert: Path) -> None:
    encoder = late(bert, max_seq_length=8)
    assert [len(vectors) for vectors in rows_of(encoder, QUERIES, "query")] == [QUERY_LENGTH] * len(QUERIES)
    same = late(bert, max_seq_length=QUERY_LENGTH)
    assert encoder.activation_values() == same.activation_values(), "the plan counts the longer side"


def assert_same_as_sentence_transformers(folder: Path, encoder: Any) -> None:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(folder), device="cpu")
    for side, encode in (("query", model.encode_query), ("document", model.encode_document)):
        for wanted, found in zip(encode(list(SIDES[side])), rows_of(encoder, SIDES[side], side), strict=True):
            torch.testing.assert_close(wanted, found, rtol=0, atol=1e-5)


def test_a_folder_of_pylate_is_read_as_sentence_transformers_reads_it(bert: Path, tmp_path: Path) -> None:
    late(bert).save(tmp_path)
    for path in ("2_MultiVectorMask", "3_Normalize"):
        shutil.rmtree(tmp_path / path)
    edit_json(tmp_path / "1_Dense" / "config.json", module_input_name=None, module_output_name=None)
    settings = {"query_length": 12, "document_length": 30, "skiplist_words": [",", "."], "query_prefix": "[Q] "}
    prefixes = {"document_prefix": "[D] ", "attend_to_expansion_tokens": True, "similarity_fn_name": "MaxSim"}
    edit_json(tmp_path / "config_sentence_transformers.json", model_type="ColBERT", prompts={}, **settings, **prefixes)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 30, "do_lower_case": false}')
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    encoder = load_any(tmp_path).eval()
    assert (encoder.late.query_length, encoder.spec.max_length, len(encoder.late.skipped)) == (12, 30, 2)
    assert_same_as_sentence_transformers(tmp_path, encoder)


def test_a_folder_of_colbertv2_is_read_as_sentence_transformers_reads_it(bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert, tmp_path / "colbert")
    weights = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(2)
    save_file({**weights, "linear.weight": torch.randn(8, HIDDEN)}, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    markers = {"query_token_id": "x", "doc_token_id": "y"}
    (folder / "artifact.metadata").write_text(json.dumps({**markers, "query_maxlen": 16, "doc_maxlen": 40}))
    encoder = load_any(folder).eval()
    assert (encoder.dimension, encoder.late.query_length, encoder.spec.max_length) == (8, 16, 40)
    assert_same_as_sentence_transformers(folder, encoder)


def test_an_export_for_pylate_says_what_pylate_reads_and_gives_the_same_vectors(bert: Path, tmp_path: Path) -> None:
    keys = ModelKeys(model_name=str(bert), **KEYS)
    done = export_model(ExportRequest(keys=keys, output=tmp_path / "out", form="pylate"), lambda encoder, form: {})
    assert (done.form, done.difference) == ("pylate", 0)
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [each["type"] for each in modules] == [
        "sentence_transformers.models.Transformer", "pylate.models.Dense.Dense",
    ]  # fmt: skip
    general = json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text())
    assert (general["model_type"], general["query_prefix"], general["query_length"]) == (
        "ColBERT",
        "[Q] ",
        QUERY_LENGTH,
    )
    assert not (tmp_path / "out" / "2_MultiVectorMask").exists()
    pooled = ModelKeys(model_name=str(bert), **KEYS, pool_factor=2)
    with pytest.raises(
        ConfigError, match=r"PyLate's files have no place for what .* write --format sentence-transformers"
    ):
        export_model(ExportRequest(keys=pooled, output=tmp_path / "no", form="pylate"), lambda encoder, form: {})


@pytest.mark.parametrize("tasks", [None, "document", "query"])
def test_pooling_of_documents_may_be_written_as_the_library_leaves_it_out(
    bert: Path, tmp_path: Path, tasks: Any
) -> None:
    encoder = late(bert, pool_factor=2)
    encoder.save(tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*HierarchicalTokenPooling/config.json")
    settings = json.loads(path.read_text("utf-8"))
    del settings["tasks"]
    path.write_text(json.dumps(settings if tasks is None else {**settings, "tasks": tasks}), "utf-8")
    if tasks == "query":
        with pytest.raises(ConfigError, match="tasks of HierarchicalTokenPooling"):
            load_any(tmp_path / "model")
    else:
        assert load_any(tmp_path / "model").head.pool_factor == 2


def test_a_cut_query_is_told_the_limit_of_queries(bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    late(bert).save(tmp_path)
    with caplog.at_level("WARNING"):
        vembed.load(tmp_path).encode_multi_vector([DOCUMENTS[0] * 3], side="query")
    assert f"1 of 1 texts are longer than the {QUERY_LENGTH} tokens" in caplog.text


def test_the_plan_counts_as_many_vectors_of_a_query_as_it_is_filled_up_to(bert: Path) -> None:
    size = profile_model(ModelKeys(model_name=str(bert), **KEYS), ProfileTarget())
    assert size.query_vectors == QUERY_LENGTH < size.row_vectors
    assert size.values_of(3, 5) == (3 * QUERY_LENGTH + 5 * size.row_vectors) * DIMENSION
    assert size.why_not_packed == "the encoder gives several vectors for each row"


def test_the_longest_vectors_stay_in_the_order_of_their_tokens() -> None:
    torch.manual_seed(0)

    head = TokenHead([new_layer(6, 4)], topk_tokens=3)
    counted = Ragged.from_rows([[0, 2, 3, 4, 6], [1], [0, 1, 2, 3, 4, 5, 6]])
    features = head.with_vectors(Features({}, np.array([7, 2, 7])), counted, "document")
    assert head.num_vectors(features).tolist() == [3, 1, 3]
    hidden = torch.randn(3, 7, 6)
    found = head(hidden, head.collate(features, np.array([2, 0, 1]), 7))
    expected = []
    for place, row in enumerate([2, 0, 1]):
        x = hidden[place][counted.take(np.array([row])).values] @ head.layers[0].linear.weight.T
        chosen = x.norm(dim=1).topk(min(3, len(x))).indices.sort().values
        expected.append(torch.nn.functional.normalize(x[chosen], dim=1))
    torch.testing.assert_close(found, torch.cat(expected))


def test_a_new_head_is_the_same_whatever_was_drawn_before(bert: Path) -> None:
    weights = []
    for seed in range(2):
        torch.manual_seed(seed)
        weights.append(load_any(bert, **KEYS).head.layers[0].linear.weight)
    assert torch.equal(*weights)
    assert weights[0].std() > 0.05


REFUSED = {
    "pooling_method mean would pool them": {"pooling_method": "mean"},
    "projection_dim 7: the vectors of .* have 16 dimensions": {"projection_dim": 7},
    "flash_attention_2 leaves out the tokens that fill": {"attn_implementation": "flash_attention_2"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_files_of_a_model_rule_out_is_refused(bert: Path, tmp_path: Path, message: str) -> None:
    late(bert).save(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_any(tmp_path, **REFUSED[message])
