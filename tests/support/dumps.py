"""Real dumps of msprobe, unpacked, and ways to break them."""

import json
import random
import tarfile
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "align" / "fixtures"
NAMES = sorted(p.name.removesuffix(".tar.xz") for p in FIXTURES.glob("*.tar.xz"))


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def tensors(node):
    """Yield the entries of tensors in JSON, by a walk that knows no structure of calls."""
    if isinstance(node, dict):
        if "dtype" in node and "shape" in node:
            yield node
        else:
            for value in node.values():
                yield from tensors(value)
    elif isinstance(node, list):
        for value in node:
            yield from tensors(value)


STRANGE = [
    *(None, True, -1, 3.5, 10**400, float("nan"), "", "x", "../../etc/passwd", "/dev/zero", "a\0b"),
    *("\ud800", [], [[]], {}, {"type": "torch.Tensor"}, {"type": 5, "value": 1}, [1, 2, "x"]),
    *([2**62, 2**62], [-1], [True], ["3"], {"a": {"b": [None]}}, "Float32", "torch.float99"),
    {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 2], "data_name": "no.npy"},
]


def places(node, at=()):
    """Return the path of every node of a JSON document."""
    found = [at]
    if isinstance(node, dict):
        for key, value in node.items():
            found += places(value, (*at, key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            found += places(value, (*at, i))
    return found


def broken_json(text: str, rng: random.Random) -> bytes:
    """Return a document with one node replaced, removed, renamed, doubled or nested too deeply."""
    content = json.loads(text)
    if not content:  # construct.json at level L1
        return json.dumps(rng.choice([*STRANGE, {"x": 1}, {"0": [1, 2]}, {"0": ["x"]}])).encode()
    *head, last = rng.choice(places(content)[1:])
    parent = content
    for key in head:
        parent = parent[key]
    kind = rng.randrange(5)
    if kind == 0:
        parent[last] = rng.choice(STRANGE)
    elif kind == 1:
        del parent[last]
    elif kind == 2 and isinstance(parent, dict):
        parent[rng.choice(["", "x", "type", "shape", "data", "\ud800"])] = parent.pop(last)
    elif kind == 3:
        written = json.dumps(content)
        at = rng.choice([i for i, c in enumerate(written) if c == "{"])
        return (written[: at + 1] + '"data": 1, "data": 2, ' + written[at + 1 :]).encode()
    else:
        parent[last] = "DEEP"
        depth = rng.choice([70, 3000, 200_000])
        return json.dumps(content).replace('"DEEP"', "[" * depth + "]" * depth).encode()
    return json.dumps(content).encode()


def broken_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return a file cut, with bytes changed, put in or taken out, or something else altogether."""
    data = bytearray(content)
    kind = rng.randrange(6)
    at = rng.randrange(len(data)) if data else 0
    if kind == 0:
        return bytes(data[:at])
    if kind == 1:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        data[at:at] = rng.randbytes(rng.randint(1, 40))
    elif kind == 3:
        del data[at : at + rng.randint(1, 40)]
    elif kind == 4:  # numbers of headers
        digits = [i for i, c in enumerate(data[:400]) if chr(c).isdigit()]
        if digits:
            data[rng.choice(digits)] = ord(rng.choice("0123456789-.e"))
    else:
        return rng.choice([b"", b"\x93NUMPY", b"PK\x03\x04", rng.randbytes(200), b"[]", b"null"])
    return bytes(data)


def break_one(root: Path, rng: random.Random) -> tuple[Path, bytes]:
    """Break one file of a dump; return it and what it held."""
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    named = [p for p in files if p.suffix == ".json"]
    path = rng.choice(named if named and rng.random() < 0.6 else files)
    content = path.read_bytes()
    kind = rng.random()
    if path.suffix == ".json" and kind < 0.6:
        path.write_bytes(broken_json(content.decode(), rng))
    elif kind < 0.95:
        path.write_bytes(broken_bytes(content, rng))
    else:
        path.unlink()
        if rng.random() < 0.5:
            path.symlink_to("/etc/passwd")
    return path, content


def restore(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
