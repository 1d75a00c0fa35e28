"""Read what a training run left, and keep of it what a card tells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.errors import DataError, MachineError
from vembed.evaluation.card.facts import MetricFacts, RunFacts, SetFacts
from vembed.evaluation.card.names import PublicName, public_name, without_paths
from vembed.evaluation.judge import guard_verdict, mean_verdict, verdict
from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.results import METRICS_FILE, read_evaluation
from vembed.losses.registry import loss_section
from vembed.pages.text import value_text
from vembed.redact import redact
from vembed.registry import LOSSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.results import EvaluationResult

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
"""What the plan decided; it stands in place of a key of the same name."""

SHOWN_METRICS = (*HEADLINE, "recall@10", "hit@1", "hit@5", "hit@10")
FALLBACK_METRIC = "ndcg@10"


def gather_run(
    folder: Path,
    *,
    config: Mapping[str, object],
    data_facts: Sequence[tuple[str, str]],
    environment: Mapping[str, str],
) -> RunFacts:
    """Return what a card tells of a run.

    Args:
        config: Without secrets.
    """
    bases = _started_from(folder, config)
    paths = PATH_KEYS[1:] if config.get(TOWER_KEYS[0]) else PATH_KEYS  # model_name then holds two
    given = [*(str(config[key]) for key in paths if config.get(key)), *(path for _, path in _data_paths(config))]
    known = [*(each for each in given if public_name(each, bases).kind == "local"), str(folder.resolve())]
    plan = _read_object(folder / "plan.json")
    notes: list[str] = []
    sets = _sets(folder, config, notes)
    return RunFacts(
        name=redact(folder.resolve().name),
        base=_base(config, bases),
        data=_data(config, bases),
        data_facts=tuple((label, without_paths(value, known)) for label, value in data_facts if label != EXAMPLE_FACT),
        settings=tuple((key, without_paths(value, known)) for key, value in _settings(config, plan)),
        sets=tuple(replace(each, name=without_paths(each.name, known)) for each in sets),
        environment=tuple((key, without_paths(value, known)) for key, value in environment.items()),
        methods=_methods(config, plan),
        notes=tuple(without_paths(note, known) for note in notes),
    )


def read_report(folder: Path) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return the data facts and the environment that the report of a run holds; nothing where it has none."""
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


def _started_from(folder: Path, config: Mapping[str, object]) -> list[Path]:
    """Return the folder that a run was started in, where a relative output_dir tells: its paths are relative too."""
    given = Path(str(config.get("output_dir", "")))
    resolved = folder.resolve()
    if given.is_absolute() or not given.parts or resolved.parts[-len(given.parts) :] != given.parts:
        return []
    return [Path(*resolved.parts[: -len(given.parts)])]


def _base(config: Mapping[str, object], bases: Sequence[Path]) -> PublicName:
    """Return the model that a run started from; both where it joined two."""
    towers = [public_name(str(config[key]), bases).shown for key in TOWER_KEYS if config.get(key)]
    if towers:
        return PublicName("pair", " + ".join(towers))
    return public_name(str(config.get("model_name", "unnamed")), bases)


def _data(config: Mapping[str, object], bases: Sequence[Path]) -> tuple[tuple[str, PublicName], ...]:
    return tuple((label, public_name(path, bases)) for label, path in _data_paths(config))


def _data_paths(config: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return (what it is for, where it is) of all data of a run."""
    sources = config.get("data")
    found = [("training", str(source["path"])) for source in sources] if isinstance(sources, list) else []
    for label, key in DATA_KEYS:
        value = config.get(key)
        found += [(label, str(path)) for path in (value if isinstance(value, list) else [value] if value else [])]
    return found


def _settings(config: Mapping[str, object], plan: Mapping[str, object]) -> list[tuple[str, str]]:
    losses = [loss_section(name) for name in _loss_names(config) if name in LOSSES]
    of_losses = dict.fromkeys(key for loss in losses for key in loss.model_fields)
    keys = ("loss_type", "added_losses", *of_losses, *CONFIG_SETTINGS)
    found = {key: config.get(key) for key in keys if key != "epochs" or config.get("max_steps") is None}
    found |= {key: plan.get(key) for key in PLAN_SETTINGS}
    settings = [(key, value_text(key, value)) for key, value in found.items() if value not in OFF]
    stated = [pair for loss in losses for pair in (("loss formula", loss.formula), ("loss source", loss.source))]
    return [*settings, *(pair for pair in stated if pair[1])]


def _loss_names(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the run's losses; those of plugins that aren't imported have no facts."""
    added, sources = config.get("added_losses"), config.get("data")
    own = [source.get("loss") for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    shared = () if own and all(own) else (config.get("loss_type"), *(added if isinstance(added, dict) else ()))
    return tuple(dict.fromkeys(str(name) for name in (*shared, *filter(None, own))))


def _methods(config: Mapping[str, object], plan: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of the methods that a run used."""
    retain = plan.get("retain")
    keeps_part = plan.get("retain_tokens") is not None or (isinstance(retain, (int, float)) and retain < 1)
    used = {
        **dict.fromkeys(_loss_names(config), True),
        "matryoshka": bool(config.get("mrl_dims")),
        "gradient caching": keeps_part,
        "lora": config.get("use_lora") is True or "lora" in str(plan.get("strategy")),
    }
    return tuple(name for name, is_used in used.items() if is_used)


def _sets(folder: Path, config: Mapping[str, object], notes: list[str]) -> list[SetFacts]:
    """Return what was measured, the set of the verdict first; what can't be read is noted."""
    metric = str(config.get("metric_for_best_model") or FALLBACK_METRIC)
    report = _read_object(folder / "report" / "report.json")
    has_test = config.get("test_data_path") is not None or "test" in (report.get("data_hashes") or {})
    notes += [
        f"{row['trained_queries']:,} of {row['num_queries']:,} queries of {row['task']} were trained on with an answer."
        for row in report.get("sets") or ()
        if row.get("trained_queries")
    ]
    role = ("test set" if has_test else "dev set", "no checkpoint was chosen on it")
    if not has_test and config.get("eval_strategy") != "no":
        role = ("dev set", "it also chose the checkpoint, so that its numbers are a little high")
    turned = (f"{role[0]}, reversed", f"its documents search its queries; {role[1]}")
    names: list[tuple[str, str, str, tuple[str, str]]] = [
        ("baseline", "final", "bm25", role),
        ("baseline-reversed", "final-reversed", "", turned),
    ]
    further = _further_folders(folder)
    untouched = "no checkpoint was chosen on it"
    uses = {"test": ("test set", untouched), "guard": ("guard set", f"training should lose nothing on it; {untouched}")}
    names += [(f"{each}/baseline", f"{each}/final", "", uses[each.partition("-")[0]]) for each in further]
    step = _kept_step(folder)
    if has_test and step is not None:
        names.append(("step-0", step, "", ("dev set", "it chose the checkpoint")))
    sets, pairs = [], []
    for before, after, lexical, described in names:
        found = [_result(folder, name, notes) for name in (before, after, lexical)]
        if found[1] is not None:
            sets.append(_set_facts(found[0], found[1], found[2], metric, described))
        if described[0] == "test set" and found[0] is not None and found[1] is not None:
            pairs.append((found[0], found[1]))
    alike = [pair for pair in pairs if pair[1].deciding(metric) == pairs[0][1].deciding(metric)]
    if len(alike) > 1:
        notes.append(f"Over the test sets: {mean_verdict(alike, alike[0][1].deciding(metric)).sentence}.")
    if not any(each.role == role[0] for each in sets):
        notes.append("The run has no final evaluation: nothing was measured of this model.")
    return sets


def _further_folders(folder: Path) -> list[str]:
    """Return the folders of the other test sets and the guard sets, below `evaluation/`, in the order of the run."""
    found = [path.name for role in ("test", "guard") for path in (folder / "evaluation").glob(f"{role}-*")]
    numbered = [name for name in found if name.rpartition("-")[2].isdecimal()]
    return sorted(numbered, key=lambda name: int(name.rpartition("-")[2]))


def _kept_step(folder: Path) -> str | None:
    """Return the name of the evaluation of the checkpoint that was kept, None where the run doesn't say."""
    try:
        digits = (folder / "checkpoints" / "BEST").read_text("utf-8").strip().removeprefix("step-")
    except OSError:
        return None
    return f"step-{int(digits)}" if digits.isascii() and digits.isdigit() else None


def _result(folder: Path, name: str, notes: list[str]) -> EvaluationResult | None:
    path = folder / "evaluation" / name
    if not name or not (path / METRICS_FILE).is_file():
        return None
    try:
        return read_evaluation(path)
    except (DataError, MachineError, ValueError):
        notes.append(f"The evaluation {name} of the run can't be read.")
        return None


def _set_facts(
    baseline: EvaluationResult | None,
    final: EvaluationResult,
    bm25: EvaluationResult | None,
    metric: str,
    role: tuple[str, str],
) -> SetFacts:
    metric = final.deciding(metric)
    names = [name for name in dict.fromkeys((metric, *SHOWN_METRICS)) if _tells(name, final, baseline)]
    try:
        judged = {} if baseline is None else {name: verdict(baseline, final, name) for name in names}
    except (ValueError, KeyError):  # other queries than before: the numbers stand, their difference says nothing
        judged = {}
    rows = [
        MetricFacts(
            name=name,
            baseline=baseline.metrics.get(name) if baseline else None,
            final=final.metrics[name],
            bm25=bm25.metrics.get(name) if bm25 else None,
            comparison=judged[name].comparison if name in judged else None,
        )
        for name in names
    ]
    judge = guard_verdict if role[0] == "guard set" else verdict
    sentence = judge(baseline, final, metric).sentence if baseline is not None and metric in judged else ""
    return SetFacts(
        name=final.task,
        role=role[0],
        note=role[1],
        num_queries=final.num_queries,
        num_documents=final.num_documents,
        metrics=tuple(rows),
        sentence=sentence,
    )


def _tells(name: str, final: EvaluationResult, baseline: EvaluationResult | None) -> bool:
    """Return whether a metric is there, and says more than recall: with one relevant document hit@k is recall@k."""
    results = [result.metrics for result in (final, baseline) if result is not None]
    if name not in final.metrics or not name.startswith("hit@"):
        return name in final.metrics
    return any(metrics.get(name) != metrics.get(name.replace("hit", "recall")) for metrics in results)
