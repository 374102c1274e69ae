"""The loss on packed conversations against transformers' DeepseekV3ForCausalLM, from the weights in its format."""

from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
pytest.importorskip("torch", reason="compares with torch: pip install torch==2.13.0")
pytest.importorskip("transformers", reason="compares with transformers (pip install '.[test]')")

import hf_models
import mindspore as ms
import numpy as np
import torch
from mindspore import Tensor
from tiny_models import random_weights, tiny_config

from telechat_moe.data import SampleOptions, write_indexed
from telechat_moe.data.document_packing import WholeDataset
from telechat_moe.interop.hf import weights
from telechat_moe.model import CausalLM
from telechat_moe.train.parameters import load_weights
from telechat_moe.train.step import Evaluate

pytestmark = [pytest.mark.mindspore, pytest.mark.torch]

S, TOLERANCE = 32, 1e-5
OPTIONS = SampleOptions(
    eod=0, reset_position_ids=True, create_attention_mask=True, reset_attention_mask=True
)


def packed(folder: Path, vocab: int) -> dict[str, np.ndarray]:
    """Return a batch of random conversations, about half of whose tokens are context."""
    rng = np.random.default_rng(0)
    documents = []
    for length in rng.integers(3, 20, 12):
        tokens = rng.integers(1, vocab, length)
        documents.append(np.where(rng.random(length) < 0.5, tokens, ~tokens))
    write_indexed(folder / "train", documents, np.int32)
    data = WholeDataset(folder / "train", S, options=OPTIONS, conversations=True)
    batch = data.batch(range(4))
    assert (batch["position_ids"][:, 1:] == 0).sum() > 6  # several in a sample
    return batch


def their_loss(model: torch.nn.Module, batch: dict[str, np.ndarray]) -> float:
    """Return transformers' loss with masked labels as -100, a mask by documents and their positions."""
    labels = np.full_like(batch["labels"], -100)
    labels[:, 1:] = np.where(batch["loss_mask"] > 0, batch["labels"], -100)[:, :-1]
    hidden = torch.from_numpy(batch["attention_mask"].astype(bool))
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    ids, positions, targets = (
        torch.from_numpy(x.astype(np.int64))
        for x in (batch["input_ids"], batch["position_ids"], labels)
    )
    with torch.no_grad():
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            labels=targets,
            use_cache=False,
        )
    return out.loss.item()


def test_loss_of_a_packed_batch(tmp_path: Path, record_property) -> None:
    config = tiny_config(seq_length=S)
    given = CausalLM(config)
    reference, _ = hf_models.through_convert(tmp_path, config, random_weights(given, seed=1))
    model = CausalLM(config)
    load_weights(model, weights(tmp_path / "hf", config), tmp_path / "hf")
    batch = packed(tmp_path, config.vocab_size)
    columns = ("input_ids", "labels", "loss_mask", "position_ids", "attention_mask")
    cell = Evaluate(model)
    cell.set_train(False)
    tensors = {name: Tensor(batch[name]) for name in columns}
    ours = float(cell(*tensors.values()).asnumpy()[0])
    expected = their_loss(reference, batch)
    record_property("error", abs(ours / expected - 1))
    assert abs(ours / expected - 1) < TOLERANCE
    # One label more, that of the token before padding or another conversation, is another loss.
    wrong = batch["loss_mask"].copy()
    wrong[:, :-1][batch["position_ids"][:, 1:] == 0] = 1
    other = float(cell(*(tensors | {"loss_mask": Tensor(wrong, ms.float32)}).values()).asnumpy()[0])
    assert abs(other / expected - 1) > 10 * TOLERANCE
