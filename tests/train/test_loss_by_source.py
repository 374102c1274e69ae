"""What each sample adds to the training loss, against float64, and which source each served sample is of."""

import dataclasses

import numpy as np
import pytest

ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
pytestmark = pytest.mark.mindspore

import float64
from mindspore import Tensor
from test_token_weights import config_of, micro_batches, tensors
from tiny_models import Batch, random_weights

from telechat_moe.data import Loader, MixedDataset
from telechat_moe.model import CausalLM
from telechat_moe.ops import select
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import TrainStep


def run(backend: str, per_token: bool, by_sample: bool, parts: list[list[Tensor]]):
    """Return weights, losses, norm and what samples add, of a step of micro-batches with unequal masks."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    config = config_of(calculate_per_token_loss=per_token)
    with select.using(backend):
        model = CausalLM(config, by_sample=by_sample)
        weights = random_weights(model, seed=3)
        optimizer = AdamW(model.set_train().trainable_params(), (0.9, 0.95), 1e-8, 0.1)
        step = TrainStep(model, optimizer, 1.0, len(parts), config=config).set_train()
    step.count_tokens(parts)
    samples = [x for part in parts[:-1] for x in step.accumulate(*part)[1:]]
    losses, norm, squares, _, _, _, *last = step(*optimizer.scalars(1, 1e-3), *parts[-1])
    found = [x.asnumpy() for x in (*samples, *last)]
    after = [p.asnumpy().copy() for p in optimizer.params]
    return weights, [losses.asnumpy(), norm.asnumpy(), squares.asnumpy(), *after], found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["plain", "auto"])
@pytest.mark.parametrize("per_token", [False, True])
def test_samples_add_up_to_the_loss_and_change_nothing(backend: str, per_token: bool) -> None:
    config = config_of(calculate_per_token_loss=per_token)
    batches = micro_batches(config)
    parts = [tensors(batch) for batch in batches]
    weights, results, samples = run(backend, per_token, True, parts)
    _, expected, none = run(backend, per_token, False, parts)
    assert none == []
    assert [x.tobytes() for x in results] == [x.tobytes() for x in expected]
    for batch, found_B2 in zip(batches, samples, strict=True):
        columns = dataclasses.astuple(batch)[:4]
        for row, found in enumerate(found_B2):
            one = Batch(*(x[row : row + 1] for x in columns))
            tokens = one.loss_mask.sum()
            loss = float64.forward(config, weights, one).lm if tokens else 0.0
            np.testing.assert_allclose(found, [loss * tokens, tokens], rtol=2e-6)
    sums = np.array([x.astype(np.float64).sum(0) for x in samples])
    loss, tokens = sums.sum(0)
    means = (sums[:, 0] / sums[:, 1]).mean()
    assert results[0][0] == pytest.approx(loss / tokens if per_token else means, rel=1e-6)
    assert means != pytest.approx(loss / tokens, rel=1e-3)


class Numbered:
    """A source whose samples are its number and theirs."""

    samples_per_pass, seq_length, source = 100, 4, None

    def __init__(self, number: int) -> None:
        self.number = number

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"input_ids": np.stack([np.full(len(indices), self.number), indices], 1)}

    def visible_pairs(self, indices: np.ndarray) -> np.ndarray:
        return 1 + (7 * indices + 3 * self.number) % 11

    def fingerprint(self) -> str:
        return str(self.number)


@pytest.mark.parametrize("deal_to", [None, (2, 3)])
def test_sources_are_in_the_order_in_which_samples_are_served(deal_to) -> None:
    """Also in a further epoch, and where samples are dealt by their attention."""
    sources = [Numbered(i) for i in range(3)]
    dataset = MixedDataset(sources, [(0, [2, 1, 1])], 30)  # pyright: ignore[reportArgumentType]
    with Loader(dataset, 4, epochs=2, epoch_samples=24, deal_to=deal_to) as loader:
        for _ in range(4):
            first = loader.next_sample
            served = np.concatenate([next(loader)["input_ids"][:, 0] for _ in range(3)])
            found = loader.sources(first, 12)
            assert found is not None
            assert found.tolist() == served.tolist()
            assert len(set(served)) > 1
    one = MixedDataset(sources[:1], [(0, [1])], 30)  # pyright: ignore[reportArgumentType]
    assert Loader(one, 4).sources(0, 4) is None
