"""A stranger's loss in one file, the one that CONTRIBUTING.md prints: checked, planned, trained, reported like ours."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from engine_cases import make_case
from kit.warm import run_warm
from loss_cases import CASES

import vembed
from vembed.config.load import load_config, load_values
from vembed.config.record import config_hash, dump_config, plain_values, resume_differences
from vembed.config.schema import Config, config_class
from vembed.errors import ConfigError, DataError
from vembed.gradcache.chunks import ChunkBudget
from vembed.gradcache.engine import EngineOptions, GradCacheEngine
from vembed.gradcache.reference import reference_step
from vembed.losses.base import BatchStructure, ContrastiveLoss, LossCommon, MultiVectorLoss
from vembed.losses.infonce import InfoNCE
from vembed.losses.keys import InfoNCEKeys
from vembed.losses.registry import loss_section, register_loss
from vembed.plan.memory import BatchRows, LossTiles, ModelSize, loss_bytes
from vembed.registry import LOSSES

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from kit.ranks import RankPool

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(vembed.__file__).parents[1]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Add a loss")[2].partition("\n## ")[0]
(CODE,) = re.findall(r"```python\n(.*?)```", RECIPE, flags=re.DOTALL)
(SETTINGS,) = re.findall(r"```yaml\n(.*?)```", RECIPE, flags=re.DOTALL)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Write modules into the current folder, a fresh one; what they register is forgotten with them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for table in ("_entries", "_plugins"):
        monkeypatch.setattr(LOSSES, table, dict(getattr(LOSSES, table)))
    before = set(sys.modules)

    def write_module(name: str, code: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(code, "utf-8")
        return path

    yield write_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def recipe(write: Callable[[str, str], Path]) -> Path:
    """The recipe's file in the current folder."""
    return write("margin_loss", CODE)


def problem(*overrides: str, plugins: str = "[margin_loss]") -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["model_name=m", f"plugins={plugins}", *overrides])
    return str(refused.value)


def test_the_recipe_s_settings_are_valid_with_it_and_unknown_without(recipe: Path) -> None:
    path = recipe.with_name("config.yaml")
    path.write_text(f"model_name: m\n{SETTINGS}")
    config = load_config(path).config
    assert (config.loss_type, loss_section("margin").of(config).model_dump()) == ("margin", {"margin": 0.3})
    assert isinstance(config, Config)
    path.write_text("model_name: m\nmargin: 0.3\nloss_type: margins\n")
    found = problem("margin=0.3", "loss_type=margins")
    assert found.startswith("override loss_type=margins: must be infonce")
    assert found.endswith("or margin, got 'margins'; did you mean margin?")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss_type=margin", "margin=-1"], "override margin=-1: must be > 0"),
        (["loss_type=margin", "margin=wide"], "override margin=wide: must be a number > 0"),
        (["loss_type=margin", "margn=1"], "override margn=1: unknown key; did you mean margin?"),
        (["margin=0.5"], "margin has no effect with loss_type infonce; remove it or set loss_type to margin"),
        (["loss_type=margin", "temperature=0.1"], "temperature has no effect with loss_type margin"),
        (["loss_type=margin", "mrl_dims=[8]"], "mrl_dims has no effect with loss_type margin"),
        (["loss_type=margin", "batch_size=1"], "so the margin loss learns nothing"),
    ],
)
def test_its_keys_are_judged_like_ours(recipe: Path, overrides: list[str], message: str) -> None:
    assert message in problem(*overrides)


def test_what_is_kept_of_a_run_holds_its_keys_only_where_it_is_the_loss(recipe: Path) -> None:
    chosen = load_values({"model_name": "m", "plugins": ["margin_loss"]}, {"loss_type": "margin", "margin": 0.3}).config
    other = load_values({"model_name": "m", "plugins": ["margin_loss"]}, {}).config
    kept = yaml.safe_load(dump_config(chosen))
    assert (kept["plugins"], kept["loss_type"], kept["margin"], kept["temperature"]) == (
        ["margin_loss"], "margin", 0.3, 0.05,
    )  # fmt: skip
    assert "margin" not in plain_values(other)
    recipe.with_name("kept.yaml").write_text(dump_config(chosen))
    assert load_config(recipe.with_name("kept.yaml")).config == chosen
    without = Config.model_validate({"model_name": "m"})
    assert [(each.key, each.kind) for each in resume_differences(plain_values(without), other)] == [
        ("plugins", "refused")
    ]
    assert config_hash(other) != config_hash(without)


def test_it_stands_in_the_json_schema_and_leaves_the_classes_of_others_alone(recipe: Path) -> None:
    before = config_class()
    load_config(None, ["model_name=m", "plugins=[margin_loss]"])
    schema = config_class().model_json_schema()["properties"]
    assert schema["loss_type"]["enum"] == [*LOSSES.names()]
    assert schema["loss_type"]["enum"][-1] == "margin"
    assert schema["margin"]["acts_with"] == {"loss_type": ["margin"]}
    assert "margin" not in schema["mask_false_negatives"]["acts_with"]["loss_type"]
    assert "margin" not in before.model_fields
    assert "margin" not in Config.model_fields


def built(dtype: torch.dtype = torch.float64) -> Any:
    config = load_config(None, ["model_name=m", "plugins=[margin_loss]", "loss_type=margin", "margin=0.3"]).config
    return config.run_loss().build(config, LossCommon(dtype, dimension=5, tile_size=7))


def weighted(structure: BatchStructure) -> BatchStructure:
    """Give the queries of a batch the weights 1, 2, 3, ..."""
    weights_Q = torch.arange(1, structure.num_queries + 1, dtype=torch.float64)
    return replace(structure, columns={"weight": weights_Q})


def test_its_value_is_that_of_a_double_loop(recipe: Path) -> None:
    for case in CASES.values():
        q_QE, d_DE = case.embeddings()
        similarity_QD = (q_QE @ d_DE.T).tolist()
        terms = [
            (i + 1, max(0.0, 0.3 - similarity_QD[i][j] + similarity_QD[i][k]))
            for i, j in case.positives
            for k in range(len(case.documents))
            if (i, k) not in case.positives
        ]
        expected = sum(weight * term for weight, term in terms) / sum(weight for weight, _ in terms)
        assert built()(q_QE, d_DE, weighted(case.structure)).item() == pytest.approx(expected, rel=1e-12)


def gradients_of(folder: str, rank: int | None = None) -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradients of the engine, on this rank of two or alone, with the recipe of a folder."""
    from test_engine_ranks import assignment_of, pools_of

    from vembed.distributed.ranks import Ranks

    sys.path.insert(0, folder)
    case, loss = make_case(dropout=0.0, negatives=2, towers=2), built()
    options = EngineOptions(ChunkBudget(4, 10**6), torch.device("cpu"), retain=0.3)
    if rank is None:
        result = GradCacheEngine(loss, options).step(case.pools, weighted(case.structure))
    else:
        assignment = assignment_of(case.structure.num_queries + case.structure.num_documents, "uneven")
        options = EngineOptions(ChunkBudget(4, 10**6), torch.device("cpu"), retain=0.3, ranks=Ranks.of_this_process())
        engine = GradCacheEngine(loss, options, list(case.encoder.parameters()))
        structure = weighted(case.structure)
        result = engine.step(pools_of(case, assignment.slots[rank]), structure, assignment=assignment)
    return result.loss, [parameter.grad for parameter in case.encoder.parameters() if parameter.grad is not None]


def test_the_engine_gives_the_gradients_of_the_plain_step_on_one_rank_and_on_two(
    recipe: Path, two_ranks: RankPool
) -> None:
    case = make_case(dropout=0.0, negatives=2, towers=2)
    value = reference_step(case.pools, weighted(case.structure), built()).item()
    expected = [parameter.grad for parameter in case.encoder.parameters() if parameter.grad is not None]
    assert value > 0.1
    assert max(gradient.abs().max().item() for gradient in expected) > 1e-3
    for loss, found in [gradients_of(str(recipe.parent)), *two_ranks.run(on_rank, str(recipe.parent))]:
        assert loss == pytest.approx(value, rel=1e-11)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def on_rank(rank: int, folder: str) -> tuple[float, list[torch.Tensor]]:
    """Run the step on one of two ranks, which read the plugin themselves."""
    return gradients_of(folder, rank)


def run(folder: Path, keys: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    """Train as a stranger would: run.py from the folder that holds the plugin."""
    (folder / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load(SETTINGS) | keys))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return run_warm([str(ROOT / "run.py"), "config.yaml", *words], cwd=folder, env=environment, scratch=folder)


TINY = {
    "data_path": "train.jsonl",
    "val_data_path": "train.jsonl",
    "torch_dtype": "float64",
    "global_batch_size": 8,
    "gradient_cache_chunk_size": 3,
    "retain": 0,
    "epochs": 5,
    "eval_strategy": "no",
    "learning_rate": 0.02,
    "logging_steps": 1,
    "bm25": False,
    "report_to": "none",
}


@pytest.mark.slow
def test_it_trains_from_another_folder_in_one_process_and_in_two(recipe: Path, bag: Path) -> None:
    folder, keys = recipe.parent, TINY | {"model_name": str(bag)}
    write_pairs(folder, weight=lambda number: number % 3)
    done = run(folder, keys | {"num_processes": 2, "output_dir": "out-2"})
    assert done.returncode == 0, done.stdout + done.stderr
    vembed.train("config.yaml", num_processes=1, output_dir="out-1")
    losses = []
    for output in (folder / "out-1", folder / "out-2"):
        lines = (output / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
        plan = json.loads((output / "plan.json").read_text())
        assert f"plugins: margin_loss ({recipe}) registers loss margin" in plan["reasons"]
    assert sum(losses[0][-4:]) < 0.8 * sum(losses[0][:4]), "the last epoch is better than the first"
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)
    kept = yaml.safe_load((output / "config.yaml").read_text())
    assert (kept["plugins"], kept["loss_type"], kept["margin"]) == (["margin_loss"], "margin", 0.3)
    report = json.loads((output / "report" / "report.json").read_text())
    assert (report["config"]["plugins"], report["config"]["margin"]) == (["margin_loss"], 0.3)
    assert losses[0][:2] != [json.loads(line)["loss"] for line in unweighted(folder)], "the column changes nothing"
    card = (output / "model" / "README.md").read_text()
    assert "loss_type | margin" in card
    assert "max(0, margin" in card
    assert "Schroff et al., 2015" in card


def write_pairs(folder: Path, **columns: Callable[[int], object]) -> None:
    """Write 32 pairs with further columns, each from the number of the row."""
    rows: list[dict[str, object]] = [
        {"query": f"colour {number}", "positive": f"farbe {number} {'x' * (number % 5)}"} for number in range(32)
    ]
    for number, row in enumerate(rows):
        row |= {name: value(number) for name, value in columns.items()}
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def unweighted(folder: Path) -> list[str]:
    """Return metrics.jsonl of the same run without the column: each query counts 1."""
    write_pairs(folder)
    vembed.train("config.yaml", num_processes=1, output_dir="out-0", max_steps=2)
    return (folder / "out-0" / "metrics.jsonl").read_text().splitlines()


def test_a_wrong_value_in_its_column_is_named_with_its_line(recipe: Path, bag: Path) -> None:
    write_pairs(recipe.parent, importance=lambda number: -1 if number == 6 else 1)
    keys = yaml.safe_load(SETTINGS) | TINY | {
        "model_name": str(bag), "column_mapping": {"importance": "weight"}, "output_dir": "out",
    }  # fmt: skip
    with pytest.raises(DataError, match=r"train.jsonl:7: importance: loss_type margin needs a number of at least 0.0"):
        vembed.train(keys)
    with pytest.raises(ConfigError, match="did you mean weight"):
        vembed.train(keys, column_mapping={"importance": "weigth"})


def test_a_wrong_key_of_it_ends_with_exit_code_2(recipe: Path) -> None:
    done = run(recipe.parent, {"model_name": "builtin:ngram-bag", "margin": 0}, "--validate")
    assert done.returncode == 2
    assert "config.yaml:2: margin: must be > 0, got 0" in done.stderr


# Plugins that can't be imported


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("import torch\nx = = 1\n", ["broken can't be imported: {file}:2: invalid syntax"]),
        ("x = 1\n\n\nx / 0\n", ["broken can't be imported: {file}:4: ZeroDivisionError: division by zero"]),
        ("import json\n\ndef f():\n    json.loads('{')\n\nf()\n", ["{file}:4: JSONDecodeError: "]),
        ("import no_such_library\n", ["{file}:1: ModuleNotFoundError: No module named 'no_such_library'"]),
        ("raise SystemExit(0)\n", ["{file}:1: SystemExit: 0"]),
        (CODE.replace('name = "margin"', 'name = "infonce"'), ["loss 'infonce' of broken is already that of vembed"]),
        (CODE.replace('    name = "margin"\n', ""), ["broken.MarginLoss has no name; give its keys one for loss_type"]),
        (CODE.replace("    def forward", "    def backward"), ["broken.MarginLoss lacks forward"]),
        (CODE.replace("key(0.2,", "key(...,"), ["key margin has no default; runs with other losses need one"]),
        (CODE.replace('key(0.2, "Least distance of a negative from the positive.")', "0.2"), ["is not made by key("]),
        (CODE.replace("    columns =", '    memory = "much"\n    columns ='), ["memory must be of matrix, tiles"]),
        (CODE.replace("    columns =", '    takes = ("pairs")\n    columns ='), ["takes must be a tuple, got 'pairs'"]),
        (re.sub(r"columns = \((.*),\)", r"columns = (\1)", CODE), ["columns must be a tuple, got ExtraColumn(name="]),
        (CODE.replace("    keys = MarginKeys", ""), ["broken.MarginLoss: keys must be a LossSection"]),
        (CODE.replace("margin: Positive", "seed: Positive"), ["key seed of the loss margin has the name of another"]),
        ("import vembed\n\nvembed.register_loss(int)\n", ["{file}:3: builtins.int is no loss; derive it from"]),
    ],
)  # fmt: skip
def test_a_plugin_that_fails_is_named_with_its_line(
    write: Callable[[str, str], Path], code: str, parts: list[str]
) -> None:
    file = write("broken", code)
    found = problem(plugins="[broken]")
    for part in parts:
        assert part.format(file=file) in found


def test_a_loss_that_takes_the_keys_of_another_one_is_refused_and_leaves_that_one_alone() -> None:
    class Mine(InfoNCE):
        keys = InfoNCEKeys

    with pytest.raises(ConfigError, match=r"loss 'infonce' of .* is already that of vembed"):
        register_loss(Mine)
    assert loss_section("infonce").loss_class() is InfoNCE


def test_a_module_that_is_not_there_is_refused_with_where_it_was_searched(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    path = recipe.with_name("config.yaml")
    path.write_text("model_name: m\nplugins: [margin_loss, margin_lose]\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert str(refused.value) == (
        f"{path}:2: plugins: there is no module margin_lose; searched in the current folder ({recipe.parent}), "
        "PYTHONPATH (/somewhere) and the installed packages"
    )
    assert "is no name of a module; write the file's name without .py" in problem(plugins="[margin_loss.py]")
    assert "must be a list [a text, ...], got 'margin_loss'" in problem(plugins="margin_loss")
    assert "there is no module margin_loss.inner" in problem(plugins="[margin_loss.inner]")


def test_the_current_folder_is_first_for_plugins_and_last_for_everything_else(recipe: Path) -> None:
    recipe.with_name("yaml.py").write_text("raise RuntimeError('shadowed')")
    sys.path[:] = [each for each in sys.path if each not in ("", str(recipe.parent))]
    load_config(None, ["model_name=m", "plugins=[margin_loss]"])
    assert sys.path[-1] == str(recipe.parent)
    assert importlib.util.find_spec("yaml").origin != str(recipe.with_name("yaml.py"))  # type: ignore[union-attr]


# Other kinds of loss


def register(write: Callable[[str, str], Path], base: str, body: str) -> None:
    """Register a loss "toy" of some base class from a plugin."""
    write(
        "toy",
        "import vembed\nfrom vembed.losses.base import *\nfrom vembed.losses.registry import LossSection\n"
        'class Keys(LossSection):\n    name = "toy"\n'
        f"@vembed.register_loss\nclass Toy({base}):\n    keys = Keys\n{body}",
    )
    load_config(None, ["model_name=m", "plugins=[toy]"])


def test_a_loss_without_keys_is_built_from_what_it_is_told_of_the_run(write: Callable[[str, str], Path]) -> None:
    body = (
        "    def __init__(self, dtype):\n        super().__init__()\n        self.dtype = dtype\n"
        "    @classmethod\n    def from_keys(cls, keys, common):\n        return cls(common.dtype)\n"
        "    def forward(self, q_QE, d_DE, structure):\n        return q_QE.sum()\n"
    )
    register(write, "ContrastiveLoss", body)
    config = load_values({"model_name": "m", "loss_type": "toy"}, {}).config
    toy: Any = config.run_loss().build(config, LossCommon(torch.float64, 5, 7))
    assert isinstance(toy, ContrastiveLoss)
    assert (toy.dtype, toy.streamed) == (torch.float64, None)


def test_the_plan_counts_with_the_memory_that_a_loss_states(write: Callable[[str, str], Path]) -> None:
    register(write, "MultiVectorLoss", "    def forward(self, q, d, structure):\n        return 0\n")
    facts = loss_section("toy")
    assert issubclass(facts.loss_class(), MultiVectorLoss)
    assert (facts.memory, facts.multi_vector) == ("tokens", True)
    assert (loss_section("infonce").memory, loss_section("infonce").multi_vector) == ("tiles", False)
    size = ModelSize.by_formula(
        num_parameters=10, num_trainable=10, bytes_per_value=4, dimension=8, max_length=6, activation_bytes_per_token=1
    )
    rows = BatchRows(10, 20, 100, 200)
    embeddings = 2 * 30 * 8

    def held(memory: str, vectors: tuple[float, float]) -> int:
        each = replace(size, vectors=vectors)
        return loss_bytes(each, rows, LossTiles(4, 2, memory)) // 4 - embeddings * each.row_vectors

    found = {name: held(name, (0.0, 1.0)) for name in ("tiles", "matrix", "tokens", "pairs")}
    assert found == {"tiles": 2 * 16 + 160, "matrix": 4 * 20_000, "tokens": 4 * 20_000 * 36, "pairs": 4 * 300}
    assert held("tokens", (2.0, 0.0)) == 4 * 20_000 * 4, "two vectors for each row, whatever its length"
