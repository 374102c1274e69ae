"""Building, refusing, differentiating, explaining programs; threads; MindSpore."""

import inspect
import threading

import numpy as np
import pytest
from dvm_interpreter import UNARY, from_bits, interpret, to_bits

import telechat_moe.ops.dvm as dvm
from telechat_moe.ops.dvm import ir, runtime

rng = np.random.default_rng(0)


def arrays(*shapes):
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def rms_norm(k, x, w):
    k.store(x * k.rsqrt(k.sum(x * x, -1) * (1 / 64) + 1e-6) * w)


def softmax(k, x):
    e = k.exp(x - k.max(x, -1))
    k.store(e / k.sum(e, -1))


# ---------------------------------------------------------------------- the graph


def test_python_and_cpp_have_the_same_operations():
    assert runtime.opcode_names() == ir.OPCODES


def test_flat_form_round_trip():
    program = dvm.build(rms_norm, ("T", 64), (64,))
    again = dvm.DvmProgram.from_ints(program.to_ints())
    assert again.nodes == program.nodes
    with pytest.raises(dvm.ProgramError, match="magic"):
        dvm.DvmProgram.from_ints([1, 2, 3])
    with pytest.raises(dvm.ProgramError, match="ends inside node"):
        dvm.DvmProgram.from_ints(program.to_ints()[:-3])


@pytest.mark.parametrize(
    ("body", "specs", "says"),
    [
        (lambda k, x, y: k.store(x + y), [("T", 3), ("T", 4)], r"add: found \[T, 3\] and \[T, 4\]"),
        (lambda k, x, y: k.store(x + y), [("T", "H"), ("T", "G")], "equal symbols or 1"),
        (lambda k, x, y: k.store(x + y), [("T",), (("T",), "int32")], "float32 and int32"),
        (lambda k, x: k.store(k.exp(x)), [(("T",), "int32")], "exp: found int32, expected float32"),
        (lambda k, x: k.store(k.sum(x, 2)), [("T", "H")], "dimension 2"),
        (lambda k, x: k.store(k.reshape(x, ("H",))), [("T", "H")], "reshape"),
        (lambda k, x: k.store(k.select(x, x, x)), [("T",)], "a float32 condition, expected bool"),
        (lambda k, x: k.exp(x), [("T",)], "stores nothing"),
        (lambda k, x: k.store(x, "int32"), [("T",)], "a cast to int32 first"),
        (lambda k, x: k.store(x + k.extent(x, 0)), [("T",)], "the symbol T"),
        (lambda k, x, i: k.store(k.gather_load(x, i)), [("V",), ("T",)], "a float32 index"),
        (lambda k, x: k.store(x) if x > 0 else None, [("T",)], "no truth"),
    ],
)
def test_bad_programs_are_refused_with_operation_and_line(body, specs, says):
    with pytest.raises(dvm.ProgramError, match=says) as caught:
        dvm.build(body, *specs)
    if "no truth" not in says and "stores nothing" not in says:
        assert f"{__file__}:{inspect.getsourcelines(body)[1]}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w[:3], "ends in the middle"),
        (lambda w: [0, *w[1:]], "not a DVM program"),
        (lambda w: [*w, 7], "words behind the last node"),
        (lambda w: [*w[:2], 9, *w[3:]], "output 1 is never stored"),
        (lambda w: [*w[:5], 99, *w[6:]], "operation 99"),
    ],
)
def test_the_library_verifies_what_it_is_sent(change, says):
    program = dvm.build(softmax, ("T", "H"))
    program._ints = change(program.to_ints())
    with pytest.raises(dvm.ProgramError, match=says):
        dvm.Compiled(program)


def test_too_many_registers():
    def wide(k, x):
        values = [k.sin(x + float(i)) for i in range(2000)]
        while len(values) > 1:
            values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] or values
        k.store(values[0])

    with pytest.raises(dvm.ProgramError, match=r"registers in one stage|at most 4096"):
        dvm.Compiled(dvm.build(wide, ("T",)))


def test_inputs_that_do_not_fit():
    run = dvm.Compiled(dvm.build(lambda k, x, y: k.store(x + y), ("T", "H"), ("T", "H")))
    a, b = arrays((3, 4), (3, 5))
    with pytest.raises(dvm.ProgramError, match="dimension 1 of input 1 is 5, expected 4"):
        run(a, b)
    with pytest.raises(dvm.ProgramError, match="input 1 is float64 of rank 2, expected float32"):
        run(a, a.astype(np.float64))
    with pytest.raises(dvm.ProgramError, match="1 inputs, the program loads 2"):
        run(a)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_gather_refuses_an_index_out_of_range(dtype):
    run = dvm.Compiled(
        dvm.build(lambda k, t, i: k.store(k.gather_load(t, i)), ("V", "H"), (("T",), dtype))
    )
    (table,) = arrays((5, 3))
    np.testing.assert_array_equal(run(table, np.array([4, 0], dtype))[0], table[[4, 0]])
    for bad in (5, -1):
        with pytest.raises(dvm.ProgramError, match=f"index {bad} of row 1, expected 0 to 4"):
            run(table, np.array([0, bad], dtype))


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("rows", [0, 1, 7, 500])
@pytest.mark.parametrize("width", [1, 33, 1024, 200_000])
def test_rows_of_any_length(rows, width):
    if rows * width > 2e6:
        rows = 9
    (x,) = arrays((rows, width))
    found = dvm.Compiled(dvm.build(softmax, ("T", "H")))(x)[0]
    expected = interpret(dvm.build(softmax, ("T", "H")), [x])[0]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-9)


def test_types_in_and_out():
    def body(k, half, brain, flag, number):
        k.store(half * 2.0, "float16")
        k.store(brain + half, "bfloat16")
        k.store(k.select(flag, half, brain))
        k.store(number * 3 - 1)
        k.store(number > 2)
        k.store(k.cast(number, "float32") / 2.0)
        k.store(k.cast(half * 10.0, "int32"))

    specs = [(("T",), t) for t in ("float16", "bfloat16", "bool", "int32")]
    half = rng.standard_normal(100).astype(np.float16)
    brain = to_bits(rng.standard_normal(100).astype(np.float32))
    flag, number = rng.random(100) > 0.5, rng.integers(-9, 9, 100).astype(np.int32)
    out = dvm.Compiled(dvm.build(body, *specs))(half, brain, flag, number)
    h, b = half.astype(np.float32), from_bits(brain)
    np.testing.assert_array_equal(out[0], (h * 2).astype(np.float16))
    np.testing.assert_array_equal(out[1], to_bits(b + h))
    np.testing.assert_array_equal(out[2], np.where(flag, h, b))
    np.testing.assert_array_equal(out[3], number * 3 - 1)
    np.testing.assert_array_equal(out[4], number > 2)
    np.testing.assert_array_equal(out[5], (number / 2).astype(np.float32))
    np.testing.assert_array_equal(out[6], (h * 10).astype(np.int32))


def test_special_values_are_those_of_numpy():
    x = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 88.8, -104, 2.5, -2.5, 1e30], np.float32
    )
    for name in (
        "exp",
        "log",
        "sqrt",
        "floor",
        "ceil",
        "round",
        "trunc",
        "abs",
        "isfinite",
        "tanh",
    ):
        found = dvm.Compiled(dvm.build(lambda k, v, n=name: k.store(getattr(k, n)(v)), ("T",)))(x)
        with np.errstate(all="ignore"):
            expected = UNARY[name](x)
        np.testing.assert_allclose(
            found[0].astype(np.float64),
            expected.astype(np.float64),
            rtol=4e-7,
            atol=1e-44,
            err_msg=name,
        )
        if name in ("floor", "ceil", "round", "trunc"):
            assert (np.signbit(found[0]) == np.signbit(expected))[np.isfinite(x)].all(), name


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sigmoid", "sqrt", "rsqrt"])
def test_functions_within_4_ulp_of_float64(name):
    x = np.concatenate([np.linspace(-20, 20, 200_001), np.geomspace(1e-30, 80, 50_000)])
    x = x.astype(np.float32)
    if name in ("log", "sqrt", "rsqrt"):
        x = np.abs(x[x != 0])
    found = dvm.Compiled(dvm.build(lambda k, v: k.store(getattr(k, name)(v)), ("T",)))(x)[0]
    exact = UNARY[name](x.astype(np.float64))
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(found - exact) / ulp).max() <= 4


def test_one_handle_in_many_threads():
    run = dvm.Compiled(dvm.build(rms_norm, ("T", 64), (64,)))
    inputs = [arrays((r, 64), (64,)) for r in (5, 900, 2000, 33)]
    expected = [run(*x)[0].copy() for x in inputs]
    wrong = []

    def work(i):
        for _ in range(50):
            if not np.array_equal(run(*inputs[i])[0], expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---------------------------------------------------------------------- fusion


def test_softmax_is_one_stage_and_a_column_sum_two():
    assert len(dvm.Compiled(dvm.build(softmax, ("T", "H"))).explain()["stages"]) == 1

    def centered(k, x):
        k.store(x - k.sum(x, 0) * 0.01)

    program = dvm.build(centered, ("T", "H"))
    assert len(dvm.Compiled(program).explain()["stages"]) == 2
    assert "a reduction over rows is complete only when all of them are done" in dvm.explain(
        program
    )


def test_independent_programs_are_stacked_in_one_launch():
    def both(k, x, y):
        k.store(k.exp(x))
        k.store(k.sum(y, -1))

    found = dvm.Compiled(dvm.build(both, ("T", "H"), ("R", "C"))).explain()
    assert [s["domain"] for s in found["stages"]] == ["[#0, #1]", "[#2, #3]"]


def test_symbols_decide_not_numbers():
    def body(k, x, y):
        k.store(x * 2.0)
        k.store(y * 2.0)

    same = dvm.Compiled(dvm.build(body, ("T", "H"), ("T", "H"))).explain()["stages"]
    other = dvm.Compiled(dvm.build(body, ("T", "H"), ("T", "G"))).explain()["stages"]
    assert (len(same), len(other)) == (1, 2)


def test_disassembly_shows_superinstructions():
    text = dvm.disassemble(dvm.build(rms_norm, ("T", 64), (64,)), (128, 64), (64,))
    assert "sum_product" in text
    assert "mul_add" in text
    assert text.count("stage") == 1


# ---------------------------------------------------------------------- gradients


def check_gradient(body, specs, inputs, step=1e-6):
    program = dvm.build(body, *specs)
    backward = dvm.grad(program)
    outputs = interpret(program, inputs)
    cotangents = [rng.standard_normal(y.shape).astype(np.float32) for y in outputs]
    found = dvm.Compiled(backward)(*inputs, *cotangents)

    def value(points):
        with np.errstate(all="ignore"):
            results = _run64(program, points)
        return sum((c * y).sum() for c, y in zip(cotangents, results, strict=True))

    exact = [x.astype(np.float64) for x in inputs]
    for i, g in enumerate(found):
        for at in list(np.ndindex(g.shape))[:: max(1, g.size // 12)]:
            sides = []
            for sign in (1, -1):
                moved = [x.copy() for x in exact]
                moved[i][at] += sign * step
                sides.append(value(moved))
            expected = (sides[0] - sides[1]) / (2 * step)
            assert abs(g[at] - expected) < 1e-3 * max(1, abs(expected)), (i, at, g[at], expected)


def _run64(program, points):
    """The interpreter in float64 without rounding the inputs to float32."""
    return interpret(program, points)


def _everything(k, x, w, c):
    y = k.tanh(x * w) + k.sigmoid(x) / (2.0 + k.exp(w)) - k.sqrt(k.abs(c) + 1.0)
    z = k.maximum(y, c) * k.select(x > 0.1, k.sin(x), k.cos(w)) + k.erf(x) * k.rsqrt(w * w + 1.0)
    k.store(z)
    k.store(k.sum(z * x, -1, keepdims=False))
    k.store(k.sum(z, 0) * k.log(w * w + 1.5) + k.pow(w * w + 1.0, 1.5))
    k.store(k.max(z, -1) + k.reciprocal(c * c + 1.0))


def test_gradients_are_those_of_finite_differences():
    check_gradient(_everything, [("T", "H"), ("H",), ("T", 1)], arrays((6, 9), (9,), (6, 1)))
    check_gradient(rms_norm, [("T", 64), (64,)], arrays((5, 64), (64,)))
    check_gradient(softmax, [("T", "H")], arrays((4, 11)))


@pytest.mark.torch
def test_gradients_are_those_of_torch():
    torch = pytest.importorskip("torch")
    x, w, d = arrays((300, 64), (64,), (300, 64))
    found = dvm.Compiled(dvm.grad(dvm.build(rms_norm, ("T", 64), (64,))))(x, w, d)
    tx, tw = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, w))
    y = tx * torch.rsqrt((tx * tx).mean(-1, keepdim=True) + 1e-6) * tw
    y.backward(torch.tensor(d, dtype=torch.float64))
    np.testing.assert_allclose(found[0], tx.grad.numpy(), atol=2e-5)
    np.testing.assert_allclose(found[1], tw.grad.numpy(), atol=1e-4)


def test_a_gathered_table_has_no_gradient():
    program = dvm.build(lambda k, t, i: k.store(k.gather_load(t, i)), ("V", "H"), (("T",), "int32"))
    with pytest.raises(dvm.ProgramError, match="its gradient would be a scatter"):
        dvm.grad(program)
    with pytest.raises(dvm.ProgramError, match="it has no gradient"):
        dvm.grad(program, [1])


def test_a_nan_reaches_the_extremes_of_its_own_row():
    def extremes(k, x, c):
        wide = k.broadcast(c, ("T", 100))
        for value in (x, wide):
            k.store(k.max(value, -1))
            k.store(k.min(value, -1))

    run = dvm.Compiled(dvm.build(extremes, ("T", 100), ("T", 1)))
    x, c = arrays((100, 100), (100, 1))
    np.fill_diagonal(x, np.nan)
    x[7] = -np.inf  # a row without one
    c[3] = np.nan
    want = [x.max(-1), x.min(-1), c[:, 0], c[:, 0]]
    for y, expected in zip(run(x, c), want, strict=True):
        np.testing.assert_array_equal(y.reshape(-1), expected)


def test_an_operand_that_is_neither_row_nor_column_of_its_stage():
    def across_rows(k, x, b):
        k.store(k.sum(x, -1, keepdims=True) + b)

    def across_columns(k, x, b, row):
        y = x * (row + b)
        k.store(k.sum(y, (1, 2), keepdims=True))
        k.store(y)

    x, b, row = arrays((3, 5, 7), (1, 5, 1), (1, 5, 7))
    sums = dvm.Compiled(dvm.build(across_rows, ("A", "B", "C"), (1, "B", 1)))
    found = sums(x, b)
    np.testing.assert_allclose(found[0], x.sum(-1, keepdims=True) + b, rtol=1e-5, atol=1e-5)
    empty = sums(x[..., :0], b)
    np.testing.assert_array_equal(empty[0], np.broadcast_to(b, (3, 5, 1)))
    shapes = ("A", "B", "C"), (1, "B", 1), (1, "B", "C")
    found = dvm.Compiled(dvm.build(across_columns, *shapes))(x, b, row)
    y = x * (row + b)
    np.testing.assert_allclose(found[0], y.sum((1, 2), keepdims=True), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found[1], y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [7, 600_000])
def test_a_sum_of_a_row_that_only_a_later_stage_reads(columns):
    def summed(k, x):
        k.store(k.reshape(k.sum(x, -1, keepdims=True), ("A",)) * 0.5)

    (x,) = arrays((3, columns))
    run = dvm.Compiled(dvm.build(summed, ("A", "B")))
    np.testing.assert_allclose(run(x)[0], x.sum(-1, dtype=np.float64) * 0.5, rtol=1e-5, atol=1e-2)


# ---------------------------------------------------------------------- MindSpore


@pytest.mark.mindspore
def test_a_program_in_a_graph_with_unknown_rows():
    ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")

    class Net(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            self.op = dvm.custom_op(dvm.build(softmax, ("T", "H")))

        def construct(self, x):
            return self.op(x)

    net = Net()
    net.set_inputs(ms.Tensor(shape=[None, 8], dtype=ms.float32))
    for rows in (3, 1, 100, 0):
        (x,) = arrays((rows, 8))
        expected = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        np.testing.assert_allclose(net(ms.Tensor(x)).asnumpy(), expected, rtol=1e-5)
