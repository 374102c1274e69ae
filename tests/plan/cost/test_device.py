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
