"""The independent checker takes true certificates, and refuses changed ones unless what they state is still true."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_placement import random_problem, steps_of

from telechat_moe.errors import UsageError
from telechat_moe.recipe import load
from telechat_moe.tools.plan import check_certificate
from telechat_moe.tools.plan.check_certificate import check, main
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.search.certify import CertificateWriter, certificate
from telechat_moe.tools.plan.search.placement import PathPool, PlacementSearch
from telechat_moe.tools.plan.search.placement_problem import LayerGroup, PlacementProblem, StepTail
from telechat_moe.tools.plan.search.search import SearchResult, search, usable
from telechat_moe.tools.plan.search.space import Space

LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def small_plan(**more: Any) -> SearchResult:
    recipe = load(LARGE)
    a = Architecture.from_recipe(recipe)
    a = replace(a, layers=a.layers[:1] + a.layers[1:9])
    device = usable(load_device("ascend-910b"), 30 * 2**30)
    space = Space(
        devices=16,
        global_batch=16,
        base=Layout.from_recipe(recipe),
        most_vpp=2,
        **{"fixed": {"cp": 1, "tp": 2, "zero": 1}, **more},
    )
    return search(a, space, device, top=1)


@lru_cache(1)
def _text() -> str:
    plan = small_plan()
    assert plan.optimal
    return json.dumps(certificate(plan))


def stated() -> Any:
    return json.loads(_text())


def columns(stated: Any, name: str) -> Iterator[tuple[list[int], int]]:
    """Yield where configurations have the number of an array: a list and its index."""
    column = stated["columns"].index(name)
    yield from ((row[2], column) for row in stated["configurations"])


def leaves(tree: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield the leaves of a tree, and where they are."""
    if not isinstance(tree, list):
        yield tree, at
        return
    for i in (3, 4):
        yield from leaves(tree[i], (*at, i))


def nodes(tree: Any) -> Iterator[list[Any]]:
    """Yield the nodes of a tree that part placements."""
    if isinstance(tree, list):
        yield tree
        yield from nodes(tree[3])
        yield from nodes(tree[4])


def test_a_true_certificate_passes() -> None:
    certificate_ = stated()
    assert (
        check(certificate_) == f"{len(certificate_['configurations']):,} configurations, gap 0.000%"
    )
    assert len(certificate_["configurations"]) > 100
    assert certificate_["layout"]["step_s"] == pytest.approx(certificate_["bound_s"], rel=1e-6)


def test_a_proof_may_have_no_paths() -> None:
    certificate_ = stated()
    certificate_["proofs"].append(certificate_["proofs"][0] | {"paths": []})
    check(certificate_)
    _leaves(len(certificate_["proofs"]) - 1)(certificate_)
    with pytest.raises(ValueError, match="not proven"):
        check(certificate_)


def test_the_checker_stays_small_and_alone() -> None:
    source = Path(check_certificate.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 200
    assert "telechat_moe" not in source


def _cheaper(name: str, share: float = 0.5) -> Callable[[Any], None]:
    """Return a change: a cost is less in every configuration, so what was proven does not hold."""

    def change(stated: Any) -> None:
        for row, column in columns(stated, name):
            stated["lists"].append(_times(stated["lists"][row[column]], share))
            row[column] = len(stated["lists"]) - 1

    return change


def _times(values: Any, factor: float) -> Any:
    return [_times(v, factor) for v in values] if isinstance(values, list) else values * factor


def _proofs(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a change of an entry of every proof."""

    def apply(stated: Any) -> None:
        for proof in stated["proofs"]:
            proof[name] = change(proof[name])

    return apply


def _paths(change: Callable[[list[int]], list[int]]) -> Callable[[Any], None]:
    def apply(stated: Any) -> None:
        for *_, paths in stated["schedules"]:
            for number in paths:
                paths[number] = change(paths[number])

    return apply


def _before_the_start(stated: Any) -> None:
    """Let every path begin with what its first operation would read if it were not the first."""
    for _, m, _, paths in stated["schedules"]:
        for ops in paths.values():
            ops.insert(0, ops[0] - m)


def _trees(change: Callable[[list[Any]], None]) -> Callable[[Any], None]:
    """Return a change of every node that parts placements."""

    def apply(stated: Any) -> None:
        for row in stated["configurations"]:
            for node in list(nodes(row[3])):
                change(node)

    return apply


def _leaves(to: Any) -> Callable[[Any], None]:
    """Return a change: whole trees become a leaf."""

    def apply(stated: Any) -> None:
        for row in stated["configurations"]:
            row[3] = to

    return apply


def _set(*where: Any, to: Any) -> Callable[[Any], None]:
    def apply(stated: Any) -> None:
        for key in where[:-1]:
            stated = stated[key]
        stated[where[-1]] = to(stated[where[-1]]) if callable(to) else to

    return apply


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a larger bound": (_set("bound_s", to=lambda b: b * 1.001), "not proven|is faster|NoneType"),
    "no bound": (_set("bound_s", to=math.nan), "not finite"),
    "another step": (_set("layout", "step_s", to=lambda s: s * 0.999), "takes more"),
    "another layout": (
        _set("layout", "kinds", 1, to=lambda k: [*k[1:], k[0]]),
        "no placement|takes",
    ),
    "half layers": (_set("layout", "kinds", 1, to=lambda k: [n / 2 for n in k]), "no placement"),
    "fewer layers": (_set("layout", "kinds", 1, -1, to=lambda n: n - 1), "no placement"),
    "a layer more than recomputed": (_set("layout", "again", 0, to=99), "too much is recomputed"),
    "layout of no configuration": (_set("layout", "row", to=-1), "none of the configurations"),
    "a configuration left out": (lambda f: f["configurations"].pop(3), "another configuration"),
    "configurations in disorder": (
        lambda f: f["configurations"].reverse(),
        "another configuration",
    ),
    "another schedule's stages": (_set("schedules", 0, 0, to=3), ""),
    "a path with a step left out": (_paths(lambda ops: ops[:1] + ops[2:]), "leaves the schedule"),
    "a path turned round": (_paths(lambda ops: ops[::-1]), "leaves the schedule"),
    "a path from before the start": (_before_the_start, "leaves the schedule"),
    "a path outside": (_paths(lambda ops: [*ops, -1]), "leaves the schedule"),
    "a path that is shorter": (_paths(lambda ops: ops[: len(ops) // 2]), "not proven"),
    "paths twice": (_proofs("paths", lambda x: x + x), "more than 1"),
    "paths less": (_proofs("paths", lambda x: [[n, w * 0.8] for n, w in x]), "not proven"),
    "a negative path": (_proofs("paths", lambda x: [[n, -w] for n, w in x]), "negative"),
    "share of the lines": (_proofs("share", lambda x: 1.5), "more than 1"),
    "negative share": (_proofs("share", lambda x: -0.5), "negative"),
    "parameters": (_proofs("parameters", lambda x: _times(x, 2)), "more than 1"),
    "memory": (_proofs("memory", lambda x: [v - 1 for v in x]), "negative"),
    "most": (_proofs("most", lambda x: [v - 1 for v in x]), "negative"),
    "fewest": (_proofs("fewest", lambda x: [v + 10 for v in x]), "not proven"),
    "infinite weights": (_proofs("fewest", lambda x: [math.inf for _ in x]), "negative"),
    "one stage less": (_proofs("memory", lambda x: x[1:]), ""),
    "a missing column": (lambda f: f["columns"].pop(), "longer"),
    "columns exchanged": (lambda f: f["columns"].append(f["columns"].pop(0)), ""),
    "cheaper layers": (_cheaper("time"), ""),
    "cheaper ends": (_cheaper("fixed", 0.0), ""),
    "cheaper sends": (_cheaper("send", 0.0), ""),
    "cheaper update": (_cheaper("update", 0.0), ""),
    "no reduction": (_cheaper("reduce", 0.0), ""),
    "no host": (_cheaper("base", 0.0), ""),
    "fewer layers in all": (_cheaper("count"), ""),
    "more memory": (_cheaper("memory", 2.0), ""),
    "smaller activations": (_cheaper("full"), "negative|not proven"),
    "negative recomputation": (_cheaper("again", -1.0), "negative"),
    "larger parameters than there must be": (_cheaper("largest", 2.0), "may have less"),
    "cut elsewhere": (_trees(lambda node: node.__setitem__(2, node[2] + 1)), ""),
    "cut between whole numbers": (
        _trees(lambda node: node.__setitem__(2, node[2] + 0.5)),
        "not whole",
    ),
    "cut in another row": (_trees(lambda node: node.__setitem__(0, 1)), ""),
    "cut on another stage": (_trees(lambda node: node.__setitem__(1, 0)), ""),
    "parts exchanged": (_trees(lambda node: node.__setitem__(slice(3, 5), node[:2:-1])), ""),
    "a part left out": (_trees(lambda node: node.pop()), "unpack"),
    "all empty": (_leaves(None), "NoneType"),
    "all one placement": (_leaves(-1), "more than one placement"),
    "the first proof for all": (_leaves(0), ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_kind_of_entry_is_checked(name: str) -> None:
    change, said = CHANGES[name]
    found = stated()
    change(found)
    with pytest.raises(Exception, match=said or None):
        check(found)


# Random certificates, changed at random: refused, or what they state is true, by brute force over what they state.


def written(rng: random.Random) -> Any:
    """Return the certificate of a small random instance whose optimum is proven."""
    while True:
        p = random_problem(rng)
        if p.schedule == "zb-v" or sum(g.count for g in p.layers) > 6:
            continue
        pool = PathPool()
        answer = PlacementSearch(p, pool).solve(math.inf, nodes=4000)
        if answer.best and answer.bound >= answer.best.seconds * (1 - 1e-7):
            write = CertificateWriter({(p.schedule, p.stages, p.micro_batches, p.chunks): pool})
            write.add(0, "instance", p, answer.tree)
            return json.loads(json.dumps(write.certificate(answer.bound, 0, p, answer.best)))


def read(stated: Any) -> PlacementProblem:
    """Return the problem that a certificate states; a single number stands for all of a list."""
    row, c = stated["configurations"][0][2], {}
    for i, name in enumerate(stated["columns"]):
        c[name] = stated["lists"][row[i]]
    p, m, v, _ = stated["schedules"][int(c["schedule"])]
    shapes = {"count": 2, "time": (2, 2), "again": 2, "full": (2, p), "entry": (2, p), "working": 2}
    shapes |= {"weight": (2, 2), "fixed": (2, p * v), "memory": p, "buffer": p, "weights": (2, p)}
    shapes |= {"reduce": 2, "update": 2, "highest": p * v, "hides": 2}
    c |= {name: np.broadcast_to(c[name], shape).tolist() for name, shape in shapes.items()}
    names = {"activations": "full", "inputs": "entry", "weights": "weight"}
    layers = tuple(
        LayerGroup(
            count=int(count),
            times=(*c["time"][k], 0),
            states=0,
            recompute_time=c["again"][k],
            working=c["working"][k],
            **{name: tuple(c[other][k]) for name, other in names.items()},
        )
        for k, count in enumerate(c["count"])
        if count
    )
    (f, *_, last_f), (b, *_, last_b) = c["fixed"] if p * v > 1 else np.pad(c["fixed"], (0, 1))[:2]
    return PlacementProblem(
        schedule="1f1b" if v == 1 else "interleaved",
        stages=p,
        micro_batches=m,
        chunks=v,
        layers=layers,
        first=(f, b, 0),
        last=(last_f, last_b, 0),
        choice=bool(c["choice"]),
        weights=(tuple(c["weights"][0]), tuple(c["weights"][1])),
        **{name: tuple(c[name]) for name in ("memory", "buffer")},
        limits=tuple(map(math.floor, c["highest"])),
        send=np.array(c["send"]).item(),  # or a list of one
        working=np.array(c["held"]).item(),
        tail=StepTail(
            **{name: c[name] for name in ("base", "start", "exposed")},
            **{name: tuple(c[name]) for name in ("reduce", "update")},
            overlap_weights=tuple(c["hides"]),
        ),
    )


def entry(stated: Any, name: str) -> Any:
    """Return an array of the only configuration."""
    return stated["lists"][stated["configurations"][0][2][stated["columns"].index(name)]]


def holds(stated: Any) -> bool:
    """Return whether what a certificate states is true."""
    p = read(stated)
    steps = steps_of(p)
    layout = stated["layout"]
    layers = tuple(sum(map(int, some)) for some in zip(*layout["kinds"], strict=True))
    step_s = steps[layers, tuple(map(int, layout["again"])) if p.choice else (0,) * len(layers)]
    fastest = min(step for step in steps.values() if step is not None)
    right = step_s is not None and abs(step_s / layout["step_s"] - 1) < 3e-6
    return bool(right) and fastest >= stated["bound_s"] * (1 - 3e-6)


def numbers(stated: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield where numbers and empty leaves stand."""
    if isinstance(stated, dict | list):
        for key, value in stated.items() if isinstance(stated, dict) else enumerate(stated):
            yield from numbers(value, (*path, key))
    elif not isinstance(stated, str):
        yield path


def spoil(rng: random.Random, stated: Any) -> Any:
    """Return a copy with one number changed, or two entries of a list exchanged, or one left out."""
    stated = copy.deepcopy(stated)
    groups: dict[str, list[tuple]] = {}
    for path in numbers(stated):  # every kind of entry as often as any other
        kind = path[:1] if path[0] != "proofs" else (path[0], path[2])
        groups.setdefault(str(kind), []).append(path)
    path = rng.choice(groups[rng.choice(sorted(groups))])
    inside = stated
    for key in path[:-1]:
        inside = inside[key]
    old, how = inside[path[-1]], rng.random()
    if isinstance(inside, list) and len(inside) > 1 and how < 0.15:
        i, j = rng.sample(range(len(inside)), 2)
        inside[i], inside[j] = inside[j], inside[i]
    elif isinstance(inside, list) and how < 0.2:
        inside.pop(path[-1])
    elif old is None:
        inside[path[-1]] = rng.choice([0, -1])
    else:
        inside[path[-1]] = rng.choice(
            [0, 1, -1, old + 1, old - 1, -old, old * 2, old / 2, old * 0.9, old * 1.1, None]
        )
    return stated


def changed_certificates_are_refused_or_true(seed: int, instances: int, changes: int) -> None:
    rng, refused, true, points = random.Random(seed), 0, 0, 0
    for _ in range(instances):
        good = written(rng)
        check(good)
        assert holds(good)
        points += any(leaf == -1 for leaf, _ in leaves(good["configurations"][0][3]))
        for _ in range(changes):
            stated = spoil(rng, good)
            try:
                check(stated)
            except Exception:
                refused += 1
                continue
            if np.atleast_2d(entry(stated, "fixed"))[:, 1:-1].any():
                continue  # brute force knows the ends only
            if np.mod(entry(stated, "count"), 1).any() or np.ndim(entry(stated, "highest")) > 1:
                continue  # whole layers, and one limit for both kinds
            assert holds(stated), stated
            true += 1
    assert refused > changes * instances / 4
    assert true
    assert points


def test_changed_certificates_are_refused_or_true() -> None:
    changed_certificates_are_refused_or_true(1, 6, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_20000_changed_certificates_are_refused_or_true(seed: int) -> None:
    changed_certificates_are_refused_or_true(seed, 25, 80)


def test_command(tmp_path, capsys) -> None:
    good, bad, broken = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "broken.json"
    good.write_text(_text())
    bad.write_text(json.dumps(stated() | {"bound_s": 1e9}))
    broken.write_text("{")
    assert main([str(good)]) == 0
    assert main([str(good), str(bad), str(broken)]) == 1
    said = capsys.readouterr().out
    assert "gap 0.000%" in said
    assert said.count("WRONG") == 2


def test_what_the_checker_does_not_know_is_not_certified() -> None:
    with pytest.raises(UsageError, match="--beyond-recipes"):
        certificate(small_plan(beyond_recipes=True, fixed={"pp": 2, "cp": 1}))
