"""What is learned of conversations, by templates of the nature of public models', against a second writer and transformers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import NATURES, TOKENS, Messages, Nature
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tokenizers import AddedToken

from telechat_moe.data.chat_template import ChatTemplate
from telechat_moe.data.conversations import (
    ChatFormat,
    FieldCheck,
    bare,
    conversation_text,
    notes,
    read_template,
)
from telechat_moe.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from telechat_moe.errors import BadInputError

words = st.text("ab <é\n汉🙂_", max_size=12).filter(str.strip)


@st.composite
def talks(draw: st.DrawFn, system: bool = True) -> Messages:
    """Questions and answers in turn, after a system message or none."""
    messages = (
        [{"role": "system", "content": draw(words)}] if system and draw(st.booleans()) else []
    )
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(words)})
        messages.append({"role": "assistant", "content": draw(words)})
    return messages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with tokenizer and template for each nature, as Hugging Face's are."""
    root = tmp_path_factory.mktemp("natures")
    backend = train_tokenizer(["the user asks and the assistant answers\n" * 20], 300)._backend
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in TOKENS])
    for name, nature in NATURES.items():
        write_folder(root / name, backend, nature)
    return {name: root / name for name in NATURES}


def write_folder(folder: Path, backend: Any, nature: Nature) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(nature.source, encoding="utf-8")
    config = {"eos_token": {"content": nature.eos}, "bos_token": nature.bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    stops = [backend.token_to_id(token) for token in nature.stops]
    if stops:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))


def tokenizer_of(folder: Path) -> Tokenizer:
    """The end of a document is a token that most templates do not know."""
    return load_tokenizer(folder, "<|endoftext|>")


def encode(
    folder: Path, messages: Messages, counts: Counter[str] | None = None, **line: Any
) -> list[np.ndarray]:
    chat = ChatFormat(("assistant",), 999, None, ChatTemplate(*read_template(folder)))
    text = conversation_text("chat:1", {"messages": messages, **line}, "messages")
    return [d.stored for d in chat.encode(tokenizer_of(folder), ["chat:1"], [text], counts)]


def expected(tokenizer: Tokenizer, document: list[tuple[str, bool]]) -> list[int]:
    """Return a document as stored, of the characters that are learned."""
    text = "".join(part for part, _ in document)
    learned = np.repeat([one for _, one in document], [len(part) for part, _ in document])
    encoded = tokenizer._spelling.encode(text, add_special_tokens=False)
    return [
        token if learned[begin:end].any() else ~token
        for token, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True)
    ]


@pytest.mark.parametrize("name", NATURES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_answers_and_their_ends_are_learned(name: str, data, folders: dict[str, Path]) -> None:
    nature, folder = NATURES[name], folders[name]
    messages = data.draw(talks(nature.system))
    if name == "qwen3":
        for m in messages:
            if m["role"] == "assistant" and data.draw(st.booleans()):
                m["content"] = f"<think>\n{data.draw(words)}\n</think>\n\n{m['content']}"
    counts = Counter[str]()
    stored = encode(folder, messages, counts)
    tokenizer = tokenizer_of(folder)
    documents = nature.write(messages)
    assert [d.tolist() for d in stored] == [expected(tokenizer, d) for d in documents]
    told = notes(counts, tokenizer)
    if len(documents) > 1:
        assert f"1 conversations became {len(documents)} documents" in told.pop()
    assert [nature.says in note for note in told[-1:]] == [True] * bool(nature.says)
    # transformers writes the same, but for what is appended.
    theirs = ChatTemplate(nature.source, {"bos_token": nature.bos, "eos_token": nature.eos})
    text = tokenizer.decode(bare(stored[0]))
    assert text.removesuffix("<|endoftext|>") == theirs.render(messages, {})[0].removesuffix(
        "<|endoftext|>"
    )


@pytest.mark.parametrize("name", ["marked", "endless marks"])
@given(messages=talks())
@settings(max_examples=10, deadline=None)
def test_marks_are_those_of_transformers(name: str, messages: Messages, folders) -> None:
    import transformers

    nature = NATURES[name]
    for m in messages:
        m["content"] += "."  # of a last character of two tokens transformers takes the first only
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folders[name] / "tokenizer.json")
    )
    want = theirs.apply_chat_template(
        messages,
        chat_template=nature.source,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    (stored,) = encode(folders[name], messages)
    assert bare(stored).tolist() == want["input_ids"]
    assert (stored >= 0).astype(int).tolist() == want["assistant_masks"]
