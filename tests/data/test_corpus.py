"""Reading corpora: what is a document, in which order, and what is refused how."""

import gzip
import json
import logging
import sys
from pathlib import Path

import pytest

from telechat_moe.data.corpus import open_corpus
from telechat_moe.errors import BadInputError, TelechatMoeError


def read(*paths: Path, **options) -> list[tuple[str, str]]:
    return [(d.name, d.text) for d in open_corpus(paths, **options).documents()]


def test_folder_is_sorted_and_exact(tmp_path: Path) -> None:
    for name, data in {
        "b.txt": "line\r\nline\rline\n",
        "a/z.md": "\ufeffwith BOM",
        "a/b/c.py": "汉字 🙂",
        "a.txt": "first?",
        ".hidden": "no",
        ".git/config": "no",
        "empty.txt": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode())
    assert read(tmp_path) == [
        ("a/b/c.py", "汉字 🙂"),
        ("a/z.md", "\ufeffwith BOM"),
        ("a.txt", "first?"),
        ("b.txt", "line\r\nline\rline\n"),
    ]
    assert [name for name, _ in read(tmp_path, extensions=["py", ".MD"])] == ["a/b/c.py", "a/z.md"]
    corpus = open_corpus([tmp_path])
    list(corpus.documents())
    assert corpus.empty == 1


def test_overlapping_paths_count_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    assert [text for _, text in read(tmp_path / "b.txt", tmp_path)] == ["b", "a"]


def test_gz_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
    lines = [json.dumps({"text": text, "id": 1}) for text in ("one", "", "two\nlines")]
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"body": "three"}\n'))
    assert read(tmp_path / "a.txt.gz") == [("a.txt.gz", "packed")]
    assert read(tmp_path / "b.jsonl") == [("b.jsonl:1", "one"), ("b.jsonl:3", "two\nlines")]
    assert read(tmp_path / "c.jsonl.gz", text_key="body") == [("c.jsonl.gz:1", "three")]
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "four"}\r\n \r\n{"text": "five"}\r\n')
    assert read(tmp_path / "d.jsonl") == [("d.jsonl:1", "four"), ("d.jsonl:3", "five")]


def test_what_is_not_text_is_skipped_in_folders(tmp_path: Path, caplog) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\xff")
    (tmp_path / "nul.dat").write_bytes(b"a\0b")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    corpus = open_corpus([tmp_path])
    assert [d.text for d in corpus.documents()] == ["good"]
    assert corpus.skipped == {"image.png": "not UTF-8 at byte 0", "nul.dat": "binary"}
    with caplog.at_level(logging.WARNING):
        corpus.warn_skipped()
    assert "skipped 2 file(s) that are not text: image.png" in caplog.text


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"ok \xff", r"a\.txt: not UTF-8 text: byte 3 is 0xff"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl: line 2: not JSON at column"),
        ("a.jsonl", b'\n{"tekst": "x"}', r"line 2: has no key 'text' \(keys: 'tekst'\)"),
        ("a.jsonl", b'{"text": 5}', r"line 1: has int, not text, under 'text'"),
        ("a.jsonl", b"[1]", r"line 1: a JSON list, expected an object"),
        ("a.jsonl", b'{"text": "\xff"}', r"line 1: not UTF-8 text: byte 10 of the line"),
        ("a.jsonl", b'{"text": "a\\ud800"}', r"line 1: character 1 .* half a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, r"line 1: not JSON"),
        pytest.param(
            "a.jsonl",
            b'{"text": "x"}\n{"id": 1' + b"0" * 5000 + b"}",
            r"line 2: not JSON: .* thousands of digits",
            id="a number of thousands of digits",
        ),
        ("a.gz", b"no gzip", r"a\.gz: broken gzip data after byte 0: Not a gzipped file"),
        (
            "a.gz",
            gzip.compress(b"x" * 9999, mtime=0)[:-12],
            r"a\.gz: the gzip data ends .* truncated",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9],
            r"a\.jsonl\.gz: .*truncated",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInputError, match=message):
        read(tmp_path / name)


def test_a_named_file_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for name, data in {"b.txt": b"", "c.jsonl": b'\n{"text": ""}\n'}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadInputError, match=rf"{name}: holds no text; leave it out"):
            read(tmp_path / "a.txt", tmp_path / name)
    assert read(tmp_path) == [("a.txt", "text")]


def test_zstandard_and_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `data`)")
    import pyarrow.parquet as parquet

    texts = [f"line {number}" for number in range(3000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    for name, data in {"a.jsonl.zst": lines, "b.txt.zst": "naïve\r\n".encode()}.items():
        with arrow.CompressedOutputStream(str(tmp_path / name), "zstd") as stream:
            stream.write(data)
    columns = {"text": texts, "body": arrow.array(texts, arrow.large_string())}
    columns["coded"] = arrow.array(texts).dictionary_encode()
    table = arrow.table(columns)
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=700)
    numbered = [(f"{number}", text) for number, text in enumerate(texts, 1)]
    assert read(tmp_path / "a.jsonl.zst") == [(f"a.jsonl.zst:{n}", text) for n, text in numbered]
    assert read(tmp_path / "b.txt.zst") == [("b.txt.zst", "naïve\r\n")]
    for key in columns:
        found = read(tmp_path / "c.parquet", text_key=key)
        assert found == [(f"c.parquet:{n}", text) for n, text in numbered]
    assert [name for name, _ in read(tmp_path, extensions=["txt"])] == ["b.txt.zst"]

    whole = (tmp_path / "a.jsonl.zst").read_bytes()
    rows = (tmp_path / "c.parquet").read_bytes()
    broken = arrow.Array.from_buffers(
        arrow.string(), 1, [None, arrow.py_buffer(b"\0\0\0\0\1\0\0\0"), arrow.py_buffer(b"\xff")]
    )
    tables = {
        "null": arrow.table({"text": ["a", None]}),
        "number": arrow.table({"text": [1]}),
        "coded": arrow.table({"text": arrow.array([1, 1]).dictionary_encode()}),
        "other": arrow.table({"body": ["a"]}),
        "bytes": arrow.table({"text": broken}),
        "none": arrow.table({"text": arrow.array([], arrow.string())}),
    }
    for name, one in tables.items():
        parquet.write_table(one, tmp_path / f"{name}.parquet")
    (tmp_path / "half.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "junk.zst").write_bytes(b"no Zstandard")
    (tmp_path / "half.parquet").write_bytes(rows[: len(rows) // 2])
    for name, message in {
        "half.jsonl.zst": r"half\.jsonl\.zst: cannot be read .*Truncated",
        "junk.zst": r"junk\.zst: cannot be read after byte 0",
        "half.parquet": r"half\.parquet: cannot be read as Parquet after row 0",
        "null.parquet": r"null\.parquet: row 2 has no 'text' \(null\)",
        "number.parquet": r"column 'text' is int64, not text; choose another with --text-key",
        "coded.parquet": r"column 'text' is int64, not text",
        "other.parquet": r"has no column 'text' \(columns: 'body'\); choose one with --text-key",
        "bytes.parquet": r"bytes\.parquet: row 1: not UTF-8 text",
        "none.parquet": r"none\.parquet: holds no text",
    }.items():
        with pytest.raises(BadInputError, match=message):
            read(tmp_path / name)


def test_pyarrow_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(
            TelechatMoeError, match=rf"{name}: .*pip install 'telechat-moe\[data\]'"
        ):
            read(tmp_path / name)


def test_files_of_validation_data(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name in ("train/a.txt", "train/b.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    corpus = open_corpus([tmp_path / "train"], valid=[tmp_path / "c.txt"])
    found = [(document.name, document.valid) for document in corpus.documents()]
    assert found == [("a.txt", False), ("b.txt", False), ("c.txt", True)]
    with pytest.raises(BadInputError, match=r"b\.txt: is both in --corpus and in --valid"):
        open_corpus([tmp_path / "train"], valid=[tmp_path / "train/b.txt"])


def test_flipped_gzip_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(bytes(range(256)) * 50))
    data[len(data) // 2] ^= 0x10
    (tmp_path / "a.gz").write_bytes(data)
    with pytest.raises(BadInputError, match=r"a\.gz: "):
        read(tmp_path / "a.gz")


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="nowhere: no such file or folder"):
        open_corpus([tmp_path / "nowhere"])
    with pytest.raises(BadInputError, match=r"no files ending in \.py found"):
        open_corpus([tmp_path], extensions=["py"])


def test_default_corpus() -> None:
    corpus = open_corpus([])
    names = [source.name for source in corpus.files]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert {"json/decoder.py", "ast.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not parts & {"encodings", "pydoc_data"}
    assert not any(name.startswith("_sysconfigdata") or not name.endswith(".py") for name in names)
    assert 4e6 < sum(source.path.stat().st_size for source in corpus.files) < 40e6
    assert open_corpus([""]).label == corpus.label
