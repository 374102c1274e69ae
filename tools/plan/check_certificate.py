"""Checks a layout and the proof that no other is faster, from the certificate alone: no solver, nothing of the planner.

A certificate has every configuration of the space with its costs, one layout with its step, a bound, and for every
configuration why none of its placements takes less: they are cut into boxes that hold all of them. A box is empty where its
stages hold fewer layers, by memory and in so short a time, than there are. For the others weights are given: of paths through
the schedule, of parameters and of memory. The step is at least the weighted sum, which is linear in the layers of the
chunks; its least value is found by sorting. Any weights that are not negative and add up to 1 at most are valid.

Times of operations in ps, memory in bytes, steps in seconds; double precision, equal up to 1e-6.
"""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import numpy as np

PS, CLOSE = 1e-12, 1e-6


class Wrong(Exception):  # noqa: N818
    """The certificate does not prove what it states."""


def need(true: Any, text: str) -> None:
    """Refuse the certificate unless something is true."""
    if not true:
        raise Wrong(text)


def read_schedule(stated: Any) -> Any:
    """Return a schedule: its operations (kind, chunk, micro-batch) by stage, and its paths' counts and sends."""
    name, p, m, v = stated["schedule"]
    s = Space(p=p, m=m, v=v, n=p * v, paths={}, stage=np.tile(np.arange(p), v), orders=[])
    if not stated["paths"] and not stated["drawn"]:
        return s
    need(
        name in ("1f1b", "interleaved") and (v == 1 or m % p == 0),
        f"schedule {name} is not known here",
    )
    turns = [(k, g + i) for g in range(0, m, p) for k in range(v) for i in range(p)]
    turns = turns if v > 1 else [(0, i) for i in range(m)]
    for stage in range(
        p
    ):  # forwards ahead, then a forward and a backward in turn, then what is left
        ahead = min(p - 1 - stage if v == 1 else 2 * (p - 1 - stage) + (v - 1) * p, m * v)
        f = [(0, k * p + stage, i) for k, i in turns]
        b = [(1, (v - 1 - k) * p + stage, i) for k, i in turns]
        both = [op for pair in zip(f[ahead:], b, strict=False) for op in pair]
        s.orders.append(f[:ahead] + both + b[m * v - ahead :])
    before = {b: a for own in s.orders for a, b in zip([None, *own], own, strict=False)}
    for number, ops in stated["paths"].items():
        path = [(o // m // s.n, o // m % s.n, o % m) for o in ops]
        counts, sends = np.zeros((2, s.n)), 0
        for a, b in zip([None, *path], path, strict=False):
            need(
                b in before and (a is None or a in (before[b], source(b, s.n))),
                f"{name} path {number}: {a}, {b}",
            )
            counts[b[:2]] += 1
            sends += a is not None and a[1] % p != b[1] % p
        s.paths[int(number)] = (counts, sends)
    return s


def source(op: tuple[int, int, int], n: int) -> tuple[int, int, int] | None:
    """Return the operation whose output an operation reads."""
    kind, c, i = op
    if kind == 0:
        return (0, c - 1, i) if c else None
    return (1, c + 1, i) if c < n - 1 else (0, c, i)


def read(stated: Any, schedules: list[Any], lists: list[Any]) -> Any:
    """Return a configuration."""
    number, layers, (first, last, send), (memory, buffer, held, choice), weights, rest = stated
    s, kinds = schedules[number], []
    for count, t, again, states, kept, entry, working, own in layers:
        kept, entry = lists[kept], lists[entry] if choice else lists[kept]
        one = np.array([t[0], t[1] + t[2]], dtype=float)
        kinds.append(Space(n=count, t=one, again=again, held=states + kept, entry=states + entry,
                           working=working, w=np.array(own, dtype=float)))  # fmt: skip
    c = Space(
        s=s, kinds=kinds, send=send, choice=choice, held=held, rest=rest, buffer=lists[buffer]
    )
    c.bulk = max(range(len(kinds)), key=lambda g: kinds[g].n)
    c.big, c.few = kinds[c.bulk], kinds[1 - c.bulk] if len(kinds) > 1 else None
    c.fixed = np.zeros((2, s.n))
    c.fixed[:, 0] += (first[0], first[1] + first[2])
    c.fixed[:, -1] += (last[0], last[1] + last[2])
    c.least = np.array([int(0 < k < s.n - 1 or s.n == 1) for k in range(s.n)])
    c.memory, c.weights = lists[memory], np.array([lists[w] for w in weights])
    c.room = c.memory - np.maximum(c.buffer, held * (np.bincount(s.stage, c.least) > 0))
    c.largest = c.weights.max(axis=1)  # what the largest stage has at least
    for i, each in enumerate(c.big.w):
        tops = np.unique(c.weights[i][:, None] + each * np.arange(c.big.n + 1))
        enough = [
            each <= 0 or ((t - c.weights[i]) // each).sum() >= c.big.n
            for t in tops[tops >= c.largest[i]]
        ]
        c.largest[i] = tops[tops >= c.largest[i]][int(np.argmax(enough))]
    base, start, reduce, update, shown, late = (
        rest[:2] + [np.array(r) for r in rest[2:4]] + rest[4:]
    )
    c.lines = [(1.0, base + shown * start, shown * reduce + update)]
    c.lines.append((1 - late[0] / s.m, base + start - late[1], reduce + update))
    return c


def by_stage(c: Any, values: Any) -> Any:
    """Return the sums over the chunks of every stage."""
    return np.bincount(c.s.stage, values, minlength=c.s.p)


def whole(c: Any) -> Any:
    """Return the box of all placements; layers of the smaller kind stand at its end of the model."""
    n, zero = c.s.n, np.zeros(c.s.n, dtype=int)
    near = np.arange(n)[:: 1 if c.bulk else -1] <= (c.few.n if c.few else -1)
    return Space(low=np.where(near, 0, c.least), high=zero + c.big.n, elow=zero, ehigh=near * (c.few.n if c.few else 0),
                 fewest=np.zeros(c.s.p), most=np.full(c.s.p, c.big.n))  # fmt: skip


def structures(few: int, n: int, at: int = 0) -> list[list[int]]:
    """Return every way to put layers into chunks from the first on, none empty between but the first and the last."""
    if not few or at == n:
        return [] if few else [[0] * (n - at)]
    ways = range(few, (1 if 0 < at < n - 1 else 0) - 1, -1)
    return [[k, *more] for k in ways for more in structures(few - k, n, at + 1)]


def cut(c: Any, box: Any, how: str, at: list[int]) -> list[Any]:
    """Return boxes that hold all placements of a box between them."""

    def but(**changes: Any) -> Any:
        return Space(**(vars(box) | changes))

    if how == "structure":
        found = []
        for way in structures(c.few.n, c.s.n):
            few = np.array(way if c.bulk else way[::-1])
            last = np.flatnonzero(few)[-1 if c.bulk else 0]
            shut = np.arange(c.s.n) < last if c.bulk else np.arange(c.s.n) > last
            low = np.where(shut, 0, np.maximum(box.low, np.maximum(c.least - few, 0)))
            found.append(but(low=low, high=np.where(shut, 0, box.high), elow=few, ehigh=few))
        return found
    if how == "longest":  # with no more than `at` on every stage, not all layers were held
        need(
            sum(at) < c.big.n and len(at) == c.s.p,
            "the stages hold all layers and none is the longest",
        )
        rows = np.where(np.eye(c.s.p) > 0, np.array(at) + 1, 0)
        return [but(fewest=np.maximum(box.fewest, row)) for row in rows]
    low, high = ("fewest", "most") if how == "stage" else ("low", "high")
    below, above = getattr(box, high).copy(), getattr(box, low).copy()
    below[at[0]], above[at[0]] = min(below[at[0]], at[1]), max(above[at[0]], at[1] + 1)
    return [but(**{high: below}), but(**{low: above})]


def most(c: Any, box: Any, bound: float) -> Any:
    """Return the layers of the larger kind that each stage holds, by memory and in less time than the bound."""
    rest = c.lines[0][1] + c.lines[0][2] @ c.largest
    few = by_stage(c, box.elow)
    room = c.room - (few * c.few.entry if c.few else 0)
    spent = by_stage(c, c.fixed.sum(axis=0)) + few * (c.few.t.sum() if c.few else 0)
    fit = np.where(room < 0, -1, np.floor(room / np.maximum(c.big.entry, 1) + 1e-9))
    fast = np.floor(((bound - rest) / PS / c.s.m - spent) / max(c.big.t.sum(), 1) + 1e-9)
    return np.minimum(np.minimum(fit, fast), box.most)


def value(c: Any, box: Any, proof: Any, high: Any) -> float:
    """Return what the weights of a proof show: no placement in the box takes less."""
    share, parameters = proof["share"], np.array(proof["parameters"])
    memory, at_most, at_least = (np.array(proof[name]) for name in ("memory", "most", "fewest"))
    weights = np.array([w for _, w in proof["paths"]])
    lowest = min(
        parameters.min(),
        memory.min(),
        at_most.min(),
        at_least.min(),
        weights.min(initial=0),
        share,
        1 - share,
    )
    need(lowest >= -1e-9, "a weight is negative")
    need(max(weights.sum(), *parameters.sum(axis=1)) <= 1 + 1e-9, "weights add up to more than 1")
    k, total, u = (share * a + (1 - share) * b for a, b in zip(*c.lines, strict=True))
    counts = k * PS * sum((w * c.s.paths[n][0] for n, w in proof["paths"]), np.zeros((2, c.s.n)))
    total += (
        k * PS * c.send * sum(w * c.s.paths[n][1] for n, w in proof["paths"])
        + (counts * c.fixed).sum()
    )
    weigh = u[:, None] * parameters
    total += weigh[:, -1] @ c.largest + (weigh[:, :-1] * c.weights).sum() + at_least @ box.fewest
    total -= at_most @ high + memory @ c.room
    for g, kind in enumerate(c.kinds):
        each = kind.t @ counts + (kind.w @ weigh[:, :-1] + memory * kind.held)[c.s.stage]
        each += c.choice * np.minimum(
            counts[1] * kind.again - (memory * (kind.held - kind.entry))[c.s.stage], 0
        )
        each += (at_most - at_least)[c.s.stage] * (g == c.bulk)
        least, top = (box.low, box.high) if g == c.bulk else (box.elow, box.ehigh)
        order, left = np.argsort(each), kind.n - least.sum()
        free = (top - least)[order]
        take = np.clip(left - (np.cumsum(free) - free), 0, free)
        total += each @ least + each[order] @ take if left == take.sum() else np.inf
    return total


def prove(c: Any, box: Any, tree: Any, proofs: list[Any], bound: float) -> None:
    """Check that no placement in a box takes less than the bound."""
    if isinstance(tree, list):
        boxes = cut(c, box, tree[0], tree[1])
        need(len(boxes) == len(tree[2]), "a box is cut into fewer parts than there are")
        for part, inner in zip(boxes, tree[2], strict=True):
            prove(c, part, inner, proofs, bound)
        return
    high = most(c, box, bound)
    below, above = (
        np.maximum(by_stage(c, box.low), box.fewest),
        np.minimum(by_stage(c, box.high), high),
    )
    if not ((below <= above).all() and below.sum() <= c.big.n <= above.sum()):
        return
    if tree == -2:  # one placement: every way to recompute
        layers = box.low + box.elow
        need(
            (box.low == box.high).all() and (box.elow == box.ehigh).all(),
            "more than one placement is left",
        )
        plain = [
            step(c, layers, np.where(c.s.stage == s, 0, layers * c.choice)) for s in range(c.s.p)
        ]
        more = (
            layers * c.choice * (np.array(plain)[c.s.stage] == np.inf)
        )  # where a stage does not fit as it is
        for again in product(*(range(n + 1) for n in more)):
            need(step(c, layers, np.array(again)) >= bound * (1 - CLOSE), "a placement is faster")
    else:
        need(
            tree >= 0 and value(c, box, proofs[tree], high) >= bound * (1 - CLOSE),
            "a part is not proven",
        )


def step(c: Any, layers: Any, again: Any) -> float:
    """Return the step of a layout, its schedule run operation by operation; infinity: it does not fit in memory."""
    first = np.clip(c.kinds[0].n - (np.cumsum(layers) - layers), 0, layers) if c.few else layers
    kinds = [first, layers - first][: len(c.kinds)]
    more = [np.minimum(again, first), again - np.minimum(again, first)]
    need(
        sum(layers) == sum(k.n for k in c.kinds) and (layers >= c.least).all(),
        "the layers are not the model's",
    )
    need(
        (again <= layers * c.choice).all() and (again >= 0).all(),
        "more is recomputed than there is",
    )
    times, largest, held = c.fixed.copy(), c.weights.copy(), np.zeros(c.s.p)
    work = c.held * (by_stage(c, layers) > 0)
    for kind, own, twice in zip(c.kinds, kinds, more, strict=False):
        times += np.outer(kind.t, own)
        times[1] += kind.again * twice
        largest += np.outer(kind.w, by_stage(c, own))
        held += by_stage(c, own) * kind.held - by_stage(c, twice) * (kind.held - kind.entry)
        work = np.maximum(work, kind.working * (by_stage(c, twice) > 0))
    if (held + np.maximum(work, c.buffer) > c.memory).any():
        return np.inf
    done: Any = {None: (0.0, -1)}
    at, clock = [0] * c.s.p, np.zeros(c.s.p)
    while any(
        moved := [
            k < len(o) and source(o[k], c.s.n) in done for k, o in zip(at, c.s.orders, strict=True)
        ]
    ):
        for s in np.flatnonzero(moved):
            op = c.s.orders[s][at[s]]
            ready, stage = done[source(op, c.s.n)]
            clock[s] = max(clock[s], ready + c.send * (stage not in (-1, s))) + times[op[:2]]
            done[op], at[s] = (clock[s], s), at[s] + 1
    base, start, reduce, update, shown, _ = c.rest
    total, back = start + np.array(reduce) @ largest.max(axis=1), by_stage(c, times[1]).max() * PS
    return (
        clock.max() * PS
        + max(total - back, shown * total)
        + np.array(update) @ largest.max(axis=1)
        + base
    )


def check(stated: Any) -> None:
    """Check a certificate; raise `Wrong` with what does not hold."""
    bound, layout, lists = (
        stated["bound_s"],
        stated["layout"],
        [np.array(x, dtype=float) for x in stated["lists"]],
    )
    schedules = [read_schedule(s) for s in stated["schedules"]]
    for row, name, problem, tree in stated["configurations"]:
        c = read(problem, schedules, lists)
        try:
            prove(c, whole(c), tree, stated["proofs"], bound)
            if row == layout["row"]:
                took = step(c, np.array(layout["layers"]), np.array(layout["again"]))
                need(abs(took / layout["step_s"] - 1) < CLOSE, f"the layout takes {took} s")
        except Wrong as wrong:
            raise Wrong(f"{name}: {wrong}") from None
    need(
        any(row == layout["row"] for row, *_ in stated["configurations"]),
        "the layout is none of the configurations",
    )


def main(files: list[str]) -> int:
    """Check files; return 1 if one is wrong."""
    failed = 0
    for file in files:
        try:
            check(c := json.loads(Path(file).read_text(encoding="utf-8")))
            gap = max(c["layout"]["step_s"] / c["bound_s"] - 1, 0)
            sys.stdout.write(
                f"{file}: {len(c['configurations']):,} configurations, gap {gap:.3%}\n"
            )
        except Wrong as wrong:
            failed = 1
            sys.stdout.write(f"{file}: WRONG: {wrong}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
