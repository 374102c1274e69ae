"""A step's loss is divided by the tokens of its whole batch, MTP's by its own, and not by those of each micro-batch."""

import dataclasses

import numpy as np
import pytest

ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import float64
from mindspore import Tensor, nn
from tiny_models import Batch, random_batch, random_weights, tiny_config

from telechat_moe.model import CausalLM
from telechat_moe.ops import select
from telechat_moe.train import step as steps
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import TrainStep
from telechat_moe.train.token_weights import MeanOverProcesses, token_weights

pytestmark = pytest.mark.mindspore
LENGTH, KEPT = 16, (1, 9, 16)
"""Tokens of a sequence, and of each micro-batch that the mask keeps."""
BOUND = 2e-6


def config_of(**changes):
    given = {"num_nextn_predict_layers": 2, "mtp_loss_factor": 0.3, "seq_length": LENGTH}
    given |= {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    return tiny_config(**{**given, "calculate_per_token_loss": True, **changes})


def test_two_micro_batches_with_unequal_masks():
    """One token in a micro-batch and four in the other: each counts a fifth; by the mean of means the first half."""
    config = config_of(num_nextn_predict_layers=0)
    masks = [np.zeros((1, LENGTH), np.float32), np.zeros((1, LENGTH), np.float32)]
    masks[0][0, 2], masks[1][0, [1, 5, 6, 11]] = 1, 1
    loss = np.arange(2 * LENGTH, dtype=np.float64).reshape(2, 1, LENGTH)
    weight = token_weights(config, masks, 2)[0]
    found = np.mean([weight * (x * mask).sum() for x, mask in zip(loss, masks, strict=True)])
    assert found == pytest.approx((2 + 17 + 21 + 22 + 27) / 5)
    means = np.mean([(x * m).sum() / m.sum() for x, m in zip(loss, masks, strict=True)])
    assert means == pytest.approx((2 + (17 + 21 + 22 + 27) / 4) / 2)


def test_each_depth_has_its_own_count_and_a_mask_that_keeps_nothing_gives_a_number():
    mask = np.zeros((2, LENGTH), np.float32)
    mask[0, :3], mask[1, 1] = 1, 1
    found = token_weights(config_of(), [mask], 2)
    assert found == pytest.approx([2 / 4, 2 * 0.15 / 3, 2 * 0.15 / 1, 0, 1])
    assert np.isfinite(token_weights(config_of(), [0 * mask], 2)).all()
    parts = token_weights(
        config_of(), [mask], 2, parts=4
    )  # each part gives a z-loss, a mean over its tokens
    assert parts == pytest.approx([*found[:-1], 1 / 4])


class SumWith(nn.Cell):
    """The sum over two processes, of which the other one's addend is known."""

    def __init__(self, other: np.ndarray) -> None:
        super().__init__()
        self.other = Tensor(other.astype(np.float32))

    def construct(self, x: Tensor) -> Tensor:
        return x + self.other


def test_the_mean_over_two_processes_is_that_over_the_tokens_of_both():
    """In MindFormers' trainer each process weighs its sums; marks of sources count once."""
    generator, config = np.random.default_rng(1), config_of()
    mask_PBS = (generator.random((2, 3, LENGTH)) < 0.5) * generator.integers(1, 4, (2, 3, LENGTH))
    mask_PBS[1, 1:] = 0
    kept_KPBS = np.zeros((3, 2, 3, LENGTH))
    for k in range(3):  # the label of depth k is k tokens further on
        kept_KPBS[k, :, :, : LENGTH - k] = mask_PBS[:, :, k:] > 0
    loss_KPBS = generator.random(kept_KPBS.shape) * kept_KPBS
    tokens_PK = kept_KPBS.sum((2, 3)).T
    results = []
    for p in range(2):
        cell = MeanOverProcesses(config, 2)
        cell.total = SumWith(np.append(tokens_PK[1 - p], 0))
        sums = loss_KPBS[:, p].sum((1, 2)).astype(np.float32)
        mask = Tensor(mask_PBS[p].astype(np.float32))
        terms = cell(Tensor(sums[:1]), Tensor(np.append(sums[1:], np.float32(0))), mask)
        results.append([float(x.asnumpy()[0]) for x in terms])
    lm, *depths = loss_KPBS.sum((1, 2, 3)) / kept_KPBS.sum((1, 2, 3))
    assert np.mean(results, 0) == pytest.approx([lm, 0.15 * sum(depths)], rel=BOUND)


def micro_batches(config):
    """Return micro-batches of two sequences with 1, 9 and 16 tokens in the first and all in none."""
    found = []
    for i, kept in enumerate(KEPT):
        batch = random_batch(config, seed=20 + i)
        mask = np.zeros((len(batch.input_ids), LENGTH), np.float32)
        mask[0, LENGTH - kept :] = 1
        found.append(dataclasses.replace(batch, loss_mask=mask))
    return found


def tensors(batch):
    return [Tensor(x) for x in dataclasses.astuple(batch)[:4]]


def run(config, backend, batches):
    """Return losses, norm and square sums of a step."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    with select.using(backend):
        model = CausalLM(config)
        weights = random_weights(model, seed=3)
        model.set_train()
        optimizer = AdamW(model.trainable_params(), (0.9, 0.95), 1e-8, 0.1)
        step = TrainStep(model, optimizer, 1.0, len(batches), config=config)
        step.set_train()
    parts = [tensors(batch) for batch in batches]
    step.count_tokens(parts)
    for part in parts[:-1]:
        step.accumulate(*part)
    losses, norm, squares, *_ = step(*optimizer.scalars(1, 1e-3), *parts[-1])
    return weights, losses.asnumpy(), float(norm.asnumpy()), squares.asnumpy()


def together(batches):
    rows = zip(*(dataclasses.astuple(batch)[:4] for batch in batches), strict=True)
    return Batch(*(np.concatenate(row) for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["plain", "auto"])
def test_a_step_of_micro_batches_is_that_of_all_their_tokens(backend):
    config = config_of()
    batches = micro_batches(config)
    weights, losses, norm, squares = run(config, backend, batches)
    expected = float64.forward(config, weights, together(batches))
    np.testing.assert_allclose(losses, [expected.lm, expected.mtp, expected.aux], rtol=BOUND)
    # Gradients: those of one micro-batch that holds all rows, whose means need no weights.
    plain = dataclasses.replace(config, calculate_per_token_loss=False)
    _, _, norm_1, squares_1 = run(plain, backend, [together(batches)])
    assert norm == pytest.approx(norm_1, rel=1e-5)
    np.testing.assert_allclose(squares, squares_1, rtol=1e-4)


@pytest.mark.slow
def test_known_mistakes_are_seen(monkeypatch):
    config = config_of()
    batches = micro_batches(config)
    plain = dataclasses.replace(config, calculate_per_token_loss=False)
    weights, lm_of_means, *_ = run(plain, "plain", batches)
    expected = float64.forward(config, weights, together(batches))
    assert abs(lm_of_means[0] / expected.lm - 1) > 1e-3, "the mean of means"

    def by_next_token(*args):
        weights = token_weights(*args)
        weights[1:-1] = weights[0] * config.mtp_loss_factor / 2
        return weights

    monkeypatch.setattr(steps, "token_weights", by_next_token)
    _, losses, *_ = run(config, "plain", batches)
    assert losses[0] == pytest.approx(expected.lm, rel=BOUND)
    assert abs(losses[1] / expected.mtp - 1) > 1e-2, "MTP by the count of the next token"
