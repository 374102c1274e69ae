"""The posterior of a device's constants: draws, distances of layouts, what no row has, and the files that ship."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtr

from benchmarks.plan_published.posterior import coverage, pairs, read_devices
from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import base_name, load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.posterior import distances, features_of, load_posterior

DENSE = Architecture(hidden=1024, layers=("dense",) * 4, heads=8, vocab=32000, seq=2048)
MIXTURE = Architecture(
    hidden=1024, layers=("moe",) * 4, heads=8, vocab=32000, seq=2048, experts=8, top_k=2, moe_ffn=512
)  # fmt: skip


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "ascend-910b"])
def test_draws_have_the_mean_and_covariance_of_the_file_and_no_share_above_one(name):
    device, posterior = load_device(name), load_posterior(name)
    assert posterior
    drawn = [d.constants for d in posterior.draws(device, 4000)]
    i, j = posterior.names.index("matmul_share"), posterior.names.index("layer_host_s")
    logs = np.log([[c.matmul_share, c.layer_host_s] for c in drawn])
    assert logs.mean(axis=0) == pytest.approx(posterior.mean[[i, j]], abs=0.03)
    assert np.cov(logs.T)[1, 1] == pytest.approx(posterior.covariance[j, j], rel=0.1)
    assert max(c.inter_share for c in drawn) == 1.0
    middle, low, high = posterior.interval("inter_share")
    assert 0 < low < middle < high <= 1


def test_a_variant_has_the_posterior_of_its_base_and_a_file_of_its_own_none(tmp_path):
    assert base_name("h200-4") == "h100"
    variant, base = load_posterior("h200-4"), load_posterior("h100")
    assert variant
    assert base
    assert np.array_equal(variant.mean, base.mean)
    file = tmp_path / "mine.yaml"
    file.write_text("base: h200-4\nnode_devices: 2\n")
    assert base_name(file) == "h100"
    alone = tmp_path / "a100.yaml"  # the name is no reason to share constants
    alone.write_text(
        "peak_flops: {bf16: 1e+14}\nmemory_bytes: 1e+10\nmemory_bandwidth: 1e+12\nnode_devices: 8\nintra_bandwidth: 1e+11\n"
        "inter_bandwidth: 1e+10\n"
    )
    assert load_posterior(alone) is None


def test_a_file_that_is_no_posterior_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "telechat_moe.tools.plan.cost.posterior.posterior_file", lambda name: tmp_path / "a100.json"
    )
    (tmp_path / "a100.json").write_text(json.dumps({"constants": {"speed": {}}}))
    with pytest.raises(BadInputError, match=r"no constant is called speed.*--write"):
        load_posterior("a100")


def test_distance_counts_doublings_and_other_settings():
    layouts = [
        Layout(dp=8, micro_batches=4),
        Layout(dp=2, tp=4, micro_batches=4),
        Layout(dp=8, micro_batches=4, recompute="full"),
        Layout(dp=8, micro_batches=4, recompute="full", recompute_layers=(0,)),
    ]
    assert distances(layouts)[0].tolist() == [0, 2, 1, 0]
    posterior = load_posterior("a100")
    assert posterior
    factors = posterior.own_factors(layouts)
    assert factors[0, 0] == factors[0, 3] == pytest.approx(posterior.row_spread**2)
    assert factors[0, 1] < factors[0, 2] < factors[0, 0]


def test_what_no_row_has_is_counted_from_the_rows():
    posterior = load_posterior("ascend-910b")
    assert posterior
    layouts = [Layout(dp=4, ep=4), Layout(dp=2, tp=2)]
    assert posterior.missing(DENSE, layouts[1:]) == []
    assert posterior.missing(MIXTURE, layouts) == ["experts", "expert parallelism"]
    trained = replace(posterior, features={**posterior.features, "experts": 3})
    assert trained.missing(MIXTURE, layouts) == ["expert parallelism"]
    sentence = posterior.unmeasured(MIXTURE, layouts)
    assert "none of the 42 measured steps" in sentence
    assert "has: experts, expert parallelism;" in sentence
    assert posterior.unmeasured(DENSE, layouts[1:]) == ""
    [ascend] = read_devices(["ascend-910b"])
    rows = [row for row in ascend.rows if row.architecture and row.layout]
    counted = sum(features_of(row.architecture, row.layout)["tensor parallelism"] for row in rows)  # type: ignore[arg-type]
    assert posterior.features["rows"] == len(rows)
    assert (
        posterior.features["tensor parallelism"]
        == counted
        == sum(row.layout.tp > 1 for row in rows)
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "ascend-910b"])
def test_the_shipped_file_is_what_the_tables_say(name):
    [device] = read_devices([name])
    fitted, shipped = device.posterior(), load_posterior(name)
    assert shipped
    assert fitted.names == shipped.names
    assert fitted.features == shipped.features
    assert shipped.mean == pytest.approx(fitted.mean, abs=0.02)
    assert shipped.covariance == pytest.approx(fitted.covariance, rel=0.05, abs=0.002)


def test_rows_narrow_what_they_determine_and_nothing_else():
    shipped = load_posterior("ascend-910b")
    assert shipped
    assert shipped.known_from_rows("matmul_share") > 0.4
    assert shipped.known_from_rows("inter_share") < 0.2


def test_coverage_and_order_count_by_hand():
    layouts = [Layout(dp=4), Layout(dp=2, tp=2, micro_batch=2)]
    [ascend] = read_devices(["ascend-910b"])
    rows = [
        replace(
            ascend.rows[0],
            layout=x,
            table="t",
            model="m",
            architecture=DENSE,
            step_s=1.0,
            device="",
        )
        for x in layouts
    ]
    mean, covariance = np.array([0.0, 0.2]), np.zeros((2, 2))
    unseen = [(rows, mean, covariance, np.array([0.1, 0.4]))]
    assert coverage(unseen, 0.1) == [True, False]  # 0.1 is within 1.645 x 0.1, 0.2 is not
    [(sure, right)] = pairs(unseen, 1e-3, 3.0)
    assert sure > 0.999
    assert right
    [(sure, right)] = pairs([(rows, mean, covariance, np.array([0.4, 0.1]))], 0.2, 3.0)
    assert sure == pytest.approx(ndtr(0.2 / (0.2 * np.sqrt(2 - 2 * np.exp(-2 / 3)))))
    assert not right


def test_the_command_prints_intervals_rows_and_what_no_row_has(capsys):
    assert main(["plan", "device", "a2"]) == 0
    out = capsys.readouterr().out
    assert "42 measured steps stand behind them: tensor parallelism 27" in out
    assert "none has: experts, MLA, expert parallelism, context parallelism, FP8" in out
    assert main(["plan", "device", "ascend-910b", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    by_name = {x["constant"]: x for x in data["constants"]}
    assert (
        by_name["inter_share"]["low"]
        < by_name["inter_share"]["median"]
        < by_name["inter_share"]["high"]
    )
    assert by_name["matmul_share"]["from_rows"] > by_name["inter_share"]["from_rows"]
    assert by_name["matmul_share"]["shipped"] == load_device("ascend-910b").constants.matmul_share
