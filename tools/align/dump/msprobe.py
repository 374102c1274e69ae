"""Read dumps of msprobe, written under MindSpore or PyTorch, without either of them: ``read("dump")``.

``step*/rank*|proc*`` (also below ``pynative/`` and ``graph/``) with ``dump.json``, perhaps ``stack.json`` and
``construct.json``, and ``dump_tensor_data/``. The keys are in the order in which calls ended. Broken input is a :class:`BadInputError`.
"""

import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from telechat_moe import reading
from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.narrowing import is_list, is_object, short
from telechat_moe.tools.align.dump import value_files
from telechat_moe.tools.align.dump.layout_dict import from_dict
from telechat_moe.tools.align.dump.records import (
    MINDTORCH,
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    Stats,
    TensorLayout,
    TensorRecord,
    Value,
)

DATA = "dump_tensor_data"
FINGERPRINT = "fingerprint"
"""This package's key in a tensor's entry: the fingerprint in hexadecimal."""

_MODULE = re.compile(
    r"(?P<name>(?:Module|Cell)\..+)\.(?P<way>forward|backward)\.(?P<index>\d{1,18})"
)
_API = re.compile(r"(?P<name>.+)\.(?P<index>\d{1,18})\.(?P<way>forward|backward)")
_GRADIENTS = re.compile(r"(?P<name>.+)\.parameters_grad(?:\.(?P<index>\d{1,18}))?")
_FOLDER = re.compile(r"(?i)(?:step|rank|proc)[_-]?\d*|graph|pynative")
_INPUTS, _OUTPUTS = ("input_args", "input", "grad_output"), ("output", "grad_input")
_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "bool_": "bool",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "float8_e4m3fn": "float8_e4m3",
    "float8e4m3fn": "float8_e4m3",
    "float8e4m3": "float8_e4m3",
    "float8e5m2": "float8_e5m2",
}
_MAX_DEPTH = 64
_MAX_DIMS = 64
_CACHE_BYTES = 48 << 20
_SMALL, _MANY = 1 << 14, 1 << 12  # bytes and number of the tensors that are kept in memory


def read(root: Path | str) -> Dump:
    """Return the dump in a folder: the folder of a run, of a step, or of one rank.

    A rank is parsed on demand; a few stay in memory.

    Raises:
        BadInputError: There is no dump, or a step has ambiguous ranks. Broken ranks raise when they are accessed.
    """
    root = Path(root)
    folders = _folders(root)
    if not folders:
        raise BadInputError(
            f"{root}: no dump of msprobe; expected step*/rank*/dump.json, or a dump.json"
        )
    return Dump(root, _Ranks(root, folders))


def canonical(name: str) -> str:
    """Return the canonical name of a type: ``torch.bfloat16`` and ``BFloat16`` are ``bfloat16``."""
    name = name.removeprefix("<class '").removesuffix("'>").rpartition(".")[2].lower()
    return _ALIASES.get(name, name)


def parse_json(path: Path, root: Path) -> dict[str, Any]:
    """Return the object in a JSON file, whose keys must be unique; NaN and Infinity are accepted.

    Raises:
        BadInputError: The file is missing, outside of the root, or not such an object.
    """
    try:
        content = reading.parse_json(value_files.within(path, root).read_bytes(), finite=False)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, MemoryError) as error:
        raise BadInputError(f"{path}: {short(error)}; expected JSON with unique keys") from None
    if not is_object(content):
        raise BadInputError(f"{path}: {type(content).__name__} found, an object expected")
    return content


class _Ranks(Mapping[tuple[int, int], RankDump]):
    """The ranks of a dump, parsed on demand; the last ones are cached."""

    def __init__(self, root: Path, folders: Mapping[tuple[int, int], list[Path]]) -> None:
        self._root, self._folders = root, folders
        self._cached_ranks: OrderedDict[tuple[int, int], tuple[RankDump, int]] = OrderedDict()

    def __getitem__(self, key: tuple[int, int]) -> RankDump:
        if key in self._cached_ranks:
            self._cached_ranks.move_to_end(key)
            return self._cached_ranks[key][0]
        parts = [_read_rank(self._root, folder, *key) for folder in self._folders[key]]
        size = sum(_json_file(f).stat().st_size for f in self._folders[key])
        self._cached_ranks[key] = (_joined(parts), size)
        while (
            len(self._cached_ranks) > 1
            and sum(n for _, n in self._cached_ranks.values()) > _CACHE_BYTES
        ):
            self._cached_ranks.popitem(last=False)
        return self._cached_ranks[key][0]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self._folders))

    def __len__(self) -> int:
        return len(self._folders)


def _folders(root: Path) -> dict[tuple[int, int], list[Path]]:
    """Return the folders of each step and rank, eager calls before compiled ones."""
    folders_by_rank: dict[tuple[int, int], list[Path]] = {}
    unnamed: dict[tuple[Path, int], list[tuple[int, Path]]] = {}
    for folder in _walk(root, root, 4):
        step, rank, process = (_number(folder, root, word) for word in ("step", "rank", "proc"))
        if rank is None and process is not None:
            unnamed.setdefault((folder.parent, step or 0), []).append((process, folder))
        else:
            folders_by_rank.setdefault((step or 0, rank or 0), []).append(folder)
    for (parent, step), processes in unnamed.items():
        if any(key[0] == step for key in folders_by_rank) and any(
            f.parent == parent for folders in folders_by_rank.values() for f in folders
        ):
            raise BadInputError(
                f"{parent}: has both rank* and proc* folders; which folder holds which rank?"
            )
        for rank, (_, folder) in enumerate(sorted(processes)):
            folders_by_rank.setdefault((step, rank), []).append(folder)
    for (step, rank), folders in folders_by_rank.items():
        places = [str(f.relative_to(root).parent) for f in folders]
        kinds = {p.split("/")[0] for p in places}
        if len(folders) > 1 and (len(kinds) != len(folders) or not kinds <= {"graph", "pynative"}):
            raise BadInputError(
                f"{root}: several dumps of step {step}, rank {rank}: {', '.join(map(str, folders))}"
            )
        folders.sort(key=lambda f: "graph" in f.relative_to(root).parts)
    return folders_by_rank


def _walk(folder: Path, root: Path, depth: int) -> Iterator[Path]:
    if any(os.path.lexists(folder / name) for name in ("dump.json", "debug.json")):
        yield folder
        return
    if depth == 0 or not folder.is_dir():
        return
    try:
        names = sorted(p.name for p in folder.iterdir())
    except OSError as error:
        raise BadInputError(f"{folder}: cannot be read: {error.strerror}") from None
    for name in names:
        child = folder / name
        if _FOLDER.fullmatch(name):
            value_files.within(child, root)
            yield from _walk(child, root, depth - 1)
        elif os.path.lexists(child / "dump.json"):
            raise BadInputError(f"{child}: of which step and rank? Expected step*/rank*/dump.json")


def _number(folder: Path, root: Path, word: str) -> int | None:
    """Return N of the component ``wordN`` of a path; the root's own name and its parent's count, too."""
    parts = [*root.absolute().parts[-2:], *folder.relative_to(root).parts]
    matches = (re.fullmatch(rf"(?i){word}[_-]?(\d{{0,18}})", part) for part in reversed(parts))
    match = next(filter(None, matches), None)
    return None if match is None else int(match[1] or 0)


def _json_file(folder: Path) -> Path:
    path = folder / "dump.json"
    return path if os.path.lexists(path) else folder / "debug.json"


def _read_rank(root: Path, folder: Path, step: int, rank: int) -> RankDump:
    path = _json_file(folder)
    content = parse_json(path, root)
    data = content.get("data")
    if not is_object(data):
        raise BadInputError(f"{path}: key data: an object of calls expected, found {short(data)}")
    context = _Context(path, folder / DATA, root, {})
    about = {
        key: context._replace(key=key).want("", content.get(key), str, "text") or ""
        for key in ("framework", "task", "level")
    }
    parents = _parents(folder / "construct.json", root)
    stacks = _stacks(folder / "stack.json", root)
    calls: dict[str, Call] = {}
    while data:  # what is parsed is released
        key = next(iter(data))
        call = _call(context, key, data.pop(key), parents.get(key), stacks.get(key, ()))
        calls[key] = replace(call, on_mindspore=about["framework"] == MINDTORCH)
    if not about["framework"]:
        modules = any(k.startswith("Module.") for k in calls)
        about["framework"] = "pytorch" if modules else "mindspore"
    return RankDump(step, rank, **about, calls=calls, folder=folder)


def _joined(parts: list[RankDump]) -> RankDump:
    """Join eager and compiled calls of a rank; a key in both gets the prefix ``graph/``."""
    calls: dict[str, Call] = {}
    for part in parts:
        calls |= {f"graph/{k}" if k in calls else k: call for k, call in part.calls.items()}
    return replace(parts[0], calls=calls)


class _Context(NamedTuple):
    path: Path
    data: Path
    root: Path
    small: dict[Any, Any]
    key: str = ""

    def bad(self, place: str, value: Any, expected: str) -> BadInputError:
        location = f"key {short(self.key)}" + (f", {place}" if place else "")
        return BadInputError(f"{self.path}: {location}: {short(value)} found, {expected} expected")

    def want(self, place: str, value: Any, kind: Any, expected: str) -> Any:
        """Return a value that is of a kind, or null."""
        if value is not None and not isinstance(value, kind):
            raise self.bad(place, value, expected)
        return value


def _call(
    context: _Context, key: str, entry: Any, parent: str | None, stack: tuple[str, ...]
) -> Call:
    context = context._replace(key=key)
    gradients = _GRADIENTS.fullmatch(key)
    match = gradients or _MODULE.fullmatch(key) or _API.fullmatch(key)
    kind = "parameters_grad" if gradients else "api"
    if match is not None and match.re is _MODULE:
        kind = "module"
    backward = gradients is not None or (match["way"] == "backward" if match else False)
    name, index = (match["name"], int(match["index"] or 0)) if match else (key, 0)
    phase = Phase.BACKWARD if backward else Phase.FORWARD
    if key.startswith("Optimizer."):  # from this package's captures: the update of a weight
        phase = Phase.OPTIMIZER
    make = partial(Call, key, kind, name, index, phase, parent=parent, stack=stack)
    if match is None:  # single tensors that a program saved
        return make([], {}, [_value(context, "", entry)])
    if not is_object(entry):
        raise context.bad("", entry, "an object")
    if gradients is not None:
        values = {n: _value(context, n, v) for n, v in entry.items()}
        values = {n: v[0] if is_list(v) and len(v) == 1 else v for n, v in values.items()}
        return make([], {}, [], values)
    inputs, outputs = (
        next((n for n in names if n in entry), names[0]) for names in (_INPUTS, _OUTPUTS)
    )
    for place in entry.keys() - {inputs, "input_kwargs", outputs, "parameters"}:
        if _holds_tensor(entry[place]):
            raise context.bad("", place, "input_args, input_kwargs, output or parameters")
    return make(
        _list(context, inputs, entry.get(inputs)),
        _dict(context, "input_kwargs", entry.get("input_kwargs")),
        _list(context, outputs, entry.get(outputs)),
        _dict(context, "parameters", entry.get("parameters")),
    )


def _list(context: _Context, place: str, entry: Any) -> list[Value]:
    if is_object(entry) and _holds_tensor(entry):
        entry = [entry]
    values: list[Any] = context.want(place, entry, list, "a list") or []
    return [_value(context, f"{place}.{i}", v) for i, v in enumerate(values)]


def _holds_tensor(entry: Any) -> bool:
    """Return whether a value is a tensor's entry, or a list that holds one."""
    if is_list(entry):
        return any(_holds_tensor(v) for v in entry)
    return is_object(entry) and "dtype" in entry and "shape" in entry


def _dict(context: _Context, place: str, entry: Any) -> dict[str, Value]:
    values: dict[str, Any] = context.want(place, entry, dict, "an object") or {}
    return {name: _value(context, f"{place}.{name}", v) for name, v in values.items()}


def _value(context: _Context, place: str, entry: Any, depth: int = 0) -> Value:
    if depth > _MAX_DEPTH:
        raise context.bad(place[:100], "deeper nesting", f"at most {_MAX_DEPTH} levels")
    if entry is None:
        return None
    if is_list(entry):
        return [_value(context, f"{place}.{i}", v, depth + 1) for i, v in enumerate(entry)]
    if not is_object(entry):
        return Scalar("", entry)
    kind = entry.get("type")
    if isinstance(kind, str):
        if "dtype" in entry and "shape" in entry:
            return _tensor(context, place, entry)
        if entry.keys() == {"type", "value"}:
            return Scalar(kind, entry["value"])
        if not any(is_object(v) for v in entry.values()):
            return Scalar(kind, {k: v for k, v in entry.items() if k != "type"})
    return {name: _value(context, f"{place}.{name}", v, depth + 1) for name, v in entry.items()}


def _tensor(context: _Context, place: str, entry: Mapping[str, Any]) -> TensorRecord:
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str):
        raise context.bad(f"{place}.dtype", dtype, "text")
    if not (
        is_list(shape)
        and len(shape) <= _MAX_DIMS
        and all(type(n) is int and n >= 0 for n in shape)
        and math.prod(shape) < 1 << 62
    ):
        raise context.bad(f"{place}.shape", shape, "a list of sizes")
    grad = context.want(f"{place}.requires_grad", entry.get("requires_grad"), bool, "true or false")
    crc = context.want(f"{place}.md5", entry.get("md5"), str, "text")
    dtype, path = canonical(dtype), _data_file(context, place, entry.get("data_name"))
    shape = tuple(shape)
    read: Callable[[], Any] | None = None
    if path is not None and value_files.is_known(dtype):
        read = partial(_load, context, place, path, dtype, shape)
    elif not math.prod(shape):  # msprobe saves no tensor without elements
        read = partial(value_files.empty, dtype, shape)
    return TensorRecord(
        dtype,
        shape,
        _stats(context, place, entry),
        crc,
        path,
        _layout(context, place, entry),
        grad,
        _fingerprint(context, place, entry.get(FINGERPRINT)),
        read,
    )


def _load(context: _Context, place: str, path: Path, dtype: str, shape: tuple[int, ...]) -> Any:
    if (path, dtype, shape) in context.small:
        return context.small[path, dtype, shape]
    try:
        values = value_files.load(path, dtype, shape, context.root)
    except BadInputError as error:
        raise BadInputError(f"{error} (key {short(context.key)}, {place})") from None
    if values.nbytes <= _SMALL and len(context.small) < _MANY:
        values.flags.writeable = False
        context.small[path, dtype, shape] = values
    return values


def _data_file(context: _Context, place: str, name: Any) -> Path | None:
    if name in (None, "", "-1", -1):
        return None
    pure = PurePosixPath(context.want(f"{place}.data_name", name, str, "the name of a file"))
    leads_out = pure.is_absolute() or ".." in pure.parts or "\0" in name
    if leads_out or pure.suffix not in (".npy", ".pt"):
        raise context.bad(f"{place}.data_name", name, f"the name of a .npy or .pt file in {DATA}/")
    return context.data / name


def _stats(context: _Context, place: str, entry: Mapping[str, Any]) -> Stats | None:
    names = ("Max", "Min", "Mean", "Norm")
    if not any(name in entry for name in names):
        return None
    numbers = [
        context.want(f"{place}.{name}", entry.get(name), int | float, "a number") for name in names
    ]
    try:
        return Stats(*(None if value is None else float(value) for value in numbers))
    except OverflowError:
        raise context.bad(place, numbers, "numbers") from None


def _layout(context: _Context, place: str, entry: Mapping[str, Any]) -> TensorLayout | None:
    layout, shard = entry.get("layout"), entry.get("hsdp_shard_size")
    if shard is not None and type(shard) is not int:
        raise context.bad(f"{place}.hsdp_shard_size", shard, "a number")
    layout_entry: dict[str, Any] = context.want(f"{place}.layout", layout, dict, "an object") or {}
    if layout_entry.get("Device Matrix") is None or layout_entry.get("Tensor Map") is None:
        return None  # msprobe leaves out what the tensor does not give
    try:
        return from_dict(layout_entry, shard)
    except TelechatMoeError as error:
        raise context.bad(f"{place}.layout", str(error), "a layout") from None


def _fingerprint(context: _Context, place: str, text: Any) -> bytes | None:
    if text is None:
        return None
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        raise context.bad(f"{place}.{FINGERPRINT}", text, "hexadecimal digits") from None


def _optional(path: Path, root: Path) -> dict[str, Any]:
    return parse_json(path, root) if os.path.lexists(path) else {}


def _parents(path: Path, root: Path) -> dict[str, str | None]:
    parents: dict[str, str | None] = {}
    for key, parent in _optional(path, root).items():
        if is_list(parent):  # Megatron: parent and micro-step
            parent = parent[0] if parent else None
        if key != "megatron_micro_step_number":
            context = _Context(path, root, root, {}, key)
            parents[key] = context.want("", parent, str, "the key of a module or null")
    return parents


def _stacks(path: Path, root: Path) -> dict[str, tuple[str, ...]]:
    """Return the call stack of each call; older files have one for each key, others one for all calls that share it."""
    stacks: dict[str, tuple[str, ...]] = {}
    for key, group in _optional(path, root).items():
        try:
            lone = is_list(group) and all(isinstance(line, str) for line in group)
            keys, lines = ([key], group) if lone else group
            if isinstance(lines, str):
                lines = [lines]
            if not all(isinstance(x, str) for x in [*keys, *lines]):
                raise TypeError
        except (TypeError, ValueError):
            raise BadInputError(
                f"{path}: key {short(key)}: [[keys], [lines]] or [lines] expected, found {short(group)}"
            ) from None
        stacks.update(dict.fromkeys(keys, tuple(lines)))
    return stacks
