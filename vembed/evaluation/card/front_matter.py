"""The YAML block at the head of a card, as the Hugging Face hub reads it."""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index

from vembed.errors import ConfigError
from vembed.pages.text import one_line

if TYPE_CHECKING:
    from vembed.evaluation.card.facts import CardFacts, MetricFacts, ModelFacts, SetFacts

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
    """Return codes of languages, each once.

    Raises:
        ConfigError: One is no code.
    """
    for code in given:
        if not LANGUAGE.fullmatch(code):
            raise ConfigError(f"--language {code!r} is no code of a language; give ISO 639 codes such as en de zh")
    return tuple(dict.fromkeys(given))


def front_matter(facts: CardFacts) -> str:
    """Return the block, from the first `---` to the last; what isn't known is left out, and every text is one line."""
    base = facts.base if facts.run is None else facts.run.base
    data = facts.run.data if facts.run is not None else ()
    license_id, license_name = (None, None) if facts.license_id is None else _license(one_line(facts.license_id))
    found = ModelCardData(
        language=[one_line(code) for code in facts.languages] or None,
        library_name="PyLate" if facts.model.form == "pylate" else facts.model.form,
        pipeline_tag=_pipeline_tag(facts.model),
        tags=_tags(facts),
        base_model=None if base is None else base.hub_id,
        datasets=list(dict.fromkeys(name.hub_id for label, name in data if label == "training" and name.hub_id))
        or None,
        license=license_id,
        license_name=license_name,
    )
    results = [result for each in (facts.run.sets if facts.run is not None else ()) for result in _results(each)]
    if results:
        found["model-index"] = [{"name": one_line(facts.title), "results": results}]
    return f"---\n{found.to_yaml()}\n---\n"


def _license(given: str) -> tuple[str, str | None]:
    """Return a licence's id on the hub, and its name where the hub knows no id for it."""
    if given in LICENSES:
        return given, None
    return "other", re.sub(r"[^a-z0-9.+-]+", "-", given.lower()).strip("-") or "other"


def _pipeline_tag(model: ModelFacts) -> str:
    """Return the task under which the hub lists the model."""
    if not model.takes_texts:
        return "image-feature-extraction"
    if model.form in ("sentence-transformers", "pylate"):
        return "sentence-similarity"
    return "zero-shot-image-classification" if model.takes_pictures else "feature-extraction"


def _tags(facts: CardFacts) -> list[str]:
    model = facts.model
    tags = [model.form, _pipeline_tag(model), "feature-extraction", "retrieval"]
    if model.takes_texts and model.takes_pictures:
        tags.append("multimodal")
    if facts.run is not None:
        tags.append("contrastive-learning")
    return [*tags, "vembed"]  # the hub's class drops doubles


def _results(each: SetFacts) -> list[dict[str, Any]]:
    """Return the measurements of one set as the hub writes them; given several sets it would mix them up."""
    found = [
        EvalResult(
            task_type="text-retrieval",
            task_name="Retrieval",
            dataset_type="unknown",
            dataset_name=f"{one_line(each.name)} ({each.role})",
            metric_type=metric.name.replace("@", "_at_"),
            metric_name=metric_name(metric.name),
            metric_value=round(metric.final, 6),
            metric_args=_untrained(metric),
        )
        for metric in each.metrics
        if metric.final is not None and math.isfinite(metric.final)
    ]
    results: list[dict[str, Any]] = eval_results_to_model_index("", found)[0]["results"]
    return results


def _untrained(metric: MetricFacts) -> dict[str, float] | None:
    """Return the value before training, where no reader takes it for the model's."""
    known = metric.baseline is not None and math.isfinite(metric.baseline)
    return {"untrained": round(metric.baseline or 0.0, 6)} if known else None


def metric_name(name: str) -> str:
    """Return a metric's name as it is printed, e.g. "nDCG@10"."""
    kind, at, k = name.partition("@")
    return f"{METRIC_NAMES.get(kind, kind)}{at}{k}"
