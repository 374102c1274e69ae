"""The dry run's report: plain data made of readings, its tables for a terminal, and the difference of two.

``telechat_moe.graph.page`` makes the HTML page of the same data.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from telechat_moe.graph.compile import RankGraph
from telechat_moe.graph.nodes import PHASES
from telechat_moe.graph.read import Collective, Devices, Expected, Reading, differences, read
from telechat_moe.graph.schedule import PassEvent, in_flight, unmatched
from telechat_moe.units import size_text

LIMITS = (
    "Front end only: MindSpore's Ascend graph before the backend, so no kernel selection, memory plan, "
    "stream assignment or fusion of collectives; nothing was run."
)
NOTES = {
    "bytes": "the larger of input and output of each call, summed over a step",
    "sent": "what one device sends: ring for AllReduce (2(n-1)/n), AllGather and ReduceScatter ((n-1)/n), "
    "direct for AlltoAll and Send",
    "AlltoAllV": "sizes depend on the routing: expected with tokens spread evenly (tokens x top-k x hidden); "
    "certain is what the static shapes say",
    "activations": "most bytes alive at once in the order of the graph, from an operator to its last reader; the "
    "backend's order and sharing of memory may differ",
    "beside": "operators that neither lead to an all-to-all nor follow from it: in its own micro-batch, and of the "
    "micro-batch that pp_1f1b_overlap pairs with it, the part that the backend puts beside it; hidden: share of its time, "
    "by the cost model, steady state",
    "copies": "weights gathered from a sharded optimizer, or in the precision of the products",
    "gradients": "accumulators where there are some, else one gradient a trained parameter (all alive at the "
    "global norm)",
}
MEMORY = ("parameters", "optimizer", "gradients", "other", "copies", "activations")
ALL_KINDS = "together"
BESIDE = ("same", "paired")
ReportTable = tuple[str, list[str], list[list[str]]]


class Subject(NamedTuple):
    """What a report is about.

    Attributes:
        expected: Sizes of dynamic exchanges.
        model: Whose model was compiled from it.
        overlapped: Collectives that ``pp_1f1b_overlap`` names.
        swaps_states: The optimizer's are in the host's memory.
    """

    name: str
    mesh: Devices
    expected: Expected
    model: str = "telechat-moe"
    overlapped: tuple[str, ...] = ()
    swaps_states: bool = False


def report(subject: Subject, graphs: Sequence[RankGraph], target: str) -> dict[str, Any]:
    """Return the report on compiled ranks.

    Args:
        graphs: One rank a stage.
        target: Backends of the operators.
    """
    mesh = subject.mesh
    readings = [read(graph, mesh, subject.expected, subject.overlapped) for graph in graphs]
    orders = {r.rank: r.order for r in readings}
    return {
        "recipe": subject.name,
        "model": subject.model,
        "layout": mesh.describe(),
        "mesh": mesh.degrees(),
        "devices": mesh.devices,
        "target": target,
        "mindspore": version("mindspore"),
        "limits": LIMITS,
        "notes": NOTES,
        "stages": [
            _stage(r, g, mesh, subject.swaps_states) for r, g in zip(readings, graphs, strict=True)
        ],
        "overlapped": list(subject.overlapped),
        "unmatched_transfers": unmatched(orders),
        "check": None,
    }


def _stage(
    reading: Reading, graph: RankGraph, mesh: Devices, swaps_states: bool = False
) -> dict[str, Any]:
    stage = mesh.stage(reading.rank)
    first = stage * mesh.stage_devices
    others = [r for r in range(first, first + mesh.stage_devices) if r != reading.rank]
    return {
        "stage": stage,
        "rank": reading.rank,
        "derived_ranks": others,
        "collectives": [_row(key, rows) for key, rows in _grouped(reading.collectives)],
        "calls": sum(c.times for c in reading.collectives),
        "sent": sum(c.sent * c.times for c in reading.collectives),
        "operators": {
            kind: {phase: reading.operators[phase][kind] for phase in PHASES}
            for kind in sorted(set().union(*reading.operators.values()))
        },
        "recomputation": _recomputation(reading),
        "swapping": {**_swapping(reading), "states": reading.memory.optimizer * swaps_states},
        "memory": _memory(reading, swaps_states),
        "alive_at_peak": _alive(reading),
        "order": [_event(event) for event in reading.order],
        "order_text": " ".join(map(str, reading.order)),
        "overlap": reading.overlap,
        "host_syncs": host_sync_rows(reading),
        "compile_seconds": round(graph.compile_seconds, 2),
        "build_seconds": round(graph.build_seconds, 2),
        "peak_memory": graph.peak_memory,
    }


def _grouped(collectives: Iterable[Collective]) -> list[tuple[Collective, list[Collective]]]:
    rows: dict[tuple[object, ...], list[Collective]] = {}
    for c in collectives:
        # by bytes, too: two tensors of one shape may have two types
        key = (c.phase, c.purpose, c.kind, c.group, c.ranks, c.module, c.shape, c.bytes)
        rows.setdefault(key, []).append(c)
    return [(members[0], members) for members in rows.values()]


def _row(c: Collective, members: Sequence[Collective]) -> dict[str, Any]:
    return {
        **{name: getattr(c, name) for name in ("phase", "purpose", "kind", "group", "module")},
        "ranks": list(c.ranks),
        "size": len(c.ranks),
        "shape": list(c.shape),
        "count": sum(s.times for s in members),
        "bytes": sum(s.bytes * s.times for s in members),
        "sent": sum(s.sent * s.times for s in members),
        "certain": sum(s.floor * s.times for s in members),
    }


def _recomputation(reading: Reading) -> dict[str, Any]:
    repeated = [c for c in reading.collectives if c.phase == "recompute"]
    return {
        "operators": sum(reading.recomputed.values()),
        "by_kind": dict(sorted(reading.recomputed.items())),
        "collectives": sum(c.times for c in repeated),
        "sent": sum(c.sent * c.times for c in repeated),
    }


def _swapping(reading: Reading) -> dict[str, Any]:
    """Return what goes to the host's memory in a step, layers together, the largest first."""
    sums: dict[tuple[str, str, int, tuple[int, ...]], Counter[str]] = {}
    for (module, kind, early, shape), (count, size) in reading.memory.moved.items():
        row = sums.setdefault((_any_layer(module), kind, early, shape), Counter())
        row.update(count=count, bytes=size)
    rows = sorted(sums.items(), key=lambda item: -item[1]["bytes"])
    return {
        "tensors": sum(s["count"] for s in sums.values()),
        "bytes": sum(s["bytes"] for s in sums.values()),
        "host": reading.memory.host,
        "by_module": [
            {"module": m, "kind": k, "prefetch": early, "shape": list(shape), **s}
            for (m, k, early, shape), s in rows
        ],
    }


def _memory(reading: Reading, swaps_states: bool) -> dict[str, Any]:
    sizes = {name: int(getattr(reading.memory, name)) for name in MEMORY}
    if swaps_states:
        sizes["optimizer"] = 0
    return {
        **sizes,
        "kept_by_a_pass": reading.memory.left_behind,
        "micro_batches_in_flight": max(in_flight(reading.order), 1),
        "total": sum(sizes.values()),
    }


def _alive(reading: Reading) -> list[dict[str, Any]]:
    """Return what the peak is made of, layers together, the largest first."""
    sums: Counter[tuple[str, str, str, tuple[int, ...]]] = Counter()
    for (phase, module, kind, shape), size in reading.memory.alive.items():
        sums[phase, _any_layer(module), kind, shape] += size
    return [
        {"phase": phase, "module": module, "kind": kind, "shape": list(shape), "bytes": size}
        for (phase, module, kind, shape), size in sums.most_common()
    ]


def host_sync_rows(reading: Reading) -> list[dict[str, Any]]:
    """Return the operators that reach the host, layers together."""
    counts: Counter[tuple[str, str, str, bool, bool, str]] = Counter()
    for sync in reading.host_syncs:
        module = _any_layer(sync.module)
        counts[sync.kind, module, sync.phase, sync.waits, sync.needed, sync.why] += sync.times
    names = ("kind", "module", "phase", "waits", "needed", "why")
    return [{**dict(zip(names, key, strict=True)), "times": n} for key, n in counts.items()]


def _event(event: PassEvent) -> dict[str, Any]:
    return {name: value for name, value in event._asdict().items() if value is not None}


def check_derived(
    result: dict[str, Any], mesh: Devices, graphs: Sequence[RankGraph], other: RankGraph
) -> bool:
    """Compare a compiled rank with the one derived for it, and put the answer into the report.

    Args:
        result: From :func:`report`; its ``check`` is set.
        graphs: Compiled ranks, among them one of the same stage.
        other: The rank to check.

    Returns:
        Whether they are the same.
    """
    source = next(g for g in graphs if mesh.stage(g.rank) == mesh.stage(other.rank))
    lines = differences(source, other, mesh)
    result["check"] = {
        "rank": other.rank,
        "derived_from": source.rank,
        "same": not lines,
        "differences": lines,
        "compared": "operations in order, output shapes and types, groups; not constants",
    }
    return not lines


def check_text(check: Mapping[str, Any]) -> str:
    """Say in a sentence what :func:`check_derived` found."""
    verdict = "equal" if check["same"] else "NOT equal"
    return (
        f"rank {check['rank']} compiled too: {verdict} to what was derived from rank {check['derived_from']} "
        f"({check['compared']})"
    )


def _sums(
    rows: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], tuple[str, ...]]
) -> dict[tuple[str, ...], Counter[str]]:
    """Return the sums of count, bytes, sent and certain of the rows of each key, and its group."""
    sums: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        total = sums.setdefault((*key(row), f"{row['group']} ({row['size']})"), Counter())
        for name in ("count", "bytes", "sent", "certain"):
            total[name] += row[name]
    return sums


def by_group(stage: dict[str, Any]) -> dict[tuple[str, ...], Counter[str]]:
    """Return ``(phase, purpose, kind, group)`` to sums of count, bytes, sent and certain."""
    sums = _sums(stage["collectives"], lambda row: (row["phase"], row["purpose"], row["kind"]))
    return dict(sorted(sums.items(), key=lambda item: (PHASES.index(item[0][0]), item[0])))


def module_rows(stage: dict[str, Any]) -> list[list[str]]:
    """Return module, kind, group, calls, bytes and sent of the forward collectives of activations.

    ``layers.*`` is all layers that have such a module.
    """
    place = ("forward", "activations")
    rows = (row for row in stage["collectives"] if (row["phase"], row["purpose"]) == place)
    return _cells(_sums(rows, lambda row: (_any_layer(row["module"]), row["kind"])))


def _cells(sums: Mapping[tuple[str, ...], Counter[str]]) -> list[list[str]]:
    columns = ("bytes", "sent")
    return [[*k, str(s["count"]), *(size_text(s[c]) for c in columns)] for k, s in sums.items()]


def _any_layer(module: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def tables(result: dict[str, Any]) -> list[ReportTable]:
    """Return the tables of a report for a terminal: title, headers, rows."""
    report_tables: list[ReportTable] = []
    for stage in result["stages"]:
        name = f"stage {stage['stage']}, rank {stage['rank']}"
        head = ["phase", "purpose", "collective", "group", "calls ", "bytes ", "sent "]
        report_tables.append((f"{name}: collectives a step", head, _cells(by_group(stage))))
        rows = [row[:-1] for row in module_rows(stage)]
        head = ["module", "collective", "group", "calls ", "bytes "]
        report_tables.append((f"{name}: forward collectives by module", head, rows))
        report_tables.append((f"{name}: operators a step", *_operators(stage)))
        rows = [
            [*_texts(a, "phase module kind shape"), size_text(a["bytes"])]
            for a in stage["alive_at_peak"][:12]
        ]
        head = ["phase", "module", "operator", "shape", "bytes "]
        report_tables.append((f"{name}: largest activations at the peak", head, rows))
        rows = [
            [*_texts(r, "module kind shape count"), size_text(r["bytes"]), str(r["prefetch"])]
            for r in stage["swapping"]["by_module"]
        ]
        head = ["module", "operator", "shape", "tensors ", "bytes ", "prefetch "]
        report_tables.append((f"{name}: to the host's memory in a step", head, rows))
        report_tables.append((f"{name}: all-to-alls of passes that overlap", *overlap_table(stage)))
        rows = [
            [*_texts(s, "kind module phase times"), "yes" if s["waits"] else "no", s["why"]]
            for s in stage["host_syncs"]
        ]
        head = ["operator", "module", "phase", "times ", "host waits", "why"]
        report_tables.append((f"{name}: operators that reach the host", head, rows))
    report_tables.append(("memory of a device", *_memory_table(result)))
    return [table for table in report_tables if table[2]]


def _texts(row: Mapping[str, Any], keys: str) -> list[str]:
    return [str(row[key]) for key in keys.split()]


def overlap_text(result: Mapping[str, Any]) -> str:
    """Say that ``pp_1f1b_overlap`` overlaps nothing in the stages that were compiled; empty: it does, or is not there."""
    overlaps = any(pair["exchanges"] for stage in result["stages"] for pair in stage["overlap"])
    if overlaps or not result["overlapped"]:
        return ""
    return f"pp_1f1b_overlap names {', '.join(result['overlapped'])}, of which no pair of passes here has one"


def swap_text(stage: Mapping[str, Any]) -> str:
    """Say what a stage swaps in a step; empty: nothing."""
    swapping, sentences = stage["swapping"], list[str]()
    if swapping["tensors"]:
        sentences.append(
            f"{swapping['tensors']} activations of {size_text(swapping['bytes'])} go to the host's memory and back in a step, at most "
            f"{size_text(swapping['host'])} are there at once"
        )
    if swapping["states"]:
        sentences.append(f"the moments, {size_text(swapping['states'])}, are in the host's memory")
    return "; ".join(sentences)


def overlap_table(stage: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return what may run beside each all-to-all; ``hidden`` is there if a cost model gave it."""
    head = ["pair", "pass", "collective", "module", "bytes ", "beside: own micro-batch "]
    head += ["the paired one ", "time ", "hidden "]
    rows = [
        [
            f"{number} ({pair['times']} x{'' if pair['free'] else ', one after the other'})",
            f"{x['pass']}{x['index']}",
            x["kind"],
            x["module"],
            size_text(x["bytes"]),
            *(f"{x[w]['operators']} operators, {x[w]['flops'] / 1e9:.3g} GFLOP" for w in BESIDE),
            f"{x['seconds'] * 1e6:,.0f} us" if "seconds" in x else "",
            f"{x['hidden']:.0%}" if "hidden" in x else "",
        ]
        for number, pair in enumerate(stage["overlap"])
        for x in pair["exchanges"]
    ]
    return head, rows


def _operators(stage: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    counts = sorted(stage["operators"].items(), key=lambda item: -sum(item[1].values()))
    rows = [[kind, *(str(c[p] or "") for p in PHASES)] for kind, c in counts[:12]]
    others = counts[12:]
    if others:
        sums = [sum(c[p] for _, c in others) for p in PHASES]
        rows.append([f"{len(others)} other kinds", *(str(s or "") for s in sums)])
    return ["operator", *(f"{phase} " for phase in PHASES)], rows


def _memory_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = (*MEMORY, "total")
    stages = result["stages"]
    rows = [[str(s["stage"]), *(size_text(s["memory"][n]) for n in names)] for s in stages]
    return ["stage", *(f"{name} " for name in MEMORY), "sum "], rows


def difference(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return two reports side by side, stage by stage where both have them."""
    shared = zip(first["stages"], second["stages"], strict=False)
    names = ("recipe", "model", "layout", "devices")
    return {
        "one": {name: first[name] for name in names},
        "two": {name: second[name] for name in names},
        "stages_compared": min(len(first["stages"]), len(second["stages"])),
        "stages": [_stage_difference(a, b) for a, b in shared],
    }


def _stage_difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    first, second = by_group(a), by_group(b)
    measures, rows = ("count", "bytes", "sent"), list[dict[str, Any]]()
    for key in dict.fromkeys([*first, *second]):
        x, y = first.get(key, Counter()), second.get(key, Counter())
        place = dict(zip(("phase", "purpose", "kind", "group"), key, strict=True))
        rows.append({**place, **{name: [x[name], y[name]] for name in measures}})
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        for kind in (row["kind"], ALL_KINDS):
            total = groups.setdefault((row["group"], kind), {n: [0, 0] for n in measures})
            for name in measures:
                total[name] = [a + b for a, b in zip(total[name], row[name], strict=True)]
    kinds = sorted({*a["operators"], *b["operators"]})
    operators = {
        kind: [sum(s["operators"].get(kind, {}).values()) for s in (a, b)] for kind in kinds
    }
    return {
        "stages": [a["stage"], b["stage"]],
        "collectives": rows,
        "groups": [
            {"group": group, "kind": kind, **groups[group, kind]} for group, kind in sorted(groups)
        ],
        "sent": [a["sent"], b["sent"]],
        "operators": {kind: pair for kind, pair in operators.items() if pair[0] != pair[1]},
        "recomputed": [s["recomputation"]["operators"] for s in (a, b)],
        "memory": {name: [a["memory"][name], b["memory"][name]] for name in a["memory"]},
    }


def difference_tables(result: dict[str, Any]) -> list[ReportTable]:
    """Return the tables of a :func:`difference` for a terminal: title, headers, rows."""
    report_tables: list[ReportTable] = []
    for stage in result["stages"]:
        name = "stage {} and {}".format(*stage["stages"])
        rows = [
            [
                *(r["group"], r["kind"]),
                *map(str, r["count"]),
                *map(size_text, r["bytes"]),
                *_sizes(*r["sent"]),
            ]
            for r in stage["groups"]
        ]
        head = ["group", "collective", "calls 1 ", "calls 2 ", "bytes 1 ", "bytes 2 ", "sent 1 "]
        report_tables.append(
            (f"{name}: each group, all phases", [*head, "sent 2 ", "change "], rows)
        )
        rows = [
            [*_texts(r, "phase purpose kind group"), *map(str, r["count"]), *_sizes(*r["sent"])]
            for r in stage["collectives"]
        ]
        head = ["phase", "purpose", "collective", "group", "calls 1 ", "calls 2 "]
        report_tables.append(
            (f"{name}: collectives", [*head, "sent 1 ", "sent 2 ", "change "], rows)
        )
        rows = [[k, str(x), str(y), f"{y - x:+d}"] for k, (x, y) in stage["operators"].items()]
        report_tables.append(
            (f"{name}: operators that differ", ["operator", "1 ", "2 ", "change "], rows)
        )
        rows = [
            [n.replace("_", " "), *_sizes(*pair)]
            for n, pair in stage["memory"].items()
            if n != "micro_batches_in_flight"
        ]
        report_tables.append((f"{name}: memory of a device", ["", "1 ", "2 ", "change "], rows))
    return [table for table in report_tables if table[2]]


def _sizes(a: float, b: float) -> list[str]:
    """Return two sizes and the change from one to the other; ``=`` for none."""
    change = "=" if a == b else ("+" if b > a else "-") + size_text(abs(b - a))
    return [size_text(a), size_text(b), change]
