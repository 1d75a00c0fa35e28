"""Tar shards: samples become rows, pictures stay where they are; hostile shards are refused with nothing written."""

import io
import json
import os
import resource
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.rows import png

from vembed.batch import Image, ImageLimits, content_id
from vembed.data import table_cache, tar_shards
from vembed.data.collate import collate
from vembed.data.images import decode_image
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.data.sampler import GlobalSampler
from vembed.data.table import RecordTable
from vembed.data.tar_shards import MappedFile
from vembed.errors import DataError, MachineError
from vembed.training.batches import assign_rows, estimated_costs

TRAIN = {"role": "train"}


def write(path: Path, members: Sequence[tuple[str, bytes]], *, form: int = tarfile.PAX_FORMAT) -> str:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def captions(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    return [
        member
        for i in range(first, first + count)
        for member in ((f"{i:05}.txt", f"a square of side {i}".encode()), (f"{i:05}.png", png(size=(i + 1, i + 1))))
    ]


def read_rows(path: str, **keys: Any) -> RecordTable:
    return DataSource(path, "train", DataKeys(**keys)).records().table


def refusal(path: str, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(path, **keys)
    return str(caught.value)


def test_captions_search_the_pictures_of_a_shard(tmp_path: Path) -> None:
    path = write(tmp_path / "train-000.tar", captions(3))
    rows = [{"bytes": png(size=(i + 1, i + 1))} for i in range(3)]
    pq.write_table(
        pa.table({"caption": [f"a square of side {i}" for i in range(3)], "image": rows}), tmp_path / "a.parquet"
    )
    table = read_rows(path)
    assert table.fingerprint == read_rows(str(tmp_path / "a.parquet")).fingerprint
    for i, record in enumerate(table):
        assert record.query == f"a square of side {i}"
        assert record.location == f"train-000.tar:{i + 1}"
        (picture,) = record.positives
        assert isinstance(picture, Image)
        assert picture.data == png(size=(i + 1, i + 1))
        assert decode_image(picture, ImageLimits()).size == (i + 1, i + 1)


def test_pictures_stay_in_the_shard(tmp_path: Path) -> None:
    read_rows(write(tmp_path / "a.tar", captions(3)))
    (picture,) = read_rows(str(tmp_path / "a.tar"))[2].positives
    assert isinstance(picture, Image)
    assert isinstance(picture.data, memoryview)
    assert isinstance(picture.data.obj, MappedFile)
    assert picture.data.obj.path == str(tmp_path / "a.tar")


def test_more_shards_than_files_that_may_be_open_by_default_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    for number in range(60):
        write(tmp_path / "set" / f"train-{number:06}.tar", captions(1, first=number))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len([*Path("/proc/self/fd").iterdir()]) + 30
    try:
        tar_shards._raise_open_files.cache_clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        table = read_rows(str(tmp_path / "set"))
        assert len(table) == 60
        monkeypatch.setattr(tar_shards, "_raise_open_files", lambda: few)
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        with pytest.raises(MachineError, match=f"may open {few:,} files .*'ulimit -Hn'.* fewer and larger files"):
            read_rows(str(tmp_path / "set"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_members_name_columns_and_json_holds_them(tmp_path: Path) -> None:
    members = [
        ("set/1.query.txt", b" which is red? \n"),
        ("set/1.positive_image.PNG", png("red")),
        ("set/1.negative_images.png", png("blue")),
        ("set/1.cls", b"7"),
        ("set/1.mp3", b"noise"),
        ("set/2.json", json.dumps({"query": "q", "positive_image": None, "label": "b"}).encode()),
        ("set/2.positive_image.png", png("green")),
    ]
    assert "2.positive_image.png: the sample has the column 'positive_image' twice" in refusal(
        write(tmp_path / "a.tar", members)
    )
    members[5] = ("set/2.json", json.dumps({"query": "q", "label": "b"}).encode())
    loaded = DataSource(write(tmp_path / "a.tar", members), **TRAIN).records()
    first, second = loaded.table
    assert (first.query, first.label) == ("which is red?", 7)
    assert [content_id(item) for item in (*first.positives, *first.negatives)] == [
        content_id(Image("", png(colour))) for colour in ("red", "blue")
    ]
    assert (second.query, second.label) == ("q", "b")
    assert loaded.notes == ("Ignored columns: mp3.",)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_folders_of_every_form_are_read(tmp_path: Path, form: int) -> None:
    folder, name = "f" * 120, "é" * 40
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        made = tarfile.TarInfo(folder)
        made.type = tarfile.DIRTYPE
        tar.addfile(made)
        for ending, data in (("txt", b"q"), ("png", png())):
            info = tarfile.TarInfo(f"{folder}/{name}.{ending}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert [record.query for record in read_rows(str(tmp_path / "a.tar"))] == ["q"]


def special(kind: bytes, name: str = "2.png", link: str = "") -> Callable[[Path], None]:
    def add(path: Path) -> None:
        with tarfile.open(path, "w") as tar:
            for member, data in captions(1):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            tar.addfile(info)

    return add


def plain(*members: tuple[str, bytes]) -> Callable[[Path], None]:
    return lambda path: void(write(path, [*captions(1), *members]))


def cut(last: Callable[[int], int], tail: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write(path, captions(2))
        data = path.read_bytes()
        with tarfile.open(path) as tar:
            member = tar.getmembers()[-1]
        end = member.offset_data + 512  # where a small member ends with its padding
        path.write_bytes(data[: last(end)] + tail)

    return make


def garble(path: Path) -> None:
    write(path, captions(2))
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        data[tar.getmembers()[2].offset + 3] ^= 1
    path.write_bytes(data)


def pax(headers: Mapping[str, str], *, everywhere: bool = False) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=headers if everywhere else {}) as tar:
            info = tarfile.TarInfo("1.png")
            info.size, info.pax_headers = len(png()), {} if everywhere else dict(headers)
            tar.addfile(info, io.BytesIO(png()))

    return make


def void(_: object) -> None:
    """Return nothing."""


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "above": (plain(("../x.png", png())), r"member '\.\./x\.png': its name leads out"),
    "above inside": (plain(("a/../../x.png", png())), "its name leads out"),
    "absolute": (plain(("/etc/x.png", png())), "its name leads out"),
    "by header": (pax({"path": "../../x.png"}), "its name leads out"),
    "control characters": (plain(("a\n\x1b[2J.png", png())), "forbidden characters"),
    "symlink": (special(tarfile.SYMTYPE, link="/etc/passwd"), "it is a link"),
    "hard link": (special(tarfile.LNKTYPE, link="00000.png"), "it is a link"),
    "device": (special(tarfile.CHRTYPE), "it is a device"),
    "pipe": (special(tarfile.FIFOTYPE), "it is a pipe"),
    "sparse": (special(tarfile.GNUTYPE_SPARSE), "sparse|no header of a tar member"),
    "unknown type": (special(b"Z"), "no regular file"),
    "link by header": (pax({"linkpath": "/etc/passwd"}), "a link or a sparse file"),
    "sparse by header": (pax({"GNU.sparse.major": "1"}), "a link or a sparse file"),
    "all alike": (pax({"path": "x.png"}, everywhere=True), "gives all members one name"),
    "size by header": (pax({"size": "99999999999999999999"}), "truncated"),
    "negative size by header": (pax({"size": "-5"}), "truncated"),
    "pickle": (plain(("1.pkl", b"cos\nsystem\n")), "it is a pickle"),
    "a key again": (
        plain(("2.txt", b"t"), ("00000.json", b"{}")),
        "its key comes twice",
    ),
    "no extension": (plain(("README", b"t")), "KEY.EXTENSION"),
    "of macOS": (plain(("._1.png", b"t")), "KEY.EXTENSION"),
    "truncated in a member": (cut(lambda end: end - 500), "truncated"),
    "truncated in a header": (cut(lambda end: end - 1000), "truncated"),
    "without its end": (cut(lambda end: end), "no end mark"),
    "two put together": (cut(lambda end: end, b"\0" * 5000 + b"x"), "data follows the end mark"),
    "empty": (lambda path: void(path.write_bytes(b"")), "the shard is empty"),
    "no tar": (lambda path: void(path.write_bytes(b"x" * 4096)), "no header of a tar member"),
    "a header with a flipped bit": (garble, "no header of a tar member"),
}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_shard_is_refused_with_nothing_written(tmp_path: Path, name: str) -> None:
    make, reason = HOSTILE[name]
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder / "a.tar")
    before = sorted(os.walk(tmp_path / "data"))
    with pytest.raises(DataError, match=rf"^a\.tar: (?s:.)*({reason})"):
        read_rows(str(folder / "a.tar"), skip_invalid_records=True)
    assert sorted(os.walk(tmp_path / "data")) == before
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name != "records" and path.suffix != ".lock"]
    write(folder / "a.tar", captions(2))  # the valid neighbour
    assert len(read_rows(str(folder / "a.tar"))) == 2


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (("9.png", b"no picture"), "a.tar:3: image: the picture's bytes: no picture of a known format"),
        (("9.txt", b"\xff"), "a.tar:3: 9.txt: invalid UTF-8 at byte 1"),
        (("9.json", b'{"a": 1, "a": 2}'), "a.tar:3: 9.json: bad JSON: the key 'a' is given twice"),
        (("9.json", b"[1]"), "a.tar:3: 9.json: expected a JSON object, got list"),
        (("9.json", b"[" * 100_000), "a.tar:3: 9.json: bad JSON: nested too deeply"),
    ],
)
def test_a_broken_sample_is_named_and_may_be_dropped(tmp_path: Path, member: tuple[str, bytes], reason: str) -> None:
    other = ("9.png", png()) if member[0] == "9.txt" else ("9.txt", b"t")
    path = write(tmp_path / "a.tar", [*captions(2), other, member])
    assert reason in refusal(path)
    assert len(read_rows(path, skip_invalid_records=True)) == 2


def test_numbered_shards_must_all_be_there(tmp_path: Path) -> None:
    for shard in range(3):
        write(tmp_path / f"s-{shard:03}.tar", captions(2, first=2 * shard))
    queries = [f"a square of side {i}" for i in range(6)]
    for path in ("s-{000..002}.tar", "s-*.tar", ""):
        assert [record.query for record in read_rows(str(tmp_path / path))] == queries
    assert "names 4 files, and " in (told := refusal(str(tmp_path / "s-{000..003}.tar")))
    assert told.endswith("s-003.tar doesn't exist")
    assert "names no file" in refusal(str(tmp_path / "s-{002..000}.tar"))
    assert "names no file, or over" in refusal(str(tmp_path / "s-{0..999999999}.tar"))


@pytest.mark.usefixtures("cache")
def test_a_kept_index_gives_the_same_records_until_a_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_cache, "FREE_SHARE", 1e30)  # an index takes no room to speak of
    for shard in range(2):
        write(tmp_path / f"s-{shard}.tar", captions(4, first=4 * shard))
    first, second = (read_rows(str(tmp_path / "s-{0..1}.tar")) for _ in range(2))
    assert first.folder is not None
    assert list(first) == list(second)
    assert first.items.ids.tolist() == second.items.ids.tolist()
    kept = sum(path.stat().st_size for path in first.folder.iterdir() if path.suffix != ".json")
    assert kept < sum(path.stat().st_size for path in tmp_path.glob("*.tar")) / 3
    write(tmp_path / "s-1.tar", captions(4, first=20))
    third = read_rows(str(tmp_path / "s-{0..1}.tar"))
    assert [record.query for record in third][4:] == [f"a square of side {i}" for i in range(20, 24)]


def own_batches(rank: int, world_size: int, path: str, first: int, last: int, cache: str) -> list[list[list[int]]]:
    """Return of each step the records in order, and the ids of the items that a process makes features of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(table_cache.VARIABLE, cache)
        patch.setattr(table_cache, "LEAST_BYTES", 1)
        table = read_rows(path)
    sampler = GlobalSampler(len(table), batch_size=4, seed=3)
    batches = []
    for step in range(first, last):
        batch = collate(table.take(sampler.rows(step)), sampler.rows(step).tolist())
        groups, items = np.split(np.arange(len(batch.queries) * 2), 2), (*batch.queries, *batch.documents)
        own = assign_rows(groups, estimated_costs(items, None), world_size).slots[rank]
        ids = np.concatenate([batch.query_ids_Q, batch.document_ids_D])[own]
        batches.append([list(batch.record_ids), ids.tolist()])
    return batches


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.slow
def test_every_sample_comes_once_an_epoch_and_in_the_same_order_after_a_stop(
    tmp_path: Path, world_size: int, request: pytest.FixtureRequest
) -> None:
    for shard in range(3):
        write(tmp_path / f"s-{shard}.tar", captions(7, first=7 * shard))

    def run(first: int, last: int) -> list[list[list[list[int]]]]:
        arguments = (world_size, str(tmp_path / "s-*.tar"), first, last, str(tmp_path / "cache"))
        if world_size == 1:
            return [own_batches(0, *arguments)]
        ranks = request.getfixturevalue("two_ranks")
        return ranks.run(own_batches, *arguments)

    whole, before, after = run(0, 10), run(0, 3), run(3, 10)
    assert [first + rest for first, rest in zip(before, after, strict=True)] == whole
    ids = [
        content_id(item) for i in range(21) for item in (f"a square of side {i}", Image("", png(size=(i + 1, i + 1))))
    ]
    for epoch in (slice(0, 5), slice(5, 10)):
        seen = [record for records, _ in whole[0][epoch] for record in records]
        assert len(seen) == len(set(seen)) == 20  # a last batch of one record is left out
        own = [each for rank in whole for _, items in rank[epoch] for each in items]
        assert sorted(own) == sorted(ids[2 * record + side] for record in seen for side in (0, 1))
    assert len({tuple(records) for rank in whole for records, _ in rank}) == 10  # all ranks agree; epochs differ


def test_a_corpus_is_no_shard(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown kind of file"):
        DataSource(write(tmp_path / "a.tar", captions(1)), "test").documents()


def extended(*bodies: bytes) -> bytes:
    """Return the bytes of a member behind some extended headers."""

    def part(name: str, kind: bytes, body: bytes) -> bytes:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, len(body)
        return info.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % 512)

    return b"".join(part("x", tarfile.XHDTYPE, body) for body in bodies) + part("1.txt", tarfile.REGTYPE, b"abc")


@pytest.mark.slow
def test_extended_headers_cost_what_their_bytes_do(tmp_path: Path) -> None:
    member = extended(b"6 a=b\n" * tar_shards.MAX_RECORDS)
    (tmp_path / "many.tar").write_bytes(member * (8 * 2**20 // len(member)) + bytes(1024))
    start = time.process_time()
    assert sum(1 for _ in tar_shards.members(tmp_path / "many.tar")) > 1000
    assert time.process_time() - start < 5, "it took 45 s while each record copied the rest of its header"


@pytest.mark.parametrize(
    ("bodies", "reason"),
    [
        ([b"6 a=b\n" * (tar_shards.MAX_RECORDS + 1)], "over 1,000 records"),
        ([b"6 a=b\n"] * (tar_shards.MAX_EXTENDED_HEADERS + 1), "over 16 extended headers"),
        ([b"7 a=b\n"], "no whole record at its byte 0"),
        ([b"6 a=b\n6 a=b\nx"], "broken extended header"),
        ([b"0 a=b\n"], "no whole record"),
        ([b"-6 a=b\n"], "no whole record"),
    ],
)
def test_bent_extended_headers_are_refused(tmp_path: Path, bodies: list[bytes], reason: str) -> None:
    (tmp_path / "bent.tar").write_bytes(extended(*bodies) + bytes(1024))
    with pytest.raises(DataError, match=reason):
        list(tar_shards.members(tmp_path / "bent.tar"))


def test_the_last_of_two_extended_names_counts(tmp_path: Path) -> None:
    (tmp_path / "named.tar").write_bytes(extended(b"14 path=a.txt\n", b"14 path=b.txt\n\0\0") + bytes(1024))
    assert [name for name, _ in tar_shards.members(tmp_path / "named.tar")] == ["b.txt"]
