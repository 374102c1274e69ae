"""Write dumps as msprobe does: ``write(dump, "out")``. Equal records give equal bytes; folders are 0750, files 0640."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import UsageError
from telechat_moe.narrowing import is_object
from telechat_moe.ops import fingerprint
from telechat_moe.tools.align.dump import value_files
from telechat_moe.tools.align.dump.layout_dict import to_dict
from telechat_moe.tools.align.dump.msprobe import DATA, FINGERPRINT
from telechat_moe.tools.align.dump.records import (
    NO_STATS,
    Call,
    Dump,
    Phase,
    RankDump,
    Stats,
    TensorRecord,
    Value,
)

_MINDSPORE = {"bfloat16": "BFloat16", "float8_e4m3": "Float8E4M3FN", "float8_e5m2": "Float8E5M2"}
_TORCH = {"float8_e4m3": "float8_e4m3fn"}


def write(dump: Dump, out: Path | str, values: bool = True, prints: bool = False) -> None:
    """Write a dump as a tree of msprobe.

    PyTorch's values become ``.pt`` files, others ``.npy``; bfloat16 is widened in ``.npy`` as msprobe does.

    Args:
        values: Whether to write values; otherwise only statistics, which are computed where the dump has none.
        prints: Whether to write a fingerprint of each tensor with values (under a key that msprobe ignores).

    Raises:
        UsageError: ``out`` exists.
        BadInputError: Values cannot be read.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise UsageError(f"{out}: exists; name a folder to make")
    _folder(out)
    for rank in dump.ranks.values():
        _folder(out / f"step{rank.step}")
        _Writer(rank, out / f"step{rank.step}" / f"rank{rank.rank}", values, prints).write()


class _Writer:
    def __init__(self, rank: RankDump, folder: Path, values: bool, prints: bool) -> None:
        self._rank, self._folder, self._prints = rank, folder, prints
        self._torch = rank.framework == "pytorch"
        self._values = values
        self._names: set[str] = set()
        self._files: dict[int, str] = {}
        """The file of each record, by its ``id``: a record that several calls share is written once."""

    def write(self) -> None:
        _folder(self._folder)
        if self._values:
            _folder(self._folder / DATA)
        data = {call.key: self._call(call) for call in self._rank.calls.values()}
        task = self._rank.task if self._values else "statistics"
        head = {
            "task": task or "tensor",
            "level": self._rank.level or "mix",
            "framework": self._rank.framework or "mindspore",
            "dump_data_dir": DATA if self._values else None,
        }
        _json(self._folder / "dump.json", {**head, "data": data})
        _json(self._folder / "stack.json", self._stacks())
        calls = self._rank.calls.values()
        parents = {c.key: c.parent for c in calls if c.kind != "parameters_grad"}
        level = self._rank.level == "L1" and not any(parents.values())
        _json(self._folder / "construct.json", {} if level else parents)

    def _stacks(self) -> dict[str, Any]:
        groups: dict[tuple[str, ...], list[str]] = {}
        for call in self._rank.calls.values():
            if call.stack:
                groups.setdefault(call.stack, []).append(call.key)
        return {str(i): [keys, list(lines)] for i, (lines, keys) in enumerate(groups.items())}

    def _call(self, call: Call) -> dict[str, Any]:
        if call.kind == "parameters_grad":
            gradients = self._value(call.key, call.parameters)
            return {n: x if isinstance(x, list) else [x] for n, x in gradients.items()}
        inputs = self._value(f"{call.key}.input", call.inputs)
        outputs = self._value(f"{call.key}.output", call.outputs)
        if call.phase is Phase.BACKWARD:
            return {"input": inputs, "output": outputs}
        named = self._value(f"{call.key}.input", call.kwargs)
        entry: dict[str, Any] = {"input_args": inputs, "input_kwargs": named, "output": outputs}
        if call.kind == "module":
            entry["parameters"] = self._value(f"{call.key}.parameters", call.parameters)
        return entry

    def _value(self, place: str, value: Value | Mapping[str, Value]) -> Any:
        if value is None:
            return None
        if isinstance(value, TensorRecord):
            return self._tensor(place, value)
        if isinstance(value, list):
            return [self._value(f"{place}.{i}", v) for i, v in enumerate(value)]
        if isinstance(value, Mapping):
            return {n: self._value(f"{place}.{n}", v) for n, v in value.items()}
        if not value.type:
            return value.value
        content = value.value if is_object(value.value) else {"value": value.value}
        return {"type": value.type, **content}

    def _tensor(self, place: str, record: TensorRecord) -> dict[str, Any]:
        values = record.load() if record.read is not None else None
        stats, mark = record.stats, record.fingerprint
        if values is not None and values.dtype.kind in "fiub":
            stats = stats or value_files.stats(values)
            if self._prints and mark is None:
                mark = fingerprint.of(values).to_bytes()
                value_files.release(values)
        entry: dict[str, Any] = {
            "type": "torch.Tensor" if self._torch else "mindspore.Tensor",
            "dtype": self._dtype(record.dtype),
            "shape": list(record.shape),
            **self._stats(record.dtype, stats or NO_STATS),
        }
        if record.layout is not None:
            entry["layout"] = to_dict(record.layout)
        printed = None if mark is None else mark.hex()
        optional = {"requires_grad": record.requires_grad, "md5": record.crc, FINGERPRINT: printed}
        entry |= {key: value for key, value in optional.items() if value is not None}
        if values is not None and self._values:
            if id(record) not in self._files:
                self._files[id(record)] = self._save(place, record.dtype, values)
            entry["data_name"] = self._files[id(record)]
        return entry

    def _stats(self, dtype: str, stats: Stats) -> dict[str, Any]:
        numbers: dict[str, Any] = dict(zip(("Max", "Min", "Mean", "Norm"), stats, strict=True))
        if self._torch and dtype.startswith(("int", "uint")):
            ends = {n: numbers[n] for n in ("Max", "Min") if numbers[n] is not None}
            numbers |= {n: int(x) for n, x in ends.items() if float(x).is_integer()}
        return numbers

    def _dtype(self, name: str) -> str:
        if self._torch:
            return "torch." + _TORCH.get(name, name)
        return _MINDSPORE.get(name, name.capitalize().replace("Uint", "UInt"))

    def _save(self, place: str, dtype: str, values: Any) -> str:
        suffix = ".pt" if self._torch else ".npy"
        name = place.replace("/", "_").replace("\0", "_")
        # File names are limited in length, and different positions must not share one.
        if len(name.encode()) > 240 or name + suffix in self._names or name != place:
            name = f"{name[:60]}.{hashlib.sha256(place.encode()).hexdigest()[:24]}"
        self._names.add(name + suffix)
        path = self._folder / DATA / (name + suffix)
        if self._torch:
            value_files.save_pt(path, values, dtype)
        else:
            with path.open("wb") as file:
                np.save(file, np.asarray(values), allow_pickle=False)
        path.chmod(0o640)
        return name + suffix


def _folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o750)


def _json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    path.chmod(0o640)
