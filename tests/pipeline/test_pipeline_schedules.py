"""Pipeline programs on CPU processes: gradients of the unpipelined run, and what happens when something breaks.

The long runs, every schedule, synthesised and random programs: `pytest -m slow tests/pipeline/test_pipeline_schedules.py`.
"""

import os
import random
import signal
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.cli import main
from telechat_moe.cli.plan.run_schedule import plain
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.pipeline.chunks import even, parse, whole
from telechat_moe.pipeline.run import (
    DeadlockError,
    Pipeline,
    Step,
    different,
)
from telechat_moe.pipeline.schedule import Schedule
from telechat_moe.pipeline.spec import Spec, random_batches
from telechat_moe.pipeline.sums import InOrder
from telechat_moe.pipeline.transport import HEAD, Inbox, Link, LinkError
from telechat_moe.processes import RankDiedError
from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.arithmetic import parameters
from telechat_moe.tools.plan.schedules.check import check
from telechat_moe.tools.plan.schedules.program import Kind, Op, Program, Times
from telechat_moe.tools.plan.schedules.published import GENERATORS, generate
from telechat_moe.tools.plan.schedules.synthesise import synthesise

MICRO_BATCHES = 3


def config(**changes: object) -> ModelConfig:
    values = {
        "vocab_size": 40,
        "seq_length": 8,
        "max_position_embeddings": 8,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "q_lora_rank": 0,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "qk_layernorm": True,
        "initializer_range": 0.1,
        "compute_dtype": "float32",
        "fp32_residual_connection": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 0,
        "moe_intermediate_size": 8,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "num_nextn_predict_layers": 0,
        "mtp_loss_factor": 0.3,
    }
    return ModelConfig(**(values | changes))


def gpipe_with_two_swapped() -> Program:
    """Stage 0 wants the first gradient before it sends the second activation, which stage 1 wants first."""
    good = generate("gpipe", 2, 2, 1)
    first = list(good.ops[0])
    first[1], first[2] = first[2], first[1]
    return Program("swapped", 2, 2, good.routes, (tuple(first), good.ops[1]))


# Parts, without processes.


def test_layouts_in_megatron_notation():
    model = config(num_hidden_layers=3, num_nextn_predict_layers=1)
    assert whole(model) == "EtttmL"
    chunks = parse("Et||tt|mL", model)
    assert [c.describe() for c in chunks] == ["E t", "(nothing)", "t*2", "m L"]
    assert chunks[2].layers == (1, 2)
    for count in range(1, 9):
        assert len(parse(even(count, model), model)) == count
    with pytest.raises(UsageError, match="'EttmL', the model has 'EtttmL'"):
        parse("Et|t|mL", model)


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(6)), seed=st.integers(0, 99))
def test_sums_do_not_depend_on_the_order_of_arrival(order: list[int], seed: int):
    gradients = np.random.default_rng(seed).standard_normal((6, 4)).astype(np.float32)
    total = InOrder()
    for micro in order:
        total.add("w", micro, {0: gradients[micro]}, alone=True)
    expected = gradients[0]
    for gradient in gradients[1:]:
        expected = expected + gradient
    assert total.sums["w"].tobytes() == expected.tobytes()


def test_what_differs_is_named():
    one = Step({"w": np.ones(3, np.float32)}, [np.ones(3, np.float32)], {})
    other = Step({"w": one.gradients["w"].copy()}, [np.ones(3, np.float32)], {})
    assert different(one, other) == []
    other.gradients["w"].view(np.uint32)[1] ^= 1
    assert different(one, other) == ["gradients of w: 1 of 3 values, by at most 1.2e-07"]


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (((("F", 0, 0),), (("D", 0, 0),)), "W.chunk 0, micro-batch 0. is missing"),
        (((("F", 0, 0),), (("B", 0, 0),), (("B", 0, 0),)), "appears 2 times"),
        (((("F", 0, 0),), (("B", 0, 1),)), "is not part of the step"),
        (((("F", 0, 0),), (("X", 0, 0),)), "kind 'X'"),
    ],
)
def test_incomplete_programs_are_refused(ops, message: str):
    with pytest.raises(BadInputError, match=message):
        Schedule("broken", 1, 1, (ops,)).check()


@pytest.mark.parametrize("odd", ["--pace nan", "--pace -1", "--stages 99"])
def test_odd_numbers_are_refused_before_anything_starts(odd: str):
    words = f"plan run-schedule telechat3_moe/pretrain_tiny.yaml --stages 2 --schedule 1f1b --micro-batches 2 {odd}"
    assert main(words.split()) == 2


def test_a_cycle_is_refused_before_anything_starts():
    with pytest.raises(BadInputError, match="deadlocks"):
        check(gpipe_with_two_swapped())


def links() -> tuple[Link, Link]:
    a, b = socket.socketpair()
    return Link(a, "stage 1"), Link(b, "stage 0")


def test_frames_carry_arrays():
    a, b = links()
    sent = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 2), np.int32)]
    a.send({"key": ["F", 1, 2]}, sent)
    header, arrays = b.receive()
    assert header["key"] == ["F", 1, 2]
    assert all(
        x.tobytes() == y.tobytes() and x.shape == y.shape for x, y in zip(sent, arrays, strict=True)
    )


def test_a_broken_frame_names_its_sender():
    a, b = links()
    head = HEAD.pack(b"TCPL", 2, 0, 1)
    a.socket.sendall(head + b"{}")
    with pytest.raises(LinkError, match="stage 0 sent a broken frame: CRC-32"):
        b.receive()
    a.socket.sendall(b"x" * HEAD.size)
    with pytest.raises(LinkError, match="stage 0 sent no frame"):
        b.receive()
    a.close()
    with pytest.raises(LinkError, match="stage 0 closed its connection"):
        b.receive()


def test_a_lost_frame_is_noticed():
    a, b = links()
    a.sent = 1
    a.send({})
    with pytest.raises(LinkError, match="sent frame 1, expected frame 0"):
        b.receive()


def test_whoever_waits_for_a_closed_peer_is_told():
    a, b = links()
    inbox = Inbox()
    inbox.listen(0, b)
    threading.Timer(0.1, lambda: a.socket.shutdown(socket.SHUT_RDWR)).start()
    with pytest.raises(LinkError, match="stage 0 closed"):
        inbox.take(("F", 0, 0), 0, lambda: None)


# Processes.


@pytest.mark.mindspore
def test_gradients_are_those_of_the_unpipelined_run():
    """1F1B and ZB-H1 on two processes, then a program that cannot go on."""
    model = config()
    batches = random_batches(model, MICRO_BATCHES, 2, 1)
    with Pipeline(Spec(model, 1), 2) as pipeline:
        pipeline.begin_whole(batches)
        programs = [plain(generate(name, 2, MICRO_BATCHES, 1)) for name in ("1f1b", "zb-h1")]
        steps = [pipeline.run(program, "Et|tL", batches) for program in programs]
        expected = pipeline.whole()
        for program, step in zip(programs, steps, strict=True):
            ran = [tuple(event.part for event in events) for events in step.events]
            assert ran == [tuple(part for op in ops for part in op) for ops in program.ops]
            assert different(step, expected) == []
        assert sum(g.size for g in expected.gradients.values()) == parameters(model).total
        assert np.abs(expected.gradients["embedding.weight"]).max() > 0
        assert sum(expected.loads.values()).sum() == MICRO_BATCHES * 2 * 8 * 2
        with pytest.raises(
            DeadlockError, match=r"stage 1 is stopped at F.*waits for F.*of stage 0"
        ) as e:
            pipeline.run(plain(gpipe_with_two_swapped()), "Et|tL", [c[:2] for c in batches])
        assert "stage 0 is stopped at B(chunk 0, micro-batch 0) and waits for D" in str(e.value)


@pytest.mark.mindspore
def test_a_killed_process_is_named():
    def kill(stage: int, operation: str) -> None:
        if stage == 1:
            os.kill(pipeline.processes[1].process.pid, signal.SIGKILL)

    model = config()
    batches = random_batches(model, 2, 1, 1)
    with (
        Pipeline(Spec(model), 2, watch=kill) as pipeline,
        pytest.raises(RankDiedError, match=r"stage 1 \(process \d+\) was killed by SIGKILL"),
    ):
        pipeline.run(plain(generate("1f1b", 2, 2, 1)), "Ett|L", batches)
    assert all(p.process.poll() is not None for p in pipeline.processes.values())


# Long.


@pytest.mark.slow
@pytest.mark.mindspore
def test_a_process_that_stands_still_is_named():
    def stop(stage: int, operation: str) -> None:
        if stage == 1:
            os.kill(pipeline.processes[1].process.pid, signal.SIGSTOP)

    model = config()
    batches = random_batches(model, 2, 1, 1)
    with (
        Pipeline(Spec(model), 2, watch=stop, silence_s=5.0) as pipeline,
        pytest.raises(RankDiedError, match=r"stage 1 .* no sign of life for 5 s at F\(chunk 1"),
    ):
        pipeline.run(plain(generate("1f1b", 2, 2, 1)), "Ett|L", batches)


def random_program(stages: int, chunks: int, micro_batches: int, seed: int) -> Program:
    """Return a program that can run, its order drawn at random: F, D and W apart, chunks anywhere."""
    rng = random.Random(seed)
    count = stages * chunks
    route = [s for s in range(stages) for _ in range(chunks)]
    rng.shuffle(route)
    done: set[tuple[str, int, int]] = set()
    left = [(k, c, m) for k in "FDW" for c in range(count) for m in range(micro_batches)]
    ops: list[list[Op]] = [[] for _ in range(stages)]

    def ready(kind: str, chunk: int, micro: int) -> bool:
        if kind == "F":
            return chunk == 0 or ("F", chunk - 1, micro) in done
        if kind == "W":
            return ("D", chunk, micro) in done
        after = ("F", chunk, micro) if chunk == count - 1 else ("D", chunk + 1, micro)
        return after in done

    while left:
        part = rng.choice([p for p in left if ready(*p)])
        left.remove(part)
        done.add(part)
        ops[route[part[1]]].append(Op(Kind(part[0]), *part[1:]))
    program = Program(
        f"random {seed}", stages, micro_batches, (tuple(route),), tuple(map(tuple, ops))
    )
    check(program)
    return program


def programs(stages: int, chunks: int) -> list[Program]:
    """Return every published schedule for P and V, synthesised ones, and random ones."""
    found = [random_program(stages, chunks, 4, seed) for seed in range(2)]
    for seed in range(2):
        lasting = np.random.default_rng(seed).uniform(1, 3, (3, stages * chunks))
        found.append(synthesise(Times(*lasting, comm=0.1), stages, 4).result.program)
    for name in GENERATORS:
        for micro_batches in (4, 8):
            try:
                found.append(generate(name, stages, micro_batches, chunks))
                break
            except BadInputError:
                continue
    return found


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.parametrize(
    ("stages", "chunks", "layout", "changes"),
    [
        (2, 1, "Ettm|L", {"num_nextn_predict_layers": 1}),
        (2, 1, "Et|tmL", {"num_nextn_predict_layers": 1, "tie_word_embeddings": True}),
        (2, 2, "Et|t||mL", {"num_nextn_predict_layers": 1}),
        (3, 1, "E|tt|L", {"moe_token_drop_policy": "probs", "moe_expert_capacity_factor": 1.0}),
        (4, 1, "E|tt|m|L", {"num_nextn_predict_layers": 1, "moe_z_loss_coeff": 0.001}),
        (4, 2, "E|t|||t|m||L", {"num_nextn_predict_layers": 1, "n_shared_experts": 1}),
    ],
)
def test_every_schedule(stages: int, chunks: int, layout: str, changes: dict[str, object]):
    model = config(**changes)
    with Pipeline(Spec(model, 2), stages) as pipeline:
        expected: dict[int, Step] = {}
        for program in programs(stages, chunks):
            check(program)
            schedule = plain(program)
            batches = random_batches(model, program.micro_batches, 2, 3)
            if program.micro_batches not in expected:
                expected[program.micro_batches] = pipeline.whole(batches)
            step = pipeline.run(schedule, _cut(layout, schedule.chunks), batches)
            assert different(step, expected[program.micro_batches]) == [], program.name


def _cut(layout: str, chunks: int) -> str:
    """Return a layout for fewer chunks: neighbours together."""
    parts = layout.split("|")
    each = len(parts) // chunks
    return "|".join("".join(parts[i * each : (i + 1) * each]) for i in range(chunks))
