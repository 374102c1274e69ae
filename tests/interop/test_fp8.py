"""FP8 weights with block scales, and where the MTP layers stand."""

import json

import numpy as np
import pytest
from test_convert import CONFIG, read, same, write

from telechat_moe.errors import BadInputError
from telechat_moe.interop import fp8
from telechat_moe.interop.hf import WeightsError, convert
from telechat_moe.interop.names import pairs
from telechat_moe.tensor_files import read_header

BLOCK = [8, 4]


def value(code: int) -> float:
    """The number that an E4M3 code stands for, written out from the format's definition."""
    bits = f"{code:08b}"
    sign, exponent, mantissa = -1 if bits[0] == "1" else 1, int(bits[1:5], 2), int(bits[5:], 2)
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def test_every_code():
    np.testing.assert_array_equal(fp8.e4m3_values(), [value(code) for code in range(256)])
    assert np.nanmax(fp8.e4m3_values()) == 448


def nearest_bfloat16(x: float) -> float:
    """Round by choosing among the two neighbours; ties go to the even one."""
    low = np.float32(x).view(np.uint32) & np.uint32(0xFFFF0000)
    candidates = [low, low + np.uint32(0x10000)]
    distances = [abs(float(c.view(np.float32)) - float(np.float32(x))) for c in candidates]
    if distances[0] == distances[1]:
        return float(next(c for c in candidates if not (c >> np.uint32(16)) & 1).view(np.float32))
    return float(candidates[int(distances[1] < distances[0])].view(np.float32))


def test_rounding():
    dice = np.random.default_rng(0)
    values = np.concatenate([dice.normal(size=500), [1.00390625, 1.01171875, 0.0, -0.0, 3e-39]])
    values = values.astype(np.float32)
    widened = (fp8.to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened, [nearest_bfloat16(float(v)) for v in values])
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    widened = (fp8.to_bfloat16(special).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened, special)


@pytest.mark.torch
def test_as_torch_reads_it():
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(fp8.e4m3_values(), theirs.numpy())
    values = theirs[None, :] * torch.rand(50, 1, generator=torch.Generator().manual_seed(0))
    bits = fp8.to_bfloat16(values.numpy().reshape(-1))
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1)
    numbers = ~np.isnan(values.numpy().reshape(-1))
    np.testing.assert_array_equal(bits[numbers], expected[numbers])


def scales(dice, shape, dtype):
    """Return random scales as their bits in a type, and as numbers."""
    if dtype == "F8_E8M0":
        codes = dice.integers(100, 140, shape).astype(np.uint8)
        return codes, 2.0 ** (codes.astype(float) - 127)
    numbers = dice.uniform(1e-4, 2, shape).astype(np.float32)
    if dtype == "F32":
        return numbers.view(np.uint32), numbers
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def quantised_folder(tmp_path, block=BLOCK, scale_dtype="F32"):
    """Write a checkpoint like DeepSeek-V3's: projections in FP8, the rest in BF16; return the values too."""
    dice = np.random.default_rng(3)
    tensors, values = {}, {}
    for p in pairs(CONFIG):
        for name in p.hf:
            quantised = (
                name.endswith("proj.weight") and "eh_proj" not in name
            ) or "proj_with_mqa" in name
            if not quantised:
                kind = "F32" if p.is_bias else "BF16"
                bits = dice.integers(0, 0x7F00, p.hf_shape).astype(
                    np.uint32 if p.is_bias else np.uint16
                )
                tensors[name] = (kind, bits)
                continue
            rows, columns = p.hf_shape
            codes = dice.integers(0, 256, (rows, columns)).astype(np.uint8)
            codes[(codes & 127) == 127] = 3
            shape = -(-rows // block[0]), -(-columns // block[1])
            bits, scale = scales(dice, shape, scale_dtype)
            tensors[name] = ("F8_E4M3", codes)
            tensors[f"{name}_scale_inv"] = (scale_dtype, bits)
            values[name] = np.array([
                [
                    nearest_bfloat16(np.float32(value(int(codes[i, j]))) * scale[i // block[0], j // block[1]])
                    for j in range(columns)
                ]
                for i in range(rows)
            ])  # fmt: skip
    folder = tmp_path / "fp8"
    folder.mkdir()
    write(folder / "model.safetensors", tensors)
    given = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps({"quantization_config": given}))
    return folder, tensors, values


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "F8_E8M0"])
@pytest.mark.parametrize("block", [BLOCK, [5, 7], [128, 128]])
def test_dequantised_on_the_way_in(tmp_path, scale_dtype, block):
    folder, tensors, values = quantised_folder(tmp_path, block, scale_dtype)
    result = convert(folder, tmp_path / "ours", CONFIG, "telechat")
    assert set(result.dtypes) == {"BF16", "F32"}
    assert any(f"{len(values)} FP8 matrices" in note for note in result.notes)
    ours = read(tmp_path / "ours")
    for p in pairs(CONFIG):
        for j, name in enumerate(p.hf):
            dtype, bits = ours[p.name]
            bits = bits[j].T if p.stacked else bits
            if name in values:
                assert dtype == "BF16"
                found = (bits.astype(np.uint32) << 16).view(np.float32)
                np.testing.assert_array_equal(found, values[name], err_msg=name)
            else:
                np.testing.assert_array_equal(bits, tensors[name][1])


@pytest.mark.torch
def test_scales_as_torch_writes_them(tmp_path):
    """Every UE8M0 code, through the safetensors library; 255 is NaN."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scale = codes.view(torch.float8_e8m0fnu)
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "a.safetensors")
    entries = read_header(tmp_path / "a.safetensors")
    assert entries["a.weight_scale_inv"].dtype == "F8_E8M0"
    found, problems = fp8.dequantised(entries, (2, 3))
    assert problems == []
    bits = found["a.weight"].read().view(np.uint16).reshape(32, 48)
    factors = scale.float().repeat_interleave(2, 0).repeat_interleave(3, 1)
    expected = (
        (weight.float() * factors).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    )
    number = ~np.isnan((weight.float() * factors).numpy())
    assert number.sum() == 32 * 48 - 6
    np.testing.assert_array_equal(bits[number], expected[number])
    assert (bits[~number] == 0x7FC0).all()


def refused(tmp_path, change):
    folder, tensors, _ = quantised_folder(tmp_path)
    change(tensors)
    write(folder / "model.safetensors", tensors)
    with pytest.raises(WeightsError) as caught:
        convert(folder, tmp_path / "ours", CONFIG, "telechat")
    return caught.value.problems


NAME = "model.layers.0.mlp.up_proj.weight"


def test_a_missing_scale(tmp_path):
    (problem,) = refused(tmp_path, lambda t: t.pop(f"{NAME}_scale_inv"))
    assert problem.startswith(f"{NAME} is F8_E4M3")
    assert "without" in problem


def test_a_scale_of_another_shape(tmp_path):
    def change(t):
        t[f"{NAME}_scale_inv"] = ("F32", np.ones((1, 1), np.uint32))

    (problem,) = refused(tmp_path, change)
    assert "need F32 [3, 3]" in problem


def test_another_fp8_is_refused(tmp_path):
    folder, tensors, _ = quantised_folder(tmp_path)
    tensors.pop(f"{NAME}_scale_inv")
    write(folder / "model.safetensors", tensors)
    raw = (folder / "model.safetensors").read_bytes()
    at = raw.index(f'"{NAME}": {{"dtype": "F8_E4M3"'.encode())
    raw = raw[:at] + raw[at:].replace(b"F8_E4M3", b"F8_E5M2", 1)
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(BadInputError, match="type F8_E5M2; weights must be one of"):
        convert(folder, tmp_path / "ours", CONFIG, "telechat")


# ------------------------------------------------------------------------------- place of the MTP layers


def shifted(tensors, by):
    """Move the MTP layers of a checkpoint up."""
    first = CONFIG.num_hidden_layers

    def moved(name):
        parts = name.split(".")
        if parts[:2] == ["model", "layers"] and int(parts[2]) >= first:
            parts[2] = str(int(parts[2]) + by)
        return ".".join(parts)

    return {moved(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("by", [0, 1])
def test_mtp_layers_one_higher(tmp_path, by):
    """As in MindFormers' table for TeleChat3, where the MTP layer of 45 layers is 46."""
    from test_convert import random_tensors

    write(tmp_path / "ours.safetensors", random_tensors(CONFIG))
    convert(tmp_path / "ours.safetensors", tmp_path / "hf", CONFIG, "hf")
    write(tmp_path / "moved.safetensors", shifted(read(tmp_path / "hf"), by))
    convert(tmp_path / "moved.safetensors", tmp_path / "back.safetensors", CONFIG, "telechat")
    same(read(tmp_path / "back.safetensors"), read(tmp_path / "ours.safetensors"))


def test_mtp_layers_two_higher_are_unknown(tmp_path):
    from test_convert import random_tensors

    write(tmp_path / "ours.safetensors", random_tensors(CONFIG))
    convert(tmp_path / "ours.safetensors", tmp_path / "hf", CONFIG, "hf")
    write(tmp_path / "moved.safetensors", shifted(read(tmp_path / "hf"), 2))
    with pytest.raises(WeightsError, match=r"missing tensor model\.layers\.3\.enorm\.weight"):
        convert(tmp_path / "moved.safetensors", tmp_path / "back", CONFIG, "telechat")
