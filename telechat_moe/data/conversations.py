"""Conversations as documents of tokens that say which of them are learned.

A conversation is a list of messages ``{"role": ..., "content": ...}``. A format writes it as one document: the chat
template of the tokenizer, or one pattern for all messages. In the token file a token of the context, which is read but not
learned, is stored as its complement ``~token``, which is negative; :func:`bare` gives the token back.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.narrowing import is_object
from telechat_moe.reading import read_object

if TYPE_CHECKING:
    from telechat_moe.data.tokenizer import Tokenizer

Message = dict[str, Any]
STORED = np.dtype(np.int32)
"""Type of the tokens in the file: it must have a sign."""
CONTENT = "{content}"
_FUNCTION = re.compile(
    r'^[ \t]*((?:async )?def [^\n]{1,100}:)\n[ \t]+r?"""(\w.+?)(?:\n[ \t]*\n|""")', re.M | re.S
)


def bare(stored: NDArray[Any]) -> NDArray[Any]:
    """Return the tokens without what they say about the loss; others than those of conversations are unchanged."""
    return np.where(stored < 0, ~stored, stored)


def messages_text(where: str, value: object) -> str:
    """Return messages as one line of JSON, equal messages as equal lines.

    Raises:
        BadInputError: They are no list of objects with texts as role and content; ``where`` says which.
    """
    if not isinstance(value, list) or not value:
        raise BadInputError(
            f"{where}: messages are {_kind(value)}; expected a list with at least one message"
        )
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadInputError(
                f"{where}: message {number} is {_kind(message)}; expected an object"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise BadInputError(
                    f"{where}: message {number} has {_kind(message.get(key))} as {key!r} (keys: "
                    f"{', '.join(map(repr, message)) or 'none'}); expected text"
                )
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInputError(
            f"{where}: a message has half a surrogate pair, which is no character"
        ) from None
    return text


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a JSON {type(value).__name__}"


def docstring_conversations(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and messages for each function of a Python source: its first line, and how its docstring begins."""
    for found in _FUNCTION.finditer(source):
        answer = " ".join(found[2].split())
        messages = [{"role": "user", "content": found[1]}, {"role": "assistant", "content": answer}]
        yield source.count("\n", 0, found.start(1)) + 1, messages_text("", messages)


@dataclass(frozen=True)
class ChatFormat:
    """How messages become a document.

    Attributes:
        loss_roles: Roles whose messages are learned.
        longest: Most tokens of a conversation; longer ones are left out and listed.
        message: Pattern of a message with ``{role}`` and ``{content}``; None: ``template``.
        template: Chat template (Jinja).
        variables: Special tokens by the names that the template has for them.
    """

    loss_roles: tuple[str, ...]
    longest: int
    message: str | None = None
    template: str = ""
    variables: dict[str, str] = field(default_factory=dict[str, str])

    def identity(self) -> dict[str, Any]:
        """Return what decides the tokens, JSON values."""
        how = self.message
        if how is None:
            how = "chat template " + hashlib.sha256(self.template.encode()).hexdigest()
        return {"loss_roles": list(self.loss_roles), "message": how, "seq_length": self.longest}

    def encode(
        self, tokenizer: Tokenizer, names: Sequence[str], texts: Sequence[str]
    ) -> list[np.ndarray]:
        """Return the tokens of conversations as they are stored, int32.

        Args:
            names: Where they come from, for messages.
            texts: What :func:`messages_text` made of them.

        Raises:
            BadInputError: Nothing of one is learned, or the template cannot write it.
        """
        encode = self._by_pattern if self.message is not None else self._by_template
        found = encode(tokenizer, names, [json.loads(text) for text in texts])
        for name, stored in zip(names, found, strict=True):
            if not (stored >= 0).any():
                raise BadInputError(
                    f"{name}: no message of the role {' or '.join(self.loss_roles)}, so nothing is learned from it; leave "
                    "it out, or name its roles in telechat_moe.conversations.loss_roles"
                )
        return found

    def _by_pattern(
        self, tokenizer: Tokenizer, names: Sequence[str], conversations: list[list[Message]]
    ) -> list[np.ndarray]:
        """Write each message after the other, with the end of document after the learned ones."""
        assert self.message is not None
        before, after = self.message.split(CONTENT)
        markers = functools.lru_cache(lambda role: tokenizer.encode(before.replace("{role}", role)))
        said = [m["content"] + after for messages in conversations for m in messages]
        bodies = iter(tokenizer.encode_documents(said))
        found: list[np.ndarray] = []
        for messages in conversations:
            parts: list[np.ndarray] = []
            for role in (m["role"] for m in messages):
                body = next(bodies)
                parts += [~markers(role), body if role in self.loss_roles else ~body[:-1]]
            found.append(np.concatenate(parts).astype(STORED))
        return found

    def _by_template(
        self, tokenizer: Tokenizer, names: Sequence[str], conversations: list[list[Message]]
    ) -> list[np.ndarray]:
        """Let the template write the whole, and its beginnings to see where the messages are in it."""
        found: list[np.ndarray] = []
        for name, messages in zip(names, conversations, strict=True):
            whole, spans = self._spans(name, messages)
            tokens, places_N2 = tokenizer.encode_rendered(whole)
            kept = np.zeros(len(tokens), bool)
            for begin, end in spans:
                kept |= (places_N2[:, 0] >= begin) & (places_N2[:, 1] <= end)
            found.append(np.where(kept, tokens, ~tokens).astype(STORED))
        return found

    def _spans(self, name: str, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation and where the learned messages are in it."""
        render = _renderer()

        def write(count: int, prompt: bool = False) -> str:
            try:
                return render(self.template, messages[:count], prompt, self.variables)
            except Exception as error:  # a template raises what it likes
                raise BadInputError(f"{name}: the chat template refuses it: {error}") from None

        whole, spans = write(len(messages)), list[tuple[int, int]]()
        for number, message in enumerate(messages):
            role = message["role"]
            if role not in self.loss_roles:
                continue
            # An answer begins where the template would let the model begin.
            start = write(number, role == "assistant") if number or role == "assistant" else ""
            end = write(number + 1)
            if not (whole.startswith(end) and end.startswith(start)):
                raise BadInputError(
                    f"{name}: the chat template writes message {number} ({role}) differently once more messages follow, so "
                    "its tokens cannot be told from the context; use a template that only appends, or set "
                    "telechat_moe.conversations.message"
                )
            spans.append((len(start), len(end)))
        return whole, spans


@functools.cache
def _renderer() -> Callable[[str, list[Message], bool, dict[str, Any]], str]:
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise TelechatMoeError(
            f"chat templates need the package `transformers` ({error}); install it, or set "
            "telechat_moe.conversations.message"
        ) from None

    def render(template: str, messages: list[Message], prompt: bool, names: dict[str, Any]) -> str:
        texts, _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=prompt, **names
        )
        return texts[0]

    return render


def read_template(tokenizer: Path) -> tuple[str, dict[str, str]]:
    """Return the chat template beside a ``tokenizer.json`` and the special tokens that it may name.

    It is in ``chat_template.jinja``, else in ``tokenizer_config.json``, as transformers writes them.

    Raises:
        BadInputError: There is none.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config, alone = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    given: dict[str, Any] = {}
    try:
        if config.is_file():
            given = read_object(config)
        template = (
            alone.read_text(encoding="utf-8") if alone.is_file() else given.get("chat_template")
        )
    except (OSError, ValueError) as error:
        raise BadInputError(f"{folder}: its chat template cannot be read: {error}") from None
    if isinstance(template, list):  # several with names
        default = (
            t.get("template") for t in template if is_object(t) and t.get("name") == "default"
        )
        template = next(default, None)
    if not isinstance(template, str):
        raise BadInputError(
            f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json; add one, or say in "
            "telechat_moe.conversations.message how a message is written"
        )
    names: dict[str, str] = {}
    for key, value in given.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            names[key] = text
    return template, names


def format_of(recipe: Any) -> ChatFormat | None:
    """Return how a recipe writes conversations; None: it trains on text.

    Raises:
        BadInputError: It wants the chat template of a tokenizer that has none.
    """
    section = recipe.telechat_moe.conversations
    if section is None:
        return None
    longest, roles = recipe.train_dataset.data_loader.config.seq_length, tuple(section.loss_roles)
    if section.message is not None:
        return ChatFormat(roles, longest, section.message)
    return ChatFormat(
        roles, longest, None, *read_template(Path(recipe.telechat_moe.corpus.tokenizer))
    )
