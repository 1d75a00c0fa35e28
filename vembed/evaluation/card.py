"""The card of a model, the README.md that the Hugging Face hub shows: a YAML block for machines, Markdown for people.

`front_matter` writes the block, in the words that the hub searches by; `templates/card.md.jinja` and `usage.md.jinja`
hold the text. No text of a user can be markup or a second block: the block's values are one line of quoted YAML, and
the environment of the templates escapes everything else.
"""

from __future__ import annotations

import difflib
import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vembed.errors import ConfigError
from vembed.evaluation.card_facts import without_paths
from vembed.losses.registry import loss_section
from vembed.pages import html, markdown
from vembed.pages.page import Table
from vembed.pages.text import MINUS, capitalised, clip, count_text, metric_text, one_line, signed_text
from vembed.registry import LOSSES
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vembed.evaluation.card_facts import CardFacts, ModelFacts, PublicName, SetFacts

CARD_FILE = "README.md"
NOT_STATED = "not stated"
VALUE_CHARACTERS = 400
TOLD_ELSEWHERE = frozenset({"max_seq_length", "similarity", "query_prompt", "document_prompt"})
"""Facts of an encoder that the table of the model has a row for already."""

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

PAPERS = {
    "matryoshka": {
        "title": "Matryoshka representations",
        "bibtex": """@inproceedings{kusupati2022matryoshka,
  title     = {Matryoshka Representation Learning},
  author    = {Kusupati, Aditya and Bhatt, Gantavya and Rege, Aniket and Wallingford, Matthew and Sinha, Aditya and
               Ramanujan, Vivek and Howard-Snyder, William and Chen, Kaifeng and Kakade, Sham and Jain, Prateek and
               Farhadi, Ali},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022}
}""",
    },
    "gradient caching": {
        "title": "gradient caching",
        "bibtex": """@inproceedings{gao2021scaling,
  title     = {Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
  author    = {Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie},
  booktitle = {Proceedings of the 6th Workshop on Representation Learning for NLP (RepL4NLP-2021)},
  year      = {2021}
}""",
    },
    "lora": {
        "title": "LoRA",
        "bibtex": """@inproceedings{hu2022lora,
  title     = {{LoRA}: Low-Rank Adaptation of Large Language Models},
  author    = {Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and
               Wang, Shean and Wang, Lu and Chen, Weizhu},
  booktitle = {International Conference on Learning Representations},
  year      = {2022}
}""",
    },
}
"""Method -> its name in a sentence, and its paper as BibTeX; losses state their own."""


def render_card(facts: CardFacts) -> str:
    """Return the card; the same facts give the same text."""
    model, run = facts.model, facts.run
    sets = () if run is None else run.sets
    takes = {(True, True): "texts and pictures", (True, False): "texts"}.get(
        (model.takes_texts, model.takes_pictures), "pictures"
    )
    padding = {} if model.recipe is None else model.recipe.text_padding
    arguments = {**padding, "truncation": True, "max_length": model.max_length, "return_tensors": "pt"}
    written = (f"{key}={_literal(value) if isinstance(value, str) else value}" for key, value in arguments.items())
    methods = () if run is None else run.methods
    losses = {name: loss_section(name) for name in methods if name in LOSSES}
    papers = PAPERS | {name: {"title": loss.title, "bibtex": loss.citation} for name, loss in losses.items()}
    data_pairs = [] if run is None else [(f"{label} data".capitalize(), _shown(name)) for label, name in run.data]
    body = (
        markdown_environment()
        .get_template("card.md.jinja")
        .render(
            facts=facts,
            model=model,
            run=run,
            base=facts.base if run is None else run.base,
            takes=takes,
            characters=VALUE_CHARACTERS,
            literal=_literal,
            tokenizer_arguments=Markup(", ".join(written)),  # noqa: S704  # numbers and literals
            model_pairs=_model_pairs(model, takes),
            data_pairs=data_pairs if run is None else [*data_pairs, *run.data_facts],
            metrics_table=_metrics_table,
            has_intervals=any(one.comparisons for one in sets),
            licences=_licences(facts),
            papers=[papers[name] for name in methods if papers.get(name, {}).get("bibtex")],  # not all losses have one
        )
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
        return table(Table(("Name", "Value"), rows, text_columns=frozenset({0, 1})))

    # Autoescape is on as a second lock: it leaves alone what the finaliser returned, which is markup by then, and would
    # escape for HTML anything that came past it.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
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


def _literal(text: str) -> Markup:
    """Return a text as a literal on one line of Python, readable where every character can be seen."""
    if not text.isprintable():
        return Markup(ascii(text))  # noqa: S704  # it stands in a code block, which nothing in it can end
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return Markup(f'"{inner}"')  # noqa: S704  # as above


def _model_pairs(model: ModelFacts, takes: str) -> list[tuple[str, str]]:
    limit = "none" if model.max_length is None else f"{count_text(model.max_length)} tokens; longer texts are cut"
    return [
        ("Takes", takes),
        ("Dimensions", count_text(model.dimension)),
        ("Similarity", "cosine (vectors have unit length)" if model.similarity == "cosine" else "dot product"),
        *([("Longest text", limit)] if model.takes_texts else []),
        *((f"Prompt before each {side}", repr(prompt)) for side, prompt in model.prompts.items() if prompt),
        ("Parameters", count_text(model.num_parameters)),
        ("Weights", model.dtype),
        ("Files are for", model.form),
        *((key, without_paths(value)) for key, value in model.described.items() if key not in TOLD_ELSEWHERE),
    ]


def _shown(name: PublicName) -> str:
    return f"{name.shown} (local)" if name.kind == "local" else name.shown


def _metrics_table(measured: SetFacts) -> Table:
    """Return the metrics of a set before and after, with BM25 where it was measured."""
    rows = []
    for name in measured.metrics:
        comparison = measured.comparisons.get(name)
        if comparison is None:
            change = interval = "not compared"
        else:
            change = signed_text(comparison.difference)
            interval = f"{signed_text(comparison.low)} to {signed_text(comparison.high)}".replace("-", MINUS)
            if comparison.num_queries < 2:
                interval = "none with 1 query"
        before, after, bm25 = (
            metric_text(values.get(name)) for values in (measured.baseline, measured.final, measured.bm25)
        )
        rows.append([metric_name(name), before, after, change, interval, bm25])
    # A column of BM25 alone would be "n/a" on sets of pictures.
    width = 6 if any(name in measured.bm25 for name in measured.metrics) else 5
    heads = ["Metric", "Before", "After", "Change", "95% interval", "BM25"]
    return Table(heads[:width], [row[:width] for row in rows])


def _licences(facts: CardFacts) -> Table:
    base = facts.base if facts.run is None else facts.run.base
    rows = [("This model", facts.license_id or NOT_STATED)]
    if base is None and facts.base_license is not None:
        rows.append(("The model before it", facts.base_license))
    if base is not None and base.kind != "built-in":
        rows.append((f"The model before it, {base.shown}", facts.base_license or NOT_STATED))
    data = facts.run.data if facts.run is not None else ()
    rows += [(f"Its training data, {_shown(name)}", NOT_STATED) for label, name in data if label == "training"]
    cut = [(name, clip(value, VALUE_CHARACTERS).short) for name, value in rows]
    return Table(("Of", "Licence"), cut, text_columns=frozenset({0, 1}))


def front_matter(facts: CardFacts) -> str:
    """Return the block, from the first `---` to the last; unknown values are left out, and every text is one line."""
    model, run = facts.model, facts.run
    base = facts.base if run is None else run.base
    # "not stated" is for people: the hub takes an id that it knows, or none.
    license_id, license_name = None, None
    if facts.license_id is not None:
        license_id = one_line(facts.license_id)
        if license_id not in LICENSES:  # the hub wants "other", and a name of its letters beside it
            license_id, license_name = "other", re.sub(r"[^a-z0-9.+-]+", "-", license_id.lower()).strip("-") or "other"
    # The task under which the hub lists the model, and whose widget it shows.
    if not model.takes_texts:
        pipeline_tag = "image-feature-extraction"
    elif model.form in ("sentence-transformers", "pylate"):
        pipeline_tag = "sentence-similarity"
    else:
        pipeline_tag = "zero-shot-image-classification" if model.takes_pictures else "feature-extraction"
    tags = [model.form, pipeline_tag, "feature-extraction", "retrieval"]
    if model.takes_texts and model.takes_pictures:
        tags.append("multimodal")
    if run is not None:
        tags.append("contrastive-learning")
    trained_on = [name.hub_id for label, name in (run.data if run else ()) if label == "training" and name.hub_id]
    block = ModelCardData(
        language=[one_line(code) for code in facts.languages] or None,
        library_name="PyLate" if model.form == "pylate" else model.form,
        pipeline_tag=pipeline_tag,
        tags=[*tags, "vembed"],  # the hub's class drops doubles
        base_model=None if base is None else base.hub_id,
        datasets=list(dict.fromkeys(trained_on)) or None,
        license=license_id,
        license_name=license_name,
    )
    # Set by set: the hub's function takes one model's results on one set.
    results = [result for measured in (run.sets if run else ()) for result in _hub_results(measured)]
    if results:
        block["model-index"] = [{"name": one_line(facts.title), "results": results}]
    return f"---\n{block.to_yaml()}\n---\n"


def _hub_results(measured: SetFacts) -> list[dict[str, Any]]:
    """Return the measurements of one set as the hub writes them; given several sets it would mix them up."""

    def is_number(value: float | None) -> bool:
        return value is not None and math.isfinite(value)  # YAML's .nan is refused by the hub

    final, baseline = measured.final, measured.baseline
    results = [
        EvalResult(
            task_type="text-retrieval",
            task_name="Retrieval",
            dataset_type="unknown",
            dataset_name=f"{one_line(measured.name)} ({measured.role})",
            metric_type=name.replace("@", "_at_"),
            metric_name=metric_name(name),
            metric_value=round(final[name], 6),
            # The value before training, where no reader takes it for the model's.
            metric_args={"untrained": round(baseline[name], 6)} if is_number(baseline.get(name)) else None,
        )
        for name in measured.metrics
        if is_number(final[name])
    ]
    written: list[dict[str, Any]] = eval_results_to_model_index("", results)[0]["results"]
    return written


def metric_name(name: str) -> str:
    """Return a metric's name as it is printed, e.g. "nDCG@10"."""
    kind, at, k = name.partition("@")
    return f"{METRIC_NAMES.get(kind, kind)}{at}{k}"


def check_license(words: str) -> str:
    """Return a licence as the hub spells it ("MIT License" is mit); one that the hub doesn't know stays as it is.

    Raises:
        ConfigError: It is empty.
    """
    line = one_line(words)
    if not line:
        raise ConfigError("--license is empty; give an id such as apache-2.0, or leave it out")
    return _spelt(line) if _spelt(line) in LICENSES else line


def _spelt(words: str) -> str:
    """Return a licence in the hub's way of spelling."""
    plain = re.sub(r"\s+licen[sc]e$", "", words.lower())
    return re.sub(r"[\s_]+", "-", plain)


def nearest_license(words: str) -> str | None:
    """Return the licence id that a text which is none was probably meant to be, or None."""
    if words in LICENSES:
        return None
    close = difflib.get_close_matches(_spelt(words), LICENSES, n=1, cutoff=0.8)
    return close[0] if close else None


def check_languages(codes: list[str]) -> tuple[str, ...]:
    """Return codes of languages, each once.

    Raises:
        ConfigError: One is no code.
    """
    for code in codes:
        if not LANGUAGE.fullmatch(code):
            raise ConfigError(f"--language {code!r} is no code of a language; give ISO 639 codes such as en de zh")
    return tuple(dict.fromkeys(codes))
