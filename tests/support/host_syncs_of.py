"""The operators of a serialised graph that reach the host."""

from telechat_moe.graph.host_syncs import GraphSync, host_syncs
from telechat_moe.graph.mindir import MindIR
from telechat_moe.graph.nodes import Graph, call_counts


def host_syncs_of(mindir: bytes) -> list[GraphSync]:
    model = MindIR(mindir)
    functions = {proto.name: Graph(model, proto) for proto in model.graphs()}
    return host_syncs(model, functions, call_counts(model, functions))
