"""Checks a placement and the proof that none is better, from the certificate alone: no solver.

A certificate states the problem (ns and bytes, integers), the placement, its objective
`max_weight * (largest stage time) + sum_weight * (their sum)`, and intervals `[low, high, sum]`:

1. the placement has every item once, in order, fits in memory and costs what is stated;
2. by enumeration of all arrangements of every stage: no division of the items whose stages take at
   most `high` has a smaller sum than `sum`;
3. each stage time lies in an interval with `max_weight * time + sum_weight * sum` >= the bound.
"""

import json
import sys
from collections import Counter
from functools import cache, partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

NONE = float("inf")


class Wrong(Exception):  # noqa: N818
    """The certificate does not prove what it states."""


def chunks_of(p: Any, stage: int) -> list[int]:
    """Return the chunks of a stage."""
    return [c for c, s in enumerate(p["stage_of_chunk"]) if s == stage]


def allowed(p: Any, counts: dict[int, tuple[int, ...]]) -> bool:
    """Return whether a stage's chunks have the layers that they need, evenly enough."""
    kinds = [g["layer"] for g in p["groups"]]
    layers = {c: sum(n * k for n, k in zip(row, kinds, strict=True)) for c, row in counts.items()}
    inner = [n for c, n in layers.items() if 0 < c < len(p["stage_of_chunk"]) - 1]
    even = len(layers) == 1 or not inner or min(inner) >= max(layers.values()) - p["spread"]
    return even and all(n >= p["least"][c] for c, n in layers.items())


def check_placement(p: Any, items: list, objective: int) -> None:
    """Check that the placement exists and costs what is stated."""
    found = [g for row in items for g, numbers in enumerate(row) for _ in range(sum(numbers))]
    if found != [g for g, s in enumerate(p["groups"]) for _ in range(s["count"])]:
        raise Wrong("the placement does not have the model's items in their order")
    if min(n for row in items for numbers in row for n in numbers) < 0:
        raise Wrong("the placement has fewer than no items")
    if any(sum(row[g]) for row in items[:-1] for g, s in enumerate(p["groups"]) if s["last"]):
        raise Wrong("an item of the last chunk stands elsewhere")
    times = []
    for stage, memory in enumerate(p["memory"]):
        own = chunks_of(p, stage)
        if not allowed(p, {c: tuple(map(sum, items[c])) for c in own}):
            raise Wrong(f"stage {stage}: a chunk has too few layers")
        took, held, working = (p[k][stage] for k in ("fixed_time", "fixed_memory", "fixed_working"))
        for c, (g, group) in product(own, enumerate(p["groups"])):
            for option, n in zip(group["options"], items[c][g], strict=True):
                took += n * option["time"]
                held += n * (group["states"] + p["in_flight"][c] * option["kept"])
                working = max(working, option["working"] if n else 0)
        if held + working > memory:
            raise Wrong(f"stage {stage} needs {held + working} bytes of {memory}")
        times.append(took)
    if p["max_weight"] * max(times) + p["sum_weight"] * sum(times) != objective:
        raise Wrong(f"the placement does not cost {objective}")


def orders(p: Any) -> list[list[dict[int, int]]]:
    """Return every way to put all items but the largest group's into chunks: `[chunk] -> {group: n}`."""
    chunks, found = range(len(p["stage_of_chunk"])), []
    groups = [g for g, s in enumerate(p["groups"]) for _ in range(s["count"]) if g != p["bulk"]]
    pinned = [tuple(c for row in p["pinned"] for c in row)]
    for at in pinned if p["pinned"] else combinations_with_replacement(chunks, len(groups)):
        pairs = Counter(zip(at, groups, strict=True))
        if not any(p["groups"][g]["last"] and c < chunks[-1] for c, g in pairs):
            found.append([{g: n for (k, g), n in pairs.items() if k == c} for c in chunks])
    return found


def ways(p: Any, number: int, chunks: list[int], special: tuple) -> set[tuple[int, ...]]:
    """Return the divisions of at most `number` bulk items that may be even enough."""
    here = [sum(n for g, n in row if p["groups"][g]["layer"]) for row in special]
    free, found = len(chunks) == 1 or not p["groups"][p["bulk"]]["layer"], set()
    inner = [0 < c < len(p["stage_of_chunk"]) - 1 and not free for c in chunks]
    for top in [number + max(here)] if free else range(number + max(here) + 1):
        lows = [i * max(0, top - p["spread"] - n) for i, n in zip(inner, here, strict=True)]
        found.update(product(*(range(low, min(top, number) + 1) for low in lows)))
    return {w for w in found if sum(w) <= number}


def stage_table(p: Any, bound: int, stage: int, special: tuple, opened: tuple) -> dict[int, float]:
    """Return the least time of a stage by number of bulk items, for those below the bound."""
    bulk, chunks = p["bulk"], chunks_of(p, stage)
    best: dict[int, float] = {}
    seen: dict[tuple, float] = {}
    quickest = p["max_weight"] * min(o["time"] for o in p["groups"][bulk]["options"])
    total = p["groups"][bulk]["count"]
    total = min(total, bound // quickest if quickest else total, *p["most"][stage : stage + 1])
    fewest = max(p["fewest"][stage : stage + 1], default=0)
    for split in ways(p, total, chunks, special):
        number, rows = sum(split), [dict(row) for row in special]
        if number < fewest or any(n > 0 and not o for n, o in zip(split, opened, strict=True)):
            continue
        for row, n in zip(rows, split, strict=True):
            row[bulk] = n
        full = [tuple(row.get(g, 0) for g in range(len(p["groups"]))) for row in rows]
        if allowed(p, dict(zip(chunks, full, strict=True))):
            key = tuple(
                sorted((p["in_flight"][c], row) for c, row in zip(chunks, full, strict=True))
            )
            if key not in seen:  # chunks with as many micro-batches in flight are alike
                seen[key] = least_time(p, stage, key)
            best[number] = min(seen[key], best.get(number, NONE))
    return best


def least_time(p: Any, stage: int, rows: tuple) -> float:
    """Return the least time over all options of a stage's items that fit in memory; infinity: none does."""
    answer, base, room = NONE, p["fixed_working"][stage], p["memory"][stage]
    options: list[Any] = [g["options"] for g in p["groups"]]
    for level in {max(o["working"], base) for group in options for o in group}:
        front = {p["fixed_memory"][stage] + level: p["fixed_time"][stage]}
        for flight, row in rows:
            for g in (g for g, n in enumerate(row) for _ in range(n)):
                after: dict[int, int] = {}
                for o, (held, took) in product(options[g], front.items()):
                    more = held + p["groups"][g]["states"] + flight * o["kept"]
                    if more <= room and o["working"] <= level:
                        after[more] = min(after.get(more, took + o["time"]), took + o["time"])
                front, least = {}, NONE
                for held in sorted(after):  # keep what nothing beats in both
                    if after[held] < least:
                        front[held] = least = after[held]
        answer = min([answer, *(t for h, t in front.items() if h <= room)])
    return answer


def least_sum(stages: list[dict[int, float]], total: int, limit: float) -> float:
    """Return the least sum of stage times, each at most `limit`."""
    sums: dict[int, float] = {0: 0}
    for table in stages:
        after: dict[int, float] = {}
        for (n, took), (m, so_far) in product(table.items(), sums.items()):
            if took <= limit and took < NONE:
                after[m + n] = min(after.get(m + n, NONE), so_far + took)
        sums = after
    return sums.get(total, NONE)


def check_proof(p: Any, intervals: list[list[int]], bound: int) -> None:
    """Check that no placement has an objective below the bound."""
    tables: dict[tuple, dict[int, float]] = {}
    bulk, a, b = p["bulk"], p["max_weight"], p["sum_weight"]
    total = p["groups"][bulk]["count"]
    for special in orders(p):
        first = max((c for c, row in enumerate(special) if any(g < bulk for g in row)), default=0)
        behind = [c for c, row in enumerate(special) if any(g > bulk for g in row)]
        last = min([*behind, len(special) - 1])
        stages = []
        for stage in range(len(p["memory"])):
            own = chunks_of(p, stage)
            rows = tuple(tuple(sorted(special[c].items())) for c in own)
            key = stage, rows, tuple(first <= c <= last for c in own)
            if key not in tables:
                tables[key] = stage_table(p, bound, *key)
            stages.append(tables[key])
        done, sums = -1.0, cache(partial(least_sum, stages, total))
        true = [(high, least) for _, high, least in intervals if sums(high) >= least]
        for time in sorted({t for table in stages for t in table.values() if t < NONE}):
            if time <= done or a * time + b * sums(NONE) >= bound:
                continue
            fits = [h for h, least in true if h >= time and a * time + b * least >= bound]
            if not fits and a * time + b * sums(time) < bound:
                raise Wrong(f"stage time {time}: no interval proves the bound")
            done = max(fits, default=time)


def check(certificate: Any) -> None:
    """Check a certificate; raise `Wrong` with what does not hold."""
    if certificate["bound"] > certificate["objective"]:
        raise Wrong(f"bound {certificate['bound']} > objective {certificate['objective']}")
    check_placement(certificate["problem"], certificate["items"], certificate["objective"])
    check_proof(certificate["problem"], certificate["proof"], certificate["bound"])


def main(files: list[str]) -> int:
    """Check files; return 1 if one is wrong."""
    failed = 0
    for file in files:
        try:
            check(c := json.loads(Path(file).read_text(encoding="utf-8")))
            sys.stdout.write(f"{file}: gap {c['objective'] / c['bound'] - 1:.3%}\n")
        except Wrong as wrong:
            failed = 1
            sys.stdout.write(f"{file}: WRONG: {wrong}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
