"""`telechat-moe convert`: weights between this package and Hugging Face."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from telechat_moe.cli.arguments import arg
from telechat_moe.cli.output import to_yaml, write_json
from telechat_moe.cli.progress import bars
from telechat_moe.cli.verb import Verb
from telechat_moe.errors import UsageError
from telechat_moe.units import count_text, parse_size, size_text

if TYPE_CHECKING:
    from telechat_moe.interop.hf import Conversion
    from telechat_moe.recipe import Recipe

_MODEL = "model.model_config"
NOTES = """\
SRC is a .safetensors file, a folder with one or with model.safetensors.index.json, a checkpoint of MindFormers, or, with
--to hf, the folder of a training checkpoint. DST, a folder or a single .safetensors file, appears only when it is complete; a conversion that was
killed goes on when the same command is repeated.

SRC's config.json must agree with the recipe; --recipe-out FILE takes the model from it instead and writes a recipe that fits.
Tensors that are unknown, missing or of another shape are listed, and nothing is written. FP8 matrices with block scales
become bfloat16. docs/weights.md has the details.
"""
EXAMPLES = """\
telechat-moe convert output/first/checkpoints/step-00000200 output/hf \\
    --recipe telechat3_moe/pretrain_tiny.yaml --to hf
telechat-moe convert weights/hf weights/ours --recipe telechat3_moe/pretrain_tiny.yaml --to telechat \\
    --recipe-out mine.yaml
"""


def run(args: argparse.Namespace) -> int:
    """Convert and say what was written."""
    if args.verify:
        return _verify(args)
    needed = {"DST": args.dst, "--recipe": args.recipe, "--to": args.to}
    if missing := [name for name, value in needed.items() if not value]:
        raise UsageError(f"convert needs {', '.join(missing)} (or --verify to check SRC only)")
    shard_bytes = parse_size("--shard-size", args.shard_size, bare=True)
    from telechat_moe.files import write_atomic
    from telechat_moe.interop.hf import convert
    from telechat_moe.recipe import RecipeError
    from telechat_moe.recipe.hugging_face import OtherModelError

    recipe, text = _recipe(args)
    begin = time.monotonic()
    try:
        with bars(in_bytes=True) as progress:
            model = recipe.model_config
            result = convert(args.src, args.dst, model, args.to, shard_bytes, progress)
    except OtherModelError as error:
        raise RecipeError(error.problems(recipe, _MODEL)) from error
    seconds = time.monotonic() - begin
    if args.recipe_out:
        try:
            write_atomic(Path(args.recipe_out), text.encode())
        except OSError as error:
            text = f"--recipe-out {args.recipe_out} cannot be written: {error.strerror}"
            raise UsageError(f"{text}; the weights are in {args.dst}") from error
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    if not write_json(args.json, {**vars(result), "seconds": round(seconds, 3)}):
        print(_describe(result, seconds))
    return 0


def _recipe(args: argparse.Namespace) -> tuple[Recipe, str]:
    """Return the recipe of the weights; with --recipe-out, with what config.json says put in, and its text."""
    from telechat_moe.interop.hf import fitting
    from telechat_moe.recipe import RecipeError, find, load, schema_file
    from telechat_moe.recipe.edit import edited
    from telechat_moe.recipe.hugging_face import OtherModelError

    recipe = load(args.recipe, args.overrides, use="weights")
    if not args.recipe_out:
        return recipe, ""
    if args.to != "telechat":
        raise UsageError("--recipe-out writes what SRC's config.json says: it needs --to telechat")
    target = Path(args.recipe_out)
    if target.exists() or not target.parent.is_dir():
        reason = "exists" if target.exists() else "is in a folder that does not exist"
        raise UsageError(f"--recipe-out {target} {reason}; name another file")
    try:
        fits = fitting(Path(args.src), recipe)
    except OtherModelError as error:
        raise RecipeError(error.problems(recipe, _MODEL)) from error
    weights = f"load_checkpoint={json.dumps(args.dst, ensure_ascii=False)}"
    changes = [*args.overrides, *fits, weights]
    after, source = load(args.recipe, changes), find(args.recipe)
    text = edited(source.read_text(encoding="utf-8-sig"), load(source), after, changes)
    text = text or to_yaml(after.to_dict())
    text = text.replace("$schema=../schema.json", f"$schema={schema_file()}", 1)
    return after, f"# {args.recipe} with the model of {args.src}\n{text}"


def _verify(args: argparse.Namespace) -> int:
    if args.dst or args.recipe or args.to or args.recipe_out:
        raise UsageError("--verify takes SRC only")
    from telechat_moe.files import verify_checksums

    begin = time.monotonic()
    with bars(in_bytes=True) as progress:
        files, size, problems = verify_checksums(Path(args.src), progress)
    seconds = time.monotonic() - begin
    report = {"path": args.src, "files": files, "bytes": size, "problems": problems}
    if not write_json(args.json, {**report, "seconds": round(seconds, 3)}) and not problems:
        print(f"{args.src}: {files} file(s), {size_text(size)}, all as they were written")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _describe(result: Conversion, seconds: float) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in result.dtypes.items())
    weights = [f for f in result.files if f.endswith(".safetensors")]
    lines = [
        f"{result.destination}: {count_text(result.parameters)} parameters in {result.tensors} tensors "
        f"({dtypes})",
        f"  {len(weights)} file(s), {size_text(result.total_bytes)}, {seconds:.1f} s",
    ]
    if result.resumed_files:
        lines.append(f"  {result.resumed_files} file(s) were finished by an earlier run")
    if result.ignored:
        lines.append(f"  left out, no weights: {len(result.ignored)} ({result.ignored[0]}, ...)")
    return "\n".join(lines)


VERB = Verb(
    name="convert",
    help="convert weights to and from Hugging Face's format",
    description="Convert weights to and from Hugging Face's format, bit for bit.",
    notes=NOTES,
    examples=EXAMPLES,
    exits={
        0: "converted or verified",
        1: "writing failed (disk full), or files differ",
        2: "wrong usage, or DST exists",
        3: "the recipe or SRC cannot be used, or SRC's config.json is of another model",
    },
    after_interruption="the same command goes on",
    json_keys="source, destination, to, files, tensors, parameters, total_bytes, dtypes (number of tensors by "
    "type), ignored (tensors of SRC that are no weights), notes (where transformers computes something "
    "else with these weights, what was rounded or not judged, NaN and infinite values), resumed_files (finished by an earlier run), seconds. "
    "With --verify: path, files, bytes, problems, seconds.",
    overrides="override a value of the recipe, for example model.model_config.num_hidden_layers=4",
    arguments=[
        arg("SRC", "weights to read"),
        arg("DST", "folder or .safetensors file to make", nargs="?"),
        arg("--verify", "compare the files of SRC with its checksums, no more"),
        arg("--recipe RECIPE", "recipe whose model the weights are of"),
        arg("--recipe-out FILE", "write RECIPE with the model of SRC's config.json"),
        arg("--to", "format and names to write", choices=("hf", "telechat")),
        arg(
            "--shard-size SIZE",
            "largest file, in bytes or as 500MB, 5GB, 2GiB (default 5GB)",
            "5GB",
        ),
    ],
    run=run,
)
