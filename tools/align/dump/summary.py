"""Summarise a dump of any kind as plain data and as a table: ``read(path)``."""

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.tools.align.dump import msprobe, statistic_csv
from telechat_moe.tools.align.dump.records import NO_STATS, Dump, RankDump, TensorRecord

COLUMNS = (
    *("step", "rank", "call", "kind", "phase", "place", "dtype", "shape"),
    *("max", "min", "mean", "norm", "checksum", "file"),
)
NOTHING = "tensors with neither values nor statistics, checksum or fingerprint"
NO_VALUES = "tensors without values: their elements cannot be compared, operators not replayed"
NO_BACKWARD = "ranks without any backward call"


def read(path: Path) -> Dump:
    """Return the dump in a path, msprobe's or a native one.

    Raises:
        BadInputError: It is neither, or broken.
    """
    if not os.path.lexists(path):
        raise BadInputError(f"{path}: no such file or folder")
    return _reader(path).read(path)


def chosen(path: Path, step: int | None = None, rank: int | None = None) -> Dump:
    """Return the dump in a path, or one step or rank of it.

    Raises:
        BadInputError: The dump is broken.
        UsageError: It has no such step or rank.
    """
    dump = read(path)
    keys = [k for k in dump.ranks if step in (None, k[0]) and rank in (None, k[1])]
    if not keys:
        raise UsageError(f"{path}: no step {step}, rank {rank}; found {sorted(dump.ranks)[:16]}")
    return Dump(dump.root, _Chosen(dump.ranks, keys))


class _Chosen(Mapping[tuple[int, int], RankDump]):
    """Some ranks of a dump, still parsed on demand."""

    def __init__(
        self, ranks: Mapping[tuple[int, int], RankDump], keys: list[tuple[int, int]]
    ) -> None:
        self._ranks, self._keys = ranks, keys

    def __getitem__(self, key: tuple[int, int]) -> RankDump:
        if key not in self._keys:
            raise KeyError(key)
        return self._ranks[key]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def inspect(
    path: Path,
    dump: Dump,
    calls: bool = False,  # list every call
    verify: bool = False,  # open every file of values
) -> dict[str, Any]:
    """Return what a dump from a path holds, as ``telechat-moe align inspect --help`` describes it.

    Raises:
        BadInputError: The dump is broken.
    """
    missing: Counter[str] = Counter()
    ranks = [_rank(rank, verify, missing) for rank in dump.ranks.values()]
    source = "msprobe" if _reader(path) is msprobe else statistic_csv.NAME
    report: dict[str, Any] = {"path": str(path), "source": source, "ranks": ranks}
    report["not_judged"] = {reason: n for reason, n in missing.items() if n}
    if calls:
        report["calls"] = [call for rank in dump.ranks.values() for call in _calls(rank)]
    return report


def table(dump: Dump, out: Path) -> int:
    """Write a row for each tensor; return the number of rows.

    Raises:
        UsageError: The file exists.
    """
    count = 0
    if os.path.lexists(out):
        raise UsageError(f"{out}: exists; name a file to make")
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for (step, rank), content in dump.ranks.items():
            for call in content.calls.values():
                for place, t in call.tensors():
                    head = (step, rank, call.key, call.kind, call.phase.value, place, t.dtype)
                    shape, file_name = "x".join(map(str, t.shape)), t.path.name if t.path else ""
                    writer.writerow((*head, shape, *(t.stats or NO_STATS), t.crc, file_name))
                    count += 1
    return count


def _reader(path: Path) -> Any:
    return statistic_csv if statistic_csv.find(path) else msprobe


def _has(record: TensorRecord) -> list[str]:
    contents = {
        "values": record.read is not None,
        "statistics": record.stats is not None and any(s is not None for s in record.stats),
        "checksum": record.crc is not None,
        "fingerprint": record.fingerprint is not None,
    }
    return [name for name, present in contents.items() if present]


def _rank(content: RankDump, verify: bool, missing: Counter[str]) -> dict[str, Any]:
    has: Counter[str] = Counter()
    tensors = [t for call in content.calls.values() for _, t in call.tensors()]
    for t in tensors:
        contents = _has(t)
        has.update(contents or ["nothing"])
        if "values" not in contents and math.prod(t.shape):
            missing[NO_VALUES if contents else NOTHING] += 1
        if verify and t.read is not None:
            t.load()
    phases = Counter(call.phase.value for call in content.calls.values())
    missing[NO_BACKWARD] += "backward" not in phases
    about = ("step", "rank", "framework", "task", "level")
    return {
        **{name: getattr(content, name) for name in about},
        "calls": len(content.calls),
        "phases": dict(phases),
        "tensors": len(tensors),
        **{name: has[name] for name in ("values", "statistics")},
        **{f"{name}s": has[name] for name in ("checksum", "fingerprint")},
        "nothing": has["nothing"],
        "layouts": sum(t.layout is not None for t in tensors),
        "elements": sum(math.prod(t.shape) for t in tensors),
        "dtypes": dict(Counter(t.dtype for t in tensors).most_common()),
        "verified": verify,
    }


def _calls(content: RankDump) -> list[dict[str, Any]]:
    rank_fields = {"step": content.step, "rank": content.rank}
    calls: list[dict[str, Any]] = []
    for call in content.calls.values():
        tensors = [
            {"place": place, "dtype": t.dtype, "shape": list(t.shape), "has": _has(t)}
            | (t.stats or NO_STATS)._asdict()
            for place, t in call.tensors()
        ]
        about = {"key": call.key, "kind": call.kind, "phase": call.phase.value}
        calls.append({**rank_fields, **about, "parent": call.parent, "tensors": tensors})
    return calls
