"""Predicted starts of kernel lists against DeepSeek's published trace and against lists worked out by hand."""

import csv
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.overlap.__main__ import main
from benchmarks.overlap.kernel_list import Kernel, KernelList, by_stream, read_kernels, role_of
from benchmarks.overlap.kernel_order import _same_runs, _twins, infer_order
from benchmarks.overlap.overlap import predict, run_streams, summarise
from telechat_moe.errors import BadInputError

PUBLISHED = Path(__file__).parents[1] / "plan_published/data/deepseek_v3_dualpipe_kernels.csv"
CHUNK_US = 112_168.0
"""Published with the trace: the host's time for the chunk; less than the 124,338 us that its kernels compute."""


@pytest.fixture(scope="module")
def deepseek():
    return read_kernels(PUBLISHED)


def test_deepseek_chunk_and_overlap(deepseek):
    p = predict(deepseek)
    assert p.measured is not None
    assert p.measured.span_us == 129_012
    assert p.measured.compute_us == 124_338
    assert p.measured.communication_us == 113_440
    assert p.measured.exposed_us == 4_177
    assert p.device.span_us == pytest.approx(129_012, rel=0.03)
    assert p.chunk_us == pytest.approx(CHUNK_US, rel=0.03)
    assert abs(p.device.overlap - 0.963) < 0.01
    error = np.array(p.start_us) - np.array(p.measured_start_us)
    assert np.median(np.abs(error)) < 1_000
    assert np.abs(error).max() < 3_000


@pytest.mark.parametrize(
    ("begin_us", "end_us"),
    [
        (0, 29_905),
        (0, 61_200),
        (29_900, 61_200),
        (61_200, 93_760),
        (93_760, 130_000),
        (42_460, 116_860),
    ],
)
def test_parts_of_the_list(deepseek, begin_us, end_us):
    """Test single layers, also ones that begin and end in the middle: nothing is tuned to the whole list."""
    starts = deepseek.measured_start_us
    ids = [i for i, s in enumerate(starts) if begin_us <= s < end_us]
    part = KernelList(tuple(deepseek.kernels[i] for i in ids), tuple(starts[i] for i in ids))
    p = predict(part)
    assert p.device.span_us == pytest.approx(p.measured.span_us, rel=0.03)
    assert abs(p.device.overlap - p.measured.overlap) < 0.02


def _starts(prediction):
    found = {}
    for stream, ids in by_stream(prediction.kernels).items():
        found[stream] = [prediction.start_us[i] for i in ids]
    return found


def _rewrite(path, change):
    rows = list(csv.DictReader(PUBLISHED.open(newline="")))
    rows = change(rows)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return predict(read_kernels(path))


def test_starts_are_not_read(deepseek, tmp_path):
    """Test that the prediction is the same without starts and without the order across streams."""
    whole = _starts(predict(deepseek))

    def streams_one_after_the_other(rows):
        rows = sorted(rows, key=lambda r: r["stream"])
        return [{k: v for k, v in r.items() if k != "start_us"} for r in rows]

    def only_the_order(rows):
        return [{**r, "start_us": i * (7 + int(r["stream"]))} for i, r in enumerate(rows)]

    without = _rewrite(tmp_path / "a.csv", streams_one_after_the_other)
    assert without.measured is None
    for found in (without, _rewrite(tmp_path / "b.csv", only_the_order)):
        for stream, starts in _starts(found).items():
            np.testing.assert_allclose(starts, whole[stream], rtol=0, atol=1e-6)


def test_longer_communication_is_less_hidden(deepseek):
    def slower(factor):
        kernels = tuple(
            Kernel(
                k.stream,
                k.name,
                k.duration_us * (factor if k.communicates else 1),
                k.grid,
                k.blocks,
                k.role,
            )
            for k in deepseek.kernels
        )
        return predict(KernelList(kernels, None)).device

    spans = [slower(f) for f in (0.25, 1.0, 1.5, 2.0)]
    assert all(a.span_us < b.span_us for a, b in itertools.pairwise(spans))
    assert all(a.overlap > b.overlap for a, b in itertools.pairwise(spans[1:]))
    assert spans[-1].span_us > 2 * 113_440  # never shorter than the stream of communication


def _kernel(stream, name, duration, blocks=1):
    return Kernel(stream, name, float(duration), f"[{blocks}, 1, 1]", blocks, role_of(name))


def test_two_batches_by_hand():
    """Attention A, attention B, experts A, experts B; each waits for its own dispatch only."""
    main = [
        ("flash_fwd", 100), *[("elementwise", 1)] * 5,
        ("flash_fwd", 100), *[("elementwise", 1)] * 5,
        ("expand_to_fused", 10), ("gemm", 50), ("reduce_fused", 10),
        ("expand_to_fused", 10), ("gemm", 50), ("reduce_fused", 10),
    ]  # fmt: skip
    kernels = [_kernel("main", *k) for k in main]
    kernels += [
        _kernel("comm", f"deep_ep::{what}", 150)
        for what in ("dispatch", "dispatch", "combine", "combine")
    ]
    order = infer_order(kernels)
    assert [p.kind for p in order.phases] == ["attention", "attention", "expert", "expert"]
    assert [(t.produced_by, t.consumed_by) for t in order.transfers] == [
        (0, 2),
        (1, 3),
        (2, None),
        (3, None),
    ]
    start, _ = run_streams(kernels, order, 0.0, 0.0, 132)
    # dispatch A 105-255, B 255-405; experts A 255-325, experts B 405-475; combine A 405-555, B 555-705
    assert start[-4:] == [105, 255, 405, 555]
    assert [start[12], start[15]] == [255, 405]
    seen = summarise(kernels, start)
    assert (seen.span_us, seen.communication_us, seen.idle_us) == (705, 600, 0)
    assert seen.exposed_us == 600 - (210 - 105) - (325 - 255) - (475 - 405)


def test_host_waits_for_sizes():
    """The host launches the next phase, then waits for `notify` before it launches the payload."""
    main = [
        ("flash_fwd", 10),
        *[("elementwise", 1)] * 5,
        ("expand_to_fused", 10),
        ("reduce_fused", 10),
    ]
    kernels = [_kernel("main", *k) for k in main]
    kernels += [
        _kernel("comm", "deep_ep::notify_dispatch", 1000),
        _kernel("comm", "deep_ep::dispatch", 10),
    ]
    start, host = run_streams(kernels, infer_order(kernels), 5.0, 0.0, 132)
    notify, payload = start[-2:]
    assert payload == notify + 1000 + 5
    assert host == pytest.approx(start[0] + 5 + payload)  # the payload is launched last
    assert start[6] == payload + 10


def test_kernels_share_the_multiprocessors():
    """Two kernels of 112 blocks run one after the other while a transfer holds the remaining 20."""
    kernels = [
        _kernel("main", "gemm", 100, 112),
        _kernel("side", "gemm", 100, 112),
        _kernel("comm", "deep_ep::dispatch", 300, 20),
    ]
    order = infer_order(kernels)
    for ids in order.after:
        ids.clear()
    start, _ = run_streams(kernels, order, 0.0, 0.0, 132)
    assert sorted(start) == [0, 0, 100]
    start, _ = run_streams(kernels[:2], infer_order(kernels[:2]), 0.0, 0.0, 132)
    assert start == [0, 0]


def test_second_stream_forks_and_joins():
    """Twins on another stream start with the main stream's, and what follows waits for both."""
    kernels = [
        _kernel("main", "cast", 50),
        _kernel("main", "gemm", 100, 64),
        _kernel("main", "gemm", 100, 64),
        _kernel("main", "cast", 50),
        _kernel("side", "gemm", 150, 64),
        _kernel("side", "gemm", 150, 64),
    ]
    start, _ = run_streams(kernels, infer_order(kernels), 0.0, 0.0, 132)
    assert start == [0, 50, 150, 350, 50, 200]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), max_size=7),
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), min_size=1, max_size=4),
)
def test_twins_are_the_most_similar(main, helpers):
    """The pairing costs as little as the best of all pairings tried one by one."""
    main = [_kernel("m", *k) for k in main]
    helpers = [_kernel("h", *k) for k in helpers]
    groups, places = _same_runs(helpers) if helpers else [], _same_runs(main) if main else []
    found = _twins(helpers, groups, main, places)

    def cost(group, place):
        (a, b), (c, d) = group, place
        if (helpers[a].name, b - a) != (main[c].name, d - c):
            return np.inf
        work = [sum(k.duration_us for k in x) + 1e-3 for x in (helpers[a:b], main[c:d])]
        return abs(np.log(work[0] / work[1]))

    if None not in found:
        assert [places.index(p) for p in found] == sorted({places.index(p) for p in found})
        best = min(
            sum(cost(g, p) for g, p in zip(groups, way, strict=True))
            for way in itertools.combinations(places, len(groups))
        )
        assert sum(cost(g, p) for g, p in zip(groups, found, strict=True)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("void deep_ep::internode::dispatch<false, 8>", "dispatch"),
        ("void dpsk::ep::internode::cached_notify<false>", "notify"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collective"),
        ("hcom_allToAll_", "exchange"),
        ("flash::FlashAttnBwd<x>", "attention_backward"),
        ("flash::compute_attn_ws<Flash_fwd_kernel_traits>", "attention"),
        ("moe_unpermute_kernel", "expert_out"),
        ("layer_norm::ln_bwd_kernel<x>", "norm_backward"),
        ("cutlass::device_kernel<gemm>", ""),
    ],
)
def test_roles(name, role):
    assert role_of(name) == role


def test_lists_without_known_kernels_say_so():
    kernels = tuple(
        [_kernel("7", "gemm", 100)] * 8 + [_kernel("9", "ncclDevKernel_AllReduce", 50)] * 2
    )
    p = predict(KernelList(kernels, None))
    assert any("assumed" in note for note in p.order.notes)
    assert 800 < p.device.span_us < 1000


def test_lists_without_names_still_run(deepseek):
    """Only communication has names: transfers are spread out, nothing hangs, and the note says so."""
    kernels = tuple(
        k if k.communicates else replace(k, name="x", role="") for k in deepseek.kernels
    )
    p = predict(KernelList(kernels, None))
    assert any("assumed" in note for note in p.order.notes)
    assert p.device.span_us == pytest.approx(129_012, rel=0.01)


names = st.sampled_from(
    ["gemm", "flash_fwd", "flash_bwd", "expand_to_fused", "reduce_fused", "ln_bwd", "layer_norm", "swiglu_backward",
     "deep_ep::notify_dispatch", "deep_ep::cached_notify", "deep_ep::dispatch", "deep_ep::combine", "ncclAllReduce"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("789"), names, st.integers(0, 200), st.sampled_from([1, 20, 112, 5000])
        ),
        min_size=1,
        max_size=40,
    )
)
def test_any_list_runs(rows):
    """Whatever the names say, every kernel starts once, streams keep their order, nothing is shorter than its sum."""
    kernels = tuple(_kernel(*row) for row in rows)
    p = predict(KernelList(kernels, None))
    assert len(p.start_us) == len(kernels)
    for ids in by_stream(kernels).values():
        assert p.device.span_us >= sum(kernels[i].duration_us for i in ids) - 1e-6
        for a, b in itertools.pairwise(ids):
            assert p.start_us[b] >= p.start_us[a] + kernels[a].duration_us - 1e-6


def test_command(tmp_path, capsys):
    page, trace = tmp_path / "o.html", tmp_path / "o.json"
    assert main([str(PUBLISHED), "--html", str(page), "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert "communication hidden" in said
    assert "points" in said
    assert "https://" not in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 983
    assert main([str(PUBLISHED), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["measured"]["span_us"] == 129_012
    assert len(report["start_us"]) == 983


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no kernels"),
        ("dur_us,name\n1,x\n", "no column stream"),
        ("dur_us,stream,name\nlong,7,x\n", ":2: dur_us 'long'"),
        ("dur_us,stream,name\n-1,7,x\n", "expected 0 or more"),
        ("dur_us,stream,name,grid\n1,7,x,many\n", "grid is 'many'"),
        ("dur_us,stream,name\n1,7,\udcff\n", "cannot be read"),
    ],
)
def test_bad_lists(tmp_path, text, said):
    path = tmp_path / "k.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInputError, match=said):
        read_kernels(path)
    assert main([str(path)]) == 3


def test_bad_options(tmp_path):
    assert main([str(tmp_path)]) == 3
    assert main([str(PUBLISHED), "--launch-us", "-1"]) == 2
    assert main([str(PUBLISHED), "--multiprocessors", "0"]) == 2
