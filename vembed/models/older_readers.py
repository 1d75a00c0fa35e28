"""Let programs that know the settings of transformers 4 find what version 5 writes under other names.

text-embeddings-inference reads config.json itself and knows no other names; vLLM, Infinity and sentence-transformers up
to 5.1 run on transformers 4. What they miss there they refuse, or replace by a default: other vectors, without a word.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_ROTARY_BY_LAYER = {
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
}
"""model_type -> kind of layer -> where transformers 4 has the base of its rotary positions."""

_PERIODS = {"modernbert": ("global_attn_every_n_layers", 0), "gemma3_text": ("sliding_window_pattern", 1)}
"""model_type -> where transformers 4 has every how many layers attention is full, and from which on it counts."""


def add_older_names(folder: Path) -> None:
    """Write the settings of a saved transformer and its tokenizer under their older names too."""
    _edit(folder / "config.json", _older_settings)
    _edit(folder / "tokenizer_config.json", _older_tokenizer)


def _edit(path: Path, change: Any) -> None:
    if path.is_file():
        settings = change(json.loads(path.read_text("utf-8")))
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _older_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the older names of rotary positions and of the order of layers."""
    rotary = config.get("rope_parameters") or {}
    kind = config.get("model_type")
    older: dict[str, Any] = {}
    if "rope_theta" in rotary:
        older["rope_theta"] = rotary["rope_theta"]
        if rotary.get("rope_type", "default") != "default":
            older["rope_scaling"] = {name: value for name, value in rotary.items() if name != "rope_theta"}
    for layers, name in _ROTARY_BY_LAYER.get(str(kind), {}).items():
        if "rope_theta" in rotary.get(layers, {}):
            older[name] = rotary[layers]["rope_theta"]
    if kind in _PERIODS:
        name, start = _PERIODS[kind]
        if (period := _period(config.get("layer_types") or (), start)) is not None:
            older[name] = period
    return {**older, **config}  # what is there already stays


def _period(kinds: Sequence[str], start: int) -> int | None:
    """Return every how many layers attention is full; None where it isn't at equal distances."""
    full = [place for place, kind in enumerate(kinds) if kind == "full_attention"]
    if not full:
        return None
    period = full[0] + 1 if start else (full[1] - full[0] if len(full) > 1 else len(kinds))
    return period if full == list(range(period - 1 if start else 0, len(kinds), period)) else None


def _older_tokenizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json with the class and the list of tokens as transformers 4 names them."""
    older = dict(settings)
    if older.get("tokenizer_class") == "TokenizersBackend":
        older["tokenizer_class"] = "PreTrainedTokenizerFast"
        older.setdefault("model_input_names", ["input_ids", "attention_mask"])  # there it gives types of tokens too
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older
