"""Layouts that dumps describe: MindSpore's dictionaries, flat shards, calls, copies, inference."""

import os
import subprocess
import sys

import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.infer_layout import infer
from telechat_moe.tools.align.dump.layout_dict import from_dict, shared, to_dict
from telechat_moe.tools.align.dump.logical import (
    CopiesDifferError,
    Logical,
    Shard,
    logical,
    logical_regions,
)
from telechat_moe.tools.align.dump.ranges import LayoutError, ShardKey, locate
from telechat_moe.tools.align.dump.records import FLAT, TensorLayout, TensorRecord


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def shards(*values) -> list[Shard]:
    return [Shard(rank, np.array(x, order="C")) for rank, x in enumerate(values)]


def merge(*args, **options) -> Logical:
    """Return a tensor after its values were read."""
    found = logical(*args, **options)
    assert found.values.shape == found.shape
    return found


# ------------------------------------------------------------------------- MindSpore's dictionaries


def test_tensor_map_counts_axes_from_the_right() -> None:
    """The example of MindSpore's own documentation of TensorLayout: dp, sp, mp; layout("dp", "mp")."""
    layout = from_dict(
        {"Device Matrix": [2, 2, 2], "Alias Name": ["dp", "sp", "mp"], "Interleaved": "No",
         "Tensor Map": [2, 0], "Rank List": list(range(8))}
    )  # fmt: skip
    assert layout.dims == (("dp",), ("mp",))
    x = numbered(4, 6)
    parts = [x[2 * (r // 4) : 2 * (r // 4) + 2, 3 * (r % 2) : 3 * (r % 2) + 3] for r in range(8)]
    assert (merge(shards(*parts), layout).values == x).all()


def test_a_dimension_cut_by_several_axes_takes_the_first_as_the_slowest() -> None:
    layout = from_dict(
        {
            "Device Matrix": [2, 3],
            "Alias Name": ["a", "b"],
            "Tensor Map": [[0, 1]],
            "Rank List": list(range(6)),
        }
    )
    x = numbered(6)
    parts = [x[(r % 3) * 2 + r // 3][None] for r in range(6)]  # b is the slow one here
    assert (merge(shards(*parts), layout).values == x).all()


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], list(range(8))])
@pytest.mark.parametrize("order", [("dp", "interleaved_parallel"), ("interleaved_parallel", "dp")])
def test_interleaved_parallel_is_no_device(ranks, order) -> None:
    """A device holds both virtual shards; whether it counts real or virtual devices, the rank list says four."""
    names = ["dp", "sp", "interleaved_parallel"]
    layout = from_dict(
        {"Device Matrix": [2, 2, 2], "Alias Name": names, "Interleaved": "Yes",
         "Tensor Map": [[2 - names.index(a) for a in order], 1], "Rank List": ranks}
    )  # fmt: skip
    assert layout.ranks == (0, 1, 2, 3)
    x = numbered(8, 4)
    parts = []
    for r in range(4):
        d = r // 2
        rows = (
            [4 * d, 4 * d + 1, 4 * d + 2, 4 * d + 3]
            if order[0] == "dp"
            else [2 * d, 2 * d + 1, 4 + 2 * d, 5 + 2 * d]
        )
        parts.append(x[rows][:, 2 * (r % 2) : 2 * (r % 2) + 2])
    assert (merge(shards(*parts), layout).values == x).all()


def test_partial_list_names_a_reduction_for_each_axis() -> None:
    layout = from_dict(
        {
            "Device Matrix": [2, 2],
            "Alias Name": ["dp", "tp"],
            "Partial": [None, "avg"],
            "Tensor Map": [1],
            "Rank List": [4, 5, 6, 7],
        }
    )
    assert layout.partial == {"tp": "mean"}
    found = merge([Shard(4 + r, np.float32([r, 2 * r])) for r in range(4)], layout)
    assert found.values.tolist() == [0.5, 1.0, 2.5, 5.0]


def test_copies_may_share_a_parameter() -> None:
    x = numbered(8, 3)
    said = {
        "Device Matrix": [2, 2],
        "Alias Name": ["dp", "tp"],
        "Tensor Map": [-1, -1],
        "Rank List": [0, 1, 2, 3],
    }
    assert (merge(shards(*np.split(x, 4)), from_dict(said, 4)).values == x).all()
    halves = np.split(x, 2)
    assert (
        merge(shards(halves[0], halves[1], halves[0], halves[1]), from_dict(said, 2)).values == x
    ).all()
    six = {
        "Device Matrix": [3, 2],
        "Alias Name": ["dp", "tp"],
        "Tensor Map": [-1, -1],
        "Rank List": list(range(6)),
    }
    assert (merge(shards(*halves * 3), from_dict(six, 2)).values == x).all()  # neighbours share
    with pytest.raises(LayoutError, match="3 copies are said to share"):
        from_dict(six, 3)
    with pytest.raises(LayoutError, match="3 copies are said to share"):
        from_dict(said, 3)


def of_parameter(entry, shape, ranks, sharing: int) -> TensorLayout:
    """Return the layout of a weight as MindSpore's compiler gives it: device matrix, tensor map ... view."""
    matrix, view = tuple(int(n) for n in entry[0]), list(entry[7])
    axes = tuple(f"axis{i}" for i in range(len(matrix)))
    found = [list(x) if isinstance(x, list) else [x] for x in entry[1]]
    if len(found) != len(
        shape
    ):  # a dimension that several axes cut is several dimensions of the view
        parts, found, at = [a for part in found for a in part], [], 0
        for length in shape:
            extent, dim = 1, []
            while at < len(parts):
                factor = view[at] * (matrix[-1 - parts[at]] if parts[at] != -1 else 1)
                if extent == length and factor != 1:
                    break
                extent, at = extent * factor, at + 1
                dim.append(parts[at - 1])
            assert extent == length
            found.append(dim)
    dims = tuple(tuple(axes[len(matrix) - 1 - n] for n in dim if n != -1) for dim in found)
    layout = TensorLayout(matrix, axes, tuple(ranks), dims)
    return layout if sharing <= 1 else shared(layout, sharing)


@pytest.mark.mindspore
@pytest.mark.parametrize("seed", range(30))
def test_compiled_parameters_lie_where_the_executor_cuts_them(seed) -> None:
    """Layouts as the compiler gives them, against the code that cuts weights for CPU ranks."""
    from types import SimpleNamespace

    from telechat_moe.graph.compile import LayoutEntry
    from telechat_moe.graph.parameter_layout import shard_slices

    rng = np.random.default_rng(seed)
    matrix = [int(n) for n in rng.integers(1, 4, 3)]
    axes = [int(a) for a in rng.permutation(3)]
    tensor_map = [axes[: int(rng.integers(1, 3))], [-1]] if rng.integers(2) else [axes[0], axes[1]]
    flat = [a for x in tensor_map for a in (x if isinstance(x, list) else [x])]
    used = [a for a in flat if a != -1]
    copies = int(np.prod([matrix[2 - a] for a in range(3) if a not in used]))
    x = rng.standard_normal((36 * copies, 12)).astype(np.float32)
    count = int(np.prod(matrix))
    share = bool(rng.integers(2)) and copies > 1
    coordinates = [np.unravel_index(r, matrix) for r in range(count)]
    view = []
    if (
        len(flat) > 2
    ):  # the compiler writes a dimension that several axes cut as several, of a view of the shape
        cut = int(np.prod([matrix[2 - a] for a in tensor_map[0]]))
        view = [1] * (len(tensor_map[0]) - 1) + [len(x) // cut, 12]
        tensor_map = flat
    parts, group = [], {}
    for r in range(count):
        key = tuple(int(coordinates[r][2 - a]) for a in used)
        group.setdefault(key, []).append(r)
    for r in range(count):
        key = tuple(int(coordinates[r][2 - a]) for a in used)
        entry = (matrix, tensor_map, [], 0, True, "opt" if share else "", None, view)
        graph = SimpleNamespace(
            layouts={"w": LayoutEntry.of(entry)}, rank=r, groups={"opt": group[key]}
        )
        parts.append(Shard(r, x[shard_slices(x.shape, graph, "w")]))
    layout = of_parameter(entry, x.shape, range(count), copies if share else 1)
    assert merge(parts, layout).values.tobytes() == x.tobytes()


def test_dictionaries_round_trip() -> None:
    layout = TensorLayout(
        (2, 2, 3, 2), ("dp", "tp", "micro", "interleaved_parallel"), (3, 1, 0, 2), (("dp", "interleaved_parallel"), (), ("tp",)),
        {}, frozenset({"tp"}), (1, 1, 2), frozenset({"interleaved_parallel"}), "micro", {}, {}, {1: 9}, (),
    )  # fmt: skip
    assert from_dict(to_dict(layout)) == layout
    flat = TensorLayout(
        (2, 2),
        ("ep", "dp"),
        (0, 1, 2, 3),
        (("ep",),),
        owned={0: ((3, 0), (1, 2))},
        sizes={FLAT: (3, 5)},
        flat=("dp",),
    )
    assert from_dict(to_dict(flat)) == flat


@pytest.mark.parametrize(
    "said",
    [{}, {"Device Matrix": 2}, {"Device Matrix": [2], "Tensor Map": ["a"]}, {"Device Matrix": [2], "Tensor Map": [0.5]},
     {"Device Matrix": [2], "Tensor Map": [0], "Rank List": "01"}, {"Device Matrix": [True], "Tensor Map": [0]},
     {"Device Matrix": [2], "Tensor Map": [0], "Owned": {"x": 1}}, {"Device Matrix": None, "Tensor Map": None}],
)  # fmt: skip
def test_broken_dictionaries_are_bad_input(said) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        from_dict(said)


def test_axes_out_of_range_are_refused() -> None:
    with pytest.raises(LayoutError, match="names the axis 3"):
        from_dict({"Device Matrix": [2, 2], "Tensor Map": [3], "Rank List": [0, 1, 2, 3]})


# ------------------------------------------------------------------------------- particular layouts


def test_experts_of_tp_extend_ep_in_any_order() -> None:
    """8 experts on dp2 x tp2: whole experts on every device, in an order that the load balancer chose."""
    x = numbered(8, 2, 3)
    owned = ((5, 0), (1, 7), (2, 3), (6, 4))
    layout = TensorLayout(
        (2, 2), ("dp", "tp"), (0, 1, 2, 3), (("dp", "tp"), (), ()), owned={0: owned}
    )
    assert (merge(shards(*(x[list(o)] for o in owned)), layout).values == x).all()


def test_flat_shards_of_a_padded_parameter() -> None:
    x = numbered(5, 3)
    flat = np.concatenate([x.reshape(-1), [-1]]).astype(np.float32)
    layout = TensorLayout((4,), ("dp",), (0, 1, 2, 3), ((), ()), flat=("dp",), padded={FLAT: 16})
    assert (merge(shards(*np.split(flat, 4)), layout, (5, 3)).values == x).all()
    with pytest.raises(LayoutError, match="15 flattened elements cannot be divided into 4"):
        merge(
            shards(*np.split(flat, 4)),
            TensorLayout((4,), ("dp",), (0, 1, 2, 3), ((), ()), flat=("dp",)),
            (5, 3),
        )


def test_rows_with_an_unequal_last_piece_only_where_said() -> None:
    x = numbered(7, 2)
    parts = shards(x[:3], x[3:6], x[6:])
    plain = TensorLayout((3,), ("dp",), (0, 1, 2), (("dp",), ()))
    with pytest.raises(LayoutError):
        merge(parts, plain)
    said = TensorLayout((3,), ("dp",), (0, 1, 2), (("dp",), ()), sizes={0: (3, 3, 1)})
    assert (merge(parts, said).values == x).all()


def test_unequal_data_parallel_and_micro_batches_give_one_batch() -> None:
    """6 sequences: dp2 x 3 micro-batches, and dp3 with micro-batches of 1 row each, twice."""
    x = numbered(6, 4)
    a = TensorLayout((2, 3), ("dp", "micro"), (0, 1), (("dp", "micro"), ()), calls="micro")
    b = TensorLayout((2, 3), ("micro", "dp"), (0, 1, 2), (("micro", "dp"), ()), calls="micro")
    first = [Shard(r, x[3 * r + m][None], m) for r in range(2) for m in range(3)]
    second = [Shard(r, x[3 * m + r][None], m) for r in range(3) for m in range(2)]
    assert (merge(first, a).values == x).all()
    assert (merge(second, b).values == x).all()
    with pytest.raises(LayoutError, match="no shard of rank 1 call 2"):
        merge(first[:-1], a)


def test_gradients_of_micro_batches_are_terms() -> None:
    layout = TensorLayout(
        (2, 2), ("dp", "micro"), (0, 1), ((),), {"dp": "mean", "micro": "sum"}, calls="micro"
    )
    found = merge([Shard(r, np.float32([1 + r, m]), m) for r in range(2) for m in range(2)], layout)
    assert found.values.tolist() == [3.0, 1.0]
    assert found.values.dtype == np.float64


def test_a_copy_that_differs_names_rank_element_and_values() -> None:
    layout = TensorLayout((2, 2), ("dp", "tp"), (4, 5, 6, 7), (("tp",), ()))
    x = numbered(4, 3)
    parts = [Shard(4 + r, x[2 * (r % 2) : 2 * (r % 2) + 2].copy()) for r in range(4)]
    parts[3].values[1, 2] = 11.5
    with pytest.raises(
        CopiesDifferError,
        match=r"rank 7 differs from rank 5 in 1 elements, first \[3, 2\]: 11\.5, there 11\.0",
    ):
        merge(parts, layout)
    parts[3].values[1, 2] = 11
    found = merge(parts, layout)
    assert found.copies.compared == {ShardKey(6), ShardKey(7)}
    assert found.ranks == (4, 5)


def test_a_scalar_copy_that_differs_is_named() -> None:
    layout = TensorLayout((2,), ("dp",), (0, 1), ())
    with pytest.raises(CopiesDifferError, match=r"rank 1 .* first \[\]: -0\.0, there 0\.0"):
        merge(shards(np.float32(0), np.float32(-0.0)), layout)


def test_a_copy_in_flat_shards_names_the_rank_of_the_shard() -> None:
    x = numbered(4)
    layout = TensorLayout((2, 2), ("dp", "zero"), (0, 1, 2, 3), ((),), flat=("zero",))
    assert merge(shards(x[:2], x[2:], x[:2], x[2:]), layout, (4,)).ranks == (0, 1)
    parts = shards(x[:2], x[2:], x[:2], x[2:] + np.float32([0, 1]))
    with pytest.raises(
        CopiesDifferError, match=r"rank 3 differs from rank 1 in 1 elements, first \[3\]"
    ):
        merge(parts, layout, (4,))


def test_records_of_different_layouts_or_types_are_refused() -> None:
    layout = TensorLayout((2,), ("dp",), (0, 1), (("dp",),))
    record = TensorRecord("float32", (2,), layout=layout, read=lambda: np.zeros(2, np.float32))
    other = TensorRecord(
        "float32", (2,), layout=TensorLayout((2,), ("tp",), (0, 1), (("tp",),)), read=record.read
    )
    assert logical([Shard(0, record), Shard(1, record)]).shape == (4,)
    with pytest.raises(LayoutError, match="another layout"):
        logical([Shard(0, record), Shard(1, other)])
    half = TensorRecord("bfloat16", (2,), layout=layout, read=record.read)
    with pytest.raises(LayoutError, match="rank 1 holds bfloat16, rank 0 float32"):
        logical([Shard(0, record), Shard(1, half)])
    with pytest.raises(BadInputError, match="only statistics"):
        logical([Shard(0, record), Shard(1, TensorRecord("float32", (2,), layout=layout))])


def test_regions_must_tile() -> None:
    x = numbered(4, 4)
    good = {0: ((0, 4), (0, 1)), 1: ((0, 2), (1, 4)), 2: ((2, 4), (1, 4))}
    cut = [Shard(r, x[tuple(slice(*s) for s in region)]) for r, region in good.items()]
    assert (logical_regions(cut, good, (4, 4)).values == x).all()
    with pytest.raises(LayoutError, match=r"element \[2, 1\] .* by no shard"):
        logical_regions(cut[:2], {r: good[r] for r in (0, 1)}, (4, 4))
    twice = {**good, 2: ((1, 3), (1, 4))}
    with pytest.raises(LayoutError, match=r"by (2 different shards|no shard)"):
        logical_regions(cut, twice, (4, 4))


def test_ranks_with_unequally_many_micro_batches() -> None:
    """Rank 0 has 3 calls of 2 rows, rank 1 two calls of 2 and 1 rows."""
    x = numbered(9, 2)
    rows = {(0, 0): (0, 2), (0, 1): (2, 4), (0, 2): (4, 6), (1, 0): (6, 8), (1, 1): (8, 9)}
    parts = [Shard(r, x[a:b], call) for (r, call), (a, b) in rows.items()]
    regions = {key: (span, (0, 2)) for key, span in rows.items()}
    assert (logical_regions(parts, regions, (9, 2)).values == x).all()
    with pytest.raises(LayoutError, match="rank 1 call 1 has no shard"):
        logical_regions(parts[:-1], regions, (9, 2))


def test_memory_stays_bounded(tmp_path) -> None:
    """Merges 1.5 GiB of files (sparse) with less than 300 MiB resident."""
    child = """
import sys
from pathlib import Path
import numpy as np
from telechat_moe.tools.align.dump.logical import Shard, logical
from telechat_moe.tools.align.dump.records import TensorLayout, TensorRecord
folder = Path(sys.argv[1]); shape = (3 << 12, 1 << 13)
for r in range(4):
    file = folder / f"{r}.npy"
    with file.open("wb") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "<f4", "fortran_order": False, "shape": shape})
        f.truncate(f.tell() + 4 * shape[0] * shape[1])
layout = TensorLayout((2, 2), ("dp", "tp"), (0, 1, 2, 3), (("dp",), ("tp",)))
records = [Shard(r, TensorRecord("float32", shape, layout=layout, read=lambda p=folder / f"{r}.npy": np.load(p, mmap_mode="r"))) for r in range(4)]
count = sum(block.size for _, block in logical(records).blocks())
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(count, status["VmHWM"].split()[0])  # ru_maxrss would count the process that started this one
"""
    out = subprocess.run(
        [sys.executable, "-c", child, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    count, resident = map(int, out.stdout.split())
    assert count == 4 * (3 << 25)
    assert resident < 300 << 10


# ----------------------------------------------------------------------------------------- inference


def test_layouts_are_inferred_where_copies_decide() -> None:
    x = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    # tp is the inner axis: ranks 0 and 2 hold copies
    found = infer(shards(x[:2], x[2:], x[:2], x[2:]), (4, 6))
    assert found.layout is not None
    assert "copies agree in this one of 2" in found.reason
    assert (merge(shards(x[:2], x[2:], x[:2], x[2:]), found.layout).values == x).all()


def test_ambiguous_layouts_are_not_comparable() -> None:
    x = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    parts = shards(x[:2, :3], x[:2, 3:], x[2:, :3], x[2:, 3:])
    found = infer(parts, (4, 6))  # rows outer or columns outer: nothing but values could tell
    assert found.layout is None
    assert "2 layouts fit and give different tensors" in found.reason
    assert len({c.digest for c in found.candidates}) == 2
    unequal = infer(shards(x, x + 1), (4, 6))
    assert unequal.layout is None
    assert "copies differ in each of 1" in unequal.reason
    assert infer(shards(x, x), (5, 6)).layout is None


def test_a_plan_of_one_device_is_the_tensor() -> None:
    assert locate(TensorLayout((), (), (3,), ()), {ShardKey(3): ()}).shape == ()
