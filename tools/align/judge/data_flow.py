"""Which call made what another one takes: edges of the data flow, read off equal contents.

An edge that the reference has must hold in the target: a tensor that was changed on the way (dropped, permuted, stale,
of another rank) is found even though every operator computes right. Nothing is demanded of the target that the
reference itself does not keep.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, TensorRecord
from telechat_moe.tools.align.judge.verdict import Verdict, judge
from telechat_moe.tools.align.numerics import FLOATS, is_float, round_to
from telechat_moe.tools.align.operators import find
from telechat_moe.tools.align.operators.approx import Approx, Array

Place = tuple[str, str]
"""Key of a call, and which of its tensors: ``output.0``, ``input.weight``."""

_MOST_PARTS = 24  # gradients among which the terms of a sum are looked for
_MOST_NEAR = 10  # of them those that are tried in every choice
_SAMPLE = 4096  # elements by which the terms of a sum are told
_SMALL = 4  # tensors with fewer elements are equal by chance
_BITS = 12  # unless their values have so many significant bits
_WEIGHTS = {"weight", "bias", "gamma", "beta", "running_mean", "running_var"}
_ALSO = 4.0  # times the distance of what was made before
_STATES = {f"input.{name}" for name in ("weight", "exp_avg", "exp_avg_sq", "momentum_buffer")}


@dataclass
class Wiring:
    """The data flow of one rank.

    Args:
        dump: Its calls.
    """

    dump: RankDump
    tensors: dict[Place, TensorRecord] = field(init=False)
    order: dict[str, int] = field(init=False)
    _summed: dict[Place, list[Place]] = field(init=False, default_factory=dict)
    _kept: dict[Place, bool] = field(init=False, default_factory=dict)
    _sent: dict[Place, list[Place]] = field(init=False, default_factory=dict)
    _noise: dict[str, float] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tensors = {
            (key, place): tensor
            for key, call in self.dump.calls.items()
            for place, tensor in call.tensors()
        }
        self.order = {key: i for i, key in enumerate(self.dump.calls)}

    @cached_property
    def _held(self) -> Mapping[Place, tuple[bytes, bool]]:
        """A digest of the values of each tensor, whatever its shape, and whether it tells which tensor it is."""
        found: dict[Place, tuple[bytes, bool]] = {}
        for place, tensor in self.tensors.items():
            if tensor.read is not None:
                values = tensor.load()
                found[place] = digest(values), _tells(values)
        return found

    @cached_property
    def content(self) -> Mapping[Place, bytes]:
        """The digests of tensors that are hardly equal by chance."""
        return {place: content for place, (content, tells) in self._held.items() if tells}

    @cached_property
    def plain(self) -> Mapping[Place, list[Place]]:
        """The earlier outputs that an input of few bits (two labels, a norm's ones, a scale) is equal to, perhaps by chance."""
        made: dict[bytes, list[Place]] = {}
        found: dict[Place, list[Place]] = {}
        for place, (content, tells) in self._held.items():
            if tells:
                continue
            if place[1].startswith("output"):
                made.setdefault(content, []).append(place)
            else:
                found[place] = [*made.get(content, [])]
        return found

    @cached_property
    def _first(self) -> Mapping[bytes, int]:
        """Of each content of an output the first call that made it, in order."""
        found: dict[bytes, int] = {}
        for place, (content, _) in self._held.items():
            if place[1].startswith("output"):
                found.setdefault(content, self.order[place[0]])
        return found

    def has_made(self, place: Place) -> bool:
        """Return whether a call before has made what stands in a place."""
        first = self._first.get(self._held[place][0])
        return first is not None and first < self.order[place[0]]

    @cached_property
    def makers(self) -> Mapping[bytes, list[Place]]:
        """The outputs with a content, in order."""
        found: dict[bytes, list[Place]] = {}
        for place, content in self.content.items():
            if place[1].startswith("output"):
                found.setdefault(content, []).append(place)
        return found

    @cached_property
    def takers(self) -> Mapping[Place, list[Place]]:
        """The inputs of forward calls that are equal to an output."""
        found: dict[Place, list[Place]] = {}
        for place in self.inputs():
            if self.dump.calls[place[0]].phase is Phase.FORWARD:
                for source in self.sources_of(place):
                    found.setdefault(source, []).append(place)
        return found

    @cached_property
    def given(self) -> Mapping[bytes, list[Place]]:
        """The inputs of forward calls with a content."""
        found: dict[bytes, list[Place]] = {}
        for place in self.inputs():
            content = self.content.get(place)
            if content and self.dump.calls[place[0]].phase is Phase.FORWARD:
                found.setdefault(content, []).append(place)
        return found

    @cached_property
    def late(self) -> frozenset[str]:
        """Calls with a forward's key that come after the first backward of their step and have no backward of their own.

        What goes into them may be a sum of gradients, which no call of the dump has made.
        """
        found: set[str] = set()
        begun: set[str] = set()
        for key, call in self.dump.calls.items():
            step = key.partition("|")[0] if "|" in key else ""
            if call.phase is Phase.BACKWARD:
                begun.add(step)
            back = key.removesuffix("forward") + "backward"
            if call.phase is Phase.FORWARD and step in begun and back not in self.dump.calls:
                found.add(key)
        return frozenset(found)

    @cached_property
    def _gradients(self) -> Mapping[int, list[Place]]:
        """Gradients that calls made, by number of elements, in order, equal ones once."""
        found: dict[int, list[Place]] = {}
        seen: set[bytes] = set()
        for place, content in self.content.items():
            call = self.dump.calls[place[0]]
            made = call.phase is Phase.BACKWARD or place[0] in self.late
            if not made or not place[1].startswith("output") or content in seen:
                continue
            if is_float(self.tensors[place].dtype):
                seen.add(content)
                size = int(np.prod(self.tensors[place].shape))
                found.setdefault(size, []).append(place)
        return found

    @cached_property
    def _weights(self) -> Mapping[int, list[list[Place]]]:
        """The gradients of each weight that several calls take, by its number of elements."""
        found: dict[int, list[list[Place]]] = {}
        for content, places in self.given.items():
            if len(places) > 1 and not any(map(self._differentiated, self.makers.get(content, []))):
                uses = [use for use in map(self._gradient_of, places) if use is not None]
                if len(uses) > 1:
                    size = int(np.prod(self.tensors[uses[0]].shape))
                    found.setdefault(size, []).append(uses)
        return found

    def _differentiated(self, place: Place) -> bool:
        """Return whether a call has a backward of its own: what it made is no weight."""
        return place[0].removesuffix("forward") + "backward" in self.dump.calls

    def _gradient_of(self, place: Place) -> Place | None:
        """Return the gradient that a call sends back for one of its inputs."""
        back = place[0].removesuffix("forward") + "backward"
        if back not in self.dump.calls:
            return None
        at = _gradient_place(self.dump.calls[place[0]], self.dump.calls[back], place[1])
        return (back, at) if at is not None and (back, at) in self.tensors else None

    def parts_of(self, place: Place) -> list[Place]:
        """Return gradients that were made before and whose sum a tensor is; empty: none found."""
        record = self.tensors[place]
        if not is_float(record.dtype) or record.read is None:
            return []
        x = record.load()
        at = self.order[place[0]]
        for uses in self._weights.get(x.size, []):
            before = [use for use in uses if self.order[use[0]] < at]
            if len(before) > 1 and _sum_verdict(self, place, before).status == "pass":
                return before
        if x.size < _SMALL or not np.all(np.isfinite(x)):
            return []
        near = self._near(place)
        able = [p for p in self._gradients.get(x.size, []) if self.order[p[0]] < at][-_MOST_PARTS:]
        able = able[-max(2, x.size // 2) :]
        for places, terms_of in ((near, _of_few), (able, _of_many)):
            parts = [places[i] for i in terms_of(x, [self.tensors[p].load() for p in places])]
            if len(parts) > 1 and _sum_verdict(self, place, parts).status == "pass":
                return parts
        return []

    def _near(self, place: Place) -> list[Place]:
        """Return of what a gradient should be the sum: what the users of its tensor sent, or collectives made of that."""
        size, at = self.tensors[place].load().size, self.order[place[0]]
        back = [
            p for p in self._gradients.get(size, []) if p[0] in self.late and self.order[p[0]] < at
        ]
        return [*self._sent_to(place), *back[-_MOST_NEAR // 2 :]][-_MOST_NEAR:]

    def _sent_to(self, place: Place) -> list[Place]:
        """Return the gradients that are sent back for what a gradient is one of: a call's output, or a weight."""
        key, name = place
        if name == "input.grad":
            return _uses(self, (key, "input.weight"))
        if self.dump.calls[key].phase is not Phase.BACKWARD:
            return []
        forward = key.removesuffix("backward") + "forward"
        return self.users_of((forward, name.replace("input", "output", 1)))

    def terms_of(self, place: Place) -> list[Place]:
        """Return the gradients whose sum a gradient is: those that the users of its tensor sent, else such as add up to it."""
        users = self._sent_to(place)
        if users and self.keeps(place, users):
            return users
        known = place in self.content and not self.sources_of(place)
        return self.summed_from(place) if known else []

    def sources_of(self, place: Place) -> list[Place]:
        """Return the earlier outputs that an input is equal to."""
        content = self.content.get(place)
        if content is None:
            return []
        at = self.order[place[0]]
        return [maker for maker in self.makers.get(content, []) if self.order[maker[0]] < at]

    @cached_property
    def taken(self) -> Mapping[Place, list[Place]]:
        """The inputs of any call that are equal to an output."""
        found: dict[Place, list[Place]] = {}
        for place in self.inputs():
            for source in self.sources_of(place):
                found.setdefault(source, []).append(place)
        return found

    @cached_property
    def summands(self) -> frozenset[Place]:
        """Outputs of calls that are a term of a gradient that comes into a backward call."""
        found: set[Place] = set()
        for place in self.inputs():
            if self.dump.calls[place[0]].phase is Phase.BACKWARD and not self.sources_of(place):
                found |= set(self.summed_from(place))
        return frozenset(found)

    def is_weight(self, place: Place) -> bool:
        """Return whether an input is a weight: by its argument's name, or because an optimizer updates it."""
        call, name = self.dump.calls[place[0]], place[1].split(".")
        formula, known = find(call.name), name[0] == "parameters"
        if formula is not None and name[1].isdigit() and int(name[1]) < len(formula.signature):
            name = [name[0], formula.signature[int(name[1])], *name[2:]]
        return known or name[1] in _WEIGHTS or self.content.get(place) in self._updated

    @cached_property
    def _updated(self) -> frozenset[bytes]:
        """Contents of the weights that optimizers take."""
        return frozenset(c for (_, name), c in self.content.items() if name == "input.weight")

    def noise(self, reference: "Wiring", key: str) -> float:
        """Return how far outputs before a call are from the reference's at most, relative L2."""
        if self._noise is None:
            self._noise, most = {}, 0.0
            for own, call in self.dump.calls.items():
                self._noise[own] = most
                for place, tensor in call.tensors() if own in reference.dump.calls else ():
                    other = reference.tensors.get((own, place))
                    if other is None or other.shape != tensor.shape or place[0] != "o":
                        continue
                    if other.read and tensor.read and is_float(other.dtype):
                        apart = _apart(other, tensor)
                        most = max(most, apart if np.isfinite(apart) else 0.0)
        return self._noise.get(key, 0.0)

    def makers_of(self, key: str) -> list[Place]:
        """Return the outputs of a call."""
        return [
            (key, place)
            for place, _ in self.dump.calls[key].tensors()
            if place.startswith("output")
        ]

    def summed_from(self, place: Place) -> list[Place]:
        """Return :meth:`parts_of`, remembered."""
        if place not in self._summed:
            self._summed[place] = self.parts_of(place)
        return self._summed[place]

    def keeps(self, came: Place, users: list[Place]) -> bool:
        """Return whether a gradient is the sum of those that users sent."""
        if came not in self._kept:
            self._kept[came] = _sum_verdict(self, came, users).status == "pass"
        return self._kept[came]

    def users_of(self, output: Place) -> list[Place]:
        """Return the gradients that the calls which take an output send back for it."""
        if output not in self._sent:
            self._sent[output] = _users(self, output)
        return self._sent[output]

    def inputs(self) -> Iterator[Place]:
        """Yield the inputs and parameters of every call, in order."""
        for place in self.tensors:
            if not place[1].startswith("output"):
                yield place


def origin(place: Place, reference: Wiring, target: Wiring) -> tuple[str, list[TensorRecord]]:
    """Return of which tensors an input should be the sum by the data flow, and how to say it.

    What the same call made in the target, the gradients that were sent, or the reference's own value.
    """
    sources = reference.sources_of(place) or reference.plain.get(place, [])
    made = [s for s in sources if s in target.tensors]
    if made:
        key, name = made[-1]
        return f"what {key} made ({name})", [target.tensors[made[-1]]]
    terms = reference.terms_of(place) or reference.summed_from(place)
    if terms and all(term in target.tensors for term in terms):
        said = f"the sum of the gradients from {', '.join(key for key, _ in terms)}"
        return said, [target.tensors[term] for term in terms]
    record = reference.tensors.get(place)
    return "what the reference has", [record] if record is not None else []


def wanted(place: Place, reference: Wiring, target: Wiring) -> tuple[Array, Array] | None:
    """Return what an input should hold by the data flow, with a bound; None: the reference does not say."""
    tensor = target.tensors.get(place)
    _, parts = origin(place, reference, target) if tensor is not None else ("", [])
    if tensor is None or not parts or any(part.read is None for part in parts):
        return None
    dtype = tensor.dtype if is_float(tensor.dtype) else "float64"
    if len(parts) == 1:
        value = parts[0].load().astype(np.float64)
        return value, Approx(value, dtype).bound(dtype)
    total = _total([part.load().reshape(tensor.shape) for part in parts], dtype)
    return total.value, total.bound(dtype)


def _tells(values: Array) -> bool:
    """Return whether tensors with equal values are hardly so by chance."""
    if not values.size or (values.size >= _SMALL and values.min() != values.max()):
        return bool(values.size)
    few = np.unique(values.reshape(-1)[:_SMALL])
    if values.dtype.kind != "f" or not np.all(np.isfinite(few)):
        return False
    return sum(_significant(float(v)) for v in few) >= _BITS


def _significant(value: float) -> int:
    """Return how many bits of a number stand between its first and its last one; 1 for a power of two."""
    odd = abs(value).as_integer_ratio()[0]
    return len(f"{odd:b}".strip("0"))


def _of_few(x: Array, terms: list[Array]) -> list[int]:
    """Return which of some tensors add up to another best: of all choices that with the least rest."""
    if len(terms) < 2 or any(term.size != x.size for term in terms):
        return []
    some = slice(None, None, max(1, x.size // _SAMPLE))
    columns = np.stack([t.reshape(-1)[some].astype(np.float64) for t in terms], 1)
    choices = np.array(np.unravel_index(np.arange(2 ** len(terms)), (2,) * len(terms)), np.float64)
    with np.errstate(invalid="ignore"):
        rest = np.linalg.norm(columns @ choices - x.reshape(-1, 1)[some], axis=0)
    best = choices[:, int(np.nanargmin(rest))] if np.any(np.isfinite(rest)) else choices[:, 0]
    return [int(i) for i in np.flatnonzero(best)]


def _of_many(x: Array, terms: list[Array]) -> list[int]:
    """Return which of many tensors have a share in another, by least squares."""
    if len(terms) < 2:
        return []
    columns = np.stack([t.reshape(-1).astype(np.float64) for t in terms], 1)
    size = np.linalg.norm(columns, axis=0)
    if not np.all(np.isfinite(size)):
        return []
    share = np.linalg.lstsq(columns / size, x.reshape(-1).astype(np.float64), rcond=None)[0]
    return [i for i, c in enumerate(share / size) if c > 0.5]


def digest(values: Array) -> bytes:
    """Return a digest of values; narrow and wide types with equal values agree."""
    wide = np.ascontiguousarray(values)
    if wide.dtype.kind == "f":
        wide = wide.astype(np.float64) + 0.0  # no negative zero
    elif wide.dtype.kind in "iub":
        wide = wide.astype(np.int64)
    return hashlib.blake2b(wide.tobytes(), digest_size=16).digest()


def broken_edges(reference: Wiring, target: Wiring) -> Iterator[Verdict]:
    """Yield inputs of the target that are not what they should be.

    An input that the reference's calls made must be equal, in the target, to what the same call made there; one that
    comes from outside (weights, data) must be equal to the reference's.
    """
    for place in reference.inputs():
        tensor = target.tensors.get(place)
        if tensor is None or tensor.read is None or reference.tensors[place].read is None:
            continue
        if place in reference.plain:
            verdict = _as_plain(place, reference, target)
        elif sources := reference.sources_of(place):
            made = [source for source in sources if source in target.tensors]
            verdict = _as_made(place, made, target) if made else None
        else:
            verdict = _as_outside(place, reference, target)
        if verdict is not None:
            yield verdict


def _as_outside(place: Place, reference: Wiring, target: Wiring) -> Verdict | None:
    """Judge what no call of the reference has made: data, weights, an optimizer's states; gradients are sums."""
    phase = reference.dump.calls[place[0]].phase
    state = phase is Phase.OPTIMIZER and place[1] in _STATES
    if not state and phase is not Phase.FORWARD:
        return None
    verdict = _as_given(place, reference.tensors[place], target.tensors[place])
    if verdict is not None and place[0] in reference.late and not state:
        return _as_summed(place, reference, target)
    if verdict is not None and _rounded_in_passing(place, reference, target):
        return None
    unknown = verdict is not None and not state and not reference.is_weight(place)
    if unknown and _maybe_computed(place, reference, target):
        said = f"{place[1]}: nothing in the dump says where it comes from"
        return Verdict(place[0], "", "not judged", reason=said)
    return verdict


def _rounded_in_passing(place: Place, reference: Wiring, target: Wiring) -> bool:
    """Return whether a tensor is the reference's, rounded to a type that only the target computes in."""
    record, tensor = reference.tensors[place], target.tensors[place]
    if not is_float(record.dtype) or not is_float(tensor.dtype) or record.shape != tensor.shape:
        return False
    expected, found = record.load(), tensor.load()
    kinds = _only_in(target, reference)
    return any(np.array_equal(round_to(expected, d), found, equal_nan=True) for d in kinds)


def _only_in(one: Wiring, other: Wiring) -> list[str]:
    """Return the floating-point types in which only one of two runs computes."""
    return [d for d in one.dump.dtypes - other.dump.dtypes if is_float(d)]


def _maybe_computed(place: Place, reference: Wiring, target: Wiring) -> bool:
    """Return whether a tensor may be what a call made that the dumps lack: it is as far from the reference's as others are.

    Where all that was made before is equal to the last bit, so must what comes from outside be.
    """
    record, tensor = reference.tensors[place], target.tensors[place]
    if not is_float(record.dtype) or record.shape != tensor.shape:
        return False
    return _apart(record, tensor) <= _ALSO * target.noise(reference, place[0])


def _apart(record: TensorRecord, tensor: TensorRecord) -> float:
    """Return the relative distance (L2) of two tensors of one shape; infinite where one is not finite."""
    a, b = (t.load().astype(np.float64) for t in (record, tensor))
    if not np.all(np.isfinite(a)) or not np.all(np.isfinite(b)):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else np.inf
    size = float(np.linalg.norm(a))
    return float(np.linalg.norm(a - b)) / size if size else 0.0


def _as_plain(place: Place, reference: Wiring, target: Wiring) -> Verdict | None:
    """Judge a tensor of few bits, which calls may have made that have nothing to do with it.

    What the reference has is right, and so is what any call made that may have. Of a gradient from outside only the
    ones are known that a loss begins with; zeros may be anything but an optimizer's first state.
    """
    record, tensor = reference.tensors[place], target.tensors[place]
    values, found = record.load(), tensor.load()
    phase, makers = reference.dump.calls[place[0]].phase, reference.plain[place]
    state = phase is Phase.OPTIMIZER and place[1] in _STATES
    if not (state or np.any(values)) or (is_float(record.dtype) and values.shape != found.shape):
        return None
    given = _as_given(place, record, tensor)
    if given is None:
        return None
    if makers and not state:
        made = [source for source in makers if source in target.tensors]
        return _as_made(place, made, target) if made else None
    lone = values.size == 1 and not is_float(record.dtype)  # a count, perhaps
    if lone or target.has_made(place):
        return None
    if phase is Phase.BACKWARD:
        return given if np.all(values == 1) else None
    return _as_outside(place, reference, target)


def _as_summed(place: Place, reference: Wiring, target: Wiring) -> Verdict | None:
    """Judge what goes into a call of the way back: a sum of gradients where the reference's is one."""
    parts = reference.summed_from(place)
    if not parts or any(part not in target.tensors for part in parts):
        said = f"{place[1]}: nothing in the dump says where it comes from"
        return Verdict(place[0], "", "not judged", reason=said)
    verdict = _sum_verdict(target, place, parts)
    return verdict if verdict.status == "diverged" else None


def _as_made(place: Place, sources: list[Place], target: Wiring) -> Verdict | None:
    tensor = target.tensors[place]
    found = tensor.load()
    for source in sources:
        record = target.tensors[source]
        if record.read is None:
            return None
        values = record.load()
        if values.size == found.size and _same(values.reshape(found.shape), found, tensor.dtype):
            return None
    maker = sources[-1]
    expected = target.tensors[maker].load()
    key, name = place
    if expected.size != found.size:
        said = f"{name} has {found.size} elements, {maker[0]} made {expected.size}"
        return Verdict(key, name, "diverged", np.inf, said, (), found.size, found.size)
    verdict = judge(
        key, name, found, _expected(expected.reshape(found.shape), tensor.dtype), tensor.dtype
    )
    said = f"{name} is not what {maker[0]} made ({maker[1]}): {verdict.reason}"
    return Verdict(
        key, name, "diverged", np.inf, said, verdict.element, verdict.wrong, verdict.elements
    )


def _as_given(place: Place, reference: TensorRecord, tensor: TensorRecord) -> Verdict | None:
    if reference.read is None:
        return None
    expected, found = reference.load(), tensor.load()
    key, name = place
    if expected.shape != found.shape:
        said = f"{name} has shape {list(found.shape)}, in the reference {list(expected.shape)}"
        return Verdict(key, name, "diverged", np.inf, said, (), found.size, found.size)
    narrow = tensor.dtype
    if (
        is_float(reference.dtype)
        and is_float(narrow)
        and FLOATS[reference.dtype].bits < FLOATS[narrow].bits
    ):
        narrow = reference.dtype
    if _same(expected, found, narrow) or _same(found, expected, narrow):
        return None
    verdict = judge(key, name, found, _expected(expected, tensor.dtype), tensor.dtype)
    said = f"{name} comes from outside and is not the reference's: {verdict.reason}"
    return Verdict(
        key, name, "diverged", np.inf, said, verdict.element, verdict.wrong, verdict.elements
    )


def _same(values: Array, found: Array, dtype: str) -> bool:
    """Return whether a tensor holds values, perhaps rounded to its type."""
    if np.array_equal(values, found, equal_nan=values.dtype.kind == "f"):
        return True
    return is_float(dtype) and np.array_equal(round_to(values, dtype), found, equal_nan=True)


def _expected(values: Array, dtype: str) -> Approx | Array:
    return Approx(values, dtype) if is_float(dtype) else values


def wrong_sums(reference: Wiring, target: Wiring) -> Iterator[Verdict]:
    """Yield gradients that come into a call and are not the sum of what the users of its output or weight sent back."""
    for key, call in reference.dump.calls.items():
        if call.phase is Phase.BACKWARD:
            places = [(key, f"input.{i}") for i in range(len(call.inputs))]
        else:
            places = [(key, "input.grad")] if call.phase is Phase.OPTIMIZER else []
        for came in places:
            if came not in reference.tensors or came not in target.tensors:
                continue
            terms = reference.terms_of(came)
            if terms and all(term in target.tensors for term in terms):
                verdict = _sum_verdict(target, came, terms)
                if verdict.status == "diverged" and not _narrow_sum(came, terms, reference, target):
                    yield verdict
                continue
            made = reference.sources_of(came)
            if came in reference.content and not any(source in target.tensors for source in made):
                why = "in the target others sent it back"
                if not terms and not made:
                    why = "nothing in the dump says where it comes from"
                yield Verdict(key, "", "not judged", reason=f"{came[1]}: {why}")


def _narrow_sum(came: Place, terms: list[Place], reference: Wiring, target: Wiring) -> bool:
    """Return whether a gradient is a sum rounded, on a way that the dump lacks, to a type that only the target computes in."""
    record, found = target.tensors[came], target.tensors[came].load()
    for kind in _only_in(target, reference) if is_float(record.dtype) else ():
        if np.array_equal(round_to(found, kind), found):
            parts = [target.tensors[t].load().reshape(record.shape) for t in terms]
            total = _total([round_to(p, kind) for p in parts], kind)
            if judge(*came, found, total, kind).status == "pass":
                return True
    return False


def _uses(wiring: Wiring, weight: Place) -> list[Place]:
    """Return the gradients that the calls which took a weight since its last update sent back for it."""
    content, found = wiring.content.get(weight), []
    for key, name in wiring.given.get(content, []) if content else []:
        back = key.removesuffix("forward") + "backward"
        if back not in wiring.dump.calls:
            continue
        at = _gradient_place(wiring.dump.calls[key], wiring.dump.calls[back], name)
        if at is not None and (back, at) in wiring.tensors:
            found.append((back, at))
    return found


def _users(wiring: Wiring, output: Place) -> list[Place]:
    """Return the gradients that the calls which take an output send back for it."""
    found: list[Place] = []
    for key, name in wiring.takers.get(output, []):
        back = key.removesuffix("forward") + "backward"
        if back not in wiring.dump.calls:
            continue
        at = _gradient_place(wiring.dump.calls[key], wiring.dump.calls[back], name)
        if at is not None and (back, at) in wiring.tensors:
            found.append((back, at))
    return found


def _gradient_place(call: Call, back: Call, name: str) -> str | None:
    """Return which output of a backward call belongs to an input of its forward call.

    msprobe has an entry for each positional argument, null where it is no tensor; others one for each tensor that wants
    a gradient.
    """
    wanted = [
        place
        for place, tensor in call.tensors()
        if place.startswith("input")
        and is_float(tensor.dtype)
        and tensor.requires_grad is not False
    ]
    if name not in wanted:
        return None
    if len(back.outputs) == len(wanted):
        return f"output.{wanted.index(name)}"
    argument = name.split(".")[1]
    if name.count(".") == 1 and argument.isdigit() and len(back.outputs) == len(call.inputs):
        return f"output.{argument}"
    return None


def _total(parts: list[Array], dtype: str) -> Approx:
    """Return a sum that programs make in any order, each partial sum rounded to its type."""
    return Approx(np.stack(parts), dtype, dtype).sum(0)


def _sum_verdict(wiring: Wiring, came: Place, users: list[Place]) -> Verdict:
    record = wiring.tensors[came]
    parts: list[Array] = []
    for user in users:
        values = wiring.tensors[user].load()
        if values.size != record.load().size:
            return Verdict(*came, "not judged", reason="shapes")
        parts.append(values.reshape(record.shape))
    found, exact = record.load(), np.sum(np.stack(parts), 0, np.float64)
    with np.errstate(invalid="ignore"):
        once = np.abs(found - exact) <= FLOATS[record.dtype].unit * np.abs(exact)
    if np.all(once):
        return Verdict(*came, "pass", elements=found.size)  # rounded once: no need of a bound
    unit = FLOATS[record.dtype].unit  # a part of a wider type may be rounded before it is added
    wide = [FLOATS[wiring.tensors[user].dtype].unit < unit for user in users]
    apart = np.stack([np.abs(p) * unit * w for p, w in zip(parts, wide, strict=True)])
    total = Approx(np.stack(parts), record.dtype, record.dtype, sigma=apart, limit=apart).sum(0)
    verdict = judge(*came, found, total, record.dtype)
    if verdict.status == "pass":
        return verdict
    said = f"{came[1]} is not the sum of the gradients from {', '.join(u[0] for u in users)}: {verdict.reason}"
    return Verdict(
        *came, "diverged", verdict.ratio, said, verdict.element, verdict.wrong, verdict.elements
    )
