"""Put layouts on the primitives of a built model, before it is compiled.

Nothing is computed here. What a layout cannot say (collectives in the middle of a module) is a cell of
``telechat_moe.sharding.cells`` that replaces one of the model's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms

from telechat_moe.errors import BadInputError
from telechat_moe.model.attention import MultiLatentAttention, ShareKey
from telechat_moe.model.block import Block, MoE
from telechat_moe.model.causal_lm import CausalLM
from telechat_moe.model.experts import ExpertProducts
from telechat_moe.model.linear import MLP
from telechat_moe.model.mtp import MTPLayer
from telechat_moe.model.router import Router
from telechat_moe.ops import select
from telechat_moe.ops.attention import AscendAttention, PlainAttention
from telechat_moe.sharding.cells.collective import (
    Group,
    ParallelCrossEntropy,
    RouterLosses,
    VocabularyRows,
)
from telechat_moe.sharding.cells.dispatch import (
    AllToAllVDispatch,
    DispatchSpec,
    ExpertSlots,
    PaddedDispatch,
    RoutedRowsDispatch,
    slots_name,
)
from telechat_moe.sharding.cells.flash import FirstKeys, FlashSlice
from telechat_moe.sharding.cells.hierarchical import RoutedNodeDispatch, SortedNodeDispatch
from telechat_moe.sharding.cells.parts import EarlierParts, KeptRows, PartMask
from telechat_moe.sharding.layouts import LayoutRule, balance_axes
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.placement import ModelPlacement, unplaced
from telechat_moe.sharding.stages import StageChunk, Stages

COLLECTIVES = ("AllGather", "AllReduce", "AlltoAll", "AlltoAllV", "ReduceScatter")


@dataclass(frozen=True)
class Options:
    """What a recipe chooses besides the mesh.

    Args:
        dispatcher: ``alltoall``, ``allgather`` or ``alltoallv``.
        balance_group: ``telechat_moe.moe.balance_group``.
        hop: Which tokens pass between nodes in a first hop, see :data:`telechat_moe.recipe.experts.HOPS`; empty: there is none.
        sequences: ``B`` of a micro-batch, over all devices.
        stages: Where the cells are in the pipeline; None without one.
        mask: The batch brings an attention mask.
        shared_graph: Micro-batches share one graph.
        stubs: Replace the cells of other stages by shape-only stubs; only where micro-batches share one graph.
        movable: Experts have slots that the host may change between steps.
        parts: Parts of a sequence that go through the pipeline one after the other.
        flash: Attention is our CPU kernel, which takes each process's own rows of queries.
    """

    dispatcher: str
    sequences: int
    stages: Stages | None = None
    mask: bool = False
    shared_graph: bool = False
    stubs: bool = False
    hop: str = ""
    balance_group: str = "dp"
    movable: bool = False
    parts: int = 1
    flash: bool = False


def place(model: CausalLM, mesh: Mesh, rank: int, options: Options) -> ModelPlacement:
    """Split a model over a mesh.

    Args:
        model: Built with plain or Ascend backends; the last thing done to it before it is compiled.
        options: Choices besides the mesh.

    Raises:
        BadInputError: A layout that MindSpore would turn into wrong numbers.
    """
    _refuse(model, mesh, options)
    p = ModelPlacement(mesh, rank)
    vocabulary = p.group(mesh.axes("tp"))
    p.cell(model.embedding, "Embedding")
    if mesh.pp > 1 and not options.shared_graph:
        # The first stage's passes begin where a primitive reads a parameter; MindSpore sees none in a Morph
        # ("backward_node's size: 0") unless micro-batches share one graph.
        p.cell(model.embedding.rows, "TableRows")
    else:
        model.embedding.rows = VocabularyRows(vocabulary, mesh.sp)
        p.morphed(model.embedding.rows.run, "VocabularyRows")
    p.cell(model.rope, "RopeTable")
    model.mask.stretch = False
    p.cell(model.mask, "AttentionMask")
    if options.flash:
        model.mask.backend = "fused"
        model.mask.start = FirstKeys(_first_query(p, model.config.seq_length))
        p.morphed(model.mask.start.run, "FirstKeys")
    if options.parts > 1:
        model.part_mask = PartMask(model.config.seq_length, options.parts, model.mask.backend)
        p.morphed(model.part_mask.run, "PartMask")
        p.morphed(model.part_mask.find, "PartMask.part")
    for layer in model.layers:
        _block(p, layer, options)
    p.cell(model.norm, "RMSNorm")
    if model.tied:
        p.cell(model, "CausalLM.tied")
    else:
        p.cell(model.head, "Linear.column")
    _losses(p, model, vocabulary)
    if model.mtp_depth:
        if model.sums:
            p.put(model.concat_mtp, LayoutRule((".",) * (model.mtp_depth | 1), (), "tuple"))
        model.shift = p.local(model.shift, "ShiftLeft")
        for layer in model.mtp:
            _mtp(p, layer, options)
    _name_collectives(model)
    if options.stages is not None:
        _stages(p, model, options.stages, options.stubs)
    forgotten = unplaced(model, p) if mesh.stage_devices > 1 else []
    if forgotten:
        raise BadInputError(
            f"{len(forgotten)} primitives have no layout, and MindSpore would choose one: "
            + ", ".join(forgotten[:8])
        )
    return p


def _name_collectives(model: CausalLM) -> None:
    """Write the module's name on each collective of a Morph cell, whose position in the graph MindSpore forgets."""
    for name, cell in model.cells_and_names():
        for primitive in getattr(cell, "_primitives", {}).values():
            if primitive is not None and primitive.name in COLLECTIVES:
                primitive.add_prim_attr("module", name)


def _refuse(model: CausalLM, mesh: Mesh, options: Options) -> None:
    """Refuse a model that cannot be placed."""
    if getattr(model, "compile_cache", None):
        raise BadInputError(
            "the model was compiled before: MindSpore keeps that graph and ignores a placement; build a new model"
        )
    length = model.config.seq_length // options.parts
    rows = options.sequences * length
    if rows % mesh.stage_devices:
        tokens = f"seq_length {model.config.seq_length}"
        tokens += f" / {options.parts} parts" if options.parts > 1 else ""
        raise BadInputError(
            f"{options.sequences} sequences x {tokens} = {rows} rows do not spread over the "
            f"{mesh.stage_devices} devices of a stage"
        )
    state = [p.name for p in model.get_parameters() if not p.requires_grad and p.parallel_optimizer]
    if state:
        raise BadInputError(
            f"{state[0]} is not trained and has parallel_optimizer on: MindSpore would shard it over all devices"
        )


def _stages(p: ModelPlacement, model: CausalLM, stages: Stages, stubs: bool) -> None:
    """Assign every cell to its pipeline stage: embedding first, head, losses and MTP last (in a V on stage 0, too).

    With stubs, no cell of another stage is left. MindSpore takes that only where micro-batches share one
    graph; else it wants a parameter of every stage in each ("Stage 0 should has at least 1 parameter").

    MTP's tokens are embedded and normalised on the first stage and sent to the last one, ``T * H`` values a
    micro-batch in the compute type. Upstream sends the table instead, once a step and in fp32, and its gradient
    back: twice the bytes in the 105B recipe (8 micro-batches: 21 against 42 MB each way), and MindSpore 2.9.0 refuses
    it with a sharded optimizer here.
    """
    own_stage, layers, last = p.mesh.stage(p.rank), stages.layers, stages.head
    p.v_shape = stages.v_shape

    def away(chunk: StageChunk) -> bool:
        return stubs and chunk.stage != own_stage

    if model.mtp_depth and p.mesh.pp == 2 and away(last) and last not in layers:
        # MindSpore 2.9.0 cannot add up the gradients of a stage that passes MTP's embeddings and the last
        # layer's output to the same chunk, unless something passes the output on before MTP.
        model.layers.append(p.stub(model.layers[-1], last))
    p.assign_stage(model.embedding, StageChunk(0, 0))
    if away(StageChunk(0, 0)):
        model.embedding = p.stub(model.embedding, StageChunk(0, 0))
    for i, chunk in enumerate(layers):
        p.assign_stage(model.layers[i], chunk)
        if away(chunk):
            model.layers[i] = p.stub(model.layers[i], chunk)
    names = ["norm", "loss"] if model.tied else ["norm", "loss", "head"]
    names += ["mtp_loss"] if model.mtp_depth else []
    names += ["by_source"] if model.by_source is not None else []
    for name in names:
        p.assign_stage(getattr(model, name), last)
        if away(last):
            setattr(model, name, p.stub(getattr(model, name), last))
    if model.mtp_depth:
        _mtp_stages(p, model, last, away)


def _mtp_stages(
    p: ModelPlacement, model: CausalLM, last: StageChunk, away: Callable[[StageChunk], bool]
) -> None:
    """Assign MTP to the head's stage, and what embeds its tokens to the first."""
    if model.part_mask is None:  # else the step calls it, before it cuts the sequences
        p.assign_stage(model.shift, last)
    for i in range(model.mtp_depth):
        norm = model.mtp[i].embed_norm
        p.assign_stage(norm, StageChunk(0, 0))
        p.assign_stage(model.mtp[i], last)
        if away(last):
            model.mtp[i] = p.stub(model.mtp[i], last)
            model.mtp[i].embed_norm = norm
        if away(StageChunk(0, 0)):
            model.mtp[i].embed_norm = p.stub(norm, StageChunk(0, 0))


def _losses(p: ModelPlacement, model: CausalLM, vocabulary: Group) -> None:
    names = ["loss", "mtp_loss"] if model.mtp_depth else ["loss"]
    for name in names:
        unsplit = getattr(model, name)
        loss = ParallelCrossEntropy(vocabulary, unsplit.sums)
        loss.by_token, loss.marked = unsplit.by_token, unsplit.marked
        p.cell(loss, "ParallelCrossEntropy")
        p.morphed(loss.token_loss.run, "TokenCrossEntropy")
        setattr(model, name, loss)
    sums = 2 * model.sources

    def shape_of_sums(loss: Any, marked: Any) -> Any:
        return [sums]

    if model.by_source is not None:
        model.by_source = p.local(model.by_source, "LossBySource", shape_of_sums)


def _mtp(p: ModelPlacement, layer: MTPLayer, options: Options) -> None:
    for norm in (layer.embed_norm, layer.hidden_norm, layer.norm):
        p.cell(norm, "RMSNorm")
    p.cell(layer, "MTPLayer")
    p.cell(layer.proj, "Linear.replicated")
    _block(p, layer.block, options)


def _block(p: ModelPlacement, block: Block, options: Options) -> None:
    p.cell(block, "Block")
    p.cell(block.input_norm, "RMSNorm")
    p.cell(block.ffn_norm, "RMSNorm")
    p.cell(block.add_attention, "AddRMSNorm")
    _attention(p, block.attention, options)
    if block.is_moe:
        _moe(p, block.moe, options)
    else:
        _mlp(p, block.ffn)


def _mlp(
    p: ModelPlacement, mlp: MLP, into: str = "column", act: str = "SwiGLU", out: str = "row"
) -> None:
    p.cell(mlp.gate, f"Linear.{into}")
    p.cell(mlp.up, f"Linear.{into}")
    mlp.act = p.local(mlp.act, act)
    p.cell(mlp.down, f"Linear.{out}")


def _attention(p: ModelPlacement, attention: MultiLatentAttention, options: Options) -> None:
    p.cell(attention, "MultiLatentAttention")
    if attention.compress_query:
        p.cell(attention.q_down, "Linear.replicated")
        p.cell(attention.q_up, "Linear.column")
    else:
        p.cell(attention.q_proj, "Linear.column")
    p.cell(attention.kv_down, "Linear.replicated")
    p.cell(attention.kv_up, "Linear.column_whole")
    p.cell(attention.out, "Linear.row")
    if attention.norm_latents:
        p.cell(attention.kv_norm, "RMSNorm")
        if attention.compress_query:
            p.cell(attention.q_norm, "RMSNorm")
    attention.rope_query = p.local(attention.rope_query, "Rope.query")
    attention.rope_key = p.local(attention.rope_key, "Rope.key")
    heads = attention.num_heads
    share = ShareKey(heads // p.mesh.tp)

    def shape_of_keys(shape: Any) -> Any:  # MindSpore parses it, and parses no lambda here
        return [shape[0], shape[1], heads, shape[3]]

    attention.share_key = p.local(share, "ShareKey", shape_of_keys)
    if options.parts > 1:
        _earlier_parts(p, attention, options)
    core = attention.core
    if isinstance(core, AscendAttention):
        _flash(p, core)
        return
    if options.flash:
        first = _first_query(p, attention.config.seq_length)
        attention.core = FlashSlice(float(core.scale.asnumpy()), first)
        p.morphed(attention.core.run, "FlashSlice")
        return
    attention.core = PlainAttention(float(core.scale.asnumpy()), core.softmax_dtype)
    p.cell(attention.core, "PlainAttention")
    mask = "batch . seq ." if options.mask or options.parts > 1 else ". . seq ."
    p.put(attention.core.add_mask, LayoutRule(("batch tp seq .", mask)))


def _first_query(p: ModelPlacement, length: int) -> int:
    """Return where the queries of this rank begin in a sequence."""
    shared = p.group(p.mesh.axes("cp"))
    return length // shared.size * shared.member


def _earlier_parts(p: ModelPlacement, attention: MultiLatentAttention, options: Options) -> None:
    length, dtype = attention.config.seq_length, attention.kv_down.carried
    caches = [
        KeptRows(options.sequences, p.mesh.dp, length, width, options.parts, dtype)
        for width in (attention.kv_rank, attention.rotary)
    ]
    for rows in caches:
        p.cell(rows, "KeptRows")
        p.morphed(rows.run, "KeptRows")
    attention.earlier = EarlierParts(*caches)
    owner = attention.kv_up.weight.name.removesuffix("kv_up.weight")
    for parameter in attention.earlier.get_parameters():  # named as if the cell had no owner
        parameter.name = owner + parameter.name


def _flash(p: ModelPlacement, core: AscendAttention) -> None:
    q, kv = "batch tp seq .", "batch tp . ."
    p.put(core.flash, LayoutRule((q, kv, kv, "batch . seq ."), (), "coarse"))
    p.put(core.flash_causal, LayoutRule((q, kv, kv, ". ."), (), "coarse"))


def _moe(p: ModelPlacement, moe: MoE, options: Options) -> None:
    mesh, router = p.mesh, moe.router
    p.cell(moe, "MoE")
    if moe.has_shared and mesh.sp:
        # Whole on every device, each with its own rows: no row travels. Without sequence parallel all
        # devices have the same rows, and this would be the same work tp times.
        _mlp(p, moe.shared, "replicated", "SwiGLU.replicated", "replicated")
    elif moe.has_shared:
        _mlp(p, moe.shared)
    _router(p, router, options)
    routed = options.dispatcher == "alltoallv"  # the others have buffers of each expert
    on_ascend = select.target() == "Ascend"
    products = ("ascend" if on_ascend else "fused") if routed else "plain"
    moe.experts.products = ExpertProducts(products)
    p.cell(moe.experts, "Experts")
    groups = {hop: p.group_of("ep", ranks) for hop, ranks in mesh.node_groups(p.rank).items()}
    within, across = groups["within"], groups["across"]
    if options.dispatcher == "allgather":
        within, across = across, within
    tensor = p.group(mesh.axes("tp")) if mesh.expert_tp else None
    dropped = getattr(moe.dispatch, "dropped", None)
    name = dropped.name if dropped is not None else ""
    spec = DispatchSpec(
        router.config,
        moe.experts.products,
        within,
        across,
        tensor,
        mesh.sp,
        getattr(moe.dispatch, "capacity_tokens", None),
        dropped,
        _slots(p, router) if options.movable else None,
    )
    if not routed:
        moe.dispatch = PaddedDispatch(spec)
    elif options.hop:
        kind = SortedNodeDispatch if on_ascend else RoutedNodeDispatch
        moe.dispatch = kind(spec, options.hop == "once")
    else:
        moe.dispatch = (AllToAllVDispatch if on_ascend else RoutedRowsDispatch)(spec)
    row = "Dispatch.expert_tp" if mesh.expert_tp else "Dispatch"
    if dropped is not None:
        row, dropped.name = f"{row}.capacity", name  # MindSpore has renamed it
    if spec.slots is not None:
        spec.slots.slot_E.name = slots_name(router.weight.name)
    p.morphed(moe.dispatch.run, row)
    p.cell(moe.dispatch, "Dispatch")


def _slots(p: ModelPlacement, router: Router) -> ExpertSlots:
    slots = ExpertSlots(router.num_experts)
    p.morphed(slots.run, "ExpertSlots.expert_tp" if p.mesh.expert_tp else "ExpertSlots")
    return slots


def _router(p: ModelPlacement, router: Router, options: Options) -> None:
    mesh = p.mesh
    p.cell(router, "Router")
    top_k = router.top_k

    def shapes(logits: Any, bias: Any) -> Any:
        chosen = [logits[0], top_k]
        return logits, chosen, chosen, logits, bias

    def types(logits: Any, bias: Any) -> Any:
        return logits, ms.int32, logits, logits, bias

    router.choose = p.local(router.choose, "Routing", shapes, types)
    balance = router.balance
    losses = router.losses = RouterLosses(
        balance,
        router.z_loss,
        options.sequences // mesh.dp if balance.kind == "seq_aux_loss" else 1,
        p.group(balance_axes(mesh, balance.kind, options.balance_group)),
        p.group(mesh.axes("dp", "cp", "tp")),
    )
    p.morphed(losses.run, "RouterLosses.by_step" if balance.by_step else "RouterLosses")
