"""The reference equals the schema, every key is read by the program, and loading is light."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import vembed
from vembed.config.load import load_config
from vembed.config.names import ALIASES
from vembed.config.reference import key_facts, page_of, render_pages, render_reference
from vembed.config.schema import SECTIONS, config_class, fields, key_names, rules, section_keys
from vembed.data.columns import COLUMNS
from vembed.data.keys import ColumnName
from vembed.registry import LOSSES
from vembed.text import one_of

ROOT = Path(vembed.__file__).parents[1]
CONFIG_NAMES = {"config", "cfg", "keys"}


def test_the_checked_in_reference_is_what_the_schema_says() -> None:
    pages = render_pages()
    for path, text in pages.items():
        assert (ROOT / "docs" / path).read_text(encoding="utf-8") == text, f"{path}: run `make docs`"
    written = {f"reference/{path.name}" for path in (ROOT / "docs" / "reference").glob("keys-*.md")}
    assert written == {path for path in pages if path.startswith("reference/keys-")}


def test_the_module_writes_the_reference(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "vembed.config.reference", str(tmp_path)], check=True, cwd=ROOT)
    written = {path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.md")}
    assert written == render_pages()


def test_the_front_page_has_a_line_for_each_key_that_leads_to_its_place() -> None:
    pages = render_pages()
    rows = re.findall(r"^\| \[`(\w+)`\]\(([\w/-]+\.md)#(\w+)\) \| (.+) \| (.+) \|$", render_reference(), re.MULTILINE)
    assert [row[0] for row in rows] == list(key_names())
    for name, page, anchor, _, _ in rows:
        assert anchor == name
        assert f"\n## `{name}`\n" in pages[page]


def test_the_reference_has_the_values_default_and_meaning_of_each_key() -> None:
    pages = render_pages()
    for title in SECTIONS:
        page = pages[page_of(title)]
        keys = re.split(r"^## `(\w+)`\n", page, flags=re.MULTILINE)[1:]
        assert keys[::2] == list(section_keys(title))
        for name, text in zip(keys[::2], keys[1::2], strict=True):
            meaning, _, table = text.strip().partition("\n\n| Values | Default |")
            assert meaning.endswith(".")
            row = [cell.strip() for cell in re.split(r"(?<!\\)\|", table.splitlines()[2])[1:-1]]
            facts = key_facts(name)
            assert row == [facts[label].replace("|", "\\|") for label in facts if label != "Meaning" and facts[label]]
            assert row[0]
            assert row[1]


def test_each_rule_is_told_with_a_key() -> None:
    text = "\n".join(render_pages().values())
    for rule in rules():
        told = f"- {rule.sentence}" in text
        assert told or f"`{rule.keys[0]}` has an effect only with `loss_type: " in rule.sentence


def test_losses_that_a_key_acts_with_are_told_by_exception_where_they_are_most() -> None:
    page = render_pages()[page_of("Loss")]
    acting = {name for name in LOSSES.names() if re.search(rf"\b{name}\b", key_facts("mrl_dims")["Meaning"])}
    others = [name for name in LOSSES.names() if name not in acting]
    assert 0 < len(others) < len(acting)
    assert f"Not with loss_type {one_of(others)}." in page.partition("## `mrl_dims`")[2].partition("\n## ")[0]


def test_the_page_of_other_names_has_every_alias() -> None:
    aliases = render_pages()["reference/other_names.md"].partition("\n## Aliases\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", aliases, re.MULTILINE) == list(ALIASES)


def test_the_example_of_the_reference_loads(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", render_reference(), flags=re.DOTALL)
    path = tmp_path / "a.yaml"
    path.write_text(example)
    assert load_config(path).config.learning_rate == 1e-4


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    assert load_config(path).config.model_name


def test_the_published_clip_settings_are_shipped_unchanged() -> None:
    config = load_config(ROOT / "configs" / "clip_ddp.yaml").config
    assert (config.batch_size, config.learning_rate, config.epochs, config.loss_type) == (128, 1e-4, 3, "infonce")
    assert config.model_name == "openai/clip-vit-base-patch32"


@pytest.mark.slow
def test_the_published_clip_settings_alone_pass_validation(tmp_path: Path) -> None:
    path = tmp_path / "clip.yaml"
    path.write_text(
        "model_name: openai/clip-vit-base-patch32\nbatch_size: 128\nlearning_rate: 1e-4\nepochs: 3\n"
        "loss_type: infonce\n"
    )
    command = [sys.executable, str(ROOT / "run.py"), str(path), "--validate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "valid, 5 keys set" in done.stdout
    path.write_text(path.read_text().replace("infonce", "info_nce"))
    assert subprocess.run(command, capture_output=True, check=False, cwd=ROOT).returncode == 2


def test_the_columns_of_the_schema_are_the_ones_that_rows_have() -> None:
    assert set(get_args(ColumnName)) == set(COLUMNS)


def test_the_json_schema_is_strict_and_documents_every_key() -> None:
    schema = config_class().model_json_schema()
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model_name"]
    assert set(schema["properties"]) == set(fields())
    assert schema["properties"]["learning_rate"]["default"] == 2e-5


def names_of_sections(tree: ast.AST) -> set[str]:
    """Collect what a file calls a configuration or a section of it, by the annotations of parameters and fields."""
    names = set(CONFIG_NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            target = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", None)
            if target and re.fullmatch(r"Config|\w+Keys", ast.unparse(node.annotation)):
                names.add(target)
    return names


def attributes_of_config(source: str) -> set[str]:
    """Collect KEY of every read `config.KEY`, `keys.KEY`, `anything.config.KEY` and `section.KEY`."""
    found = set()
    tree = ast.parse(source)
    names = names_of_sections(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else None
            if name in names:
                found.add(node.attr)
    return found


def read_by_methods(read: set[str]) -> set[str]:
    """Collect the keys that those methods of a configuration read that others call."""
    tree = ast.parse((ROOT / "vembed" / "config" / "schema.py").read_text(encoding="utf-8"))
    methods = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name in read)
    return {
        node.attr
        for each in methods
        for node in ast.walk(each)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_the_collector_sees_reads_and_nothing_else() -> None:
    source = """
def plan(config, cfg, other, batch: BatchKeys, rows: list[BatchKeys]):
    a = config.seed + cfg.epochs * self.loaded.config.batch_size + batch.retain + rows.oom_retry
    config.learning_rate = 3
    other.temperature, "config.bm25", config
    # config.fp16
"""
    assert attributes_of_config(source) == {"seed", "epochs", "batch_size", "retain"}


def test_every_key_is_read() -> None:
    package = ROOT / "vembed"
    readers = [each for each in package.rglob("*.py") if "config" not in each.relative_to(package).parts]
    read = set().union(*(attributes_of_config(each.read_text(encoding="utf-8")) for each in readers))
    read |= read_by_methods(read)
    unread = [key for key in key_names() if key not in read]
    assert not unread, f"nothing reads {', '.join(unread)}: wire the key or remove it from the schema"


def test_loading_takes_a_fraction_of_a_second_and_imports_no_heavy_package(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model_name: m\nlearning_rate: 1e-5\n")
    script = f"""
import sys, time
start = time.process_time()  # other processes may hold the cores
from pathlib import Path
from vembed.config.load import load_config
import vembed.config.record, vembed.config.record
assert load_config(Path({str(path)!r}), ["epochs=2"]).config.epochs == 2
print(time.process_time() - start)
print(*(name for name in ("torch", "numpy", "transformers", "datasets", "accelerate") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, heavy = done.stdout.split("\n")[:2]
    assert heavy == ""
    assert float(seconds) < 2, "0.3 on an ordinary core that is not shared"
