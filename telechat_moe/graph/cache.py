"""Keep the compiled graphs of a training step in the user's cache folder for later starts of the same recipe.

MindSpore's compile cache holds what its front end makes of a graph, but it trusts its files, and to know whether they
still fit it looks at the script only. Here a file's name is a hash of everything that graphs are made from, its content
begins with a checksum, and MindSpore has a folder of its own to which it is copied.
"""

import ast
import hashlib
import io
import json
import os
import platform
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import telechat_moe
from telechat_moe.errors import BadInputError
from telechat_moe.files import check_private, user_cache, write_atomic
from telechat_moe.graph.mindir import MindIR
from telechat_moe.ops import native
from telechat_moe.versions import installed

FILES = 8
"""How many files stay: the last ones used."""
COMPILING = "compiling the graph of a step (5 to 30 s)"
COMMAND = "telechat_moe.cli.__main__", "telechat-moe"
"""Module and script that start the sources as they are; another program may have changed them before a graph is made."""
_DIGEST_BYTES = 64
_SWITCHES = ("MS_DEV_", "MS_COMPILER_CACHE_")
_SETTINGS = ("MS_", "OMP_", "ONEDNN_", "DNNL_")
_requested = False
"""MindSpore asks for the folder once in a process."""


@contextmanager
def compile_cache(
    made_from: Any, graphs: int, say: Callable[[str], object]
) -> Generator[None, None, None]:
    """Take the graphs that are compiled inside, always the same ones in this order, from the user's cache, or put them there.

    Only the first use in a process does so. What hinders that is said, and hinders nothing else.

    Args:
        made_from: Everything about the run that graphs are made from, as JSON can write it.
        graphs: How many are compiled.
        say: Called with lines for the user.
    """
    import mindspore as ms  # who only hashes the sources does without it

    global _requested
    hindered = "this process has compiled a step before" if _requested else _hindered()
    _requested = True
    scratch, file, restored = None, Path(), dict[str, bytes]()
    try:
        if not hindered:
            file = _folder() / f"{key(made_from, graphs)}.graphs"
            scratch = TemporaryDirectory(prefix="telechat-moe-", ignore_cleanup_errors=True)
            restored = _take(file, Path(scratch.name), say)
    except (OSError, BadInputError, RuntimeError) as error:  # RuntimeError: this user has no home
        hindered = str(error)
        if scratch is not None:
            scratch.cleanup()
            scratch = None
    if scratch is None:
        say(f"{COMPILING}; it is not kept: {hindered}")
        yield
        return
    say("the graph of a step is kept from an earlier start" if restored else COMPILING)
    with scratch as folder:
        ms.set_context(enable_compile_cache=True, compile_cache_path=folder)
        try:
            yield
        finally:
            ms.set_context(enable_compile_cache=False)
        try:
            _keep(file, Path(folder), restored, graphs)
        except (OSError, BadInputError) as error:
            say(f"the graph of a step is not kept for later starts: {error}")


def key(made_from: Any, graphs: int) -> str:
    """Return a hash of everything that the graphs of a step are made from."""
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)}
    cores = len(os.sched_getaffinity(0))
    text = json.dumps([made_from, graphs, settings, _processor(), cores])
    return source_hash(text, _foreign_code())[:32]


def source_hash(text: str, files: Iterable[Path] = ()) -> str:
    """Return a hash of a text, of versions and of all code that a graph is made of: this package and ``files``."""
    versions = [sys.version, installed("mindspore"), np.__version__]
    digest = hashlib.sha256(json.dumps([text, versions]).encode())
    for file in sorted({*_own_code(), *files}):
        digest.update(f"{file}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _hindered() -> str:
    """Return why this process must compile, empty if it need not."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if (spec.name if spec else Path(sys.argv[0]).name) not in COMMAND:
        return f"{sys.argv[0]} is not the command telechat-moe"
    try:
        ast.parse(Path(sys.argv[0]).read_bytes())  # as MindSpore does
    except (OSError, SyntaxError, ValueError) as error:
        return f"{sys.argv[0]}: {error}"
    switches = [name for name in os.environ if name.startswith(_SWITCHES)]
    return f"{switches[0]} is set" if switches else ""


def _own_code() -> Iterator[Path]:
    """Yield the files of this package whose code may take part."""
    for module in (telechat_moe, native):
        yield from Path(str(module.__file__)).parent.rglob("*.py")
    if native.LIBRARY.exists():
        yield native.LIBRARY


def _foreign_code() -> Iterator[Path]:
    """Yield other files that are imported, but those of installed packages, whose versions are known."""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        foreign = name.endswith("customize") or not file.startswith(installed)
        if foreign and Path(file).is_absolute():  # torch has modules with invented names
            yield Path(file)


def _processor() -> list[str]:
    """Return kind and instruction sets of the processor."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            first = file.read(1 << 14).partition("\n\n")[0].splitlines()
    except OSError:
        first = [platform.processor()]
    changing = ("cpu MHz", "bogomips", "BogoMIPS", "processor", "apicid", "core id", "initial")
    return [platform.machine(), *(line for line in first if not line.startswith(changing))]


def _folder() -> Path:
    """Return the folder of kept graphs, to which this user alone can write."""
    folder = user_cache() / "graphs"
    folder.mkdir(parents=True, exist_ok=True)
    return check_private(folder)


def _take(file: Path, scratch: Path, say: Callable[[str], object]) -> dict[str, bytes]:
    """Copy MindSpore's files out of a kept file; return them, none if there is no good one."""
    if not file.exists():
        return {}
    raw = check_private(file).read_bytes()
    if hashlib.sha256(raw[_DIGEST_BYTES:]).hexdigest().encode() != raw[:_DIGEST_BYTES]:
        say(f"{file} is damaged")
        return {}
    with zipfile.ZipFile(io.BytesIO(raw[_DIGEST_BYTES:])) as packed:
        packed.extractall(scratch)
    with suppress(OSError):  # a disk that can only be read
        os.utime(file)
    return _files(scratch)


def _keep(file: Path, scratch: Path, restored: Mapping[str, bytes], graphs: int) -> None:
    """Keep what MindSpore has written, and the last files used beside it."""
    files = _files(scratch)
    if files != restored:
        complete = sum(name.endswith(".mindir") for name in files) == graphs
        if not complete or not all(_is_whole(name, data) for name, data in files.items()):
            raise BadInputError(
                f"MindSpore could not write it to {scratch.parent}; is there space?"
            )
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        data = packed.getvalue()
        write_atomic(file, hashlib.sha256(data).hexdigest().encode() + data)
    with suppress(OSError):  # another process was first
        for old in sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-FILES]:
            old.unlink()


def _is_whole(name: str, data: bytes) -> bool:
    """Return whether a file ends as MindSpore ends it: a disk may have been full."""
    from google.protobuf.message import DecodeError

    if not name.endswith(".mindir"):  # the hash of the script
        return len(data) == _DIGEST_BYTES
    try:
        return MindIR(data).proto.HasField("mind_ir_version")  # the last field
    except DecodeError:
        return False


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
