"""Names of built-in code and of plugins stand in one table, and installed packages bring theirs by entry points."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vembed.errors import ConfigError
from vembed.registry import Registry, import_extra


def test_builtin_entries_are_imported_when_they_are_asked_for() -> None:
    registry = Registry("thing", {"decoder": "json:JSONDecoder", "absent": "no_such_module_of_ours:Thing"})
    assert registry.names() == ("decoder", "absent")
    assert registry.load("decoder")().decode("1") == 1
    with pytest.raises(ModuleNotFoundError):
        registry.load("absent")


def test_a_plugin_stands_beside_the_builtin_entries() -> None:
    registry = Registry("thing", {"decoder": "json:JSONDecoder"})
    registry.register("toy", int, module="my_module")
    assert registry.load("toy") is int
    assert registry.names() == ("decoder", "toy")
    assert registry.plugins() == {"toy": "my_module"}
    registry.register("toy", float, module="my_module")  # a notebook cell run twice
    assert registry.load("toy") is float
    assert registry.names() == ("decoder", "toy")


@pytest.mark.parametrize(
    ("name", "message"),
    [("decoder", "already that of vembed"), ("toy", "already that of my_module"), ("No Name", "lower-case letters")],
)
def test_a_name_is_taken_once(name: str, message: str) -> None:
    registry = Registry("thing", {"decoder": "json:JSONDecoder"})
    registry.register("toy", int, module="my_module")
    with pytest.raises(ConfigError, match=message):
        registry.register(name, float, module="another")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no thing 'decodr'; did you mean decoder\? There are: decoder"):
        Registry("thing", {"decoder": "json:JSONDecoder"}).load("decodr")
    with pytest.raises(ConfigError, match=r"no thing 'xyz'\. There are: decoder"):
        Registry("thing", {"decoder": "json:JSONDecoder"}).load("xyz")


def test_a_package_of_an_extra_that_is_missing_and_one_that_is_broken_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_of_ours.py").write_text("raise ImportError('libcublas.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, why in (("broken_of_ours", r"can't be imported \(libcublas.so.12: .* file\)"), ("gone", "is missing")):
        with pytest.raises(ConfigError, match=rf'--x needs {name}, which {why}: pip install "vembed\[x\]"'):
            import_extra(name, "x", "--x")


def test_the_registry_imports_nothing_heavy() -> None:
    code = "import sys, vembed.registry; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


STRANGER = {
    "stranger-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: stranger\nVersion: 1.2\n",
    "stranger-1.2.dist-info/entry_points.txt": """[vembed.plugins]
count-words = stranger.commands
lonely = stranger.trackers
loss-table = stranger.trackers
square = stranger.losses
rhymes = stranger.sets
found = stranger.metrics
broken = stranger.broken
tensorboard = stranger.broken
""",
    "stranger/__init__.py": "",
    "stranger/commands.py": """
import vembed

@vembed.register_command
def count_words(arguments, *, program):
    \"\"\"Count the words of a file.\"\"\"
    print(f"{program}: {len(open(arguments[0]).read().split())}")
    return 0
""",
    "stranger/trackers.py": """
import vembed
from vembed.training.trackers import Tracker

@vembed.register_tracker
class LossTable(Tracker):
    name = "loss-table"

    def log(self, step, values):
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "loss.csv", "a") as file:
            file.write(f"{step},{values['loss']}\\n")

@vembed.register_tracker
class Lonely(Tracker):
    name = "lonely"
    package = "no_such_service_of_ours"
""",
    "stranger/losses.py": """
import vembed
from vembed.losses.base import ContrastiveLoss
from vembed.losses.registry import LossSection
from vembed.section import Positive, key

class SquareKeys(LossSection):
    '''Keys of the squared loss.'''

    name = "square"
    formula = "L = (1 - S)^2"
    source = "nobody"
    square_width: Positive = key(1.0, "Width.")

@vembed.register_loss
class Square(ContrastiveLoss):
    '''Squared distance to 1.'''

    keys = SquareKeys

    def __init__(self, square_width):
        super().__init__()

    def forward(self, q_QE, d_DE, structure):
        return (1 - q_QE @ d_DE.T).square().mean()
""",
    "stranger/sets.py": """
import vembed

@vembed.register_dataset
def rhymes(split):
    \"\"\"Rhymes.\"\"\"
    yield {"query": "moon", "positive": "June"}
""",
    "stranger/metrics.py": """
import vembed

@vembed.register_metric
def found(ranked, grades, k):
    \"\"\"1 where anything relevant is among the first k.\"\"\"
    return float(any(ranked[:k]))
""",
    "stranger/broken.py": "import this_package_is_nowhere\n",
}
"""Files of an installed package of someone else: path -> text."""


@pytest.fixture
def stranger(tmp_path: Path):
    """Run Python beside an installed package that knows vembed, and of which vembed knows nothing."""
    site = tmp_path / "site"
    for name, text in STRANGER.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    paths = os.pathsep.join(filter(None, (str(site), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.slow
def test_an_installed_package_brings_a_command(stranger, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("three short words")
    done = stranger("-m", "vembed", "count-words", "notes.txt")
    assert (done.returncode, done.stdout) == (0, "vembed count-words: 3\n"), done.stderr
    listing = stranger("-m", "vembed", "--help")
    assert "count-words count the words of a file" in listing.stdout
    assert "warning: broken is of the package stranger 1.2: stranger.broken can't be imported: " in listing.stderr
    broken = stranger("-m", "vembed", "broken")
    assert broken.returncode == 2
    assert "broken.py:1: ModuleNotFoundError: No module named 'this_package_is_nowhere'" in broken.stderr
    unknown = stranger("-m", "vembed", "loss-table")
    assert unknown.returncode == 2
    assert "no command 'loss-table'" in unknown.stderr


@pytest.mark.slow
def test_an_installed_package_brings_a_tracker_that_follows_a_run(stranger, tmp_path: Path) -> None:
    rows = [{"query": f"word {number}", "positive": f"text of {number}"} for number in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = ["model_name=builtin:ngram-bag", "data_path=rows.jsonl", "val_data_path=rows.jsonl", "output_dir=out"]
    keys += ["batch_size=16", "max_steps=2", "bm25=false", "num_workers=0", "report_to=[tensorboard, loss-table]"]
    done = stranger("-m", "vembed", "train", "--config_override", *keys)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "trackers" / "loss-table" / "loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["1", "2"]


def test_validate_names_the_installed_plugin_that_it_ran(stranger) -> None:
    keys = ["model_name=builtin:ngram-bag", "data_path=builtin:stdlib-code", "output_dir=out", "report_to=loss-table"]
    valid = stranger("-m", "vembed", "train", "--validate", "--config_override", *keys)
    assert valid.returncode == 0, valid.stderr
    assert "plugins: stranger.trackers (" in valid.stdout
    assert "registers tracker loss-table, tracker lonely; its code ran" in valid.stdout


def test_a_missing_package_of_a_plugins_tracker_is_named_before_anything_is_opened(stranger, tmp_path: Path) -> None:
    keys = ["model_name=builtin:ngram-bag", "data_path=builtin:stdlib-code", "output_dir=out", "report_to=lonely"]
    done = stranger("-m", "vembed", "train", "--config_override", *keys)
    assert done.returncode == 5
    assert "the tracker lonely needs a package that is missing" in done.stderr
    assert "pip install no_such_service_of_ours" in done.stderr
    assert not (tmp_path / "out").exists()
    code = (
        "import vembed.training.trackers as t; from vembed.registry import TRACKERS; TRACKERS.find('lonely');"
        "names = t._names('all'); print('loss-table' in names, 'lonely' in names)"
    )
    assert stranger("-c", code).stdout == "True False\n"


def test_installed_packages_bring_losses_with_keys_data_sets_and_metrics(stranger) -> None:
    code = """
import sys
from vembed.config.load import load_values
from vembed.registry import DATASETS
given = {"model_name": "builtin:ngram-bag", "data_path": "a.jsonl", "val_data_path": "a.jsonl", "output_dir": "out"}
assert not [name for name in sys.modules if name.startswith("stranger")]
config = load_values(given | {"loss_type": "square", "square_width": 2.5}, {}).config
assert (config.loss_type, config.square_width) == ("square", 2.5)
assert sorted(name for name in sys.modules if name.startswith("stranger.")) == ["stranger.losses"]
assert load_values(given | {"metric_for_best_model": "found@10"}, {}).config.metric_for_best_model == "found@10"
assert "rhymes" in DATASETS and "no-rhymes" not in DATASETS
"""
    done = stranger("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_run_that_names_no_installed_plugin_imports_none(stranger) -> None:
    code = """
import sys
from vembed.config.load import load_values
given = {"model_name": "builtin:ngram-bag", "data_path": "a.jsonl", "val_data_path": "a.jsonl", "output_dir": "out"}
load_values(given | {"report_to": "tensorboard", "loss_type": "infonce"}, {})
assert not [name for name in sys.modules if name.startswith("stranger")]
"""
    done = stranger("-c", code)
    assert done.returncode == 0, done.stderr
