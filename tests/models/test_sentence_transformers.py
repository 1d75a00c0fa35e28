"""Folders of sentence-transformers give its own vectors here, run by vembed or by the library, or are refused."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.text_models import (
    POSITIONS,
    TEXTS,
    byte_tokenizer,
    edit_json,
    embed,
    load,
    load_any,
    wordpiece_tokenizer,
    write_cross_encoder,
    write_model,
)
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
    Transformer,
)
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from vembed.errors import ConfigError
from vembed.models import checked_files
from vembed.models.export import serve_page
from vembed.models.hub import ModelFiles
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder, load_skeleton
from vembed.models.pooling import POOLING_MODES
from vembed.models.text import TextEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

PROMPTS = {"query": "find this: ", "document": "text: "}
LONG = (*TEXTS, "word " * 80)


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"), "bert")


def written(folder: Path, modules: Sequence[torch.nn.Module], **general: Any) -> SentenceTransformer:
    """Let sentence-transformers write a model, and load it back as its users do."""
    SentenceTransformer(modules=list(modules), device="cpu", **general).save(str(folder), create_model_card=False)
    return SentenceTransformer(str(folder), device="cpu")


def pooled(transformers_folder: Path, modes: str | tuple[str, ...] = "mean", **options: Any) -> list[torch.nn.Module]:
    return [Transformer(str(transformers_folder)), Pooling(32, modes, **options)]  # type: ignore[arg-type]


def assert_same_vectors(theirs: SentenceTransformer, folder: Path, *, normalized: bool = True) -> None:
    """Compare both sides; vembed adds the normalisation that cosine similarity implies."""
    ours = load(folder)
    for side, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        expected = encode(list(LONG), convert_to_tensor=True)
        if normalized:
            expected = torch.nn.functional.normalize(expected, dim=-1)
        found = embed(ours, LONG, side=side)  # type: ignore[arg-type]
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "modes",
    [*((mode,) for mode in POOLING_MODES), ("mean", "cls"), ("cls", "mean"), ("max", "lasttoken", "weightedmean")],
)
def test_pooling_modes_are_concatenated_in_their_order(
    transformers_folder: Path, tmp_path: Path, modes: tuple[str, ...]
) -> None:
    theirs = written(tmp_path / "model", [*pooled(transformers_folder, modes), Normalize()])
    assert_same_vectors(theirs, tmp_path / "model")
    assert load(tmp_path / "model").dimension == 32 * len(modes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [torch.nn.Tanh(), torch.nn.Identity()])
def test_dense_layers(transformers_folder: Path, tmp_path: Path, activation: torch.nn.Module, bias: bool) -> None:
    torch.manual_seed(1)
    layers = [Dense(32, 24, bias=bias, activation_function=activation), Dense(24, 8, bias=bias)]
    theirs = written(tmp_path / "model", [*pooled(transformers_folder), *layers, Normalize()])
    assert_same_vectors(theirs, tmp_path / "model")
    assert load(tmp_path / "model").dimension == 8


def test_dense_layers_run_in_float32_behind_a_narrow_backbone(transformers_folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "model", [*pooled(transformers_folder), Dense(32, 8)])
    narrow = load(tmp_path / "model", dtype=torch.bfloat16)
    found = embed(narrow)
    assert found.dtype == torch.float32
    assert (found - embed(load(tmp_path / "model"))).abs().max() < 0.1


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_prompts_pooled_or_not(tmp_path: Path, kind: str, include_prompt: bool) -> None:
    transformers_folder = write_model(tmp_path / "bare", kind)
    modules = [*pooled(transformers_folder, include_prompt=include_prompt), Normalize()]
    theirs = written(tmp_path / "model", modules, prompts=PROMPTS)
    assert_same_vectors(theirs, tmp_path / "model")
    ours = load(tmp_path / "model")
    assert ours.prompts == PROMPTS
    assert not torch.allclose(embed(ours, side="query"), embed(ours, side="document"), atol=1e-3)
    written(tmp_path / "other", pooled(transformers_folder, include_prompt=not include_prompt), prompts=PROMPTS)
    assert (embed(load(tmp_path / "other")) - embed(ours)).abs().max() > 1e-2


def test_the_maximum_length_truncates_alike(transformers_folder: Path, tmp_path: Path) -> None:
    modules = pooled(transformers_folder)
    modules[0].max_seq_length = 12  # type: ignore[assignment]
    theirs = written(tmp_path / "model", [*modules, Normalize()])
    assert theirs.max_seq_length == load(tmp_path / "model").max_length == 12
    assert_same_vectors(theirs, tmp_path / "model")


@pytest.mark.parametrize("file", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_the_older_files_are_read_too(transformers_folder: Path, tmp_path: Path, file: str) -> None:
    folder = tmp_path / "model"
    written(folder, [*pooled(transformers_folder, ("cls", "mean")), Normalize()])
    (folder / "sentence_bert_config.json").unlink()
    (folder / file).write_text('{"max_seq_length": 10, "do_lower_case": false}')
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    modules = (folder / "modules.json").read_text().replace("sentence_transformers.base.modules.transformer", "X")
    (folder / "modules.json").write_text(modules.replace('"X.', '"sentence_transformers.models.'))
    assert load(folder).max_length == 10
    assert load(folder).spec.pooling == ("cls", "mean")
    assert_same_vectors(SentenceTransformer(str(folder), device="cpu"), folder)


@pytest.mark.parametrize("written_by", ["this version", "older ones"])
def test_lower_casing(tmp_path: Path, written_by: str) -> None:
    bare = write_model(tmp_path / "bare", "bert", tokenizer=wordpiece_tokenizer(lower_case=False))
    old = written_by == "older ones"
    modules = [Transformer(str(bare), do_lower_case=not old), Pooling(32)]
    theirs = written(tmp_path / "model", modules)
    cased = load(tmp_path / "model")
    if old:
        assert not torch.equal(embed(cased, ["Sea"]), embed(cased, ["sea"]))
        edit_json(tmp_path / "model" / "sentence_bert_config.json", do_lower_case=True)
        theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert_same_vectors(theirs, tmp_path / "model")
    ours = load(tmp_path / "model")
    assert torch.equal(embed(ours, ["Sea"]), embed(ours, ["sea"]))


def test_a_model_for_dot_products_is_not_normalised(transformers_folder: Path, tmp_path: Path) -> None:
    theirs = written(tmp_path / "dot", pooled(transformers_folder), similarity_fn_name="dot")
    assert_same_vectors(theirs, tmp_path / "dot", normalized=False)
    assert load(tmp_path / "dot").describe()["similarity"].startswith("dot product")
    assert embed(load(tmp_path / "dot")).norm(dim=-1).max() > 1.5
    written(tmp_path / "cosine", pooled(transformers_folder))
    assert torch.allclose(embed(load(tmp_path / "cosine")).norm(dim=-1), torch.ones(len(TEXTS)))


@pytest.mark.parametrize("behind", ["Normalize", "Dense", "nothing", "LayerNorm"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_vectors_are_cut_to_the_dimensions_that_a_folder_names(
    transformers_folder: Path, tmp_path: Path, behind: str, similarity: str
) -> None:
    layers = {"Normalize": [Normalize()], "Dense": [Dense(32, 24)], "nothing": [], "LayerNorm": [LayerNorm(32)]}[behind]
    modules = [*pooled(transformers_folder), *layers]
    theirs = written(tmp_path / "model", modules, similarity_fn_name=similarity, truncate_dim=8)
    for folder in (tmp_path / "model", tmp_path / "saved"):
        ours = load_any(folder).eval()
        expected = theirs.encode(list(TEXTS), convert_to_tensor=True, normalize_embeddings=similarity == "cosine")
        found = embed(ours)
        assert found.shape == expected.shape == (len(TEXTS), 8)
        assert (found - expected).abs().max() <= 1e-5
        assert ours.dimension == 8
        assert ours.similarity == similarity
        assert ours.describe()["dimension"].startswith(f"8 of {24 if behind == 'Dense' else 32}, by truncate_dim")
        ours.save(tmp_path / "saved")
    assert SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode("sea").shape == (8,)


def test_more_dimensions_than_there_are_cut_nothing_and_none_at_all_are_refused(
    transformers_folder: Path, tmp_path: Path
) -> None:
    written(tmp_path / "model", [*pooled(transformers_folder), Normalize()], truncate_dim=64)
    assert load(tmp_path / "model").dimension == 32
    assert "dimension" not in load(tmp_path / "model").describe()
    edit_json(tmp_path / "model" / "config_sentence_transformers.json", truncate_dim=0)
    with pytest.raises(ConfigError, match=r"config_sentence_transformers\.json is broken: truncate_dim"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("prompts", "default", "query", "document"),
    [
        ({"query": "q: ", "passage": "p: "}, None, "q: ", "p: "),
        ({"query": "q: ", "corpus": "c: "}, None, "q: ", "c: "),
        ({"instruct": "i: "}, "instruct", "i: ", "i: "),
        ({"instruct": "i: ", "query": "", "document": ""}, "instruct", "", ""),
        ({"query": "q: ", "document": ""}, "query", "q: ", ""),
        ({}, None, "", ""),
    ],
)
def test_each_side_takes_the_prompt_that_is_named_for_it(
    transformers_folder: Path, tmp_path: Path, prompts: dict[str, str], default: str | None, query: str, document: str
) -> None:
    written(tmp_path / "model", pooled(transformers_folder))
    general = {"prompts": prompts, "default_prompt_name": default}
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps(general))
    assert load(tmp_path / "model").prompts == {"query": query, "document": document}


def test_the_users_word_comes_before_the_folder(transformers_folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "model", pooled(transformers_folder), prompts=PROMPTS)
    encoder = load(tmp_path / "model", pooling_method="cls", max_seq_length=9, prompts={"query": "mine: "})
    assert encoder.spec.pooling == ("cls",)
    assert encoder.max_length == 9
    assert encoder.prompts == {"query": "mine: ", "document": "text: "}
    assert "pooling_method" in encoder.describe()["pooling"]


def test_prompts_of_other_tasks_are_written_back(transformers_folder: Path, tmp_path: Path) -> None:
    prompts = {**PROMPTS, "clustering": "group: ", "passage": "old: "}
    written(tmp_path / "model", [*pooled(transformers_folder), Normalize()], prompts=prompts)
    load(tmp_path / "model", prompts={"document": ""}).save(tmp_path / "saved")
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    # Another name of a side goes with the side: it would come back in place of the prompt that was taken away.
    assert theirs.prompts == {"query": PROMPTS["query"], "document": "", "clustering": "group: "}
    assert load(tmp_path / "saved").prompts == {"query": PROMPTS["query"], "document": ""}
    assert "group" not in serve_page(tmp_path / "saved", "saved")


def test_a_transformer_in_a_subfolder_is_found(transformers_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    expected = written(folder, [*pooled(transformers_folder), Normalize()]).encode(list(TEXTS), convert_to_tensor=True)
    (folder / "0_Transformer").mkdir()
    for file in [path for path in folder.iterdir() if path.is_file()]:
        if file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(folder / "0_Transformer" / file.name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert (embed(load(folder)) - expected).abs().max() <= 1e-5


def test_a_length_that_forgets_the_positions_which_roberta_loses_is_shortened(tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare", "roberta", tokenizer=byte_tokenizer(start=True, end=True))
    written(tmp_path / "model", pooled(bare))
    edit_json(tmp_path / "model" / "sentence_bert_config.json", max_seq_length=POSITIONS + 2)
    encoder = load(tmp_path / "model")
    assert encoder.max_length == POSITIONS
    assert embed(encoder, ["a " * 200]).isfinite().all()


@pytest.mark.parametrize(("kind", "length"), [("bert", POSITIONS), ("gpt2", POSITIONS), ("modernbert", POSITIONS + 9)])
def test_a_length_over_the_table_of_positions_is_shortened(tmp_path: Path, kind: str, length: int) -> None:
    written(tmp_path / "model", pooled(write_model(tmp_path / "bare", kind)))
    edit_json(tmp_path / "model" / "sentence_bert_config.json", max_seq_length=POSITIONS + 9)
    encoder = load(tmp_path / "model")
    assert encoder.max_length == length  # rotary positions go on
    assert embed(encoder, ["a " * 200]).isfinite().all()


def test_the_weights_of_dense_layers_are_read_once_and_by_no_plan(
    transformers_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "model", [*pooled(transformers_folder), Dense(32, 8)])
    reads: list[Path] = []
    opened = checked_files.opened_weights

    def counted(path: Path) -> Any:
        reads.append(path)
        return opened(path)

    monkeypatch.setattr(checked_files, "opened_weights", counted)
    keys = ModelKeys(model_name=str(tmp_path / "model"))
    skeleton = load_skeleton(keys)
    assert reads == []
    assert skeleton.dimension == 8
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    load_encoder(keys)
    assert [path.parent.name for path in reads].count("2_Dense") == 1


def refused(folder: Path, message: str) -> None:
    """Ask vembed's own reader: what it refuses, the library runs where it can."""
    with pytest.raises(ConfigError, match=message):
        TextEncoder.load(ModelFiles(ModelKeys(model_name=str(folder))))


@pytest.mark.parametrize(
    ("behind", "edited", "message"),
    [
        ([LayerNorm(32)], {}, "LayerNorm, which vembed doesn't run"),
        ([Normalize(), Dense(32, 8)], {}, "Normalize, Dense; vembed runs them as"),
        ([Dense(32, 32, use_residual=True)], {}, "a residual connection"),
        ([Dense(32, 8)], {"activation_function": "os.system"}, "2_Dense/config.json uses os.system"),
        ([Dense(32, 32)], {"module_input_name": "token_embeddings"}, "maps token_embeddings"),
        ([Dense(32, 32)], None, "2_Dense has no model.safetensors"),
    ],
    ids=["module", "order", "residual", "activation", "input", "pickle"],
)
def test_modules_that_vembed_cannot_run_are_refused_by_name(
    transformers_folder: Path,
    tmp_path: Path,
    behind: list[torch.nn.Module],
    edited: dict[str, Any] | None,
    message: str,
) -> None:
    written(tmp_path / "model", [*pooled(transformers_folder), *behind])
    if edited is None:
        (tmp_path / "model" / "2_Dense" / "model.safetensors").unlink()
    elif edited:
        load(tmp_path / "model")
        edit_json(tmp_path / "model" / "2_Dense" / "config.json", **edited)
    refused(tmp_path / "model", message)


def test_a_pooling_that_the_dense_layer_does_not_take_is_refused(transformers_folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "model", [*pooled(transformers_folder, ("cls", "mean")), Dense(64, 8)])
    load(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"takes 64 values, pooling cls leaves 32; leave pooling_method out"):
        load(tmp_path / "model", pooling_method="cls")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transformer_task", "fill-mask"),
        ("query_length", 32),
        ("processing_kwargs", {"text": {"max_length": 3}}),
        ("modality_config", {"text": {"method": "forward", "method_output_name": ["hidden_states", -2]}}),
        ("module_output_name", "sentence_embedding"),
        ("config_args", {"is_decoder": True}),
        ("processor_kwargs", {"model_max_length": 9}),
    ],
)
def test_a_setting_of_the_transformer_that_changes_vectors_is_refused(
    transformers_folder: Path, tmp_path: Path, key: str, value: object
) -> None:
    written(tmp_path / "model", pooled(transformers_folder))
    load(tmp_path / "model")
    edit_json(tmp_path / "model" / "sentence_bert_config.json", **{key: value})
    refused(tmp_path / "model", f"sentence_bert_config.json sets {key}")


def test_arguments_that_leave_the_vectors_alone_are_taken(transformers_folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "model", [*pooled(transformers_folder), Normalize()])
    harmless = {
        "model_args": {"torch_dtype": "float32"},
        "tokenizer_args": {"padding_side": "right"},
        "config_args": {},
    }
    edit_json(tmp_path / "model" / "sentence_bert_config.json", **harmless)
    assert_same_vectors(SentenceTransformer(str(tmp_path / "model"), device="cpu"), tmp_path / "model")


def test_a_decoder_whose_texts_go_through_a_chat_template_is_run_by_the_library(tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare", "qwen3")
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    edit_json(bare / "tokenizer_config.json", chat_template=template)
    theirs = written(tmp_path / "model", [*pooled(bare, "lasttoken"), Normalize()])
    ours = load_any(tmp_path / "model").eval()
    assert "sets modality_config to" in ours.describe()["why"]
    assert (embed(ours) - theirs.encode(list(TEXTS), convert_to_tensor=True)).abs().max() <= 1e-5
    untold = load(bare, pooling_method="last_token")  # the template is what makes the difference
    assert (embed(untold) - embed(ours)).abs().max() > 0.1


def test_an_unknown_pooling_or_default_prompt_is_refused(transformers_folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "model", pooled(transformers_folder))
    edit_json(tmp_path / "model" / "config_sentence_transformers.json", default_prompt_name="nobody")
    refused(
        tmp_path / "model", "default_prompt_name 'nobody' in config_sentence_transformers.json is none of its prompts: "
    )
    edit_json(tmp_path / "model" / "config_sentence_transformers.json", default_prompt_name=None)
    load(tmp_path / "model")
    edit_json(tmp_path / "model" / "1_Pooling" / "config.json", pooling_mode="median")
    refused(tmp_path / "model", "pooling 'median' is none of cls, max")


def test_a_similarity_that_is_neither_cosine_nor_dot_is_refused_unless_vectors_are_normalised(
    transformers_folder: Path, tmp_path: Path
) -> None:
    written(tmp_path / "bare", pooled(transformers_folder), similarity_fn_name="dot")
    edit_json(tmp_path / "bare" / "config_sentence_transformers.json", similarity_fn_name="manhattan")
    with pytest.raises(ConfigError, match="manhattan"):
        load(tmp_path / "bare")
    edit_json(tmp_path / "bare" / "config_sentence_transformers.json", similarity_fn_name="cosine")
    assert load(tmp_path / "bare").spec.normalize


def test_a_broken_description_is_named(transformers_folder: Path, tmp_path: Path) -> None:
    written(tmp_path / "bare", pooled(transformers_folder), similarity_fn_name="dot")
    whole = (tmp_path / "bare" / "modules.json").read_text()
    (tmp_path / "bare" / "modules.json").write_text(whole[:-5])
    with pytest.raises(ConfigError, match=r"modules\.json is broken"):
        load(tmp_path / "bare")
    (tmp_path / "bare" / "modules.json").write_text(whole)
    assert load(tmp_path / "bare").spec.pooling == ("mean",)
    (tmp_path / "bare" / "data_config.json").write_text('[{"name": "pairs.jsonl"}]')  # others may hold anything
    assert load(tmp_path / "bare").spec.pooling == ("mean",)


@pytest.fixture(scope="module")
def library_folders(transformers_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of what sentence-transformers has to run itself."""
    root = tmp_path_factory.mktemp("library")
    kinds = {"layer norm": [LayerNorm(32)], "residual": [Dense(32, 32, use_residual=True), Normalize()]}
    for kind, behind in kinds.items():
        written(root / kind, [*pooled(transformers_folder), *behind], prompts=PROMPTS)
    return {kind: root / kind for kind in kinds}


def test_the_plan_and_the_message_say_why_the_library_runs_it(
    library_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "LayerNorm, which vembed doesn't run"
    encoder = load_any(library_folders["layer norm"])
    assert why in encoder.describe()["why"]
    assert "Transformer + Pooling + LayerNorm" in encoder.describe()["family"]
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match=rf"{why}.*pip install vembed\[st\]"):
        load_any(library_folders["layer norm"])


def test_what_the_library_cant_run_either_is_refused_with_both_reasons(
    library_folders: dict[str, Path], tmp_path: Path
) -> None:
    load_any(library_folders["residual"]).save(tmp_path)
    dense = next(tmp_path.glob("*Dense"))
    weights = dense / "model.safetensors"
    edit_json(dense / "config.json", in_features=7)
    with pytest.raises(ConfigError, match=r"a residual connection.*sentence-transformers can't run it either"):
        load_any(tmp_path)
    edit_json(dense / "config.json", in_features=32, activation_function="os.system")
    with pytest.raises(ConfigError, match=r"a residual connection; known activations"):
        load_any(tmp_path)
    edit_json(dense / "config.json", activation_function="torch.nn.modules.activation.Tanh")
    (dense / "pytorch_model.bin").write_bytes(weights.read_bytes())
    weights.unlink()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle.*allow_pickle: true"):
        load_any(tmp_path)


def test_prompts_of_what_the_library_runs_may_be_given(library_folders: dict[str, Path], tmp_path: Path) -> None:
    given = load_any(library_folders["residual"], prompts={"query": "look: ", "document": ""})
    assert torch.allclose(embed(given, ["sea"]), embed(given, ["look: sea"], side="document"), atol=1e-6)
    given.save(tmp_path)
    assert load_any(tmp_path).prompts == {"query": "look: ", "document": ""}


def test_a_folder_may_name_no_prompts(library_folders: dict[str, Path], tmp_path: Path) -> None:
    load_any(library_folders["residual"]).save(tmp_path)
    settings = tmp_path / "config_sentence_transformers.json"
    edit_json(settings, prompts={})
    assert load_any(tmp_path).prompts == {"query": "", "document": ""}
    names = load_any(tmp_path).state_dict()
    assert len({each.data_ptr() for each in names.values()}) == len(names)
    settings.unlink()
    assert load_any(tmp_path).prompts == {"query": "", "document": ""}


@pytest.mark.parametrize("form", ["of transformers", "of sentence-transformers"])
def test_a_cross_encoder_taken_for_an_encoder_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    folder = write_cross_encoder(tmp_path / "judge", ["sea"])
    if form == "of sentence-transformers":
        CrossEncoder(str(folder), device="cpu").save(str(tmp_path / "saved"))
        folder = tmp_path / "saved"
    load_skeleton(ModelKeys(model_name=str(folder)))  # the plan reads the same folder, and would tell it twice
    load_any(folder).save(tmp_path / "encoder")
    load_any(tmp_path / "encoder")  # what vembed wrote is an encoder
    (message,) = [record.message for record in caplog.records if record.name.startswith("vembed")]
    assert f"{folder} is a cross-encoder" in message
    assert "mine --teacher" in message


@pytest.mark.parametrize("head", [BertForMaskedLM, BertForSequenceClassification])
def test_a_base_with_another_head_is_no_cross_encoder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: type[PreTrainedModel]
) -> None:
    folder = write_model(tmp_path / "model", "bert")
    head(BertConfig.from_pretrained(folder, num_labels=3)).save_pretrained(folder)  # type: ignore[call-arg]
    assert json.loads((folder / "config.json").read_text())["architectures"] == [head.__name__]
    load_any(folder)
    assert not caplog.records
