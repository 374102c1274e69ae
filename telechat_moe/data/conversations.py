"""Tokenised conversations with a loss mask.

A conversation is a list of messages ``{"role": ..., "content": ...}``, and what its line has beside them. A format writes it:
the chat template of the tokenizer, or one pattern for all messages. A field that nothing reads is refused. In the token file
a token of the context, which is read but not learned, is stored as its complement ``~token``, which is negative;
:func:`bare` gives the token back.
"""

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.data.chat_template import (
    TODAY,
    ChatMessage,
    ChatTemplate,
    Conversation,
    fields_read,
)
from telechat_moe.data.tokenizer import Tokenizer, special_tokens
from telechat_moe.errors import BadInputError
from telechat_moe.narrowing import is_object
from telechat_moe.reading import read_object, read_text

STORED = np.dtype(np.int32)
"""Type of the tokens in the file: it must have a sign."""
CONTENT = "{content}"
KWARGS = "chat_template_kwargs"
"""The field of a line whose fields are variables of the template, too."""
FLAGS = {"weight": True, "train": True, "loss": True, "masked": False}
"""Fields by which data sets say whether a message is learned, and what says that it is."""
_EMPTY = (None, "", [], {})
_FUNCTION = re.compile(
    r'^[ \t]*((?:async )?def [^\n]{1,100}:)\n[ \t]+r?"""(\w.+?)(?:\n[ \t]*\n|""")', re.M | re.S
)


def bare(stored: NDArray[Any]) -> NDArray[Any]:
    """Return the tokens without what they say about the loss; others than those of conversations are unchanged."""
    return np.where(stored < 0, ~stored, stored)


def conversation_text(
    location: str, line: dict[str, Any], key: str, ignored: dict[str, int] | None = None
) -> str:
    """Return a conversation as one line of JSON: its messages, and in an object the other fields that its line has.

    Fields without a value (null, "", [], {}) are left out, and texts that are given in parts joined.

    Args:
        location: File and line, for messages.
        key: Its field with the messages.
        ignored: Fields that are left out, with how often they occurred, which is counted.

    Raises:
        BadInputError: The messages are no list of objects with texts as role and content.
    """
    value = line.get(key)
    if not isinstance(value, list) or not value:
        raise BadInputError(
            f"{location}: messages are {_kind(value)}; expected a list with at least one message"
        )
    messages: list[ChatMessage] = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadInputError(
                f"{location}: message {number} is {_kind(message)}; expected an object"
            )
        fields = _filled(message, ignored)
        further = fields.keys() - {"role", "content", *FLAGS}
        content = _content(f"{location}: message {number}", message.get("content"))
        for name, text in (("role", message.get("role")), ("content", content)):
            if not isinstance(text, str) and not (name == "content" and text is None and further):
                hint = ""
                if "value" in message:
                    hint = "; ShareGPT's from and value are role and content here"
                raise BadInputError(
                    f"{location}: message {number} has {_kind(message.get(name))} as {name!r} (keys: "
                    f"{', '.join(map(repr, message)) or 'none'}); expected text{hint}"
                )
        extra = {name: fields[name] for name in sorted(fields.keys() - {"role", "content"})}
        messages.append({"content": content, "role": message["role"], **extra})
    others = _filled({k: v for k, v in line.items() if k != key}, ignored)
    text = json.dumps({"messages": messages, **others} if others else messages, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInputError(
            f"{location}: a message has half a surrogate pair, which is no character"
        ) from None
    return text


def _filled(fields: dict[str, Any], ignored: dict[str, int] | None) -> dict[str, Any]:
    """Return the fields that have a value and are not ignored; count those that are."""
    ignored = ignored or {}
    for name in fields.keys() & ignored.keys():
        ignored[name] += 1
    return {k: v for k, v in fields.items() if k not in ignored and v not in _EMPTY}


def _content(location: str, content: object) -> object:
    """Return the content of a message, the texts of its parts joined."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        fields = part if isinstance(part, dict) else {}
        if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
            kind = repr(fields.get("type")) if fields else _kind(part)
            raise BadInputError(
                f"{location}: has a part of type {kind}; expected parts of type 'text'"
            )
        texts.append(fields["text"])
    return "".join(texts)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a JSON {type(value).__name__}"


def _parsed(text: str) -> tuple[list[ChatMessage], dict[str, Any]]:
    """Return messages and other fields of what :func:`conversation_text` wrote.

    Tools may be JSON in a text, as tables have them.
    """
    parsed = json.loads(text)
    value: dict[str, Any] = {"messages": parsed} if isinstance(parsed, list) else parsed
    messages = [{"role": message["role"], **message} for message in value.pop("messages")]
    for name in ("tools", "functions", KWARGS):
        if isinstance(value.get(name), str):
            try:
                value[name] = json.loads(value[name])
            except (ValueError, RecursionError):
                continue
    return messages, value


def docstring_conversations(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and messages for each function of a Python source: its first line, and how its docstring begins."""
    for match in _FUNCTION.finditer(source):
        answer = " ".join(match[2].split())
        messages = [{"role": "user", "content": match[1]}, {"role": "assistant", "content": answer}]
        line = source.count("\n", 0, match.start(1)) + 1
        yield line, conversation_text("", {"messages": messages}, "messages")


class TokenDocument(NamedTuple):
    """What is stored of a conversation or a part of it: which of them it is of, and its tokens, int32."""

    source: int
    stored: np.ndarray


@dataclass(frozen=True)
class ChatFormat:
    """How messages become a document.

    Attributes:
        loss_roles: Roles whose messages are learned.
        longest: Most tokens of a conversation; longer ones are left out and listed.
        message: Pattern of a message with ``{role}`` and ``{content}``; None: ``template``.
        ignored: Fields of lines and messages that are left out.
    """

    loss_roles: tuple[str, ...]
    longest: int
    message: str | None = None
    template: ChatTemplate | None = None
    ignored: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        """Return what decides the tokens, JSON values."""
        how: dict[str, Any] = {"loss_roles": list(self.loss_roles), "message": self.message}
        if self.template is not None:
            text = json.dumps([self.template.source, self.template.special], sort_keys=True)
            how["message"] = f"chat template {hashlib.sha256(text.encode()).hexdigest()}"
            if self.template.settings:
                how["variables"] = self.template.settings
        if self.ignored:
            how["ignore_fields"] = sorted(self.ignored)
        return how | {"seq_length": self.longest}

    def encode(
        self,
        tokenizer: Tokenizer,
        names: Sequence[str],
        texts: Sequence[str],
        counts: Counter[str] | None = None,
    ) -> list[TokenDocument]:
        """Return the documents of conversations: one of each, or several where a template writes it differently as it grows.

        Args:
            names: Where they come from, for messages.
            texts: What :func:`conversation_text` made of them.
            counts: What :func:`telechat_moe.data.chat_template.notes` tells is counted here.

        Raises:
            BadInputError: Nothing of one is learned, or the template cannot write it.
        """
        counts = Counter() if counts is None else counts
        parsed = [_parsed(text) for text in texts]
        learned = [self._learned(name, m) for name, (m, _) in zip(names, parsed, strict=True)]
        if self.template is None:
            return self._by_pattern(tokenizer, [messages for messages, _ in parsed], learned)
        documents: list[TokenDocument] = []
        for source, (name, (messages, others)) in enumerate(zip(names, parsed, strict=True)):
            about = _unflagged(messages), self._variables(others), learned[source]
            talk = Conversation(self.template, tokenizer, name, *about, counts)
            documents += [
                TokenDocument(source, np.where(mask, tokens, ~tokens).astype(STORED))
                for tokens, mask in talk.documents()
            ]
        return documents

    def _learned(self, name: str, messages: list[ChatMessage]) -> list[int]:
        """Return the numbers of the messages that are learned."""
        learned = [
            i
            for i, message in enumerate(messages)
            if message["role"] in self.loss_roles and flag(name, i, message) is not False
        ]
        if not learned:
            flags = ", ".join(sorted({name for m in messages for name in FLAGS.keys() & m.keys()}))
            raise BadInputError(
                f"{name}: no message of the role {' or '.join(self.loss_roles)}"
                f"{f' that is to be learned ({flags})' if flags else ''}, so nothing is learned from it; leave "
                "it out, or name its roles in telechat_moe.conversations.loss_roles"
            )
        return learned

    def _variables(self, others: dict[str, Any]) -> dict[str, Any]:
        """Return the variables of a template that the other fields of a line set."""
        kwargs = others.get(KWARGS)
        fields = {**others, **kwargs} if isinstance(kwargs, dict) else others
        names = self.template.variables if self.template is not None else frozenset[str]()
        return {name: value for name, value in fields.items() if name in names}

    def _by_pattern(
        self, tokenizer: Tokenizer, conversations: list[list[ChatMessage]], learned: list[list[int]]
    ) -> list[TokenDocument]:
        """Write each message after the other, with the end of document after the learned ones."""
        assert self.message is not None
        before, after = self.message.split(CONTENT)
        markers = functools.lru_cache(lambda role: tokenizer.encode(before.replace("{role}", role)))
        texts = [m["content"] + after for messages in conversations for m in messages]
        bodies = iter(tokenizer.encode_documents(texts))
        documents: list[TokenDocument] = []
        for source, messages in enumerate(conversations):
            parts: list[np.ndarray] = []
            for number, message in enumerate(messages):
                body = next(bodies)
                stored = body if number in learned[source] else ~body[:-1]
                parts += [~markers(message["role"]), stored]
            documents.append(TokenDocument(source, np.concatenate(parts).astype(STORED)))
        return documents


def flag(name: str, number: int, message: ChatMessage) -> bool | None:
    """Return whether a message says that it is learned; None: it does not say.

    Raises:
        BadInputError: It says something between, or two things.
    """
    says = {key: message[key] for key in FLAGS.keys() & message.keys()}
    if bad := [key for key, value in says.items() if value not in (0, 1) or isinstance(value, str)]:
        raise BadInputError(
            f"{name}: message {number} has {bad[0]!r} {message[bad[0]]!r}; expected 0 or 1: a message is learned or is not"
        )
    learned = {bool(value) is FLAGS[key] for key, value in says.items()}
    if len(learned) > 1:
        raise BadInputError(
            f"{name}: message {number} has {says}, of which one says that it is learned and one that it is not; remove one"
        )
    return learned.pop() if learned else None


def _unflagged(messages: list[ChatMessage]) -> list[ChatMessage]:
    return [{k: v for k, v in message.items() if k not in FLAGS} for message in messages]


class FieldCheck:
    """Looks at all conversations of a corpus for fields that nothing reads."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self._read = set[tuple[str, str]]()
        self._unread: dict[tuple[str, str], tuple[int, str]] = {}

    def look(self, place: str, text: str) -> None:
        """Look at a conversation from a place, as :func:`conversation_text` wrote it."""
        chat = self.chat
        messages, others = _parsed(text)
        variables = chat._variables(others)
        names = {*others} - {*variables}
        if KWARGS in names and isinstance(others[KWARGS], dict):
            names = names - {KWARGS} | {
                f"{KWARGS}.{n}" for n in others[KWARGS] if n not in variables
            }
        unread = Counter((name, "") for name in names)
        for number, message in enumerate(messages):
            if message["role"] not in chat.loss_roles and flag(place, number, message):
                asks = next(name for name in FLAGS if name in message)
                unread[asks, f"{message['role']}, which is not in loss_roles"] += 1
        messages = _unflagged(messages)
        present = Counter((m["role"], k) for m in messages for k in m.keys() - {"role", "content"})
        if present.keys() - self._read and chat.template is not None:
            read = fields_read(chat.template, messages, variables)
            # What the template refuses is refused, with its line, when it is written.
            self._read |= present.keys() if read is None else read
        for role, name in present.keys() - self._read:
            unread[name, role] += present[role, name]
        for key, count in unread.items():
            before, first = self._unread.get(key, (0, place))
            self._unread[key] = before + count, first

    def refuse(self, corpus: str) -> None:
        """Raise a BadInputError that names and counts such fields, if there are any."""
        unread = {k: v for k, v in self._unread.items() if k[::-1] not in self._read}
        if not unread:
            return
        listed = [
            f"{name!r} in {count:,} {f'message(s) of role {role}' if role else 'line(s)'} (first {first})"
            for (name, role), (count, first) in sorted(unread.items())
        ]
        ignored = sorted({*self.chat.ignored, *(name.split(".")[0] for name, _ in unread)})
        reader = "chat template" if self.chat.message is None else "pattern of a message"
        raise BadInputError(
            f"{corpus}: fields that the {reader} does not read and that would be lost: {', '.join(listed)}; take another "
            f"template, remove them, or say that they do not matter: telechat_moe.conversations.ignore_fields: "
            f"[{', '.join(ignored)}]"
        )


def read_template(tokenizer: Path) -> tuple[str, dict[str, str]]:
    """Return the chat template beside a ``tokenizer.json`` and the special tokens that it may name.

    It is in ``chat_template.jinja``, else in ``tokenizer_config.json``, as transformers writes them.

    Raises:
        BadInputError: There is none.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config, alone = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    template = None
    if alone.is_file():
        template = read_text(alone)
    elif config.is_file():
        template = read_object(config).get("chat_template")
    if isinstance(template, list):  # several with names
        named = (t for t in template if is_object(t) and t.get("name") == "default")
        template = next(named, {}).get("template")
    if not isinstance(template, str):
        raise BadInputError(
            f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json; add one, or say in "
            "telechat_moe.conversations.message how a message is written"
        )
    return template, special_tokens(folder)


def format_of(recipe: Any, tokenizer: str | None = None) -> ChatFormat | None:
    """Return how a recipe writes conversations; None: it trains on text.

    Args:
        tokenizer: The tokenizer whose chat template is meant; None: the recipe's.

    Raises:
        BadInputError: It wants the chat template of a tokenizer that has none, or sets what a template does not read.
    """
    section = recipe.telechat_moe.conversations
    if section is None:
        return None
    longest, roles = recipe.train_dataset.data_loader.config.seq_length, tuple(section.loss_roles)
    ignored = tuple(section.ignore_fields)
    if section.message is not None:
        return ChatFormat(roles, longest, section.message, ignored=ignored)
    source, special = read_template(Path(tokenizer or recipe.telechat_moe.corpus.tokenizer))
    template = ChatTemplate(source, special, section.variables)
    settable = template.variables | ({TODAY} if TODAY in source else set[str]())
    if unread := section.variables.keys() - settable:
        raise BadInputError(
            f"telechat_moe.conversations.variables: {', '.join(sorted(unread))}: the chat template does not read it (it reads "
            f"{', '.join(sorted(settable)) or 'none'}); remove it"
        )
    if TODAY in section.variables:
        try:
            date.fromisoformat(str(section.variables[TODAY]))
        except ValueError as error:
            raise BadInputError(
                f"telechat_moe.conversations.variables.{TODAY}: {error}; expected a day, 'YYYY-MM-DD'"
            ) from None
    return ChatFormat(roles, longest, None, template, ignored)
