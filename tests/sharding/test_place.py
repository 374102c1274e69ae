"""What MindSpore would turn into wrong numbers or into collectives that nobody asked for is refused."""

import pickle
import subprocess
import sys

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import sharded_place as placing
import sharded_run as run
from mindspore import ops

from telechat_moe.errors import BadInputError
from telechat_moe.model import CausalLM
from telechat_moe.ops import select
from telechat_moe.sharding.apply import Options, place
from telechat_moe.sharding.layouts import LayoutRule
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.placement import ModelPlacement, refuse_cut_axis
from telechat_moe.sharding.recipe import parallel_context

DP2_TP2 = Mesh(dp=2, tp=2, sp=True)
OPTIONS = Options("alltoall", 4)


def own(layout):
    return LayoutRule((layout,), (layout,), "own")


def test_a_tuple_strategy_names_the_first_axes():
    rule = LayoutRule(("tp .",), (), "tuple")
    with pytest.raises(BadInputError, match=r"ReduceSum: .*'tp \.' uses .*not the first of"):
        ModelPlacement(DP2_TP2, 0).put(ops.ReduceSum(), rule)


def test_a_batched_product_has_no_output_layout():
    rule = LayoutRule(("batch tp seq .", "batch tp . ."), ("batch tp seq .",))
    with pytest.raises(BadInputError, match="BatchMatMul was given an output layout"):
        ModelPlacement(DP2_TP2, 0).put(ops.BatchMatMul(), rule)


@pytest.mark.parametrize(
    ("primitive", "layout"),
    [
        (ops.Softmax(-1), "batch . seq tp"),
        (ops.Softmax((1, -1)), "batch tp seq ."),
        (ops.Concat(0), "stream ."),
        (ops.Concat(-1), "token tp"),
        (ops.ReduceMean(keep_dims=True), "token tp"),
        (ops.ReduceSum(), "token tp"),
    ],
)
def test_an_axis_that_is_computed_is_whole(primitive, layout):
    with pytest.raises(BadInputError, match=r"computes along dimension .* sharded into [24] over"):
        ModelPlacement(DP2_TP2, 0).put(primitive, own(layout))
    refuse_cut_axis(primitive, own(layout), Mesh())


def test_an_axis_that_is_not_known_is_refused():
    with pytest.raises(BadInputError, match=r"TopK .*does not check"):
        refuse_cut_axis(ops.TopK(), own("stream ."), DP2_TP2)


def test_axes_that_are_whole_are_taken():
    refuse_cut_axis(ops.Softmax(-1), own("batch tp seq ."), DP2_TP2)
    refuse_cut_axis(ops.Concat(-1), own("stream ."), DP2_TP2)


def test_a_primitive_stands_in_one_place():
    placement, cast = ModelPlacement(DP2_TP2, 0), ops.Cast()
    placement.put(cast, LayoutRule(("stream .",)))
    placement.put(cast, LayoutRule(("stream .",)))
    with pytest.raises(BadInputError, match=r"Cast is used twice.*stream.*token"):
        placement.put(cast, LayoutRule(("token .",)))


def model():
    recipe = run.recipe(run.LAYOUTS["dp2-ep2"], 2)
    with select.using("plain"):
        return CausalLM(recipe.model_config)


def test_a_compiled_model_is_refused():
    built = model()
    built.compile_cache.add("train.1")
    with pytest.raises(BadInputError, match="compiled before"):
        place(built, DP2_TP2, 0, OPTIONS)


def test_rows_spread_evenly():
    with pytest.raises(BadInputError, match=r"1 sequences x seq_length 16 = 16 rows .* 32 devices"):
        place(model(), Mesh(dp=32), 0, Options("alltoall", 1))


def test_state_that_is_not_trained_is_not_cut():
    built = model()
    router = built.layers[1].moe.router
    router.expert_bias.parallel_optimizer = True
    with pytest.raises(BadInputError, match=r"router\.expert_bias is not trained"):
        place(built, DP2_TP2, 0, OPTIONS)


@pytest.mark.parametrize("name", run.LAYOUTS)
def test_alltoall_is_on_and_gradients_are_sums(name):
    settings = parallel_context(run.recipe(run.LAYOUTS[name], 4))
    assert settings["enable_alltoall"] is True
    assert settings["gradients_mean"] is False


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    out = tmp_path_factory.mktemp("place") / "refusals.pickle"
    command = [sys.executable, placing.__file__, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(out.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("target", placing.TARGETS)
@pytest.mark.parametrize("name", run.LAYOUTS)
def test_no_primitive_is_forgotten(name, target, refusals):
    assert refusals[name, target] == ""


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", placing.FORGOTTEN)
def test_a_forgotten_primitive_is_named(forgotten, refusals):
    assert f".{forgotten[1]} (" in refusals[forgotten]
    assert "have no layout" in refusals[forgotten]
