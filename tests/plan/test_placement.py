"""The inner problem against brute force that knows nothing of how it is solved."""

import random
from itertools import product

import pytest

from telechat_moe.tools.plan.placement import (
    Group,
    NoPlacement,
    Option,
    Problem,
    Solution,
    solve,
    stage_memory,
    step_weights,
)


def _options(rng: random.Random, number: int) -> tuple[Option, ...]:
    return tuple(
        Option(
            name=str(i),
            time=rng.randint(1, 12),
            kept=rng.randint(0, 6),
            working=rng.choice([0, 0, 0, 3]),
        )
        for i in range(number)
    )


def _random(rng: random.Random) -> Problem:
    stages, chunks = rng.choice([(1, 1), (2, 1), (3, 1), (2, 2), (1, 2), (4, 1)])
    total = stages * chunks
    shape = rng.choice(["loop", "v"])
    place = [
        c % stages if shape == "loop" or c // stages % 2 == 0 else stages - 1 - c % stages
        for c in range(total)
    ]
    groups = [
        Group(
            name="bulk",
            count=rng.randint(max(1, total - 2), 5),
            states=rng.randint(0, 4),
            options=_options(rng, rng.choice([1, 2, 3])),
        )
    ]
    if rng.random() < 0.5:
        groups.insert(
            0,
            Group(
                name="dense",
                count=1,
                states=rng.randint(0, 4),
                options=_options(rng, rng.choice([1, 2])),
            ),
        )
    if rng.random() < 0.4:
        groups.append(
            Group(
                name="mtp",
                count=1,
                states=rng.randint(0, 4),
                options=_options(rng, 1),
                layer=rng.random() < 0.3,
                last=rng.random() < 0.5,
            )
        )
    a, b = rng.choice([(1, 0), (1, 1), (7, 1), (0, 1), step_weights(rng.randint(1, 6), chunks)])
    return Problem(
        groups=tuple(groups),
        stage_of_chunk=tuple(place),
        in_flight=tuple(rng.randint(1, 4) for _ in range(total)),
        memory=tuple(rng.randint(8, 60) for _ in range(stages)),
        fixed_time=tuple(rng.randint(0, 5) for _ in range(stages)),
        fixed_memory=tuple(rng.randint(0, 5) for _ in range(stages)),
        fixed_working=rng.choice([(), tuple(rng.randint(0, 4) for _ in range(stages))]),
        max_weight=a,
        sum_weight=b,
        least=rng.choice([(), (0,) * total, (1,) * total]),
        spread=rng.choice([0, 1, 1, 9]),
        fewest=rng.choice([(), (), tuple(rng.randint(0, 2) for _ in range(stages))]),
        most=rng.choice([(), (), tuple(rng.randint(0, 4) for _ in range(stages))]),
    )


def _sequences(problem: Problem):
    """Yield the chunk of every item, rising along the model."""
    number = sum(g.count for g in problem.groups)
    chunks = len(problem.stage_of_chunk)

    def rising(left: int, low: int):
        if not left:
            yield ()
            return
        for c in range(low, chunks):
            for rest in rising(left - 1, c):
                yield (c, *rest)

    yield from rising(number, 0)


def brute_force(problem: Problem) -> int | None:
    """Every sequence of chunks, every option of every item."""
    kinds = [g for g, group in enumerate(problem.groups) for _ in range(group.count)]
    chunks, best = len(problem.stage_of_chunk), None
    lowest = problem.least or tuple(int(0 < c < chunks - 1) for c in range(chunks))
    for at in _sequences(problem):
        layers, bulk = [0] * chunks, [0] * problem.stages
        for c, g in zip(at, kinds, strict=True):
            layers[c] += problem.groups[g].layer
            bulk[problem.stage_of_chunk[c]] += g == problem.bulk
        if any(n < low for n, low in zip(layers, lowest, strict=True)):
            continue
        if problem.fewest and any(n < m for n, m in zip(bulk, problem.fewest, strict=True)):
            continue
        if problem.most and any(n > m for n, m in zip(bulk, problem.most, strict=True)):
            continue
        if any(problem.groups[g].last and c != chunks - 1 for c, g in zip(at, kinds, strict=True)):
            continue
        if not all(
            _even(problem, [c for c in range(chunks) if problem.stage_of_chunk[c] == s], layers)
            for s in range(problem.stages)
        ):
            continue
        times = []
        for s in range(problem.stages):
            own = [
                (problem.groups[g], c)
                for c, g in zip(at, kinds, strict=True)
                if problem.stage_of_chunk[c] == s
            ]
            took = [
                problem.fixed_time[s] + sum(o.time for o in chosen)
                for chosen in product(*(g.options for g, _ in own))
                if problem.fixed_memory[s]
                + sum(
                    g.states + problem.in_flight[c] * o.kept
                    for (g, c), o in zip(own, chosen, strict=True)
                )
                + max([*(problem.fixed_working[s : s + 1]), 0, *(o.working for o in chosen)])
                <= problem.memory[s]
            ]
            if not took:
                break
            times.append(min(took))
        else:
            value = problem.max_weight * max(times) + problem.sum_weight * sum(times)
            best = value if best is None else min(best, value)
    return best


def _even(problem: Problem, own: list[int], layers: list[int]) -> bool:
    top, edge = max(layers[c] for c in own), (0, len(layers) - 1)
    return len(own) == 1 or all(layers[c] >= top - problem.spread for c in own if c not in edge)


def _agree(problem: Problem) -> bool:
    found, expected = solve(problem), brute_force(problem)
    if expected is None:
        assert isinstance(found, NoPlacement)
        return False
    assert isinstance(found, Solution)
    assert (found.objective, found.bound) == (expected, expected)
    assert [stage_memory(problem, s, found.items) for s in range(problem.stages)] == list(
        found.stage_memory
    )
    assert all(m <= cap for m, cap in zip(found.stage_memory, problem.memory, strict=True))
    return True


def test_brute_force_agrees() -> None:
    rng = random.Random(7)
    solved = sum(_agree(_random(rng)) for _ in range(400))
    assert solved > 100


@pytest.mark.slow
def test_brute_force_agrees_on_5000() -> None:
    """`pytest -m slow tests/plan/test_placement.py`."""
    rng = random.Random(20261121)
    assert sum(_agree(_random(rng)) for _ in range(5000)) > 1000
