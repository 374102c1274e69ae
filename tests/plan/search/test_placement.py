"""The inner problem against brute force: every placement, its schedule simulated event by event."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import pytest

from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import make_program
from telechat_moe.tools.plan.schedules.program import OpKind, Times
from telechat_moe.tools.plan.schedules.simulate import makes, needs, simulate
from telechat_moe.tools.plan.search.placement import PathPool, PlacementAnswer, PlacementSearch
from telechat_moe.tools.plan.search.placement_problem import LayerGroup, PlacementProblem, StepTail

MS = 10**9
"""Picoseconds."""


def random_problem(rng: random.Random, hidden: bool = True) -> PlacementProblem:
    """Return a small instance; without `hidden` no reduction hides behind the backward pass."""
    schedule, stages, micro_batches, chunks = rng.choice(
        [
            ("1f1b", 1, 3, 1),
            ("1f1b", 2, 2, 1),
            ("1f1b", 3, 4, 1),
            ("1f1b", 3, 7, 1),
            ("interleaved", 2, 2, 2),
            ("interleaved", 2, 4, 2),
            ("interleaved", 2, 2, 3),
            ("interleaved", 3, 3, 2),
            ("zb-v", 2, 4, 2),
        ]
    )
    number = stages * chunks

    def bytes_of_stages(limit: int) -> tuple[int, ...]:
        return tuple(rng.randint(0, limit) for _ in range(stages))

    def layers(count: int) -> LayerGroup:
        activations = bytes_of_stages(8)
        w = rng.randint(0, 4) if schedule == "zb-v" else 0
        return LayerGroup(
            count=count,
            times=(rng.randint(1, 9) * MS, rng.randint(1, 12) * MS, w * MS),
            states=rng.randint(0, 4),
            activations=activations,
            inputs=tuple(rng.randint(0, k) for k in activations),
            recompute_time=rng.randint(0, 9) * MS,
            working=rng.randint(0, 4),
            weights=(rng.randint(0, 5), rng.randint(0, 5)),
        )

    kinds = [layers(rng.randint(max(1, number - 1), 6))]
    if rng.random() < 0.5:
        kinds.insert(rng.randrange(2), layers(rng.randint(1, min(2, kinds[0].count))))
    reduce = (rng.random() * 2e-3, rng.random() * 2e-3)
    share = rng.choice([1.0, 0.3, 0.0]) if hidden else 1.0
    times = [layer.times for layer in kinds]
    backward_share = max(
        (b + w + g.recompute_time) / (f + b + w + g.recompute_time)
        for g, (f, b, w) in zip(kinds, times, strict=True)
    )
    hides, late = (0.0, 1.0), (backward_share, 12 * MS * 1e-12 + 3 * MS * 1e-12)
    if hidden and rng.random() < 0.3:  # as ZeRO 2 and 3
        often = micro_batches * (1 - share)
        hides, late = (often, often), (often, 0.0)
    return PlacementProblem(
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        layers=tuple(kinds),
        first=(rng.randint(0, 3) * MS, rng.randint(0, 3) * MS, 0),
        last=(rng.randint(0, 12) * MS, rng.randint(0, 12) * MS, 0),
        send=rng.choice([0, 1, 3]) * MS,
        memory=tuple(rng.randint(6, 60) for _ in range(stages)),
        buffer=bytes_of_stages(4),
        choice=rng.random() < 0.4,
        working=rng.randint(0, 2),
        weights=(bytes_of_stages(6), bytes_of_stages(6)),
        limits=tuple(rng.randint(c in range(1, number - 1), 3) for c in range(number))
        if rng.random() < 0.2
        else (),
        tail=StepTail(
            base=rng.random() * 1e-2,
            start=rng.random() * 1e-2,
            reduce=reduce,
            update=(rng.random() * 1e-3, rng.random() * 1e-3),
            exposed=share,
            overlap_limit=late,
            overlap_weights=hides,
        ),
    )  # fmt: skip


Placement = tuple[tuple[int, ...], tuple[int, ...]]


def placements(p: PlacementProblem) -> Iterator[Placement]:
    """Yield the layers of every chunk, and how many of them are recomputed."""
    number, total = p.stages * p.chunks, sum(g.count for g in p.layers)

    def divided(left: int, chunk: int) -> Iterator[tuple[int, ...]]:
        limit = min(left, p.limits[chunk]) if p.limits else left
        if chunk == number - 1:
            yield from [(left,)] * (limit == left)
            return
        for count in range(1 if chunk else 0, limit + 1):
            yield from ((count, *more) for more in divided(left - count, chunk + 1))

    for counts in divided(total, 0):
        ranges = [range(n + 1 if p.choice else 1) for n in counts]
        for recomputed in product(*ranges):
            yield counts, recomputed


def scored(
    p: PlacementProblem, counts: tuple[int, ...], recomputed: tuple[int, ...]
) -> float | None:
    """Return the step of a placement by the definitions alone; None: it does not fit."""
    number, layout = p.stages * p.chunks, Layout(
        pp=p.stages, vpp=p.chunks, micro_batches=p.micro_batches, schedule=p.schedule  # type: ignore[arg-type]
    )  # fmt: skip
    program = make_program(layout)
    model = [g for g in p.layers for _ in range(g.count)]
    times = [[0.0, 0.0, 0.0] for _ in range(number)]
    used, work = [0] * p.stages, [0] * p.stages
    weights = [list(w) for w in p.weights]
    at = 0
    for c, (n, recomputed_here) in enumerate(zip(counts, recomputed, strict=True)):
        stage = program.stage(c)
        for i, layer in enumerate(model[at : at + n]):
            for kind in range(3):
                times[c][kind] += layer.times[kind]
            times[c][1] += layer.recompute_time * (i < recomputed_here)
            used[stage] += (
                layer.states + (layer.inputs if i < recomputed_here else layer.activations)[stage]
            )
            work[stage] = max(work[stage], p.working, layer.working * (i < recomputed_here))
            for w in range(2):
                weights[w][stage] += layer.weights[w]
        at += n
    for kind in range(3):
        times[0][kind] += p.first[kind]
        times[-1][kind] += p.last[kind]
    if any(h + max(w, b) > m for h, w, b, m in zip(used, work, p.buffer, p.memory, strict=True)):
        return None
    f, b, w = (np.array(t) for t in zip(*times, strict=True))
    makespan = simulate(program, Times(f, b, w, comm=p.send)).makespan * 1e-12
    backward = [0.0] * p.stages
    for c in range(number):
        hidden = p.tail.overlap_weights[0] * f[c] + p.tail.overlap_weights[1] * (b[c] + w[c])
        backward[program.stage(c)] += hidden * 1e-12
    largest = [max(w) for w in weights]
    r = p.tail
    reduction = r.start + sum(x * y for x, y in zip(r.reduce, largest, strict=True))
    shown = max(reduction - max(backward), r.exposed * reduction)
    return makespan + shown + sum(x * y for x, y in zip(r.update, largest, strict=True)) + r.base


@lru_cache
def waits(
    schedule: str, stages: int, micro_batches: int, chunks: int
) -> list[tuple[OpKind, int, int, list[tuple[int, bool]]]]:
    """Return the operations of a schedule: kind, chunk, stage, and which they wait for, with whether it is on another stage.

    Each after those.
    """
    layout = Layout(pp=stages, vpp=chunks, micro_batches=micro_batches, schedule=schedule)  # type: ignore[arg-type]
    program, found, made = make_program(layout), [], {}
    at, last = [0] * stages, [-1] * stages
    while any(at[s] < len(ops) for s, ops in enumerate(program.ops)):
        for s, ops in enumerate(program.ops):
            while at[s] < len(ops):
                op = ops[at[s]]
                keys = needs(op, program.chunks)
                if any(key not in made for key in keys):
                    break
                before = [(made[k], program.stage(k[1]) != s) for k in keys]
                before += [(last[s], False)] * (at[s] > 0)
                made |= dict.fromkeys(makes(op), len(found))
                last[s], at[s] = len(found), at[s] + 1
                found.append((op.kind, op.chunk, s, before))
    return found


def steps_of(p: PlacementProblem) -> dict[Placement, float | None]:
    """Return the step of every placement, `scored` for all at once; None: it does not fit."""
    ways, number = list(placements(p)), p.stages * p.chunks
    if not ways:
        return {}
    counts, recomputed = np.array(ways).swapaxes(0, 1)  # [placements, chunks]
    ops = waits(p.schedule, p.stages, p.micro_batches, p.chunks)
    stage = np.zeros(number, dtype=int)
    for _, chunk, own, _ in ops:
        stage[chunk] = own
    on = np.eye(p.stages, dtype=int)[stage]
    first = np.clip(p.layers[0].count - (np.cumsum(counts, axis=1) - counts), 0, counts)
    both = [(first, np.minimum(recomputed, first))]
    both.append((counts - first, recomputed - both[0][1]))
    took = np.zeros((3, len(ways), number))
    used, weights = np.zeros((2, len(ways), p.stages)), np.array(p.weights)[:, None]
    used, work = used[0], np.where(counts @ on > 0, p.working, 0)
    for layer, (own, recomputed_here) in zip(p.layers, both, strict=False):
        took += np.array(layer.times)[:, None, None] * own
        took[1] += layer.recompute_time * recomputed_here
        used = used + (own - recomputed_here) @ on * (layer.states + np.array(layer.activations))
        used = used + recomputed_here @ on * (layer.states + np.array(layer.inputs))
        work = np.where(recomputed_here @ on > 0, np.maximum(work, layer.working), work)
        weights = weights + np.array(layer.weights)[:, None, None] * (own @ on)
    took[:, :, 0] += np.array(p.first)[:, None]
    took[:, :, -1] += np.array(p.last)[:, None]
    lasts = {OpKind.F: took[0], OpKind.B: took[1] + took[2], OpKind.D: took[1], OpKind.W: took[2]}
    end: list[np.ndarray] = []
    for kind, chunk, _, before in ops:
        begin = np.zeros(len(ways))
        for i, sent in before:
            begin = np.maximum(begin, end[i] + p.send * sent)
        end.append(begin + lasts[kind][:, chunk])
    largest, r = weights.max(axis=2), p.tail
    hidden = r.overlap_weights[0] * took[0] + r.overlap_weights[1] * (took[1] + took[2])
    backward = (hidden @ on).max(axis=1) * 1e-12
    reduction = r.start + np.array(r.reduce) @ largest
    shown = np.maximum(reduction - backward, r.exposed * reduction)
    step = np.max(end, axis=0) * 1e-12 + shown + np.array(r.update) @ largest + r.base
    fits = (used + np.maximum(work, p.buffer) <= p.memory).all(axis=1)
    return {way: float(s) if ok else None for way, s, ok in zip(ways, step, fits, strict=True)}


GAP = 1e-3


def solved(p: PlacementProblem) -> PlacementAnswer:
    """Return what is proven of a problem without a step to beat."""
    return PlacementSearch(p, PathPool(p.pipeline)).solve(math.inf, GAP)


def is_closed(answer: PlacementAnswer) -> bool:
    """Return whether the bound proves the best placement within the gap."""
    return answer.best is not None and answer.bound >= answer.best.seconds / (1 + GAP) * (1 - 1e-9)


def agree(p: PlacementProblem, rng: random.Random) -> bool:
    """Compare one instance with brute force; return whether it was closed."""
    answer = solved(p)
    all_steps = steps_of(p)
    for one in rng.sample(sorted(all_steps), min(3, len(all_steps))):
        step = scored(p, *one)
        assert all_steps[one] == (step and pytest.approx(step, rel=1e-12))
    steps = [s for s in all_steps.values() if s is not None]
    if not steps:
        assert answer.best is None
        return False
    assert answer.bound <= min(steps) * (1 + 1e-9)
    if answer.best is None:
        return False
    assert answer.best.seconds == pytest.approx(
        scored(p, answer.best.layers, answer.best.recomputed), rel=1e-9
    )
    assert answer.best.seconds >= min(steps) * (1 - 1e-9)
    if is_closed(answer):
        assert answer.best.seconds <= min(steps) * (1 + GAP)
    return is_closed(answer)


def test_brute_force_agrees() -> None:
    rng = random.Random(7)
    problems = [random_problem(rng) for _ in range(60)]
    possible = sum(any(s is not None for s in steps_of(p).values()) for p in problems)
    assert possible > 30
    assert sum(agree(p, rng) for p in problems) >= 0.95 * possible


def relaxed(p: PlacementProblem, rng: random.Random) -> Iterator[PlacementProblem]:
    """Yield what can only be faster: more memory, less to keep, to compute, to send, to reduce; recomputation allowed.

    Not a backward pass that hides reduction: where it is shorter, more of it shows.
    """

    def less(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(rng.randint(0, v) for v in values)

    yield replace(p, memory=tuple(m + rng.randint(0, 9) for m in p.memory))
    yield replace(p, buffer=less(p.buffer))
    yield replace(p, limits=tuple(most + rng.randint(0, 1) for most in p.limits))
    yield replace(p, send=rng.randint(0, p.send))
    yield replace(p, choice=True)
    yield replace(p, weights=(less(p.weights[0]), less(p.weights[1])))
    yield replace(p, tail=replace(p.tail, base=p.tail.base / 2, update=(0.0, p.tail.update[1])))
    yield replace(p, tail=replace(p.tail, start=p.tail.start / 2, reduce=(0.0, p.tail.reduce[1])))
    for g, layers in enumerate(p.layers):
        kept = less(layers.activations)
        entry = tuple(min(a, b) for a, b in zip(less(layers.inputs), kept, strict=True))
        changes = [{"activations": kept, "inputs": entry}, {"states": 0}]
        if p.tail.exposed == 1:
            changes += [{"times": less(layers.times)}, {"recompute_time": 0}]
        for change in changes:
            new = replace(layers, **change)
            yield replace(p, layers=(*p.layers[:g], new, *p.layers[g + 1 :]))


def test_more_of_anything_never_hurts() -> None:
    rng, fewer = random.Random(5), 0
    for _ in range(5):
        p = random_problem(rng, hidden=rng.random() < 0.5)
        before = solved(p)
        for q in relaxed(p, rng):
            after = solved(q)
            least = math.inf if before.best is None else before.best.seconds
            assert after.bound <= least * (1 + 1e-6)
            if after.best and is_closed(after):
                assert after.best.seconds <= least * (1 + GAP)
                fewer += after.best.seconds < least * (1 - 2 * GAP)
    assert fewer > 10


def test_a_target_below_the_best_is_proven_and_one_above_is_not() -> None:
    rng, checked = random.Random(8), 0
    for _ in range(30):
        p = random_problem(rng)
        steps = [s for s in steps_of(p).values() if s is not None]
        if not steps:
            continue
        least = min(steps)
        below = PlacementSearch(p, PathPool(p.pipeline)).solve(0.99 * least, GAP)
        assert below.bound <= 0.99 * least
        above = PlacementSearch(p, PathPool(p.pipeline)).solve(1.01 * least, GAP)
        assert above.bound <= least * (1 + 1e-9)
        checked += below.bound == 0.99 * least
    assert checked > 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_brute_force_agrees_on_1000(seed: int) -> None:
    rng = random.Random(20261121 + seed)
    assert sum(agree(random_problem(rng), rng) for _ in range(200)) > 120
