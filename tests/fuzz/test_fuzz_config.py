"""Whatever a configuration is, it is refused in our own words or taken as it stands."""

import json
import math
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from fuzz_limits import fuzzed, within_limits
from hypothesis import example, given
from hypothesis import strategies as st

from vembed.config.load import LoadedConfig, load_config, load_values
from vembed.config.messages import key_schemas
from vembed.config.names import ALIASES, foreign
from vembed.config.record import config_hash, dump_config, plain_values, resume_differences
from vembed.errors import ConfigError
from vembed.redact import lacks_secret, redact

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = [path.read_bytes() for path in sorted([*CONFIGS.rglob("*.yaml"), *CONFIGS.rglob("*.json")])]
# Nothing imports what an example happens to name.
KEYS = [name for name in [*key_schemas(), *ALIASES] if name != "plugins"]
SECRET = "s3cr3tc4n4ry"
WORDS = [
    "auto", "null", "true", "no", "1e5", "1e999", ".nan", "-.inf", "0x10", "1_000", "-0", "infinity", "~", "''", "{}",
    "[]", "[[[[[[[[[[]]]]]]]]]]", "9" * 5000, "2147483648", "builtin:stdlib-code", "[tensorboard]", "{a: query}",
    "&a x", "*a", "<<", "!!python/object/apply:os.system ['true']", '"\\UFFFFFFFF"', '"\\ud800"', '"\\0"', "\ufeff",
    "\x85", "\u2028",
    "\t", "\r", "|", ">-", "? ", "- ", ": ", "#", "---", "...", "%YAML 9.9", "'", '"', "\\", "{", "}", "[",
    "]", ",", "@", "`", "\x1b[31m", "\udc80", f"https://u:{SECRET}@h/", f"password={SECRET}", "https://***@h",
    "query: ", "a" * 70_000, " a\n" * 9000, "a." * 40_000, "?token" * 9000,
]  # fmt: skip

keys = st.sampled_from(KEYS) | st.text(max_size=8)
characters = st.characters() | st.sampled_from(
    "\x00\x07\x1b\x85\u2028\ufeff\ufffe\U0001f600\U000e0001\ud800\r\n\t '\"\\#:-"
)
texts = st.sampled_from(WORDS) | st.text(characters, max_size=30)
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**4000), 2**31 - 1, 2**31, 5e-324])
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


class Word(StrEnum):
    """A text that prints as another one."""

    AUTO = "auto"


class Loud(str):
    """A text that says something else of itself."""

    def __str__(self) -> str:
        raise RuntimeError("asked")


class Half(float):
    """A number of its own type."""


def nested(value: object, depth: int) -> object:
    for _ in range(depth):
        value = [value] * 100
    return value


def endless() -> object:
    itself: dict[str, object] = {}
    itself["a"] = [itself]
    return itself


# By name, as nobody can print some of them.
ODD: dict[str, object] = {
    "bytes": b"x", "set": {1}, "object": object(), "complex": 1j, "module": math, "enumeration": Word.AUTO,
    "text of its own": Loud("auto"), "number of its own": Half(0.5), "path": Path("a/b"), "pure": PurePosixPath("x"),
    "nested": nested("x", 6), "empty nested": nested({}, 8), "endless": endless(), "many": ["x"] * 100_000,
    "view": MappingProxyType({"a": "query"}), "tuple": ("tensorboard",), "range": range(3), "digits": 10**5000,
    "quotes": "'" * 40_000, "columns": {f"c{number}": "query" for number in range(1_500)},
}  # fmt: skip
odd = st.sampled_from(sorted(ODD)).map(lambda name: f"odd: {name}")
python_values = st.dictionaries(keys | st.integers() | st.none(), plain | odd, max_size=6)


def real(value: object) -> Any:
    return ODD[value[5:]] if isinstance(value, str) and value.startswith("odd: ") else value


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return a file of ours with some bytes cut, doubled or replaced."""
    content = draw(st.sampled_from(FILES))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 40)))
        new = draw(
            st.binary(max_size=6)
            | texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
            | st.just(content[start:end] * 2)
        )
        content = content[:start] + new + content[end:]
    return content


@st.composite
def written(draw: st.DrawFn) -> bytes:
    """Return `key: value` lines, or a mapping that YAML, JSON or Python wrote, in one of several encodings."""
    values = draw(st.dictionaries(keys, plain, max_size=8))
    form = draw(st.integers(0, 3))
    text = "model_name: m\n" if draw(st.booleans()) else ""
    if form == 0:
        text += "".join(f"{name}: {draw(texts)}\n" for name in values)
    elif form == 1:
        text += yaml.safe_dump(values, default_flow_style=draw(st.booleans()), allow_unicode=draw(st.booleans()))
    elif form == 2:
        text = json.dumps({"model_name": "m", **values}, ensure_ascii=draw(st.booleans()), skipkeys=True)
    else:
        shared = {"model_name": "m", "a": (part := draw(plain)), "b": part, **values}
        text = yaml.dump(shared)  # anchors and tags
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32-be", "utf-7"]))
    return (
        text.encode(encoding, "surrogatepass") if not encoding.startswith("utf-7") else text.encode("utf-7", "replace")
    )


def judged(load: Callable[[], LoadedConfig]) -> LoadedConfig | None:
    """Return what was loaded, or None where our own error refused it."""
    with within_limits():
        try:
            found = load()
        except ConfigError as refused:
            message = str(refused)
            assert message
            assert len(message) < 60_000
            assert SECRET not in message
            assert all(each.isprintable() for line in message.split("\n") for each in line)
            return None
        dump_config(found.config)
        return found


def assert_kept(found: LoadedConfig, folder: Path) -> None:
    """Assert that a run of this configuration can be repeated from the file that it writes."""
    text = dump_config(found.config)
    assert SECRET not in text
    assert resume_differences(plain_values(found.config), found.config) == []
    path = folder / "config.yaml"
    path.write_bytes(text.encode())
    if any(map(lacks_secret, plain_values(found.config).values())):
        with pytest.raises(ConfigError, match="replaces a secret"):
            load_config(path)
        return
    again = load_config(path)
    assert again.config == found.config
    assert dump_config(again.config) == text
    assert config_hash(again.config) == config_hash(found.config)
    assert resume_differences(plain_values(again.config), found.config) == []


def meant(name: str, given: object) -> object:
    """Return what a key holds when this was given: other trainers' words have their own."""
    row = foreign(name, given)
    return row.ours if row is not None and row.verdict == "same" else given


def assert_is(value: object, given: object) -> None:
    """Assert that a key holds what was given, by the conversions that are documented: paths are texts, 1 is 1.0."""
    if isinstance(given, Path | PurePosixPath):
        given = str(given)
    if isinstance(given, list | tuple):
        assert isinstance(value, list | tuple)
        assert len(value) == len(given)
        for one, other in zip(value, given, strict=True):
            assert_is(one, other)
    else:
        assert value == given
        assert isinstance(value, bool) == isinstance(given, bool)
        assert type(value) in (str, int, float, bool, type(None), dict)


@pytest.mark.slow
@fuzzed(0.6)
@given(mutated() | written() | st.binary(max_size=40), st.sampled_from([".yaml", ".yaml", ".json", ".YML"]))
@example(b"model_name: m\nquery_prompt: " + b" a\n" * 80_000, ".yaml")
@example(b"model_name: m\nquery_prompt: " + b"a." * 32_000, ".yaml")
@example(b"model_name: m\nquery_prompt: " + b"?token" * 10_000, ".yaml")
@example(b"\n" * 2**20, ".yaml")
@example(b"model_name: m\nquery_prompt: |\n " + b"\"'" * 60_000, ".yaml")
@example(b"[" * 200_000, ".json")
def test_a_file_is_refused_or_taken_as_it_stands(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = (tmp_path / "given").with_suffix(suffix)
    path.write_bytes(content)
    if (found := judged(lambda: load_config(path))) is not None:
        assert_kept(found, tmp_path)


@fuzzed(0.6)
@given(
    st.lists(
        st.tuples(keys, st.sampled_from(["=", "=", "=", ".a=", "", " = "]), texts).map("".join) | texts, max_size=5
    )
)
@example(["a=1"] * 100_000)
@example(["column_mapping={" + "a: query, " * 3000 + "}"])
@example([f"column_mapping.c{number}=query" for number in range(1_900)])
@example(["query_prompt=" + "x" * 300_000])
def test_overrides_are_refused_or_taken_as_they_stand(tmp_path: Path, words: list[str]) -> None:
    if (found := judged(lambda: load_config(None, ["model_name=m", *words]))) is not None:
        assert_kept(found, tmp_path)


@fuzzed(0.8)
@given(python_values, python_values)
@example({"column_mapping": "odd: empty nested"}, {})
@example({"report_to": "odd: many"}, {})
@example({"attn_implementation": "odd: enumeration"}, {"weight_decay": "odd: number of its own"})
@example({"query_prompt": "odd: quotes"}, {})
@example({"column_mapping": "odd: columns"}, {})
@example({"projection_dim": 8}, {"projection_dim": None})
def test_values_of_python_are_refused_or_taken_as_they_are(
    tmp_path: Path, base: dict[Any, object], over: dict[Any, object]
) -> None:
    base, over = ({name: real(value) for name, value in layer.items()} for layer in (base, over))
    found = judged(lambda: load_values({"model_name": "m", **base}, over))
    if found is None:
        return
    assert_kept(found, tmp_path)
    settings = {target: value for layer in ({"model_name": "m", **base}, over) for name, value in layer.items()
                for target in ALIASES.get(name, (name,))}  # fmt: skip
    if any(isinstance(settings.get(tower), str) for tower in ("text_model_name", "image_model_name")):
        del settings["model_name"]  # it names the pair of them
    for name, value in settings.items():
        assert_is(getattr(found.config, name), meant(name, value))


@fuzzed(0.4)
@given(st.sampled_from(KEYS), plain | odd)
@example("torch_dtype", None)
@example("save_steps", 0)
@example("save_steps", -0.0)
def test_one_value_for_one_key(tmp_path: Path, name: str, value: object) -> None:
    found = judged(lambda: load_values({"model_name": "m"}, {name: real(value)}))
    if found is not None:
        assert_kept(found, tmp_path)
        for target in ALIASES.get(name, (name,)):
            assert_is(getattr(found.config, target), meant(target, real(value)))


pieces = st.lists(
    st.sampled_from(
        ["https://", "u:", "@", "host/", "?", "&", "token=", "password", "=", ":", ";", " ", "***", "Bearer ", "hf_",
         "sk-", "Authorization: ", "a1b2c3d4e5f6g7h8i9", "AKIA", "ABCDEFGH12345678", "--", "api_key",
         "'", '"', "\n", "/", "#"]
    ),
    max_size=12,
)  # fmt: skip


@fuzzed(0.4)
@given(pieces.map("".join) | texts)
def test_redacting_twice_is_redacting_once(text: str) -> None:
    with within_limits():
        once = redact(text)
    assert redact(once) == once
