"""Random command lines, drawn from the parsers: none ends in a traceback, and each says what was wrong."""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from telechat_moe.cli import COMMAND, main
from telechat_moe.cli.verb import Verb, VerbParser

TINY = "telechat3_moe/pretrain_tiny.yaml"
CODES = {0, 1, 2, 3, 4}
WORDS = (
    *("", " ", "x", "-", "--", "=", "a=b", "a.b=[", "0", "1", "-1", "1.5", "nan", "-inf", "1e999", "9" * 25, "9" * 5000),
    *("ünïcødé 名前", "a\nb", "\udcff", "n" * 5000, "/dev/null", "/proc/self/mem", "\x1b[31m"),
)  # fmt: skip
SETTINGS = (
    *("seed=1", "seed=nan", "seed=", "=1", "seed", "a.b.c=1", "model.model_config.hidden_size=-4", "optimizer=7"),
    *("output_dir=[", "parallel_config.data_parallel=0", "telechat_moe.corpus.paths.9=x", "seed=99999999999999999999"),
    *("runner_config.batch_size=x", "train_dataset.data_loader.sizes=[1", "callbacks=\udcff", "seed=&a"),
)  # fmt: skip
CHEAP = {"show", "check", "layouts", "simulate"}
"""Verbs that may get a good recipe: they only read it."""
ALWAYS = {"data build": ["--corpus", "nothing"], "plan calibrate": ["--recipe", "nothing"]}
"""What keeps a verb that needs no input from long work."""


def leaves(verb: Verb = COMMAND, *above: str) -> Iterator[tuple[tuple[str, ...], Verb]]:
    """Yield the words and the verb of everything that runs."""
    for inner in verb.subverbs:
        if inner.subverbs:
            yield from leaves(inner, *above, inner.name)
        else:
            yield (*above, inner.name), inner


LEAVES = list(leaves())


CONTENTS = {
    "empty": b"",
    "noise.safetensors": random.Random(0).randbytes(300),
    "noise.bin": b"\x80\xff\x00" * 9,
    "noise.idx": b"MMIDIDX\x00\x00\x01",
    "broken.yaml": b"a: [b",
    "list.yaml": b"- 1\n- 2\n",
    "unknown.yaml": b"sead: 1\nmodel:\n  model_config: 7\n",
    "half.json": b'{"a": 1,',
    "list.json": b"[1, [], {}]",
    "object.json": b'{"a": NaN}',
    "lines.jsonl": b'{"event": "step"}\nnull\n7\n',
    "table.csv": b"a,b\n1\n\n\xff",
    "wörds.txt": b"7\nx\n-1\n",
    "folder/checkpoint.json": b'{"sha256": 7}',
    "dump/manifest.json": b'{"sha256": 7}',
}
INPUTS = (*CONTENTS, "folder", "dump", "loop", "nothing", "folder/nothing", "empty/nothing")
"""Names of files and folders that no verb can use."""


def make_inputs() -> None:
    """Make the files of `CONTENTS` in the current folder, anew: a line may have written over them."""
    for name, content in CONTENTS.items():
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    if not Path("loop").is_symlink():
        Path("loop").symlink_to("loop")


def line(random_: random.Random) -> list[str]:
    """Return the arguments of a command."""
    words, verb = random_.choice(LEAVES)
    parser = VerbParser(verb, prog=" ".join(words))
    files = [*INPUTS, TINY] if words[-1] in CHEAP else list(INPUTS)

    def value(action: argparse.Action) -> str:
        if action.dest == "overrides":
            return random_.choice(SETTINGS)
        if action.choices and random_.random() < 0.7:
            return random_.choice([str(c) for c in action.choices])
        if action.type in (int, float) and random_.random() < 0.6:
            return str(random_.choice([1, 2, 3, 0, -1, 0.5, 10**9]))
        return random_.choice(files if random_.random() < 0.7 else list(WORDS))

    def values(action: argparse.Action) -> list[str]:
        many = {
            0: 0,
            "+": random_.randint(1, 3),
            "*": random_.randint(0, 3),
            "?": random_.randint(0, 1),
        }
        return [value(action) for _ in range(many.get(action.nargs, 1))]  # pyright: ignore

    arguments = list(words)
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            odds = 0.95 if action.required else 0.25
            while random_.random() < odds:
                name = random_.choice(action.option_strings) if action.option_strings else ""
                arguments += [*filter(None, [name]), *values(action)]
                odds = 0.1  # now and then once more than there should be
    if random_.random() < 0.1:
        arguments.insert(
            random_.randint(0, len(arguments)),
            random_.choice(["--hlep", "--sett", "--jsn=-", *WORDS]),
        )
    if random_.random() < 0.05:
        arguments[len(words) - 1] = arguments[len(words) - 1][:-1]
    return arguments + ALWAYS.get(" ".join(words), [])


def check(seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    """Run lines; each ends with one of our codes and, if it could not be carried out, with the reason."""
    for seed in seeds:
        make_inputs()
        arguments = line(random.Random(seed))
        code = main(arguments)
        output = "".join(capsys.readouterr())
        assert code in CODES, (seed, arguments)
        assert "Traceback" not in output, (seed, arguments, output)
        if code in (2, 3):
            assert "error: " in output or "problem" in output, (seed, arguments, output)


def test_a_hundred_random_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check(range(100), capsys)


@pytest.mark.slow
def test_a_thousand_random_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check(range(100, 1100), capsys)
