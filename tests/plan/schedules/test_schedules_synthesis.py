"""The synthesiser and the lower bound: the stated targets, published schedules, exhaustive search, random cases."""

import itertools
import json

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.report.schedule import ScheduleRequest, find, ideal_bubble
from telechat_moe.tools.plan.schedules.bounds import Rules, lower_bound
from telechat_moe.tools.plan.schedules.program import OpKind, Program, Times, v_route
from telechat_moe.tools.plan.schedules.published import GENERATORS, allowed, generate, merge
from telechat_moe.tools.plan.schedules.simulate import check, simulate
from telechat_moe.tools.plan.schedules.synthesise import synthesise

QUICK = 50_000


@pytest.mark.parametrize(
    ("chunks", "most", "bound"), [(2, 0.040, 7.5 / 199.5), (4, 0.023, 3.75 / 195.75)]
)
def test_16_stages_64_micro_batches_under_the_memory_of_1f1b(chunks, most, bound):
    synthesis = find(ScheduleRequest(stages=16, micro_batches=64, chunks=chunks, times=(1, 1, 1)))
    assert synthesis.result.bubble <= most
    assert ideal_bubble(synthesis) == pytest.approx(bound, abs=1e-12)
    assert synthesis.result.peak.max() <= 16 * (1 + 1e-9)


@pytest.mark.parametrize(("stages", "chunks"), [(16, 2), (8, 2)])
def test_unequal_layers_come_within_a_tenth_of_the_bound(stages, chunks):
    """A multi-token-prediction block 2.5 times a layer and the head on the last chunk, a lighter first one."""
    layers = np.full(stages * chunks, 2.0)
    layers[-1] += 2.5 + 0.7
    layers[0] -= 0.3
    times = Times(layers, 1.2 * layers, 0.8 * layers, 0.04)
    s = synthesise(times, stages, 64, effort=3_000_000)
    busy = 64 * 3 * layers.sum()
    assert s.result.bubble <= 1.1 * (1 - busy / (stages * s.bound.makespan))
    assert s.gap <= 0.02


def random_case(rng):
    """P, m, times (unequal or not, with and without overlap), memory, rules."""
    stages = int(rng.choice([1, 2, 2, 3, 4, 4, 6, 8]))
    chunks = int(rng.choice([1, 2, 2, 3, 4]))
    micro_batches = int(rng.choice([1, 3, stages, 2 * stages, 3 * stages, 4 * stages]))
    n = stages * chunks
    spread = rng.choice([0.0, 0.0, 0.3, 1.5])
    forward, dx, dw = (
        rng.uniform(0.2, 3) * (1 + spread * rng.random(n)) / chunks for _ in range(3)
    )
    talk = rng.choice([0.0, 0.0, 0.4]) * rng.random()
    times = Times(
        forward,
        dx,
        dw,
        float(rng.choice([0.0, 0.0, 0.05, 0.5])) * float(forward.mean()),
        backward=dx + dw * rng.choice([1.0, 1.0, 0.9]),
        forward_exposed=forward * talk,
        backward_exposed=dx * talk,
        kept_for_w=float(rng.choice([0.0, 0.5, 1.0, 1.0])),
    )
    memory = max(1.0, stages * float(rng.choice([0.4, 0.6, 0.8, 1.0, 1.0, 1.5, 2.0, 4.0])))
    rules = Rules(split=bool(rng.random() < 0.85), pairs=bool(rng.random() < 0.4))
    return times, stages, micro_batches, memory, rules


def compare(seed):
    """Synthesise one random case; return makespan / bound, and best published / makespan (or None)."""
    times, stages, micro_batches, memory, rules = random_case(np.random.default_rng([7, seed]))
    s = synthesise(times, stages, micro_batches, memory, rules, effort=QUICK, seed=seed)
    check(s.program)
    again = simulate(s.program, s.times)
    assert again.makespan == s.result.makespan
    assert (again.peak <= memory * (1 + 1e-9)).all()
    kinds = {op.kind for ops in s.program.ops for op in ops}
    if not rules.split:
        assert not kinds & {OpKind.D, OpKind.W, OpKind.FD}
    assert again.makespan >= s.bound.makespan * (1 - 1e-9)
    published = [k.result.makespan for k in s.table if k.fits and k.copies == 1]
    if published:
        assert again.makespan <= min(published) * (1 + 1e-12), seed
    return s.gap, min(published) / again.makespan if published else None


def test_the_table_has_every_published_schedule_that_fits():
    """Against each generator called here: nothing is left out of what a synthesis is compared with."""
    for seed in range(40):
        times, stages, micro_batches, memory, rules = random_case(np.random.default_rng([7, seed]))
        s = synthesise(times, stages, micro_batches, memory, rules, effort=QUICK, seed=seed)
        names = {(k.program.name, k.chunks) for k in s.table if k.fits}
        filled, finest = allowed(times.full(stages), rules), len(times.forward) // stages
        for name, chunks in itertools.product(GENERATORS, range(1, finest + 1)):
            if finest % chunks or (name, chunks) == ("interleaved", 1):
                continue
            try:
                program = generate(name, stages, micro_batches, chunks)
            except BadInputError:
                continue
            split = any(
                op.kind in (OpKind.D, OpKind.W, OpKind.FD) for ops in program.ops for op in ops
            )
            result = simulate(program, merge(filled, stages * chunks))
            fits = (result.peak <= memory * (1 + 1e-9)).all() and (rules.split or not split)
            assert ((program.name, chunks) in names) == fits, (seed, name, chunks)


def test_never_worse_than_the_published_under_the_same_memory():
    gaps, gains = zip(*(compare(seed) for seed in range(200)), strict=True)
    assert np.mean(gaps) < 0.12
    assert np.mean([g for g in gains if g]) > 1.01


@pytest.mark.slow  # python -m pytest -m slow tests/plan/schedules/test_schedules_synthesis.py
@pytest.mark.parametrize("block", range(100))
def test_never_worse_than_the_published_on_10000_cases(block):
    for seed in range(100 * block, 100 * block + 100):
        compare(seed)


def exhaustive(times, route, stages, micro_batches, memory, split):
    """The least makespan of all semi-active schedules, by search over every order (for a handful of operations)."""
    t = times.full(stages)
    n = len(route)
    kinds = "FDW" if split else "FB"
    last = {"F": t.forward, "D": t.dx, "W": t.dw, "B": t.backward}
    kept = t.kept_for_w if split else 0.0
    best = [np.inf]
    goal = len(kinds) * n * micro_batches

    def ready(done, kind, c, m):
        back = "D" if split else "B"
        before = {
            "F": [("F", c - 1, m)] if c else [],
            "W": [("D", c, m)],
        }.get(kind, [("F", c, m)] + ([(back, c + 1, m)] if c + 1 < n else []))
        if any(b not in done for b in before):
            return None
        return max(
            [done[b] + (t.comm if route[b[1]] != route[c] else 0.0) for b in before], default=0.0
        )

    def go(done, clock, held, left, now):
        if len(done) == goal:
            best[0] = min(best[0], max(clock))
            return
        if max(c + w for c, w in zip(clock, left, strict=True)) >= best[0]:
            return
        for kind, c, m in itertools.product(kinds, range(n), range(micro_batches)):
            if (kind, c, m) in done:
                continue
            if kind == "F" and c == 0 and m and ("F", 0, m - 1) not in done:
                continue  # micro-batches are alike: they enter in order
            at = ready(done, kind, c, m)
            s = route[c]
            if at is None or (kind == "F" and held[s] + t.activation[c] > memory + 1e-9):
                continue
            start = max(at, clock[s])
            if start < now:
                continue  # operations are added in the order of their starts
            change = {"F": 1.0, "D": kept - 1.0, "W": -kept, "B": -1.0}[kind] * t.activation[c]
            clock2, held2, left2 = list(clock), list(held), list(left)
            clock2[s], held2[s] = start + last[kind][c], held[s] + change
            left2[s] -= last[kind][c]
            go({**done, (kind, c, m): clock2[s]}, clock2, held2, left2, start)

    left = [0.0] * stages
    for kind, c in itertools.product(kinds, range(n)):
        left[route[c]] += micro_batches * last[kind][c]
    go({}, [0.0] * stages, [0.0] * stages, left, 0.0)
    return best[0]


@pytest.mark.parametrize("seed", range(12))
def test_bound_and_synthesis_enclose_the_optimum(seed):
    rng = np.random.default_rng(seed)
    stages, chunks, micro_batches, split = [
        (2, 1, 2, True),
        (2, 1, 3, False),
        (2, 2, 1, True),
        (3, 1, 2, False),
    ][seed % 4]
    n = stages * chunks
    times = Times(
        *(rng.integers(1, 5, n).astype(float) for _ in range(3)),
        float(rng.choice([0.0, 1.0])),
        kept_for_w=float(rng.choice([0.0, 1.0])),
    )
    memory = float(rng.choice([1.0, 2.0]))
    rules = Rules(split=split)
    route = v_route(stages, chunks)
    optimum = exhaustive(times, route, stages, micro_batches, memory, split)
    bound = lower_bound(
        times.full(stages), route, stages, micro_batches, np.full(stages, memory), rules
    )
    s = synthesise(times, stages, micro_batches, memory, rules, placements=("v",), effort=QUICK)
    assert bound.makespan <= optimum + 1e-9
    assert s.result.makespan >= optimum - 1e-9
    assert s.result.makespan <= optimum * 1.1 + 1e-9


@pytest.mark.parametrize("talk", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("dw", [0.1, 0.3, 2.0])
def test_the_bound_holds_where_a_forward_hides_a_whole_backward(talk, dw):
    """FB pairs of a long forward and a short D save more than FD pairs; the bound must know it."""
    one = np.ones(4)
    times = Times(
        one, 0.3 * one, dw * one, forward_exposed=talk * one, backward_exposed=talk * 0.3 * one
    ).full(2)
    room, rules = np.full(2, 99.0), Rules(pairs=True)
    for name in ("1f1b-overlap", "1f1b-overlap-full", "dualpipev"):
        program = generate(name, 2, 8, 2)
        bound = lower_bound(times, program.routes[0], 2, 8, room, rules)
        assert bound.makespan <= simulate(program, times).makespan * (1 + 1e-12), name


def test_less_memory_and_more_communication_never_help_the_bound():
    times = Times.even(8, 2)
    bounds = [
        lower_bound(times.full(8), v_route(8, 2), 8, 32, np.full(8, cap), Rules()).makespan
        for cap in (2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
    ]
    assert bounds == sorted(bounds, reverse=True)
    slow = Times.even(8, 2, comm=1.0)
    assert (
        lower_bound(slow.full(8), v_route(8, 2), 8, 32, np.full(8, 8.0), Rules()).makespan
        > bounds[-2]
    )


def test_the_same_arguments_give_the_same_schedule():
    args = (Times.even(4, 2, 1, 1.3, 0.6), 4, 12, 3.0)
    first, second = (synthesise(*args, effort=QUICK, seed=3) for _ in range(2))
    assert first.program == second.program


def test_pairs_hide_communication_and_respect_memory():
    talk = np.full(8, 0.2)
    times = Times(*(np.full(8, 0.5) for _ in range(3)), forward_exposed=talk, backward_exposed=talk)
    alone = synthesise(times, 4, 16, effort=QUICK)
    pairs = synthesise(times, 4, 16, rules=Rules(pairs=True), effort=QUICK)
    assert pairs.result.makespan < alone.result.makespan
    assert any(op.kind is OpKind.FD for ops in pairs.program.ops for op in ops)


def test_a_fused_backward_is_used_where_it_is_shorter():
    one = np.ones(4)
    times = Times(one, one, one, backward=1.5 * one)
    s = synthesise(
        times, 2, 1, placements=("v",), effort=QUICK
    )  # no published one on this placement
    assert s.source == "synthesised"
    # stage 1 ends at 4 + 1 + 4 in any order; on stage 0 nothing waits for the last D
    assert s.result.makespan == 9
    assert any(op.kind is OpKind.B for ops in s.program.ops for op in ops)


def test_the_verb_prints_bubble_bound_gap_and_writes_program_and_page(capsys, tmp_path):
    files = [tmp_path / "s.json", tmp_path / "s.html"]
    arguments = "plan schedule --stages 4 --micro-batches 8 --chunks 2 --scale 7=2.5 --effort 1e5"
    assert main([*arguments.split(), "--json", str(files[0]), "--html", str(files[1])]) == 0
    printed = capsys.readouterr().out
    for word in ("bubble ", "proven lower bound", "gap ", "zb-v", "dualpipev", "deadlock: none"):
        assert word in printed
    data = json.loads(files[0].read_text())
    program = Program.from_json(data["program"])
    scale = np.array([1.0] * 7 + [2.5]) / 2
    result = simulate(program, Times(scale, scale, scale, activation=scale))
    assert result.makespan == data["makespan"]
    assert f"{result.bubble:.2%}" in printed
    page = files[1].read_text()
    shown = json.loads(page.split('id="data" type="application/json">')[1].split("</script>")[0])
    assert [len(row) for row in shown["boxes"]] == [len(ops) for ops in program.ops]
    assert not shown["units"]
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_verb_refuses_what_makes_no_schedule(capsys):
    base = ["plan", "schedule", "--stages", "4", "--micro-batches", "8"]
    assert main([*base, "--times", "1,1"]) == 2
    assert main([*base, "--scale", "x=1"]) == 2
    for odd in (
        "times=nan,1,1",
        "times=1e300,1,1",
        "backward=nan",
        "memory=nan",
        "effort=nan",
        "effort=inf",
        "seed=-1",
    ):
        assert main([*base, *f"--{odd}".split("=")]) == 3, odd
    assert main([*base, "--memory", "0.1"]) == 3
    assert "give more memory" in capsys.readouterr().err


def test_refusals():
    with pytest.raises(BadInputError, match="3 chunks, 2 stages"):
        synthesise(Times(*np.ones((3, 3))), 2, 4)
    with pytest.raises(BadInputError, match=r"may hold 0\.5 activations"):
        synthesise(Times.even(2, 2), 2, 4, memory=0.5)
    with pytest.raises(BadInputError, match="expected a chunk from 0 to 3"):
        find(ScheduleRequest(stages=2, micro_batches=4, chunks=2, times=(1, 1, 1), scale={4: 2.0}))
