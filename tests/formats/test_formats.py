"""Every format that is read, broken in many ways: refused in one line with exit code 3, or as its own reader takes it.

`make test` judges a few hundred mutants; ``pytest -m slow tests/formats`` judges 20,000 in processes with bounds.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import random
import subprocess
import sys
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import format_mutants
import pytest
from format_mutants import BY_NAME, safetensors_takes
from hypothesis import given
from hypothesis import strategies as st

from telechat_moe import reading, tensor_files
from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump import value_files
from telechat_moe.tools.diagnose.traces import read_traces
from telechat_moe.tools.plan.cost.device import load_device

FEWER = {"sweep.yaml": 50, "switches.json": 200}
"""Mutants of formats whose readers load recipes."""


def in_a_child(name: str, count: int, folder: Path) -> dict[str, Any]:
    command = [sys.executable, format_mutants.__file__, name, "1", str(count), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # after what the tokenizers library printed


@pytest.mark.parametrize("name", BY_NAME)
def test_a_few_mutants(name: str, tmp_path: Path) -> None:
    count = 2 if name in FEWER else 12
    found = format_mutants.judge(name, 0, count, tmp_path)
    assert found["wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_20000_mutants(name: str, tmp_path: Path) -> None:
    """Of 37 formats."""
    found = in_a_child(name, FEWER.get(name, 580), tmp_path)
    assert found["wrong"] == []
    assert found["taken"] > 0
    assert found["peak_mib"] < 1000
    assert found["slowest_s"] < 15


# ------------------------------------------------------------------------------ safetensors

SIZES = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "C64": 8, "F4": 0.5, "F6_E2M3": 0.75}
NUMBERS = [0, 1, 2, 3, 8, -1, 1.0, 2.5, "3", True, None, 1 << 63, [1], -0.0]
TEXTS = ["", "a", "é", "__metadata__", "\0", "b\n"]


def header_of(rng: random.Random) -> bytes:
    """Tensors one after another, as they should be, and then at most a few things changed."""
    entries: dict[str, Any] = {}
    end = 0
    for name in rng.sample([text for text in TEXTS if text != "__metadata__"], rng.randrange(4)):
        dtype, shape = rng.choice(list(SIZES)), rng.choices(range(4), k=rng.randrange(4))
        begin, end = end, end + int(math.prod(shape) * SIZES[dtype])
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    for entry in entries.values():
        if rng.random() < 0.25:
            new = [
                rng.choices(NUMBERS, k=rng.randrange(4)),
                rng.choice(NUMBERS),
                rng.choice(["I64", "ZZ", "U8"]),
            ]
            entry[rng.choice(["shape", "data_offsets", "dtype", "more"])] = rng.choice(new)
    if rng.random() < 0.4:
        texts = {
            rng.choice(TEXTS): rng.choice([*TEXTS, *NUMBERS[:1]]) for _ in range(rng.randrange(3))
        }
        entries["__metadata__"] = texts if rng.random() < 0.8 else rng.choice(NUMBERS)
    order = rng.sample(list(entries), len(entries))
    text = json.dumps(
        {name: entries[name] for name in order}, ensure_ascii=rng.random() < 0.5
    ).encode()
    around = rng.choice(
        [(b"", b"")] * 4
        + [(b" ", b"  "), (b"\n", b"\t"), (b"", b"\0"), (b"", b"x"), (b"\xef\xbb\xbf", b"")]
    )
    text = around[0] + text + around[1]
    length = max(0, len(text) + rng.choice([0] * 8 + [1, -1, 1 << 40]))
    return length.to_bytes(8, "little") + text + bytes(end + rng.choice([0] * 6 + [1]))


def test_we_take_what_the_safetensors_library_takes(tmp_path: Path) -> None:
    rng, path, count = random.Random(1), tmp_path / "x.safetensors", 0
    for _ in range(600):
        data = header_of(rng)
        path.write_bytes(data)
        try:
            taken = bool(tensor_files.read_header(path) or True)
        except BadInputError:
            taken = False
        assert taken == safetensors_takes(data), data
        count += taken
    assert 100 < count < 500


def entry(start: int, end: int) -> str:
    return f'{{"dtype":"U8","shape":[{end - start}],"data_offsets":[{start},{end}]}}'


@pytest.mark.parametrize(
    ("header", "size", "said"),
    [
        (
            f'{{"a":{entry(0, 4)},"b":{entry(2, 6)}}}',
            6,
            "b: begins at 2, overlaps a, which ends at 4",
        ),
        (f'{{"a":{entry(0, 2)},"b":{entry(4, 6)}}}', 6, "b: begins at 4, 2 bytes after a"),
        (f'{{"a":{entry(0, 2)}}}', 6, "4 bytes after a, which ends at 2"),
        (f'{{"a":{entry(2, 4)}}}', 4, "a: begins at 2, 2 bytes after the header"),
        (f'{{"a":{entry(0, 4)},"a":{entry(0, 4)}}}', 4, "'a' appears twice"),
        ('{"a":{"dtype":"U8","shape":["3"],"data_offsets":[0,3]}}', 3, "bad entry"),
        ('{"a":{"dtype":"U8","shape":[3.9],"data_offsets":[0,3]}}', 3, "bad entry"),
        ('{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,3]}}', 3, "the number 1e999"),
        ('{"a":{"dtype":"U3","shape":[3],"data_offsets":[0,3]}}', 3, "unknown dtype U3"),
        ("[" * 100_000, 0, "nested too deeply"),
        ('{"__metadata__":{"a":1}}', 0, "__metadata__ is no object of texts"),
    ],
    ids=range(11),
)
def test_a_broken_header_is_named(tmp_path: Path, header: str, size: int, said: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(size))
    with pytest.raises(BadInputError) as error:
        tensor_files.read_header(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


# ------------------------------------------------------------------------------ JSON

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=3), below, max_size=4),
)  # fmt: skip


@given(JSON, st.booleans(), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_what_json_writes_is_read(value: Any, ascii_only: bool, mark: bytes) -> None:
    try:
        text = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    if b"-0" not in text:
        assert reading.parse_json(mark + text) == value


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        (b'{"a": 1,\n "b": }', "line 2 column 7", 2),
        (b'{"a": 1,\n "a": 2}', "'a' appears twice", 0),
        (b"[NaN]", "the number NaN", 0),
        (b"[1e999]", "the number 1e999", 0),
        (b"[" + b"1" * 301 + b"]", "the number 1111", 0),
        (b"[" * 128 + b"]" * 128, "nested too deeply", 0),
        (b"[" * 1_000_000, "nested too deeply", 0),
        (b'["\\ud800"]', "half a character", 0),
        (b'[\n"\xff"]', "no UTF-8 in line 2", 2),
    ],
    ids=range(9),
)
def test_what_is_no_json_is_named(tmp_path: Path, text: bytes, said: str, line: int) -> None:
    with pytest.raises(reading.JsonError, match=said) as error:
        reading.parse_json(text)
    assert error.value.line == line
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(BadInputError, match=said) as refused:
        reading.read_object(path)
    assert str(refused.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert "\n" not in str(refused.value)


def test_numbers_of_others_are_read_where_they_may_be_anything() -> None:
    found = reading.parse_json(
        b'{"a": NaN, "a": 1e999, "b": ' + b"9" * 30 + b"}", finite=False, unique=False
    )
    assert found == {"a": float("inf"), "b": int("9" * 30)}
    with pytest.raises(reading.JsonError, match="5000 digits"):
        reading.parse_json(b"[" + b"9" * 5000 + b"]", finite=False)


def test_a_pipe_and_a_large_file_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 101)
    for name, said in (
        ("pipe", "no regular file"),
        ("large", "more than 100 bytes"),
        ("none", "cannot be read"),
    ):
        with pytest.raises(BadInputError, match=said):
            reading.read_bytes(tmp_path / name, 100)


@pytest.mark.parametrize(
    "name", ["corpus.jsonl", "loss.csv", "hosts", "device.yaml", "kineto.json.gz"]
)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadInputError, match=r"no regular file|no file|no trace"):
        BY_NAME[name].read(tmp_path / name)


# ------------------------------------------------------------------------------ bombs


def test_an_alias_that_multiplies_is_refused(tmp_path: Path) -> None:
    """Nine levels of nine aliases: 387 million values."""
    lines = ["a0: &a0 [" + ",".join("x" * 9) + "]"]
    lines += [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, 9)]
    path = tmp_path / "device.yaml"
    path.write_text("\n".join([*lines, "name: *a8"]))
    with pytest.raises(BadInputError, match=r"device.yaml:6: .*aliases expand"):
        load_device(path)


NONSENSE = {
    "deep": ("base: a100\naliases: " + "[" * 3000, "nesting depth"),
    "date": ("base: a100\nname: 2001-99-99", "device.yaml:2: "),
    "infinite": ("base: a100\nmemory_bytes: .inf", "device.yaml:2: "),
    "overflow": ("base: a100\nmemory_bytes: 1e999", "memory_bytes is '1e999'"),
    "zero": ("base: a100\nmemory_bytes: 0", "memory_bytes is 0"),
    "negative": ("base: a100\nmemory_bytes: -5", "memory_bytes is -5"),
    "bool": ("base: a100\nmemory_bandwidth: true", "memory_bandwidth is True"),
    "digits": ("base: a100\nnode_devices: " + "9" * 5000, "device.yaml:2: "),
    "number": ("base: a100\naliases: 3", "expected numbers"),
    "twice": ("base: a100\nbase: h100", "a second time, first on line 1"),
    "long name": ("base: " + "y" * 5000, "cannot be read"),
    "object": ("base: !!python/object/apply:os.system [x]", "device.yaml:1: "),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_in_a_device_is_named(tmp_path: Path, kind: str) -> None:
    text, said = NONSENSE[kind]
    path = tmp_path / "device.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError) as error:
        load_device(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lies", [False, True])
@pytest.mark.parametrize("member", ["byteorder", "data.pkl"])
def test_a_member_that_inflates_is_not_inflated(tmp_path: Path, member: str, lies: bool) -> None:
    path = tmp_path / "x.pt"
    value_files.save_pt(path, format_mutants.np.ones((2, 3)), "float32")
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content[f"x/{member}"] = bytes(1 << 28)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            how = zipfile.ZIP_DEFLATED if name.endswith(member) else zipfile.ZIP_STORED
            archive.writestr(name, data, how, compresslevel=1)
    if lies:
        size = (1 << 28).to_bytes(4, "little")
        path.write_bytes(path.read_bytes().replace(size, (6).to_bytes(4, "little")))
    del content
    tracemalloc.start()
    with pytest.raises(BadInputError, match=r"x\.pt"):
        value_files.load(path, "float32", (2, 3), tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_trace_that_inflates_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(bytes(100 << 20), 1))
    with pytest.raises(BadInputError, match=r"trace.json.gz: .* inflate to more than"):
        read_traces([path])


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_corpus_that_inflates_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bomb.{suffix}.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + bytes(100 << 20), 1))
    with pytest.raises(BadInputError, match=rf"bomb.{suffix}.gz.*more than"):
        format_mutants.read_corpus(path)


def test_a_number_of_thousands_of_digits_in_a_corpus_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "id": ' + "9" * 5000 + "}\n")
    with pytest.raises(BadInputError, match=r"a\.jsonl: line 2: not JSON.*thousands of digits"):
        format_mutants.read_corpus(path)


def test_a_message_shows_what_it_quotes_printable_and_cut() -> None:
    error = BadInputError("a.json: \x1b[2J\ud800\x00 " + "y" * 9000 + "\n  next")
    first, second = str(error).split("\n")
    assert first.startswith("a.json: \\x1b[2J\\ud800\\x00 yyy")
    assert first.isprintable()
    assert len(first) < 2100
    assert second == "  next"


@pytest.mark.torch
def test_what_torch_takes_is_read_as_torch_reads_it_or_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rng, path, taken = random.Random(5), tmp_path / "a.pt", 0
    good = format_mutants.pt_bytes(tmp_path)
    for _ in range(60):
        data = format_mutants.in_bytes(rng, good)
        path.write_bytes(data)
        with suppress(BadInputError, RuntimeError, ValueError, pickle.UnpicklingError):
            ours = value_files.load(path, "unknown", (2, 3), tmp_path)
            theirs = torch.load(io.BytesIO(data), weights_only=True)
            format_mutants.np.testing.assert_array_equal(ours, theirs.numpy())
            taken += 1
    assert taken > 2


def test_a_broken_file_of_weights_is_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((9999).to_bytes(8, "little") + b"[" * 9999)
    recipe = "telechat3_moe/pretrain_tiny.yaml"
    assert main(["convert", str(path), str(tmp_path / "out"), "--to=hf", "--recipe", recipe]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: broken safetensors header")
    assert error.count("\n") == 1
