"""Facts of a model's card as plain data: the encoder, the run that trained it, and what may be said of them in public.

A card may name hub ids and the last parts of paths, never a whole path, an address or a user's name: `public_name` and
`without_paths` see to it. `gather_run` reads what a training run left in its folder; nothing is measured here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import vembed
from vembed.errors import DataError, MachineError
from vembed.evaluation.judge import compare, guard_verdict, mean_verdict, verdict
from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.results import METRICS_FILE, read_evaluation
from vembed.losses.registry import loss_section
from vembed.pages.text import value_text
from vembed.redact import redact
from vembed.registry import LOSSES, plugin_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vembed.batch import Side
    from vembed.evaluation.judge import Comparison
    from vembed.evaluation.results import EvaluationResult
    from vembed.models.encoder import Encoder, Similarity
    from vembed.models.exportable import Form, Recipe

Kind: TypeAlias = Literal["hub", "built-in", "open_clip", "local", "pair"]

DATA_KEYS = (
    ("training", "data_path"),
    ("dev", "val_data_path"),
    ("test", "test_data_path"),
    ("guard", "guard_data"),
)
EXAMPLE_FACT = "example"
"""The fact of a report that quotes a row of the training data, which stays with the run."""

TOWER_KEYS = ("text_model_name", "image_model_name")
PATH_KEYS = ("model_name", *TOWER_KEYS, "image_root", "output_dir")

CONFIG_SETTINGS = (
    *("batch_size", "epochs", "learning_rate", "scheduler_type", "weight_decay", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "max_grad_norm", "trainable", "use_lora", "image_augmentation", "image_flip"),
    *("gradient_checkpointing", "drop_last", "seed"),
)
"""Keys of the configuration that a card tells beside those of the loss, where a run has them."""

OFF: tuple[object, ...] = (None, "none", "auto", [], {})
"""Values of a setting that did nothing or stand for what the plan decided."""

PLAN_SETTINGS = ("strategy", "world_size", "global_batch_size", "steps", "warmup_steps", "dtype")
"""Decisions of the plan; each stands in place of a key of the same name."""

SHOWN_METRICS = (*HEADLINE, "recall@10", "hit@1", "hit@5", "hit@10")
FALLBACK_METRIC = "ndcg@10"

HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:[\w.-]+)?", re.ASCII)
MOST_CHARACTERS = 200  # no hub id is longer

FILE_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".tsv", ".parquet", ".tar", ".txt", ".gz", ".zst"})
"""Ends of a file of rows: a relative path of two parts is no hub id then."""

# A form before a path (sop:PATH), which no address is: these have // behind the colon.
_PREFIX = re.compile(r"(?P<prefix>[a-z][a-z0-9_]+):(?!//)(?P<rest>.+)", re.DOTALL)
# An absolute or dotted path of Unix or Windows inside a sentence; "/" between two words is none.
_PATH = re.compile(r"(?<![\w./\\])(?:~\w*|\.{1,2}|[A-Za-z]:)?[/\\](?![/\\\s])[^\s\"'<>|,;()\[\]]*")
_HOME = re.compile(r"(?:[A-Za-z]:)?[/\\](?:home|Users)[/\\][^/\\\s\"'<>|,;()\[\]]+")
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>]*", re.IGNORECASE)
# Where an encoder read a fact of its own, e.g. " (config.json)": another file once the model was written again.
_SOURCE = re.compile(r" \([^()]*\)$")


@dataclass(frozen=True, slots=True)
class PublicName:
    """The name of a model or a data set in public."""

    kind: Kind
    shown: str  # without the path that leads to it
    hub_id: str | None = None  # owner/name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """An encoder as its card describes it."""

    form: Form  # the library that its folder is written for
    takes_texts: bool
    takes_pictures: bool
    dimension: int
    max_length: int | None  # longest text in tokens
    similarity: Similarity
    prompts: Mapping[Side, str]
    num_parameters: int
    dtype: str  # of the stored weights
    described: Mapping[str, str]  # its own facts, by label
    recipe: Recipe | None  # None where transformers alone takes more than a few lines
    multi_vector: bool = False  # several vectors for each row
    plugin: str = ""  # module that registers the encoder's class; empty for ours


@dataclass(frozen=True, slots=True)
class SetFacts:
    """Measurements on one set. What wasn't measured is not in its mapping."""

    name: str
    role: str  # e.g. "test set"
    note: str  # what it was used for
    num_queries: int  # with judgements
    num_documents: int
    metrics: tuple[str, ...]  # names of those to show, the metric of the verdict first
    baseline: Mapping[str, float]  # before training, by metric
    final: Mapping[str, float]  # the model of the card
    bm25: Mapping[str, float]
    comparisons: Mapping[str, Comparison]  # final against baseline
    sentence: str = ""  # the verdict

    @property
    def forgets(self) -> bool:
        """True where the model lost on it what it was to keep."""
        return self.sentence.startswith("forgets")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A training run as a card describes it. Texts hold no paths and no secrets; they aren't escaped."""

    name: str
    base: PublicName  # the model that training started from
    data: tuple[tuple[str, PublicName], ...]  # "training", "dev" or "test", and the set
    data_facts: tuple[tuple[str, str], ...]  # counts, directions, what was left out
    settings: tuple[tuple[str, str], ...]
    sets: tuple[SetFacts, ...]  # the verdict's first
    environment: tuple[tuple[str, str], ...]  # versions and machine
    methods: tuple[str, ...]  # for the citations
    notes: tuple[str, ...]  # what a reader must know of the run, one sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """All facts of a card; licences and languages are as the model's owner gave them."""

    title: str
    folder: str  # name of the model's folder
    model: ModelFacts
    run: RunFacts | None = None
    base: PublicName | None = None  # what the model was made from where no run is known
    license_id: str | None = None
    base_license: str | None = None
    languages: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()  # packages that wrote the folder


def public_name(given: str, bases: Iterable[Path] = ()) -> PublicName:
    """Return the public name of a model or a data set that a user named.

    Args:
        given: A hub id, a path, `builtin:NAME`, `open_clip:NAME`, or a form and a path, e.g. `sop:PATH`.
        bases: Folders that a relative path may start from, beside the present one: a path that exists is no hub id.
    """
    prefixed = _PREFIX.fullmatch(given)
    if prefixed is not None and prefixed["prefix"] == "builtin":
        return PublicName("built-in", given)
    if prefixed is not None and prefixed["prefix"] == "open_clip":
        name, _, tag = prefixed["rest"].partition(":")
        if name in ("hf-hub", "local-dir"):
            weights = public_name(tag, bases)
            return PublicName("open_clip", weights.shown, weights.hub_id if name == "hf-hub" else None)
        return PublicName("open_clip", f"open_clip:{name}" + (f":{last_part(tag)}" if tag else ""))
    if prefixed is not None and len(prefixed["prefix"]) > 1:
        return PublicName("local", f"{prefixed['prefix']}:{last_part(prefixed['rest'])}")
    # `owner/name` may be a relative path as well: one that exists, or ends as a file of rows does, stays local.
    match = HUB_ID.fullmatch(given) if len(given) <= MOST_CHARACTERS else None
    if match is None or Path(given).suffix.lower() in FILE_SUFFIXES:
        return PublicName("local", last_part(given))
    if any(Path(base, given).exists() for base in (Path(), *bases)):
        return PublicName("local", last_part(given))
    return PublicName("hub", given, match["name"])


def last_part(path: str) -> str:
    """Return the last part of a path or an address of any system; a home folder, named after its user, has none."""
    parts = re.split(r"[/\\]+", _HOME.sub("~", path.split("?")[0]))
    named = [part for part in parts if part not in ("", ".", "..", "~")]
    return named[-1] if named else "unnamed"


def without_paths(text: str, known: Iterable[str] = ()) -> str:
    """Return a text in which the last part stands for every path and every address.

    Args:
        known: Paths that the run was given: they are found even where they hold spaces.
    """
    # The longest first: a folder of the run may be the start of another's path.
    for path in sorted({path for path in known if "/" in path or "\\" in path}, key=len, reverse=True):
        text = text.replace(path, last_part(path))
    text = _ADDRESS.sub(lambda match: last_part(match.group()), text)
    text = _HOME.sub("~", text)
    return _PATH.sub(lambda match: last_part(match.group()), text)


def written_with() -> tuple[tuple[str, str], ...]:
    """Return (package, version) of what writes a model's folder."""
    others = ("transformers", "torch", "safetensors")
    return (("vembed", vembed.__version__), *((package, version(package)) for package in others))


def model_facts(encoder: Encoder, form: Form) -> ModelFacts:
    """Return the facts of an encoder whose weights are in the type that is stored."""
    parameters = list(encoder.parameters())
    return ModelFacts(
        form=form,
        takes_texts="text" in encoder.modalities,
        takes_pictures="image" in encoder.modalities,
        dimension=encoder.dimension,
        max_length=encoder.max_length,
        similarity=encoder.similarity,
        prompts={side: redact(prompt) for side, prompt in encoder.prompts.items()},
        num_parameters=sum(parameter.numel() for parameter in parameters),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        described={label: redact(_SOURCE.sub("", value)) for label, value in encoder.facts().items()},
        recipe=encoder.recipe(),
        multi_vector=encoder.multi_vector,
        plugin=plugin_of(encoder),
    )


def gather_run(
    folder: Path,
    *,
    config: Mapping[str, object],
    data_facts: Sequence[tuple[str, str]],
    environment: Mapping[str, str],
) -> RunFacts:
    """Return the facts of a run.

    Args:
        config: Without secrets.
    """
    resolved = folder.resolve()
    # Where a relative output_dir is the end of the folder's path, the rest is the folder that the run was started in:
    # its other relative paths begin there.
    output_dir = Path(str(config.get("output_dir", "")))
    depth = len(output_dir.parts)
    bases = []
    if depth and not output_dir.is_absolute() and resolved.parts[-depth:] == output_dir.parts:
        bases = [Path(*resolved.parts[:-depth])]
    # (use, path) of all data; the sources of mixed training data stand before the other sets.
    sources = config.get("data")
    data_paths = [("training", str(source["path"])) for source in sources] if isinstance(sources, list) else []
    for label, key in DATA_KEYS:
        value = config.get(key)
        data_paths += [(label, str(path)) for path in (value if isinstance(value, list) else [value] if value else [])]
    towers = [public_name(str(config[key]), bases).shown for key in TOWER_KEYS if config.get(key)]
    if towers:  # two models joined, which model_name then names in one word
        base = PublicName("pair", " + ".join(towers))
    else:
        base = public_name(str(config.get("model_name", "unnamed")), bases)
    path_keys = PATH_KEYS[1:] if config.get(TOWER_KEYS[0]) else PATH_KEYS
    named = [*(str(config[key]) for key in path_keys if config.get(key)), *(path for _, path in data_paths)]
    known = [*(name for name in named if public_name(name, bases).kind == "local"), str(resolved)]
    plan = _read_object(folder / "plan.json")
    retain = plan.get("retain")
    methods = {
        **dict.fromkeys(losses_of_run(config), True),
        "matryoshka": bool(config.get("mrl_dims")),
        # Only where some rows are encoded twice; with all graphs kept the method does nothing.
        "gradient caching": plan.get("retain_tokens") is not None or (isinstance(retain, (int, float)) and retain < 1),
        "lora": config.get("use_lora") is True or "lora" in str(plan.get("strategy")),
    }
    sets, notes = _measured_sets(folder, config)

    def public(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple((label, without_paths(value, known)) for label, value in pairs)

    return RunFacts(
        name=redact(resolved.name),
        base=base,
        data=tuple((label, public_name(path, bases)) for label, path in data_paths),
        data_facts=public(pair for pair in data_facts if pair[0] != EXAMPLE_FACT),
        settings=public(_settings(config, plan)),
        sets=tuple(replace(one, name=without_paths(one.name, known)) for one in sets),
        environment=public(environment.items()),
        methods=tuple(name for name, is_used in methods.items() if is_used),
        notes=tuple(without_paths(note, known) for note in notes),
    )


def read_report(folder: Path) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return the data facts and the environment of a run's report, both empty where there is none."""
    report = _read_object(folder / "report" / "report.json")
    facts, environment = report.get("data_facts"), report.get("environment")
    pairs = [(str(pair[0]), str(pair[1])) for pair in facts if len(pair) == 2] if isinstance(facts, list) else []
    versions = {str(key): str(value) for key, value in environment.items()} if isinstance(environment, dict) else {}
    return pairs, versions


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object of a run, an empty one where there is none."""
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    return loaded if isinstance(loaded, dict) else {}


def _settings(config: Mapping[str, object], plan: Mapping[str, object]) -> list[tuple[str, str]]:
    losses = [loss_section(name) for name in losses_of_run(config) if name in LOSSES]
    loss_keys = dict.fromkeys(key for loss in losses for key in loss.model_fields)
    keys = ("loss_type", "added_losses", *loss_keys, *CONFIG_SETTINGS)
    # With max_steps the key epochs did nothing.
    values = {key: config.get(key) for key in keys if key != "epochs" or config.get("max_steps") is None}
    values |= {key: plan.get(key) for key in PLAN_SETTINGS}
    settings = [(key, value_text(key, value)) for key, value in values.items() if value not in OFF]
    stated = [pair for loss in losses for pair in (("loss formula", loss.formula), ("loss source", loss.source))]
    return [*settings, *(pair for pair in stated if pair[1])]


def losses_of_run(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the run's losses, those of plugins that aren't imported too.

    The loss of the configuration has a part only where some source names none of its own.
    """
    added, sources = config.get("added_losses"), config.get("data")
    listed = sources if isinstance(sources, list) else []
    of_sources = [source.get("loss") for source in listed if isinstance(source, dict)]
    shared: tuple[object, ...] = (config.get("loss_type"), *(added if isinstance(added, dict) else ()))
    if of_sources and all(of_sources):
        shared = ()
    return tuple(dict.fromkeys(str(name) for name in (*shared, *filter(None, of_sources))))


def _measured_sets(folder: Path, config: Mapping[str, object]) -> tuple[list[SetFacts], list[str]]:
    """Return the measurements of a run, the set of the verdict first, and notes for the card.

    The notes tell of queries that were trained on, of the mean over test sets and of evaluations that can't be read.
    """
    metric = str(config.get("metric_for_best_model") or FALLBACK_METRIC)
    report = _read_object(folder / "report" / "report.json")
    has_test = config.get("test_data_path") is not None or "test" in (report.get("data_hashes") or {})
    notes = [
        f"{row['trained_queries']:,} of {row['num_queries']:,} queries of {row['task']} were trained on with an answer."
        for row in report.get("sets") or ()
        if row.get("trained_queries")
    ]
    untouched = "no checkpoint was chosen on it"
    role, use = "test set" if has_test else "dev set", untouched
    if not has_test and config.get("eval_strategy") != "no":
        use = "it also chose the checkpoint, so that its numbers are a little high"
    # Folders below evaluation/ (before training, after it, BM25), the role of the set, and its use.
    folders = [
        ("baseline", "final", "bm25", role, use),
        ("baseline-reversed", "final-reversed", "", f"{role}, reversed", f"its documents search its queries; {use}"),
    ]
    # The other test sets and the guard sets, test-1, guard-2 and so on, are numbered in the order of the run.
    others = [path.name for kind in ("test", "guard") for path in (folder / "evaluation").glob(f"{kind}-*")]
    numbered = [name for name in others if name.rpartition("-")[2].isdecimal()]
    for name in sorted(numbered, key=lambda name: int(name.rpartition("-")[2])):
        keeps = "training should lose nothing on it; " if name.startswith("guard") else ""
        folders.append((f"{name}/baseline", f"{name}/final", "", f"{name.partition('-')[0]} set", keeps + untouched))
    if has_test and (kept := _kept_evaluation(folder)) is not None:
        folders.append(("step-0", kept, "", "dev set", "it chose the checkpoint"))

    def read(name: str) -> EvaluationResult | None:
        path = folder / "evaluation" / name
        if not name or not (path / METRICS_FILE).is_file():
            return None
        try:
            return read_evaluation(path)
        except (DataError, MachineError, ValueError):
            notes.append(f"The evaluation {name} of the run can't be read.")
            return None

    sets, test_pairs = [], []
    for before, after, lexical, set_role, set_use in folders:
        baseline, final, bm25 = read(before), read(after), read(lexical)
        if final is not None:
            sets.append(_set_facts(baseline, final, bm25, metric, set_role, set_use))
        if set_role == "test set" and baseline is not None and final is not None:
            test_pairs.append((baseline, final))
    alike = [pair for pair in test_pairs if pair[1].deciding(metric) == test_pairs[0][1].deciding(metric)]
    if len(alike) > 1:
        notes.append(f"Over the test sets: {mean_verdict(alike, alike[0][1].deciding(metric)).sentence}.")
    if not any(one.role == role for one in sets):
        notes.append("The run has no final evaluation: nothing was measured of this model.")
    return sets, notes


def _kept_evaluation(folder: Path) -> str | None:
    """Return the name of the evaluation of the checkpoint that was kept, None where the run doesn't tell."""
    try:
        digits = (folder / "checkpoints" / "BEST").read_text("utf-8").strip().removeprefix("step-")
    except OSError:
        return None
    return f"step-{int(digits)}" if digits.isascii() and digits.isdigit() else None


def _set_facts(
    baseline: EvaluationResult | None,
    final: EvaluationResult,
    bm25: EvaluationResult | None,
    metric: str,
    role: str,
    use: str,
) -> SetFacts:
    metric = final.deciding(metric)
    measured = [result.metrics for result in (final, baseline) if result is not None]
    names = []
    for name in dict.fromkeys((metric, *SHOWN_METRICS)):
        # With one relevant document for each query hit@k is recall@k, and says nothing more.
        recall = name.replace("hit", "recall") if name.startswith("hit@") else ""
        if name in final.metrics and (not recall or any(one.get(name) != one.get(recall) for one in measured)):
            names.append(name)
    comparisons, sentence = {}, ""
    if baseline is not None:
        try:
            comparisons = {name: compare(baseline, final, name) for name in names}
            judge = guard_verdict if role == "guard set" else verdict
            sentence = judge(baseline, final, metric).sentence if metric in names else ""
        except (ValueError, KeyError):  # other queries than before: the numbers stand, their difference says nothing
            comparisons = {}
    return SetFacts(
        name=final.task,
        role=role,
        note=use,
        num_queries=final.num_queries,
        num_documents=final.num_documents,
        metrics=tuple(names),
        baseline=baseline.metrics if baseline else {},
        final=final.metrics,
        bm25=bm25.metrics if bm25 else {},
        comparisons=comparisons,
        sentence=sentence,
    )
