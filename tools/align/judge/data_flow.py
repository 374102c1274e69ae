"""The data flow of a rank: which call made the inputs of another, found by comparing the contents of tensors.

A gradient that no call made is the sum of the gradients that the users of its tensor sent back.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import TypeVar, cast

import numpy as np

from telechat_moe.numerics import FLOATS, is_float
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, Scalar
from telechat_moe.tools.align.judge.distance import relative_distance
from telechat_moe.tools.align.judge.verdict import Verdict, judge, not_judged
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Approx, Array

GroupKey = TypeVar("GroupKey", bytes, tuple[str, str])
Place = tuple[str, str]
"""A tensor of a call: the key of the call, and the tensor's position in it (``output.0``, ``input.weight``)."""

_MOST_PARTS = 24  # gradients that are searched for the terms of a sum
_MOST_NEAR = 10  # those of them that are tried in all combinations
_SAMPLE = 4096  # elements that are sampled to find the terms of a sum
_SMALL = 4  # tensors with fewer elements may be equal by chance
_BITS = 12  # unless their values have this many significant bits
_WEIGHTS = {"weight", "bias", "gamma", "beta", "running_mean", "running_var"}


class DataFlow:
    """The data flow of one rank."""

    def __init__(self, dump: RankDump) -> None:
        self.dump = dump
        self.summed_from = cache(self._parts_of)
        self.users_of = cache(self._users_of)
        self.terms_of = cache(self._terms_of)
        self._parted: dict[str, tuple[float, bool]] | None = None
        self._usual_update: float | None = None
        self._outputs: list[Place] | None = None
        self._begins: list[int] = []
        self._magnitudes: dict[Place, Array] = {}
        self.tensors = {(key, p): t for key, call in dump.calls.items() for p, t in call.tensors()}
        self.order = {key: i for i, key in enumerate(dump.calls)}

    @cached_property
    def _contents(self) -> Mapping[Place, tuple[bytes, bool]]:
        """A digest of each tensor's values, whatever its shape, and whether an equal digest means an equal tensor."""
        pairs = ((place, t.load()) for place, t in self.tensors.items() if t.read is not None)
        return {place: (digest(values), _tells(values)) for place, values in pairs}

    @cached_property
    def content(self) -> Mapping[Place, bytes]:
        """The digests of the tensors that are unlikely to be equal by chance."""
        return {place: content for place, (content, tells) in self._contents.items() if tells}

    @cached_property
    def plain(self) -> Mapping[Place, list[Place]]:
        """The earlier outputs that equal an input of few bits (labels, ones, a scale), perhaps by chance."""
        outputs: dict[bytes, list[Place]] = {}
        makers: dict[Place, list[Place]] = {}
        for place, (content, tells) in self._contents.items():
            if not tells and place[1].startswith("output"):
                outputs.setdefault(content, []).append(place)
            elif not tells:
                makers[place] = [*outputs.get(content, [])]
        return makers

    @cached_property
    def _first(self) -> Mapping[bytes, int]:
        """For each content of an output the position of the first call that made it."""
        outputs = [(p, c) for p, (c, _) in self._contents.items() if p[1].startswith("output")]
        return {content: self.order[key] for (key, _), content in reversed(outputs)}

    def has_made(self, place: Place) -> bool:
        """Return whether an earlier call made a tensor."""
        position = self.order[place[0]]
        return self._first.get(self._contents[place][0], position) < position

    def position(self, place: Place) -> float:
        """Return where a tensor begins: at the first call that made its content, or else the first that uses it."""
        content, position = self.content.get(place), float(self.order[place[0]])
        if content is None:
            return position
        users = [self.order[key] - 0.5 for key, _ in self.given.get(content, [])]
        return min([float(self._first.get(content, position)), *users[:1], position])

    @cached_property
    def makers(self) -> Mapping[bytes, list[Place]]:
        """The outputs by their content, in order."""
        return _grouped((c, p) for p, c in self.content.items() if p[1].startswith("output"))

    @cached_property
    def given(self) -> Mapping[bytes, list[Place]]:
        """The inputs of forward calls by their content."""
        return _grouped(
            (content, place)
            for place in self.inputs()
            if self._phase(place) is Phase.FORWARD and (content := self.content.get(place))
        )

    @cached_property
    def late(self) -> frozenset[str]:
        """Forward calls after the first backward call of their step that have no backward call of their own.

        Their inputs may be sums of gradients, which no call of the dump made.
        """
        keys: set[str] = set()
        begun: set[str] = set()
        for key, call in self.dump.calls.items():
            step = key.partition("|")[0] if "|" in key else ""
            if call.phase is Phase.BACKWARD:
                begun.add(step)
            elif call.phase is Phase.FORWARD and step in begun:
                keys |= {key} if backward_key(key) not in self.dump.calls else set()
        return frozenset(keys)

    @cached_property
    def _gradients(self) -> Mapping[int, list[Place]]:
        """The distinct gradients that calls made, by number of elements, in order."""
        places: dict[int, list[Place]] = {}
        contents: set[bytes] = set()
        for place, content in self.content.items():
            call = self.dump.calls[place[0]]
            is_backward = call.phase is Phase.BACKWARD or place[0] in self.late
            if not is_backward or not place[1].startswith("output") or content in contents:
                continue
            if is_float(self.tensors[place].dtype):
                contents.add(content)
                size = int(np.prod(self.tensors[place].shape))
                places.setdefault(size, []).append(place)
        return places

    @cached_property
    def _weights(self) -> Mapping[int, list[list[Place]]]:
        """The gradients of each weight that several calls use, by number of elements."""
        gradients: dict[int, list[list[Place]]] = {}
        for content, places in self.given.items():
            # Weights have no backward call.
            makers = [key for key, _ in self.makers.get(content, [])]
            if len(places) > 1 and not any(backward_key(key) in self.dump.calls for key in makers):
                uses = self._gradients_of(places)
                if len(uses) > 1:
                    size = int(np.prod(self.tensors[uses[0]].shape))
                    gradients.setdefault(size, []).append(uses)
        return gradients

    def _gradients_of(self, places: Iterable[Place]) -> list[Place]:
        """Return the gradients that forward calls send back for some of their inputs."""
        calls, gradients = self.dump.calls, list[Place]()
        for key, name in places:
            backward = backward_key(key)
            output = backward in calls and _gradient_place(calls[key], calls[backward], name)
            if output and (backward, output) in self.tensors:
                gradients.append((backward, output))
        return gradients

    def _parts_of(self, place: Place) -> list[Place]:
        """Return earlier gradients whose sum is a tensor; empty: none were found."""
        record = self.tensors[place]
        if not is_float(record.dtype) or record.read is None:
            return []
        x = record.load()
        position = self.order[place[0]]
        for uses in self._weights.get(x.size, []):
            before = [use for use in uses if self.order[use[0]] < position]
            if len(before) > 1 and sum_verdict(self, place, before).status == "pass":
                return before
        if x.size < _SMALL or not np.all(np.isfinite(x)):
            return []
        able = [p for p in self._gradients.get(x.size, []) if self.order[p[0]] < position]
        # What the tensor's users sent, and what collectives made of that.
        reduced = [p for p in able if p[0] in self.late][-_MOST_NEAR // 2 :]
        users = self._sent_to(place)
        candidates = [*users, *reduced][-_MOST_NEAR:]
        able = able[-_MOST_PARTS:][-max(2, x.size // 2) :]
        for places, terms_of in ((candidates, _of_few), (able, _of_many)):
            parts = [places[i] for i in terms_of(x, [self.tensors[p].load() for p in places])]
            # What users sent, and no collective took, is part of it even below the rounding of the sum.
            lone = [u for u in users if u not in parts and u not in self.taken]
            for terms in ([*parts, *lone], parts):
                if len(terms) > 1 and sum_verdict(self, place, terms).status == "pass":
                    return terms
        return []

    def _sent_to(self, place: Place) -> list[Place]:
        """Return the gradients that are sent back for the tensor of a gradient: a call's output, or a weight."""
        key, name = place
        if name == "input.grad":
            content = self.content.get((key, "input.weight"))
            return self._gradients_of(self.given.get(content, []) if content else [])
        if self.dump.calls[key].phase is not Phase.BACKWARD:
            return []
        forward = key.removesuffix("backward") + "forward"
        return self.users_of((forward, name.replace("input", "output", 1)))

    def sent_back(self, place: Place) -> list[Place]:
        """Return what all users of a gradient's tensor sent back, if that is the gradient; else nothing."""
        users = self._sent_to(place)
        return users if users and sum_verdict(self, place, users).status == "pass" else []

    def _terms_of(self, place: Place) -> list[Place]:
        """Return the terms of a gradient: what its tensor's users sent back, or else gradients that add up to it."""
        if users := self.sent_back(place):
            return users
        unmade = place in self.content and not self.sources_of(place)
        return self.summed_from(place) if unmade else []

    def sources_of(self, place: Place) -> list[Place]:
        """Return the earlier outputs that an input is equal to."""
        content, position = self.content.get(place), self.order[place[0]]
        makers = self.makers.get(content, []) if content is not None else []
        return [maker for maker in makers if self.order[maker[0]] < position]

    def stacked_from(self, place: Place) -> list[Place | None]:
        """Return the earlier outputs that are the slices of a gradient which an update takes, None for zeros; empty: they are not.

        As of experts' weights in one tensor, each expert's by its own product.
        """
        record = self.tensors[place]
        if place[0] not in self.late or len(record.shape) < 2 or record.read is None:
            return []
        slices: list[Place | None] = []
        for part in record.load():
            makers = [
                m
                for m in self.makers.get(digest(part), [])
                if self.order[m[0]] < self.order[place[0]]
            ]
            if part.any() and not makers:
                return []
            slices.append(makers[-1] if part.any() else None)
        return slices if any(slices) else []

    def magnitudes(self, place: Place) -> Array:
        """Return the sorted magnitudes of a tensor with values."""
        if place not in self._magnitudes:
            self._magnitudes[place] = np.sort(np.abs(self.tensors[place].load()), None)
        return self._magnitudes[place]

    def origins_of(self, place: Place) -> list[Place]:
        """Return the sources of an input, also of a plain one."""
        return self.sources_of(place) or self.plain.get(place, [])

    @cached_property
    def taken(self) -> Mapping[Place, list[Place]]:
        """The inputs of all calls by the output that they are equal to."""
        return _grouped((s, place) for place in self.inputs() for s in self.sources_of(place))

    def is_used(self, place: Place) -> bool:
        """Return whether anything is computed from an input; otherwise it is only moved, or overwritten."""
        key, name = place
        call, formula = self.dump.calls[key], find(self.dump.calls[key].name)
        if name == "input.out" or (name == "input.0" and _ignores_start(call)):
            return False
        if formula is None or not formula.exact or backward_key(key) in self.dump.calls:
            return True
        if formula.name == "copy_" and name == "input.0":
            return False
        takers = [p for output in self.makers_of(key) for p in self.taken.get(output, [])]
        if not takers and not is_float(self.tensors[place].dtype):
            return not call.name.endswith("_")  # by calls that the dump lacks: labels, positions
        return any(map(self.is_used, takers))

    def _phase(self, place: Place) -> Phase:
        return self.dump.calls[place[0]].phase

    @cached_property
    def summands(self) -> frozenset[Place]:
        """Outputs that are terms of a gradient that enters a backward call."""
        inputs = (p for p in self.inputs() if self._phase(p) is Phase.BACKWARD)
        lone = (p for p in inputs if not self.sources_of(p))
        return frozenset(term for place in lone for term in self.summed_from(place))

    def is_weight(self, place: Place) -> bool:
        """Return whether an input is a weight: its argument's name says so, or an optimizer updates it."""
        named = is_weight(self.dump.calls[place[0]], place[1])
        return named or self.content.get(place) in self._updated

    @cached_property
    def _updated(self) -> frozenset[bytes]:
        return frozenset(c for (_, name), c in self.content.items() if name == "input.weight")

    def noise(self, reference: "DataFlow", key: str) -> float:
        """Return the largest relative L2 distance of the outputs before a call from the reference's."""
        return self._before(reference).get(key, (0.0, False))[0]

    def chose_otherwise(self, reference: "DataFlow", key: str) -> bool:
        """Return whether an earlier call made other integers or truth values than in the reference, such as choices of experts."""
        return self._before(reference).get(key, (0.0, False))[1]

    def _before(self, reference: "DataFlow") -> dict[str, tuple[float, bool]]:
        if self._parted is None:
            self._parted, largest, otherwise = {}, 0.0, False
            calls = self.dump.calls
            only_modules = all(call.kind != "api" for call in calls.values())
            for key, call in calls.items():
                mate = reference.dump.calls.get(key) if only_modules else None
                if (
                    mate is not None
                ):  # the choices are not in the dump: experts got other numbers of tokens
                    shapes = ([t.shape for _, t in c.given()] for c in (call, mate))
                    otherwise |= next(shapes) != next(shapes)
                self._parted[key] = largest, otherwise
                for place, tensor in call.made() if key in reference.dump.calls else ():
                    other = reference.tensors.get((key, place))
                    if other is None or not other.read or not tensor.read:
                        continue
                    if not is_float(other.dtype):
                        otherwise |= digest(tensor.load()) != digest(other.load())
                    elif other.shape == tensor.shape:
                        far = relative_distance(tensor.load(), other.load())
                        largest = max(largest, far if np.isfinite(far) else 0.0)
        return self._parted

    def is_late_step(self, key: str) -> bool:
        """Return whether a step came before that of a call: the weights have been updated."""
        step, mark, _ = key.partition("|")
        return int(step if mark else self.dump.step) > 0

    def usual_update(self, reference: "DataFlow") -> float:
        """Return how far weights that the dumps do not make are from the reference's in late steps, in the median."""
        if self._usual_update is None:
            places = [
                p for p in reference.inputs() if self.is_late_step(p[0]) and p in self.tensors
            ]
            pairs = [
                (self.tensors[p], reference.tensors[p])
                for p in places
                if reference.is_weight(p) and not reference.sources_of(p)
            ]
            far = [
                relative_distance(a.load(), b.load())
                for a, b in pairs
                if a.read and b.read and a.shape == b.shape and is_float(a.dtype)
            ]
            self._usual_update = float(np.median(far)) if far else 0.0
        return self._usual_update

    def makers_of(self, key: str) -> list[Place]:
        """Return the outputs of a call."""
        return [(key, place) for place, _ in self.dump.calls[key].made()]

    def _users_of(self, output: Place) -> list[Place]:
        """Return the gradients that the calls using an output send back for it."""
        takers = [p for p in self.taken.get(output, []) if self._phase(p) is Phase.FORWARD]
        return self._gradients_of(takers)

    def outputs_before(self, key: str, count: int) -> list[Place]:
        """Return outputs of calls before one, at most so many, the nearest first."""
        if self._outputs is None:
            self._outputs = [place for place in self.tensors if place[1].startswith("output")]
            self._begins = [self.order[place[0]] for place in self._outputs]
        end = bisect_left(self._begins, self.order[key])
        return self._outputs[max(0, end - count) : end][::-1]

    def before(self, key: str) -> list[str]:
        """Return the calls that made what a call takes."""
        places = ((key, place) for place, _ in self.dump.calls[key].given())
        return [source for place in places for source, _ in self.sources_of(place)]

    def inputs(self) -> Iterator[Place]:
        """Yield the inputs and parameters of every call, in order."""
        return (place for place in self.tensors if not place[1].startswith("output"))


def is_weight(call: Call, place: str) -> bool:
    """Return whether an input of a call is a weight by its argument's name."""
    name, formula = place.split("."), find(call.name)
    if formula is not None and name[1].isdigit() and int(name[1]) < len(formula.signature):
        name = [name[0], formula.signature[int(name[1])], *name[2:]]
    return name[0] == "parameters" or name[1] in _WEIGHTS


def walk(key: str, neighbours: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield a call and all that can be reached from it, the nearest first."""
    reached, left = {key}, [key]
    for key_now in left:
        yield key_now
        new_keys = [k for k in dict.fromkeys(neighbours(key_now)) if k not in reached]
        reached.update(new_keys)
        left += new_keys


def backward_key(key: str) -> str:
    """Return the key that the backward call of a forward one has."""
    return key.removesuffix("forward") + "backward"


def significant(value: float) -> int:
    """Return the number of bits from the first to the last significant one; 1 for a power of two."""
    odd = abs(value).as_integer_ratio()[0]
    return len(f"{odd:b}".strip("0"))


def _grouped(pairs: Iterable[tuple[GroupKey, Place]]) -> dict[GroupKey, list[Place]]:
    groups: dict[GroupKey, list[Place]] = {}
    for key, place in pairs:
        groups.setdefault(key, []).append(place)
    return groups


def _tells(values: Array) -> bool:
    """Return whether tensors with these values are unlikely to be equal by chance."""
    if not values.size or (values.size >= _SMALL and values.min() != values.max()):
        return bool(values.size)
    few = np.unique(values.reshape(-1)[:_SMALL])
    if values.dtype.kind != "f" or not np.all(np.isfinite(few)):
        return False
    return sum(significant(float(v)) for v in few) >= _BITS


def _of_few(x: Array, terms: list[Array]) -> list[int]:
    """Return the tensors that best add up to another, of all combinations."""
    if len(terms) < 2 or any(term.size != x.size for term in terms):
        return []
    some = slice(None, None, max(1, x.size // _SAMPLE))
    columns = np.stack([t.reshape(-1)[some].astype(np.float64) for t in terms], 1)
    choices = np.indices((2,) * len(terms), np.float64).reshape(len(terms), -1)
    with np.errstate(invalid="ignore"):
        residuals = np.linalg.norm(columns @ choices - x.reshape(-1, 1)[some], axis=0)
    best = int(np.nanargmin(residuals)) if np.any(np.isfinite(residuals)) else 0
    return [int(i) for i in np.flatnonzero(choices[:, best])]


def _of_many(x: Array, terms: list[Array]) -> list[int]:
    """Return the tensors, of many, that contribute to another, by least squares."""
    if len(terms) < 2:
        return []
    columns = np.stack([t.reshape(-1).astype(np.float64) for t in terms], 1)
    size = np.linalg.norm(columns, axis=0)
    if not np.all(np.isfinite(size)):
        return []
    flat_target = x.reshape(-1).astype(np.float64)
    share = cast("Array", np.linalg.lstsq(columns / size, flat_target, rcond=None)[0])
    return [int(i) for i in np.flatnonzero(share / size > 0.5)]


def digest(values: Array) -> bytes:
    """Return a digest of values; narrow and wide types with equal values have the same digest."""
    wide = np.ascontiguousarray(values)
    if wide.dtype.kind == "f":
        wide = wide.astype(np.float64) + 0.0  # no negative zero
    elif wide.dtype.kind in "iub":
        wide = wide.astype(np.int64)
    return hashlib.blake2b(wide.tobytes(), digest_size=16).digest()


def content_of(values: Array) -> bytes:
    """Return a digest of values, and of their shape where they are all alike; dimensions of size 1 do not count."""
    plain = values.size < 2 or values.min() == values.max()
    return digest(values) + (repr(values.squeeze().shape).encode() if plain else b"")


def _gradient_place(call: Call, backward: Call, name: str) -> str | None:
    """Return which output of a backward call is the gradient of an input of its forward call.

    msprobe writes an entry, or null, for each positional argument; others one for each tensor that needs a gradient.
    """
    floats = [(p, t) for p, t in call.given() if p.startswith("input") and is_float(t.dtype)]
    needing = [place for place, tensor in floats if tensor.requires_grad is not False]
    if name not in needing:
        return None
    if len(backward.outputs) == len(needing):
        return f"output.{needing.index(name)}"
    argument = name.split(".")[1]
    if name.count(".") == 1 and argument.isdigit() and len(backward.outputs) == len(call.inputs):
        return f"output.{argument}"
    return None


def total_of(terms: list[Array], dtype: str) -> Approx:
    """Return a sum that programs may compute in any order, each partial sum rounded to its type."""
    return Approx(np.stack(terms), dtype, dtype).sum(0)


def sum_verdict(flow: DataFlow, came: Place, users: list[Place]) -> Verdict:
    """Judge whether a gradient is the sum of those that its users sent back."""
    record, records = flow.tensors[came], [flow.tensors[user] for user in users]
    if any(r.read is None for r in (record, *records)):
        return not_judged(came[0], "values of this tensor were not dumped", came[1])
    values, unit = record.load(), FLOATS[record.dtype].unit
    if any(r.load().size != values.size for r in records):
        return Verdict(*came, "not judged", reason="shapes")
    parts = np.stack([r.load().reshape(record.shape) for r in records])
    exact = np.sum(parts, 0, np.float64)
    with np.errstate(invalid="ignore"):
        once = np.abs(values - exact) <= unit * np.abs(exact)
    if np.all(once):
        return Verdict(*came, "pass", elements=values.size)  # rounded once: needs no bound
    # A term of a wider type may be rounded before it is added.
    wide = np.array([FLOATS[r.dtype].unit < unit for r in records])
    error = np.abs(parts) * unit * wide.reshape(-1, *[1] * values.ndim)
    total = Approx(parts, record.dtype, record.dtype, sigma=error, limit=error).sum(0)
    verdict = judge(*came, values, total, record.dtype)
    if verdict.status == "pass":
        return verdict
    reason = f"{came[1]} is not the sum of the gradients from {', '.join(u[0] for u in users)}: {verdict.reason}"
    return replace(verdict, place=came[1], status="diverged", reason=reason)


def _ignores_start(call: Call) -> bool:
    """Return whether a product's factor of what it would add is 0, so that torch does not read it: ``empty`` often made it."""
    beta = call.kwargs.get("beta")
    return isinstance(beta, Scalar) and beta.value == 0 and "mm" in call.name
