"""Order of layouts: regret, Kendall's tau, the rule of thumb, and the reader of layout sweeps."""

import pytest

from benchmarks.plan_published.order import DATA, OrderGroup, groups, in_test, line, read_rows
from benchmarks.plan_published.tables import read_table
from benchmarks.plan_published.tables_sweeps import stack
from benchmarks.plan_published.words import WordError
from telechat_moe.tools.plan.cost.layout import Layout, Stack
from telechat_moe.tools.plan.cost.score import score

LAYOUTS = (
    Layout(dp=8, recompute="full"),
    Layout(dp=4, tp=2),
    Layout(dp=4, pp=2, micro_batches=8),
    Layout(dp=4, pp=2, micro_batch=2, micro_batches=4),
)


def test_regret_tau_and_rule_of_a_group_computed_by_hand():
    group = OrderGroup("by hand", "", LAYOUTS, (1.5, 1.0, 1.2, 1.1), (1.0, 1.4, 1.1, 1.2))
    assert group.regret(group.predicted_order) == pytest.approx(0.5)
    assert group.regret(group.predicted_order, 3) == pytest.approx(0.1)
    assert group.regret(group.predicted_order, 4) == 0
    # no recomputation first, then least tp, then the larger micro-batch
    assert group.rule_order == [3, 2, 1, 0]
    assert group.regret(group.rule_order) == pytest.approx(0.1)
    assert group.tau == -1  # by both times the order is the other way round in all six pairs
    assert line("by hand", [group])["random"] == pytest.approx(0.2)


def test_a_group_is_one_model_on_one_cluster_and_the_test_is_a_third_of_the_families():
    rows = read_rows([DATA / "layout_sweeps.csv", DATA / "vtrain_a100_single.csv"])
    members = groups(score(rows, "a100"))
    sweeps = [g for g in members if g.kind == "aleph-alpha 2023"]
    assert {x.devices for g in sweeps for x in g.layouts} == {64, 128}
    assert all(len({x.devices for x in g.layouts}) == 1 for g in members)
    single = [g for g in members if g.kind == "vtrain_a100_single"]
    assert len(single) == 72
    families = {(row.table, row.model): in_test(row) for row in rows}
    assert 0.2 < sum(families.values()) / len(families) < 0.5


def test_sweeps_are_read_with_runs_out_of_memory():
    rows = read_table(DATA / "layout_sweeps.csv")
    assert len(rows) == 300
    assert sum(row.out_of_memory for row in rows) == 131
    assert sum(bool(row.step_s) for row in rows) == 168
    assert not any(row.out_of_memory and row.step_s for row in rows)


def test_words_of_a_stack():
    assert stack("flash+fused in1 perm8") == Stack(
        input_bytes=1, permute_bytes=8, fused_attention=False, fused_loss=False, overlap=False, cp_overlap=False
    )  # fmt: skip
    for text in ("flash+turbo in2 perm16", "flash in3 perm16", ""):
        with pytest.raises(WordError, match="column stack"):
            stack(text)
