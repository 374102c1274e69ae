"""Programs, simulation, closed forms, cycle check: against naive code, published formulas and each other."""

import dataclasses
import math
from graphlib import CycleError, TopologicalSorter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_formulas import (
    FORMULAS,
    Chunk,
    closed_form,
    idle_share,
    measured,
)

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.bounds import Rules
from telechat_moe.tools.plan.schedules.program import Op, OpKind, Program, Times
from telechat_moe.tools.plan.schedules.published import GENERATORS, generate, known, merge
from telechat_moe.tools.plan.schedules.simulate import check, makes, needs, simulate

CHUNKS = {"zb-v": (2,), "dualpipev": (2,), "interleaved": (2, 3), "1f1b-overlap": (1, 2), "1f1b-overlap-full": (2,)}  # fmt: skip


def every_program(stages, micro_batches):
    for name in GENERATORS:
        for chunks in CHUNKS.get(name, (1,)):
            try:
                yield chunks, generate(name, stages, micro_batches, chunks)
            except BadInputError:
                continue


def naive_duration(op, t):
    parts = op.parts()
    if len(parts) == 1:
        kind, c, _ = parts[0]
        return {"F": t.forward, "B": t.backward, "D": t.dx, "W": t.dw}[kind.value][c]
    (_, f, _), (kind, b, _) = parts
    backward = t.backward[b] if kind is OpKind.B else t.dx[b]
    compute = t.forward[f] - t.forward_exposed[f] + backward - t.backward_exposed[b]
    talk = t.forward_exposed[f] + t.backward_exposed[b]
    return max(t.forward[f], backward, compute, talk)


def by_rounds(program, times):
    """Start of each operation, by repeating all recurrences until nothing changes (Bellman-Ford)."""
    t = times.full(program.stages)
    last = {op.parts()[k]: (s, i) for s, ops in enumerate(program.ops) for i, op in enumerate(ops) for k in range(len(op.parts()))}  # fmt: skip

    end = [np.zeros(len(ops)) for ops in program.ops]
    for _ in range(10_000):
        before = [e.copy() for e in end]
        for s, ops in enumerate(program.ops):
            for i, op in enumerate(ops):
                start = end[s][i - 1] if i else 0.0
                for kind, c, m in op.parts():
                    want = []
                    if kind is OpKind.F and c:
                        want = [(OpKind.F, c - 1, m)]
                    if kind in (OpKind.B, OpKind.D):
                        want = [(OpKind.F, c, m)] + [(k, c + 1, m) for k in (OpKind.B, OpKind.D) if c + 1 < program.chunks]  # fmt: skip
                    if kind is OpKind.W:
                        want = [(OpKind.D, c, m)]
                    for w in want:
                        if w in last:
                            other, j = last[w]
                            start = max(start, end[other][j] + (t.comm if other != s else 0))
                end[s][i] = start + naive_duration(op, t)
        if all(np.array_equal(a, b) for a, b in zip(before, end, strict=True)):
            return end
    raise AssertionError("no end")


def random_times(draw, chunks):
    values = st.floats(0.1, 4).map(lambda x: round(x, 2))
    arrays = [np.array(draw(st.lists(values, min_size=chunks, max_size=chunks))) for _ in range(3)]
    share = draw(st.sampled_from([0.0, 0.3]))
    return Times(
        *arrays,
        draw(st.sampled_from([0.0, 0.25, 2.0])),
        forward_exposed=arrays[0] * share,
        backward_exposed=arrays[1] * share,
        kept_for_w=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


@st.composite
def programs_and_times(draw):
    stages = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(1, 9))
    choice = draw(st.sampled_from(list(every_program(stages, micro_batches))))
    return choice[1], random_times(draw, choice[1].chunks)


@settings(max_examples=60, deadline=None)
@given(programs_and_times())
def test_simulation_is_the_least_solution_of_the_recurrences(case):
    program, times = case
    result = simulate(program, times)
    for solution, naive in zip(result.end, by_rounds(program, times), strict=True):
        np.testing.assert_allclose(solution, naive, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(programs_and_times())
def test_no_two_operations_of_a_stage_at_once_and_idle_adds_up(case):
    program, times = case
    result = simulate(program, times)
    for start, end in zip(result.start, result.end, strict=True):
        assert (start[1:] >= end[:-1]).all()
    busy = sum(float((e - s).sum()) for s, e in zip(result.start, result.end, strict=True))
    assert math.isclose(result.bubble, 1 - busy / (program.stages * result.makespan), abs_tol=1e-12)


@settings(max_examples=40, deadline=None)
@given(programs_and_times())
def test_peak_memory_is_that_of_a_count_over_time(case):
    program, times = case
    result = simulate(program, times)
    t = times.full(program.stages)
    for s, ops in enumerate(program.ops):
        events = []  # (time, frees first, change)
        for op, start, end in zip(ops, result.start[s], result.end[s], strict=True):
            for kind, c, _ in op.parts():
                a = t.activation[c]
                if kind is OpKind.F:
                    events.append((start, 1, a))
                else:
                    share = {OpKind.B: 1, OpKind.D: 1 - t.kept_for_w, OpKind.W: t.kept_for_w}[kind]
                    events.append((end, 0, -a * share))
        peak = np.cumsum([e[2] for e in sorted(events)]).max()
        assert math.isclose(result.peak[s], peak, rel_tol=1e-9)
        assert abs(sum(e[2] for e in events)) < 1e-9


TIMES = (Chunk(), Chunk(2.0, 2.0, 1.0), Chunk(1.0, 1.5, 0.75), Chunk(1.0, 1.0, 0.5, 2.0), Chunk(0.3, 0.3, 0.1))  # fmt: skip


def formula_case(name, stages, micro_batches, chunks, chunk):
    """Simulate one case; return the difference from the closed form."""
    n = stages * chunks
    one = np.ones(n)
    if chunk.overlapped is None:
        talk = (0 * one, 0 * one)
    else:  # what F and B hide for each other
        hidden = chunk.forward + chunk.backward - chunk.both
        talk = (one * hidden, 0 * one)
    times = Times(one * chunk.forward, one * chunk.dx, one * chunk.dw, 0.0, forward_exposed=talk[0], backward_exposed=talk[1])  # fmt: skip
    result = simulate(generate(name, stages, micro_batches, chunks), times)
    expected = closed_form(name, stages, micro_batches, chunks, chunk)
    return abs(measured(result, FORMULAS[name].convention) - expected) / max(expected, 1.0)


def formula_cases(stages, micro_batches):
    for name, formula in FORMULAS.items():
        for chunks in CHUNKS.get(name, (1,)):
            for chunk in TIMES:
                if name not in ("dualpipe", "dualpipev") and chunk.overlapped is not None:
                    continue
                if formula.holds(stages, micro_batches, chunks, chunk):
                    yield name, stages, micro_batches, chunks, chunk


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
def test_closed_forms_small(stages):
    cases = [c for m in (1, 2, stages, 2 * stages - 1, 2 * stages, 3 * stages + 1, 4 * stages) for c in formula_cases(stages, m)]  # fmt: skip
    assert len({c[0] for c in cases}) >= (7 if stages % 2 else 8)
    for case in cases:
        assert formula_case(*case) <= 1e-9, case


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 24), st.integers(1, 60), st.integers(0, 1000))
def test_closed_forms_anywhere(stages, micro_batches, which):
    cases = list(formula_cases(stages, micro_batches))
    case = cases[which % len(cases)]
    assert formula_case(*case) <= 1e-9, case


@pytest.mark.slow  # python -m pytest -m slow tests/plan/schedules/test_schedules.py -k up_to: every P, edges and some of m
@pytest.mark.parametrize("stages", range(1, 65))
def test_closed_forms_up_to_64_stages_and_512_micro_batches(stages):
    edges = {1, 2, stages, 2 * stages - 1, 2 * stages, 2 * stages + 1, 511, 512}
    drawn = np.random.default_rng(stages).integers(1, 513, 3).tolist()
    multiples = {stages * k for k in (1, 3, 512 // stages)}
    rng = np.random.default_rng(stages)
    for m in sorted(edges | set(drawn) | multiples):
        by_name = {}
        for case in formula_cases(stages, m):
            by_name.setdefault(case[0], []).append(case)
        for cases in by_name.values():
            case = cases[rng.integers(len(cases))]
            assert formula_case(*case) <= 1e-9, case


def test_a_closed_form_is_refused_where_it_does_not_hold():
    with pytest.raises(BadInputError, match="m a multiple of P"):
        closed_form("interleaved", 4, 6, 2)


def test_pangu():
    """Pangu Ultra MoE's bubbles: 16 stages, 64 micro-batches, without and with two chunks a stage."""
    plain = simulate(generate("1f1b", 16, 64, 1), Times.even(16, 1))
    assert plain.bubble == pytest.approx(15 / 79, abs=1e-12)
    assert math.floor(plain.bubble * 1e4) / 100 == 18.98
    virtual = simulate(generate("interleaved", 16, 64, 2), Times.even(16, 2))
    assert virtual.bubble == pytest.approx(7.5 / 71.5, abs=1e-12)
    assert round(virtual.bubble * 100, 2) == 10.49
    idle = closed_form("interleaved", 16, 64, 2, Chunk(0.5, 0.5, 0.5))
    assert idle_share(idle, 64, 2, Chunk(0.5, 0.5, 0.5)) == pytest.approx(virtual.bubble, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "chunks", "peak", "least"),
    [
        ("gpipe", 1, 24, 24),
        ("1f1b", 1, 8, 1),
        ("interleaved", 2, 8 * (1 + 7 / 16), 4.5),
        ("interleaved", 4, 8 * (1 + 7 / 32), 6.25),
        ("zb-h1", 1, 8, 8),
        ("zb-h2", 1, 15, 15),
        ("zb-v", 2, 8, 8),
        ("dualpipe", 1, 9, 9),
        ("dualpipev", 2, 8.5, 8.5),  # DualPipe on 16 devices: 17 half stages
    ],
)
def test_published_activation_memory(name, chunks, peak, least):
    """Of the stage that holds most, and least, where dW frees all."""
    result = simulate(generate(name, 8, 24, chunks), Times.even(8, chunks))
    assert result.peak.max() == pytest.approx(peak)
    assert result.peak.min() == pytest.approx(least)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 16))
def test_generated_programs_are_complete_and_free_of_cycles(stages, micro_batches):
    for _, program in every_program(stages, micro_batches):
        check(program)


def broken(program, edit):
    ops = [list(o) for o in program.ops]
    edit(ops)
    return dataclasses.replace(program, ops=tuple(tuple(o) for o in ops))


def test_check_finds_a_missing_operation():
    with pytest.raises(BadInputError, match="F of chunk 1, micro-batch 2: 0 times"):
        check(broken(generate("1f1b", 3, 4, 1), lambda ops: ops[1].remove(Op(OpKind.F, 1, 2))))


def test_check_finds_an_operation_on_the_wrong_stage():
    def edit(ops):
        ops[2].append(ops[1].pop())

    with pytest.raises(BadInputError, match="is on stage 2, its chunk on stage 1"):
        check(broken(generate("1f1b", 3, 4, 1), edit))


def test_a_deadlock_names_what_each_stage_waits_for():
    def edit(ops):
        # stage 0 wants the backward of micro-batch 0 before the forward of 1, stage 1 the other way round
        ops[0][1], ops[0][2] = Op(OpKind.B, 0, 0), Op(OpKind.F, 0, 1)
        ops[1][1], ops[1][2] = Op(OpKind.F, 1, 1), Op(OpKind.B, 1, 0)

    with pytest.raises(BadInputError, match="stage 0 is stopped at its operation 1") as error:
        check(broken(generate("1f1b", 2, 3, 1), edit))
    assert "stage 1 is stopped at its operation 1" in str(error.value)
    assert "waits for F(chunk 0, micro-batch 1)" in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_simulation_finds_every_cycle_of_shuffled_programs(data):
    """A topological sorter finds a cycle among the waits of operations exactly where the simulation does."""
    stages, micro_batches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    _, program = data.draw(st.sampled_from(list(every_program(stages, micro_batches))))

    def edit(ops):
        for stage in ops:
            for _ in range(data.draw(st.integers(0, 2))):
                i, j = (data.draw(st.integers(0, len(stage) - 1)) for _ in range(2))
                stage[i], stage[j] = stage[j], stage[i]

    shuffled = broken(program, edit)
    sorter = TopologicalSorter()
    for stage, ops in enumerate(shuffled.ops):
        for i, op in enumerate(ops):
            for result in makes(op):
                sorter.add(result, (stage, i))
            sorter.add((stage, i), *needs(op, shuffled.chunks), *([(stage, i - 1)] if i else []))
    try:
        sorter.prepare()
    except CycleError:
        with pytest.raises(BadInputError, match="deadlock"):
            check(shuffled)
    else:
        check(shuffled)


@settings(max_examples=20, deadline=None)
@given(programs_and_times())
def test_a_program_survives_json(case):
    program, _ = case
    assert Program.from_json(program.to_json()) == program


def test_json_of_something_else_is_refused():
    with pytest.raises(BadInputError, match="plan schedule --json"):
        Program.from_json({"name": "x"})


def test_merging_keeps_what_there_is():
    rng = np.random.default_rng(0)
    times = Times(*(rng.random(8) for _ in range(3)), 0.1).full(2)
    two = merge(times, 2)
    assert two.forward.tolist() == [times.forward[:4].sum(), times.forward[4:].sum()]
    assert two.activation.sum() == pytest.approx(times.activation.sum())
    assert two.backward.sum() == pytest.approx(times.dx.sum() + times.dw.sum())


def test_rules_leave_out_what_they_forbid():
    times = Times.even(4, 2).full(4)
    memory = np.full(4, 8.0)
    names = {k.program.name for k in known(times, 4, 8, memory, Rules(split=False))}
    assert names == {"gpipe", "1f1b", "interleaved", "1f1b-overlap-full"}


def test_nothing_hides_where_pairs_may_not_overlap():
    times = np.ones(8)
    talk = Times(
        times, times, times, forward_exposed=0.4 * times, backward_exposed=0.4 * times
    ).full(4)
    memory = np.full(4, 99.0)
    for pairs, faster in ((False, False), (True, True)):
        by_name = {k.program.name: k for k in known(talk, 4, 8, memory, Rules(pairs=pairs))}
        quiet = simulate(by_name["dualpipev"].program, Times(times, times, times))
        assert (by_name["dualpipev"].result.makespan < quiet.makespan) == faster


def test_refusals_name_what_was_found():
    with pytest.raises(BadInputError, match="5 micro-batches on 4 stages"):
        generate("interleaved", 4, 5, 2)
    with pytest.raises(BadInputError, match="expected at least 7"):
        generate("zb-v", 4, 6, 2)
    with pytest.raises(BadInputError, match="not known"):
        generate("2f2b", 4, 6, 2)
    with pytest.raises(BadInputError, match="has 4 chunks, its times 3"):
        simulate(generate("1f1b", 4, 6, 1), Times.even(3, 1))
    with pytest.raises(BadInputError, match="not negative"):
        simulate(generate("1f1b", 2, 2, 1), Times(*np.full((3, 2), -1.0)))
