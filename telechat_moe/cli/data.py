"""`telechat-moe data build`, `data show`, `data index` and `data audit`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telechat_moe.cli import data_audit
from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import write_json
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.units import size_text

if TYPE_CHECKING:
    from telechat_moe.data import BuildResult, IndexedDataset, Tokenizer
    from telechat_moe.recipe import Recipe

DEFAULT_OUT = "output/data"
DEFAULT_VOCAB = 2048
DEFAULT_SEED = 1234
DEFAULT_VALID = 0.05
_LOOK_AT = 1 << 20
"""Tokens that are looked at to see whether data are of conversations."""

BUILD_NOTES = """\
A text file is a document, and so is a line of .jsonl (its key `text`) or a row of .parquet (its column `text`); files may be
.gz or .zst; folders are read recursively. Without --corpus: the sources of Python's standard library (about 12 MB). With the
section telechat_moe.conversations of a recipe, lines of .jsonl are conversations.

Writes OUT/train.bin .idx, OUT/valid.bin .idx (Megatron's format), OUT/tokenizer.json and OUT/manifest.json. A finished dataset
of the same inputs is reused, an interrupted build goes on. docs/data.md has the details.
"""

SHOW_NOTES = """\
PREFIX is a path without .bin/.idx, or a folder, of which all datasets are shown. Checksums are
compared if a manifest.json is beside the files, else they are "not judged".

Of conversations one is written out; what is learned of it is between [[ and ]], or green on a terminal.
"""


def run_build(args: argparse.Namespace) -> int:
    """Build a dataset and say what it holds."""
    import logging

    from telechat_moe.data import build, load_tokenizer
    from telechat_moe.data.corpus import open_corpus
    from telechat_moe.recipe import load

    if not logging.getLogger().handlers:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    if args.overrides and not args.recipe:
        raise UsageError("--set changes a value of a recipe; name it with --recipe")
    if args.valid and args.valid_fraction is not None:
        raise UsageError("--valid-fraction has no effect beside --valid; give one of them")
    recipe = load(args.recipe, args.overrides, use="data") if args.recipe else None
    settings = _settings(args, recipe)
    chat, path = settings["conversations"], settings["tokenizer"]
    if path is not None:
        settings["tokenizer"] = tokenizer = load_tokenizer(path, args.eod_token)
        if recipe is not None:
            subject = f"{path} does not fit the recipe, and nothing was built"
            hint = "change the recipe, or give another --tokenizer or --eod-token"
            _require_fit(recipe, tokenizer.vocab_size, tokenizer.eod, subject, hint)
    begin = time.monotonic()
    settings["corpus"] = open_corpus(
        settings["corpus"],
        extensions=args.extension,
        text_key=args.text_key,
        conversations=chat is not None,
        ignored=chat.ignored if chat else (),
        valid=args.valid or (),
    )
    with bars() as progress:
        result = build(**settings, force=args.force, progress=progress)
    seconds = time.monotonic() - begin
    if recipe is not None:
        built = result.manifest["tokenizer"]
        subject = "the data was built, but does not fit the recipe"
        _require_fit(recipe, built["vocab_size"], built["eod"], subject, "change the recipe")
    report = {**vars(result), "out": str(result.out), "seconds": round(seconds, 3)}
    report["skipped_files"] = report.pop("skipped")
    if not write_json(args.json, report):
        print(_describe_build(result, seconds))
    return 0


def _settings(args: argparse.Namespace, recipe: Recipe | None) -> dict[str, Any]:
    """Return the options given, else the recipe's, else the defaults."""
    from telechat_moe.data.conversations import format_of

    settings: dict[str, Any] = {
        "out": DEFAULT_OUT,
        "corpus": [],
        "vocab_size": DEFAULT_VOCAB,
        "tokenizer": None,
        "valid_fraction": DEFAULT_VALID,
        "seed": DEFAULT_SEED,
    }
    if recipe is not None:
        corpus = recipe.telechat_moe.corpus
        settings |= {
            "corpus": corpus.paths,
            "vocab_size": recipe.model_config.vocab_size,
            "tokenizer": corpus.tokenizer,
            "valid_fraction": corpus.valid_fraction,
            "seed": recipe.seed,
            "out": args.out or _recipe_folder(recipe),
        }
    settings |= {key: getattr(args, key) for key in settings if getattr(args, key) is not None}
    chat = format_of(recipe, settings["tokenizer"]) if recipe is not None else None
    return settings | {"conversations": chat}


def _recipe_folder(recipe: Recipe) -> str:
    """Return the folder in which the recipe's training data is expected."""
    from telechat_moe.data.recipe import sources_of

    prefixes = sources_of(recipe)
    if len(prefixes) != 1 or Path(prefixes[0]).name != "train":
        raise BadInputError(
            f"{recipe.source}: train_dataset.data_loader.config.data_path names {prefixes or 'nothing'}; to build the "
            "data of a recipe it must name one prefix that ends in /train, such as "
            f"['1', '{DEFAULT_OUT}/train']; or give --out"
        )
    return str(Path(prefixes[0]).parent)


def _require_fit(recipe: Recipe, vocabulary: int, eod: int, subject: str, hint: str) -> None:
    """Refuse a tokenizer whose tokens the model of a recipe would misread."""
    size, config = recipe.model_config.vocab_size, recipe.train_dataset.data_loader.config
    problems: list[str] = []
    if vocabulary > size:
        key = "model.model_config.vocab_size"
        problems.append(f"{key} is {size}, the tokenizer has {vocabulary} tokens")
    if config is not None and config.eod != eod:
        key = "train_dataset.data_loader.config.eod"
        problems.append(f"{key} is {config.eod}, the tokenizer's is {eod}")
    if problems:
        raise BadInputError(f"{recipe.source}: {subject}: {'; '.join(problems)}; {hint}")


def _describe_build(result: BuildResult, seconds: float) -> str:
    manifest = result.manifest
    corpus, tokenizer = manifest["corpus"], manifest["tokenizer"]
    did = f"{result.out}: built in {seconds:.1f} s"
    if result.reused:
        did = f"{result.out}: a finished dataset of the same inputs is there, reused ({seconds:.1f} s)"
    if result.resumed_shards:
        did += f"; {result.resumed_shards} of {result.shards} shards were done before"
    lines = [
        did,
        f"  corpus     {corpus['label']}: {corpus['documents']:,} documents, "
        f"{size_text(corpus['text_bytes'])}",
        f"  tokenizer  {tokenizer['vocab_size']:,} tokens, end of document "
        f"{tokenizer['eod_token']} = {tokenizer['eod']}, stored as {manifest['dtype']}",
    ]
    for side in ("train", "valid"):
        if side in manifest:
            part = manifest[side]
            per_token = part["text_bytes"] / max(1, part["tokens"])
            counts = f"{part['documents']:,} documents, {part['tokens']:,} tokens"
            lines.append(f"  {side:<9}  {counts} ({per_token:.2f} bytes/token)")
    if result.skipped:
        lines.append(f"  skipped    {len(result.skipped)} file(s) that are not text")
    if long := manifest.get("too_long"):
        some = ", ".join(f"{name} ({tokens:,} tokens)" for name, tokens in long[:3])
        ellipsis = f", ... (all in {result.out / 'manifest.json'})" if len(long) > 3 else ""
        limit = manifest["inputs"]["conversations"]["seq_length"]
        text = f"{len(long):,} of more than {limit:,} tokens left out: {some}{ellipsis}"
        lines.append(f"  too long   {text}")
    lines += [f"  note       {note}" for note in manifest.get("notes", ())]
    return "\n".join(lines)


def run_index(args: argparse.Namespace) -> int:
    """Open the training data of a recipe, which builds the index if it is missing."""
    from telechat_moe.data import open_recipe
    from telechat_moe.recipe import load

    recipe, begin = load(args.recipe, args.overrides), time.monotonic()
    with bars() as progress:
        samples = len(open_recipe(recipe, progress))
    seconds = time.monotonic() - begin
    if not write_json(args.json, {"samples": samples, "seconds": round(seconds, 3)}):
        print(f"{recipe.source}: {samples:,} samples, opened in {seconds:.1f} s")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Describe one dataset or those of a folder."""
    from telechat_moe.data import IndexedDataset

    if args.tokens < 0:
        raise UsageError(f"--tokens is {args.tokens}; expected 0 or more")
    root = Path(args.prefix)
    prefixes = [root.with_suffix("")] if root.suffix in (".bin", ".idx") else [root]
    if root.is_dir():
        prefixes = [path.with_suffix("") for path in sorted(root.glob("*.idx"))]
        if not prefixes:
            raise BadInputError(f"{root}: no .idx file in this folder; build a dataset first")
    reports = [
        _report(prefix, IndexedDataset(prefix), _tokenizer_for(prefix, args.tokenizer), args)
        for prefix in prefixes
    ]
    if not write_json(args.json, {"datasets": reports}):
        print("\n".join(map(_describe, reports)))
    return 0


def _tokenizer_for(prefix: Path, path: str | None) -> Tokenizer | None:
    from telechat_moe.data import load_tokenizer

    if path is not None:
        return load_tokenizer(path)
    beside = prefix.with_name("tokenizer.json")
    return load_tokenizer(beside) if beside.is_file() else None


def _report(
    prefix: Path, dataset: IndexedDataset, tokenizer: Tokenizer | None, args: argparse.Namespace
) -> dict[str, Any]:
    from telechat_moe.data import verify
    from telechat_moe.data.conversations import bare

    checked, notes = "not judged", list[str]()
    if prefix.with_name("manifest.json").is_file():
        manifest = verify(prefix.parent)
        if f"{prefix.name}.bin" in manifest["sha256"]:
            checked, notes = "ok", manifest.get("notes", notes)
    lengths = dataset.document_lengths
    first = [int(token) for token in bare(dataset.tokens[: args.tokens])]
    return {
        "prefix": str(prefix),
        "dtype": str(dataset.dtype),
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "bytes": int(dataset.tokens.nbytes),
        "shortest": int(lengths.min()) if len(lengths) else 0,
        "longest": int(lengths.max()) if len(lengths) else 0,
        "mean_tokens": round(dataset.num_tokens / max(1, len(lengths)), 1),
        "checksums": checked,
        "tokenizer": str(tokenizer.path) if tokenizer else None,
        "first_tokens": first,
        "first_text": tokenizer.decode(first) if tokenizer else None,
        "example": _example(dataset, tokenizer, args.document),
        "notes": notes,
    }


def _example(
    dataset: IndexedDataset, tokenizer: Tokenizer | None, number: int
) -> dict[str, Any] | None:
    """Return a conversation in parts that are learned or not; None: the data are no conversations, or nothing spells tokens."""
    import numpy as np

    from telechat_moe.data.conversations import bare

    if tokenizer is None or dataset.dtype.kind != "i" or not (dataset.tokens[:_LOOK_AT] < 0).any():
        return None
    if not 0 <= number < len(dataset):
        raise UsageError(f"--document is {number}; {dataset.prefix} has {len(dataset):,}, from 0")
    stored = dataset[number]
    tokens, parts, shown = bare(stored), list[dict[str, Any]](), ""
    for end in [*(np.flatnonzero(np.diff(stored >= 0)) + 1).tolist(), len(stored)]:
        text = tokenizer.decode(tokens[:end])  # a part alone may be written otherwise
        parts.append({"learned": bool(stored[end - 1] >= 0), "text": text[len(shown) :]})
        shown = text
    return {"document": number, "tokens": len(stored), "parts": parts}


def _describe(report: dict[str, Any]) -> str:
    of = f" of {report['sequences']:,} sequences" * (report["sequences"] != report["documents"])
    lines = [
        f"{report['prefix']}: {report['documents']:,} documents{of}, {report['tokens']:,} tokens of "
        f"{report['dtype']} ({size_text(report['bytes'])})",
        f"  tokens per document: {report['shortest']:,} to {report['longest']:,}, "
        f"mean {report['mean_tokens']:,}",
        f"  checksums: {report['checksums']}",
        f"  first tokens: {' '.join(map(str, report['first_tokens']))}",
    ]
    if report["first_text"] is not None:
        lines.append(f"  first text: {report['first_text']!r}")
    lines += [f"  note: {note}" for note in report["notes"]]
    if example := report["example"]:
        green = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        begin, end, how = ("\33[32m", "\33[0m", "green") if green else ("[[", "]]", "in [[ ]]")
        parts = [(_visible(part["text"]), part["learned"]) for part in example["parts"]]
        text = "".join(f"{begin}{text}{end}" if is_learned else text for text, is_learned in parts)
        counts = f"document {example['document']}, {example['tokens']:,} tokens"
        lines.append(f"  {counts}, learned is {how}:")
        lines += [f"    {line}" for line in text.split("\n")]
    return "\n".join(lines)


def _visible(text: str) -> str:
    """Return a text whose control characters do nothing to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


BUILD = Verb(
    name="build",
    help="tokenise text into Megatron's .bin/.idx",
    notes=BUILD_NOTES,
    examples="telechat-moe data build --corpus my_texts --vocab-size 8192 --out output/my_data",
    exits={
        0: "built or reused",
        1: "disk full or another build is running",
        2: "wrong usage, or OUT holds a dataset of other inputs",
        3: "the corpus, tokenizer or recipe cannot be used",
    },
    json_keys="out, reused, shards, resumed_shards, seconds, skipped_files (name: reason), manifest (inputs, corpus, "
    "tokenizer, dtype, train, valid, sha256, versions: as in manifest.json).",
    after_interruption="the same command goes on",
    overrides="override a value of --recipe",
    arguments=[
        arg("--corpus PATH", "text files and folders (default: see below)", nargs="+"),
        arg("--valid PATH", "validation files and folders (default: a share)", nargs="+"),
        arg("--out DIR", f"folder to write (default {DEFAULT_OUT})"),
        arg(
            "--vocab-size N",
            f"tokens of the tokenizer that is trained (default {DEFAULT_VOCAB})",
            type=int,
        ),
        arg(
            "--tokenizer PATH",
            "use this tokenizer.json, or that of a Hugging Face folder, instead of training one",
        ),
        arg("--eod-token NAME", "end-of-document token of --tokenizer (default: usual)"),
        arg(
            "--valid-fraction F",
            f"share of documents kept for validation (default {DEFAULT_VALID})",
            type=float,
        ),
        arg("--seed N", f"seed of the split (default {DEFAULT_SEED})", type=int),
        arg("--extension EXT", "take only such files from folders", nargs="+"),
        arg(
            "--text-key KEY",
            "key of the text (default text) or messages (messages) in lines and rows",
        ),
        arg(
            "--recipe RECIPE",
            "take corpus, vocabulary, seed and folder from a recipe; other options override it",
        ),
        arg("--force", "replace a dataset of other inputs"),
    ],
    run=run_build,
)
SHOW = Verb(
    name="show",
    help="describe a .bin/.idx dataset",
    notes=SHOW_NOTES,
    examples="telechat-moe data show output/data/train",
    exits={0: "readable", 3: "missing, damaged or no Megatron dataset"},
    json_keys="datasets, a list of {prefix, dtype, documents, tokens, bytes, shortest, longest, mean_tokens, "
    'checksums ("ok" | "not judged"), tokenizer, first_tokens, first_text, sequences, example (document, tokens, parts: '
    "learned, text; null: no conversations), notes}.",
    arguments=[
        arg("PREFIX", "path without .bin/.idx, or a folder"),
        arg("--tokens N", "tokens to decode (default 32)", 32),
        arg("--document N", "conversation to show (default 0)", 0),
        arg("--tokenizer FILE", "tokenizer.json (default: beside the data, if any)"),
    ],
    run=run_show,
)
INDEX = Verb(
    name="index",
    help="build the index of a recipe's training data",
    description="Build the index of a recipe's training data, so that all processes of a run open it at once.",
    notes="The index of a large dataset (about 22 million samples and more) is kept in PREFIX.cache/ and opened\n"
    "through memory maps; a run builds it where it is missing. Smaller ones are built in memory by every run.",
    examples="telechat-moe data index telechat3_moe/pretrain_tiny.yaml",
    exits={0: "built or there", 1: "cannot be written", 3: "no recipe or no data"},
    json_keys="samples, seconds.",
    overrides="override a value of the recipe",
    arguments=[arg("RECIPE", "recipe whose training data are meant")],
    run=run_index,
)
VERB = Verb(
    name="data",
    help="turn text into training data, or look into such data",
    examples="telechat-moe data build",
    exits={1: "failed", 3: "bad input; each action lists its own"},
    subverbs=[BUILD, SHOW, INDEX, data_audit.VERB],
)
