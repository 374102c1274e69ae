"""How a step is divided over devices and time: the variables of the planner."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Literal, cast, get_args

from telechat_moe.errors import BadInputError
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.parallel import ParallelConfig
from telechat_moe.recipe.swap import swapped

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev", "overlap"
]
Compute = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]
Ends = Literal["last", "mtp-before"]
TokenExchange = Literal["alltoall", "alltoall_deredundency", "alltoall_zero_redundancy"]
"""How tokens reach their experts: values of `moe_token_dispatcher_type`; see `expert_exchange`."""
MODULES = {"norm": "norms", "activation": "swiglu"}
"""Words of `Layout.recompute`, and the names that recipes use for these modules."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Kernels and overlap of the software that runs a step; recipes use the defaults, published tables do not."""

    input_bytes: int = 2
    """Bytes per element of the products' inputs kept for the backward pass; 1 for float8 (Transformer Engine)."""
    flash: bool = True
    """Attention without score-sized tensors in memory."""
    fused: bool = True
    """Norms, activations and losses as single kernels (a compiler or a fused library)."""
    fused_attention: bool = True
    """The attention kernel of a current library; False: the first flash kernels."""
    fused_loss: bool = True
    """The cross-entropy reads the logits once or twice; False: operator by operator in float32."""
    overlap: bool = True
    """Gradient reduction and parameter gathering run under the backward pass."""
    tp_overlap: bool = False
    """Tensor-parallel collectives are divided and run during their matrix products."""
    cp_overlap: bool = True
    """Context parallelism sends keys and values around the ring during attention; False: those of all query heads are
    gathered before it, as in PyTorch's first ring attention."""
    hierarchical: bool = False
    """Dispatch sends a token once to each node that holds one of its experts."""
    ep_overlap: bool = False
    """All-to-all of one micro-batch runs under the computation of another."""
    single_experts: bool = False
    """Experts are launched one by one, in a loop of the host; False: as one grouped product."""
    fused_experts: bool = False
    """The experts' activation and casts are in their grouped products (NVIDIA's CuTe DSL kernels)."""
    permute_bytes: int = 16
    """Bytes moved to sort one element of the experts' rows and to restore its order; 8 where dispatch and combine do
    half of this (HybridEP)."""
    gathered: bool = False
    """torch's FSDP under a pipeline: a step's parameters stay gathered and its gradients whole until the last micro-batch,
    and the last stage keeps the output of every micro-batch."""
    graphs: bool = False
    """Kernels are launched as captured graphs (CUDA graphs, whole-graph sinking): no launch floor."""


STACK = tuple(f.name for f in fields(Stack))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel degrees, micro-batches, recomputation and order of one step.

    A pipeline stage has `dp x cp x tp` devices. Expert parallelism divides a stage: `ep` groups hold whole experts,
    `etp` devices share each expert's width, and the stage's other devices hold copies.
    """

    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    """Chunks of each stage."""
    ep: int = 1
    etp: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    """What is sharded over data parallelism: 1 optimizer, 2 and gradients, 3 and parameters."""
    opt_shards: int = 0
    """Devices over which `zero` shards; 0: all copies (`dp x cp`)."""
    fsdp: bool = False
    """ZeRO-3 whose parameters are gathered layer by layer, forward and backward."""
    micro_batch: int = 1
    """Sequences of one micro-batch on one data-parallel copy."""
    micro_batches: int = 1
    """Micro-batches of a step on one data-parallel copy."""
    recompute: str = "none"
    """`none`, `selective` (attention's core), `full`, or module names joined by `+`: `attention`, `mlp`, `experts`,
    `norm`, `core_attention`, `activation`; `save_qkv`: all except the query, key and value products; `save_half`: every
    other product; `full+early_stop`: `full` without the last product, whose result no backward pass needs (PyTorch's
    non-reentrant checkpoints). `swap`: nothing is recomputed, activations of whole layers wait in the host's memory."""
    recompute_layers: tuple[int, ...] | None = None
    """How many decoder layers of each global chunk, counted from its first, are recomputed or swapped; None: all."""
    recomputed: tuple[int, ...] | None = None
    """Numbers of the decoder layers that `full` recomputes; None: `recompute_layers` counts them."""
    swapped: tuple[int, ...] = ()
    """Numbers of the decoder layers whose activations wait in the host's memory, beside those that are recomputed or kept."""
    prefetch: int = 1
    """How many operators before its reader the way back of a swapped activation begins."""
    schedule: ScheduleName = "1f1b"
    chunks: tuple[int, ...] | None = None
    """Decoder layers of each global chunk, in the model's order (`pp x vpp` numbers); None: as even as possible, with
    one more in the first chunks. The embedding is in the first chunk, MTP and the head are in the last."""
    ends: Ends = "last"
    """Which chunk holds MTP's layer: the last one, with both heads, or the one before it (`mtp-before`), which then
    also ends the decoder layers and leaves only the heads for the last chunk."""
    compute: Compute = "bf16"
    """Type of the matrix products."""
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    """Bytes per parameter: float32 master copy and two moments."""
    host_bytes: int = 0
    """Bytes per parameter of moments that wait in the host's memory between updates, not in `optimizer_bytes`."""
    residual_bytes: int = 2
    """Bytes per element of the residual stream."""
    own_graph: bool = False
    """Whether the step is this package's, whose graph keeps what `saved` lists; else it keeps what frameworks share."""
    exchange: TokenExchange = "alltoall"
    """How tokens reach experts on other devices; other than direct where `ep` is several whole nodes."""
    skips: bool = True
    """The attention kernel skips pairs that no query sees; False: it gets a mask as a matrix and computes all."""
    stack: Stack = Stack()
    imbalance: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean of all."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch", "micro_batches"):
            if getattr(self, name) < 1:
                raise BadInputError(f"layout: {name} is {getattr(self, name)}, expected 1 or more")
        if self.dp * self.cp * self.tp % (self.ep * self.etp):
            raise BadInputError(
                f"layout: ep x etp = {self.ep} x {self.etp} does not divide the {self.dp * self.cp * self.tp} "
                "devices of a stage (dp x cp x tp)"
            )
        if self.ends != "last" and (self.pp == 1 or (self.chunks and self.chunks[-1])):
            raise BadInputError(
                f"layout: {self.ends} needs two stages at least, and no layers in the last chunk"
            )
        for name in ("chunks", "recompute_layers"):
            counts = getattr(self, name)
            if counts is not None and len(counts) != self.pp * self.vpp:
                raise BadInputError(
                    f"layout: {name} has {len(counts)} numbers, expected pp x vpp = {self.pp * self.vpp}"
                )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def global_batch(self) -> int:
        """Sequences of a step over all devices."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def expert_copies(self) -> int:
        """Devices of a stage that hold the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    def chunk_layers(self, layers: int) -> tuple[int, ...]:
        """Return the decoder layers of each global chunk.

        Raises:
            BadInputError: `chunks` does not hold as many layers as the model has.
        """
        if self.chunks is not None:
            if sum(self.chunks) != layers:
                raise BadInputError(
                    f"layout: chunks hold {sum(self.chunks)} layers, the model has {layers}"
                )
            return self.chunks
        count = self.pp * self.vpp - (self.ends != "last")
        even = tuple(layers // count + (i < layers % count) for i in range(count))
        return even + (0,) * (self.pp * self.vpp - count)

    def chunk_kinds(self, layers: Sequence[str]) -> list[list[tuple[str, bool]]]:
        """Return the kinds of layers in each global chunk, each with whether `recompute` is meant for it."""
        counts, marked = self.chunk_layers(len(layers)), self.recomputed
        chunks = [range(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]
        if marked is None:
            first = zip(chunks, self.recompute_layers or counts, strict=True)
            marked = {i for chunk, n in first for i in chunk[:n]}
        return [[(layers[i], i in marked) for i in chunk] for chunk in chunks]

    def short(self) -> str:
        """Return the degrees on one line, such as `dp4 tp8 pp8`."""
        degrees = {name: getattr(self, name) for name in ("tp", "cp", "pp", "vpp", "ep", "etp")}
        parts = [f"dp{self.dp}", *(f"{name}{n}" for name, n in degrees.items() if n > 1)]
        parts += ["sp"] if self.sequence_parallel and self.tp > 1 else []
        parts += [f"mbs{self.micro_batch}", f"m{self.micro_batches}", f"zero{self.zero}"]
        parts += [word for word in (self.recompute, self.ends) if word not in ("none", "last")]
        parts += [f"swap{len(self.swapped)}"] if self.swapped else []
        return " ".join(parts)

    def with_changes(self, **changes: object) -> "Layout":
        """Return a copy with some fields of the layout or of its stack changed."""
        stack = {name: changes.pop(name) for name in STACK if name in changes}
        if stack:
            changes["stack"] = replace(self.stack, **stack)  # type: ignore[arg-type]
        return replace(self, **changes)  # type: ignore[arg-type]

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Layout":
        """Return the layout that a recipe describes."""
        c, run, parallel = recipe.model_config, recipe.runner_config, recipe.use_parallel
        data = recipe.train_dataset.data_loader.config
        p = recipe.parallel_config if parallel else ParallelConfig()
        pipeline = recipe.parallel.pipeline_config
        pp = p.pipeline_stage
        interleaved = bool(pipeline and pipeline.pipeline_interleave and c.pp_interleave_num > 1)
        vpp = c.pp_interleave_num if interleaved and parallel else 1
        zero = 1 if recipe.parallel.enable_parallel_optimizer and parallel else 0
        detail = recipe.parallel.parallel_optimizer_config
        if zero and detail and detail.optimizer_level:
            zero = {"level1": 1, "level2": 2, "level3": 3}[detail.optimizer_level]
        count = p.micro_batch_num if pp > 1 else run.gradient_accumulation_steps
        schedule = _schedule(pipeline.pipeline_scheduler if pipeline else "1f1b", vpp)
        v_shape = schedule == "zb-v" and vpp == 2
        recompute, layers = _recompute(recipe, pp * vpp, v_shape)
        swaps = swapped(recipe)
        named = recipe.recompute_config.recompute if recipe.swap_config.swap else None
        width = {"float32": 4, "fp32": 4}.get(c.params_dtype, 2)
        compute: Compute = "fp32" if c.compute_dtype in ("float32", "fp32") else "bf16"
        return cls(
            dp=p.data_parallel,
            tp=p.model_parallel,
            sequence_parallel=p.use_seq_parallel,
            cp=p.context_parallel,
            pp=pp,
            vpp=vpp,
            ep=p.expert_parallel,
            etp=p.model_parallel if recipe.telechat_moe.sharding.expert_tensor_parallel else 1,
            zero=zero,  # type: ignore[arg-type]
            opt_shards=max((detail and detail.optimizer_weight_shard_size) or 0, 0),
            micro_batch=run.batch_size,
            micro_batches=count * recipe.micro_batch_interleave_num,
            recompute=recompute,
            recompute_layers=layers,
            recomputed=tuple(_flat(named)) if isinstance(named, list) else None,
            swapped=tuple(swaps),
            prefetch=max((n for parts in swaps.values() for n in parts.values()), default=1),
            schedule=schedule,
            chunks=_chunks(c.offset, c.num_hidden_layers, pp * vpp, v_shape),
            compute=compute,
            parameter_bytes=width,
            gradient_bytes=width,
            optimizer_bytes=(0 if width == 4 else 4) + 8 * (not recipe.optimizer.swap),
            host_bytes=8 * recipe.optimizer.swap,
            residual_bytes=4 if c.fp32_residual_connection else 2,
            exchange=cast("TokenExchange", kind)
            if (kind := c.moe_token_dispatcher_type) in get_args(TokenExchange)
            else "alltoall",
            skips=not (data and data.create_attention_mask),
            own_graph=True,
        )


def _schedule(word: str, vpp: int) -> ScheduleName:
    named: dict[str, ScheduleName] = {"gpipe": "gpipe", "zero_bubble_v": "zb-v"}
    return named.get(word, "interleaved" if vpp > 1 else "1f1b")


Nested = int | list[int]


def _flat(entries: Sequence[Nested], v_shape: bool = False) -> list[int]:
    """Return the numbers of a list that may hold lists, in the model's order: a V's second list begins at the last stage."""
    rows = [entry if isinstance(entry, list) else [entry] for entry in entries]
    return [int(x) for i, row in enumerate(rows) for x in (row[::-1] if v_shape and i else row)]


def _chunks(offset: object, layers: int, count: int, v_shape: bool) -> tuple[int, ...] | None:
    """Return layers per global chunk; `offset` is 0, a list per stage, or lists [chunk][stage]."""
    flat = _flat(cast("list[Nested]", offset), v_shape) if isinstance(offset, list) else []
    return tuple(layers // count + extra for extra in flat) if len(flat) == count else None


def _recompute(recipe: Recipe, chunks: int, v_shape: bool) -> tuple[str, tuple[int, ...] | None]:
    """Return the policy and, where a recipe lists layers, how many of each global chunk."""
    section = recipe.recompute_config
    layers = section.recompute
    module_names = recipe.telechat_moe.sharding.recompute
    modules = [word for word, name in MODULES.items() if name in module_names]
    if layers:
        flat = _flat(layers, v_shape) if isinstance(layers, list) else []
        counts = len(flat) == chunks and not recipe.swap_config.swap  # else they name layers
        return "full", tuple(flat) if counts else None
    if modules:
        return "+".join(modules), None
    return ("selective", None) if section.select_recompute else ("none", None)
