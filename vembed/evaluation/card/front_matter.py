"""The YAML block at the head of a card, as the Hugging Face hub reads it."""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING, Any

import yaml

from vembed.errors import ConfigError
from vembed.evaluation.text import one_line

if TYPE_CHECKING:
    from vembed.evaluation.card.facts import CardFacts, SetFacts

# fmt: off
LICENSES = frozenset((
    "apache-2.0", "mit", "openrail", "bigscience-openrail-m", "creativeml-openrail-m", "bigscience-bloom-rail-1.0",
    "bigcode-openrail-m", "afl-3.0", "artistic-2.0", "bsl-1.0", "bsd", "bsd-2-clause", "bsd-3-clause",
    "bsd-3-clause-clear", "c-uda", "cc", "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0",
    "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0", "cc-by-nc-nd-3.0",
    "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cdla-sharing-1.0",
    "cdla-permissive-1.0", "cdla-permissive-2.0", "wtfpl", "ecl-2.0", "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1",
    "eupl-1.2", "agpl-3.0", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "lgpl", "lgpl-2.1", "lgpl-3.0", "isc", "h-research",
    "intel-research", "lppl-1.3c", "ms-pl", "apple-ascl", "apple-amlr", "mpl-2.0", "odc-by", "odbl", "openmdw-1.0",
    "openrail++", "osl-3.0", "postgresql", "ofl-1.1", "ncsa", "unlicense", "zlib", "pddl", "lgpl-lr",
    "deepfloyd-if-license", "fair-noncommercial-research-license", "llama2", "llama3", "llama3.1", "llama3.2",
    "llama3.3", "llama4", "grok2-community", "gemma", "unknown", "other",
))
# fmt: on
"""The licence ids that the hub knows; another one stands there as "other" with its name."""

LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code", re.ASCII)

METRIC_NAMES = {"ndcg": "nDCG", "recall": "Recall", "precision": "Precision", "mrr": "MRR", "map": "MAP", "hit": "Hit"}


def check_license(given: str) -> str:
    """Return a licence as the hub spells it ("MIT License" is mit); one that the hub doesn't know stays as it is.

    Args:
        given: What the owner of the model gave.

    Raises:
        ConfigError: It is empty.
    """
    line = one_line(given)
    if not line:
        raise ConfigError("--license is empty; give an id such as apache-2.0, or leave it out")
    return _spelt(line) if _spelt(line) in LICENSES else line


def _spelt(given: str) -> str:
    """Return a licence in the hub's way of spelling."""
    plain = re.sub(r"\s+licen[sc]e$", "", given.lower())
    return re.sub(r"[\s_]+", "-", plain)


def nearest_license(given: str) -> str | None:
    """Return the licence id that a text which is none was probably meant to be, or None."""
    if given in LICENSES:
        return None
    close = difflib.get_close_matches(_spelt(given), LICENSES, n=1, cutoff=0.8)
    return close[0] if close else None


def check_languages(given: list[str]) -> tuple[str, ...]:
    """Return codes of languages.

    Args:
        given: What the owner of the model gave.

    Raises:
        ConfigError: One is no code.
    """
    for code in given:
        if not LANGUAGE.fullmatch(code):
            raise ConfigError(f"--language {code!r} is no code of a language; give ISO 639 codes such as en de zh")
    return tuple(dict.fromkeys(given))


def front_matter(facts: CardFacts) -> str:
    """Return the block, from the first `---` to the last, with a line feed behind."""
    text: str = yaml.safe_dump(
        _metadata(facts), sort_keys=False, allow_unicode=True, width=1_000_000, default_flow_style=False
    )
    return f"---\n{text}---\n"


def _metadata(facts: CardFacts) -> dict[str, Any]:
    """Return the fields; what isn't known is left out. Every text is one line."""
    found: dict[str, Any] = {}
    if facts.languages:
        found["language"] = [one_line(code) for code in facts.languages]
    if facts.license_id is not None:
        found |= _license(one_line(facts.license_id))
    found["library_name"] = facts.model.form
    found["pipeline_tag"] = pipeline_tag(facts)
    found["tags"] = _tags(facts)
    base = facts.base if facts.run is None else facts.run.base
    if base is not None and base.hub_id is not None:
        found["base_model"] = base.hub_id
    if facts.run is not None:
        sets = dict.fromkeys(name.hub_id for label, name in facts.run.data if label == "training" and name.hub_id)
        if sets:
            found["datasets"] = list(sets)
        results = [_result(each) for each in facts.run.sets if _finite(each)]
        if results:
            found["model-index"] = [{"name": one_line(facts.title), "results": results}]
    return found


def _license(given: str) -> dict[str, str]:
    if given in LICENSES:
        return {"license": given}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.+-]+", "-", given.lower()).strip("-") or "other"}


def pipeline_tag(facts: CardFacts) -> str:
    """Return the task under which the hub lists the model."""
    model = facts.model
    if not model.takes_texts:
        return "image-feature-extraction"
    if model.takes_pictures:
        return "sentence-similarity" if model.form == "sentence-transformers" else "zero-shot-image-classification"
    return "sentence-similarity" if model.form == "sentence-transformers" else "feature-extraction"


def _tags(facts: CardFacts) -> list[str]:
    model = facts.model
    tags = [model.form, pipeline_tag(facts), "feature-extraction", "retrieval"]
    if model.takes_texts and model.takes_pictures:
        tags.append("multimodal")
    if facts.run is not None:
        tags.append("contrastive-learning")
    return list(dict.fromkeys([*tags, "vembed"]))


def _finite(each: SetFacts) -> list[dict[str, Any]]:
    return [
        {
            "type": f"{metric.name.replace('@', '_at_')}",
            "value": round(metric.final, 6),
            "name": metric_name(metric.name),
        }
        for metric in each.metrics
        if metric.final is not None and math.isfinite(metric.final)
    ]


def _result(each: SetFacts) -> dict[str, Any]:
    return {
        "task": {"type": "text-retrieval", "name": "Retrieval"},
        "dataset": {"type": "unknown", "name": f"{one_line(each.name)} ({each.role})"},
        "metrics": _finite(each),
    }


def metric_name(name: str) -> str:
    """Return a metric's name as it is printed, e.g. "nDCG@10"."""
    kind, at, k = name.partition("@")
    return f"{METRIC_NAMES.get(kind, kind)}{at}{k}"
