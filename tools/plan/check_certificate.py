"""Checks layouts and proofs that none is faster, docs/plan_layout.md; no solver, no planner."""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import numpy as np

PS, CLOSE = 1e-12, 1e-6


def need(true: Any, text: str) -> None:
    """Refuse the certificate unless something is true."""
    if not true:
        raise ValueError(text)


def schedule(p: int, m: int, v: int, paths: dict[str, list[int]]) -> Space:
    """Return 1F1B, interleaved for v > 1, and paths; operation q m + i: pass q of micro-batch i."""
    need(v == 1 or m % p == 0, f"{m} micro-batches are not whole rounds of {p} stages")
    n, stage = p * v, np.array([*range(p)] * v + [*range(p)][::-1] * v)  # of passes: all F, all B
    q, i = np.divmod(np.arange(2 * n * m), m)
    j = (i // p * v + q // p % v) * p + i % p  # number among the forwards or backwards of its stage
    ahead = np.minimum((p - 1 - stage[q]) * min(v, 2) + (v - 1) * p, m * v)
    turn = np.where(q < n, j + np.maximum(j - ahead, 0), ahead + 2 * j + 1)  # on its stage
    result = Space(p=p, m=m, n=n, stage=stage, turn=turn, on=np.tile(np.eye(p), (v, 1)), path={})
    for number, ops in ((int(k), np.array(stated)) for k, stated in paths.items()):
        sent = np.diff(stage[q[ops]]) != 0
        waits = (np.diff(ops) == m) | (np.diff(turn[ops]) > 0) & ~sent  # for its input, its stage
        need(min(ops) >= 0 and waits.all(), f"path {number} leaves the schedule")
        result.path[number] = np.append(np.bincount(q[ops], minlength=2 * n), sent.sum())
    return result


def read(c: Any, schedules: list[Space]) -> Any:
    """Return a configuration with what follows from its costs."""
    lowest = min(cost.min() for name, cost in c.items() if name != "memory")
    c = Space(**c, s=schedules[int(c["schedule"])], g=int(c["count"][1] > c["count"][0]))
    need(lowest >= 0 and (c.entry <= c.full).all(), "a cost is negative")
    index = np.arange(c.s.n)
    c.least = (index > 0) & (index < c.s.n - 1) | (c.s.n == 1)  # layers; the ends may be empty
    before = np.cumsum(c.least) - c.least  # fewest layers in the chunks before
    largest = [c.count[0] - before, c.count[1] - before[::-1], c.count[c.g] * (index < c.s.p)]
    c.most = np.clip(largest, 0, None)
    c.room = c.memory - np.maximum(c.buffer, c.held * (c.least @ c.s.on > 0))
    for largest, stages, layer in zip(c.largest, c.weights, c.weight[c.g], strict=True):
        fit = sum((largest - 1 - stages) // layer) if layer else np.inf  # no stage has so much
        need(largest <= stages.max() or fit < c.count[c.g], "the largest stage may have less")
    both = np.array([c.time[:, 0], c.time[:, 1] + c.again])  # forward, backward
    share = (c.hides @ both / both.sum(axis=0)).max()
    beyond = np.maximum(c.hides @ c.fixed - share * c.fixed.sum(axis=0), 0).sum() * PS
    reduction, others = np.array([0, c.start, *c.reduce]), np.array([1, c.base, *c.update])
    hidden = [share / c.s.m, beyond, 0, 0]  # step >= k makespan + constant + slopes, twice
    c.lines = np.array([others + c.exposed * reduction, others + reduction - hidden])
    return c


def tighten(c: Any, low: Any, high: Any, bound: float) -> bool:
    """Tighten a box by whole layers, memory and the bound; return whether it is empty then."""
    n, g, few, p, totals = c.count[:, None], c.g, 1 - c.g, c.s.p, c.count[[0, 1, c.g]]
    high[:2] = np.minimum(high[:2], n - (low[:2].sum(axis=1, keepdims=True) - low[:2]))
    high[:2] = np.minimum(high[:2], c.highest - low[1::-1])
    high[0, np.cumsum(high[1, ::-1])[::-1] < n[1]] = 0  # the second kind has begun before
    high[1, np.cumsum(high[0]) < n[0]] = 0  # the first kind goes on behind
    low[:2] = np.maximum(low[:2], c.least - high[1::-1])
    others = low[few] @ c.s.on
    room = c.room - others * c.entry[few]
    fit = np.where(room < 0, -1, np.floor((room + 0.1) / np.maximum(c.entry[g], 1e-9)))
    longest = (bound - c.lines[0, 1:] @ [1, *c.largest]) / PS / c.s.m
    left = longest - c.fixed.sum(axis=0) @ c.s.on - others * c.time[few].sum()
    fast = np.floor(left / max(c.time[g].sum(), 1e-9) + 1e-9)
    high[2, :p] = np.minimum.reduce([high[2, :p], high[g] @ c.s.on, fit, fast])
    low[2, :p] = np.maximum(low[2, :p], low[g] @ c.s.on)
    return any(map(np.any, (low > high, low.sum(axis=1) > totals, high.sum(axis=1) < totals)))


def fill(c: Any, s: int, kinds: Any, redo: Any) -> float:
    """Return the bytes of a stage's layers, so many recomputed, and one; 0: they do not fit."""
    parts = np.array([np.minimum(redo, kinds[0]).sum(), np.maximum(redo - kinds[0], 0).sum()])
    used = kinds.sum(axis=1) @ c.full[:, s] - parts @ (c.full - c.entry)[:, s]
    work = max(c.buffer[s], c.held * kinds.any(), *(c.working * (parts > 0)))
    return used + 1 if used + work <= c.memory[s] else 0


def value(c: Any, low: Any, high: Any, y: Any) -> float:
    """Return what the weights of a proof show: no placement in the box takes less."""
    k, total, *slopes = y.share * c.lines[0] + (1 - y.share) * c.lines[1]
    path = sum((w * c.s.path[int(i)] for i, w in y.paths), np.zeros(2 * c.s.n + 1)) * k * PS
    counts = np.array([path[: c.s.n], path[c.s.n : -1][::-1]])  # forward, backward of each chunk
    parameters = np.array(slopes)[:, None] * y.parameters
    lower, upper, room = (low[:2] @ c.s.on).astype(int), high[:2] @ c.s.on, c.room.copy()
    lower[c.g], upper[c.g] = low[2, : c.s.p], high[2, : c.s.p]
    for s in np.flatnonzero((lower == upper).all(axis=0) * c.choice):  # whole layers are redone
        room[s] = max(fill(c, s, np.diag(lower[:, s]), r) for r in np.ndindex(*(lower[:, s] + 1)))
    total += (counts * c.fixed).sum() + path[-1] * c.send - y.memory @ room
    total += (parameters * np.column_stack([c.weights, c.largest])).sum()
    total += y.fewest @ low[2, : c.s.p] - y.most @ high[2, : c.s.p]
    stages = c.weight @ parameters[:, :-1] + y.memory * c.full
    stages[c.g] += y.most - y.fewest
    redo = np.outer(c.again, counts[1]) - (y.memory * (c.full - c.entry)) @ c.s.on.T
    cost = c.time @ counts + stages @ c.s.on.T + np.minimum(redo, 0)  # seconds for a layer
    gain = cost[:, None] - cost[:, :, None]  # [kind, price of a layer, chunk]; any price is valid
    sums = (np.where(gain < 0, high[:2, None], low[:2, None]) * gain).sum(axis=2)
    return total + (cost * c.count[:, None] + sums).max(axis=1).sum()


def prove(c: Any, tree: Any, low: Any, high: Any, proofs: list[Any], bound: float) -> None:
    """Check that no placement in a box takes less than the bound."""
    if tighten(c, low, high, bound):
        return
    if isinstance(tree, list):
        row, q, cut, less, upper = tree
        need(isinstance(cut, int), "a cut is not whole")
        top, floor = high.copy(), low.copy()
        top[row, q], floor[row, q] = min(cut, high[row, q]), max(cut + 1, low[row, q])
        prove(c, less, low.copy(), top, proofs, bound)
        prove(c, upper, floor, high, proofs, bound)
    elif tree == -1:
        need((low[:2] == high[:2]).all(), "more than one placement is left")
        kinds, some = low[:2], low[:2].sum(axis=0) * (c.choice > 0)
        todo = [(0 * some, 0)]  # recomputed layers: the fewest of each chunk that ever fit
        for s, on in enumerate(c.s.on.T):
            over = (some * on * (not fill(c, s, kinds * on, 0 * some))).astype(int)
            fit = [r for r in product(*map(range, over + 1)) if fill(c, s, kinds * on, np.array(r))]
            todo = [(redo + np.min(fit, axis=0), 0) for redo, _ in todo if fit]
        for r, q in todo:  # more of them only where that could be faster
            took, fastest = step(c, kinds, r)
            need(took >= bound * (1 - CLOSE), "a placement is faster")
            if fastest < bound * (1 - CLOSE):
                todo += [(r + np.eye(c.s.n)[i], i) for i in range(q, c.s.n) if r[i] < some[i]]
    else:
        need(value(c, low, high, proofs[tree]) >= bound * (1 - CLOSE), "a part is not proven")


def step(c: Any, kinds: Any, redo: Any) -> tuple[float, float]:
    """Return a layout's step, run (infinity: no memory), and what recomputing more takes."""
    twice = np.array([np.minimum(redo, kinds[0]), np.maximum(redo - kinds[0], 0)])
    need((twice >= 0).all() and (twice <= kinds * (c.choice > 0)).all(), "too much is recomputed")
    fits = all(fill(c, s, kinds * on, redo * on) for s, on in enumerate(c.s.on.T))
    both = forward, backward = c.fixed + c.time.T @ kinds + np.outer([0, 1], c.again @ twice)
    times, turn, clock = [*forward, *backward[::-1]], [0] * c.s.p, [0.0] * c.s.p
    end = dict.fromkeys(range(-c.s.m, 0), 0.0)
    orders = np.lexsort((c.s.turn, np.repeat(c.s.stage, c.s.m))).reshape(c.s.p, -1).tolist()
    while len(end) < c.s.m * (2 * c.s.n + 1):
        for s, ops in enumerate(orders):  # each stage goes on until it has to wait
            while turn[s] < len(ops) and (op := ops[turn[s]]) - c.s.m in end:
                q = op // c.s.m
                sent = c.send * (c.s.stage[q] != c.s.stage[q - 1])
                end[op] = clock[s] = max(clock[s], end[op - c.s.m] + sent) + times[q]
                turn[s] += 1
    largest = (c.weights + c.weight.T @ kinds @ c.s.on).max(axis=1)
    reduction = c.start + c.reduce @ largest
    both = [both, both + np.outer([0, 1], c.again @ (kinds - twice))]
    shown = np.maximum(
        reduction - (c.hides @ both @ c.s.on).max(axis=1) * PS, c.exposed * reduction
    )
    took, fastest = max(clock) * PS + shown + c.update @ largest + c.base
    return took if fits else np.inf, fastest


def check(stated: Any) -> str:
    """Check a certificate and return what it shows; raise an error with what does not hold."""
    bound, layout, rows = stated["bound_s"], stated["layout"], stated["configurations"]
    proofs = [Space(**{k: np.array(x, float) for k, x in y.items()}) for y in stated["proofs"]]
    for y in proofs:
        need(all(((x >= 0) & (x < np.inf)).all() for x in vars(y).values()), "a weight is negative")
        need(max(y.share, y.paths.T[1:].sum(), *y.parameters.sum(axis=1)) < 1 + 1e-9, "more than 1")
    lists = [np.array(x, dtype=float) for x in stated["lists"]]
    need(0 < bound < np.inf and all(np.isfinite(x).all() for x in lists), "not finite")
    need(layout["row"] in range(len(rows)), "the layout is none of the configurations")
    schedules = [schedule(*s) for s in stated["schedules"]]
    for number, (row, _, values, tree) in enumerate(rows):
        need(row == number, "another configuration was expected")
        c = read(dict(zip(stated["columns"], (lists[i] for i in values), strict=True)), schedules)
        prove(c, tree, np.zeros((3, c.s.n)), c.most.copy(), proofs, bound)
        if row == layout["row"]:
            kinds, redo = (np.array(layout[x], dtype=int) for x in ("kinds", "again"))
            low, high = np.array([*kinds, 0 * redo]), np.array([*kinds, c.most[2]])
            need(not tighten(c, low, high, np.inf), "the layout is no placement")
            need(abs(step(c, kinds, redo)[0] / layout["step_s"] - 1) < CLOSE, "it takes more")
    return f"{len(rows):,} configurations, gap {max(layout['step_s'] / bound - 1, 0):.3%}"


def main(files: list[str]) -> int:
    """Check files; return 1 if one is wrong."""
    wrong = 0
    for file in files:
        try:
            verdict = check(json.loads(Path(file).read_text(encoding="utf-8")))
        except Exception as error:
            wrong, verdict = 1, f"WRONG: {error}"
        sys.stdout.write(f"{file}: {verdict}\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
