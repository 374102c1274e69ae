"""What a device and its network can do: published figures and at most 12 fitted constants, from a YAML file."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

from telechat_moe.errors import BadInputError
from telechat_moe.narrowing import short
from telechat_moe.reading import read_text
from telechat_moe.recipe import tree
from telechat_moe.units import GIB

FOLDER = Path(__file__).parents[1] / "devices"
LIMIT = 12
"""Most fitted constants that a description may have."""
_POSITIVE = (
    "peak_flops", "memory_bytes", "memory_bandwidth", "node_devices", "intra_bandwidth", "stack_factor",
)  # fmt: skip
_RATES = ("matmul_share", "attention_share", "memory_share", "intra_share", "inter_share")


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fitted constants, the only free numbers of the cost model; each names its unit or is a share."""

    matmul_share: float = 0.75
    """Largest share of the peak that a large matrix product reaches."""
    matmul_half: float = 256.0
    """Size at which a product's dimension costs half its efficiency (elements)."""
    attention_share: float = 0.5
    """Share of the peak that attention's core reaches."""
    memory_share: float = 0.75
    """Share of the memory bandwidth that elementwise operators reach."""
    fp8_share: float = 0.6
    """Share of the float8 peak relative to `matmul_share`."""
    eager_share: float = 0.8
    """Rate of attention and matrix products without fused kernels, relative to fused ones."""
    layer_host_s: float = 2e-4
    """Host time to launch one layer's forward kernels; the layer takes no less."""
    collective_host_s: float = 2e-5
    """Time of starting one collective inside a node, on host and device."""
    intra_share: float = 0.7
    """Share of the link bandwidth inside a node that collectives reach."""
    inter_share: float = 0.6
    """Share of the network bandwidth that collectives reach."""
    inter_latency_s: float = 2e-5
    """Latency of one hop between nodes."""
    exposed: float = 0.3
    """Share of overlapped communication that is not hidden."""
    tensor_exposed: float = 0.4
    """The same where collectives are divided and run during their own matrix products."""
    step_host_s: float = 5e-3
    """Time of a step that does not depend on its micro-batches."""

    def slowed(self, factor: float) -> "Constants":
        """Return the constants with which every time is ``factor`` times as long."""
        times = (f.name for f in fields(self) if f.name.endswith("_s"))
        values = {name: getattr(self, name) * factor for name in times}
        return replace(self, **values, **{name: getattr(self, name) / factor for name in _RATES})


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, its node and its network; bandwidths are per device and direction."""

    name: str
    peak_flops: dict[str, float]
    """Dense peak by type, FLOP/s: fp32, fp16, bf16, fp8."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes/s."""
    node_devices: int
    """Devices joined by the fast links."""
    intra_bandwidth: float
    """Bytes/s of a device to the others of its node."""
    inter_bandwidth: float
    """Bytes/s of a device to other nodes."""
    host_bandwidth: float = 0.0
    """Bytes/s of a device to its host's memory, each direction; 0: not known, nothing is swapped."""
    reserved_bytes: float = 1.5 * GIB
    """Bytes that the runtime, libraries and communication buffers hold."""
    constants: Constants = field(default_factory=Constants)
    stack_factor: float = 1.0
    """How much longer a step takes with this software than by the constants of the file; `constants` have it in them."""
    sources: dict[str, str] = field(default_factory=dict[str, str])
    """Where each figure comes from."""
    fitted: tuple[str, ...] = ()
    """Constants that were fitted for this device; the rest are defaults or another device's (see `sources`)."""
    measured: tuple[str, ...] = ()
    """Constants that were measured directly (`fitted: false`); a fit does not change them."""
    prior_weight: float = 0.0
    """How strongly a fit pulls the constants towards `fit.TYPICAL`; 0: weakly, and towards the defaults."""
    aliases: tuple[str, ...] = ()
    step: dict[str, float] = field(default_factory=dict[str, float])
    """Coefficients of `cpu_step`, on a machine that measured itself (`plan calibrate`)."""

    def peak(self, compute: str) -> float:
        """Return the peak of a type in FLOP/s.

        Raises:
            BadInputError: The device has none.
        """
        if compute not in self.peak_flops:
            types = ", ".join(sorted(self.peak_flops))
            raise BadInputError(f"device {self.name}: no peak for {compute}; it has {types}")
        return self.peak_flops[compute]


def names() -> list[str]:
    """Return the devices that ship."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_device(name: str | Path) -> Device:
    """Read a device description: a shipped name (`a100`, `ascend-910b`) or alias, or a YAML file.

    Raises:
        BadInputError: There is none, or the file does not fit.
    """
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        shipped = _by_name(str(name))
        if shipped is None:
            raise BadInputError(
                f"device {name}: no such description; there are {', '.join(names())}, or give a YAML file"
            )
        file = shipped
    if not file.is_file():
        raise BadInputError(f"device {name}: no file {file}")
    return _read(file)


def files_of(name: str | Path) -> list[Path]:
    """Return the file of a description, that of its base, of the base's base, and so on.

    Raises:
        BadInputError: There is no such device.
    """
    load_device(name)
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        file = _by_name(str(name)) or file
    files = [file]
    while base := read_mapping(files[-1]).get("base"):
        beside = files[-1].parent / f"{base}.yaml"
        files.append(beside if beside.is_file() else FOLDER / beside.name)
    return files


def base_name(name: str | Path) -> str:
    """Return the shipped device whose constants a variant shares, the last of its chain of bases; empty: it has none.

    Raises:
        BadInputError: There is no such device.
    """
    file = files_of(name)[-1]
    return file.stem if file.parent == FOLDER else ""


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _by_name(name: str) -> Path | None:
    files, key = sorted(FOLDER.glob("*.yaml")), _key(name)
    named = (file for file in files if _key(file.stem) == key)
    aliased = (file for file in files if key in map(_key, _read(file).aliases))
    return next(chain(named, aliased), None)


def _read(file: Path) -> Device:
    return _parsed(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _parsed(file: Path, changed: int) -> Device:
    """Read a description; the cache's key includes the time of the file's last change."""
    del changed
    raw = _merged(file)
    values, fitted, notes = _constants(file, raw.pop("constants", None) or {})
    measured = tuple(name for name in values if name not in fitted)
    figures_sources: dict[str, str] = raw.pop("sources", None) or {}
    sources = {**figures_sources, **notes}
    # without a default both are MISSING
    required = {f.name: f.default is f.default_factory for f in fields(Device)}
    wrong = [key for key in raw if key not in required]
    if wrong:
        raise BadInputError(
            f"{file}: unknown key {wrong[0]}; there are {', '.join(sorted(required))}"
        )
    raw.setdefault("name", file.stem)
    if lacks := [name for name, needed in required.items() if needed and name not in raw]:
        raise BadInputError(f"{file}: missing {', '.join(lacks)}")
    raw["name"] = str(raw["name"])
    try:
        raw["aliases"] = tuple(map(str, list[Any](raw.get("aliases") or ())))
        for key in ("peak_flops", "step"):
            figures: dict[Any, Any] = raw.get(key) or {}
            raw[key] = {str(k): _figure(key, v) for k, v in figures.items()}
        for key in raw:
            if key.endswith(("_bytes", "_bandwidth", "_weight", "_factor")):
                raw[key] = _figure(key, raw[key])
        raw["node_devices"] = int(_figure("node_devices", raw["node_devices"]))
    except (AttributeError, TypeError, ValueError) as error:
        raise BadInputError(f"{file}: expected numbers ({short(error)})") from None
    constants = Constants(**values).slowed(raw.get("stack_factor", 1.0))
    return Device(**raw, constants=constants, sources=sources, fitted=fitted, measured=measured)


def _figure(key: str, value: Any) -> float:
    """Return a figure of a device, 0 only where that has a meaning."""
    number = math.nan if isinstance(value, bool) else float(value)
    if not math.isfinite(number) or number < 0 or (not number and key in _POSITIVE):
        raise ValueError(f"{key} is {value!r}")
    return number


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the settings of a YAML file.

    Raises:
        BadInputError: It cannot be read, or holds no mapping.
    """
    problems: list[str] = []

    def report(line: int, key: str, problem: str, expected: str) -> None:
        place = f"{file}:{line}: " + (f"{key}: " if key else "")
        problems.append(f"{place}not a YAML file that can be read: {problem}; {expected}")

    root = tree.read(read_text(file), report)
    nodes: Iterable[tree.YamlNode] = () if root is None else root.scalars()
    for node in nodes:
        if node.trap and "as text, not as a number" not in node.trap:  # 1e9, which `float` reads
            report(node.line, "", node.text[:40], node.trap)
    if problems or root is None:
        raise BadInputError(problems[0])
    if root.kind != "map":
        raise BadInputError(f"{file}:{root.line}: expected a mapping, found {root.show()}")
    settings: dict[str, Any] = root.plain()
    for key in ("constants", "sources"):
        if not isinstance(settings.get(key) or {}, dict):
            raise BadInputError(f"{file}: {key} is {settings[key]!r}, expected a mapping")
    return settings


def _merged(file: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file's settings on top of those of its ``base``, another product with the same device, which may have one."""
    if file in above:
        chain_of_bases = " -> ".join(map(str, (*above, file)))
        raise BadInputError(
            f"{chain_of_bases}: base is a cycle, expected a file without base at its end"
        )
    raw = read_mapping(file)
    if "base" not in raw:
        return raw
    name = f"{raw.pop('base')}.yaml"
    beside = file.parent / name
    base = _merged(beside if os.path.isfile(beside) else FOLDER / name, (*above, file))  # noqa: PTH113 (any text)
    both: dict[str, Any] = {
        key: {**(base.get(key) or {}), **(raw.get(key) or {})} for key in ("constants", "sources")
    }
    both |= {"aliases": raw.get("aliases") or [], "name": raw.get("name", file.stem)}
    return {**base, **raw, **both}


def _constants(
    file: Path, entries: dict[str, Any]
) -> tuple[dict[str, float], tuple[str, ...], dict[str, str]]:
    """Return the constants' values, the names of the fitted ones, and the sources of those that have one."""
    names = {f.name for f in fields(Constants)}
    fitted: list[str] = []
    values: dict[str, float] = {}
    notes: dict[str, str] = {}
    for key, entry in entries.items():
        if key not in names:
            raise BadInputError(
                f"{file}: constants.{key} is unknown; there are {', '.join(sorted(names))}"
            )
        detail = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {"value": entry}
        if "source" in detail:
            notes[f"constants.{key}"] = str(detail["source"])
        if detail.get("fitted", True):
            fitted.append(key)
        number: Any = detail.get("value")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise BadInputError(f"{file}: constants.{key} is {number!r}, expected a number")
        values[key] = float(number)
    if len(fitted) > LIMIT:
        raise BadInputError(f"{file}: {len(fitted)} fitted constants, at most {LIMIT} are allowed")
    return values, tuple(fitted), notes
