"""The .bin/.idx format: what is written is read back, and what is damaged is refused by name."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telechat_moe.data import IndexedDataset, write_indexed
from telechat_moe.data.indexed import token_dtype
from telechat_moe.errors import BadInputError

DTYPES = {np.uint8: 255, np.uint16: 65535, np.int32: 2**31 - 1, np.int64: 2**63 - 1}


@given(data=st.data(), dtype=st.sampled_from(list(DTYPES)))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_written_is_read(tmp_path: Path, data: st.DataObject, dtype: type) -> None:
    token = st.integers(0, DTYPES[dtype])
    documents = data.draw(st.lists(st.lists(token, max_size=20), max_size=12))
    write_indexed(tmp_path / "d", documents, dtype)
    found = IndexedDataset(tmp_path / "d")
    assert found.dtype == dtype
    assert len(found) == found.num_documents == len(documents)
    assert [found[i].tolist() for i in range(len(found))] == documents


def test_layout_is_megatrons(tmp_path: Path) -> None:
    """Against bytes put together by hand from the published layout."""
    write_indexed(tmp_path / "d", [[7, 8, 0], [9, 0]], np.uint16)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<ii", 3, 2) + struct.pack("<qq", 0, 6) + struct.pack("<qqq", 0, 1, 2)
    assert (tmp_path / "d.idx").read_bytes() == expected
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<5H", 7, 8, 0, 9, 0)


def test_token_type_follows_megatron() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_sequences_of_one_document(tmp_path: Path) -> None:
    """Megatron may store several sequences per document."""
    write_indexed(tmp_path / "d", [[1, 2], [3], [4]], np.int32)
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    raw[18:34] = struct.pack("<QQ", 3, 3)
    raw = raw[:-32] + struct.pack("<qqq", 0, 2, 3)
    (tmp_path / "d.idx").write_bytes(raw)
    found = IndexedDataset(tmp_path / "d")
    assert (len(found), found.num_documents) == (3, 2)


def test_token_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="document 1 has a token that does not fit in uint16"):
        write_indexed(tmp_path / "d", [[1], [65536]], np.uint16)


def test_out_of_range(tmp_path: Path) -> None:
    write_indexed(tmp_path / "d", [[1, 2], [3]], np.uint16)
    found = IndexedDataset(tmp_path / "d")
    assert found[-1].tolist() == [3]
    for index in (2, -3):
        with pytest.raises(IndexError):
            found[index]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 99, n) for n in (5, 1, 9, 3)]
    write_indexed(tmp_path / "d", documents, np.uint16)
    return tmp_path / "d"


def test_every_truncation_is_refused(written: Path) -> None:
    for suffix in (".idx", ".bin"):
        path = written.with_suffix(suffix)
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(BadInputError, match=r"d\.(idx|bin): "):
                IndexedDataset(written)
        path.write_bytes(whole + b"\0")
        with pytest.raises(BadInputError, match=path.name):
            IndexedDataset(written)
        path.write_bytes(whole)
    IndexedDataset(written)


def test_every_bit_flip_of_the_index_is_refused(written: Path) -> None:
    """Only in the document list, which no sample depends on, may a flip look sound."""
    path = written.with_suffix(".idx")
    whole = path.read_bytes()
    before = IndexedDataset(written)
    sequences = [before[index].tolist() for index in range(4)]
    document_list = len(whole) - 8 * 5
    accepted = 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = IndexedDataset(written)
        except BadInputError as error:
            assert "d.idx: " in str(error) or "d.bin: " in str(error)  # noqa: PT017
        else:
            assert bit // 8 >= document_list
            assert [found[index].tolist() for index in range(4)] == sequences
            accepted += 1
    assert accepted < 8


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"NOTINDEX\0", "not with Megatron's"),
        (9, struct.pack("<Q", 2), "version 2, expected 1"),
        (17, b"\x00", "token type code 0"),
        (17, b"\x07", "tokens of type float32"),
        (18, struct.pack("<Q", 2**60), "its header announces"),
        (34, struct.pack("<i", -1), "sequence 0 has -1 tokens"),
        (58, struct.pack("<q", 8), "sequence 1 points to byte 8, but .* end at byte 10"),
        (90, struct.pack("<q", 3), "does not rise from 0 to 4"),
    ],
)
def test_messages_say_what_is_wrong(written: Path, at: int, value: bytes, message: str) -> None:
    path = written.with_suffix(".idx")
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)
    with pytest.raises(BadInputError, match=message):
        IndexedDataset(written)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"nothing\.idx: no such file"):
        IndexedDataset(tmp_path / "nothing")
