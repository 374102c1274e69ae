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

from telechat_moe.data.chat_template import ChatTemplate, notes
from telechat_moe.data.conversations import (
    ChatFormat,
    FieldCheck,
    bare,
    conversation_text,
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
    want: Any = theirs.apply_chat_template(
        messages,
        chat_template=nature.source,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    (stored,) = encode(folders[name], messages)
    assert bare(stored).tolist() == want["input_ids"]
    assert (stored >= 0).astype(int).tolist() == want["assistant_masks"]


# ------------------------------------------------------------------------------------------ fields

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": {"z": 1, "a": "é"}},
}
TEXT_CALL = {**CALL, "function": {"name": "add", "arguments": '{"z": 1, "a": "é"}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"z": 1, "a": 2}}}]
ASK: Messages = [{"role": "user", "content": "1 + 2?"}]
TOOL_TALK: Messages = [
    *ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "three", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 3."},
]


def refuse(template: str, lines: list[dict[str, Any]], *ignored: str) -> None:
    """Look at lines as a build does."""
    chat = ChatFormat(("assistant",), 999, None, ChatTemplate(template), ignored)
    fields, names = FieldCheck(chat), dict.fromkeys(ignored, 0)
    for number, line in enumerate(lines, 1):
        text = conversation_text(f"c.jsonl: line {number}", line, "messages", names)
        fields.look(f"c.jsonl:{number}", text)
    fields.refuse("c.jsonl")


def test_fields_that_nothing_reads_are_counted() -> None:
    answer = {"role": "assistant", "content": "3"}
    lines = [
        {"messages": [*ASK, answer]},
        {"messages": [{**ASK[0], "name": "Bo"}, answer], "tools": TOOLS, "id": 7},
        {"messages": [{**ASK[0], "name": "Al"}, {**answer, "reasoning_content": "so"}], "id": 0},
        {"messages": [*ASK, answer], "tools": None, "id": "", "system": []},
        {"messages": TOOL_TALK, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{**ASK[0], "weight": 1}, {**answer, "weight": 1}]},
    ]
    with pytest.raises(BadInputError) as error:
        refuse(NATURES["chatml"].source, lines)
    for part in (
        "'tools' in 1 line(s) (first c.jsonl:2)",
        "'id' in 2 line(s) (first c.jsonl:2)",
        "'name' in 2 message(s) of role user (first c.jsonl:2)",
        "'reasoning_content' in 1 message(s) of role assistant (first c.jsonl:3)",
        "'tool_call_id' in 1 message(s) of role tool (first c.jsonl:5)",
        "'chat_template_kwargs.enable_thinking' in 1 line(s)",
        "'weight' in 1 message(s) of role user, which is not in loss_roles (first c.jsonl:6)",
        "ignore_fields: [chat_template_kwargs, id, name, reasoning_content, tool_call_id, tool_calls, tools, weight]",
    ):
        assert part in str(error.value)
    with pytest.raises(BadInputError) as error:  # this one reads some of them
        refuse(NATURES["qwen3"].source, lines[:5])
    assert "'id' in 2" in str(error.value)
    for name in ("'tools'", "'reasoning_content'", "'tool_calls'", "enable_thinking"):
        assert name not in str(error.value)
    refuse(NATURES["qwen3"].source, lines[:5], "id", "name", "tool_call_id")


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("{% for m in messages %}{{ m.role }}{{ m.get('name') }}{% endfor %}", True),
        ("{% for m in messages %}{% if 'name' in m %}{{ m['name'] }}{% endif %}{% endfor %}", True),
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}", True),
        ("{% for m in messages %}{% for k, v in m.items() %}{{ v }}{% endfor %}{% endfor %}", True),
        ("{{ messages | map(attribute='name') | list }}", True),
        # The name of another thing is not read of a message.
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools or [] %}{{ t.name }}{% endfor %}",
            False,
        ),
    ],
)
def test_a_field_is_read_where_the_template_looks_at_it(source: str, read: bool) -> None:
    line = {"messages": [{"role": "user", "content": "a", "name": "Bo"}]}
    if read:
        refuse(source, [line])
    else:
        with pytest.raises(BadInputError, match="'name' in 1 message"):
            refuse(source, [line])


def as_text(folder: Path, stored: np.ndarray) -> str:
    """Return what is learned between brackets."""
    tokenizer = tokenizer_of(folder)
    edges = np.flatnonzero(np.diff((stored >= 0).astype(int), prepend=0, append=0))
    text, done = "", 0
    for number, edge in enumerate([*edges.tolist(), len(stored)]):
        part = tokenizer.decode(bare(stored[done:edge]))
        text, done = text + (f"[{part}]" if number % 2 else part), edge
    return text


def test_tools_calls_and_thinking_are_written(folders: dict[str, Path]) -> None:
    folder, said = folders["qwen3"], []
    for call in (CALL, TEXT_CALL):
        talk = [*TOOL_TALK[:1], {**TOOL_TALK[1], "tool_calls": [call]}, *TOOL_TALK[2:]]
        for tools in (TOOLS, json.dumps(TOOLS)):
            (stored,) = encode(folder, talk, tools=tools)
            said.append(as_text(folder, stored))
    assert len(set(said)) == 1
    assert '"parameters": {"z": 1, "a": 2}' in said[0]  # in the order of the line
    assert (
        '[<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"z": 1, "a": "é"}}'
        in said[0]
    )
    assert "<tool_response>\nthree\n" in said[0]
    assert "None" not in said[0]
    (stored,) = encode(
        folder,
        [*ASK, {"role": "assistant", "content": "3"}],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert as_text(folder, stored).endswith("<think>\n\n</think>\n\n[3<|im_end|>\n]")


@pytest.mark.parametrize("call", [CALL, TEXT_CALL])
@pytest.mark.parametrize(
    "form", ["c.function.arguments | tojson", "c.function.arguments", "'' ~ c.function.arguments"]
)
def test_arguments_are_json_however_they_are_given(
    form: str, call, folders: dict[str, Path]
) -> None:
    """Templates write them as objects or as text, files have them as objects or as text."""
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        f"{{{{ {form} }}}}{{% endfor %}}</s>{{% endfor %}}{{% if add_generation_prompt %}}assistant: {{% endif %}}"
    )
    chat = ChatFormat(("assistant",), 999, None, ChatTemplate(source))
    line = {"messages": [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    text = conversation_text("chat:1", line, "messages")
    (document,) = chat.encode(tokenizer_of(folders["chatml"]), ["chat:1"], [text])
    assert as_text(folders["chatml"], document.stored).endswith(
        'assistant: [{"z": 1, "a": "é"}</s>]'
    )


def test_messages_of_weight_0_are_only_read(folders: dict[str, Path]) -> None:
    flags = {
        "weight": (0, 1),
        "train": (False, True),
        "loss": (False, True),
        "masked": (True, False),
    }
    for name in ("chatml", "marked", "qwen3", "glm4"):
        for flag, (no, yes) in flags.items():
            talk = [
                *ASK,
                {"role": "assistant", "content": "seven", flag: no},
                {"role": "user", "content": "really?", "name": ""},
                {"role": "assistant", "content": "three", flag: yes},
            ]
            (stored,) = encode(folders[name], talk)
            text = as_text(folders[name], stored)
            assert text.count("[") - text.count("[gMASK]") == 1
            assert "three" in text.partition("user")[2].rpartition("[")[2]
            assert "seven" in text


LOSSES = [
    ("{{ messages[0].content }}", "leaves out its content"),
    (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
        "leaves out or changes a part",
    ),
    (
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls and '' }}{% endfor %}",
        "leaves out its 'tool_calls'",
    ),
    ("{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", "None"),
    (
        "{% for m in messages %}{{ m.content or m.tool_calls[0].function.name }}{% endfor %}{{ '' if tools else '' }}",
        "leaves out its 'tools'",
    ),
    (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}",
        "writes today's date",
    ),
]


@pytest.mark.parametrize(("source", "said"), LOSSES)
def test_what_a_template_leaves_out_is_named(
    source: str, said: str, folders: dict[str, Path]
) -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "<think>hm</think>3"}
    if "tool_calls" in source:
        answer |= {
            "tool_calls": [CALL],
            "content": None if said in ("None", "leaves out its 'tools'") else "3",
        }
    line = {"messages": [{"role": "system", "content": "Be kind"}, *ASK, answer], "tools": TOOLS}
    chat = ChatFormat(("assistant",), 999, None, ChatTemplate(source))
    text = conversation_text("chat:1", line, "messages")
    with pytest.raises(BadInputError, match="chat:1: ") as error:
        chat.encode(tokenizer_of(folders["chatml"]), ["chat:1"], [text])
    assert said in str(error.value)


def test_todays_date_is_a_day_of_the_recipe(folders: dict[str, Path]) -> None:
    source = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    chat = ChatFormat(
        ("assistant",), 99, None, ChatTemplate(source, {}, {"strftime_now": "2025-01-31"})
    )
    talk = [*ASK, {"role": "assistant", "content": "3"}]
    text = conversation_text("chat:1", {"messages": talk}, "messages")
    (document,) = chat.encode(tokenizer_of(folders["chatml"]), ["chat:1"], [text])
    assert as_text(folders["chatml"], document.stored) == "31 Jan 20251 + 2?</s>[3</s>]"


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = conversation_text("", {"messages": [{"role": "user", "content": parts}]}, "messages")
    assert json.loads(text) == [{"role": "user", "content": "ab"}]


def test_a_part_that_is_not_marked_is_counted(folders: dict[str, Path]) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {% generation %}"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}</s>{% endgeneration %}{% endfor %}"
    )
    chat = ChatFormat(("assistant",), 99, None, ChatTemplate(source))
    talk = [{"role": "assistant", "content": f"<think>{i}</think>ok"} for i in range(3)]
    text, counts = conversation_text("", {"messages": talk}, "messages"), Counter[str]()
    tokenizer = tokenizer_of(folders["llama2"])
    chat.encode(tokenizer, ["chat:1"], [text], counts)
    (note,) = notes(counts, tokenizer)
    assert "2 of 3 learned messages are learned without a part of their content" in note


def test_flags_and_calls_hide_no_other_field() -> None:
    """A flag is read here; a template that wants arguments as text is looked at with such."""
    flagged = [*ASK, {"role": "assistant", "content": "3", "weight": 1, "masked": False}]
    refuse(NATURES["chatml"].source, [{"messages": flagged}])
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '' ~ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    talk = [*ASK, {"role": "assistant", "content": "", "tool_calls": [CALL], "name": "Bo"}]
    with pytest.raises(BadInputError, match="'name' in 1 message") as error:
        refuse(source, [{"messages": talk}])
    assert "tool_calls" not in str(error.value)


@given(text=words)
@settings(max_examples=15, deadline=None)
def test_a_token_that_begins_before_an_answer_is_learned(text: str) -> None:
    """Where a space of the header and the first letter are one token, the letter is learned."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pieces = ["</s>", "▁", ":", "\n", *"ABabé<汉🙂_", "▁a", "▁b", "▁<", ":▁", "\na"]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "<"), (":", "▁"), ("\n", "a")]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend, "</s>")
    source = (
        "{% for m in messages %}{{ 'A: ' if m.role == 'user' else 'B: ' }}{{ m.content }}{{ '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}B: {% endif %}"
    )
    chat = ChatFormat(("assistant",), 99, None, ChatTemplate(source))
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": text}]
    line = conversation_text("", {"messages": talk}, "messages")
    (document,) = chat.encode(tokenizer, ["chat:1"], [line])
    learned = "".join(map(tokenizer.name, document.stored[document.stored >= 0].tolist()))
    assert learned.replace("▁", " ").lstrip(": ") == f"{text}</s>".lstrip(": ")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 0 s",
        ),
        ("{{ 'x' * 70000000 }}", "more than 67,108,864 characters"),
        ("{{ [1, 2, 3] | random }}", "draws at random"),
    ],
    ids=["takes for ever", "writes too much", "draws"],
)
def test_a_template_without_end_is_refused(
    source: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for the others on a busy machine.
    seconds = 0.4 if why.endswith(" s") else 60.0
    monkeypatch.setattr("telechat_moe.data.chat_template._SECONDS", seconds)
    with pytest.raises(BadInputError, match=why):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}], {})
