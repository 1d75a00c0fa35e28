"""Names of built-in code and of plugins stand in one table."""

import subprocess
import sys

import pytest

from vembed.errors import ConfigError
from vembed.registry import Registry


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


def test_the_registry_imports_nothing_heavy() -> None:
    code = "import sys, vembed.registry; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
