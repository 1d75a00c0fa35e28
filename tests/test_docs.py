"""The documents are true: links resolve, commands parse, files that they name exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from vembed.config.load import load_config
from vembed.config.schema import Config
from vembed.entrypoints import train
from vembed.entrypoints.options import check, parse_action, parse_words
from vembed.losses.registry import loss_section
from vembed.registry import COMMANDS, LOSSES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs" / "hardware").glob("*.yaml")])


def commands_in(document: Path) -> list[list[str]]:
    """Return the commands of a document's bash blocks, word by word, comments dropped."""
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text("utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text("utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def places_in(document: Path) -> set[str]:
    """Return what a link may name behind # in a document: its headings, and the records of RESULTS.md."""
    text = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[\s-]+", "-", words) for words in plain} | set(re.findall(r'<a id="([\w-]+)">', text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_into_a_page_leads_to_a_heading_or_a_record(document: Path) -> None:
    for target, place in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text("utf-8")):
        page = document.parent / target if target else document
        if "://" not in target and page.suffix == ".md" and page.exists():
            assert place in places_in(page), f"{document.name} links to {target}#{place}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_one_that_the_program_takes(document: Path) -> None:
    for words in commands_in(document):
        if words[:2] == ["python", "run.py"]:
            options = check(train.OPTIONS, parse_words(train.OPTIONS, words[2:], program="run.py"))
            load_config(ROOT / options.path, options.config_override)
        elif words[0] == "vembed":
            assert words[1] in COMMANDS
            module = importlib.import_module(f"vembed.entrypoints.{words[1]}")
            if words[1] == "data":
                action, given = parse_action("", module.ACTIONS, words[2:], program="vembed data")
                check(module.ACTIONS[action][0], given)
            else:
                check(module.OPTIONS, parse_words(module.OPTIONS, words[2:], program=f"vembed {words[1]}"))
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
        elif words[:1] == ["python"]:
            assert words[1] == "-m" or (ROOT / words[1]).is_file(), words


def test_readme_has_the_two_commands_that_the_continuous_integration_runs() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    for name in ("install", "test"):
        assert f"<!-- {name} -->\n```bash\n" in readme
        assert f"command_of {name}" in script


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(config: Path) -> None:
    load_config(config)


def test_pages_for_developers_name_only_tests_that_exist() -> None:
    for document in ("coverage.md", "engine.md", "reliability.md"):
        text = (ROOT / "docs" / document).read_text("utf-8")
        named = re.findall(r"`((?:tests|vembed|configs)/[\w./-]+)`", text)
        assert named
        for path in named:
            assert (ROOT / path).exists(), f"{document} names {path}"


RECORD = re.compile(r'^\| (\d{4}-\d\d-\d\d) \| <a id="([\w-]+)"></a>(.+?) \| (.+?) \| (.+?) \| ([0-9a-f, ]*) \|$')
"""A row of benchmarks/RESULTS.md: its date, the name that links use, what was measured, result, command, commits."""


def test_every_record_has_a_date_a_name_of_its_own_a_command_and_a_commit() -> None:
    tables = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8").split("\n## ")[1:]
    names: list[str] = []
    for table in tables:
        rows = [line for line in table.splitlines() if line.startswith("| 2")]
        records = [RECORD.match(row) for row in rows]
        assert all(records), [row[:80] for row, record in zip(rows, records, strict=True) if record is None]
        dates = [record[1] for record in records if record]
        assert dates == sorted(dates, reverse=True), "newest first"
        names += [record[2] for record in records if record]
        for record in filter(None, records):
            for path in re.findall(r"\b((?:benchmarks|configs|tests)/[\w./-]+\.(?:py|yaml))", record[5]):
                assert (ROOT / path).is_file(), f"{record[2]} names {path}"
            assert all(re.fullmatch(r"[0-9a-f]{7}", commit) for commit in record[6].split(", ") if commit)
    assert len(names) == len(set(names)) > 50


def test_the_document_of_losses_says_what_each_loss_says_of_itself() -> None:
    text = " ".join((ROOT / "docs" / "losses.md").read_text("utf-8").split())
    assert len(LOSSES.names()) > 1
    for name in LOSSES.names():
        facts = loss_section(name)
        assert f"| `{name}` |" in text
        assert " ".join(facts.formula.split()) in text
        assert f"Source: {facts.source}." in text


def test_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rooms = {path.parent.name for path in (ROOT / "vembed").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `(\w+)/` \|", text, flags=re.MULTILINE))


def test_the_documented_keys_are_those_of_the_schema() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert all(f"`{key}`" in text for key in Config.model_fields)
