"""Score architectures for a device and a budget: find the model of a given size that trains fastest.

Every combination of the choices is an architecture. Those that break an alignment rule or exceed the budget are
refused, and the reasons are counted. The others are scored under a few layouts at once, and keep the fastest that fits in
memory; these layouts are the ones that `search` finds best for the first allowed architecture. `plan_models` then
searches all layouts and placements of a few architectures.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.recipe.load import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device, load_device, read_mapping
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.step import evaluate
from telechat_moe.tools.plan.search.search import search, usable
from telechat_moe.tools.plan.search.space import Space
from telechat_moe.units import GIB

CHOICES = (
    "hidden", "layers", "dense_layers", "heads", "ffn", "experts", "top_k", "shared_experts", "moe_ffn",
    "q_lora_rank", "kv_lora_rank",
)  # fmt: skip
KEYS = (
    "recipe", "device", "devices", "memory_gib", "global_batch", "choices", "budget", "align", "layouts",
)  # fmt: skip
BUDGET = ("parameters", "active_parameters")
BATCH = 4096
"""Number of architectures that are scored at once."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of a model search, as read from a file."""

    base: Architecture
    layout: Layout
    device: Device
    devices: int
    global_batch: int
    choices: Mapping[str, list[int]]
    budget: Mapping[str, tuple[float, float]]
    width: int = 256
    """Widths and ranks of latents must be multiples of this number."""
    block: int = 16
    """Each device's shard of a width must be a multiple of this number; the matrix unit is 16 x 16."""
    layouts: int = 12
    """Layouts that are tried with every architecture."""


@dataclass(frozen=True)
class ScoredModel:
    """An architecture with its fastest layout."""

    architecture: Architecture
    layout: Layout
    step_s: float
    tokens_per_s: float
    """Of one device."""
    peak_bytes: float
    gap: float = np.inf
    """Relative distance of a simulated step to the proven bound; infinity: the step is a closed form."""


@dataclass(frozen=True)
class ModelSearchResult:
    """What a model search finds."""

    scored: list[ScoredModel]
    """Scored architectures, fastest in tokens a second first."""
    front: list[ScoredModel]
    """Those that no other exceeds or equals in both parameters and tokens a second."""
    refused: Counter[str]
    number: int


def read_space(file: str) -> Choices:
    """Read a space.

    Raises:
        BadInputError: A key that does not exist, or a value that does not fit.
    """
    path = Path(file)
    if not path.is_file():
        raise BadInputError(f"{file}: no such file")
    raw = _mapping(file, "", read_mapping(path), KEYS)
    choices = _mapping(file, "choices", raw.get("choices"), CHOICES)
    budget = _mapping(file, "budget", raw.get("budget") or {}, BUDGET)
    align = _mapping(file, "align", raw.get("align") or {}, ("width", "block"))
    for name in ("recipe", "devices"):
        if name not in raw:
            raise BadInputError(f"{file}: {name} is missing")
    recipe = load(raw["recipe"])
    layout = Layout.from_recipe(recipe)
    room = raw.get("memory_gib")
    numbers = dict(align)
    if "layouts" in raw:
        numbers["layouts"] = raw["layouts"]
    return Choices(
        base=Architecture.from_recipe(recipe),
        layout=layout,
        device=usable(load_device(raw.get("device", "ascend-910b")), room and float(room) * GIB),
        devices=int(raw["devices"]),
        global_batch=int(raw.get("global_batch") or layout.global_batch),
        choices={k: _numbers(file, k, v) for k, v in choices.items()},
        budget={k: _range(file, k, v) for k, v in budget.items()},
        **{name: int(value) for name, value in numbers.items()},
    )


def _mapping(file: str, name: str, section: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a mapping whose keys are all known; `name` is empty for the whole file."""
    if not isinstance(section, dict):
        problem = f"{name} is {section!r}, expected" if name else "expected"
        raise BadInputError(f"{file}: {problem} a mapping with {', '.join(keys)}")
    mapping: dict[str, Any] = {
        str(key): value for key, value in cast(dict[Any, Any], section).items()
    }
    for key in mapping:
        if key not in keys:
            place = f"{name}.{key}" if name else key
            raise BadInputError(f"{file}: {place} is unknown; there are {', '.join(keys)}")
    return mapping


def _numbers(file: str, key: str, value: Any) -> list[int]:
    values = cast(list[Any], value) if isinstance(value, list) else [value]
    if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise BadInputError(f"{file}: choices.{key} is {value!r}, expected whole numbers")
    return values


def _range(file: str, key: str, value: Any) -> tuple[float, float]:
    try:
        low, high = (float(v) for v in value)
    except (TypeError, ValueError):
        raise BadInputError(f"{file}: budget.{key} is {value!r}, expected [least, most]") from None
    return low, high


def architectures(s: Choices) -> Iterator[Architecture]:
    """Yield every combination of the choices."""
    names = list(s.choices)
    for values in product(*s.choices.values()):
        v: dict[str, Any] = dict(zip(names, values, strict=True))
        a = s.base
        number = v.pop("layers", len(a.layers))
        dense = min(v.pop("dense_layers", a.dense_layers), number)
        heads = v.get("heads", a.heads)
        shared = v.get("shared_experts", a.shared_experts)
        yield replace(
            a,
            layers=("dense",) * dense + ("moe",) * (number - dense),
            kv_heads=heads,
            shared_ffn=shared * v.get("moe_ffn", a.moe_ffn),
            **v,
        )


def refusal(s: Choices, a: Architecture) -> str | None:
    """Return why an architecture is not scored."""
    for name in ("hidden", "ffn", "moe_ffn", "q_lora_rank", "kv_lora_rank"):
        if getattr(a, name) % s.width:
            return f"{name} is not a multiple of {s.width}"
    if a.experts and a.top_k > a.experts:
        return "top_k is above experts"
    for name, (low, high) in s.budget.items():
        if not low <= getattr(a, name) <= high:
            return f"{name} outside the budget"
    return None


def _whole_blocks(s: Choices, a: Architecture, tp: int, etp: int) -> bool:
    """Return whether each device's shard of every width is whole blocks."""
    shards = [(w, tp) for w in (a.hidden, a.ffn, a.shared_width, a.vocab)] + [(a.moe_ffn, etp)]
    return all(w % (p * s.block) == 0 for w, p in shards)


def _fits_layout(s: Choices, a: Architecture, x: Layout) -> bool:
    """Return whether a layout divides an architecture, each device's shards in whole blocks."""
    return (
        _whole_blocks(s, a, x.tp, x.etp)
        and a.heads % x.tp == 0
        and a.experts % x.ep == 0
        and len(a.layers) >= x.pp * x.vpp
    )


def search_models(s: Choices) -> ModelSearchResult:
    """Score every architecture of the space."""
    refused = Counter[str]()
    allowed: list[Architecture] = []
    for a in architectures(s):
        if reason := refusal(s, a):
            refused[reason] += 1
        else:
            allowed.append(a)
    number = len(allowed) + refused.total()
    layouts = _layouts(s, allowed[0]) if allowed else []
    scored: list[ScoredModel] = []
    for start in range(0, len(allowed), BATCH):
        scored += _score(s, allowed[start : start + BATCH], layouts, refused)
    scored.sort(key=lambda c: -c.tokens_per_s)
    front: list[ScoredModel] = []
    largest = -1
    for c in scored:
        if c.architecture.parameters > largest:
            largest = c.architecture.parameters
            front.append(c)
    return ModelSearchResult(scored, front, refused, number)


def _layouts(s: Choices, a: Architecture) -> list[Layout]:
    """Return the degrees of the best layouts of one architecture; layers are spread evenly."""
    space = Space(devices=s.devices, global_batch=s.global_batch, base=s.layout, most_vpp=2)
    layouts: dict[Layout, None] = {}
    for share in (1.0, 0.7, 0.5):  # with less memory, too: larger models need it
        room = s.device.memory_bytes - s.device.reserved_bytes
        plan = search(a, space, usable(s.device, room * share), top=s.layouts, limit_s=60.0)
        for c in plan.best[: s.layouts]:
            layouts[c.layout.with_changes(chunks=None, recompute_layers=None)] = None
    return list(layouts)


def plan_models(s: Choices, some: list[ScoredModel], limit_s: float) -> list[ScoredModel | None]:
    """Plan architectures one by one; see `search`. Each device's shard of a width stays in whole blocks.

    All together take `limit_s` seconds; the next ones may use the time that one does not need. None: no layout was found in
    an architecture's time.
    """
    until = time.perf_counter() + limit_s
    plans: list[ScoredModel | None] = []
    for i, c in enumerate(some):
        degrees = range(1, Space.most_tp + 1)
        fixed = {
            "tp": tuple(n for n in degrees if _whole_blocks(s, c.architecture, n, 1)),
            "etp": tuple(n for n in degrees if _whole_blocks(s, c.architecture, 1, n)),
        }
        space = Space(devices=s.devices, global_batch=s.global_batch, base=s.layout, fixed=fixed)
        share = max(until - time.perf_counter(), 0.0) / (len(some) - i)
        plan = search(c.architecture, space, s.device, top=1, limit_s=share)
        plans += [
            _scored(s, c.architecture, x.layout, x.step_s, x.simulated_bytes, plan.gap)
            for x in plan.best[:1]
        ] or [None]
    return plans


def _scored(
    s: Choices, a: Architecture, layout: Layout, step_s: float, peak: float, gap: float = np.inf
) -> ScoredModel:
    tokens_per_s = s.global_batch * s.base.seq / s.devices / step_s
    return ScoredModel(a, layout, step_s, tokens_per_s, peak, gap)


def _score(
    s: Choices, some: list[Architecture], layouts: list[Layout], refused: Counter[str]
) -> list[ScoredModel]:
    pairs = [(a, x, i) for i, a in enumerate(some) for x in layouts if _fits_layout(s, a, x)]
    divided = {i for _, _, i in pairs}
    refused["no layout divides it"] += len(some) - len(divided)
    if not pairs:
        return []
    table = evaluate([a for a, _, _ in pairs], [x for _, x, _ in pairs], s.device)
    best: dict[int, int] = {}
    for k in map(int, np.argsort(table.step_s, kind="stable")):
        if table.fits[k]:
            best.setdefault(pairs[k][2], k)
    refused["does not fit in memory"] += len(divided) - len(best)
    return [
        _scored(s, *pairs[k][:2], float(table.step_s[k]), float(table.memory.peak[k].max()))
        for k in best.values()
    ]


def describe_model(a: Architecture) -> str:
    """Return an architecture in a few words."""
    return (
        f"h{a.hidden} L{len(a.layers)} ({a.dense_layers} dense) heads{a.heads} E{a.experts} top{a.top_k} "
        f"shared{a.shared_experts} f{a.moe_ffn} q{a.q_lora_rank} kv{a.kv_lora_rank}"
    )
