"""Compare the compiled graph of MindFormers' own TeleChat3-MoE class with ours: parameters and operators.

Both are compiled for Ascend on this machine, from the same recipe, and nothing is run. benchmarks/upstream/README.md has the tables of
one device and what they mean.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from telechat_moe.graph.compile import LayoutEntry, RankGraph
from telechat_moe.interop import upstream_names
from telechat_moe.interop.mindformers_dryrun import compile_mindformers
from telechat_moe.recipe import Recipe, load
from telechat_moe.recipe.weights import Shape

# One device, all kinds of layers: the operators of the model without those of its layout. With few experts and
# a small vocabulary, because a graph of one device holds all weights in memory (over 40 GB otherwise).
ONE_DEVICE = (
    *(f"parallel_config.{key}_parallel=1" for key in ("data", "model", "expert")),
    "parallel_config.pipeline_stage=1",
    "parallel_config.micro_batch_num=1",
    "parallel_config.use_seq_parallel=False",
    "parallel.enable_parallel_optimizer=False",
    "recompute_config.recompute=False",
    "model.model_config.offset=0",
    "model.model_config.num_hidden_layers=2",
    "model.model_config.n_routed_experts=16",
    "model.model_config.vocab_size=1024",
)
TRAINER = ("trainer.type=CausalLanguageModelingTrainer", "trainer.auto_register=null")
# With these the table says in which type they compute.
COMPUTES = (
    "Dense",
    "Exp",
    "FlashAttentionScore",
    "GroupedMatmul",
    "MatMul",
    "RmsNorm",
    "Sigmoid",
    "Swiglu",
)
_TYPES = {1: "fp32", 10: "fp16", 16: "bf16"}
COLLECTIVE = re.compile(r"All(Reduce|Gather)|ReduceScatter|AlltoAllV?|Send|Receive|Broadcast")


class Component(NamedTuple):
    """A component of the model, and its modules in either graph.

    Attributes:
        upstream: Regular expression for the dotted names of its modules, without the layer in front.
    """

    name: str
    upstream: str
    ours: str


_MLP = r"linear_fc\d|activation_func"
COMPONENTS = (
    Component("embedding", r"embedding.*|mtp\.embedding.*", r"embedding.*"),
    Component("angles of positions", r"rotary_pos_emb", r"rope"),
    Component("rotation", r"self_attention\.apply_rotary.*", r"attention\.(rope_|share_key).*"),
    Component("norms", r".*(layernorm|enorm|hnorm)", r"(.*\.)?\w*norm"),
    Component(
        "products of attention", r"self_attention\.linear.*", r"attention\.(\w+_(down|up|proj)|out)"
    ),
    Component("attention", r"self_attention.*", r"attention.*"),
    Component(
        "dense and shared MLP", rf"dense|mlp\.({_MLP}|shared_experts.*)", r"(ffn|moe\.shared).*"
    ),
    Component("router and balance loss", r"mlp\.router", r"moe\.router.*"),
    Component("dispatch, experts, combine", r"mlp.*", r"moe.*"),
    Component("residual stream", r"", r"|add_\w+"),
    Component("MTP", r"mtp|eh_proj|mtp\.layers\.\d+", r"model|mtp\.\d+(\.proj)?"),
    Component("head", r"output_layer|mtp\.output_layer|model", r"head"),
    Component(
        "losses", r"(.*\.)?(loss|cross_entropy|preprocess).*", r"(mtp_)?loss.*|add_mtp|scale_mtp"
    ),
)
# MindSpore forgets the module of what is in a Morph; its neighbours tell: (producer, consumer) to component.
_BETWEEN = {
    ("products of attention", "residual stream"): "products of attention",
    ("dense and shared MLP", "residual stream"): "dense and shared MLP",
    ("router and balance loss", "residual stream"): "router and balance loss",
    ("router and balance loss", "dispatch, experts, combine"): "router and balance loss",
}


@dataclass(frozen=True)
class Row:
    """One parameter of upstream's class and ours.

    Attributes:
        upstream: Name.
        ours: Our names that it holds.
        layout: How; see :class:`telechat_moe.interop.upstream_names.FusedWeight`.
        shape: Whole shape of upstream's, None: not in its graph.
        our_shapes: Whole shapes of ours, None: not in our graph.
        problem: How it differs from the table of names; empty where it does not.
    """

    upstream: str
    ours: tuple[str, ...]
    layout: str
    shape: Shape | None
    our_shapes: tuple[Shape | None, ...]
    problem: str = ""


def compile_both(
    recipe: str, rank: int = 0, overrides: Sequence[str] = ()
) -> tuple[RankGraph, RankGraph, Recipe]:
    """Compile a rank of MindFormers' own class and of our model.

    Returns:
        Upstream's graph, ours, and the recipe.
    """
    from telechat_moe.train.rank_graph import compile_recipe

    loaded = load(recipe, overrides)
    needed = upstream_names.settings(loaded.model_config)
    keys = [f"model.model_config.{key}={json.dumps(value)}" for key, value in needed.items()]
    (theirs,) = compile_mindformers(recipe, [rank], overrides=[*overrides, *keys, *TRAINER])
    (ours,) = compile_recipe(loaded, [rank])
    return theirs, ours, loaded


def parameters(graph: RankGraph) -> dict[str, Shape]:
    """Return the trained parameters of a graph, with the shapes that they have before they are split."""
    from telechat_moe.graph.mindir import MindIR

    own = {p.name.split(":")[-1]: tuple(p.dims) for p in MindIR(graph.mindir).proto.graph.parameter}
    trained = [name.removeprefix("adam_m.") for name in own if name.startswith("adam_m.")]
    return {name: _whole(graph.layouts.get(name), own[name]) for name in trained}


def _whole(layout: LayoutEntry | None, own: Shape) -> Shape:
    """Return the shape before splitting from MindSpore's layout entry, a parameter's own where it has none."""
    return tuple(layout.shape) if layout and layout.shape else own


# Of MTP's input: MindFormers reads it on the last stage, where its embedding is a second copy; ours on the first.
_MTP_INPUT = re.compile(r"embedding\.weight|mtp\.\d+\.embed_norm\.weight")


def compare_parameters(
    theirs: RankGraph, ours: RankGraph, recipe: Recipe, stage: int | None = None
) -> list[Row]:
    """Return a row for each trained parameter that is in one of the graphs of a stage, None: of all stages."""
    found, own = parameters(theirs), parameters(ours)
    rows = []
    for pair in upstream_names.pairs(recipe.model_config):
        shape = found.pop(pair.upstream, None)
        our_shapes = tuple(own.pop(name, None) for name in pair.names)
        if not pair.is_trained or (shape is None and not any(our_shapes)):
            continue
        problem, layout = "", pair.layout
        first, apart = stage == 0, stage is not None and _MTP_INPUT.fullmatch(pair.names[0])
        if apart and first and shape is None and our_shapes == pair.shapes:
            layout = "MindFormers': on the last stage"
        elif apart and not first and shape == pair.shape and not any(our_shapes):
            layout = "ours: on the first stage"
        elif shape != pair.shape:
            problem = f"MindFormers has {_text(shape)}, expected {_text(pair.shape)}"
        elif our_shapes != pair.shapes:
            said = ", ".join(map(_text, our_shapes))
            problem = f"ours are {said}, expected {', '.join(map(_text, pair.shapes))}"
        rows.append(Row(pair.upstream, pair.names, layout, shape, our_shapes, problem))
    rows += [Row(n, (), "", s, (), "MindFormers' only, in no table") for n, s in found.items()]
    rows += [Row("", (n,), "", None, (s,), "ours only, in no table") for n, s in own.items()]
    return rows


def _text(shape: Shape | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def operators(graph: RankGraph, upstream: bool) -> dict[str, Counter[str]]:
    """Return how often each component of the model has each primitive in the forward pass, without collectives.

    The names of :data:`COMPUTES` are followed by the type.

    Where MindSpore lost the module of a node, that of the parameter that it reads counts, else that of the nearest
    nodes around it.
    """
    from telechat_moe.graph.mindir import MindIR
    from telechat_moe.graph.nodes import STRUCTURE, Graph, call_counts

    model = MindIR(graph.mindir)
    functions = {proto.name: Graph(model, proto) for proto in model.graphs()}
    times = call_counts(model, functions)
    counts: dict[str, Counter[str]] = {}
    for name, function in functions.items():
        if not times[name]:
            continue
        parts = _parts(function, upstream)
        for node in function.nodes.values():
            kind = node.kind
            if not kind or kind == "Constant" or kind in STRUCTURE or COLLECTIVE.fullmatch(kind):
                continue
            if kind in COMPUTES:  # the last output of attention is its result
                kind += f" {_TYPES[node.shapes[-1][1]]}"
            if node.name in parts:
                counts.setdefault(parts[node.name], Counter())[kind] += times[name]
    return counts


def component_of(module: str, upstream: bool) -> str | None:
    """Return the component that a module belongs to, None if it is in none."""
    if upstream:
        layer = r"(model\.)?((decoder\.layers|mtp\.layers)\.\d+(\.transformer_layer)?\.?)?"
        if re.fullmatch(r"(model\.)?decoder\.layers\.\d+|.*\.transformer_layer", module):
            return "residual stream"
        if re.fullmatch(r"model\.mtp\.layers\.\d+", module):
            return "MTP"
    else:
        layer = r"((layers\.\d+|mtp\.\d+\.block)\.?)?"
        if re.fullmatch(r"layers\.\d+|mtp\.\d+\.block", module):
            return "residual stream"
    inner = re.sub(f"^{layer}", "", module) if module != "model" else module
    patterns = ((part.name, part.upstream if upstream else part.ours) for part in COMPONENTS)
    return next((name for name, p in patterns if inner and re.fullmatch(p, inner)), None)


def _parts(function: Any, upstream: bool) -> dict[str, str]:
    """Return the component of each forward node; ``step`` where it is in none."""
    from telechat_moe.graph.nodes import module_of

    forward = [n for n in function.nodes.values() if function.phases[n.name] == "forward"]
    modules = {n.name: module_of(n.scope) for n in forward}
    known = {n.name: component_of(modules[n.name], upstream) for n in forward}
    known = {name: part for name, part in known.items() if part is not None}
    for node in forward:
        if modules[node.name] == "unknown" and (
            part := _weight_part(function, node, known, upstream)
        ):
            known[node.name] = part
    users: dict[str, list[str]] = {}
    for node in forward:
        for source in node.inputs:
            users.setdefault(source, []).append(node.name)
    before = {n.name: n.inputs for n in forward}
    parts = dict(known)
    for node in forward:
        if node.name not in known:
            around = (_nearest(node.name, before, known), _nearest(node.name, users, known))
            parts[node.name] = _between(node.kind, *around, upstream=upstream)
    return parts


def _weight_part(function: Any, node: Any, known: Mapping[str, str], upstream: bool) -> str | None:
    """Return the component of the weight that a node without a module multiplies by, or takes rows of."""
    from telechat_moe.graph.nodes import root_of

    if node.kind == "MatMul":
        return known.get(node.inputs[1])
    if node.kind in ("Embedding", "Gather"):
        for name in node.inputs:
            root, _ = root_of(function, name)
            if root.endswith(("embedding.weight", "word_embeddings.weight")):
                return component_of("model.embedding" if upstream else "embedding", upstream)
    return None


def _between(kind: str, producer: str | None, consumer: str | None, *, upstream: bool) -> str:
    """Return the component of a node without a module."""
    if upstream and kind == "SplitWithSize":
        return "attention"
    if upstream and producer == "router and balance loss":
        return "dispatch, experts, combine"
    if not upstream and consumer == "attention":
        return "rotation"
    return _BETWEEN.get((producer or "", consumer or "")) or consumer or producer or "step"


def _nearest(
    start: str, links: Mapping[str, Iterable[str]], known: Mapping[str, str]
) -> str | None:
    """Return the component of the nearest node along links whose component is known."""
    seen, level = {start}, [start]
    while level:
        following = [n for name in level for n in links.get(name, ()) if n not in seen]
        for name in following:
            if name in known:
                return known[name]
        seen.update(following)
        level = list(dict.fromkeys(following))
    return None


def operator_table(theirs: RankGraph, ours: RankGraph) -> list[tuple[str, str, str]]:
    """Return ``(component, upstream's primitives, ours)``, in the order of :data:`COMPONENTS`."""
    found, own = operators(theirs, True), operators(ours, False)
    order = [part.name for part in COMPONENTS]
    order += sorted((found.keys() | own.keys()) - set(order))
    return [(name, *(_listed(side.get(name, {})) for side in (found, own))) for name in order]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "-"


def parameter_table(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Return ``(upstream, its shape, ours, layout or problem)``."""
    return [
        (row.upstream, _text(row.shape), " ".join(row.ours), row.problem or row.layout)
        for row in rows
    ]


def elements(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the trained values of upstream's model and of ours."""
    theirs = sum(prod(row.shape) for row in rows if row.shape is not None)
    ours = (shape for row in rows for shape in row.our_shapes if shape is not None)
    return theirs, sum(map(prod, ours))
