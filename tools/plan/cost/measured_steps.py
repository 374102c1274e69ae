"""Read a table of measured steps: a CSV file with the columns of `COLUMNS`, a run in each line."""

import csv
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import load
from telechat_moe.tools.loss.read import step_seconds
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import Compute, Layout, ScheduleName, Stack
from telechat_moe.tools.plan.cost.score import MeasuredStep
from telechat_moe.units import GIB


def _count(text: str) -> int:
    """Return a whole number from 1 to 2^31."""
    number = int(text)
    if not 1 <= number <= 2**31:
        raise ValueError("expected 1 or more")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError("expected more than 0")
    return number


def _one_of(*words: str) -> Callable[[str], str]:
    """Return a reader of cells that hold one of these words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected {', '.join(words)}")
        return text

    return read


def _yes(text: str) -> bool:
    return _one_of("true", "false")(text.lower()) == "true"


_WARM_UP = 10
"""Steps of a log that do not count: they compile graphs and fill caches."""


def median_step(log: str) -> float:
    """Return the median step of a log, seconds."""
    seconds = step_seconds(log)
    steady = [s for step, s in seconds.items() if step >= min(seconds) + _WARM_UP]
    if not steady:
        raise BadInputError(f"{log}: {len(seconds)} steps, expected more than {_WARM_UP}")
    return statistics.median(steady)


DIMENSIONS = (
    "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k", "moe_ffn", "shared_experts", "dense_layers", "family",
)  # fmt: skip
LAYOUT = (
    "dp", "tp", "pp", "vpp", "cp", "ep", "zero", "fsdp", "micro_batch", "micro_batches", "sequence_parallel", "recompute",
    "schedule", "compute",
)  # fmt: skip
COLUMNS: dict[str, tuple[Callable[[str], Any], str]] = {
    "model": (str, "name to print; anything"),
    "recipe": (str, "recipe of the run, a name or a path: gives model and layout"),
    "hidden": (_count, "without a recipe: width of a decoder"),
    "layers": (_count, "its decoder layers"),
    "heads": (_count, "its attention heads"),
    "kv_heads": (_count, "its key and value heads; empty: as many as heads"),
    "ffn": (_count, "inner width of its feed-forward layers; empty: 4 x hidden"),
    "vocab": (_count, "rows of its embedding"),
    "experts": (_count, "its routed experts; empty: it is dense"),
    "top_k": (_count, "experts of a token"),
    "moe_ffn": (_count, "inner width of an expert"),
    "shared_experts": (_count, "experts that every token visits; empty: none"),
    "dense_layers": (_count, "layers before the first with experts; empty: none"),
    "family": (_one_of("llama", "gpt"), "gpt: biases, learned positions, tied embedding, layers without gate; empty: llama"),
    "seq": (_count, "tokens of a sequence; empty: the recipe's"),
    "dp": (_count, "data-parallel copies; this and all that follows, empty: the recipe's, or else 1"),
    "tp": (_count, "tensor-parallel degree"),
    "pp": (_count, "pipeline stages"),
    "vpp": (_count, "chunks of a stage"),
    "cp": (_count, "context-parallel degree"),
    "ep": (_count, "expert-parallel degree"),
    "zero": (lambda text: int(_one_of("0", "1", "2", "3")(text)), "0 to 3; empty: the recipe's, or 0"),
    "fsdp": (_yes, "true: ZeRO-3 that gathers layer by layer; empty: the recipe's, or false"),
    "micro_batch": (_count, "sequences of a micro-batch"),
    "micro_batches": (_count, "micro-batches of a step on one data-parallel copy"),
    "sequence_parallel": (_yes, "true or false; empty: the recipe's, or false"),
    "recompute": (_one_of("none", "selective", "full"), "none, selective or full; empty: the recipe's, or none"),
    "schedule": (_one_of(*get_args(ScheduleName)), "pipeline schedule; empty: the recipe's, or 1f1b"),
    "compute": (_one_of(*get_args(Compute)), "type of the matrix products; empty: the recipe's, or bf16"),
    "device": (str, "description of the device, a name or a file; empty: --device"),
    "step_s": (_positive, "measured seconds of a step"),
    "log": (median_step, "instead: a log of MindFormers (either mode), Megatron-LM or MindSpeed, or our metrics.jsonl; its median step after ten"),
    "memory_gib": (_positive, "measured peak memory of a device, GiB (2^30 bytes)"),
}  # fmt: skip
"""How to read each column's cells, and what it says; all are optional except a model and something measured."""


def describe_columns() -> str:
    """Return one line for each column, for a help text."""
    return "\n".join(f"  {name:18} {says}" for name, (_, says) in COLUMNS.items())


def read_csv(file: str | Path) -> tuple[list[str], list[dict[str, str | None]]]:
    """Return the header and the rows of a CSV table in UTF-8.

    Raises:
        BadInputError: The file is missing, is no CSV table, or has no header.
    """
    path = Path(file)
    if not path.is_file():
        raise BadInputError(f"{path}: no such file")
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True)
            names = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            lines = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{path}: not a CSV table in UTF-8 ({error})") from None
    if not names:
        raise BadInputError(f"{path}: empty, expected a table with a header")
    return names, lines


def read_measured_steps(file: str | Path) -> list[MeasuredStep]:
    """Read a table; a row that cannot be predicted keeps the reason. The header names columns of `COLUMNS`.

    Raises:
        BadInputError: The file is missing, is no CSV table, or has a column of another name.
    """
    names, lines = read_csv(file)
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise BadInputError(
            f"{file}: no column is called {', '.join(unknown)[:200]}; there are {', '.join(COLUMNS)}"
        )
    return [_row(line, Path(file).stem, number) for number, line in enumerate(lines, start=2)]


def _row(line: Mapping[str, str | None], table: str, number: int) -> MeasuredStep:
    """Return one row, with the reason if it cannot be predicted."""
    # cells beyond the header come under the key None, missing ones as None
    texts = {name: (line.get(name) or "").strip() for name in COLUMNS}
    values: dict[str, Any] = {}
    architecture, layout, reason = None, None, ""
    for name, (read, _) in COLUMNS.items():
        try:
            values[name] = read(texts[name]) if texts[name] else None
        except ValueError:
            reason = reason or f"missing: a readable {name} ({texts[name][:40]})"
        except BadInputError as error:
            reason = reason or f"missing: {error}"
    if values.get("step_s") and values.get("log"):
        reason = reason or "missing: one measured step (step_s and log are given)"
    if not reason:
        try:
            architecture, layout = _model_and_layout(values)
        except BadInputError as error:
            reason = f"missing: {' '.join(str(error).split())}"
    memory = values.get("memory_gib")
    return MeasuredStep(
        table=table, line=number, model=texts["model"] or (architecture.name if architecture else texts["recipe"]),
        device=texts["device"], architecture=architecture, layout=layout, step_s=values.get("step_s") or values.get("log"),
        memory_bytes=memory and memory * GIB, reason=reason,
    )  # fmt: skip


def _model_and_layout(values: Mapping[str, Any]) -> tuple[Architecture, Layout]:
    """Return what a line describes.

    Raises:
        BadInputError: It describes no model, or a layout that cannot be.
    """
    dimensions = {name: values[name] for name in DIMENSIONS if values[name] is not None}
    degrees = {name: values[name] for name in LAYOUT if values[name] is not None}
    if degrees.get("fsdp") and degrees.setdefault("zero", 3) != 3:
        raise BadInputError(f"zero 3 with fsdp (zero is {degrees['zero']})")
    if degrees.get("compute") in ("fp8", "fp4"):
        degrees["stack"] = Stack(
            input_bytes=1
        )  # what Transformer Engine keeps for the backward pass
    if values["recipe"]:
        if dimensions:
            raise BadInputError(f"one model (a recipe and {', '.join(dimensions)} are given)")
        recipe = load(values["recipe"], [])
        architecture = Architecture.from_model(
            recipe.model_config, values["recipe"], seq=values["seq"]
        )
        return architecture, Layout.from_recipe(recipe).with_changes(**degrees)
    lacks = [n for n in ("hidden", "layers", "heads", "vocab", "seq") if values[n] is None]
    if lacks:
        raise BadInputError(f"a recipe, or {', '.join(lacks)}")
    name, seq, layers = values["model"] or "", values["seq"], dimensions["layers"]
    if dimensions.pop("family", "llama") == "gpt":
        dimensions |= {"gated": False, "biases": True, "tied": True, "positions": seq}
    dense = dimensions.pop("dense_layers", 0)
    if lacks := [n for n in ("experts", "top_k", "moe_ffn") if n not in dimensions]:
        if len(lacks) < 3:
            raise BadInputError(f"{', '.join(lacks)} of a mixture of experts")
        dense = layers
    dimensions["layers"] = ("dense",) * min(dense, layers) + ("moe",) * (layers - dense)
    return Architecture(name=name, seq=seq, **dimensions), Layout(**degrees)
