"""Balance losses over every group of tokens, and their gradients, against brute force in float64."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from tiny_models import tiny_config

from telechat_moe.model.balance import BalanceLoss, ZLoss
from telechat_moe.model.router import Router
from telechat_moe.ops.select import using
from telechat_moe.sharding.cells.collective import ALONE, RouterLosses

pytestmark = pytest.mark.mindspore

B, S, E, K, COEFFICIENT = 4, 6, 8, 2, 0.3
T = B * S


def config(kind: str):
    return tiny_config(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=COEFFICIENT)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and chosen experts, ``[T, E]``; some experts are chosen by nobody."""
    rng = np.random.default_rng(seed)
    score = rng.uniform(0.05, 1, (T, E)).astype(np.float32)
    chosen = np.zeros((T, E), np.float32)
    for t in range(T):
        chosen[t, rng.choice(E - 2, K, replace=False)] = 1
    return score, chosen


def brute_force(score, chosen, groups: int, fraction=None) -> tuple[float, np.ndarray]:
    """Return the loss and its gradient by the scores, token by token; ``fraction`` replaces every group's."""
    score, n = score.astype(np.float64), T // groups
    loss, gradient = 0.0, np.zeros((T, E))
    for g in range(groups):
        rows = range(g * n, (g + 1) * n)
        f = np.zeros(E)
        for t in rows:
            f += E / (K * n) * chosen[t]
        f = f if fraction is None else fraction
        for t in rows:
            total = score[t].sum()
            loss += COEFFICIENT / groups * (f * score[t] / total).sum() / n
            for e in range(E):
                slope = f[e] / total - (f * score[t]).sum() / total**2
                gradient[t, e] += COEFFICIENT / groups * slope / n
    return loss, gradient


def value_and_gradient(cell, score, *rest) -> tuple[float, np.ndarray]:
    """Return the loss of a cell and its gradient by the first argument."""

    def scalar(*args):
        return cell(*args)[0]

    loss, gradient = ms.value_and_grad(scalar, 0)(Tensor(score), *rest)
    return float(loss.asnumpy()), gradient.asnumpy()


def check(found, expected) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    np.testing.assert_allclose(found[1], expected[1], atol=2e-6 * np.abs(expected[1]).max())


@pytest.mark.parametrize("backend", ["fused", "plain"])
@pytest.mark.parametrize(
    ("kind", "groups", "brute"),
    [
        ("seq_aux_loss", None, B),
        ("aux_loss", None, 1),
        ("sub_seq_aux_loss", None, 1),  # one device has the whole micro-batch
        ("sub_seq_aux_loss", 8, 8),  # half a sequence each
        ("aux_loss", 2, 2),  # two expert groups
        ("aux_loss", 1, 1),
    ],
)
def test_loss_and_gradient(kind, groups, brute, backend):
    score, chosen = drawn(1)
    with using(operators={"routing": backend}):
        cell = BalanceLoss(config(kind))
    assert (cell.fused is not None) == (backend == "fused")
    cell.groups = groups
    found = value_and_gradient(cell, score, Tensor(chosen), Tensor(chosen.sum(0)), B)
    check(found, brute_force(score, chosen, brute))


def test_scopes_differ():
    """Looser scopes forgive more: the loss of one routing falls, or stays, as the groups grow together."""
    score = drawn(3)[0]
    chosen = np.zeros((T, E), np.float32)
    for t in range(T):  # each sequence has its own pair of experts, and its scores say so
        chosen[t, [t // S, t // S + 4]] = score[t, [t // S, t // S + 4]] = 1
    losses = [brute_force(score, chosen, groups)[0] for groups in (4, 2, 1)]
    assert losses[0] > losses[1] > losses[2]
    for groups, expected in zip((4, 2, 1), losses, strict=True):
        cell = BalanceLoss(config("aux_loss"))
        cell.groups = groups
        found = cell(Tensor(score), Tensor(chosen), Tensor(chosen.sum(0)), B)
        np.testing.assert_allclose(found.asnumpy()[0], expected, rtol=2e-6)


class Steps(nn.Cell):
    """A router's balance loss for given micro-batches."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def construct(self, x_TH: Tensor) -> Tensor:
        return self.router(x_TH, B)[2]


@pytest.mark.parametrize("training", [True, False])
def test_the_step_counts_its_micro_batches(training):
    """``f`` is that of all micro-batches so far; a step starts with nothing counted, and an evaluation counts nothing."""
    router = Router(config("gbs_aux_loss"))
    rng = np.random.default_rng(5)
    weight = rng.standard_normal(router.weight.shape).astype(np.float32)
    router.weight.set_data(Tensor(weight))
    cell = Steps(router).set_train(training)

    def loss_of(x):
        return cell(x)[0]

    run = ms.value_and_grad(loss_of, None, ms.ParameterTuple([router.weight]))
    for _ in range(2):
        counted, pairs = np.zeros(E), 0
        ops.assign(router.expert_load, Tensor(np.zeros(E, np.float32)))
        for _ in range(3):
            x = rng.standard_normal((T, 48)).astype(np.float32)
            logits = x.astype(np.float64) @ weight.T.astype(np.float64)
            score = 1 / (1 + np.exp(-logits))
            chosen = np.zeros((T, E))
            np.put_along_axis(chosen, np.argsort(-score, 1)[:, :K], 1, axis=1)
            if training:
                counted, pairs = counted + chosen.sum(0), pairs + T * K
            else:
                counted, pairs = chosen.sum(0), T * K
            loss, by_score = brute_force(score, chosen, 1, E * counted / pairs)
            expected = (by_score * score * (1 - score)).T @ x.astype(np.float64)
            found, (gradient,) = run(Tensor(x))
            check((float(found.asnumpy()), gradient.asnumpy()), (loss, expected))


class Device(nn.Cell):
    """The losses of one device; what the others count comes from outside, in place of the collective."""

    def __init__(self, kind: str, devices: int, members: int, member: int, others) -> None:
        super().__init__()
        sequences = B * members // devices if kind == "seq_aux_loss" else 1
        group = ALONE._replace(size=members, member=member % members)
        everyone = ALONE._replace(size=devices, member=member)
        losses = RouterLosses(
            BalanceLoss(config(kind)),
            ZLoss(0.0),
            max(1, sequences),
            ALONE._replace(member=group.member),
            ALONE,
        )
        losses.group, losses.devices = group, everyone.size
        self.losses, self.others = losses, Tensor(others.astype(np.float32))
        losses.sum_counts = lambda x: x + self.others

    def construct(self, score_tE: Tensor, counted: Tensor) -> Tensor:
        return self.losses.body(score_tE, score_tE, counted)


@pytest.mark.parametrize(
    ("kind", "members", "groups"),
    [
        ("aux_loss", 8, 1),  # the whole world is the data-parallel group
        ("aux_loss", 2, 4),
        ("aux_loss", 1, 8),  # a group of one: the device's own micro-batch
        ("sub_seq_aux_loss", 1, 8),
        ("seq_aux_loss", 2, 4),  # two devices share each sequence
    ],
)
def test_devices_add_up_to_their_groups(kind, members, groups):
    """The sum over devices is the loss of the groups, and each device's gradient that of its own scores."""
    devices, (score, chosen) = 8, drawn(7)
    t, parts, total = T // devices, [], 0.0
    for device in range(devices):
        own = slice(device * t, (device + 1) * t)
        first = device // members * members
        others = sum(
            chosen[d * t : (d + 1) * t].sum(0) for d in range(first, first + members) if d != device
        )
        cell = Device(kind, devices, members, device, np.zeros((1, E)) + others)
        loss, gradient = value_and_gradient(cell, score[own], Tensor(chosen[own]))
        total += loss
        parts.append(gradient)
    check((total, np.concatenate(parts)), brute_force(score, chosen, groups))


def test_a_group_of_one_is_the_micro_batch():
    score, chosen = drawn(9)
    whole = BalanceLoss(config("aux_loss"))
    alone = RouterLosses(whole, ZLoss(0.0), 1, ALONE, ALONE)
    count = Tensor(chosen.sum(0))
    expected = whole(Tensor(score), Tensor(chosen), count, B).asnumpy()
    found = alone(Tensor(score), Tensor(score), Tensor(chosen), count).asnumpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_no_gradient_flows_through_the_counts():
    """Counts have no gradient anyway; an operator that lets one through would show here."""
    score, chosen = drawn(11)
    cell = BalanceLoss(config("aux_loss"))
    scores, count = Tensor(score), Tensor(chosen.sum(0))

    def loss_of(c):
        return cell(scores, c, count, B)[0]

    assert not ops.grad(loss_of)(Tensor(chosen)).asnumpy().any()
