"""Models as their publishers lay them out give the vectors of the published rule, with prompts known by their name."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kit.text_models import TEXTS, edit_json, embed, load, load_any, write_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import pre_tokenizers
from transformers import AutoModel, AutoModelForTextEncoding, AutoTokenizer, LlamaTokenizer, Qwen2Tokenizer

from vembed.models.text_spec import PROMPT_FAMILIES, known_prompts

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.batch import Side

INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
LENGTH = 192  # tokens; the instruction has about 90 characters, each of which is a token here


@dataclass(frozen=True)
class Published:
    """How a publisher lays a model out, and what the page about it says."""

    kind: str
    pooling: str
    query: str = ""
    document: str = ""
    in_files: bool = False  # whether the prompts stand in config_sentence_transformers.json
    end: str = ""  # token that is appended to each text
    dense: tuple[int, ...] = ()


PUBLISHED = {
    "Qwen3-Embedding-0.6B": Published("qwen3", "lasttoken", INSTRUCTION, in_files=True, end="<|endoftext|>"),
    "e5-mistral-7b-instruct": Published("mistral", "lasttoken", f"{INSTRUCTION} ", end="</s>"),
    "embeddinggemma-300m": Published(
        "bidirectional gemma3",
        "mean",
        "task: search result | query: ",
        "title: none | text: ",
        in_files=True,
        dense=(48, 32),
    ),
    "e5-small-v2": Published("bert", "mean", "query: ", "passage: "),
    "multilingual-e5-base": Published("xlm-roberta", "mean", "query: ", "passage: "),
    "bge-base-en-v1.5": Published("bert", "cls", "Represent this sentence for searching relevant passages: "),
    "nomic-embed-text-v1.5": Published("nomic_bert", "mean", "search_query: ", "search_document: "),
    "modernbert-embed-base": Published("modernbert", "mean", "search_query: ", "search_document: "),
    "gte-multilingual-base": Published("gte", "cls"),
    "gte-base-en": Published("bert", "mean"),
    "sentence-t5-base": Published("t5", "mean", dense=(24,)),
}


def tokenizer_of(published: Published) -> Any:
    """Return the tokenizer of the model's own class where its end token hangs on that."""
    alphabet = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    if published.kind == "qwen3":
        return Qwen2Tokenizer(vocab=alphabet, merges=[], eos_token="<|im_end|>", padding_side="left")
    if published.kind == "mistral":
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        return LlamaTokenizer(vocab=vocabulary, merges=[], pad_token="</s>", add_eos_token=True)
    return None


def append_end(folder: Path, token: str) -> None:
    """Let tokenizer.json append a token to each text, as Qwen3-Embedding's does."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    (number,) = [each["id"] for each in content["added_tokens"] if each["content"] == token]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}],
        "pair": [],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    path.write_text(json.dumps(content), "utf-8")


def publish(root: Path, name: str) -> Path:
    """Write a model with random weights under its published name."""
    published = PUBLISHED[name]
    positions = {} if published.kind == "t5" else {"max_position_embeddings": LENGTH + 2}
    bare = write_model(root / "bare" / name, published.kind, tokenizer=tokenizer_of(published), **positions)
    edit_json(bare / "tokenizer_config.json", model_max_length=LENGTH)
    if published.kind == "qwen3":
        append_end(bare, published.end)
    torch.manual_seed(1)
    modules: list[Any] = [Transformer(str(bare)), Pooling(32, published.pooling)]
    for width, out in itertools.pairwise((32, *published.dense)):
        modules.append(Dense(width, out, bias=False, activation_function=torch.nn.Identity()))
    SentenceTransformer(modules=[*modules, Normalize()], device="cpu").save(str(root / name))
    prompts = {"query": published.query, "document": published.document} if published.in_files else None
    edit_json(root / name / "config_sentence_transformers.json", prompts=prompts)
    return root / name


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {name: publish(root, name) for name in PUBLISHED}


class Rule:
    """The published rule by transformers alone: prompt and text padded at a side, pooled, projected, of unit length."""

    def __init__(self, folder: Path, published: Published) -> None:
        self.published = published
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        auto_class = AutoModelForTextEncoding if published.kind == "t5" else AutoModel
        self.backbone = auto_class.from_pretrained(folder).eval()
        self.dense = [load_file(path / "model.safetensors")["linear.weight"] for path in sorted(folder.glob("*_Dense"))]

    @torch.no_grad()
    def vectors(self, prompt: str, padding_side: str) -> torch.Tensor:
        rows = [self.tokenizer(prompt + text, truncation=True, max_length=LENGTH)["input_ids"] for text in TEXTS]
        if self.published.end:
            assert {row[-1] for row in rows} == {self.tokenizer.convert_tokens_to_ids(self.published.end)}
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        mask_RT = batch["attention_mask"].bool()
        if self.published.kind == "bert":  # which counts positions from the first place, padding or not
            batch["position_ids"] = (mask_RT.cumsum(1) - 1).clamp(min=0)
        pooled = []
        for hidden_TH, mask_T in zip(self.backbone(**batch).last_hidden_state, mask_RT, strict=True):
            x_TH = hidden_TH[mask_T]
            pooled.append({"mean": x_TH.mean(0), "cls": x_TH[0], "lasttoken": x_TH[-1]}[self.published.pooling])
        x = torch.stack(pooled)
        for weight in self.dense:
            x = x @ weight.T
        return F.normalize(x, dim=-1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_vectors_are_those_of_the_published_rule_whichever_side_is_padded(folders: dict[str, Path], name: str) -> None:
    published, encoder = PUBLISHED[name], load(folders[name])
    rule, theirs = Rule(folders[name], published), SentenceTransformer(str(folders[name]), device="cpu")
    sides: dict[Side, str] = {"query": published.query, "document": published.document}
    assert encoder.prompts == sides
    for side, prompt in sides.items():
        found = embed(encoder, side=side)
        for padding_side in ("right", "left"):
            assert (found - rule.vectors(prompt, padding_side)).abs().max() <= 1e-5
        expected = theirs.encode(list(TEXTS), prompt=prompt or None, convert_to_tensor=True)
        assert (found - expected).abs().max() <= 1e-5
        different = found[:-1]  # the last text is the first one with a capital, which is one to some tokenizers
        assert (different @ different.T - torch.eye(len(different))).max() < 0.9999
        alone = torch.cat([embed(encoder, [text], side=side) for text in reversed(TEXTS)]).flip(0)
        assert (found - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("name", [name for name, published in PUBLISHED.items() if published.end])
def test_a_cut_text_and_an_empty_one_keep_the_end_token(folders: dict[str, Path], name: str) -> None:
    encoder = load(folders[name])
    end = encoder.tokenizer.convert_tokens_to_ids(PUBLISHED[name].end)
    features = encoder.featurize(["sea " * LENGTH, ""], "query")
    ids = features.columns["input_ids"]
    assert (features.num_truncated, int(features.lengths.max())) == (1, LENGTH)
    assert [int(ids.values[stop - 1]) for stop in ids.offsets[1:]] == [end, end]


KNOWN = {
    "E5": (
        "intfloat/e5-large",
        "intfloat/E5-Small-V2",
        "intfloat/multilingual-e5-base",
        "intfloat/e5-base-unsupervised",
    ),
    "E5-instruct": ("intfloat/multilingual-e5-large-instruct", "intfloat/e5-mistral-7b-instruct"),
    "English BGE": ("BAAI/bge-small-en-v1.5", "BAAI/bge-large-en", "/models/bge-base-en-v1.5/"),
    "Nomic": ("nomic-ai/nomic-embed-text-v1", "nomic-ai/nomic-embed-text-v1.5", "nomic-ai/modernbert-embed-base"),
    "Qwen3-Embedding": ("Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-8B"),
    "EmbeddingGemma": ("google/embeddinggemma-300m",),
}
UNKNOWN = (
    "my-e5-base-v2",
    "e5-base-v2-tuned",
    "BAAI/bge-m3",
    "BAAI/bge-base-zh-v1.5",
    "thenlper/gte-base",
    "Qwen/Qwen3-0.6B",
)


def config(kind: str) -> Any:
    return SimpleNamespace(model_type=kind)


def test_names_of_models_and_their_types_together_say_which_prompts_are_known() -> None:
    assert KNOWN.keys() == {family.name for family in PROMPT_FAMILIES}
    types = {kind for family in PROMPT_FAMILIES for kind in family.types}
    for family in PROMPT_FAMILIES:
        for name in KNOWN[family.name]:
            found = {known_prompts(name, config(kind))[0] for kind in types}
            assert found == {family.name, ""}, name
            assert known_prompts(name, config("gpt2")) == ("", {})
    for name in UNKNOWN:
        assert all(known_prompts(name, config(kind)) == ("", {}) for kind in types), name


def test_the_plan_says_where_a_prompt_comes_from_and_how_to_turn_it_off(folders: dict[str, Path]) -> None:
    by_name = load(folders["e5-small-v2"]).describe()
    assert by_name["query_prompt"] == "'query: ' (known for E5; query_prompt: '' turns it off)"
    assert by_name["document_prompt"] == "'passage: ' (known for E5; document_prompt: '' turns it off)"
    by_file = load(folders["embeddinggemma-300m"]).describe()
    assert by_file["query_prompt"] == "'task: search result | query: ' (config_sentence_transformers.json)"
    assert load(folders["bge-base-en-v1.5"]).describe()["document_prompt"] == "''"


def test_keys_and_files_go_before_what_is_known(folders: dict[str, Path], tmp_path: Path) -> None:
    off = load(folders["e5-small-v2"], prompts={"query": ""})
    assert off.prompts == {"query": "", "document": "passage: "}
    assert off.describe()["query_prompt"] == "''"
    off.save(tmp_path / "e5-small-v2")  # which is known by its name again
    assert load(tmp_path / "e5-small-v2").prompts == off.prompts
    assert load(tmp_path / "e5-small-v2", prompts={"query": "q: "}).prompts == {"query": "q: ", "document": "passage: "}


def test_a_mode_names_the_family_where_the_folder_does_not(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine", "bert")
    assert load_any(folder).prompts == load_any(folder, encoder_mode="bert").prompts == {"query": "", "document": ""}
    e5 = load_any(folder, encoder_mode="e5")
    assert e5.prompts == {"query": "query: ", "document": "passage: "}
    assert "known for E5" in e5.describe()["query_prompt"]
    assert load_any(folder, encoder_mode="bge").prompts["query"].startswith("Represent this sentence")
    assert load_any(folder, encoder_mode="bge", query_prompt="").prompts["query"] == ""
    chinese = write_model(tmp_path / "bge-base-zh", "bert")
    assert load_any(chinese, encoder_mode="bge").prompts["query"] == "", "the name says that it isn't English BGE"


def test_a_bare_folder_has_the_known_prompts_too(tmp_path: Path) -> None:
    assert load(write_model(tmp_path / "e5-base", "bert")).prompts == {"query": "query: ", "document": "passage: "}
    assert load(write_model(tmp_path / "bge-base-en", "qwen3")).prompts == {"query": "", "document": ""}
