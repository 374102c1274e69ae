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
from telechat_moe.train.step import RunningStep, TrainStep


def run(backend: str, per_token: bool, sources: int, parts: list[list[Tensor]]):
    """Return weights, losses, norm and sums by source, of a step of micro-batches with unequal masks."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    config = config_of(calculate_per_token_loss=per_token)
    with select.using(backend):
        model = CausalLM(config, sources=sources)
        weights = random_weights(model, seed=3)
        optimizer = AdamW(model.set_train().trainable_params(), (0.9, 0.95), 1e-8, 0.1)
        step = TrainStep(model, optimizer, 1.0, len(parts), config=config).set_train()
    step.count_tokens(parts)
    for part in parts[:-1]:
        step.accumulate(*part)
    output = RunningStep(*step(*optimizer.scalars(1, 1e-3), *parts[-1])).fetch()
    assert output.square_sums is not None
    after = [p.asnumpy().copy() for p in optimizer.params]
    found = [output.losses, output.norm, output.square_sums.asnumpy(), *after]
    return weights, found, output.by_source


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["plain", "auto"])
@pytest.mark.parametrize("per_token", [False, True])
def test_sources_add_up_to_the_loss_and_change_nothing(backend: str, per_token: bool) -> None:
    """Every sample is of a source of its own."""
    config = config_of(calculate_per_token_loss=per_token)
    batches = micro_batches(config)
    parts, marked = [tensors(batch) for batch in batches], []
    numbers = iter(range(1, 100))
    for batch in batches:
        mask_BS = batch.loss_mask * [[next(numbers)] for _ in batch.loss_mask]
        marked.append(tensors(dataclasses.replace(batch, loss_mask=mask_BS.astype(np.float32))))
    rows = [row for batch in batches for row in range(len(batch.loss_mask))]
    weights, results, sums = run(backend, per_token, len(rows), marked)
    _, expected, none = run(backend, per_token, 1, parts)
    assert none is None
    assert [x.tobytes() for x in results] == [x.tobytes() for x in expected]
    assert sums is not None
    each = iter(sums.T)
    for batch in batches:
        columns = dataclasses.astuple(batch)[:4]
        for row in range(len(batch.loss_mask)):
            one = Batch(*(x[row : row + 1] for x in columns))
            tokens = one.loss_mask.sum()
            loss = float64.forward(config, weights, one).lm if tokens else 0.0
            np.testing.assert_allclose(next(each), [loss * tokens, tokens], rtol=2e-6)
    loss, tokens = sums.astype(np.float64).sum(1)
    per_batch = np.split(sums.astype(np.float64).T, len(batches))
    means = np.mean([x.sum(0)[0] / x.sum(0)[1] for x in per_batch])
    assert results[0][0] == pytest.approx(loss / tokens if per_token else means, rel=1e-6)
    assert means != pytest.approx(loss / tokens, rel=1e-3)


class Numbered:
    """A source whose samples are its number and theirs."""

    samples_per_pass, seq_length, source = 100, 4, None

    def __init__(self, number: int) -> None:
        self.number = number

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        ids_B2 = np.stack([np.full(len(indices), self.number), indices], 1)
        return {"input_ids": ids_B2, "loss_mask": (ids_B2 % 2 == 0).astype(np.float32)}

    def visible_pairs(self, indices: np.ndarray) -> np.ndarray:
        return 1 + (7 * indices + 3 * self.number) % 11

    def fingerprint(self) -> str:
        return str(self.number)


@pytest.mark.parametrize("deal_to", [None, (2, 3)])
def test_masks_name_the_sources_of_the_samples_that_are_served(deal_to) -> None:
    """Also in a further epoch, and where samples are dealt by their attention."""
    sources = [Numbered(i) for i in range(3)]
    dataset = MixedDataset(sources, [(0, [2, 1, 1])], 30)  # pyright: ignore[reportArgumentType]
    given = {"epochs": 2, "epoch_samples": 24, "deal_to": deal_to}
    with Loader(dataset, 4, **given, mark_sources=True) as loader, Loader(dataset, 4, **given) as plain:  # fmt: skip
        seen = set[int]()
        for batch, other in zip(loader, plain, strict=True):
            number_B = batch["input_ids"][:, 0]
            assert (batch["input_ids"] == other["input_ids"]).all()
            assert (batch["loss_mask"] == other["loss_mask"] * (1 + number_B[:, None])).all()
            seen |= set(number_B.tolist())
        assert seen == {0, 1, 2}
    one = MixedDataset(sources[:1], [(0, [1])], 30)  # pyright: ignore[reportArgumentType]
    batch = next(Loader(one, 4, mark_sources=True))
    assert set(batch["loss_mask"].ravel()) == {0, 1}
