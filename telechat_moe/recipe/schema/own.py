"""The section `telechat_moe`: settings of this package that MindFormers lacks."""

from dataclasses import field, fields
from typing import Annotated, Literal

from telechat_moe.recipe.batch_schedule import PATTERN
from telechat_moe.recipe.fields import (
    OWN,
    SPLIT,
    Above0,
    Count,
    Form,
    Length,
    NonNegative,
    Positive,
    Range,
    Text,
    decides,
    only_ours,
)
from telechat_moe.recipe.schema.table import section


@section
class Evaluation:
    """`telechat_moe.evaluation`: loss on validation data while training."""

    interval: Count = field(default=0, metadata=OWN | only_ours(SPLIT))
    """Steps between evaluations. 0: none."""

    batches: Positive = 8
    """Global batches per evaluation; the same samples in every layout."""

    data_path: list[Text] | None = None
    """Like `train_dataset.data_loader.config.data_path`. None: the training prefixes with their last
    word `train` replaced by `valid`. Each source is evaluated by itself; weights are for the mean of all, without
    weights every source counts by its samples."""


@section
class MixtureSegment:
    """An item of `telechat_moe.mixture`: weights from a sample on, until the next item."""

    from_sample: Count
    """First sample, counted from the start of the run over all devices: a step takes the global batch. The first
    item says 0, and each a later sample than the one before."""

    weights: Annotated[list[NonNegative], Length(1)]
    """Share of the samples for each prefix of `data_path`, of any scale. 0: none of it."""


@section
class CorpusSection:
    """`telechat_moe.corpus`: text from which `telechat-moe data build --recipe` makes the data."""

    paths: list[Text] = field(default_factory=list[Text])
    """Files and folders. Empty: the sources of the Python standard library."""

    valid_fraction: Annotated[float, Range(0, 0.5, above=True)] = 0.05
    """Share of the documents for validation."""

    tokenizer: Text | None = None
    """A `tokenizer.json` to use. None: train a byte-level BPE with `vocab_size` entries."""


@section
class Conversations:
    """`telechat_moe.conversations`: fine-tuning on conversations, lines `{"messages": [{"role": ..., "content": ...}]}`.

    `telechat-moe data build --recipe` writes them, and training keeps each whole within a sample.
    """

    loss_roles: Annotated[list[Text], Length(1)] = field(default_factory=lambda: ["assistant"])
    """Roles whose messages are learned; the others are only read."""

    message: Text | None = None
    """How a message is written, with `{role}` and `{content}`. What comes after the role is learned with the roles of
    `loss_roles`, and the end of document after it. None: the chat template of `telechat_moe.corpus.tokenizer`
    (`chat_template.jinja` or `tokenizer_config.json` beside it)."""

    variables: dict[str, object] = field(default_factory=dict[str, object])
    """Variables of the chat template for all conversations, such as `{enable_thinking: False}`; a line may set others.
    `strftime_now`: the day (YYYY-MM-DD) that a template gets which writes today's date."""

    ignore_fields: list[Text] = field(default_factory=list[Text])
    """Fields of lines and messages that do not matter, such as `[id, source]`. Any other that the chat template or pattern does
    not read is refused, so that nothing of a conversation is lost in silence."""


@section
class Packing:
    """`telechat_moe.packing`: documents stay whole, each is put into the fullest sample that it fits into, and it sees only itself.

    Only documents of more than `seq_length` tokens are cut, every `seq_length`. What is left of a sample is padding without loss.
    """

    window: Annotated[int, Range(2, 4096)] = 256
    """Samples that are filled at the same time. A document comes no later than it would packed one after another, and fewer
    than so many samples before the newest one that was begun."""


@section
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


@section
class Ema:
    """`telechat_moe.ema`: an exponential moving average of the weights beside them; training does not see it.

    The first update copies the weights; each later one that is applied moves the average by `1 - decay` of the difference.
    Each process averages its own shards. Checkpoints hold whole tensors, the group `ema`; `telechat-moe ckpt average --ema`
    makes weights of it. In MindFormers' trainer they are in checkpoints beside its own, in the folder `callbacks` of `output_dir`.
    """

    decay: Annotated[float, Range(0, 1, above=True, below=True)] = 0.999
    """Share of the average that an update keeps."""


Backend = Literal["auto", "fused", "plain"]
HostPart = Literal["top_k", "sort", "histogram"]


@section
class Operators:
    """`telechat_moe.operators`: what computes each operator (`telechat_moe.ops.select`).

    `fused`: our native CPU kernels. `plain`: MindSpore's elementary primitives. `auto`: on Ascend its
    own primitive, on CPU fused where the native library is there, else plain.
    """

    default: Backend = "auto"
    """For all operators that are not named below."""

    fuse_plain: bool = False
    """Let the fuser replace regions of plain operators by programs of the virtual machine."""

    host: list[HostPart] = field(default_factory=list[HostPart])
    """What the host computes in a graph for Ascend, with the same results: `top_k` the choice of experts with its group limit,
    `sort` the places of (token, expert) pairs, `histogram` the pairs of each expert. Each waits for every router
    ([performance.md](performance.md#keep-the-device-busy))."""

    adamw: Backend | None = None
    """AdamW, clipping and the gradient norm."""

    attention: Backend | None = None
    """Attention; plain holds the scores in memory, and so does `auto` on several CPU processes. With `fused` they run our
    kernel, too."""

    cross_entropy: Backend | None = None
    """Cross-entropy from logits."""

    grouped_matmul: Backend | None = None
    """Products of the routed experts."""

    matmul: Backend | None = None
    """Linear layers; `compute_dtype: bfloat16` on CPU needs fused."""

    permute: Backend | None = None
    """Bringing tokens to their experts and back."""

    rms_norm: Backend | None = None
    """RMSNorm."""

    rope: Backend | None = None
    """Rotary positions."""

    routing: Backend | None = None
    """Scores, top-k and weights of the router."""

    swiglu: Backend | None = None
    """SwiGLU of dense layers and shared experts."""

    def of(self, operator: str) -> str:
        """Return the backend that an operator is asked to have."""
        return getattr(self, operator) or self.default

    def backends(self) -> dict[str, str]:
        """Return the operators that are named, and their backends."""
        named = {f.name: getattr(self, f.name) for f in fields(self)[3:]}
        return {name: backend for name, backend in named.items() if backend is not None}


Recomputed = Literal["mla_up", "norms", "swiglu", "permute", "moe"]


@section
class Sharding:
    """`telechat_moe.sharding`: how the model is split, beyond the degrees of `parallel_config`."""

    dispatcher: Literal["auto", "alltoall", "allgather", "alltoallv"] = "auto"
    """In which form rows reach their experts, within a node where `moe_token_dispatcher_type` takes two hops. `alltoallv`:
    exactly the rows that were routed. `alltoall`: padded buffers, of `moe_expert_capacity_factor` or, dropless, of the worst
    case. `allgather`: every device sees all tokens of its expert group. `auto`: `alltoallv` with
    `alltoall_zero_redundancy`, and on Ascend where no tokens are dropped; else `alltoall`."""

    expert_tensor_parallel: bool = False
    """Cut each expert's width over `model_parallel` and spread experts over `data_parallel` only.
    False: whole experts on all devices of the expert group (TP-extend-EP)."""

    overlap_exchange: bool = field(
        default=False,
        metadata=decides("graph")
        | only_ours(
            "it is for CPU processes; on Ascend `pp_1f1b_overlap` of `parallel_speed_up_json_path`"
        ),
    )
    """On CPU processes, with `alltoallv`: rows travel between devices in the background while the graph computes what does
    not need them: the other pass of a pair of `pipeline_schedule` (`1f1b-overlap`, `dualpipev`; with one stage each
    forward beside the backward of the micro-batch before), shared experts and weight gradients. The same bits."""

    pipeline_schedule: Text | None = field(
        default=None,
        metadata=decides("graph")
        | only_ours(
            "it is for CPU processes; MindSpore's are `parallel.pipeline_config.pipeline_scheduler`"
        ),
    )
    """Order of a pipeline's passes on CPU processes: a published schedule of the planner (`telechat-moe plan schedule`),
    `synthesised`, or a JSON file of a program. dX and dW run apart where it says so. Its chunks must be where the layout
    has them: one a stage, in turn, or in a V (`zero_bubble_v`). None: MindSpore's own order."""

    recompute: list[Recomputed] = field(default_factory=list[Recomputed])
    """Modules computed again in the backward pass: `mla_up` (query and key-value up-projections),
    `norms`, `swiglu` (dense layers and shared experts), `permute` (bringing tokens to experts and back),
    `moe` (router, dispatch and experts)."""


@section
class SwapPool:
    """`telechat_moe.swap`: where a CPU process keeps what `swap_config` and `optimizer.swap` take out of the memory of its graph."""

    pool_folder: Text | None = None
    """Folder for a file without a name, which is gone with its process. None: in memory that belongs to no graph."""

    pool_mib: Positive | None = None
    """MiB that a process may have there at once. More is an error before the first step. None: any amount."""


@section
class Saving:
    """How checkpoints are written. How often and how many: `callbacks[]` CheckpointMonitor."""

    background: bool = True
    """Write while training goes on, which stops only to copy the parameters.
    False: as `callbacks[].async_save` says, which is also what MindFormers goes by."""

    memory_share: Annotated[float, Range(0, 1)] = 0.02
    """On CPU: how much of the machine's memory the copies of each process may take. Where they would take more, training stops
    until they are copied into the files of the checkpoint: several times as long, in no memory but the page cache. Parameters of
    a device are always copied into memory."""

    max_failed: Count = 0
    """Checkpoints in a row that may fail to be written, with a warning, before training stops. 0: stop at
    the first. The last one of a run must succeed."""


Factor = Annotated[float, Range(1, above=True)]


@section
class LossGuard:
    """`telechat_moe.loss_guard`: what counts as a spike of the loss, and what is done then.

    A step is a spike if its loss or its gradient norm is not below every limit that is set. Its update is not applied.
    The limits follow from the last steps that were applied. MindFormers' fixed threshold is
    `use_skip_data_by_global_norm`.
    """

    action: Literal["skip", "rollback"] = "skip"
    """`skip`: go on with the next batch. `rollback`: go back to the newest good checkpoint before the
    spike and go on with the data after it; what lies between is left out."""

    window: Positive = 64
    """Applied steps whose median is the measure."""

    min_steps: Positive = 16
    """Applied steps that must be in the window before the rules hold; at most `window`."""

    norm_factor: Factor | None = 10.0
    """Limit of the gradient norm, in medians of it. None: no such limit."""

    loss_factor: Factor | None = 1.5
    """Limit of the loss, in medians of it. None: no such limit."""

    sigma: Above0 | None = None
    """Limit of both, in standard deviations above the median (1.4826 times the median absolute
    deviation). None: no such limit."""

    rollback_steps: Count = 0
    """The checkpoint to go back to is at least so many steps older than the step before the spike."""

    max_rollbacks: Count = 3
    """Times that a run goes back; at the next spike it stops."""


@section
class ExpertPlacement:
    """`telechat_moe.moe.placement`: experts move between the devices of an expert group during training.

    Every `every` steps each MoE layer gets the assignment of experts to devices that balances the mean load of the last
    `window` steps, if what it saves until the next decision is more than the time of the moves. The numbers of a run stay
    what they are without.
    """

    every: Positive = 50
    """Steps between two decisions."""

    window: Positive = 20
    """Last steps whose mean load is the forecast of the next ones."""

    seconds_per_pair: Above0 = 1e-6
    """Time that a further (token, expert) pair on the busiest device adds to a step in one layer, seconds."""

    bandwidth: Above0 = 1e10
    """Bytes per second that a device sends and receives at the same time. The weights of an expert move with
    their moments."""


@section
class Moe:
    """`telechat_moe.moe`: experts during a run."""

    balance_group: Literal["dp", "ep"] = field(default="dp", metadata=decides("graph", "plugin"))
    """Whose tokens `moe_router_load_balancing_type: aux_loss` counts together: those of all devices of a micro-batch (`dp`),
    or of each expert group (`ep`; with `expert_tensor_parallel` also those of the devices between its members)."""

    load_interval: Count = field(default=50, metadata=only_ours(SPLIT))
    """Steps between two records of the load of every expert in `metrics.jsonl`, which `telechat-moe experts` and
    `telechat-moe plan simulate --expert-loads` read. 0: none."""

    placement: ExpertPlacement | None = field(
        default=None,
        metadata=decides("graph", inside=False)
        | only_ours("its step has no place in which experts could move between devices"),
    )
    """Where experts are. None: expert `i` stays on device `i // (E / expert_parallel)` of its group."""


@section
class TelechatMoe:
    """`telechat_moe`: what only this package reads. MindFormers drops the section with a warning."""

    evaluation: Evaluation = field(default_factory=Evaluation)
    """Validation while training."""

    corpus: CorpusSection = field(default_factory=CorpusSection, metadata=decides("data"))
    """Source of the training text."""

    conversations: Conversations | None = field(default=None, metadata=decides("data"))
    """The training data are conversations. None: they are text."""

    packing: Packing | None = None
    """Documents are packed by best fit. None: text is cut every `seq_length` tokens, as in MindFormers, and conversations are
    packed one after another."""

    sample: Sample | None = field(default=None, metadata=only_ours(SPLIT))
    """Text sample at the end. None: none."""

    saving: Saving = field(default_factory=Saving)
    """How checkpoints are written."""

    mixture: list[MixtureSegment] | None = None
    """Weights of the sources that change during the run. `data_path` names the sources, without weights; each is read in
    passes of its own, as often as its share takes. Where a run resumes, items from the next sample on may be others,
    and there may be more samples or sources. None: the weights of `data_path` throughout."""

    resume_data: Literal["same", "new"] = "same"
    """Data of a run that resumes. `same`: they go on where the checkpoint stopped; other data are refused. `new`: data
    other than the checkpoint's begin at their first sample, while step, moments and learning rate go on."""

    balance_attention: bool = False
    """Deal the samples of each global batch to data-parallel ranks and micro-batches so that attention within documents
    (`reset_attention_mask`) costs all ranks the same. False: in the order of the data, as MindFormers."""

    max_skipped_steps: Count = 10
    """Steps in a row with NaN, Inf or a spike that are skipped before training stops. 0: stop at the
    first."""

    step_batch_size_schedule: Annotated[str, Form(PATTERN, 'as "0:8 250K:16"')] | None = field(
        default=None,
        metadata=only_ours(
            "a step grows by micro-batches, of which it has one, or a number that is compiled in"
        ),
    )
    """Global batch by consumed tokens, `"THRESHOLD:SAMPLES ..."`, as Megatron's option of this name: a step takes the samples
    of the last threshold that is reached when it begins. Suffixes K, M, B, T. The largest is the recipe's, all are whole
    micro-batches of all data-parallel ranks. None: the same in every step."""

    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = None
    """How the rate of `WarmUpStableDecayLR` falls, with Megatron's names. None: linear, as in MindFormers."""

    ema: Ema | None = field(default=None, metadata=only_ours(SPLIT))
    """Average of the weights. None: none is kept."""

    loss_guard: LossGuard | None = field(default=None, metadata=only_ours(SPLIT))
    """Rules against spikes of the loss. None: only NaN and Inf are skipped."""

    weight_decay_exclude: list[Text] = field(
        default_factory=lambda: [r".*norm.*", r".*bias"], metadata=decides("graph", "plugin")
    )
    """Regular expressions for names of parameters without weight decay."""

    moe_block_rows: Positive | None = field(default=None, metadata=decides("plugin"))
    """Rows per block of the dropless experts on plain operators. None: chosen from the batch."""

    moe_capacity_tokens: Positive | None = field(default=None, metadata=decides("graph", "plugin"))
    """Tokens that share an expert's capacity. None: those of a device in one micro-batch, so that
    drops depend on the layout; a number that divides them makes drops the same everywhere. In one process on CPU it
    needs plain `permute` and `grouped_matmul`."""

    moe: Moe = field(default_factory=Moe)
    """What is done with experts during a run."""

    sharding: Sharding = field(default_factory=Sharding, metadata=decides("graph", "plugin"))
    """How the model is split over devices."""

    operators: Operators = field(default_factory=Operators, metadata=decides("graph", "plugin"))
    """What computes each operator."""

    swap: SwapPool | None = field(
        default=None,
        metadata=only_ours("the pool is of CPU processes; on Ascend `swap_config` has no size"),
    )
    """Where swapped activations and moments wait on CPU processes. None: in memory, any amount."""
