"""A card as Markdown. Every text that isn't ours is escaped: it can be neither markup nor a second YAML block."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vembed.evaluation.card.citations import CITATIONS, TITLES
from vembed.evaluation.card.front_matter import front_matter, metric_name
from vembed.evaluation.card.names import without_paths
from vembed.evaluation.card.usage import examples
from vembed.evaluation.pages import escape_markdown as escape
from vembed.evaluation.report.markdown import table
from vembed.evaluation.text import MINUS, clip, count_text, metric_text, plural, signed_text, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vembed.evaluation.card.facts import CardFacts, MetricFacts, ModelFacts, RunFacts, SetFacts
    from vembed.evaluation.card.names import PublicName
    from vembed.evaluation.significance import Comparison

NOT_STATED = "not stated"
VALUE_CHARACTERS = 400

CARD_FILE = "README.md"


def render_card(facts: CardFacts) -> str:
    """Return the card.

    Args:
        facts: Everything that it says.

    Returns:
        A YAML block and Markdown; the same facts give the same text.
    """
    blocks = [
        f"# {escape(facts.title)}",
        _summary(facts),
        *_usage(facts),
        *_model(facts.model),
        *_training(facts),
        *_results(facts.run),
        *_limits(facts),
        *_license(facts),
        *_environment(facts),
        *_citations(facts.run),
    ]
    return f"{front_matter(facts)}\n" + "\n\n".join(blocks) + "\n"


def _summary(facts: CardFacts) -> str:
    """Return what it is, in a few sentences."""
    model, run = facts.model, facts.run
    what = "texts and pictures" if model.takes_texts and model.takes_pictures else _kind(model)
    size = count_text(model.dimension)
    lines = [f"An embedding model for retrieval: {what} become vectors of {size} numbers, compared by {_angle(model)}."]
    if run is not None:
        lines.append(f"{_origin(run.base)} with vembed.")
        lines += [f"{escape(each.sentence[:1].upper() + each.sentence[1:])}." for each in run.sets[:1] if each.sentence]
    elif facts.base is not None:
        lines.append(f"Written from {_shown(facts.base)}; its training is not known here.")
    else:
        lines.append("Its training is not known here.")
    return " ".join(lines)


def _kind(model: ModelFacts) -> str:
    return "texts" if model.takes_texts else "pictures"


def _angle(model: ModelFacts) -> str:
    return "their cosine" if model.similarity == "cosine" else "their dot product"


def _origin(base: PublicName) -> str:
    if base.kind == "built-in":
        return f"Trained from scratch ({_shown(base)})"
    return f"Fine-tuned from {_shown(base)}"


def _shown(name: PublicName) -> str:
    shown = escape(clip(name.shown, VALUE_CHARACTERS).short)
    return f"the local folder {shown}" if name.kind == "local" else shown


def _usage(facts: CardFacts) -> list[str]:
    """Return an example for each library."""
    blocks = ["## Use"]
    for example in examples(facts.model, facts.folder):
        install = f"Needs `{example.install}`." if example.install else "Needs vembed."
        blocks += [f"### {example.library}", install, code_block(example.code, "python")]
    blocks.append("The name is that of the model's folder; on the hub it is `OWNER/NAME`.")
    return blocks


def code_block(code: str, language: str) -> str:
    """Return a program as a code block that nothing in it can end."""
    shown = visible(code)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{shown}\n{fence}"


def _model(model: ModelFacts) -> list[str]:
    limit = "none" if model.max_length is None else f"{count_text(model.max_length)} tokens; longer texts are cut"
    pairs = [
        ("Takes", "texts and pictures" if model.takes_texts and model.takes_pictures else _kind(model)),
        ("Dimensions", count_text(model.dimension)),
        ("Similarity", "cosine (vectors have unit length)" if model.similarity == "cosine" else "dot product"),
        *([("Longest text", limit)] if model.takes_texts else []),
        *((f"Prompt before each {side}", repr(prompt)) for side, prompt in model.prompts.items() if prompt),
        ("Parameters", count_text(model.num_parameters)),
        ("Weights", model.dtype),
        ("Files are for", model.form),
    ]
    known = {"max_seq_length", "similarity", "query_prompt", "document_prompt"}
    pairs += [(key, without_paths(value)) for key, value in model.described.items() if key not in known]
    return ["## Model", _pairs(pairs)]


def _training(facts: CardFacts) -> list[str]:
    run = facts.run
    if run is None:
        return ["## Training", "Not known: no run was given when this card was written."]
    data = [(f"{label} data".capitalize(), _plain(name)) for label, name in run.data]
    blocks = ["## Training", "### Data", _pairs([*data, *run.data_facts])]
    if run.settings:
        blocks += ["### Settings", _pairs([(key, value) for key, value in run.settings])]
    return blocks


def _plain(name: PublicName) -> str:
    return f"{name.shown} (local)" if name.kind == "local" else name.shown


def _results(run: RunFacts | None) -> list[str]:
    """Return a table for each set."""
    if run is None:
        return ["## Results", "Nothing was measured that is known here."]
    blocks = ["## Results"]
    for each in run.sets:
        size = f"{plural(each.num_queries, 'query', 'queries')}, {plural(each.num_documents, 'document')}"
        blocks += [f"### {escape(each.name)} ({escape(each.role)})", f"{size}. {each.note[:1].upper()}{each.note[1:]}."]
        blocks.append(_metrics_table(each))
        if each.sentence:
            blocks.append(f"Verdict: {escape(each.sentence)}")
    blocks += [escape(note) for note in run.notes]
    if any(metric.comparison for each in run.sets for metric in each.metrics):
        blocks.append("Intervals are of the change: a paired bootstrap over the queries, 95%. Metrics are trec_eval's.")
    return blocks


def _metrics_table(each: SetFacts) -> str:
    with_bm25 = any(metric.bm25 is not None for metric in each.metrics)
    heads = ["Metric", "Before", "After", "Change", "95% interval", *(["BM25"] if with_bm25 else [])]
    body = [_metric_cells(metric, with_bm25=with_bm25) for metric in each.metrics]
    return table(heads, body, numeric=range(1, len(heads)))


def _metric_cells(metric: MetricFacts, *, with_bm25: bool) -> list[str]:
    comparison = metric.comparison
    cells = [escape(metric_name(metric.name)), metric_text(metric.baseline), metric_text(metric.final)]
    cells += ["not compared"] * 2 if comparison is None else [signed_text(comparison.difference), _interval(comparison)]
    return [*cells, metric_text(metric.bm25)] if with_bm25 else cells


def _interval(comparison: Comparison) -> str:
    if comparison.num_queries < 2:
        return "none with 1 query"
    return f"{signed_text(comparison.low)} to {signed_text(comparison.high)}".replace("-", MINUS)


def _limits(facts: CardFacts) -> list[str]:
    """Return what it was not tested for."""
    model, run = facts.model, facts.run
    languages = ", ".join(facts.languages)
    names = " and ".join(escape(each.name) for each in run.sets) if run is not None else ""
    limits = [
        f"Measured on {names}; how it does on other data isn't known." if names else "It was measured on nothing.",
        f"Languages: {escape(languages)} (as given by its owner)." if languages else f"Languages: {NOT_STATED}.",
    ]
    if model.takes_texts and model.max_length is not None:
        limits.append(f"Texts are cut after {count_text(model.max_length)} tokens: what stands behind isn't searched.")
    if model.takes_texts and model.takes_pictures:
        limits.append("A picture and a text may be compared; a score is no probability that one describes the other.")
    limits += [
        "Scores order documents for one query; a fixed threshold over all queries has not been tested.",
        "It repeats what its training data, and any model before it, prefer or leave out.",
        "It is not for decisions about people, and no filter of harmful content.",
    ]
    return ["## Limits", "\n".join(f"- {limit}" for limit in limits)]


def _license(facts: CardFacts) -> list[str]:
    base = facts.base if facts.run is None else facts.run.base
    pairs = [("This model", facts.license_id or NOT_STATED)]
    if base is None and facts.base_license is not None:
        pairs.append(("The model before it", facts.base_license))
    if base is not None and base.kind != "built-in":
        pairs.append((f"The model before it, {base.shown}", facts.base_license or NOT_STATED))
    data = facts.run.data if facts.run is not None else ()
    pairs += [(f"Its training data, {_plain(name)}", NOT_STATED) for label, name in data if label == "training"]
    return ["## Licences", _pairs(pairs, heads=("Of", "Licence"))]


def _environment(facts: CardFacts) -> list[str]:
    blocks = ["## Environment"]
    if facts.run is not None and facts.run.environment:
        blocks += ["Trained with:", _pairs(facts.run.environment)]
    if facts.versions:
        written = ", ".join(f"{escape(name)} {escape(version)}" for name, version in facts.versions)
        blocks.append(f"Written with {written}.")
    return blocks if len(blocks) > 1 else []


def _citations(run: RunFacts | None) -> list[str]:
    methods = [name for name in run.methods if name in CITATIONS] if run is not None else []
    if not methods:
        return []
    named = ", ".join(TITLES[name] for name in methods)
    papers = "\n\n".join(CITATIONS[name] for name in methods)
    return ["## Citation", f"The training used {named}:", code_block(papers, "bibtex")]


def _pairs(pairs: Iterable[tuple[str, str]], *, heads: Sequence[str] = ("Name", "Value")) -> str:
    body = [[escape(name), escape(clip(value, VALUE_CHARACTERS).short)] for name, value in pairs]
    return table(heads, body)
