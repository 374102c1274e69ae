"""The section `telechat_moe`: settings of this package that MindFormers lacks."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

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


Face = Literal["auto", "fused", "plain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """`telechat_moe.operators`: what computes each operator (`telechat_moe.ops.select`).

    `fused`: our native CPU kernels. `plain`: MindSpore's elementary primitives. `auto`: on Ascend its
    own primitive, on CPU fused where the native library is there, else plain.
    """

    default: Face = "auto"
    """For all operators that are not named below."""

    fuse_plain: bool = False
    """Let the fuser replace regions of plain operators by programs of the virtual machine."""

    adamw: Face | None = None
    """AdamW, clipping and the gradient norm."""

    attention: Face | None = None
    """Attention; plain holds the scores in memory."""

    cross_entropy: Face | None = None
    """Cross-entropy from logits."""

    grouped_matmul: Face | None = None
    """Products of the routed experts."""

    matmul: Face | None = None
    """Linear layers; `compute_dtype: bfloat16` on CPU needs fused."""

    permute: Face | None = None
    """Bringing tokens to their experts and back."""

    rms_norm: Face | None = None
    """RMSNorm."""

    rope: Face | None = None
    """Rotary positions."""

    routing: Face | None = None
    """Scores, top-k and weights of the router."""

    softmax: Face | None = None
    """Softmax outside attention."""

    swiglu: Face | None = None
    """SwiGLU of dense layers and shared experts."""

    def faces(self) -> dict[str, str]:
        """Return the operators that are named, and their faces."""
        named = {f.name: getattr(self, f.name) for f in fields(self)[2:]}
        return {name: face for name, face in named.items() if face is not None}


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

    operators: Operators = field(default_factory=Operators)
    """What computes each operator."""
