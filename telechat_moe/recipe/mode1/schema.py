"""Sections of a mode-1 recipe, made from the rows of `keys.txt`."""

import ast
import dataclasses
import functools
import re
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, cast

from telechat_moe.recipe import fields
from telechat_moe.recipe.check import parts_of, section_keys
from telechat_moe.recipe.problems import Problem, label
from telechat_moe.recipe.schema.model import OtherModelConfig
from telechat_moe.recipe.schema.optimizer import LrSchedule, Optimizer
from telechat_moe.recipe.schema.train import DataLoader, GptDatasetConfig
from telechat_moe.recipe.tree import YamlEntry, locate

FILE = Path(__file__).parent / "keys.txt"
VERSION = "2.1.0"
"""Version of MindFormers whose code says what is read."""
_COPIED = {
    cls.__name__: cls
    for cls in (OtherModelConfig, LrSchedule, Optimizer, DataLoader, GptDatasetConfig)
}
_INHERITED = {
    **dict.fromkeys(("DeepseekV3", "DeepseekV4"), ("ModelKeys", "ExpertKeys")),
    "Qwen3": ("ModelKeys",),
    **dict.fromkeys(("Megatron", "HuggingFace", "MindRecord", "Ordered"), ("Columns",)),
}
"""Blocks whose keys a section has, too; every schedule has those of `Rate`."""
_HEADER = re.compile(r"\[(\w+)(?: = (\w+))?\](?:  (.*))?")
_NAME = re.compile(r"(\w+)(?: \(not ([\w, ]+)\))?")
_Column = tuple[Any, Any]


@functools.cache
def _blocks() -> dict[str, tuple[str, str, list[str]]]:
    """Return the blocks of the file by name: the section of mode 0 that they copy from, what they are, their rows."""
    blocks: dict[str, tuple[str, str, list[str]]] = {}
    rows: list[str] = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if match := _HEADER.fullmatch(line):
            rows = []
            blocks[match[1]] = (match[2] or "", match[3] or "Mode 1.", rows)
        elif line and not line.startswith("#"):
            rows.append(line)
    source, meaning, rates = blocks.pop("Rates")
    for name, kind, keys in (re.split(r":? ", row, maxsplit=2) for row in rates):
        blocks[name] = (source, meaning, [f'type  Literal["{kind}"]  -  Shape.', f"= {keys}"])
    return blocks


def top_names() -> set[str]:
    """Return the sections of a recipe of mode 1."""
    return {row.split()[0] for row in _blocks()["Mode1"][2]}


@functools.cache
def section_of(name: str) -> type:
    """Return the frozen dataclass of a block of `keys.txt`."""
    source, meaning, rows = _blocks()[name]
    inherited = _INHERITED.get(name, ())
    if source == "LrSchedule" and name != "Rate":
        inherited = ("Rate",)
    columns: dict[str, _Column] = {}
    for other in inherited:
        columns |= {f.name: _column_of(f) for f in dataclasses.fields(section_of(other))}
    for row in rows:
        columns |= _copied(source, row[2:]) if row.startswith("= ") else _read(row)
    return dataclasses.make_dataclass(
        name,
        [(key, kind, column) for key, (kind, column) in columns.items()],
        namespace={"__doc__": meaning},
        frozen=True,
        kw_only=True,
        slots=True,
    )


def _column_of(f: Field[Any]) -> _Column:
    """Return annotation and field of a key that another section has."""
    if f.default_factory is not dataclasses.MISSING:
        return f.type, field(default_factory=f.default_factory, metadata=f.metadata)
    return f.type, field(default=f.default, metadata=f.metadata)


def _copied(source: str, names: str) -> dict[str, _Column]:
    """Return the keys of a section of mode 0 that mean the same; who reads them there is left out."""
    plan, columns = section_keys(_COPIED[source]).fields, dict[str, _Column]()
    for name in names.split(", "):
        kind, column = _column_of(plan[name])
        column.metadata = {
            k: v for k, v in column.metadata.items() if k in ("names", "instead_of", "doc")
        }
        columns[name] = kind, column
    return columns


def _read(row: str) -> dict[str, _Column]:
    """Return the key of a row."""
    name, values, default, meaning, *unread = re.split(r" {2,}", row)
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{FILE.name}: {row}: expected a key and its columns")
    metadata: dict[str, Any] = {"doc": meaning}
    if match[2]:
        metadata |= fields.instead_of(*match[2].split(", "))
    if unread:
        word, _, remedy = unread[0].partition(": ")
        neutral = ast.literal_eval(f"({word.removeprefix('only ')},)") if word != "never" else ()
        metadata |= {"takes": fields.Takes(neutral), "remedy": remedy}
    kind = eval(values + " | None" * (default == "None"), dict(vars(fields)), _Sections())
    return {match[1]: (kind, _column(kind, default, metadata))}


def _column(kind: Any, default: str, metadata: dict[str, Any]) -> Any:
    if default == "-":
        return field(metadata=metadata)
    if default == "()":
        return field(default_factory=functools.partial(_empty, kind), metadata=metadata)
    value: Any = ast.literal_eval(default)
    if isinstance(value, list):
        fresh = functools.partial(list[Any], cast("list[Any]", value))
        return field(default_factory=fresh, metadata=metadata)
    return field(default=value, metadata=metadata)


def _empty(kind: Any) -> Any:
    """Return the first section that an annotation allows, with defaults."""
    return cast("type[Any]", parts_of(kind)[0][0])()


class _Sections(dict[str, Any]):
    """The sections of the file by name, for annotations."""

    def __missing__(self, name: str) -> type:
        if name not in _blocks():
            raise KeyError(name)
        return section_of(name)


@dataclass(frozen=True)
class DynamicRecipe:
    """A recipe of mode 1.

    Attributes:
        config: The sections, as `keys.txt` declares them; values with problems are missing.
        written: What was written, aliases and overrides applied.
        tree: The same with the line of every key.
        processes: Devices that it is meant to run on, if known.
    """

    source: Path
    config: Any
    written: dict[str, Any]
    tree: YamlEntry
    processes: int | None = None

    def problem(self, key: str, found: str, expected: str, suggestion: str = "") -> Problem:
        """Return what is wrong with a key, at its line or that of the nearest section above it."""
        entry = locate(self.tree, key)
        origin, line = entry.node.origin, entry.line
        place = (origin or label(self.source), 0 if origin else line)
        return Problem(*place, key, found, expected, suggestion)

    @property
    def layers(self) -> int | None:
        """Decoder layers with those of MTP, as recomputation and swapping count them; None: not written."""
        model = self.config.model
        if model.num_hidden_layers is None:
            return None
        return model.num_hidden_layers + (getattr(model, "num_nextn_predict_layers", 0) or 0)

    @property
    def fixed_degrees(self) -> int:
        """Devices of one data-parallel copy."""
        p = self.config.parallelism
        return p.tensor_parallel * p.context_parallel * p.pipeline_parallel

    @property
    def devices(self) -> int | None:
        """Devices; without `--devices` those of one sharded copy. None: the recipe does not say how many."""
        shard = self.config.parallelism.data_parallel_shard
        return self.processes or (self.fixed_degrees * shard if shard > 0 else None)

    @property
    def data_parallel(self) -> int | None:
        """Devices that see different samples; None: not known, or the degrees do not divide the devices."""
        devices = self.devices
        return (
            None if not devices or devices % self.fixed_degrees else devices // self.fixed_degrees
        )

    @property
    def sharded(self) -> int | None:
        """Data-parallel devices over which parameters are sharded; None: not known."""
        shard = self.config.parallelism.data_parallel_shard
        return shard if shard > 0 else self.data_parallel

    @property
    def domain(self) -> int | None:
        """Devices over which FSDP shards dense weights; None: not known."""
        return self.sharded and self.sharded * self.config.parallelism.context_parallel

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a step; None: not known."""
        t, copies = self.config.training, self.data_parallel
        return copies and max(t.global_batch_size // (copies * t.local_batch_size), 1)
