"""A card as a YAML block and Markdown. No text of a user can be markup or a second block: the template escapes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vembed.evaluation.card.citations import papers
from vembed.evaluation.card.front_matter import front_matter, metric_name
from vembed.evaluation.card.names import without_paths
from vembed.pages import html, markdown
from vembed.pages.page import Table
from vembed.pages.text import MINUS, capitalised, clip, count_text, metric_text, signed_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vembed.evaluation.card.facts import CardFacts, MetricFacts, ModelFacts, SetFacts
    from vembed.evaluation.card.names import PublicName

NOT_STATED = "not stated"
VALUE_CHARACTERS = 400
CARD_FILE = "README.md"
TOLD_ELSEWHERE = frozenset({"max_seq_length", "similarity", "query_prompt", "document_prompt"})


def render_card(facts: CardFacts) -> str:
    """Return the card; the same facts give the same text."""
    model, run = facts.model, facts.run
    template = markdown_environment().get_template("card.md.jinja")
    body = template.render(
        facts=facts,
        model=model,
        run=run,
        base=facts.base if run is None else run.base,
        takes=_takes(model),
        characters=VALUE_CHARACTERS,
        literal=_literal,
        tokenizer_arguments=_tokenizer_arguments(model),
        model_pairs=_model_pairs(model),
        data_pairs=[] if run is None else [*_data_pairs(run.data), *run.data_facts],
        metrics_table=_metrics_table,
        has_intervals=run is not None and any(metric.comparison for each in run.sets for metric in each.metrics),
        licences=_licences(facts),
        papers=[] if run is None else papers(run.methods),
    )
    return f"{front_matter(facts)}\n{body}"


@cache
def markdown_environment() -> Environment:
    """Return the environment of the card's templates; its finaliser escapes every text before autoescape sees it."""

    def escaped(text: str) -> Markup:
        return text if isinstance(text, Markup) else Markup(markdown.escape(text))  # noqa: S704  # escaped for Markdown

    def fenced(text: str, language: str = "text") -> Markup:
        return Markup(markdown.fenced(text, language))  # noqa: S704  # nothing ends the block before its fence

    def table(shown: Table) -> Markup:
        return Markup(markdown.markdown_table(shown))  # noqa: S704  # its cells are escaped

    def pairs_table(pairs: Iterable[tuple[str, str]], characters: int = markdown.CELL_CHARACTERS) -> Markup:
        rows = [(name, clip(value, characters).short) for name, value in pairs]
        return table(Table(("Name", "Value"), rows, words=frozenset({0, 1})))

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: escaped(html.finalize(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    filters = (capitalised, clip, count_text, fenced)
    environment.filters |= {function.__name__: function for function in filters}
    environment.globals |= {"plural": plural, "table": table, "pairs_table": pairs_table}
    return environment


def _takes(model: ModelFacts) -> str:
    if model.takes_texts and model.takes_pictures:
        return "texts and pictures"
    return "texts" if model.takes_texts else "pictures"


def _literal(text: str) -> Markup:
    """Return a text as a literal on one line of Python, readable where every character can be seen."""
    if not text.isprintable():
        return Markup(ascii(text))  # noqa: S704  # it stands in a code block, which nothing in it can end
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return Markup(f'"{inner}"')  # noqa: S704  # as above


def _tokenizer_arguments(model: ModelFacts) -> Markup:
    padding = {} if model.recipe is None else model.recipe.text_padding
    arguments = {**padding, "truncation": True, "max_length": model.max_length, "return_tensors": "pt"}
    written = (f"{key}={_literal(value) if isinstance(value, str) else value}" for key, value in arguments.items())
    return Markup(", ".join(written))  # noqa: S704  # numbers and literals


def _model_pairs(model: ModelFacts) -> list[tuple[str, str]]:
    limit = "none" if model.max_length is None else f"{count_text(model.max_length)} tokens; longer texts are cut"
    return [
        ("Takes", _takes(model)),
        ("Dimensions", count_text(model.dimension)),
        ("Similarity", "cosine (vectors have unit length)" if model.similarity == "cosine" else "dot product"),
        *([("Longest text", limit)] if model.takes_texts else []),
        *((f"Prompt before each {side}", repr(prompt)) for side, prompt in model.prompts.items() if prompt),
        ("Parameters", count_text(model.num_parameters)),
        ("Weights", model.dtype),
        ("Files are for", model.form),
        *((key, without_paths(value)) for key, value in model.described.items() if key not in TOLD_ELSEWHERE),
    ]


def _data_pairs(data: Sequence[tuple[str, PublicName]]) -> list[tuple[str, str]]:
    return [(f"{label} data".capitalize(), _plain(name)) for label, name in data]


def _plain(name: PublicName) -> str:
    return f"{name.shown} (local)" if name.kind == "local" else name.shown


def _metrics_table(each: SetFacts) -> Table:
    """Return the metrics of a set before and after, with BM25 where it was measured."""
    width = 6 if any(metric.bm25 is not None for metric in each.metrics) else 5
    heads = ["Metric", "Before", "After", "Change", "95% interval", "BM25"]
    return Table(heads[:width], [_metric_cells(metric)[:width] for metric in each.metrics])


def _metric_cells(metric: MetricFacts) -> list[str]:
    found = metric.comparison
    if found is None:
        change = interval = "not compared"
    else:
        change, interval = signed_text(found.difference), f"{signed_text(found.low)} to {signed_text(found.high)}"
        interval = "none with 1 query" if found.num_queries < 2 else interval.replace("-", MINUS)
    values = (metric.baseline, metric.final, metric.bm25)
    before, after, bm25 = (metric_text(value) for value in values)
    return [metric_name(metric.name), before, after, change, interval, bm25]


def _licences(facts: CardFacts) -> Table:
    base = facts.base if facts.run is None else facts.run.base
    rows = [("This model", facts.license_id or NOT_STATED)]
    if base is None and facts.base_license is not None:
        rows.append(("The model before it", facts.base_license))
    if base is not None and base.kind != "built-in":
        rows.append((f"The model before it, {base.shown}", facts.base_license or NOT_STATED))
    data = facts.run.data if facts.run is not None else ()
    rows += [(f"Its training data, {_plain(name)}", NOT_STATED) for label, name in data if label == "training"]
    cut = [(name, clip(value, VALUE_CHARACTERS).short) for name, value in rows]
    return Table(("Of", "Licence"), cut, words=frozenset({0, 1}))
