"""What taps record of a MindSpore graph: the values, in the order in which they were, and nothing is changed by it."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mindspore as ms
import mini_recipe
from mindspore import Parameter, Tensor, nn, ops
from replayed import replay

from telechat_moe.cli import main
from telechat_moe.errors import UsageError
from telechat_moe.graph.tap import Tapped
from telechat_moe.ops import fingerprint
from telechat_moe.ops.attention import FlashAttention
from telechat_moe.recipe import load
from telechat_moe.recipe.weights import weights as weights_of
from telechat_moe.tools.align.capture.mindspore import Filter, capture, capture_recipe
from telechat_moe.tools.align.dump import msprobe, value_files

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)


class Layer(nn.Cell):
    """A weight, a product, a branch of the graph that writes to the weight."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(W), name="layers.0.weight")
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x):
        return ops.silu(self.product(x, self.weight))


class Step(nn.Cell):
    """Forward, backward, and an update in a branch."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.layers = nn.CellList([Layer()], auto_prefix=False)
        self.weights = ms.ParameterTuple([self.layers[0].weight])
        self.velocity = self.weights.clone(prefix="velocity", init="zeros")
        self.limit = Tensor(1e6, ms.float32)
        self.rate, self.momentum = Tensor(0.1, ms.float32), Tensor(0.9, ms.float32)
        self.update = ops.ApplyMomentum()
        self.gradient = ms.value_and_grad(self.loss, None, self.weights)

    def loss(self, x):
        return self.layers[0](x).sum()

    def construct(self, x):
        loss, grads = self.gradient(x)
        if loss < self.limit:
            self.update(self.weights[0], self.velocity[0], self.rate, grads[0], self.momentum)
        return loss


@pytest.fixture(scope="module", autouse=True)
def graph_mode():
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A step, what it returned, and its dump."""
    step = Step()
    out = tmp_path_factory.mktemp("capture") / "dump"
    loss = capture(step, Tensor(X), out=out)
    return step, float(loss.asnumpy()), msprobe.read(out).ranks[0, 0]


def named(rank, ending):
    matching = [c for key, c in rank.calls.items() if key.endswith(f"{ending}.0.forward")]
    assert len(matching) == 1, list(rank.calls)
    return matching[0]


def reference():
    x, w = X.astype(np.float64), W.astype(np.float64)
    h = x @ w.T
    s = 1 / (1 + np.exp(-h))
    return h, h * s, (s * (1 + h * (1 - s))).T @ x


def test_forward_backward_and_update_are_what_numpy_computes(recorded):
    step, loss, rank = recorded
    h, y, gradient = reference()
    product = rank.calls["Primitive.layers.0.MatMul.0.forward"]
    np.testing.assert_array_equal(product.inputs[0].load(), X)
    np.testing.assert_array_equal(product.inputs[1].load(), W)
    np.testing.assert_allclose(product.outputs[0].load(), h, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(named(rank, ".SiLU").outputs[0].load(), y, rtol=1e-5, atol=1e-5)
    assert loss == pytest.approx(y.sum(), rel=1e-5)
    update = rank.calls["Optimizer.layers.0.weight.ApplyMomentum.0.forward"]
    np.testing.assert_allclose(update.kwargs["grad"].load(), gradient, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(update.kwargs["weight"].load(), W)
    after = step.layers[0].weight.asnumpy()
    np.testing.assert_array_equal(update.outputs[0].load(), after)
    np.testing.assert_allclose(after, W - 0.1 * gradient, rtol=1e-4, atol=1e-4)


def test_the_backward_pass_is_told_by_name_and_stage(recorded):
    _, _, rank = recorded
    backward = [c for c in rank.calls.values() if c.name.startswith("Primitive.Gradients.")]
    assert any(c.name.endswith(".SiLUGrad") for c in backward)
    assert {c.stage.value for c in backward} == {"backward"}
    assert rank.calls["Primitive.layers.0.MatMul.0.forward"].stage.value == "forward"


def test_every_operator_is_judged_and_right(recorded):
    _, _, rank = recorded
    verdicts = [v for call_verdicts in replay(rank) for v in call_verdicts]
    assert len(verdicts) >= 8
    assert {v.status for v in verdicts} == {"pass"}, [v for v in verdicts if v.status != "pass"]


def test_a_value_is_recorded_once(recorded):
    """The branch that updates is given the weight, the gradient and numbers: the main graph has seen them."""
    _, _, rank = recorded
    recorder = Tapped(Step())
    recorder.compile(Tensor(X))
    update = next(n for n in recorder.plan.nodes if n.kind == "ApplyMomentum")
    main = next(n for n in recorder.plan.nodes if n.kind == "MatMul")
    assert update.graph != main.graph
    assert set(update.inputs[0].taps) == set(update.inputs[3].taps) == {main.graph}
    assert set(update.inputs[1].taps) == {update.graph}  # only the branch takes the velocity
    assert set(update.outputs[0].taps) == {update.graph}
    np.testing.assert_array_equal(named(rank, ".ApplyMomentum").kwargs["weight"].load(), W)


def test_taps_change_no_bit():
    plain, tapped = Step(), Step()
    recorder = Tapped(tapped)
    for _ in range(3):
        a, b = plain(Tensor(X)), recorder(Tensor(X))
        assert a.asnumpy().tobytes() == b.asnumpy().tobytes()
    assert plain.layers[0].weight.asnumpy().tobytes() == tapped.layers[0].weight.asnumpy().tobytes()


class Attention(nn.Cell):
    """Flash attention on documents of 50 tokens; all scores are alike, or not."""

    def __init__(self, compute_dtype):
        super().__init__(auto_prefix=False)
        self.core = FlashAttention(0.25, compute_dtype)
        start = np.arange(200) // 50 * 50
        self.start = Tensor(np.tile(start, (2, 1)).astype(np.int32))
        self.gradient = ms.grad(self.loss, (0, 1, 2))

    def loss(self, q, k, v):
        return self.core(q, k, v, self.start)[0].sin().sum()

    def construct(self, q, k, v):
        return self.gradient(q, k, v)


def judged(rank):
    """Return the verdicts on attention."""
    return [x for call_verdicts in replay(rank) for x in call_verdicts if "FlashAttention" in x.key]


@pytest.mark.parametrize("scores", [1e-4, 3.0])
@pytest.mark.parametrize("compute_dtype", [ms.float32, ms.bfloat16])
def test_fused_attention_is_judged_in_both_types(tmp_path, compute_dtype, scores):
    """Products of rounded operands: within their bounds, which bfloat16 does not make blind."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 200, 3, width)).astype(np.float32) for width in (16, 16, 8))
    q, v = q * scores, v + 0.5
    capture(Attention(compute_dtype), *map(Tensor, (q, k, v)), out=tmp_path / "dump")
    rank = msprobe.read(tmp_path / "dump").ranks[0, 0]
    kernels = judged(rank)
    assert len(kernels) == 5  # output, log-sum-exp, three gradients
    assert {x.status for x in kernels} == {"pass"}, kernels
    for x in kernels:
        outputs = rank.calls[x.key].outputs
        at = int(x.place.split(".")[1])
        wrong = outputs[at].load() * np.float32(1.03)
        outputs[at] = dataclasses.replace(outputs[at], read=lambda wrong=wrong: wrong)
    assert {x.status for x in judged(rank)} == {"diverged"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_fingerprints_are_those_of_the_values(tmp_path, dtype):
    class Moved(nn.Cell):
        def construct(self, x):
            return ops.cast(x, ms.float32 if dtype == "bfloat16" else ms.float64)

    rng = np.random.default_rng(2)
    values = rng.standard_normal((173, 131)).astype(np.float32)  # three blocks, the last not full
    values[5, 7], values[100, 3] = np.inf, np.nan
    if dtype in ("int32", "bool"):
        values = rng.integers(-50, 50, (173, 131)).astype(dtype)
    x = Tensor(values).astype(getattr(ms, dtype if dtype != "bool" else "bool_"))
    capture(Moved(), x, out=tmp_path / "values")
    capture(Moved(), x, out=tmp_path / "prints", values="fingerprint")
    capture(Moved(), x, out=tmp_path / "statistics", values="statistics")
    full, prints, numbers = (
        next(iter(msprobe.read(tmp_path / n).ranks[0, 0].calls.values())).outputs[0]
        for n in ("values", "prints", "statistics")
    )
    expected = fingerprint.of(full.load())
    print_of_values = fingerprint.Fingerprint.from_bytes(prints.fingerprint)
    assert (print_of_values.checksum, print_of_values.special) == (
        expected.checksum,
        expected.special,
    )
    scale = np.abs(expected.buckets).max()
    np.testing.assert_allclose(
        print_of_values.buckets, expected.buckets, rtol=0, atol=1e-12 * scale
    )
    assert print_of_values.squares == pytest.approx(expected.squares, rel=1e-12)
    statistics = value_files.stats(full.load())
    for name in ("max", "min", "mean", "norm"):
        a, b = getattr(numbers.stats, name), getattr(statistics, name)
        assert (a is None) == (b is None), name
        assert a is None or a == pytest.approx(b, rel=1e-6, nan_ok=True), name


def test_filters(tmp_path):
    capture(Step(), Tensor(X), out=tmp_path / "a", only=["*.MatMul"])
    names = {c.name.split(".")[-1] for c in msprobe.read(tmp_path / "a").ranks[0, 0].calls.values()}
    assert names == {"MatMul"}
    for name, options in {"c": {"layers": [0]}, "d": {"only": ["*.layers.0.weight.*"]}}.items():
        capture(Step(), Tensor(X), out=tmp_path / name, **options)
        calls = msprobe.read(tmp_path / name).ranks[0, 0].calls
        assert "Optimizer.layers.0.weight.ApplyMomentum.0.forward" in calls
    capture(Step(), Tensor(X), out=tmp_path / "b", layers=[3])
    assert not msprobe.read(tmp_path / "b").ranks[0, 0].calls
    with pytest.raises(UsageError, match="it exists"):
        capture(Step(), Tensor(X), out=tmp_path / "b")


class Branches(nn.Cell):
    """The gradient of a slice, assigned in one of two branches."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.sums = Parameter(Tensor(np.zeros((6, 8), np.float32)), name="sums")
        self.gradient = ops.GradOperation()

    def part(self, x):
        return (x[1:4, ::2] * x[1:4, ::2]).sum()

    def construct(self, x):
        gradient = self.gradient(self.part)(x)
        if gradient.sum() < 1e6:
            ops.assign(self.sums, gradient)
        else:
            ops.assign(self.sums, -gradient)
        return self.sums + 0.0


def test_the_branch_that_did_not_run_is_not_recorded(tmp_path):
    capture(Branches(), Tensor(X), out=tmp_path / "dump")
    rank = msprobe.read(tmp_path / "dump").ranks[0, 0]
    assert sum("Assign" in key for key in rank.calls) == 1
    assert all(t.read is not None for call in rank.calls.values() for _, t in call.tensors())
    statuses = [
        v.status for statuses in replay(rank) for v in statuses if "StridedSliceGrad" in v.key
    ]
    assert statuses == ["pass"]


def test_uses_of_a_tensor_share_its_file(recorded):
    _, _, rank = recorded
    record = named(rank, ".SumExt").inputs[0]
    assert any(t.path == record.path for _, t in named(rank, ".SiLU").made())


def test_a_recipe_in_one_process(tmp_path, data):
    """The router counts each token once for each of its experts."""
    _, name, _, *sets = mini_recipe.arguments(data, tmp_path / "run")
    recipe = load(name, sets[1::2], use="train")
    selection = Filter(frozenset({1}), ("*.router.AssignAdd*",))
    dump = capture_recipe(recipe, tmp_path / "dump", range(1, 2), selection=selection)
    assert list(dump.ranks) == [(1, 0)]
    (counts,) = msprobe.read(tmp_path / "dump").ranks[1, 0].calls.values()
    config = recipe.model_config
    pairs = recipe.runner_config.batch_size * config.seq_length * config.num_experts_per_tok
    assert counts.outputs[0].load().sum() == pairs


@pytest.mark.slow
def test_the_updates_of_a_layer_are_those_of_a_whole_capture(tmp_path, data):
    """One operator updates all weights; of a layer it is recorded as far as it updates that layer's."""
    _, name, _, *sets = mini_recipe.arguments(data, tmp_path / "run")
    recipe = load(name, sets[1::2], use="train")

    def updates(out, selection):
        capture_recipe(recipe, tmp_path / out, range(1), selection=selection)
        calls = msprobe.read(tmp_path / out).ranks[0, 0].calls
        return {key: call for key, call in calls.items() if key.startswith("Optimizer.")}

    everything, layer = updates("whole", Filter()), updates("layer", Filter(frozenset({1})))
    names = [w.name for w in weights_of(recipe.model_config) if w.name.startswith("layers.1.")]
    weights = {name for name in names if not name.endswith("expert_bias")}  # it has no gradient
    assert {key.split(".AdamWeightDecay")[0] for key in layer} == {
        f"Optimizer.{w}" for w in weights
    }
    for key, call in layer.items():
        pairs = zip(call.tensors(), everything[key].tensors(), strict=True)
        assert all(a == b and x.load().tobytes() == y.load().tobytes() for (a, x), (b, y) in pairs)
    assert main(["align", str(tmp_path / "layer")]) == 0
