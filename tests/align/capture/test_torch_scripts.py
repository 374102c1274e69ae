"""Scripts of torch as people write them: recording changes nothing, everything is judged, faults are named."""

import pytest

torch = pytest.importorskip("torch")

import torch_script as script
from torch.utils._python_dispatch import TorchDispatchMode

from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump.records import Phase

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def golden():
    return script.recorded(lambda: script.train(script.Net()))


def test_recording_changes_nothing():
    plain = script.train(script.Net())
    losses = []
    script.recorded(lambda: losses.append(script.train(script.Net())))
    for a, b in zip(plain.parameters(), losses[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_conversions_to_what_a_leaf_is_keep_it():
    def run():
        x = torch.ones(3, requires_grad=True).to(torch.float32).contiguous()
        assert x.is_leaf
        x.sum().backward()
        assert x.grad is not None
        made.append(x)

    made = []
    script.recorded(run)
    assert made


def test_operators_in_place_have_their_gradients(golden):
    calls = golden.ranks[0, 0].calls
    for name in ("Tensor.index_add_", "Tensor.div_", "Tensor.add_"):
        assert f"{name}.0.backward" in calls, name
        assert calls[f"{name}.0.backward"].phase is Phase.BACKWARD
    assert any(key.startswith("Tensor.__setitem__") for key in calls)
    assert any(key.startswith("Torch._foreach_mul_") for key in calls)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("plain", torch.float32),
        ("plain", torch.bfloat16),
        ("fused", torch.float32),
        ("checkpoint", torch.float32),
        ("checkpoint again", torch.float32),
    ],
)
def test_right_runs_pass_and_everything_is_judged(golden, way, dtype):
    other = script.recorded(lambda: script.train(script.Net(way), dtype=dtype))
    for pair in ((golden, other), (other, golden)):
        outcome = bisect(*pair)
        assert outcome.verdict == "pass", outcome.findings[:1]
        if way != "fused":
            assert outcome.judged.get("not judged", 0) == 0, outcome.unknown


class Kernel(TorchDispatchMode):
    """Change what the n-th kernel of a name gives."""

    def __init__(self, name, number, change):
        super().__init__()
        self.name, self.left, self.change = name, number, change

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            outputs = func(*args, **(kwargs or {}))
            if func.name() == f"aten::{self.name}":
                self.left -= 1
                if self.left == -1:
                    outputs = self.change(outputs, args)
        return outputs


def lost_carry(when, step, net):
    """The gradient of the first micro-batch is forgotten, of one weight."""
    if when == "forward" and step == 0:
        net.qkv.weight.grad = None


def scaled(when, step, net):
    if when == "clipped" and step == 1:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            net.head.weight.grad.mul_(1.001)


@pytest.mark.parametrize(
    ("options", "kernel", "where", "place", "step"),
    [
        ({"most": 0.2}, None, "Tensor.__rdiv__.0.forward", "output.0", 0),
        ({"hook": scaled}, None, "Optimizer.AdamW.23.forward", "input.grad", 1),
        ({"hook": lost_carry}, None, "Torch._foreach_norm.0.forward", "input.0.1", 0),
        (
            {},
            ("index_add_", 1, lambda made, args: made.mul_(1.5)),
            "Tensor.index_add_.1.forward",
            "output.0",
            0,
        ),
        (
            {},
            ("index_select", 0, lambda made, args: made * 2),
            "Tensor.index_add_.3.backward",
            "output.1",
            0,
        ),
    ],
)
def test_faults_around_operators_in_place_are_named(golden, options, kernel, where, place, step):
    def run():
        if kernel is None:
            script.train(script.Net(), **options)
        else:
            with Kernel(*kernel):
                script.train(script.Net(), **options)

    outcome = bisect(golden, script.recorded(run))
    assert outcome.verdict == "diverged"
    first = outcome.findings[0]
    assert (first.verdict.key, first.verdict.place, first.step) == (where, place, step)


def test_a_mask_that_lets_one_token_more_through_is_named(golden):
    def run():
        net = script.Net()
        net.later = 2
        script.train(net)

    first = bisect(golden, script.recorded(run)).findings[0]
    assert first.verdict.key == "Tensor.triu.0.forward"
    assert first.family == "wrong setting"


def test_a_bias_left_out_is_named(monkeypatch):
    """The call is right by itself: what it lacks, the reference says."""

    def run():
        net = script.Net()
        net.experts[1].bias = None
        script.train(net)

    monkeypatch.setattr(script.Net, "to", lambda self, dtype: self)
    golden = script.recorded(lambda: script.train(script.Net()))
    first = bisect(golden, script.recorded(run)).findings[0]
    assert first.verdict.key == "Functional.linear.3.forward"
    assert first.verdict.reason.startswith("input.2: only one of the runs has it")


def test_a_clipping_that_forgets_weights_is_named(golden, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    some = lambda weights, most: clip(list(weights)[:3], most)  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", some)
    first = bisect(golden, script.recorded(lambda: script.train(script.Net()))).findings[0]
    assert first.verdict.key == "Torch._foreach_norm.0.forward"
    assert first.phase is Phase.OPTIMIZER


@pytest.mark.parametrize(("used", "verdict"), [(False, "pass"), (True, "diverged")])
def test_uninitialised_memory_matters_only_if_used(used, verdict):
    """As `from_pretrained` does: what a fresh tensor holds is copied, then overwritten."""

    def run(garbage):
        fresh = torch.empty(2, 3)
        with torch._C.DisableTorchFunction():
            fresh.fill_(garbage)
        moved = fresh.to(torch.float64).contiguous()
        assert torch.ones(2, 3).to("meta").is_meta  # holds nothing: not recorded
        made = torch.ones(2, 3).mul(3.0)
        kept = moved.mul(2.0) if used else moved.copy_(made)
        weight = torch.nn.Parameter(torch.ones(3))
        (kept * weight).sum().backward()
        torch.optim.SGD([weight], 0.1).step()

    outcome = bisect(*(script.recorded(lambda x=x: run(x)) for x in (float("nan"), 1.5)))
    assert outcome.verdict == verdict, outcome.findings[:1]
    if used:
        assert outcome.findings[0].verdict.key == "Tensor.to.0.forward"


def test_calls_name_their_module_and_the_line_of_the_script():
    class Doubled(torch.nn.Module):
        def forward(self, x):
            return x.mul(2.0)

    def run():
        weight = torch.nn.Parameter(torch.ones(3))
        torch.nn.Sequential(Doubled())(weight).sum().backward()
        torch.optim.SGD([weight], 0.1).step()

    calls = script.recorded(run).ranks[0, 0].calls
    for key in ("Tensor.mul.0.forward", "Tensor.mul.0.backward"):
        assert calls[key].parent == "Module.0.Doubled.forward.0"
        line = Doubled.forward.__code__.co_firstlineno + 1
        assert calls[key].stack[0] == f"File {__file__}, line {line}, in forward"
    assert calls["Tensor.sum.0.forward"].parent is None
