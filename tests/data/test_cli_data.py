"""`telechat-moe data`: what it prints, its JSON, its exit codes."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from tokenizers import AddedToken

from telechat_moe.cli import main
from telechat_moe.data import (
    BlendedDataset,
    IndexedDataset,
    Loader,
    load_tokenizer,
    open_recipe,
    open_valid,
    write_indexed,
)
from telechat_moe.data.tokenizer import train_tokenizer
from telechat_moe.recipe import find, load
from telechat_moe.train import preflight


@pytest.fixture(scope="module")
def built(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "out"
    assert main(["data", "build", "--corpus", str(corpus), "--out", str(out)]) == 0
    return out


def test_build_prints_and_writes_json(corpus: Path, tmp_path: Path, capsys) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    command = ["data", "build", "--corpus", str(corpus), "--out", str(out), "--vocab-size", "300"]
    assert main([*command, "--json", str(report)]) == 0
    printed = capsys.readouterr()
    assert "built in" in printed.out
    assert "300 tokens, end of document <|eod|> = 0, stored as uint16" in printed.out
    found = json.loads(report.read_text())
    assert set(found) == {
        "out",
        "reused",
        "shards",
        "resumed_shards",
        "seconds",
        "skipped_files",
        "manifest",
    }
    assert found["manifest"] == json.loads((out / "manifest.json").read_text())
    assert main([*command, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"] is True


def test_show(built: Path, capsys) -> None:
    assert main(["data", "show", str(built), "--tokens", "5", "--json", "-"]) == 0
    train, valid = json.loads(capsys.readouterr().out)["datasets"]
    dataset = IndexedDataset(built / "train")
    first = dataset.tokens[:5].tolist()
    assert train["first_tokens"] == first
    assert train["first_text"] == load_tokenizer(built).decode(first)
    assert train["documents"] == len(dataset)
    assert train["tokens"] == int(dataset.sequence_lengths.sum())
    assert (train["checksums"], valid["prefix"]) == ("ok", str(built / "valid"))
    for given in ("train", "train.bin", "train.idx"):
        assert main(["data", "show", str(built / given)]) == 0
        assert "checksums: ok" in capsys.readouterr().out


def test_documents_of_several_sequences(tmp_path: Path, capsys) -> None:
    """Megatron splits documents into sentences; the lengths are those of documents."""
    lengths = [3, 4, 5, 1, 1]
    write_indexed(tmp_path / "d", [list(range(n)) for n in lengths], np.uint16)
    index = (tmp_path / "d.idx").read_bytes()
    head, documents = index[: -8 * 6], np.array([0, 2, 2, 5], "<i8")  # the second is empty
    count = struct.pack("<Q", len(documents))
    (tmp_path / "d.idx").write_bytes(head[:26] + count + head[34:] + documents.tobytes())
    assert main(["data", "show", str(tmp_path / "d"), "--json", "-"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["datasets"]
    keys = ("documents", "sequences", "tokens", "shortest", "longest", "mean_tokens")
    assert [report[key] for key in keys] == [3, 5, 14, 0, 7, 4.7]
    assert main(["data", "show", str(tmp_path / "d")]) == 0
    assert "3 documents of 5 sequences, 14 tokens" in capsys.readouterr().out


TUNE = "telechat3_moe/finetune_tiny.yaml"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, template: str, eos: str) -> Path:
    """Write a tokenizer with a chat template."""
    folder.mkdir()
    backend = train_tokenizer(["the user asks and the assistant answers\n" * 20], 300)._backend
    names = "<|im_start|>", "<|im_end|>", "<|stop|>"
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def test_conversations_of_another_tokenizer(tmp_path: Path, capsys) -> None:
    """Tokens and template are of one tokenizer, what is learned is shown, and notes are told by build, show and check."""
    theirs = write_model(tmp_path / "theirs", "{{ raise_exception('not this one') }}", "<|im_end|>")
    mine = write_model(tmp_path / "mine", CHATML, "<|stop|>")
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"hé {i}"},
                {"role": "assistant", "content": "yes\x1b[0m"},
            ]
        }
        for i in range(30)
    ]
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [
        "telechat_moe.conversations.message=null",
        f"telechat_moe.corpus.tokenizer={theirs}",
    ]
    sets = [x for value in settings for x in ("--set", value)]
    out = tmp_path / "out"
    build = ["data", "build", "--recipe", TUNE, "--corpus", str(corpus), "--out", str(out), *sets]
    assert main(build) == 3
    assert "not this one" in capsys.readouterr().err
    assert main([*build, "--tokenizer", str(mine)]) == 0
    note = (
        "30 of 30 learned messages end with <|im_end|>, where generation does not stop by default"
    )
    assert note in capsys.readouterr().out
    assert main(["data", "show", str(out / "train"), "--document", "1"]) == 0
    said = capsys.readouterr().out
    assert note in said
    assert "assistant\n    [[yes\\x1b[0m<|im_end|>\n    ]]" in said
    assert main(["data", "show", str(out / "train"), "--json", "-"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["datasets"]
    parts = report["example"]["parts"]
    assert [part["learned"] for part in parts] == [False, True]
    assert parts[0]["text"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert parts[1]["text"] == "yes\x1b[0m<|im_end|>\n"
    assert main(["data", "show", str(out / "train"), "--document", "99"]) == 2
    # A recipe with the other tokenizer is another one.
    data = f"train_dataset.data_loader.config.data_path=['1', '{out}/train']"
    off = ["telechat_moe.evaluation.interval=0", "telechat_moe.sample=null", "load_checkpoint=''"]
    for folder, wrong in ((mine, ""), (theirs, "conversations: message 'chat template ")):
        values = [settings[0], f"telechat_moe.corpus.tokenizer={folder}", data, *off]
        recipe = load(TUNE, values)
        problems = [str(problem) for problem in preflight.examine(recipe)[1]]
        assert [wrong in problem for problem in problems] == [True] * bool(wrong)
        assert note in preflight.data_notes(recipe)[0]


def test_show_without_manifest_is_not_judged(built: Path, tmp_path: Path, capsys) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"d.{suffix}").write_bytes((built / f"train.{suffix}").read_bytes())
    assert main(["data", "show", str(tmp_path / "d")]) == 0
    printed = capsys.readouterr().out
    assert "checksums: not judged" in printed
    assert "first text" not in printed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["build", "--corpus", "nowhere"], 3, "nowhere: no such file or folder"),
        (["build", "--vocab-size", "5"], 2, "vocab_size is 5"),
        (["build", "--valid-fraction", "2"], 2, "valid_fraction is 2.0"),
        (["build", "--tokenizer", "nowhere.json"], 3, "nowhere.json: no such file"),
        (["show", "nowhere"], 3, "nowhere.idx: no such file"),
        (["show", "."], 3, "no .idx file in this folder"),
        (["show", "x", "--tokens", "-1"], 2, "--tokens is -1"),
    ],
)
def test_errors(
    arguments: list[str],
    code: int,
    message: str,
    capsys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.out == ""
    assert list(tmp_path.glob("*/*.bin")) == []


def test_damaged_file_is_shown_as_such(built: Path, tmp_path: Path, capsys) -> None:
    for path in built.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = bytearray((tmp_path / "valid.bin").read_bytes())
    raw[-1] ^= 0x80
    (tmp_path / "valid.bin").write_bytes(raw)
    assert main(["data", "show", str(tmp_path)]) == 3
    assert f"{tmp_path / 'valid.bin'}: damaged" in capsys.readouterr().err


RECIPE = "telechat3_moe/pretrain_tiny.yaml"


def test_recipe_builds_what_it_trains_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load(RECIPE)
    assert main(["data", "build", "--recipe", RECIPE, "--corpus", str(corpus), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["manifest"]["inputs"]["seed"] == recipe.seed
    assert report["manifest"]["inputs"]["vocab_size"] == recipe.model_config.vocab_size
    train = open_recipe(recipe)
    ((prefix, share, valid),) = open_valid(recipe)
    assert (prefix, share) == ("./output/data/valid", 1.0)
    config = recipe.train_dataset.data_loader.config
    samples = recipe.train_dataset.data_loader.sizes[0]
    assert len(train) == math.ceil(samples * 1.005)
    assert train[0]["input_ids"].shape == (config.seq_length,)
    assert "attention_mask" not in train[0]
    assert isinstance(train, BlendedDataset)
    (source,) = (dataset.source for dataset in train.datasets)
    assert source.num_documents == report["manifest"]["train"]["documents"]
    assert valid.source.num_documents == report["manifest"]["valid"]["documents"]
    assert len(valid) == (valid.source.num_tokens - 1) // config.seq_length
    batch = next(Loader(train, recipe.runner_config.batch_size))
    assert batch["labels"].max() < recipe.model_config.vocab_size


def test_recipe_that_does_not_fit_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    text = find(RECIPE).read_text(encoding="utf-8")
    build = ["data", "build", "--corpus", str(corpus), "--recipe", "mine.yaml"]
    Path("mine.yaml").write_text(text.replace("eod: 0", "eod: 7"), encoding="utf-8")
    assert main(build) == 3
    assert "config.eod is 7, the tokenizer's is 0" in capsys.readouterr().err
    Path("mine.yaml").write_text(text.replace("data/train'", "data/text'"), encoding="utf-8")
    assert main(build) == 3
    assert "must name one prefix that ends in /train" in capsys.readouterr().err
    assert main([*build, "--out", "elsewhere"]) == 0


def test_a_tokenizer_that_does_not_fit_is_refused_before_the_build(
    built: Path, tmp_path: Path, capsys
) -> None:
    build = ["data", "build", "--recipe", RECIPE, "--out", str(tmp_path / "out")]
    build += ["--corpus", str(built / "manifest.json"), "--tokenizer", str(built)]
    assert main([*build, "--set", "model.model_config.vocab_size=300"]) == 3
    said = capsys.readouterr().err
    assert "vocab_size is 300, the tokenizer has" in said
    assert "nothing was built" in said
    assert not (tmp_path / "out").exists()
    assert main([*build[:4], "--valid", RECIPE, "--valid-fraction", "0.1"]) == 2
    assert "--valid-fraction has no effect beside --valid" in capsys.readouterr().err


def test_imports_are_light() -> None:
    """Without mindspore; the verb is registered without numpy."""
    code = "import sys; import {module}; print([m for m in {heavy} if m in sys.modules])"
    checks = {
        "telechat_moe.data": ["mindspore", "mindformers", "tokenizers", "torch", "rich", "yaml"],
        "telechat_moe.cli.data": ["mindspore", "tokenizers", "numpy", "rich", "telechat_moe.data"],
    }
    for module, heavy in checks.items():
        done = subprocess.run(
            [sys.executable, "-c", code.format(module=module, heavy=heavy)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "[]\n"
