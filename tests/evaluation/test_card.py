"""The card tells what is known, runs as it says, and can't be written into by what it tells of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from kit.pages import Page

from vembed.errors import ConfigError
from vembed.evaluation.card import LICENSES, check_languages, check_license, nearest_license, render_card
from vembed.evaluation.card_facts import (
    CardFacts,
    ModelFacts,
    gather_run,
    public_name,
    read_report,
    without_paths,
)
from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.results import EvaluationResult, write_evaluation
from vembed.pages.markdown import fenced

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.evaluation.card_facts import RunFacts


MODEL = ModelFacts(
    form="sentence-transformers", takes_texts=True, takes_pictures=False, dimension=32, max_length=256,
    similarity="cosine", prompts={"query": "find: ", "document": ""}, num_parameters=12_345, dtype="float32",
    described={"attention": "sdpa"}, recipe=None,
)  # fmt: skip


CONFIG: dict[str, object] = {
    "model_name": "example/tiny-bert", "data_path": "example/pairs:default",
    "test_data_path": "/home/alice/data/secret project/test.jsonl", "output_dir": "/home/alice/runs/first",
    "loss_type": "infonce", "temperature": 0.05, "learning_rate": 2e-5, "batch_size": 16, "seed": 7,
    "metric_for_best_model": "ndcg@10", "image_augmentation": "none", "max_steps": None, "epochs": 3,
}  # fmt: skip


PLAN = {"strategy": "single", "steps": 42, "global_batch_size": 64, "retain": 0.5, "dtype": "float32"}


HOSTILE = "</script><img src=x onerror=alert(1)> | ---\n---\nlicense: evil\n```\n[click](javascript:alert(1)) `x`"


def result(task: str, value: float, *, system: str = "model", num_queries: int = 20) -> EvaluationResult:
    rng = np.random.default_rng(3)
    values_MQ = np.clip(value + rng.normal(0, 0.05, (len(HEADLINE), num_queries)), 0, 1)
    per_query = {
        name: {f"q{number}": float(each) for number, each in enumerate(values_Q)}
        for name, values_Q in zip(HEADLINE, values_MQ, strict=True)
    }
    metrics = {name: float(np.mean(list(values.values()))) for name, values in per_query.items()}
    run = {query: [("d0", 1.0)] for query in per_query["ndcg@10"]}
    return EvaluationResult(task, system, metrics, per_query, run, num_queries, 50)


def write_run(folder: Path, *, task: str = "test.jsonl", config: dict[str, object] | None = None) -> Path:
    """Write what a run leaves, as far as a card reads it."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    write_evaluation(folder / "evaluation" / "baseline", result(task, 0.3))
    write_evaluation(folder / "evaluation" / "final", result(task, 0.6))
    write_evaluation(folder / "evaluation" / "bm25", result(task, 0.4, system="BM25"))
    write_evaluation(folder / "evaluation" / "step-0", result("dev", 0.35))
    write_evaluation(folder / "evaluation" / "step-8", result("dev", 0.7))
    write_evaluation(folder / "evaluation" / "step-16", result("dev", 0.65))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "BEST").write_text("step-00000008\n")
    (folder / "report").mkdir()
    facts = [["training records", "840"], ["training direction", "texts search texts"]]
    (folder / "report" / "report.json").write_text(
        json.dumps({"data_facts": facts, "environment": {"torch": "2.15.0", "device": "the CPU"}})
    )
    return folder


def gathered(folder: Path, config: dict[str, object] | None = None) -> RunFacts:
    data_facts, environment = read_report(folder)
    return gather_run(folder, config=config or CONFIG, data_facts=data_facts, environment=environment)


def card_of(folder: Path, **changes: Any) -> str:
    facts = CardFacts(title="first", folder="first", model=MODEL, run=gathered(folder), versions=(("vembed", "1"),))
    return render_card(replace(facts, **changes))


def metadata(card: str) -> dict[str, Any]:
    """Return the YAML block, as the hub cuts it out."""
    match = re.match(r"\s*---[\r\n]+([\S\s]*?)[\r\n]+---(\r\n|\n|$)", card)
    assert match is not None
    loaded: dict[str, Any] = yaml.safe_load(match.group(1))
    return loaded


def section(card: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", card, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, f"no section {title}"
    return found.group(1)


def test_the_hub_reads_licence_base_data_and_results(tmp_path: Path) -> None:
    text = card_of(write_run(tmp_path / "first"), license_id="apache-2.0", languages=("en", "de"))
    card = ModelCard(text)
    data = card.data
    assert (data.license, data.language, data.library_name) == ("apache-2.0", ["en", "de"], "sentence-transformers")
    assert (data.pipeline_tag, data.base_model) == ("sentence-similarity", "example/tiny-bert")
    assert data.datasets == ["example/pairs"]
    assert data.eval_results is not None
    found = {(each.dataset_name, each.metric_name): each.metric_value for each in data.eval_results}
    final = result("test.jsonl", 0.6).metrics
    assert found["test.jsonl (test set)", "nDCG@10"] == pytest.approx(final["ndcg@10"], abs=1e-6)
    assert found["dev (dev set)", "nDCG@10"] == pytest.approx(result("dev", 0.7).metrics["ndcg@10"], abs=1e-6)
    assert len(found) == 2 * len(HEADLINE)


def test_the_card_tells_data_settings_results_and_environment(tmp_path: Path) -> None:
    text = card_of(write_run(tmp_path / "first"))
    assert card_of(tmp_path / "first") == text
    training = section(text, "Training")
    for row in (
        "Training data | example/pairs:default", "Test data | test.jsonl (local)", "training records | 840",
        "training direction | texts search texts", "temperature | 0.05", "learning_rate | 2e-05",
        "global_batch_size | 64", "steps | 42", "seed | 7", "loss_type | infonce",
    ):  # fmt: skip
        assert f"| {row} |" in training
    assert "image_augmentation" not in training
    results = section(text, "Results")
    before, after, lexical = (result("x", value).metrics["ndcg@10"] for value in (0.3, 0.6, 0.4))
    (row,) = [line for line in results.splitlines() if line.startswith("| nDCG@10") and line.count("|") == 7]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert [*cells[:3], cells[4]] == [f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", f"{lexical:.3f}"]
    assert re.fullmatch(r"\+0\.\d+ to \+0\.\d+", cells[3])
    for kept, step in ((0.7, True), (0.65, False)):
        assert (f"{result('dev', kept).metrics['ndcg@10']:.3f}" in results) == step, "step 16 was not kept"
    assert "| torch | 2.15.0 |" in section(text, "Environment")
    assert "256 tokens" in section(text, "Limits")
    assert {"oord2018representation", "gao2021scaling"} <= set(re.findall(r"\{(\w+),", section(text, "Citation")))


def test_a_dev_set_that_also_gives_the_verdict_is_called_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "first", task="dev")
    run = gathered(folder, {**CONFIG, "test_data_path": None, "val_data_path": "dev.jsonl"})
    assert [(each.role, each.note.startswith("it also chose")) for each in run.sets] == [("dev set", True)]
    run = gathered(folder, {**CONFIG, "test_data_path": None, "eval_strategy": "no"})
    assert [(each.role, each.note) for each in run.sets] == [("dev set", "no checkpoint was chosen on it")]


def test_both_directions_are_told_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "first")
    write_evaluation(folder / "evaluation" / "baseline-reversed", result("test.jsonl reversed", 0.1))
    write_evaluation(folder / "evaluation" / "final-reversed", result("test.jsonl reversed", 0.2))
    assert [each.role for each in gathered(folder).sets] == ["test set", "test set, reversed", "dev set"]
    assert "### test.jsonl reversed (test set, reversed)" in card_of(folder)


def test_results_over_other_queries_stand_without_a_comparison_and_a_broken_one_is_noted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "first")
    (folder / "evaluation" / "bm25" / "per_query.json").write_text("{")
    text = card_of(folder)
    assert "bm25" in text
    assert "| BM25 |" not in text
    assert "Verdict: improved" in text
    write_evaluation(folder / "evaluation" / "baseline", result("test.jsonl", 0.3, num_queries=5))
    (verdict_set, *_) = gathered(folder).sets
    assert verdict_set.sentence == ""
    assert verdict_set.comparisons == {}
    assert all(verdict_set.baseline[name] for name in verdict_set.metrics)
    assert "Verdict: improved" not in section(card_of(folder), "Results").partition("### dev")[0]


def test_what_is_not_known_reads_not_stated_and_is_not_in_the_block(tmp_path: Path) -> None:
    text = card_of(write_run(tmp_path / "first"))
    assert not metadata(text).keys() & {"license", "license_name", "language"}
    assert section(text, "Licences").count("| not stated |") == 3
    bare = render_card(CardFacts(title="bare", folder="bare", model=MODEL))
    assert not metadata(bare).keys() & {"base_model", "datasets", "model-index", "license"}
    assert "## Citation" not in bare
    hub = render_card(CardFacts(title="bare", folder="bare", model=MODEL, base=public_name("example/model")))
    assert metadata(hub)["base_model"] == "example/model"
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "plan.json").write_text(json.dumps(PLAN))
    unmeasured = card_of(tmp_path / "killed")
    assert "model-index" not in metadata(unmeasured)
    assert "nothing was measured" in section(unmeasured, "Results")


def test_what_users_name_can_neither_be_markup_nor_end_the_block(tmp_path: Path) -> None:
    def prose(card: str) -> str:
        body = card.partition("\n---\n")[2]
        return re.sub(r"^(`{3,})\w*\n.*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)

    folder = write_run(tmp_path / "first", task=HOSTILE)
    config = {**CONFIG, "data_path": HOSTILE, "model_name": HOSTILE, "scheduler_type": HOSTILE}
    run = gather_run(folder, config=config, data_facts=[("note", HOSTILE)], environment={"device": HOSTILE})
    model = replace(MODEL, described={HOSTILE: HOSTILE}, prompts={"query": HOSTILE, "document": HOSTILE})
    text = render_card(
        CardFacts(
            title=HOSTILE, folder=HOSTILE, model=model, run=run, license_id=check_license(HOSTILE),
            base_license=HOSTILE, languages=("en",), versions=(("vembed", HOSTILE),),
        )
    )  # fmt: skip
    block = metadata(text)
    assert block["license"] == "other"
    assert "\n" not in block["model-index"][0]["name"]
    assert text.count("\n---\n") == 1, "the block has one end, and no line below is a rule"
    assert prose(text).count("```") == 0, "no code block is left open"
    assert Page(prose(text)).elements == []
    assert re.search(r"(?<!\\)\]\(", prose(text)) is None, "no link but ours"
    for line in prose(text).splitlines():
        if line.startswith("|"):
            assert re.sub(r"\\\|", "", line).count("|") in (3, 6, 7), line
    harmless = card_of(write_run(tmp_path / "other"))
    counts = [len(re.findall(r"^#", prose(card), flags=re.MULTILINE)) for card in (text, harmless)]
    assert counts[0] == counts[1], "no heading is added"


def test_a_hostile_folder_name_stays_a_literal_of_the_example() -> None:
    name = 'a"); import os; os.system("x'
    text = render_card(CardFacts(title="x", folder=f"{name}\n```", model=MODEL))
    code = re.findall(r"^(`{3,})python\n(.*?)^\1$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(code) == 2
    for _, program in code:
        compile(program, "example", "exec")
        assert "os.system" in program
        assert not re.search(r"^\s*import os", program, flags=re.MULTILINE)
    assert fenced("````").startswith("`````text")


def test_no_path_no_name_of_a_user_and_no_example_row_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "first", task="/home/alice/data/secret project/test.jsonl")
    notes = [
        ("note", "/home/alice/data/secret project/test.jsonl: 3 rows left out."),
        ("note", "C:\\Users\\alice\\rows.csv and ~/work/rows.csv and ../up/alice/x.tsv (see /srv/alice/y.json)"),
        ("note", "https://user:pw@example.org/alice/z.tar?token=abc was read."),
        ("note", "example/pairs: 4 rows left out."),
        ("example", "a patient's letter"),
    ]
    run = gather_run(folder, config=CONFIG, data_facts=notes, environment={"device": "cpu"})
    text = render_card(CardFacts(title="first", folder="first", model=MODEL, run=run))
    for leak in ("alice", "secret project", "/home", str(tmp_path), "token=", "pw@", "patient"):
        assert leak not in text, leak
    facts = " ".join(value for _, value in run.data_facts)
    for kept in ("test.jsonl: 3 rows", "rows.csv", "x.tsv", "y.json", "z.tar was read", "example/pairs: 4 rows"):
        assert kept in facts, kept


@pytest.mark.parametrize(
    ("given", "kind", "shown", "hub_id"),
    [
        ("example/set", "hub", "example/set", "example/set"),
        ("example/set:german", "hub", "example/set:german", "example/set"),
        ("/home/alice/model", "local", "model", None),
        ("runs/first/model", "local", "model", None),
        ("data/train.jsonl", "local", "train.jsonl", None),
        ("./a/b", "local", "b", None),
        ("bert", "local", "bert", None),
        ("builtin:shapes", "built-in", "builtin:shapes", None),
        ("open_clip:ViT-B-32:laion2b", "open_clip", "open_clip:ViT-B-32:laion2b", None),
        ("open_clip:ViT-B-32:/home/alice/w.safetensors", "open_clip", "open_clip:ViT-B-32:w.safetensors", None),
        ("open_clip:hf-hub:example/clip", "open_clip", "example/clip", "example/clip"),
        ("open_clip:local-dir:/home/alice/clip", "open_clip", "clip", None),
        ("flickr30k:/home/alice/flickr", "local", "flickr30k:flickr", None),
        ("C:\\Users\\alice\\rows.csv", "local", "rows.csv", None),
        ("https://user:pw@example.org/x/rows.jsonl?token=a", "local", "rows.jsonl", None),
        (f"{'a' * 300}/{'b' * 300}", "local", "b" * 300, None),
    ],
)
def test_what_a_name_shows(given: str, kind: str, shown: str, hub_id: str | None) -> None:
    name = public_name(given)
    assert (name.kind, name.shown, name.hub_id) == (kind, shown, hub_id)


def test_a_relative_folder_is_no_hub_id_wherever_the_card_is_written(tmp_path: Path) -> None:
    (tmp_path / "models" / "bert").mkdir(parents=True)
    assert public_name("models/bert").kind == "hub"
    assert public_name("models/bert", [tmp_path]).kind == "local"
    folder = write_run(tmp_path / "runs" / "first")
    config = {**CONFIG, "model_name": "models/bert", "output_dir": "runs/first"}
    assert gathered(folder, config).base.kind == "local"
    text = render_card(CardFacts(title="x", folder="x", model=MODEL, run=gathered(folder, config)))
    assert "base_model" not in metadata(text)


def test_paths_are_found_and_other_slashes_are_not() -> None:
    for text in ("stdlib-code/test: 3 rows", "recall and/or nDCG, 3 / 4", "example/set has 2 rows", "2026-01-01"):
        assert without_paths(text) == text
    assert without_paths("read /a/b c/d.txt.", known=["/a/b c/d.txt"]) == "read d.txt."
    assert without_paths("read /a b/c d.txt.", known=["/a b", "/a b/c d.txt"]) == "read c d.txt."
    for home in ("/home/alice", "/Users/alice", "C:\\Users\\alice"):
        assert "alice" not in without_paths(f"{home}, {home}/x.csv and {home}/models/y are there")
        assert public_name(home).shown == "unnamed"


def test_a_licence_is_spelt_as_the_hub_does_and_another_is_other_with_its_name() -> None:
    spelt = {"Apache 2.0": "apache-2.0", "MIT License": "mit", "cc_by_4.0": "cc-by-4.0", "our terms": "our terms"}
    assert {given: check_license(given) for given in spelt} == spelt
    block = metadata(render_card(CardFacts(title="x", folder="x", model=MODEL, license_id="Our Terms, 2nd edition")))
    assert (block["license"], block["license_name"]) == ("other", "our-terms-2nd-edition")
    assert (nearest_license("apache-2"), nearest_license("mit")) == ("apache-2.0", None)
    assert "apache-2.0" in LICENSES
    with pytest.raises(ConfigError, match="--license"):
        check_license("  ")


def test_languages_are_codes() -> None:
    assert check_languages(["en", "zh-Hans", "en"]) == ("en", "zh-Hans")
    with pytest.raises(ConfigError, match="english"):
        check_languages(["english"])


def test_hit_stands_only_where_it_tells_more_than_recall(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name, value in (("baseline", 0.3), ("final", 0.6)):
        one = result("test.jsonl", value)
        per_query = {**one.per_query, "hit@1": one.per_query["recall@1"]}
        metrics = {**one.metrics, "hit@1": one.metrics["recall@1"]}
        write_evaluation(folder / "evaluation" / name, replace(one, metrics=metrics, per_query=per_query))
    assert "hit@1" not in gathered(folder).sets[0].metrics
    several = replace(one, metrics={**metrics, "hit@1": 0.9}, per_query=per_query)  # several relevant documents
    write_evaluation(folder / "evaluation" / "final", several)
    assert "hit@1" in gathered(folder).sets[0].metrics
