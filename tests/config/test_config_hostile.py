"""Hostile files, in a process with bounded memory: refused in under a second."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vembed.config.load import load_config, load_values
from vembed.entrypoints.train import main
from vembed.errors import ConfigError

MEMORY_BYTES = 192 * 2**20

UNIT_SECONDS = 0.05
"""What the unit of work takes on the machine that the second is promised for; a slower one gets as much longer."""

_CHILD = f"UNIT_SECONDS = {UNIT_SECONDS}" + textwrap.dedent("""
    import json, os, resource, sys, time
    from pathlib import Path
    from vembed.config.load import load_config, load_values
    from vembed.errors import ConfigError

    def busy():
        start = time.process_time()
        for number in range(300_000):
            str(number)
        return time.process_time() - start

    load_values({"model_name": "m"}, {})  # what is imported when it is needed is there
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            break
        if os.waitpid(child, 0)[1]:
            print("null", flush=True)
    else:
        sys.exit()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
    before = busy()
    start = time.process_time()  # other processes may hold the cores
    try:
        load_config(Path(line[:-1]))
        message = None
    except ConfigError as error:
        message = str(error)
    seconds = time.process_time() - start
    slower = max(before, busy()) / UNIT_SECONDS
    # Not ru_maxrss, which counts the memory of the process that started this one too.
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    print(json.dumps({"message": message, "seconds": seconds / max(1.0, slower), "peak_bytes": peak}))
""")


LoadBounded = Callable[[Path], tuple[str | None, float]]


@pytest.fixture(scope="module")
def load_bounded() -> Iterator[LoadBounded]:
    """Load each file in a process of its own, forked from one, that may take 64 MiB more than it has at start."""
    command = [sys.executable, "-c", _CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def load(path: Path) -> tuple[str | None, float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{path}\n")
            answer = json.loads(process.stdout.readline())
            assert answer is not None, "the process crashed"
            assert answer["peak_bytes"] < MEMORY_BYTES
            return answer["message"], answer["seconds"]

        yield load


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


HOSTILE = {
    "alias bomb": (bomb(12), "anchors"),
    "python object": ("model_name: !!python/object/apply:os.system ['touch pwned']", "tags"),
    "python object in JSON clothes": ('{"model_name": !!python/name:os.system }', "tags"),
    "deep lists": ("model_name: " + "[" * 200_000, "nested more than"),
    "deep blocks": (
        "model_name: m\ndata_path:\n" + "".join(f"{' ' * i}- \n" for i in range(1, 700)),
        "nested more than",
    ),
    "very many keys": ("".join(f"k{i}: 1\n" for i in range(20_000)), "values; this is no configuration"),
    "many keys": ("".join(f"learning_ratio{i}: 1\n" for i in range(990)), "unknown key; did you mean learning_rate?"),
    "long word": ("model_name: m\nbatch_size: " + "x" * 60_000, "must be auto or an integer"),
    "long number": ("model_name: m\nbatch_size: " + "9" * 200_000, "must be auto or an integer"),
    "blank lines": ("\n" * 250_000, "the file is empty"),
    "many lines of one text": ("model_name: m\nquery_prompt: " + " a\n" * 80_000, "the values take 160,"),
    "text of many words": ("model_name: m\nbatch_size: " + "a." * 32_000, "must be auto or an integer"),
    "text of many tokens": ("model_name: m\nbatch_size: ?" + "token" * 12_000, "must be auto or an integer"),
    "long key": ("model_name: m\n" + "x" * 200_000 + ": 1", "not valid YAML"),
    "JSON: deep lists": ("[" * 200_000, "nested more than"),
    "JSON: deep objects": ('{"a":' * 40_000, "nested more than"),
    "JSON: very many keys": ("{" + ",".join(f'"k{i}":1' for i in range(20_000)) + "}", ""),
    "JSON: nested": ('{"model_name": "m", "column_mapping": ' + '{"a":' * 900 + "1" + "}" * 901, "nested more than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_under_a_second_with_bounded_memory(
    name: str, tmp_path: Path, load_bounded: LoadBounded
) -> None:
    text, reason = HOSTILE[name]
    path = tmp_path / ("a.json" if name.startswith("JSON") else "a.yaml")
    path.write_text(text)
    assert path.stat().st_size < 2**18
    message, seconds = load_bounded(path)
    assert message is not None
    assert reason in message
    assert len(message) < 20_000
    assert seconds < 1.0
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_of_50_megabytes_is_refused_from_its_size(
    suffix: str, tmp_path: Path, load_bounded: LoadBounded
) -> None:
    path = (tmp_path / "big").with_suffix(suffix)
    with path.open("wb") as file:
        file.write(b"model_name: m\n")
        file.truncate(50 * 10**6)
    message, seconds = load_bounded(path)
    assert message is not None
    assert "50,000,000 bytes; a configuration has at most 262,144" in message
    assert seconds < 0.1


def test_the_bounds_of_these_tests_leave_room_for_a_valid_file(tmp_path: Path, load_bounded: LoadBounded) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model_name: m\nlearning_rate: 1e-5\ncolumn_mapping: {a: query, b: null}\n")
    message, seconds = load_bounded(path)
    assert message is None
    assert seconds < 1.0


@pytest.mark.parametrize("escape", ["\\UFFFFFFFF", "\\U00110000"])
def test_an_escape_that_stands_for_no_character_is_refused_at_its_line(escape: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f'model_name: m\nquery_prompt: "{escape}"\n')
    with pytest.raises(ConfigError, match=r"a.yaml:2: not valid YAML: an escape with \\U stands for no character"):
        load_config(path)
    with pytest.raises(ConfigError, match="the value is not valid YAML"):
        load_config(None, ["model_name=m", f'query_prompt="{escape}"'])
    assert load_config(None, ["model_name=m", 'query_prompt="\\U0001F600"']).config.query_prompt == "\U0001f600"


def test_values_of_python_that_no_file_could_hold_are_refused() -> None:
    itself: list[object] = []
    itself.append(itself)
    for values, reason in [
        ({"epochs": 10**5000}, "epochs: must be an integer >= 1, got inf"),
        ({"learning_rate": -(10**5000)}, "learning_rate: must be a finite number, got -inf"),
        ({"data_path": itself}, "data_path: nested over 8 levels deep; no key needs more than two"),
        ({"column_mapping": {3: "query"}}, "column_mapping: a key must be a text"),
        ({3: "query"}, "3 is no text; a key is one, such as 'batch_size'"),
        ({"query_prompt": b"x"}, "query_prompt: a bytes is no setting"),
    ]:
        for base, over in [({"model_name": "m", **values}, {}), ({"model_name": "m"}, values)]:
            with pytest.raises(ConfigError) as refused:
                load_values(base, over)  # type: ignore[arg-type]
            assert reason.partition(": ")[2] in str(refused.value)
            assert len(str(refused.value)) < 300


def test_values_that_no_file_could_give_back_are_refused() -> None:
    many: object = "x"
    for _ in range(6):
        many = [many] * 100
    for values, reason in [
        ({"data_path": many}, "there are more than 2000 values"),
        ({"query_prompt": "x" * 70_000}, "the values take 70,005 bytes; a configuration has at most 65,536"),
        ({"column_mapping": {f"c{n}": "query" for n in range(900)}}, "values in lists and mappings"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            load_values({"model_name": "m"}, values)
    with pytest.raises(ConfigError, match="overrides: there are more than 2000 values"):
        load_config(None, ["batch_size=1"] * 2_001)


def test_deep_json_is_refused_before_it_is_asked_whether_it_is_of_deepspeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" * 200_000)
    assert main([str(path), "--validate"]) == 2
    assert "nested more than 8 deep" in capsys.readouterr().err


def test_a_name_longer_than_a_path_can_be_is_refused() -> None:
    assert load_values({"model_name": "m" * 4096}, {}).config.model_name == "m" * 4096
    with pytest.raises(ConfigError, match="model_name: must have at most 4,096 characters"):
        load_values({"model_name": "m" * 4097}, {})
