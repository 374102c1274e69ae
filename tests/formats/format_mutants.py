"""Mutants of every format that is read, and what reads them: ``python format_mutants.py FORMAT SEED COUNT FOLDER``.

The command judges in a process of its own, with bounds on memory and time, and writes what is wrong as JSON.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import resource
import signal
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.recipe import RecipeError

MEMORY = 6 << 30
"""Address space of the process, libraries included."""
SECONDS = 20
HERE = Path(__file__).parents[1]
WEIGHTS = "model-00001-of-00001.safetensors"

# ------------------------------------------------------------------------------ mutations

TOKEN = re.compile(
    rb'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"(?:[^"\\]|\\.)*"|\btrue\b|\bfalse\b|\bnull\b'
)
NASTY = [
    b"0", b"-1", b"-0", b"1.5", b"1e999", b"-1e999", b"NaN", b"Infinity", b"1" * 25, b"9" * 5000, b"1e5", b"0x10",
    b"18446744073709551615", b"9223372036854775808", b"4294967296", b"true", b"null", b'""', b'"x"', b'"3"', b"[]", b"{}",
    b"[1]", b"[[1]]", b'{"a":1}', b'"\\ud800"', b'"\\u0000"', b'"../x"', b'"' + b"y" * 5000 + b'"', b"[" * 120 + b"]" * 120,
    b"[" * 900 + b"]" * 900, b"[" * 100_000, b'{"a":' * 5000, b'"\xff"', b"2001-99-99", b"*a", b"&a", b"!!python/object:os.system x",
]  # fmt: skip


def in_text(rng: random.Random, data: bytes) -> bytes:
    """Replace, exchange, double or drop tokens of a text."""
    tokens = list(TOKEN.finditer(data))
    if not tokens or rng.random() < 0.2:
        return in_lines(rng, data)
    token = rng.choice(tokens)
    other = rng.choice(tokens)
    new = rng.choice([rng.choice(NASTY), rng.choice(NASTY), other[0], b"", token[0] * 2])
    return data[: token.start()] + new + data[token.end() :]


def in_lines(rng: random.Random, data: bytes) -> bytes:
    """Drop, double, exchange or break lines, or put nonsense between two."""
    lines = data.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    new = rng.choice(NASTY) + b"\n"
    change = rng.choice(
        [[], [lines[at]] * 2, [lines[at][: rng.randrange(len(lines[at]) + 1)]], [new, lines[at]]]
    )
    return b"".join([*lines[:at], *change, *lines[at + 1 :]])


def in_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, insert, remove or repeat bytes, or cut the end off."""
    at = rng.randrange(len(data) + 1)
    some = rng.randbytes(rng.choice([1, 1, 2, 8]))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + some + data[at:]
    if kind == 2:
        return data[:at] + data[at + len(some) :]
    if kind == 3:
        return data[:at] + data[max(0, at - 30) :]
    if kind == 4:
        value = rng.choice([0, 1, 255, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1])
        return data[:at] + value.to_bytes(8, "little") + data[at + 8 :]
    return data[:at] + some + data[at + len(some) :]


def text(rng: random.Random, data: bytes) -> bytes:
    return (in_text if rng.random() < 0.75 else in_bytes)(rng, data)


def in_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change the header and write its new length, or any byte."""
    if rng.random() < 0.2:
        return in_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    header, body = in_text(rng, data[8 : 8 + length]), data[8 + length :]
    if rng.random() < 0.15:
        body = rng.choice([body + b"x", body[:-1], b""])
    return len(header).to_bytes(8, "little") + header + body


def in_zip(rng: random.Random, data: bytes) -> bytes:
    """Change a member, compress it, or let it lie about its size."""
    if rng.random() < 0.3:
        return in_bytes(rng, data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # a mutant of a mutant
        return in_bytes(rng, data)
    chosen = rng.choice(list(members))
    kind = rng.randrange(4)
    if kind == 0:
        members[chosen] = in_bytes(rng, members[chosen])
    elif kind == 1:
        members[chosen] = bytes(1 << 26)
    elif kind == 2:
        del members[chosen]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            how = zipfile.ZIP_DEFLATED if name == chosen and kind in (1, 3) else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(name), content, how)
    made = out.getvalue()
    if kind == 1 and rng.random() < 0.7:  # the directory says that it is small
        made = made.replace(struct.pack("<I", 1 << 26), struct.pack("<I", 6))
    return made


def in_gzip(rng: random.Random, data: bytes) -> bytes:
    """Change what is compressed, or the compressed bytes, or inflate without an end."""
    try:
        plain = gzip.decompress(data)
    except (OSError, EOFError, zlib.error):  # a mutant of a mutant
        return in_bytes(rng, data)
    kind = rng.random()
    if kind < 0.3:
        return in_bytes(rng, data)
    return gzip.compress(bytes(1 << 26) if kind < 0.33 else text(rng, plain), 1)


def resealed(
    change: Callable[[random.Random, bytes], bytes],
) -> Callable[[random.Random, bytes], bytes]:
    """Change a sealed JSON file and, mostly, write its checksum anew, so that more than the checksum is judged."""
    import hashlib

    def changed(rng: random.Random, data: bytes) -> bytes:
        data = change(rng, data)
        known = re.search(rb'"sha256": "([0-9a-f]{64})"', data)
        if known is None or rng.random() < 0.1:
            return data
        empty = data.replace(known[1], b"0" * 64, 1)
        return data.replace(known[1], hashlib.sha256(empty).hexdigest().encode(), 1)

    return changed


# ------------------------------------------------------------------------------ formats


@dataclass
class Format:
    """A format: how a good file is called and made, how it is changed, and what reads it.

    Attributes:
        read: Takes the path of the file; what it does not refuse must be usable.
        official: Returns whether the format's own reader takes the content; None where there is none.
        stricter: We refuse some of what it takes.
    """

    name: str
    good: Callable[[Path], bytes]
    change: Callable[[random.Random, bytes], bytes]
    read: Callable[[Path], object]
    official: Callable[[bytes], bool] | None = None
    stricter: bool = False
    beside: Callable[[Path], object] = lambda folder: None


def object_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def safetensors_bytes(_: Path) -> bytes:
    from safetensors.numpy import save

    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b.weight": np.ones(4, np.float16),
        "none": np.empty((0, 3), np.int64),
        "scalar": np.array(3, np.uint8),
    }
    return save(tensors, {"step": "é"})


def safetensors_takes(data: bytes) -> bool:
    import safetensors

    try:
        safetensors.deserialize(data)
    except Exception:
        return False
    return True


def read_safetensors(path: Path) -> object:
    from telechat_moe import tensor_files

    entries = tensor_files.read_header(path)
    for entry in entries.values():
        assert sum(len(chunk) for chunk in entry.chunks()) == entry.nbytes
    data = np.fromfile(path, np.uint8)
    if all(entry.dtype in tensor_files.DTYPES for entry in entries.values()):
        with suppress(ValueError):  # NumPy has at most 32 dimensions
            shapes = {name: array.shape for name, array in tensor_files.parse(data).items()}
            assert shapes == {name: entry.shape for name, entry in entries.items()}
    return entries


def npy_bytes(_: Path) -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(6, dtype=np.float32).reshape(2, 3))
    return out.getvalue()


def npy_takes(data: bytes) -> bool:
    try:
        return np.load(io.BytesIO(data), allow_pickle=False).shape == (2, 3)
    except Exception:
        return False


def read_values(path: Path) -> object:
    from telechat_moe.tools.align.dump import value_files

    return value_files.load(path, "unknown", (2, 3), path.parent).sum()


def pt_bytes(folder: Path) -> bytes:
    from telechat_moe.tools.align.dump import value_files

    path = folder / "good.pt"
    value_files.save_pt(path, np.arange(6, dtype=np.float32).reshape(2, 3), "float32")
    return path.read_bytes()


def read_index(path: Path) -> object:
    from telechat_moe import tensor_files

    return tensor_files.read_entries(path.parent)


def shards(folder: Path) -> None:
    (folder / "one.safetensors").write_bytes(safetensors_bytes(folder))


def index_bytes(_: Path) -> bytes:
    names = ("a", "b.weight", "none", "scalar")
    return object_bytes(
        {"metadata": {"total_size": 33}, "weight_map": dict.fromkeys(names, "one.safetensors")}
    )


def checksums_bytes(_: Path) -> bytes:
    from telechat_moe.files import checksums_content

    known = {"one.safetensors": {"bytes": 4, "sha256": "0" * 64}}
    return object_bytes(checksums_content(known, Path("hf"), known))


def read_checksums(path: Path) -> object:
    from telechat_moe.files import read_checksums

    return read_checksums(path.parent)


def manifest_bytes(_: Path) -> bytes:
    from telechat_moe.checkpoint import manifest
    from telechat_moe.files import UNSEALED, seal

    content = {
        "format": manifest.FORMAT, "version": manifest.VERSION, "sha256": UNSEALED, "step": 3, "state": {"data": {"next_sample": 4}},
        "files": {"model-00001-of-00001.safetensors": {"bytes": 4, "sha256": "0" * 64}},
        "tensors": {"model": {"a": {"dtype": "F32", "shape": [1], "file": "model-00001-of-00001.safetensors"}}},
    }  # fmt: skip
    return seal(content)


def read_manifest(path: Path) -> object:
    from telechat_moe.checkpoint import manifest

    manifest.incomplete(path.parent)
    return manifest.read(path.parent)


def read_recipe(path: Path) -> object:
    from telechat_moe.recipe import load

    return load(path)


def recipe_json(_: Path) -> bytes:
    import yaml

    source = HERE.parent / "recipes" / "telechat3_moe" / "pretrain_tiny.yaml"
    return object_bytes(yaml.safe_load(source.read_text()))


def read_device(path: Path) -> object:
    from telechat_moe.tools.plan.cost.device import load_device

    device = load_device(path)
    assert device.memory_bytes > 0
    return device


def device_bytes(_: Path) -> bytes:
    return (HERE.parent / "tools" / "plan" / "devices" / "a100.yaml").read_bytes()


def dump_bytes(folder: Path) -> bytes:
    with tarfile.open(HERE / "align" / "fixtures" / "mindspore_tensor_mix.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return next(folder.rglob("dump.json")).read_bytes()


def read_dump(path: Path) -> object:
    from telechat_moe.tools.align.dump import msprobe

    if path.name != "dump.json":
        return msprobe.parse_json(path, path.parent)
    dump = msprobe.read(path.parent)
    return [len(dump.ranks[key].calls) for key in dump.ranks]


def kineto_bytes(_: Path) -> bytes:
    return (HERE / "diagnose" / "fixtures" / "kineto_rank0.json.gz").read_bytes()


def read_trace(path: Path) -> object:
    from telechat_moe.tools.diagnose.traces import read_traces

    return read_traces([path])


def trace_table(_: Path) -> bytes:
    rows = ["Device_id,Step,Computing,Communication(Not Overlapped),Free,Preparing"]
    rows += [f"0,{step},{100 + step}.5,20.25,3.0,0" for step in range(1, 6)]
    return "\n".join(rows).encode()


def timings_bytes(_: Path) -> bytes:
    from telechat_moe.timings import TYPE, VERSION

    head = {"version": VERSION, "rank": 0, "stage": 0, "columns": ["step", "forward"]}
    return json.dumps(head).encode() + b"\n" + np.arange(8, dtype=TYPE).tobytes()


def read_timings(path: Path) -> object:
    from telechat_moe import timings

    return timings.read(path)


def indexed_files(folder: Path) -> bytes:
    from telechat_moe.data.indexed import write_indexed

    write_indexed(folder / "x", [np.arange(4), np.arange(9)], np.dtype(np.uint16))
    return (folder / "x.idx").read_bytes()


def read_indexed(path: Path) -> object:
    from telechat_moe.data.indexed import IndexedDataset

    data = IndexedDataset(path.with_suffix(""))
    return [data[i].sum() for i in range(len(data))]


def lines_of(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def corpus_bytes(_: Path) -> bytes:
    return lines_of(*({"text": f"line {i}", "id": i, "score": 0.5} for i in range(4)))


def chats_bytes(_: Path) -> bytes:
    said = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    return lines_of(*({"messages": said, "id": i} for i in range(3)))


def read_corpus(path: Path) -> object:
    from telechat_moe.data.corpus import open_corpus

    return [document.text for document in open_corpus([path]).documents()]


def read_chats(path: Path) -> object:
    from telechat_moe.data.corpus import open_corpus

    return [document.text for document in open_corpus([path], conversations=True).documents()]


def parquet_bytes(folder: Path) -> bytes:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"text": ["one", "two", "three" * 20]}), folder / "good.parquet"
    )
    return (folder / "good.parquet").read_bytes()


def metrics_bytes(_: Path) -> bytes:
    steps = (
        {"event": "step", "step": i, "loss": 5.0 - i / 10, "grad_norm": 1.25} for i in range(1, 6)
    )
    return lines_of({"event": "start", "step": 0}, *steps)


def read_loss(path: Path) -> object:
    from telechat_moe.tools.loss.read import read

    return read(path)


def golden_bytes(_: Path) -> bytes:
    values = {str(i): 10.0 - i / 10 for i in range(1, 6)}
    return object_bytes(
        {"lm loss": {"start_step": 1, "end_step": 5, "step_interval": 1, "values": values}}
    )


def log_bytes(_: Path) -> bytes:
    line = "- INFO - { Epoch:[  1/  1], step:[{i:5d}/  100], loss: {x:.3f}, per_step_time: 9ms, lr: 1e-4, overflow cond: False, loss_scale: 1.0, global_norm: [1.5], train_throughput_per_npu: 1.0T"
    return "\n".join(
        line.replace("{i:5d}", f"{i:5d}").replace("{x:.3f}", f"{5 - i / 9:.3f}")
        for i in range(1, 6)
    ).encode()


def megatron_bytes(_: Path) -> bytes:
    line = " iteration {:8d}/     100 | lm loss: {:.6E} | grad norm: 1.500 | number of skipped iterations:   0 |"
    return "\n".join(line.format(i, 5 - i / 9) for i in range(1, 6)).encode()


def titan_bytes(_: Path) -> bytes:
    line = "[titan] - INFO - step: {:2}  loss: {:8.5f}  grad_norm:  1.5000  memory: 1.00GiB(1.00%)"
    return "\n".join(line.format(i, 5 - i / 9) for i in range(1, 6)).encode()


def trainer_bytes(_: Path) -> bytes:
    rows = [{"step": i, "loss": 5 - i / 8, "grad_norm": 1.5} for i in range(1, 6)]
    return object_bytes({"log_history": [*rows, {"step": 5, "eval_loss": 4.5}]})


def chart_bytes(_: Path) -> bytes:
    head = '"Step","a - train/loss","a - train/loss__MIN","a - train/loss__MAX"'
    rows = (f'"{i}","{5 - i / 8}","1","9"' for i in range(1, 6))
    return "\n".join([head, *rows, ""]).encode()


def table_bytes(_: Path) -> bytes:
    return (HERE / "fixtures" / "align_loss" / "plain.csv").read_bytes()[:600]


def hosts_bytes(_: Path) -> bytes:
    return b"# two\nnode-1 slots=8 addr=10.0.0.1\nnode-2 slots=8 addr=10.0.0.2\n"


def read_hostfile(path: Path) -> object:
    from telechat_moe.launch.hosts import choose, read_hosts

    return choose(read_hosts(path), 16, path)


def map_bytes(_: Path) -> bytes:
    link = {
        "name": "w",
        "reference": ["a", "b"],
        "target": "c",
        "sorted": True,
        "width": 4,
        "rows": [1, 0],
        "joined": "first",
        "tokens": [],
    }
    return object_bytes([link, {"name": "x", "reference": "d", "target": "e"}])


def read_links(path: Path) -> object:
    from telechat_moe.tools.align.maps.links import read_map

    return read_map(path)


def program_bytes(_: Path) -> bytes:
    from telechat_moe.tools.plan.schedules.published import generate

    return object_bytes(generate("1f1b", 2, 4, 1).to_json())


def read_program(path: Path) -> object:
    from telechat_moe.tools.plan.schedules.ranks import _program

    try:
        return _program(str(path), 2, 4, 1, "")
    except BadInputError as error:  # `program_of` adds the name
        raise BadInputError(f"{path}: {error}") from None


def loads_bytes(_: Path) -> bytes:
    return lines_of(
        *(
            {"event": "expert_loads", "step": 2 * i, "steps": 2, "loads": [[4, 4, 6, 2]]}
            for i in range(1, 4)
        )
    )


def read_loads(path: Path) -> object:
    from telechat_moe.tools.plan.report.expert_loads import read

    return read(str(path), 1, 4)


def config_bytes(_: Path) -> bytes:
    from telechat_moe.recipe import load
    from telechat_moe.recipe.hugging_face import hf_config

    config = hf_config(load("telechat3_moe/pretrain_tiny.yaml").model_config, "float32")
    return object_bytes(config | {"quantization_config": {"weight_block_size": [128, 128]}})


def read_config(path: Path) -> object:
    from telechat_moe.recipe import hugging_face, load

    config = load("telechat3_moe/pretrain_tiny.yaml").model_config
    return hugging_face.differences(hugging_face.read(path), config)


def sweep_bytes(_: Path) -> bytes:
    return next((HERE.parent / "recipes" / "sweeps").rglob("*.yaml")).read_bytes()


def read_sweep_file(path: Path) -> object:
    from telechat_moe.tools.sweep.file import read_sweep

    return read_sweep(str(path))


def tokenizer_bytes(_: Path) -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, **{chr(97 + i): i + 1 for i in range(26)}}
    made = Tokenizer(models.BPE(words, [], unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    return made.to_str(pretty=True).encode()


def read_tokenizer(path: Path) -> object:
    from telechat_moe.data.tokenizer import load_tokenizer

    return load_tokenizer(path).encode("abc")


def measured_bytes(_: Path) -> bytes:
    return b"recipe,dp,step_s\n" + b"telechat3_moe/pretrain_tiny.yaml,1,1.5\n" * 3


def read_measured(path: Path) -> object:
    from telechat_moe.tools.plan.cost.measured_steps import read_measured_steps

    return read_measured_steps(path)


def statistic_bytes(_: Path) -> bytes:
    titles = "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,Max Value,Min Value,Avg Value,L2Norm Value"
    rows = [
        'MatMul,Default/dense/MatMul-op1,4,0,170,input,0,24,float32,"(2,3)",5,0,2.5,7.4',
        'MatMul,Default/dense/MatMul-op1,4,0,170,output,0,32,bfloat16,"(2,4)",nan,-inf,nan,nan',
        'ReduceSum,Default/Sum-op9,5,0,180,input,0,4,int32,"()",3,3,3,null',
    ]
    return "\n".join([titles, *rows]).encode()


def read_statistic(path: Path) -> object:
    from telechat_moe.tools.align.dump import statistic_csv

    dump = statistic_csv.read(path)
    return [list(call.tensors()) for rank in dump.ranks.values() for call in rank.calls.values()]


def template_bytes(_: Path) -> bytes:
    named = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "x"},
    ]
    return object_bytes(
        {
            "chat_template": named,
            "eos_token": {"content": "</s>"},
            "bos_token": "<s>",
            "model_max_length": 1e30,
        }
    )


def read_template(path: Path) -> object:
    from telechat_moe.data.conversations import read_template

    return read_template(path.parent)


def layouts_bytes(_: Path) -> bytes:
    return object_bytes({
        "Module.*.linear.* input.0": {
            "Device Matrix": [2, 2], "Alias Name": ["dp", "tp"], "Tensor Map": [1, -1], "Partial": [None, "sum"],
            "Rank List": [0, 1, 2, 3], "Padded": {"0": 10},
        },
    })  # fmt: skip


def read_layouts(path: Path) -> object:
    from telechat_moe.tools.align.dump import layout_file

    return layout_file.read_layouts(path)


def read_metrics(path: Path) -> object:
    from telechat_moe.train.metrics import last_step, read

    return last_step(path), read(path)


def switches_bytes(_: Path) -> bytes:
    return object_bytes(
        {
            "pp_1f1b_overlap": "AlltoAllV",
            "recompute_comm_overlap": False,
            "dataset_broadcast_opt_level": 1,
        }
    )


def read_switches(path: Path) -> object:
    from telechat_moe.recipe import load
    from telechat_moe.recipe.speed_up import problems, switches

    settings = [f"context.ascend_config.parallel_speed_up_json_path={path}"]
    recipe = load("telechat3_moe/pretrain_105b_a4b_4k.yaml", settings)
    if found := list(problems(recipe)):
        raise BadInputError("\n  ".join([str(path), *(" ".join(problem) for problem in found)]))
    return switches(recipe)


def stored_bytes(folder: Path) -> bytes:
    """Return checkpoint.json of a checkpoint that is whole."""
    import hashlib

    from telechat_moe.files import seal

    weights = safetensors_bytes(folder)
    content = json.loads(manifest_bytes(folder))
    content["sha256"] = "0" * 64
    content["files"] = {
        WEIGHTS: {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    }
    content["tensors"] = {"model": {"a": {"dtype": "F32", "shape": [2, 3], "file": WEIGHTS}}}
    return seal(content)


def read_stored(path: Path) -> object:
    from telechat_moe.checkpoint.stored import open_checkpoint

    path.replace(path.with_name("checkpoint.json"))
    return open_checkpoint(path.parent)


FORMATS = [
    Format(
        "model.safetensors",
        safetensors_bytes,
        in_safetensors,
        read_safetensors,
        safetensors_takes,
        stricter=False,
    ),
    Format("a.npy", npy_bytes, in_bytes, read_values, npy_takes, stricter=True),
    Format("a.pt", pt_bytes, in_zip, read_values),
    Format("model.safetensors.index.json", index_bytes, text, read_index, beside=shards),
    Format("checksums.json", checksums_bytes, text, read_checksums),
    Format("checkpoint.json", manifest_bytes, resealed(text), read_manifest),
    Format("recipe.json", recipe_json, text, read_recipe),
    Format("device.yaml", device_bytes, text, read_device),
    Format("sweep.yaml", sweep_bytes, text, read_sweep_file),
    Format("dump.json", dump_bytes, text, read_dump),
    Format("stack.json", dump_bytes, text, read_dump),
    Format("kineto.json.gz", kineto_bytes, in_gzip, read_trace),
    Format("step_trace_time.csv", trace_table, text, read_trace),
    Format("rank_0.timings", timings_bytes, text, read_timings),
    Format("x.idx", indexed_files, in_bytes, read_indexed),
    Format("corpus.jsonl", corpus_bytes, text, read_corpus),
    Format("corpus.jsonl.gz", lambda f: gzip.compress(corpus_bytes(f)), in_gzip, read_corpus),
    Format("chats.jsonl", chats_bytes, text, read_chats),
    Format("corpus.parquet", parquet_bytes, in_bytes, read_corpus),
    Format("metrics.jsonl", metrics_bytes, text, read_loss),
    Format("golden.json", golden_bytes, text, read_loss),
    Format("run.log", log_bytes, text, read_loss),
    Format("megatron.log", megatron_bytes, text, read_loss),
    Format("torchtitan.log", titan_bytes, text, read_loss),
    Format("trainer_state.json", trainer_bytes, text, read_loss),
    Format("wandb_export.csv", chart_bytes, text, read_loss),
    Format("loss.csv", table_bytes, text, read_loss),
    Format("hosts", hosts_bytes, text, read_hostfile),
    Format("map.json", map_bytes, text, read_links),
    Format("program.json", program_bytes, text, read_program),
    Format("loads.jsonl", loads_bytes, text, read_loads),
    Format("config.json", config_bytes, text, read_config),
    Format("tokenizer.json", tokenizer_bytes, text, read_tokenizer),
    Format("statistic.csv", statistic_bytes, text, read_statistic),
    Format("tokenizer_config.json", template_bytes, text, read_template),
    Format("layouts.json", layouts_bytes, text, read_layouts),
    Format("metrics_of_run.jsonl", metrics_bytes, text, read_metrics),
    Format("switches.json", switches_bytes, text, read_switches),
    Format(
        "stored.json",
        stored_bytes,
        resealed(text),
        read_stored,
        beside=lambda folder: (folder / WEIGHTS).write_bytes(safetensors_bytes(folder)),
    ),
    Format("measured.csv", measured_bytes, text, read_measured),
]
BY_NAME = {one.name: one for one in FORMATS}


# ------------------------------------------------------------------------------ judging


def complaint(kind: Format, path: Path, data: bytes) -> tuple[bool, str]:
    """Return whether a file was taken, and what is wrong with how it was read; empty: nothing."""
    begin = time.monotonic()
    taken, message = True, ""
    try:
        kind.read(path)
    except RecipeError as error:
        taken, message = False, str(error)
    except TelechatMoeError as error:
        taken, message = False, str(error)
        if error.exit_code != 3:
            return False, f"exit code {error.exit_code}: {message[:200]}"
        lines = message.splitlines()
        place = f"{path.parent}"
        if not message or len(lines) > 100 or max(map(len, lines)) > 3000:
            return False, f"not one short line: {message[:300]!r}"
        if any(not line.startswith(("  ", place)) for line in lines[1:]) or place not in message:
            return False, f"not one line with the file: {message[:300]!r}"
    except BaseException as error:
        return False, f"{type(error).__name__}: {str(error)[:200]} at {_place(error)}"
    if time.monotonic() - begin > SECONDS / 2:
        return taken, f"{time.monotonic() - begin:.1f} s"
    if not taken and not message.isprintable() and not message.replace("\n", "").isprintable():
        return taken, f"characters of control in the message: {message[:200]!r}"
    if kind.official is not None:
        right = kind.official(data)
        if taken and not right:
            return taken, "taken, and its own reader refuses it"
        if right and not taken and not kind.stricter and "appears twice" not in message:
            return taken, f"refused ({message[:200]}), and its own reader takes it"
    return taken, ""


def _place(error: BaseException) -> str:
    step = error.__traceback__
    places: list[str] = []
    while step is not None:
        code = step.tb_frame.f_code
        places.append(f"{Path(code.co_filename).name}:{step.tb_lineno}")
        step = step.tb_next
    return " > ".join(places[-5:])


def judge(name: str, seed: int, count: int, folder: Path) -> dict[str, Any]:
    """Read a good file and its mutants; return how many were taken, and what is wrong."""
    kind, rng = BY_NAME[name], random.Random(f"{name} {seed}")
    good = kind.good(folder)
    place = folder / "mutant"
    place.mkdir()
    path = place / name
    kind.beside(place)
    if kind.name == "x.idx":
        (place / "x.bin").write_bytes((folder / "x.bin").read_bytes())
    path.write_bytes(good)
    wrong: dict[str, str] = {}
    is_taken, found = complaint(kind, path, good)
    if found or not is_taken:
        wrong["the good file"] = found or "the good file is refused"
    taken, slowest = 0, 0.0
    for number in range(count):
        data = kind.change(rng, good)
        if rng.random() < 0.2:
            data = kind.change(rng, data) if data else data
        path.write_bytes(data)
        begin = time.monotonic()
        signal.alarm(SECONDS if signal.getsignal(signal.SIGALRM) is _too_long else 0)
        is_taken, found = complaint(kind, path, data)
        taken += is_taken
        signal.alarm(0)
        slowest = max(slowest, time.monotonic() - begin)
        if found:
            wrong.setdefault(re.sub(r"\d+", "N", found)[:120], f"mutant {number}: {found}")
            (folder / f"wrong_{len(wrong)}_{name}").write_bytes(data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {
        "wrong": list(wrong.values()),
        "slowest_s": round(slowest, 2),
        "peak_mib": peak,
        "taken": taken,
    }


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _too_long)
    name, seed, count, folder = sys.argv[1:]
    sys.stdout.write(json.dumps(judge(name, int(seed), int(count), Path(folder))))
