"""serve.md: the commands that serve an exported model, by what the servers read of its folder.

Nothing here asks the encoder: text-embeddings-inference, vLLM and Infinity know the files alone, so the files decide.
Sources: the routers of text-embeddings-inference 1.9, vLLM's list of pooling models, Infinity's list of tested models.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVE_FILE = "serve.md"

TEI_TYPES = frozenset(
    {"bert", "camembert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "qwen2", "qwen3", "mistral"}
    | {"gemma3_text"}
)
VLLM_TYPES = frozenset(
    {"bert", "roberta", "xlm-roberta", "modernbert", "qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text"}
)
PAIR_TYPES = frozenset({"clip", "siglip"})
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last token",
}
EXAMPLE = "a red fox in the snow"
ONLY_POOLS = "the server pools only by cls, mean or the last token, over all tokens"
INTRODUCTION = (
    "Commands for the folder that holds this file, or for the same files on the hub. Each server reads pooling, "
    "prompts, length and type from the files here."
)


@dataclass(frozen=True, slots=True)
class Served:
    """What the files of a folder tell a server."""

    model_type: str  # of config.json
    modules: tuple[str, ...]  # kinds of modules.json, in order; empty where there is none
    pooling: str  # "" where it isn't one that servers know
    prompts: Mapping[str, str]
    max_length: int | None
    dtype: str
    lower_case: bool

    @property
    def is_text(self) -> bool:
        """Whether it is a transformer of texts with one vector for each."""
        return self.modules[:2] == ("Transformer", "Pooling")


def read_served(folder: Path) -> Served:
    """Read what servers read."""
    config, general, text = (
        _json(folder / name)
        for name in ("config.json", "config_sentence_transformers.json", "sentence_bert_config.json")
    )
    path = folder / "modules.json"
    modules = json.loads(path.read_text("utf-8")) if path.is_file() else []
    kinds = tuple(str(each["type"]).rpartition(".")[2] for each in modules)
    flags = _json(folder / "1_Pooling" / "config.json")
    named = [POOLINGS.get(key, "") for key, on in flags.items() if on is True and key.startswith("pooling_mode_")]
    return Served(
        model_type=str(config.get("model_type", "")),
        modules=kinds,
        pooling=named[0] if len(named) == 1 and flags.get("include_prompt", True) else "",
        prompts={side: prompt for side, prompt in (general.get("prompts") or {}).items() if prompt},
        max_length=text.get("max_seq_length"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        lower_case=bool(text.get("do_lower_case", False)),
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def serve_page(folder: Path, name: str) -> str:
    """Return the page.

    Args:
        name: What the folder is called where it is served, or an id of the hub.
    """
    served = read_served(folder)
    place = name if "/" in name else f"./{name}"
    parts = [
        f"# Serving {_plain(name)}",
        INTRODUCTION,
        *_needs(served),
        *_section("text-embeddings-inference", _why_no_tei(served), _tei(served, place)),
        *_section("vLLM", _why_no_vllm(served), _vllm(served, place)),
        *_section("Infinity", _why_no_infinity(served), _infinity(served, place)),
    ]
    return "\n\n".join(parts) + "\n"


def _section(server: str, why_not: str, lines: list[str]) -> list[str]:
    return [f"## {server}", *([f"Not for this model: {why_not}."] if why_not else lines)]


def _needs(served: Served) -> list[str]:
    """Return what a client must do that no server does."""
    lines = [
        f"- Put `{_plain(json.dumps(prompt, ensure_ascii=False))}` before each {side}."
        for side, prompt in served.prompts.items()
    ]
    if served.lower_case:
        lines.append("- Lower-case the texts: the servers don't.")
    if "Dense" in served.modules and served.is_text:
        lines.append(
            "- The model has Dense layers: compare one vector with the model's own, as older releases leave them out."
        )
    return ["## What your client does", "\n".join(lines)] if lines else []


def _no_text(served: Served, takes: str) -> str:
    """Say why a server that takes texts and perhaps more doesn't take this model."""
    if not served.modules and served.model_type not in PAIR_TYPES:
        return "the server needs modules.json, which only the form sentence-transformers has (`vembed export --format`)"
    return f"the server takes only {takes}, with one vector for each"


def _why_no_tei(served: Served) -> str:
    if not served.is_text:
        return _no_text(served, "transformers of texts")
    if served.model_type not in TEI_TYPES:
        return f"the server doesn't read {_plain(served.model_type)} in the settings of transformers"
    return "" if served.pooling else ONLY_POOLS


def _tei(served: Served, place: str) -> list[str]:
    image = "ghcr.io/huggingface/text-embeddings-inference"
    where = f'-v "$PWD"/{shlex.quote(place[2:])}:/model' if place.startswith("./") else "-e HF_TOKEN"
    model = "/model" if place.startswith("./") else shlex.quote(place)
    body: dict[str, Any] = {"inputs": [EXAMPLE], "truncate": True, "normalize": "Normalize" in served.modules}
    if "query" in served.prompts:
        body["prompt_name"] = "query"
    lines = [
        _shell(
            f"docker run --rm -p 8080:80 {where} {image}:cpu-1.9 --model-id {model} --dtype float32",
            _curl("http://localhost:8080/embed", body),
        ),
        f"On a GPU take the image `{image}:1.9` with `--gpus all`, and leave `--dtype` out for float16.",
    ]
    if served.prompts:
        sides = " or ".join(f"`{side}`" for side in served.prompts)
        lines.append(
            f"`prompt_name` ({sides}) puts the prompt before the text; on `/v1/embeddings` your client does it."
        )
    if "Normalize" not in served.modules:
        lines.append('Keep `"normalize": false`: this model compares by the dot product, and lengths count.')
    return lines


def _why_no_vllm(served: Served) -> str:
    if served.model_type in PAIR_TYPES:
        return ""
    if not served.is_text:
        return _no_text(served, "transformers of texts, CLIP and SigLIP")
    if served.model_type not in VLLM_TYPES:
        return f"its list of embedding models has no {_plain(served.model_type)} in the settings of transformers"
    return "" if served.pooling else ONLY_POOLS


def _vllm(served: Served, place: str) -> list[str]:
    length = "" if served.max_length is None else f" --max-model-len {served.max_length}"
    text = served.prompts.get("query", "") + EXAMPLE
    body = {"model": place, "input": [text], "truncate_prompt_tokens": -1}
    lines = [
        _shell(
            f"vllm serve {shlex.quote(place)} --runner pooling --dtype {served.dtype}{length}",
            _curl("http://localhost:8000/v1/embeddings", body),
        )
    ]
    if served.model_type in PAIR_TYPES:
        lines.append(
            "A picture is a message of one `image_url` in place of `input`; a text and a picture are two requests."
        )
    lines.append(
        "Trained with `mrl_dims`? With `--hf-overrides '{\"is_matryoshka\": true}'` a request may ask for `dimensions`."
    )
    return lines


def _why_no_infinity(served: Served) -> str:
    if served.model_type in PAIR_TYPES:
        return ""
    if not served.is_text:
        return _no_text(served, "transformers of texts, CLIP and SigLIP")
    return (
        ""
        if "Normalize" in served.modules
        else "the server gives every vector unit length, and this model's lengths count"
    )


def _infinity(served: Served, place: str) -> list[str]:
    body: dict[str, Any] = {"model": place, "input": [served.prompts.get("query", "") + EXAMPLE]}
    dtype = served.dtype if served.dtype in ("float32", "float16", "bfloat16") else "float32"
    lines = [
        _shell(
            "pip install 'infinity-emb[all]'",
            f"infinity_emb v2 --model-id {shlex.quote(place)} --engine torch --dtype {dtype} --port 7997",
            _curl("http://localhost:7997/embeddings", body),
        )
    ]
    if served.model_type in PAIR_TYPES:
        lines.append('For pictures send their addresses as `input`, with `"modality": "image"`.')
    return lines


def _curl(address: str, body: Mapping[str, Any]) -> str:
    return f"curl {address} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _shell(*commands: str) -> str:
    """Return a block of commands, which nothing in them can end."""
    return "```bash\n" + "\n".join(command.replace("```", "`` `") for command in commands) + "\n```"


def _plain(text: str) -> str:
    """Return a text of one line without what Markdown would read."""
    return " ".join(text.split()).replace("`", "'").replace("<", "&lt;")
