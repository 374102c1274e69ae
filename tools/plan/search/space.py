"""Enumerate the planner's outer space: all combinations of degrees, micro-batches, schedule and recomputation policy.

The space holds what a recipe can express, by the rules of `telechat_moe.recipe.rules.parallel`. Configurations are rows
of an integer table; only those that are examined more closely become a `Layout`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import UsageError
from telechat_moe.recipe.experts import expert_degrees
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import STAGE_COLUMNS, Columns, columns
from telechat_moe.tools.plan.cost.layout import Ends, Layout

POLICIES = ("none", "full", "norm+activation", "swap")
"""`full`: whole layers, as many of each chunk as wanted. `norm+activation`: those modules of all layers. `swap`: activations
of whole layers go to the host's memory, of as many layers of each chunk as wanted; recipes cannot say that."""

CHOSEN = tuple(POLICIES.index(word) for word in ("full", "swap"))
"""Policies for which the number of layers is free."""

SCHEDULES = ("1f1b", "interleaved", "zb-v")
ENDS: tuple[Ends, ...] = ("last", "mtp-before")
NAMES = (
    "dp", "tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "micro_batches", "sp", "zero", "policy", "schedule",
    "ends",
)  # fmt: skip
"""Columns of the table of configurations."""

FIXABLE = {name: name for name in NAMES if name != "policy"} | {
    "recompute": "policy",
    "sequence_parallel": "sp",
}
"""Column of each name that `--fix` takes."""


WORDS = {"policy": POLICIES, "schedule": SCHEDULES, "sp": ("false", "true"), "ends": ENDS}
"""Columns whose values have names, and these names."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The limits of the outer space: what is fixed, and what is searched."""

    devices: int
    global_batch: int
    """Sequences of a step on all devices."""
    base: Layout
    """Types, kernels and overlap, which are not searched."""
    fixed: Mapping[str, int | tuple[int, ...]] = field(
        default_factory=dict[str, int | tuple[int, ...]]
    )
    """The values that some columns of the table may have."""
    beyond_recipes: bool = False
    """Whether to search what recipes cannot express: V shapes, swapping, MTP before its head, ZeRO 2 and 3."""
    swaps: bool = True
    """Whether the device's link to its host is known, so that swapping can be searched."""
    most_tp: int = 16
    most_cp: int = 8
    most_pp: int = 64
    most_vpp: int = 8
    most_micro_batch: int = 8


def parse_fixed(settings: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the values that `--fix name=value` allows, by column; `name=value,value` allows several.

    Raises:
        UsageError: An unknown name, a value that it cannot have, or two settings of one name.
    """
    columns_fixed: dict[str, tuple[int, ...]] = {}
    for text in settings:
        name, _, value = text.partition("=")
        column = FIXABLE.get(name.strip())
        if column is None or not value:
            raise UsageError(
                f"--fix {text}: expected name=value with a name of {', '.join(FIXABLE)}"
            )
        if column in columns_fixed:
            raise UsageError(
                f"--fix {text}: {name.strip()} is fixed twice; give all values as {name}=A,B"
            )
        words = WORDS.get(column)
        texts = [word.strip().lower() for word in value.split(",")]
        if not all(word in words if words else word.isdecimal() for word in texts):
            raise UsageError(
                f"--fix {text}: expected {' or '.join(words) if words else 'a number'}"
            )
        columns_fixed[column] = tuple(words.index(word) if words else int(word) for word in texts)
    return columns_fixed


def enumerate_space(a: Architecture, space: Space) -> NDArray[Any]:
    """Return every configuration, `[n, len(NAMES)]` integers."""
    rows = np.array(list(_rows(a, space)), dtype=np.int64).reshape(-1, len(NAMES))
    for name, value in space.fixed.items():
        rows = rows[np.isin(rows[:, NAMES.index(name)], value)]
    return rows


def explain_empty(a: Architecture, space: Space) -> str:
    """Return why a space is empty."""
    rows = enumerate_space(a, replace(space, fixed={}))
    names = {**dict(zip(NAMES, NAMES, strict=True)), "policy": "recompute"}
    if not len(rows):
        return f"no layout has {space.devices} devices and {space.global_batch} sequences a step; recipes refuse all"
    for name, value in space.fixed.items():
        words = WORDS.get(name)
        possible: list[int] = np.unique(rows[:, NAMES.index(name)]).tolist()
        if not np.isin(possible, value).any():
            values = ", ".join(words[i] if words else str(i) for i in possible)
            hint = "" if space.beyond_recipes or not words else " (more with --beyond-recipes)"
            return f"--fix: no layout has this {names[name]}; it can be {values}{hint}"
    return f"--fix: each of {', '.join(names[n] for n in space.fixed)} can be so, but not together"


def _divisors(n: int, limit: int) -> list[int]:
    return [d for d in range(1, min(n, limit) + 1) if n % d == 0]


def _rows(a: Architecture, space: Space) -> Iterator[tuple[int, ...]]:
    widths = [a.heads, a.kv_heads, a.vocab, a.hidden]
    widths += [a.ffn] if a.dense_layers else []
    widths += [a.shared_width] if a.shared_width else []
    for tp in _divisors(math.gcd(space.devices, math.gcd(*widths)), space.most_tp):
        for cp in _divisors(math.gcd(space.devices // tp, a.seq), space.most_cp):
            for pp in _divisors(space.devices // tp // cp, min(space.most_pp, len(a.layers))):
                dp = space.devices // (tp * cp * pp)
                if space.global_batch % dp or (a.tied and pp > 1):
                    continue
                yield from _inner(a, space, dp, tp, cp, pp)


def _inner(
    a: Architecture, space: Space, dp: int, tp: int, cp: int, pp: int
) -> Iterator[tuple[int, ...]]:
    experts = list(_experts(a, dp, tp, cp))
    pipelines = list(_pipelines(a, space, pp))
    policies = range(len(POLICIES) - (not (space.beyond_recipes and space.swaps)))
    for micro_batch in _divisors(space.global_batch // dp, 1 if cp > 1 else space.most_micro_batch):
        micro_batches = space.global_batch // dp // micro_batch
        if micro_batch * a.seq % (cp * tp) or (pp > 1 and micro_batches < pp):
            continue
        for vpp, schedule in pipelines:
            ends = (0, 1) if space.beyond_recipes and a.mtp and pp > 1 and schedule < 2 else (0,)
            if (schedule == 1 and micro_batches % pp) or (schedule == 2 and micro_batches < 2 * pp):
                continue
            for ep, etp in experts:
                for sp in (0, 1) if tp > 1 and a.seq % (tp * cp) == 0 else (0,):
                    zeros = range(1 if dp * cp == 1 else 4 if space.beyond_recipes else 2)
                    for zero, end, policy in product(zeros, ends, policies):
                        yield (
                            *(dp, tp, cp, pp, vpp, ep, etp, micro_batch, micro_batches),
                            *(sp, zero, policy, schedule, end),
                        )


def _experts(a: Architecture, dp: int, tp: int, cp: int) -> Iterator[tuple[int, int]]:
    """Yield ep and etp: whole experts fill tp, then cp, then dp; sharded experts are spread over dp only."""
    if not a.moe_layers:
        yield 1, 1
        return
    ways: list[tuple[int, tuple[int, ...]]] = [(1, (tp, cp, dp))]
    if tp > 1 and a.moe_ffn % tp == 0:
        ways.append((tp, (dp,)))
    for etp, degrees in ways:
        yield from ((ep, etp) for ep in expert_degrees(degrees) if a.experts % ep == 0)


def _pipelines(a: Architecture, space: Space, pp: int) -> Iterator[tuple[int, int]]:
    """Yield chunks a stage and schedule."""
    yield 1, 0
    if pp == 1:
        return
    for vpp in range(2, space.most_vpp + 1):
        # every chunk but the first (embedding) and the last (head) has a layer
        if pp * vpp <= min(len(a.layers) + 2, len(a.layers) + a.mtp):
            yield vpp, 1
            if vpp == 2 and space.beyond_recipes:
                yield vpp, 2


def layout_of(row: NDArray[Any], space: Space) -> Layout:
    """Return the layout of a configuration whose layers are not yet placed."""
    v = dict(zip(NAMES, (int(x) for x in row), strict=True))
    return space.base.with_changes(
        **{name: v[name] for name in NAMES[:9]},
        sequence_parallel=bool(v["sp"]),
        zero=v["zero"],
        opt_shards=0,
        fsdp=v["zero"] == 3,
        recompute=POLICIES[v["policy"]],
        recompute_layers=None,
        schedule=SCHEDULES[v["schedule"]],
        ends=ENDS[v["ends"]],
        chunks=None,
    )


def space_columns(a: Architecture, rows: NDArray[Any], space: Space) -> Columns:
    """Return the arrays of configurations with one number of stages, before placement: no stage has a layer."""
    kinds = product(range(len(POLICIES)), range(len(SCHEDULES)), range(len(ENDS)))
    base = space.base.with_changes(pp=2, vpp=2, chunks=None)
    layouts = [
        base.with_changes(
            recompute=POLICIES[policy],
            recompute_layers=(0,) * 4 if policy in CHOSEN else None,
            schedule=SCHEDULES[schedule],
            ends=ENDS[end],
        )
        for policy, schedule, end in kinds
    ]
    n, settings = len(rows), dict(zip(NAMES, rows.T, strict=True))
    kind = settings["policy"] * len(SCHEDULES) + settings["schedule"]
    kind = kind * len(ENDS) + settings["ends"]
    values: dict[str, Any] = {
        name: value[kind] if len(value) == len(layouts) else np.broadcast_to(value, (n,))
        for name, value in vars(columns([(a, x) for x in layouts])).items()
    }
    settings = {name: column.astype(np.float64) for name, column in settings.items()}
    values |= {name: settings[name] for name in NAMES[:9]}
    values["sequence_parallel"], values["zero"] = settings["sp"], settings["zero"]
    values["opt_shards"] = np.zeros(n)
    values["fsdp"] = (settings["zero"] == 3).astype(float)
    values["one_graph"] = (settings["micro_batches"] == 1).astype(float)
    values["devices"] = settings["dp"] * settings["tp"] * settings["cp"] * settings["pp"]
    values["expert_copies"] = (
        settings["dp"] * settings["cp"] * settings["tp"] / (settings["ep"] * settings["etp"])
    )
    values |= dict.fromkeys(STAGE_COLUMNS, np.zeros((n, int(rows[0, NAMES.index("pp")]))))
    values["last_stage"] = np.where(settings["schedule"] == 2, 0.0, settings["pp"] - 1)
    values["mtp_stage"] = values["last_stage"] - settings["ends"]
    return Columns(values)


def describe(row: NDArray[Any]) -> str:
    """Return a configuration in a few words."""
    v = dict(zip(NAMES, (int(n) for n in row), strict=True))
    words = [
        f"{n}{v[n]}" for n in ("dp", "tp", "cp", "pp", "vpp", "ep", "etp") if v[n] > 1 or n == "dp"
    ]
    words += ["sp"] if v["sp"] else []
    words += [f"mbs{v['micro_batch']}", f"m{v['micro_batches']}", f"zero{v['zero']}"]
    words += [SCHEDULES[v["schedule"]], "recompute " + POLICIES[v["policy"]]]
    return " ".join([*words, ENDS[v["ends"]]] if v["ends"] else words)
