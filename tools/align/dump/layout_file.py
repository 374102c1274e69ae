"""Layouts that a dump does not name, from a JSON file: ``with_layouts(dump, path)``."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from telechat_moe.errors import BadInputError
from telechat_moe.reading import MALFORMED, parse_json
from telechat_moe.tools.align.dump.layout_dict import from_dict
from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import Call, Dump, TensorLayout, TensorRecord, Value


def with_layouts(dump: Dump, path: Path) -> Dump:
    """Return a dump whose tensors without a layout have that of the first pattern in a file that fits.

    A layout with ranks that the step lacks fits none, so one file serves two runs of different layouts.

    Raises:
        BadInputError: The file has no such layouts.
    """
    layouts, ranks = _read(path), dict(dump.ranks)
    for (step, number), rank in dump.ranks.items():
        present = {r for s, r in dump.ranks if s == step}
        fitting = {
            pattern: layout
            for pattern, layout in layouts.items()
            if number in layout.ranks and present.issuperset(layout.ranks)
        }
        calls = {key: _with_layouts(call, fitting) for key, call in rank.calls.items()}
        ranks[step, number] = replace(rank, calls=calls)
    return Dump(dump.root, ranks)


def _read(path: Path) -> dict[str, TensorLayout]:
    """Read ``{pattern: layout}``: a pattern fits ``KEY PLACE`` of a tensor, a layout is as dumps have it (``layout_dict.py``).

    Raises:
        BadInputError: The file does not have that form.
    """
    try:
        entries = dict(parse_json(path.read_bytes()))
        layouts = {str(pattern): from_dict(entry) for pattern, entry in entries.items()}
    except (BadInputError, LayoutError, OSError, *MALFORMED) as error:
        raise BadInputError(f"{path}: not layouts by pattern ({error})") from None
    if not layouts:
        raise BadInputError(f"{path}: no layouts; expected {{PATTERN: layout}}")
    return layouts


def _with_layouts(call: Call, layouts: Mapping[str, TensorLayout]) -> Call:
    def named(place: str, value: Value) -> Value:
        if not isinstance(value, TensorRecord) or value.layout is not None:
            return value
        name = f"{call.key} {place}"
        layout = next((x for p, x in layouts.items() if fnmatchcase(name, p)), None)
        return replace(value, layout=layout)

    return call.changed(named, results=True) if layouts else call
