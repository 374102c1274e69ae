"""Layouts that a dump does not name, from a JSON file: ``with_layouts(dumps, path)``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from telechat_moe.errors import BadInputError
from telechat_moe.reading import MALFORMED, parse_json
from telechat_moe.tools.align.dump.layout_dict import KEYS, from_dict
from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import Call, Dump, TensorLayout, TensorRecord, Value


def with_layouts(dumps: Sequence[Dump], path: Path) -> list[Dump]:
    """Return dumps whose tensors without a layout have that of the patterns in a file that fit, the one of most ranks.

    A layout with ranks that the step lacks fits none, so one file serves two runs of different layouts.

    Raises:
        BadInputError: The file has no such layouts, or a pattern that fits no tensor of the dumps.
    """
    layouts = read_layouts(path)
    ordered = dict(sorted(layouts.items(), key=lambda item: -len(item[1].ranks)))
    unused = set(layouts)
    results = [_of_dump(dump, ordered, unused) for dump in dumps]
    if unused:
        problem = (
            f"{len(unused)} patterns fit no tensor without a layout, the first {min(unused)!r}"
        )
        expected = "KEY PLACE of a tensor, as `telechat-moe align inspect DUMP --calls` lists them"
        raise BadInputError(f"{path}: {problem}; expected {expected}")
    return results


def _of_dump(dump: Dump, layouts: Mapping[str, TensorLayout], unused: set[str]) -> Dump:
    ranks = dict(dump.ranks)
    for (step, number), rank in dump.ranks.items():
        present = {r for s, r in dump.ranks if s == step}
        has_ranks = {
            pattern: number in layout.ranks and present.issuperset(layout.ranks)
            for pattern, layout in layouts.items()
        }

        def named(name: str, fits: Mapping[str, bool] = has_ranks) -> TensorLayout | None:
            patterns = [pattern for pattern in layouts if fnmatchcase(name, pattern)]
            unused.difference_update(patterns)
            return next((layouts[pattern] for pattern in patterns if fits[pattern]), None)

        calls = {key: _with_layouts(call, named) for key, call in rank.calls.items()}
        ranks[step, number] = replace(rank, calls=calls)
    return Dump(dump.root, ranks)


def read_layouts(path: Path) -> dict[str, TensorLayout]:
    """Read ``{pattern: layout}``: a pattern fits ``KEY PLACE`` of a tensor, a layout is as dumps have it (``layout_dict.py``).

    Raises:
        BadInputError: The file does not have that form.
    """
    layouts: dict[str, TensorLayout] = {}
    try:
        for pattern, entry in parse_json(path.read_bytes()).items():
            if unknown := set(entry) - KEYS:
                expected = ", ".join(sorted(KEYS))
                raise BadInputError(f"{pattern}: unknown key {min(unknown)!r}; expected {expected}")
            layouts[pattern] = from_dict(entry)
    except (BadInputError, LayoutError, OSError, *MALFORMED) as error:
        raise BadInputError(f"{path}: not layouts by pattern ({error})") from None
    if not layouts:
        raise BadInputError(f"{path}: no layouts; expected {{PATTERN: layout}}")
    return layouts


def _with_layouts(call: Call, layout_of: Callable[[str], TensorLayout | None]) -> Call:
    def named(place: str, value: Value) -> Value:
        if not isinstance(value, TensorRecord) or value.layout is not None:
            return value
        return replace(value, layout=layout_of(f"{call.key} {place}"))

    return call.changed(named, results=True)
