"""What servers read of an exported folder is right, and serve.md has a command only where a server runs the model."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from kit.picture_models import write_picture_model
from kit.text_models import TEXTS, load, load_any, write_model
from tokenizers import Tokenizer

from vembed.models.export import SERVE_FILE, ExportRequest, export_model, serve_page
from vembed.models.keys import ModelKeys
from vembed.models.tables import NgramBag, NgramBagConfig

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.models.text import TextEncoder

PROMPTS = {"query": "it's a ```query```: ", "document": "text: "}
SERVERS = ("text-embeddings-inference", "vLLM", "Infinity")


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def read_as_tei(folder: Path) -> dict[str, Any]:
    """Read a folder as the router of text-embeddings-inference does; a key that it needs and misses is an error."""
    config, pooling = read(folder / "config.json"), read(folder / "1_Pooling" / "config.json")
    needed = ["architectures", "model_type", "max_position_embeddings"]
    needed += {
        "qwen3": ["rope_theta", "rms_norm_eps", "num_key_value_heads"],
        "modernbert": ["global_rope_theta", "local_rope_theta", "global_attn_every_n_layers", "local_attention"],
    }.get(config["model_type"], [])
    assert [key for key in needed if key not in config] == []
    flags = {mode: pooling[f"pooling_mode_{mode}"] for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    return {
        "pooling": [mode for mode, on in flags.items() if on],
        "max_length": read(folder / "sentence_bert_config.json")["max_seq_length"],
        "prompts": read(folder / "config_sentence_transformers.json")["prompts"],
    }


def read_as_vllm(folder: Path) -> tuple[list[str], bool]:
    """Return pooling and whether vectors are normalised, as vLLM finds them in modules.json."""
    modules = read(folder / "modules.json")
    (path,) = [each["path"] for each in modules if each["type"] == "sentence_transformers.models.Pooling"]
    flags = [key for key, value in read(folder / path / "config.json").items() if value is True]
    normalize = any(each["type"] == "sentence_transformers.models.Normalize" for each in modules)
    return [flag for flag in flags if flag.startswith("pooling_mode_")], normalize


def sections(page: str) -> dict[str, str]:
    return dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE))


def commands(section: str) -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)\n^```$", section, flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def body_of(section: str) -> Any:
    (words,) = [words for words in commands(section) if words[0] == "curl"]
    return json.loads(words[words.index("-d") + 1])


def export(encoder: TextEncoder, folder: Path, **changes: Any) -> Path:
    encoder.save(folder / "in")
    request = ExportRequest(keys=ModelKeys(model_name=str(folder / "in")), output=folder / "my-model", **changes)
    export_model(request, lambda encoder, form: {})
    return folder / "my-model"


@pytest.mark.parametrize(
    ("kind", "pooling", "flag"),
    [("bert", "mean", "mean_tokens"), ("modernbert", "cls", "cls_token"), ("qwen3", "last_token", "lasttoken")],
)
def test_servers_read_pooling_prompts_length_type_and_tokens_of_the_model(
    tmp_path: Path, kind: str, pooling: str, flag: str
) -> None:
    source = write_model(tmp_path / "bare", kind)
    encoder = load(source, pooling_method=pooling, prompts=PROMPTS, max_seq_length=24)
    folder = export(encoder, tmp_path)
    assert read_as_tei(folder) == {"pooling": [flag], "max_length": 24, "prompts": PROMPTS}
    assert read_as_vllm(folder) == ([f"pooling_mode_{flag}"], True)
    assert read(folder / "config.json")["dtype"] == "float32"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(24)
    texts = [*TEXTS, "word " * 40]
    expected = encoder.featurize(texts, "query").columns["input_ids"]
    found = tokenizer.encode_batch([PROMPTS["query"] + text for text in texts])
    assert [token for row in found for token in row.ids] == expected.values.tolist()
    page = sections((folder / SERVE_FILE).read_text("utf-8"))
    assert set(page) == {"What your client does", *SERVERS}
    assert body_of(page["text-embeddings-inference"]) == {
        "inputs": ["a red fox in the snow"], "truncate": True, "normalize": True, "prompt_name": "query",
    }  # fmt: skip
    assert commands(page["vLLM"])[0] == [
        *("vllm", "serve", "./my-model", "--runner", "pooling", "--dtype", "float32", "--max-model-len", "24"),
    ]
    assert commands(page["Infinity"])[1][:4] == ["infinity_emb", "v2", "--model-id", "./my-model"]
    assert body_of(page["Infinity"])["input"][0].startswith("it's a ")


def test_unnormalised_vectors_and_a_hub_id_change_the_commands(tmp_path: Path) -> None:
    encoder = load(write_model(tmp_path / "bare", "bert"))
    encoder.spec = encoder.spec.__class__(pooling=("mean",), max_length=24, normalize=False)
    folder = export(encoder, tmp_path, served_as="team/faq-search")
    page = sections((folder / SERVE_FILE).read_text("utf-8"))
    assert read_as_vllm(folder)[1] is False
    assert body_of(page["text-embeddings-inference"])["normalize"] is False
    (docker,) = [words for words in commands(page["text-embeddings-inference"]) if words[0] == "docker"]
    assert docker[docker.index("--model-id") + 1] == "team/faq-search"
    assert page["Infinity"].startswith("Not for this model: the server gives every vector unit length")
    assert "What your client does" not in page


def test_vectors_that_the_server_does_not_cut_are_the_clients_duty(tmp_path: Path) -> None:
    encoder = load(write_model(tmp_path / "bare", "bert"))
    encoder.spec = encoder.spec.__class__(pooling=("mean",), max_length=24, truncate_dim=8)
    page = sections((export(encoder, tmp_path) / SERVE_FILE).read_text("utf-8"))
    assert "Keep the first 8 numbers of each vector and divide them by their length" in page["What your client does"]


def test_a_server_that_cannot_run_the_model_is_told_with_the_reason(tmp_path: Path) -> None:
    NgramBag(NgramBagConfig(dimension=16, buckets=512)).save(tmp_path / "bag")
    write_picture_model(tmp_path / "clip", "clip")
    load_any(write_model(tmp_path / "bert", "bert"), pooling_method="none", query_expansion=False).save(
        tmp_path / "late"
    )
    load(write_model(tmp_path / "gpt2", "gpt2")).save(tmp_path / "odd")
    pooled = load(write_model(tmp_path / "bare", "bert"))
    pooled.spec = pooled.spec.__class__(pooling=("max",), max_length=24)
    pooled.save(tmp_path / "max")
    taken = {"bag": set(), "clip": {"vLLM", "Infinity"}, "late": set(), "odd": {"Infinity"}, "max": {"Infinity"}}
    for name, servers in taken.items():
        page = sections(serve_page(tmp_path / name, name))
        refused = {server for server in SERVERS if page[server].startswith("Not for this model: ")}
        assert refused == set(SERVERS) - servers, name
    clip = sections(serve_page(tmp_path / "clip", "clip"))
    assert '"modality": "image"' in clip["Infinity"]
    assert "image_url" in clip["vLLM"]
