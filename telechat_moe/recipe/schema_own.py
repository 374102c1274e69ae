"""The section `telechat_moe`: settings of this package that MindFormers lacks."""

from dataclasses import dataclass, field
from typing import Annotated

from telechat_moe.recipe.fields import Count, Length, NonNegative, Positive, Range, Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """`telechat_moe.evaluation`: loss on validation data while training."""

    interval: Count = 0
    """Steps between evaluations. 0: none."""

    batches: Positive = 8
    """Batches per evaluation."""

    data_path: list[Text] | None = None
    """Like `train_dataset.data_loader.config.data_path`. None: the training prefix with its last
    word `train` replaced by `valid`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """`telechat_moe.corpus`: text from which `telechat-moe data build --recipe` makes the data."""

    paths: list[Text] = field(default_factory=list[Text])
    """Files and folders. Empty: the sources of the Python standard library."""

    valid_fraction: Annotated[float, Range(0, 0.5, above=True)] = 0.05
    """Share of the documents for validation."""

    tokenizer: Text | None = None
    """A `tokenizer.json` to use. None: train a byte-level BPE with `vocab_size` entries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """`telechat_moe.sample`: text that the model writes at the end."""

    prompts: Annotated[list[Text], Length(1)] = field(default_factory=lambda: ["def "])
    """Beginnings to go on from."""

    max_new_tokens: Positive = 64
    """Tokens to write for each."""

    temperature: NonNegative = 0.8
    """Divides the logits before drawing. 0: always the most probable token."""

    top_k: Positive = 40
    """Most probable tokens to draw from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TelechatMoe:
    """`telechat_moe`: what only this package reads. MindFormers drops the section with a warning."""

    evaluation: Evaluation = field(default_factory=Evaluation)
    """Validation while training."""

    corpus: Corpus = field(default_factory=Corpus)
    """Source of the training text."""

    sample: Sample | None = None
    """Text sample at the end. None: none."""

    max_skipped_steps: Count = 10
    """Steps with NaN or Inf that are skipped before training stops. 0: stop at the first."""

    weight_decay_exclude: list[Text] = field(default_factory=lambda: [r".*norm.*", r".*bias"])
    """Regular expressions for names of parameters without weight decay."""

    moe_block_rows: Positive | None = None
    """Rows per block of the dropless experts on plain operators. None: chosen from the batch."""
