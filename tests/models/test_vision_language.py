"""A vision-language encoder gives the vectors of its publisher's rule, and trains exactly, part by part."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from adapter_cases import assert_exact, partly_trained, trainable_of, wake
from kit.picture_models import opened, picture, vectors
from kit.text_models import edit_json, embed, load_any
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import AddedToken
from transformers import AutoModel, AutoProcessor, AutoTokenizer
from transformers.models.smolvlm import processing_smolvlm
from vision_language_cases import FAMILY_BUILDERS, SIDE, VISION_LANGUAGE_BUILDERS, write_vision_language

from vembed.batch import Composed, ContrastiveBatch, Image
from vembed.errors import ConfigError, DataError, MachineError
from vembed.models.adapters import freeze
from vembed.models.keys import ModelKeys
from vembed.models.load import load_encoder, load_skeleton
from vembed.models.pictures import DECODED_AT_ONCE
from vembed.models.vision_language import VisionLanguageEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Item


KINDS = tuple(VISION_LANGUAGE_BUILDERS)
SMALL, LARGE, FLAT = picture(0), picture(1, (90, 60)), picture(2, (30, 100))
ITEMS: tuple[Item, ...] = (
    "sea",
    Composed((LARGE,), "in red"),
    "a longer text, by far",
    SMALL,
    FLAT,
    Composed((SMALL,), ""),
    "",
    Composed((FLAT, LARGE), "two"),
)

PARTS = (
    "lora text", "lora text+projection", "text", "vision", "projection", "text+projection", "all-projection",
    "last_1_layers",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision-language")
    return {kind: write_vision_language(root / kind, kind) for kind in (*KINDS, *FAMILY_BUILDERS)}


def load(folder: Path, **keys: Any) -> VisionLanguageEncoder:
    encoder = load_any(folder, dtype=torch.float64, **keys).eval()
    assert isinstance(encoder, VisionLanguageEncoder)
    return encoder


@torch.no_grad()
def by_the_rule(folder: Path, items: tuple[Item, ...], instruction: str, most_tokens: int) -> Any:
    """Compute vectors one by one with transformers alone: conversation, its own forward, the last token."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    processor = AutoProcessor.from_pretrained(folder)
    size = {"shortest_edge": 4 * SIDE * SIDE, "longest_edge": most_tokens * SIDE * SIDE}
    rows = []
    for item in items:
        text = item if isinstance(item, str) else item.text if isinstance(item, Composed) else ""
        images = item.images if isinstance(item, Composed) else [item] if isinstance(item, Image) else []
        seen = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        said = f"<|im_start|>system\n{instruction}<|im_end|>\n" if instruction else ""
        said += f"<|im_start|>user\n{seen}{text or ('' if images else 'NULL')}<|im_end|>\n<|im_start|>assistant\n"
        inputs = processor(text=[said], images=opened(images) or None, return_tensors="pt", size=size)
        hidden = model(**{name: each.double() if name == "pixel_values" else each for name, each in inputs.items()})
        rows.append(torch.nn.functional.normalize(hidden.last_hidden_state[0, -1], dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_published_rule(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind], query_prompt="Find it", image_tokens=40)
    expected = by_the_rule(folders[kind], ITEMS, "Find it." if kind == "qwen3_vl" else "Find it", 40)
    found = vectors(encoder, ITEMS)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert torch.pdist(found[[0, 1, 2, 3, 4, 6, 7]]).min() > 1e-2, "different items have different vectors"
    plain = load(folders[kind], image_tokens=40)
    assert plain.prompts["document"] == ("Represent the user's input." if kind == "qwen3_vl" else "")
    assert torch.allclose(
        vectors(plain, ITEMS), by_the_rule(folders[kind], ITEMS, plain.prompts["query"], 40), rtol=0, atol=1e-5
    )


def test_a_folder_of_sentence_transformers_is_followed_or_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    base, prompts = folders["qwen3_vl"], {"query": "Find it", "document": ""}
    template = {"chat_template": {"add_generation_prompt": True}}
    for name, behind, processing in (("same", [], template), ("dense", [Dense(32, 8)], template), ("turn", [], {})):
        modules = [Transformer(str(base), processing_kwargs=processing), Pooling(32, "mean"), *behind, Normalize()]
        theirs = SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
        theirs.save(str(tmp_path / name), create_model_card=False)
        if name == "same":
            expected = {"query": theirs.encode_query(["sea", "a"]), "document": theirs.encode_document(["sea", "a"])}
    encoder = load_any(tmp_path / "same").eval()
    for side in ("query", "document"):
        assert np.abs(embed(encoder, ["sea", "a"], side=side).numpy() - expected[side]).max() <= 1e-5
    with pytest.raises(ConfigError, match=r"modules\.json names .*Dense, which vembed doesn't run"):
        load_any(tmp_path / "dense")
    edit_json(tmp_path / "same" / "config_sentence_transformers.json", truncate_dim=8)
    with pytest.raises(ConfigError, match=r"config_sentence_transformers\.json sets truncate_dim to 8"):
        load_any(tmp_path / "same")
    with pytest.raises(ConfigError, match=r"no add_generation_prompt in sentence_bert_config\.json, .* Delete modules"):
        load_any(tmp_path / "turn")
    path = tmp_path / "turn" / "chat_template.jinja"
    end = "{% if add_generation_prompt %}"
    assert end in path.read_text()
    path.write_text(path.read_text().replace(end, "{% if true %}"))
    assert load_any(tmp_path / "turn").prompts == prompts  # a template that always ends so is the same to both


def test_the_prompt_of_an_entry_of_data_is_read_as_that_of_the_run(folders: dict[str, Path]) -> None:
    encoder = load(folders["qwen3_vl"])
    assert encoder.with_prompts({"query": "Find it "}).prompts["query"] == "Find it."
    assert load(folders["qwen3_vl"], query_prompt="Find it ").prompts["query"] == "Find it."
    with pytest.raises(ConfigError, match=r"document_prompt holds <\|image_pad\|>, which stands for a picture"):
        encoder.with_prompts({"document": "Like <|image_pad|>"})


def test_a_prompt_with_what_a_template_writes_for_a_picture_is_refused(folders: dict[str, Path]) -> None:
    # Gemma3's template writes the start of a picture, in whose place its tokens go.
    with pytest.raises(ConfigError, match="query_prompt holds <start_of_image>, which stands for a picture"):
        load(folders["gemma3"], prompts={"query": "See <start_of_image>"})
    with pytest.raises(ConfigError, match="document_prompt holds <start_of_image>, which stands for a picture"):
        load(folders["gemma3"]).with_prompts({"document": "See <start_of_image>"})


def test_a_picture_costs_the_tokens_that_stand_for_it(folders: dict[str, Path]) -> None:
    encoder = load(folders["qwen3_vl"])
    composed, text = encoder.featurize([Composed((LARGE,), "in red")], "query"), encoder.featurize(["in red"], "query")
    sides = (round(90 / SIDE) * round(60 / SIDE), 2)  # tokens, and the two that stand around them
    assert composed.lengths[0] == text.lengths[0] + sum(sides)
    for keys, most in (({"image_tokens": 12}, 12), ({"max_image_size": 4 * SIDE}, 16)):
        small = load(folders["qwen3_vl"], **keys).featurize([LARGE, SMALL], "query")
        tokens = [int(grid.prod()) // 4 for grid in small.columns["image_grid_thw"].values]
        assert max(tokens) <= most < sides[0]
    with pytest.raises(ConfigError, match="a picture of 64 tokens doesn't fit rows of 60"):
        load(folders["qwen3_vl"], max_seq_length=60, image_tokens=64)
    # With the 7 tokens around it no picture of 5 fits: the keys are wrong, and the files are sound.
    with pytest.raises(ConfigError, match=r"takes 12 tokens .* row has 8; lower image_tokens or raise max_seq_length$"):
        load(folders["qwen3_vl"], max_seq_length=8, image_tokens=5)


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_row_that_cannot_hold_a_full_picture_is_refused_before_any_picture(
    folders: dict[str, Path], kind: str
) -> None:
    bound: dict[str, Any] = {"image_tokens": 64} if kind == "qwen3_vl" else {}
    encoder = load(folders[kind], **bound)
    full = picture(0, (8 * SIDE, 8 * SIDE))
    ids = encoder.featurize([full], "query").columns["input_ids"].values
    least = int(np.isin(ids, encoder._kept_ids).sum())
    assert least >= encoder.spec.image_tokens, "the picture is a full one"
    keys = {"model_name": str(folders[kind]), **bound}
    load_skeleton(ModelKeys(**keys, max_seq_length=least))
    assert load(folders[kind], **bound, max_seq_length=least).featurize([full], "query").lengths[0] == least
    with pytest.raises(ConfigError, match=rf"takes {least} tokens .* row has {least - 1}; lower image_tokens or raise"):
        load_skeleton(ModelKeys(**keys, max_seq_length=least - 1))


def test_a_long_row_loses_words_and_neither_pictures_nor_special_tokens(folders: dict[str, Path]) -> None:
    long = Composed((LARGE,), "many words " * 40)
    short = load(folders["qwen3_vl"], max_seq_length=160, image_tokens=80)
    whole = load(folders["qwen3_vl"], image_tokens=80)
    cut, full = (encoder.featurize([long, SMALL], "query") for encoder in (short, whole))
    assert (cut.num_truncated, full.num_truncated) == (1, 0)
    assert cut.lengths[0] == 160 < full.lengths[0]
    ids, kept = full.columns["input_ids"].values[: full.lengths[0]], cut.columns["input_ids"].values[:160]
    special = np.array(short.tokenizer.all_special_ids)
    assert list(kept[np.isin(kept, special)]) == list(ids[np.isin(ids, special)])
    ordinary = ids[~np.isin(ids, special)]
    assert list(kept[~np.isin(kept, special)]) == list(ordinary[: (~np.isin(kept, special)).sum()])
    assert vectors(short, [long]).isfinite().all()


def test_a_special_token_without_a_name_stays_in_a_long_row(folders: dict[str, Path], tmp_path: Path) -> None:
    # As the turns of Gemma3: its tokenizer marks them, and none of its named tokens is one of them.
    folder = shutil.copytree(folders["gemma3"], tmp_path / "gemma3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("Z", special=True)])
    tokenizer.save_pretrained(folder)
    turn = tokenizer.convert_tokens_to_ids("Z")
    assert turn not in tokenizer.all_special_ids
    ids = load(folder, max_seq_length=40).featurize(["many words " * 40 + "Z"], "query").columns["input_ids"].values
    assert (len(ids), ids[-1]) == (40, turn)


def test_flat_pictures_keep_the_bound_and_flatter_ones_are_refused_by_name(folders: dict[str, Path]) -> None:
    shapes = ((400, 10), (10, 400), (1600, 8), (3, 30), (12, 18), (200, 200))
    pictures = [picture(place, shape) for place, shape in enumerate(shapes)]
    for most in (4, 6, 12):
        encoder = load(folders["qwen2_vl"], image_tokens=most)
        grids = encoder.featurize(pictures, "query").columns["image_grid_thw"].values
        assert max(int(grid.prod()) // 4 for grid in grids) <= most
        assert [grid[1] > grid[2] for grid in grids[:2].tolist()] == [False, True]  # of other sides, but not turned
    with pytest.raises(DataError, match=r"picture-7\.png: 4 x 900 pixels: Qwen2-VL takes .* 200 times"):
        encoder.featurize(["sea", Composed((SMALL, picture(7, (4, 900))), "")], "query")
    for keys in ({"image_tokens": 3}, {"max_image_size": 2 * SIDE - 1}):
        with pytest.raises(ConfigError, match="a picture takes at least"):
            load(folders["qwen2_vl"], **keys)


def test_pictures_that_no_row_has_room_for_are_refused(folders: dict[str, Path]) -> None:
    encoder = load(folders["qwen3_vl"], max_seq_length=100, image_tokens=40)
    assert encoder.featurize([Composed((LARGE, LARGE), "a question " * 20)], "query").lengths[0] == 100
    with pytest.raises(DataError, match=r"6 pictures take 2\d\d tokens .* a row has 100; lower image_tokens or raise"):
        encoder.featurize(["sea", Composed((LARGE,) * 6, "a question")], "query")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"bos_token": ""}, "names a special token that its vocabulary lacks"),  # transformers gives it the id None
        ({"pad_token": "<lost>"}, r"pads with token 266, and its weights have 266 tokens"),
    ],
)
def test_a_tokenizer_of_tokens_that_it_lacks_is_refused(
    folders: dict[str, Path], tmp_path: Path, broken: dict[str, str], told: str
) -> None:
    folder = shutil.copytree(folders["qwen3_vl"], tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | broken), "utf-8")
    with pytest.raises(ConfigError, match=rf"its tokenizer {told}: tokenizer_config\.json is damaged"):
        load(folder)


def mixed_batch() -> ContrastiveBatch:
    """Texts and pictures with texts that search pictures and texts: each modality on both sides."""
    queries: tuple[Item, ...] = ("sea", Composed((LARGE,), "in red"), "a longer text, by far", FLAT, "sky")
    documents: tuple[Item, ...] = (SMALL, LARGE, FLAT, "what it shows", Composed((SMALL, FLAT), "and more"))
    count = len(queries)
    return ContrastiveBatch(
        queries=queries,
        documents=documents,
        positives_P2=np.array([(number, number) for number in range(count)], dtype=np.int64),
        query_ids_Q=np.arange(count, dtype=np.int64),
        document_ids_D=np.arange(count, dtype=np.int64) + 100,
        record_ids=tuple(range(count)),
    )


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what == "projection" else pytest.mark.slow) for what in PARTS]
)
def test_a_part_that_trains_has_exact_gradients(folders: dict[str, Path], what: str) -> None:
    """Of the same chunks, whose roundings are alike; pictures are of uneven sizes."""
    encoder = partly_trained(folders["qwen3_vl"], what)
    wake(encoder)
    assert_exact(encoder, mixed_batch())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_train_alone_or_together_or_are_left_out(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind]).train()
    every = {name for name, _ in encoder.named_parameters()}
    merger = {name for name in every if "merger" in name}
    seeing = {name for name in every if name.startswith("backbone.visual.")} - merger
    assert merger
    wanted = {"text": every - seeing - merger, "vision": seeing | merger, "projection": merger}
    wanted |= {"text+projection": every - seeing, "all-projection": every - merger, "vision-projection": seeing}
    for what, expected in wanted.items():
        encoder.requires_grad_(requires_grad=True)
        freeze(encoder, what)
        assert trainable_of(encoder).keys() == expected
        assert encoder.trained.words.startswith(f"{what}: ")
        assert encoder.backbone.visual.blocks[0].training == ("vision" in what or what == "all-projection")


@pytest.mark.parametrize("towers", ["projection", "text+projection", "vision"])
def test_adapters_stand_in_the_parts_that_a_word_names(folders: dict[str, Path], towers: str) -> None:
    encoder = partly_trained(folders["qwen3_vl"], f"lora {towers}")
    adapted = {name.split(".lora_")[0] for name in trainable_of(encoder)}
    found = {
        "projection" if "merger" in name else "text" if ".language_model." in name else "vision" for name in adapted
    }
    assert found == set(towers.split("+"))
    assert {encoder.get_submodule(name).training for name in adapted} == {True}
    assert encoder.backbone.visual.blocks[0].training == (towers == "vision")
    linear = {"backbone.visual.merger.linear_fc1", "backbone.visual.deepstack_merger_list.1.linear_fc2"}
    assert (linear <= adapted) == ("projection" in towers)


SOME = [
    pytest.param(kind, marks=() if kind in ("idefics3", "paligemma") else pytest.mark.slow) for kind in FAMILY_BUILDERS
]
INSTRUCTION = "Find it."


def call_of(kind: str, processor: Any, item: Item) -> dict[str, Any]:
    """Return what transformers' processor makes of an item, worded by hand."""
    text = item if isinstance(item, str) else item.text if isinstance(item, Composed) else ""
    images = item.images if isinstance(item, Composed) else [item] if isinstance(item, Image) else []
    text = text or ("" if images else "NULL")
    if kind == "paligemma":
        said = f"{INSTRUCTION} {text}".strip()
        if images:  # the processor puts pictures and start before the words
            return dict(processor(text=[said], images=[opened(images)], return_tensors="pt"))
        call = processor.tokenizer(f"{processor.tokenizer.bos_token}{said}\n", return_tensors="pt")
        return {**call, "token_type_ids": torch.zeros_like(call["input_ids"])}
    placeholder = "<start_of_image>" if kind == "gemma3" else "<image>"
    said = f"<system>{INSTRUCTION}<end><user>{placeholder * len(images)}{text}<end><assistant>"
    return dict(processor(text=[said], images=[opened(images)] if images else None, return_tensors="pt"))


@pytest.mark.parametrize("kind", FAMILY_BUILDERS)
def test_vectors_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind], query_prompt=INSTRUCTION)
    model = AutoModel.from_pretrained(folders[kind], dtype=torch.float64, attn_implementation="eager").eval()
    processor = AutoProcessor.from_pretrained(folders[kind])
    expected = []
    for item in ITEMS:
        call = call_of(kind, processor, item)
        call.pop("num_crops", None)
        with torch.no_grad():
            made = {name: each.double() if name == "pixel_values" else each for name, each in call.items()}
            hidden = model(**made).last_hidden_state
        expected.append(torch.nn.functional.normalize(hidden[0, -1], dim=0))
    found = vectors(encoder, ITEMS)
    assert torch.allclose(found, torch.stack(expected), rtol=0, atol=1e-5)
    assert torch.pdist(found[[0, 1, 2, 3, 4, 6, 7]]).min() > 1e-2, "different items have different vectors"


@pytest.mark.parametrize("kind", SOME)
def test_each_part_trains_alone(folders: dict[str, Path], kind: str) -> None:
    encoder = load(folders[kind])
    family, every = encoder.family, {name for name, _ in encoder.named_parameters()}
    begins = {"text": (family.language,), "vision": (family.vision, *family.merger), "projection": family.merger}
    for what, parts in begins.items():
        encoder.requires_grad_(requires_grad=True)
        freeze(encoder, what)
        beginnings = tuple(f"backbone.{part}" for part in parts)
        assert trainable_of(encoder).keys() == {name for name in every if name.startswith(beginnings)}


def test_pictures_are_cut_into_as_many_squares_as_the_budget_allows(folders: dict[str, Path]) -> None:
    rows = {}
    for keys in ({}, {"image_tokens": 40}, {"max_image_size": 32}, {"image_tokens": 7}):
        encoder = load(folders["idefics3"], **keys)
        features = encoder.featurize([LARGE, SMALL, FLAT], "query")
        rows[str(keys)] = [int(each) for each in features.columns["rows"].values]
        tokens = (features.columns["input_ids"].values == encoder.tokenizer.convert_tokens_to_ids("<image>")).sum()
        assert tokens == 4 * len(features.columns["pixel_values"].values)
        assert features.lengths.max() <= encoder.spec.image_tokens + len("<user><end><assistant>")
    assert rows == {"{}": [2, 3, 3], "{'image_tokens': 40}": [2, 2, 2], "{'max_image_size': 32}": [2, 2, 2],
                    "{'image_tokens': 7}": [0, 0, 0]}  # fmt: skip
    with pytest.raises(ConfigError, match="a picture takes at least 7 tokens"):
        load(folders["idefics3"], image_tokens=6)
    for kind in ("gemma3", "llava_onevision"):
        with pytest.raises(ConfigError, match="leave image_tokens and max_image_size out"):
            load(folders[kind], image_tokens=3)


def test_none_of_many_pictures_is_read_as_a_single_one(folders: dict[str, Path]) -> None:
    """A block of pictures that are decoded at once has room for all but the last: alone it would be cut up."""
    encoder = load(folders["llava_onevision"])
    features = encoder.featurize([Composed((LARGE,) * (DECODED_AT_ONCE + 1), "many")], "query")
    assert features.columns["image_sizes"].lengths.tolist() == [DECODED_AT_ONCE + 1]
    assert len(features.columns["pixel_values"].values) == DECODED_AT_ONCE + 1, "one square each"


PLACEHOLDERS = {
    **dict.fromkeys(KINDS, "<|image_pad|>"),
    **dict.fromkeys(("idefics3", "smolvlm", "llava_onevision", "paligemma"), "<image>"),
    "gemma3": "<image_soft_token>",
}


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_a_text_that_names_a_placeholder_is_a_text_and_takes_no_slot_of_a_picture(
    folders: dict[str, Path], kind: str
) -> None:
    encoder, named = load(folders[kind]), PLACEHOLDERS[kind]

    def slots(*items: Item) -> int:
        ids = encoder.featurize(items, "query").columns["input_ids"].values
        return int((ids == encoder.tokenizer.convert_tokens_to_ids(named)).sum())

    assert slots(SMALL) > 0 == slots(f"{named} and {named}", "none")
    assert slots(Composed((SMALL,), f"what is {named}?")) == slots(Composed((SMALL,), "what is it?")) == slots(SMALL)
    assert vectors(encoder, (Composed((SMALL,), f"what is {named}?"), named)).isfinite().all()


@pytest.mark.parametrize("kind", ["llava", "llava_next"])
@pytest.mark.parametrize("mode", ["auto", "llava"])
def test_a_type_that_does_not_train_is_refused_by_name(tmp_path: Path, kind: str, mode: Any) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(ConfigError, match=f"type {kind} don't train here; take one of .*LLaVA-OneVision"):
        load_encoder(ModelKeys(model_name=str(tmp_path), encoder_mode=mode))


def test_a_package_that_a_processor_lacks_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    with pytest.raises(MachineError, match="num2words"):
        load_encoder(ModelKeys(model_name=str(folders["smolvlm"])))
