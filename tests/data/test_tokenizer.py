"""The tokenizer gives every text and every byte back."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.data import Tokenizer, load_tokenizer
from telechat_moe.data.tokenizer import EOD_TOKEN, train_tokenizer
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError

pytest.importorskip("tokenizers", reason="tokenizers is not installed")


@pytest.fixture(scope="module")
def texts(corpus: Path) -> list[str]:
    return [path.read_bytes().decode() for path in sorted(corpus.rglob("*.txt"))]


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train_tokenizer(texts, 500)


any_text = st.one_of(
    st.text(),
    st.text(alphabet="ab \n\t\r'<|eod|>ſ\u2028\x1c\x85", max_size=60),
    st.lists(st.sampled_from([EOD_TOKEN, "self", " ", "\n", "汉", "🙂", "'s"])).map("".join),
)


@given(text=any_text)
@settings(max_examples=300, deadline=None)
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokenizer.eod not in tokens
    assert tokenizer.decode(tokens) == text


@given(text=any_text, size=st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_pieces_give_the_same_tokens(tokenizer: Tokenizer, text: str, size: int) -> None:
    whole = tokenizer.encode_documents([text])[0]
    assert tokenizer.encode_documents([text], size)[0].tolist() == whole.tolist()


def test_pieces_are_not_cut_in_white_space() -> None:
    """A run of line ends is one token at the end of a text, and is not before a word."""
    tokenizer = train_tokenizer(["a\n\n", "b\n\n\n"] * 50, 270)
    assert len(tokenizer.encode("\n\n")) < len(tokenizer.encode("\n\nb")) - 1
    for text in ("a\n\nb", "a\nb\n\n\na\nb", "\n\nb"):
        whole = tokenizer.encode_documents([text])[0].tolist()
        assert tokenizer.encode_documents([text], 1)[0].tolist() == whole


def test_pieces_of_real_text(tokenizer: Tokenizer) -> None:
    text = Path(json.__file__).read_text(encoding="utf-8")
    whole = tokenizer.encode_documents([text, "x"])
    for size in (1, 10, 100, 1000):
        pieces = tokenizer.encode_documents([text, "x"], size)
        assert [p.tolist() for p in pieces] == [w.tolist() for w in whole]
    assert whole[1].tolist() == [*tokenizer.encode("x").tolist(), tokenizer.eod]


def test_all_bytes_are_in_the_alphabet(tokenizer: Tokenizer) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = ByteLevel.alphabet()
    assert len(alphabet) == 256
    assert set(alphabet) <= set(json.loads(tokenizer.to_json())["model"]["vocab"])
    assert tokenizer.vocab_size == 500
    assert (tokenizer.eod, tokenizer.decode([0])) == (0, EOD_TOKEN)
    assert tokenizer.decode([0], skip_special=True) == ""


def test_saved_and_loaded(tokenizer: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.to_json() == tokenizer.to_json()
        assert loaded.eod == 0
        text = texts[0] + EOD_TOKEN
        assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_training_is_deterministic_across_processes(corpus: Path, tokenizer: Tokenizer) -> None:
    code = (
        "import sys, pathlib; from telechat_moe.data.tokenizer import train_tokenizer\n"
        "texts = [p.read_bytes().decode() for p in sorted(pathlib.Path(sys.argv[1]).rglob('*.txt'))]\n"
        "sys.stdout.buffer.write(train_tokenizer(texts, 500).to_json().encode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus)], capture_output=True, check=True
    )
    assert done.stdout.decode() == tokenizer.to_json()


def test_bad_tokenizers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    with pytest.raises(UsageError, match=r"vocab_size is 256; .* needs 257 or more"):
        train_tokenizer(["x"], 256)
    with pytest.raises(BadInputError, match="no such file"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(BadInputError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(path)
    Backend(models.BPE({"a": 0, "<end>": 1}, [])).save(str(path))
    with pytest.raises(BadInputError, match="has no end-of-document token"):
        load_tokenizer(path)
    assert load_tokenizer(path, "<end>").eod == 1


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    """The usual names come first, then what tokenizer_config.json says, as text or as an added token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    config = tmp_path / "tokenizer_config.json"
    Backend(models.BPE({"a": 0, "<|im_end|>": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    for token in ("<|im_end|>", {"content": "<|im_end|>", "special": True}):
        config.write_text(json.dumps({"eos_token": token}))
        assert load_tokenizer(tmp_path).eod == 1
    for said, why in (
        ('{"eos_token": "<other>"}', "has no end-of-document token"),
        ('{"eos_token": null}', "has no end-of-document token"),
        ("[]", "tokenizer_config.json: list found"),
        ("{", "tokenizer_config.json:1: not valid JSON"),
    ):
        config.write_text(said)
        with pytest.raises(BadInputError, match=why):
            load_tokenizer(tmp_path)
    Backend(models.BPE({"</s>": 0, "<|im_end|>": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    config.write_text('{"eos_token": "<|im_end|>"}')
    assert load_tokenizer(tmp_path).eod == 0
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(BadInputError, match=r"tokenizer\.model there can be saved as one"):
        load_tokenizer(tmp_path)


def test_tokens_that_end_a_generation(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    names = {"<|endoftext|>": 0, "<|im_end|>": 1, "<|user|>": 2}
    Backend(models.WordLevel(names)).save(str(tmp_path / "tokenizer.json"))
    one = load_tokenizer(tmp_path)
    assert (one.eos, one.stops) == (0, {0})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    two = load_tokenizer(tmp_path)
    assert (two.eod, two.eos, two.stops) == (0, 1, {1})
    for said, stops in (("[1, 2]", {1, 2}), ("2", {1, 2}), ('"x"', {1}), ("null", {1})):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {said}}}')
        assert load_tokenizer(tmp_path).stops == stops
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|user|>"}')
    with pytest.raises(
        BadInputError, match=r"eos_token is '<\|user\|>' in .* and '<\|im_end\|>' in"
    ):
        load_tokenizer(tmp_path)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    for call in (lambda: train_tokenizer(["x"], 300), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(TelechatMoeError, match=r"pip install 'telechat-moe\[train\]'"):
            call()
