"""What a chat template (Jinja) makes of one conversation, which of it is learned, and which fields it reads.

transformers renders. An answer is learned from where the template would let the model begin to write it to where the template
ends it; where the template marks what the model writes (``{% generation %}``), that is learned.
"""

import functools
import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.data.tokenizer import Tokenizer
from telechat_moe.errors import BadInputError, TelechatMoeError

ChatMessage = dict[str, Any]
LEARNED, ENDLESS, APPENDED = "learned messages", "learned messages without end", "ends appended"
PARTLY = "learned messages of which a part is not marked"
SPLIT, PARTS = "conversations written as several documents", "documents of these"
END, PROMPT = "end ", "prompt "
"""What is counted of conversations; the last two begin with these and name the token or the text."""
TODAY = "strftime_now"
"""The function by which templates write today's date; a setting of this name is the day that they get."""
_MARKER = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_TAKEN = {"messages", "conversations", "chat_template", "add_generation_prompt", TODAY}
_TAKEN |= {"continue_final_message", "return_assistant_tokens_mask", "raise_exception"}
"""Names that a line of a corpus cannot set."""
_MARK = "\ue000"
"""A character of private use, in place of an answer."""
_SHORT = 20
"""Characters of a text that may be in another by chance."""


_SECONDS, _LONGEST = 10.0, 1 << 26
"""Processor time and characters that a template may take for one conversation."""
_RANDOM = re.compile(r"\|\s*random\b")


class EndlessTemplateError(BadInputError):
    """A template takes too long, writes too much, or not the same each time."""


@contextmanager
def _limited() -> Generator[None, None, None]:
    """End what a template computes after some seconds; signals reach the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise EndlessTemplateError(
            f"the chat template takes more than {_SECONDS:.0f} s for one conversation"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and what it is rendered with.

    Attributes:
        special: Special tokens by the names that it has for them.
        settings: Further variables of all conversations.
    """

    source: str
    special: dict[str, str] = field(default_factory=dict[str, str])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The variables that it reads and that may be set; none of what is no template."""
        _renderer()
        import jinja2
        from jinja2 import meta

        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        try:
            tree = environment.parse(_MARKER.sub("", self.source))
        except jinja2.TemplateError:
            return frozenset()
        names = frozenset(meta.find_undeclared_variables(tree))
        return names - _TAKEN - set(self.special) - set(environment.globals)

    @property
    def marks(self) -> bool:
        """It says itself what the model writes."""
        return _MARKER.search(self.source) is not None

    def render(
        self, messages: Sequence[ChatMessage], variables: dict[str, Any], prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages and where what it marks as written by the model is in it.

        Raises:
            Exception: What the template likes to raise.
        """
        if _RANDOM.search(self.source):
            raise EndlessTemplateError(
                "the chat template draws at random, so it writes other tokens each time"
            )
        with _limited():
            texts, spans = _renderer()(
                [list(messages)],
                chat_template=self.source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self.marks,
                **{**self.special, **self.settings, **variables, TODAY: self._today},
            )
        if len(texts[0]) > _LONGEST:
            raise EndlessTemplateError(
                f"the chat template writes more than {_LONGEST:,} characters for one conversation"
            )
        return texts[0], [tuple(span) for span in spans[0]] if self.marks else []

    def _today(self, form: str) -> str:
        if TODAY not in self.settings:
            raise BadInputError(
                "it writes today's date, so that the same conversations would give other tokens tomorrow; set "
                f"telechat_moe.conversations.variables.{TODAY} to a day (YYYY-MM-DD)"
            )
        return date.fromisoformat(str(self.settings[TODAY])).strftime(form)


@functools.cache
def _renderer() -> Callable[..., Any]:
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise TelechatMoeError(
            f"chat templates need the package `transformers` ({error}); install it, or set "
            "telechat_moe.conversations.message"
        ) from None
    return render_jinja_template


class _Reads(dict[str, Any]):
    """A message that notes which of its fields are read."""

    def __init__(self, message: ChatMessage) -> None:
        super().__init__(message)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.read |= self.keys()
        return super().__iter__()

    def items(self) -> Any:
        self.read |= self.keys()
        return super().items()

    def values(self) -> Any:
        self.read |= self.keys()
        return super().values()


class _Arguments(dict[str, Any]):
    """Arguments of a tool call, which a template that writes them as text must not write as Python does."""

    def __str__(self) -> str:
        raise TypeError("arguments of a tool call are an object, not text")


def _with_arguments(messages: Sequence[ChatMessage], as_text: bool) -> list[ChatMessage]:
    """Return messages with the arguments of tool calls as JSON text or as objects; files have them as either."""

    def convert(value: object) -> object:
        if as_text:
            return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        if isinstance(value, str):
            try:
                parsed = json.loads(value)
            except (ValueError, RecursionError):
                return value
            value = parsed if isinstance(parsed, dict) else value
        return _Arguments(value) if isinstance(value, dict) else value

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {k: convert(v) if k == "arguments" else walk(v) for k, v in value.items()}

    calls = ("tool_calls", "function_call")
    return [{k: walk(v) if k in calls else v for k, v in m.items()} for m in messages]


def fields_read(
    template: ChatTemplate, messages: Sequence[ChatMessage], variables: dict[str, Any]
) -> set[tuple[str, str]] | None:
    """Return the fields of messages that a template reads, with the roles; None: it cannot write them."""
    for as_text in (False, True):
        watched = [_Reads(message) for message in _with_arguments(messages, as_text)]
        try:
            template.render(watched, variables)
        except EndlessTemplateError:
            raise
        except Exception:  # a template raises what it likes; the build says in which line
            continue
        return {(m["role"], k) for m, w in zip(messages, watched, strict=True) for k in w.read}
    return None


class Span(NamedTuple):
    """A learned message in a document: its first character, and the one after its last."""

    begin: int
    end: int


class Learned(NamedTuple):
    """A document: its tokens, int32, and which of them are learned, bool."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]


@dataclass(eq=False)
class Conversation:
    """One conversation as a template writes it.

    Attributes:
        name: Where it comes from, for messages.
        variables: What its line sets beside them.
        learned: The numbers of the messages that are learned.
        counts: What is counted on the way, see :func:`notes`.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    name: str
    messages: Sequence[ChatMessage]
    variables: dict[str, Any]
    learned: Sequence[int]
    counts: Counter[str]

    def __post_init__(self) -> None:
        stored, self.messages = self.messages, _with_arguments(self.messages, as_text=False)
        try:
            self.text, self.marked = self.template.render(self.messages, self.variables)
        except EndlessTemplateError:
            raise
        except Exception as first:
            self.messages = _with_arguments(stored, as_text=True)
            try:
                self.text, self.marked = self.template.render(self.messages, self.variables)
            except Exception:
                raise self._refused(first) from None
        self._written = {(len(self.messages), False): self.text}

    def _refused(self, error: Exception) -> BadInputError:
        return BadInputError(f"{self.name}: the chat template refuses it: {error}")

    def _who(self, number: int) -> str:
        return f"message {number} ({self.messages[number]['role']})"

    def write(self, count: int, prompt: bool = False) -> str:
        """Return the first messages as the template writes them, with or without what an answer begins after."""
        text = self._written.get((count, prompt))
        if text is None:
            try:
                text = self.template.render(self.messages[:count], self.variables, prompt)[0]
            except EndlessTemplateError:
                raise
            except Exception as error:
                raise self._refused(error) from None
            self._written[count, prompt] = text
        return text

    def documents(self) -> list[Learned]:
        """Return the documents in which each learned message is learned once.

        It is one, unless the template writes a message differently once more follow.
        """
        self._look_for_lost()
        if self.template.marks and all(
            self.messages[i]["role"] == "assistant" for i in self.learned
        ):
            return [self._by_marks()]
        starts = {number: self._start(number) for number in self.learned}
        for number, start in starts.items():
            if _squeezed(self.messages[number]["content"] or "") not in _squeezed(
                self.write(number + 1)[start:]
            ):
                raise self._lost(number, "leaves out or changes a part of the content; remove it")
        documents, left = list[Learned](), list(self.learned)
        count = len(self.messages)
        while left:
            text = self.write(count)
            spans = {i: s for i in left if i < count and (s := self._span(i, starts[i], text))}
            if spans:
                documents.append(self._tokens(text, list(spans.values())))
            left = [i for i in left if i not in spans]
            count = max(left, default=0) + 1
        self.counts[SPLIT] += len(documents) > 1
        self.counts[PARTS] += len(documents) if len(documents) > 1 else 0
        return documents

    def _by_marks(self) -> Learned:
        """Return the document in which what the template marks is learned."""
        spans = self._marked_spans()
        text = _squeezed("".join(self.text[begin:end] for begin, end in spans))
        contents = (_squeezed(self.messages[i]["content"] or "") for i in self.learned)
        self.counts[PARTLY] += sum(content not in text for content in contents)
        return self._tokens(self.text, spans, marked=True)

    def _refuse_other_marks(self, spans: Sequence[Span], answers: Sequence[int]) -> None:
        """Refuse a template that marks a message which is no answer."""
        marked = {_squeezed(self.text[begin:end]) for begin, end in spans}
        for number, message in enumerate(self.messages):
            content = _squeezed(str(message["content"] or ""))
            if number not in answers and content and content in marked:
                raise BadInputError(
                    f"{self.name}: the chat template marks {self._who(number)} as written by the model ({{% generation %}}); "
                    "mark answers only"
                )

    def _marked_spans(self) -> list[Span]:
        spans = [Span(*span) for span in self.marked if span[1] > span[0]]
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(spans) > len(answers):
            self._refuse_other_marks(spans, answers)
        if len(self.learned) == len(answers):
            return spans
        if len(spans) != len(answers):
            raise BadInputError(
                f"{self.name}: {len(answers) - len(self.learned)} of {len(answers)} answers are not to be learned, but the "
                f"chat template marks {len(spans)} parts, so which are theirs cannot be told; use a template without "
                "{% generation %}, or one that marks each answer once"
            )
        return [span for i, span in zip(answers, spans, strict=True) if i in self.learned]

    def _start(self, number: int) -> int:
        """Return where a message begins in the text of it and those before it.

        An answer begins where the template would let the model begin.
        """
        answer = self.messages[number]["role"] == "assistant"
        if not number and not answer:
            return 0
        before, end = self._before(number, answer), self.write(number + 1)
        start = self._common(before, end)
        if start == len(before):
            return start
        # What it writes as the model's beginning and before another answer is the same only up to the answer.
        start = self._common(before, self._with(number, number + 1, content=_MARK) or end)
        # What both ways to go on have in common is the context.
        if not answer or (number and start < self._common(self.write(number), before)):
            raise BadInputError(
                f"{self.name}: the chat template writes {self._who(number)} differently from what it lets the model go on "
                "with, so its tokens cannot be told from the context; use a template that only appends, or set "
                "telechat_moe.conversations.message"
            )
        self.counts[PROMPT + repr(before[start:])] += 1
        return start

    def _before(self, number: int, answer: bool) -> str:
        """Return what a message is written after; an answer, after what the template lets the model begin with."""
        if not answer:
            return self.write(number)
        if number:
            before, plain = self.write(number, True), self.write(number)
        else:  # many templates look at the first message
            before, plain = (self._try([], self.variables, prompt) for prompt in (True, False))
        if before is not None and before != plain:
            return before
        # The template does not know of a beginning: it is what stands before the answer, in which a space may belong to it.
        texts = [k for k, v in self.messages[number].items() if k != "role" and isinstance(v, str)]
        fields = dict.fromkeys([*texts, "content"], _MARK)
        marked = self._with(number, number + 1, **fields) or ""
        head, mark, _ = marked.partition(_MARK)
        head = head.rstrip(" ")
        if mark and head.startswith(before or "") and self.write(number + 1).startswith(head):
            return head
        return before or ""

    def _span(self, number: int, start: int, text: str) -> Span | None:
        """Return where a message is in a document; None: the template writes it, or what is before it, differently there."""
        end = self.write(number + 1)
        stop = self._common(end, text)
        tokens, places_N2 = self.tokenizer.encode_rendered(end[stop:])
        visible = [
            end[stop:][begin:close].strip()
            for token, (begin, close) in zip(tokens.tolist(), places_N2.tolist(), strict=True)
            if token not in self.tokenizer.special
        ]
        # Some templates end the last message with one token more.
        return Span(start, stop) if not any(visible) and stop >= start else None

    def _common(self, text: str, other: str) -> int:
        """Return how many characters of a text, in whole tokens, begin another."""
        if other.startswith(text):
            return len(text)
        (tokens, places_N2), (other_tokens, _) = map(self.tokenizer.encode_rendered, (text, other))
        count = min(len(tokens), len(other_tokens))
        differing = np.flatnonzero(tokens[:count] != other_tokens[:count])
        common = int(differing[0]) if differing.size else count
        return int(places_N2[common - 1, 1]) if common else 0

    def _tokens(self, text: str, spans: list[Span], *, marked: bool = False) -> Learned:
        """Return the tokens of a document and which are learned, the ends of its learned messages among them."""
        tokens, places_N2 = self.tokenizer.encode_rendered(text)
        learned, ends = np.zeros(len(tokens), bool), self.tokenizer.special | self.tokenizer.stops
        append = False
        for span in spans:
            inside = (places_N2[:, 0] < span.end) & (places_N2[:, 1] > span.begin)
            learned |= inside
            numbers = np.flatnonzero(inside).tolist()
            visible = [i for i in numbers if text[slice(*places_N2[i])].strip()]
            after = numbers[-1] + 1 if numbers else -1
            end = None
            if visible and tokens[visible[-1]] in ends:
                end = tokens[visible[-1]]
            elif after == len(tokens) and not marked:
                append, end = True, self.tokenizer.eos
            elif 0 < after < len(tokens) and tokens[after] in ends and not marked:
                learned[after], end = True, tokens[after]  # the next role's token is what ends it
            self.counts[ENDLESS if end is None else END + self.tokenizer.name(end)] += 1
        self.counts[LEARNED] += len(spans)
        self.counts[APPENDED] += append
        if append:
            tokens = np.append(tokens, np.int32(self.tokenizer.eos))
            learned = np.append(learned, True)
        return Learned(tokens, learned)

    def _look_for_lost(self) -> None:
        """Refuse what the template leaves out, or writes as Python does."""
        text = _squeezed(self.text)
        for number, message in enumerate(self.messages):
            content = message["content"]
            if content is None:
                other = self._with(number, content="")
                if other is not None and self.text.count("None") > other.count("None"):
                    fault = 'writes content null as the word None; write "" instead'
                    raise self._lost(number, fault)
            elif number not in self.learned:
                plain = _squeezed(content)
                surely = len(plain) >= _SHORT and plain in text
                if plain and not surely and self._with(number, content="") == self.text:
                    raise self._lost(number, "leaves out its content; remove the message")
            if number not in self.learned:
                continue
            for name in (
                k for k, v in message.items() if k not in ("role", "content") and v is not False
            ):
                if self._with(number, number + 1, **{name: None}) == self.write(number + 1):
                    raise self._lost(number, f"leaves out its {name!r}; remove it")
        for name in [n for n, value in self.variables.items() if isinstance(value, list | dict)]:
            others = {key: other for key, other in self.variables.items() if key != name}
            if self._try(self.messages, others) == self.text:
                raise BadInputError(
                    f"{self.name}: the chat template leaves out its {name!r}; remove it, or name it in "
                    "telechat_moe.conversations.ignore_fields"
                )

    def _lost(self, number: int, fault: str) -> BadInputError:
        return BadInputError(
            f"{self.name}: {self._who(number)}: the chat template {fault}, or use another template"
        )

    def _with(self, number: int, count: int | None = None, **fields: Any) -> str | None:
        """Return the text with other fields of a message, without those that are None; None: it cannot be written."""
        messages = list(self.messages[:count])
        out = {name for name, value in fields.items() if value is None}
        messages[number] = {k: v for k, v in (messages[number] | fields).items() if k not in out}
        return self._try(messages, self.variables)

    def _try(
        self, messages: Sequence[ChatMessage], variables: dict[str, Any], prompt: bool = False
    ) -> str | None:
        try:
            return self.template.render(messages, variables, prompt)[0]
        except Exception:  # a template raises what it likes
            return None


def _squeezed(text: str) -> str:
    return "".join(text.split())


_NOTES = {
    ENDLESS: "{count:,} of {learned:,} learned messages have no token that ends them, so the model does not learn to stop "
    "there: the chat template writes none, or leaves it out of what it marks; let it write {eos} after an answer",
    PARTLY: "{count:,} of {learned:,} learned messages are learned without a part of their content, which the chat template "
    "does not write where it marks what the model writes; it may drop the reasoning of earlier answers",
    END: "{count:,} of {learned:,} learned messages end with {name}, where generation does not stop by default: "
    "it is neither eos_token in tokenizer_config.json nor in eos_token_id of generation_config.json; name it there",
    APPENDED: "{count:,} documents got {eos} at their end, because the chat template ends the last answer with no token",
    SPLIT: "{count:,} conversations became {parts:,} documents, because the chat template writes "
    "earlier messages differently once more follow; each answer is learned once, after what the model would read",
    PROMPT: "{count:,} of {learned:,} learned messages do not begin with {name}, with which the chat template lets "
    "the model begin; the model does not learn to go on from there",
}
"""What a user should know of each count, in this order; the keys of `END` and `PROMPT` are followed by a name."""


def notes(counts: Counter[str], tokenizer: Tokenizer) -> list[str]:
    """Return what a user should know of how conversations were written, from what was counted."""
    stops = {END + tokenizer.name(token) for token in tokenizer.stops if tokenizer.name(token)}
    numbers = {"learned": counts[LEARNED], "parts": counts[PARTS]}
    eos, lines = tokenizer.name(tokenizer.eos), list[str]()
    for kind, text in _NOTES.items():
        named = kind in (END, PROMPT)
        keys = sorted(k for k in counts if k.startswith(kind)) if named else [kind]
        for key in keys:
            if counts[key] and key not in stops:
                name = key.removeprefix(kind)
                lines.append(text.format(count=counts[key], eos=eos, name=name, **numbers))
    return lines
