"""Device descriptions: what is refused, and what variants share."""

import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.device import load_device


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not a YAML file"),
        ("name: x\nmemory_bytes: 1e9", "missing peak_flops, memory_bandwidth, node_devices"),
        ("base: h100\nconstants: [1]", "constants is"),
        ("base: h100\nmemory_bytes: much", "expected numbers"),
        ("base: no-such-device", "no-such-device.yaml"),
    ],
)
def test_descriptions_that_are_none_say_what_is_wrong(text, told, tmp_path):
    file = tmp_path / "device.yaml"
    file.write_text(text)
    with pytest.raises(BadInputError, match=told) as caught:
        load_device(file)
    assert "\n" not in str(caught.value)


def test_a_variant_shares_constants_and_stays_within_twelve():
    """A peak that was fitted counts, too."""
    for name, base in (
        ("b300", "b200"), ("gb300", "b200"), ("h100-96gb", "h100"), ("ascend-910b-800t", "ascend-910b"),
    ):  # fmt: skip
        variant = load_device(name)
        assert variant.constants == load_device(base).constants
        assert len(variant.fitted) + 1 <= 12
        assert variant.peak_flops != load_device(base).peak_flops


def test_a_base_may_have_a_base(tmp_path):
    for name, text in (
        ("rack", "base: h200-4\ninter_bandwidth: 7.e+10\n"),
        ("h200-4", "base: h200\nnode_devices: 4\nconstants: {exposed: 0.2}\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    rack, shipped = load_device(tmp_path / "rack.yaml"), load_device("h200")
    assert (rack.name, rack.node_devices, rack.inter_bandwidth) == ("rack", 4, 7e10)
    assert rack.constants.exposed == 0.2
    assert rack.constants.matmul_share == shipped.constants.matmul_share
    assert (rack.memory_bytes, rack.peak_flops) == (shipped.memory_bytes, shipped.peak_flops)


def test_bases_that_are_a_cycle_are_an_error_that_names_the_files(tmp_path):
    for name, base in (("one", "two"), ("two", "three"), ("three", "one")):
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}\n")
    files = [str(tmp_path / f"{name}.yaml") for name in ("one", "two", "three", "one")]
    with pytest.raises(BadInputError, match="is a cycle") as caught:
        load_device(tmp_path / "one.yaml")
    assert " -> ".join(files) in str(caught.value)
