"""Conversations: which tokens are learned, how they are packed, what is left out and what is refused.

Written by the chat template they equal transformers' own; packed they are compared with brute force.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from tokenizers import AddedToken

from telechat_moe.cli import main
from telechat_moe.data import BuildResult, Loader, SampleOptions, build, open_blend, write_indexed
from telechat_moe.data.build import _Job
from telechat_moe.data.chat_template import ChatTemplate
from telechat_moe.data.conversations import ChatFormat, bare, conversation_text, read_template
from telechat_moe.data.corpus import open_corpus
from telechat_moe.data.document_packing import WholeDataset
from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.tokenizer import EOD_TOKEN, Tokenizer, load_tokenizer, train_tokenizer
from telechat_moe.errors import BadInputError
from telechat_moe.recipe import load
from telechat_moe.train.preflight import examine

PATTERN = "<{role}>\n{content}\n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPTIONS = SampleOptions(
    eod=0, reset_position_ids=True, create_attention_mask=True, reset_attention_mask=True
)
ROLES = ("system", "user", "assistant")
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=30)
conversations = st.lists(
    st.builds(lambda r, c: {"role": r, "content": c}, st.sampled_from(ROLES), texts),
    min_size=1,
    max_size=6,
).filter(lambda messages: any(m["role"] == "assistant" for m in messages))
talks = partial(WholeDataset, conversations=True)


def build_chats(
    out: Path, paths: list[Path], tokenizer: Path, conversations: ChatFormat, **options: Any
) -> BuildResult:
    corpus = open_corpus(paths, conversations=True, ignored=conversations.ignored)
    return build(
        out, corpus, tokenizer=load_tokenizer(tokenizer), conversations=conversations, **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template and its special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer(["the user asks and the assistant answers\n" * 20], 300)
    backend = made._backend
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    (folder / "tokenizer.json").write_text(backend.to_str())
    config = {
        "chat_template": TEMPLATE,
        "eos_token": "<|im_end|>",
        "bos_token": {"content": EOD_TOKEN},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def encode(how: ChatFormat, tokenizer: Tokenizer, messages: list[dict[str, str]]) -> np.ndarray:
    text = conversation_text("chat:1", {"messages": messages}, "messages")
    (document,) = how.encode(tokenizer, ["chat:1"], [text])
    return document.stored


def by_template(template: str, names: dict[str, str] | None = None, *roles: str) -> ChatFormat:
    return ChatFormat(roles or ("assistant",), 99, None, ChatTemplate(template, names or {}))


@given(messages=conversations, roles=st.sampled_from([("assistant",), ("user", "assistant")]))
@settings(max_examples=12, deadline=None)
def test_pattern_learns_messages_of_the_roles(messages, roles, tokenizer: Tokenizer) -> None:
    found = encode(ChatFormat(roles, 99, PATTERN), tokenizer, messages)
    expected: list[int] = []
    for m in messages:
        expected += [~t for t in tokenizer.encode(f"<{m['role']}>\n").tolist()]
        body = tokenizer.encode(m["content"] + "\n").tolist()
        expected += [*body, tokenizer.eod] if m["role"] in roles else [~t for t in body]
    assert found.tolist() == expected


@given(messages=conversations)
@settings(max_examples=12, deadline=None)
def test_template_equals_transformers(messages, folder: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install '.[test]'")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    expected = theirs.apply_chat_template(
        messages,
        chat_template=TEMPLATE,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    found = encode(by_template(*read_template(folder)), tokenizer, messages)
    assert bare(found).tolist() == expected["input_ids"]
    assert (found >= 0).astype(int).tolist() == expected["assistant_masks"]


def test_template_takes_other_roles_and_special_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    template, names = read_template(folder)
    assert names == {"eos_token": "<|im_end|>", "bos_token": EOD_TOKEN}
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "ho"}]
    found = encode(by_template(template, names, "user"), tokenizer, messages)
    assert tokenizer.decode(found[found >= 0]) == "<|im_start|>user\nhé<|im_end|>\n"
    shown = encode(
        by_template("{{ eos_token }}{{ messages[0].content }}", names, "user"),
        tokenizer,
        messages[:1],
    )
    assert bare(shown)[0] == tokenizer._backend.token_to_id("<|im_end|>")


def test_template_in_its_own_file_and_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}]})
    )
    assert read_template(tmp_path / "tokenizer.json") == ("a", {})
    (tmp_path / "chat_template.jinja").write_text("b")
    assert read_template(tmp_path / "tokenizer.json")[0] == "b"


CHANGING = "{% for m in messages %}{{ m.role if loop.last else 'x' }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHANGING, "writes message 1 (assistant) differently"),
        ("{{ raise_exception('no system') }}", "refuses it: no system"),
        ("{% for %}", "refuses it"),
    ],
)
def test_templates_that_cannot_be_used(template: str, said: str, tokenizer: Tokenizer) -> None:
    messages = [{"role": r, "content": "a"} for r in ("user", "assistant", "user", "assistant")]
    with pytest.raises(BadInputError, match="chat:1: the chat template") as error:
        encode(by_template(template), tokenizer, messages)
    assert said in str(error.value)


# ------------------------------------------------------------------------------------------ samples


def write(folder: Path, documents: list[np.ndarray]) -> str:
    write_indexed(folder / "train", documents, np.int32)
    return str(folder / "train")


def random_documents(seed: int, count: int, longest: int) -> list[np.ndarray]:
    """Return documents of distinct tokens, some of them context."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    tokens = np.split(np.arange(1, lengths.sum() + 1), np.cumsum(lengths)[:-1])
    return [np.where(rng.random(len(t)) < 0.5, t, ~t).astype(np.int32) for t in tokens]


@given(
    seed=st.integers(0, 999),
    count=st.integers(1, 30),
    S=st.integers(4, 24),
    window=st.sampled_from([1, 4]),
)
@settings(max_examples=15, deadline=None)
def test_samples_hold_whole_documents(seed, count, S, window, tmp_path_factory) -> None:
    documents = random_documents(seed, count, S)
    prefix = write(tmp_path_factory.mktemp("whole"), documents)
    data = talks(prefix, S, options=OPTIONS, window=window)
    batch = data.batch(range(len(data)))
    by_first = {abs(d[0] if d[0] > 0 else ~d[0]): d for d in documents}
    seen: list[int] = []
    for row in range(len(data)):
        ids, labels = batch["input_ids"][row], batch["labels"][row]
        owner = np.full(S, -1)
        at = 0
        while at < S and ids[at]:
            document = by_first[int(ids[at])]
            n = len(document)
            learned = document >= 0
            np.testing.assert_array_equal(ids[at : at + n], bare(document))
            np.testing.assert_array_equal(labels[at : at + n - 1], bare(document)[1:])
            expected = [*learned[1:].astype(float), 0.0]  # nothing follows the last token
            np.testing.assert_array_equal(batch["loss_mask"][row, at : at + n], expected)
            np.testing.assert_array_equal(batch["position_ids"][row, at : at + n], np.arange(n))
            owner[at : at + n] = len(seen)
            seen.append(int(ids[at]))
            at += n
        assert not ids[at:].any()
        assert not batch["loss_mask"][row, at:].any()
        sees = (owner[:, None] == owner[None, :]) & (np.arange(S)[:, None] >= np.arange(S))
        np.testing.assert_array_equal(batch["attention_mask"][row, 0], ~sees)
        assert data.visible_pairs([row])[0] == sees.sum()
    assert sorted(seen) == sorted(by_first)


def test_epochs_are_shuffled_anew_and_a_blend_resumes(tmp_path: Path) -> None:
    prefix = write(tmp_path, random_documents(1, 40, 20))
    one = talks(prefix, 32, options=OPTIONS)
    more = talks(prefix, 32, 5 * len(one), options=OPTIONS)
    assert len(more) >= 5 * len(one)
    used = np.concatenate([more.pieces(i)[:, 0] for i in range(len(more))])
    first, second = used[:40], used[40:80]
    assert sorted(first) == sorted(second) == list(range(40))
    assert (first != second).any()
    assert one.fingerprint() != more.fingerprint()
    blend = open_blend(["1", prefix], seq_length=32, size=24, options=OPTIONS, conversations=True)
    with Loader(blend, 4, epochs=None) as loader, Loader(blend, 4, epochs=None) as again:
        batches = [next(loader) for _ in range(4)]
        again.load_state({**loader.state(), "next_sample": 8})
        for name, array in next(again).items():
            np.testing.assert_array_equal(array, batches[2][name])


@pytest.mark.mindformers
def test_mindformers_packs_the_same_and_trains_on_padding(tmp_path: Path) -> None:
    """MindFormers' labels differ in one thing: the last of each document is 0, a token, and not -100."""
    packing = pytest.importorskip("mindformers.dataset.handler.packing_handler")
    documents = random_documents(3, 30, 16)
    data = talks(write(tmp_path, documents), 16, options=OPTIONS)
    order = [documents[i] for s in range(len(data)) for i in data.pieces(s)[:, 0]]
    rows = [
        {"input_ids": bare(d).tolist(), "labels": np.where(d < 0, -100, d).tolist()} for d in order
    ]
    config = packing.PackingConfig(16, output_columns=["input_ids", "labels", "actual_seq_len"])
    theirs = packing.pack_examples(rows, config)
    batch = data.batch(range(len(data)))
    np.testing.assert_array_equal(batch["input_ids"], theirs["input_ids"])
    labels = np.where(batch["loss_mask"] > 0, batch["labels"], -100)
    expected = np.array(theirs["labels"])
    ends = [(row, end - 1) for row, ends in enumerate(theirs["actual_seq_len"]) for end in ends]
    rows_, places = np.array(ends).T
    assert (expected[rows_, places] == 0).all()
    expected[rows_, places] = -100
    np.testing.assert_array_equal(labels, expected)


# -------------------------------------------------------------------------------------- from a corpus


def talk(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write_lines(path: Path, count: int = 40, long: tuple[int, ...] = ()) -> Path:
    lines = [
        talk(f"ask {i}", f"say {i} " + "x" * (99 if i in long else i % 7)) for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_long_conversations_are_counted_and_named(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_lines(tmp_path / "chat.jsonl", long=(4, 7, 8, 30))
    sets = [
        f"telechat_moe.corpus.paths=[{corpus}]",
        f"telechat_moe.corpus.tokenizer={folder}/tokenizer.json",
        f"telechat_moe.conversations.message={json.dumps(PATTERN)}",
        "train_dataset.data_loader.config.seq_length=64",
    ]
    arguments = [x for s in sets for x in ("--set", s)]
    command = [
        "data",
        "build",
        "--recipe",
        "telechat3_moe/finetune_tiny.yaml",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*command, *arguments]) == 0
    said = capsys.readouterr().out
    assert "too long   4 of more than 64 tokens left out: chat.jsonl:5 (1" in said
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [name for name, _ in manifest["too_long"]] == [f"chat.jsonl:{n}" for n in (5, 8, 9, 31)]
    assert manifest["train"]["documents"] + manifest["valid"]["documents"] == 36
    assert main(["data", "show", str(tmp_path / "out" / "train")]) == 0
    assert "<user>" in capsys.readouterr().out
    with pytest.raises(
        BadInputError, match=r"are longer than seq_length .20.: number 0 .*build the"
    ):
        talks(tmp_path / "out" / "train", 20, options=OPTIONS)


def test_interrupted_build_keeps_what_was_too_long(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telechat_moe.data.scan.SHARD_BYTES", 600)
    corpus = [write_lines(tmp_path / "chat.jsonl", long=(4, 30))]
    how = {"tokenizer": folder, "conversations": ChatFormat(("assistant",), 64, PATTERN)}
    whole = build_chats(tmp_path / "whole", corpus, **how)
    write_shard, done = _Job._write_shard, []

    def stop(self, shard, *rest):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(shard)
        write_shard(self, shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(_Job, "_write_shard", stop)
        with pytest.raises(KeyboardInterrupt):
            build_chats(tmp_path / "out", corpus, **how)
    resumed = build_chats(tmp_path / "out", corpus, **how)
    assert resumed.resumed_shards == 5
    assert resumed.manifest == whole.manifest
    assert len(whole.manifest["too_long"]) == 2


def test_default_conversations_are_docstrings(folder: Path, tmp_path: Path) -> None:
    how = ChatFormat(("assistant",), 4096, PATTERN)
    result = build_chats(tmp_path, [], tokenizer=folder, conversations=how)
    assert result.manifest["train"]["documents"] > 2000
    source, tokenizer = IndexedDataset(tmp_path / "train"), load_tokenizer(folder)
    first = source[0]
    assert tokenizer.decode(bare(first)).startswith("<user>\n")
    assert first[-1] == tokenizer.eod


BAD_LINES = {
    '{"messages": []}': "a JSON list; expected a list with at least one message",
    '{"messages": "hi"}': "messages are a JSON str; expected a list",
    '{"messages": [3]}': "message 0 is a JSON int; expected an object",
    '{"messages": [{"role": "user"}]}': "message 0 has nothing as 'content' (keys: 'role')",
    '{"messages": [{"from": "human", "value": "a"}]}': "ShareGPT's from and value are role",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "a part of type 'image'",
    '{"messages": [{"role": "user", "content": [3]}]}': "a part of type a JSON int",
    '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}': "'weight' 0.5; expected 0",
    '{"messages": [{"role": "assistant", "content": "a", "weight": 1, "masked": true}]}': "one that it is not",
    '{"messages": [{"role": "assistant", "content": "a", "train": false}]}': "to be learned (train)",
    '{"messages": [{"role": 1, "content": ""}]}': "message 0 has a JSON int as 'role'",
    '{"text": "hi"}': "has no key 'messages' (keys: 'text')",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': "half a surrogate pair",
    '{"messages": [{"role": "user", "content": "hi"}]}': "no message of the role assistant",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_lines_are_named(line: str, tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(talk("a", "b")) + "\n" + line + "\n")
    how = ChatFormat(("assistant",), 64, PATTERN)
    with pytest.raises(BadInputError, match=r"chat\.jsonl:( line )?2") as error:
        build_chats(tmp_path / "out", [path], tokenizer=folder, conversations=how, valid_fraction=0)
    assert BAD_LINES[line] in str(error.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_nothing_left_and_other_files_are_refused(tmp_path: Path, folder: Path) -> None:
    how = {"tokenizer": folder, "conversations": ChatFormat(("assistant",), 5, PATTERN)}
    lines = write_lines(tmp_path / "chat.jsonl")
    with pytest.raises(BadInputError, match=r"at most 5 tokens .* raise seq_length"):
        build_chats(tmp_path / "out", [lines], **how, valid_fraction=0)
    (tmp_path / "a.txt").write_text("hi")
    with pytest.raises(BadInputError, match=r"a\.txt: conversations are lines of \.jsonl"):
        build_chats(tmp_path / "out", [tmp_path / "a.txt"], **how)
    write_indexed(tmp_path / "plain", [np.arange(4)], np.uint16)
    with pytest.raises(BadInputError, match="uint16, which say nothing about the loss"):
        talks(tmp_path / "plain", 8, options=OPTIONS)
    with pytest.raises(BadInputError, match=r"no chat_template.jinja and no chat_template in"):
        read_template(tmp_path / "tokenizer.json")


def test_text_training_says_that_data_are_conversations(tmp_path: Path) -> None:
    prefix = write(tmp_path, random_documents(1, 40, 20))
    options = SampleOptions(eod=0, vocab_size=10_000)
    data = open_blend(["1", prefix], seq_length=16, size=4, options=options)
    with pytest.raises(BadInputError, match=r"need the section telechat_moe\.conversations"):
        data.batch(range(4))


def test_data_that_were_built_otherwise_are_named(tmp_path: Path, folder: Path) -> None:
    how = ChatFormat(("assistant",), 256, PATTERN)
    corpus = write_lines(tmp_path / "chat.jsonl")
    build_chats(tmp_path / "chats", [corpus], tokenizer=folder, conversations=how)
    common = [
        "telechat_moe.evaluation.interval=0",
        "telechat_moe.sample=null",
        "load_checkpoint=''",
        f"telechat_moe.corpus.tokenizer={folder}",
    ]
    path = f"train_dataset.data_loader.config.data_path=['1', '{tmp_path}/chats/train']"
    message = f"telechat_moe.conversations.message={json.dumps(PATTERN)}"
    roles = "telechat_moe.conversations.loss_roles=[user]"
    for name, sets, said in (
        ("finetune", [message], ""),
        ("finetune", [], "is built with '<{role}>"),
        ("finetune", [message, roles], "loss_roles ['user'], but"),
        ("pretrain", [], "is built from conversations, the recipe trains on text"),
    ):
        _, problems = examine(load(f"telechat3_moe/{name}_tiny.yaml", [*common, path, *sets]))
        found = [str(p) for p in problems if "built" in str(p)]
        assert bool(found) == bool(said)
        assert said in "".join(found)
