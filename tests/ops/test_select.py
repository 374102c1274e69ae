import dataclasses
import os
import subprocess
import sys

import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.ops import select
from telechat_moe.recipe.schema.own import Operators


def test_recipe_names_every_operator():
    fields = {f.name for f in dataclasses.fields(Operators)} - {"default", "fuse_plain", "host"}
    assert fields == set(select.OPERATORS)


def test_every_operator_can_be_plain():
    assert all("plain" in backends for backends in select.OPERATORS.values())


def test_fused_is_the_default_on_cpu():
    assert {row.backend for row in select.table()} == {"fused"}


def test_ascend_takes_its_own_primitive():
    with select.using(target="Ascend"):
        for row in select.table():
            assert row.backend == (
                "ascend" if "ascend" in select.OPERATORS[row.operator] else "plain"
            )


def test_one_operator_by_name():
    with select.using(operators={"rope": "plain"}):
        assert select.backend("rope") == "plain"
        assert select.backend("rms_norm") == "fused"
        assert "rope plain (asked for)" in select.summary()
    assert select.backend("rope") == "fused"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"default": "fast"}, "no backend 'fast'"),
        ({"operators": {"rms_nrm": "plain"}}, "no operator 'rms_nrm'"),
        ({"operators": {"rope": "quick"}}, "no backend 'quick'"),
    ],
)
def test_unknown_names_are_refused(arguments, says):
    with pytest.raises(BadInputError, match=says), select.using(**arguments):
        pass


def test_a_face_that_is_not_there_is_refused():
    with (
        select.using(operators={"routing": "ascend"}),
        pytest.raises(BadInputError, match="routing has no backend 'ascend', only fused, plain"),
    ):
        select.backend("routing")


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
        check=False,
    )


def run_with(library):
    """Print the backends with another file as the native library."""
    code = "import pathlib, sys; from telechat_moe.ops import native, select; "
    code += "native.LIBRARY = pathlib.Path(sys.argv.pop()); select.main()"
    return run("-c", code, str(library))


def test_without_the_library_plain_serves_and_says_why(tmp_path):
    done = run_with(tmp_path / "none.so")
    assert done.returncode == 0
    assert "fused" not in done.stdout
    assert "install g++ and run `python -m telechat_moe.ops.build`" in done.stdout


def test_a_broken_library_is_named(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    done = run_with(broken)
    assert done.returncode == 0
    assert f"{broken} cannot be loaded" in " ".join(done.stdout.split())


def test_a_recipe_is_shown_with_its_backends():
    done = run("-m", "telechat_moe.ops.select", "telechat3_moe/pretrain_105b_a4b_4k.yaml")
    assert done.returncode == 0
    assert "FlashAttentionScore" in done.stdout
    done = run("-m", "telechat_moe.ops.select", "nowhere.yaml")
    assert done.returncode == 3
    assert "nowhere.yaml" in done.stderr


def test_building_without_a_compiler_says_what_to_install(tmp_path):
    library = tmp_path / "lib.so"
    done = run("-m", "telechat_moe.ops.build", "--out", str(library), CXX="no-such-compiler")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no-such-compiler, which is not on the PATH; install it" in done.stderr
    assert not library.exists()


def test_a_compiler_that_fails_leaves_the_old_library(tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"old")
    done = run("-m", "telechat_moe.ops.build", "--out", str(library), CXX="false")
    assert done.returncode == 1
    assert library.read_bytes() == b"old"
