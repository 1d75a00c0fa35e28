from __future__ import annotations

import ast
import re
import sysconfig
from pathlib import Path

import pytest

from vembed.data.builtin import load_builtin, stdlib_code
from vembed.data.read import read
from vembed.errors import DataError

SPLITS = ("train", "dev", "test")


@pytest.mark.slow
def test_splits_share_no_content_and_no_module() -> None:
    tables = {split: load_builtin("stdlib-code", split).table for split in SPLITS}
    assert sum(len(table) for table in tables.values()) > 3000
    seen: dict[str, str] = {}
    for split, table in tables.items():
        assert len(table) > 200
        for record in table:
            module = record.location.partition(":")[0].partition("/")[0].removesuffix(".py")
            for text in (f"module {module}", record.query.strip(), *(text.strip() for text in record.positives)):
                assert seen.setdefault(text, split) == split
    queries = [record.query for table in tables.values() for record in table]
    assert len(queries) == len(set(queries))


@pytest.mark.slow
def test_a_pair_is_a_docstring_and_its_masked_source() -> None:
    table = load_builtin("stdlib-code", "train").table
    (record,) = [one for one in table if one.query == "Raise GeneratorExit inside generator."]
    document = record.positives[0]
    assert document.startswith("def FUNC(self):\n    try:")
    assert "close" not in document
    assert "Raise GeneratorExit" not in document
    assert record.location.startswith("_collections_abc.py:")
    assert record.negatives == ()


@pytest.mark.slow
def test_locations_are_the_functions_that_they_name() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    for record in load_builtin("stdlib-code", "test").table.take(list(range(0, 200, 20))):
        file, _, line = record.location.rpartition(":")
        assert re.match(r"\s*(async )?def \w+\(", (root / file).read_text("utf-8").splitlines()[int(line) - 1])


def test_no_tests_and_no_installed_packages_are_read() -> None:
    files = {
        record.location.partition(":")[0] for split in SPLITS for record in load_builtin("stdlib-code", split).table
    }
    assert "json/decoder.py" in files
    assert not [
        f for f in files if re.search(r"(^|/)(test|tests|idle_test|site-packages|__pycache__|test_\w+\.py)(/|$)", f)
    ]


SOURCE = '''
class A:
    async def run_all(self, x):
        """Run everything that waits.

        More words.
        """
        # a comment stays
        await self.run_all(x)
        return rerun_all(x)

    def short(self):
        """Return nothing of interest."""
        return None

    def terse(self):
        """Two words."""
        a = 1
        return a

    def same_line(self): """Three words here."""; return 1

    def only_docstring(self):
        """Does nothing at all."""
'''


def test_what_makes_a_pair() -> None:
    (pair,) = stdlib_code.pairs_of(SOURCE, "a.py")
    assert pair.query == "Run everything that waits."
    assert pair.document == (
        "async def FUNC(self, x):\n    # a comment stays\n    await self.FUNC(x)\n    return rerun_all(x)"
    )
    assert pair.line == 3
    ast.parse(pair.document)


def test_files_that_do_not_parse_are_counted(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(SOURCE)
    (tmp_path / "copy.py").write_text(SOURCE)
    (tmp_path / "old.py").write_text("print 'python 2'\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/more.py").write_text(SOURCE.replace("everything", "something"))
    read_uncached = stdlib_code.read_library.__wrapped__  # the cache holds the real library
    pairs, num_unparsed, num_duplicates = read_uncached(str(tmp_path))
    assert (len(pairs), num_unparsed, num_duplicates) == (1, 1, 1)


def test_role_and_split_name_the_same_part() -> None:
    by_role = read("builtin:stdlib-code", "validation").records()
    by_split = read("builtin:stdlib-code", "train", split="dev").records()
    assert by_role.table.fingerprint == by_split.table.fingerprint
    assert by_role.table.fingerprint != read("builtin:stdlib-code", "test").records().table.fingerprint


def test_as_retrieval_each_docstring_searches_the_bodies_of_its_split() -> None:
    task = read("builtin:stdlib-code", "test").judged()
    count = len(load_builtin("stdlib-code", "test").table)
    assert task.name == "stdlib-code/test"
    assert len(task.queries) == len(task.documents) == len(task.qrels) == count
    assert f"{count:,} of" in task.notes[0]


def test_an_unknown_set_or_split_is_refused_with_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'stdlib-code'"):
        read("builtin:stdlib_code", "train").records()
    with pytest.raises(DataError, match="it has: train, dev, test"):
        read("builtin:stdlib-code", "train", split="trian").records()
