"""Make this process rank ``r`` of ``n`` Ascend devices that do not exist.

MindSpore's semi-automatic parallel front end refuses the target CPU. A small C++ file
(``simulated_device.cc``) registers a communication manager that answers questions about ranks and groups, and
``MS_DEV_PRECOMPILE_ONLY=1`` stops MindSpore after the front-end passes. Internals of MindSpore 2.9.0 and 2.10.0;
nothing of this can be undone, so call :func:`install` in a forked child (:func:`telechat_moe.processes.in_children`).
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from telechat_moe.errors import BadInputError
from telechat_moe.files import user_cache
from telechat_moe.interruption import unfinished
from telechat_moe.versions import PAIRS, require_bfloat16

SOURCE = Path(__file__).with_name("simulated_device.cc")
WORLD = "hccl_world_group"
TESTED = " or ".join(pair.mindspore for pair in PAIRS)


def library() -> Path:
    """Return the compiled library; compile it at first use (2 s), keep it in the user's cache folder.

    Raises:
        BadInputError: NumPy 2, no compiler, no headers of MindSpore, or the compiler failed.
    """
    require_bfloat16()
    package, installed = _mindspore(), version("mindspore")
    text = SOURCE.read_bytes()
    key = hashlib.sha256(text + installed.encode() + str(package).encode()).hexdigest()[:16]
    cache = user_cache()
    target = cache / f"simulated_device-{key}.so"
    if target.exists():
        return target
    cxx = shutil.which(os.environ.get("CXX", "g++"))
    if cxx is None:
        raise BadInputError(
            "the dry run compiles a small C++ file against MindSpore's headers at first use, and g++ is "
            "not on the PATH; install it (Debian, Ubuntu: apt install g++)"
        )
    base = package / "include" / "mindspore"
    if not (base / "ccsrc").is_dir():
        raise BadInputError(
            f"the dry run needs MindSpore's C++ headers, which its wheel puts into {base}; found "
            f"mindspore {installed} without them, expected {TESTED} as published"
        )
    parts = ["", "core", "core/include", "core/mindrt/include", "core/mindrt"]
    parts += ["ccsrc", "ccsrc/include", "ops/include"]
    includes = [
        package / "include",
        package / "include" / "third_party",
        *(base / p for p in parts),
    ]
    lib = package / "lib"
    cache.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    command = [cxx, "-O1", "-std=c++17", "-fPIC", "-shared", "-D_GLIBCXX_USE_CXX11_ABI=0"]
    command += [f"-I{path}" for path in includes] + [str(SOURCE), "-o", str(partial), f"-L{lib}"]
    command += ["-l:libmindspore_core.so", "-l:libmindspore_common.so", f"-Wl,-rpath,{lib}"]
    with unfinished(partial):
        # In a session of its own, where Ctrl-C does not reach it before this process.
        process = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        if process.returncode:
            raise BadInputError(
                f"the dry run could not compile {SOURCE.name} against mindspore {installed} (made for {TESTED}):\n"
                + process.stderr[-1500:]
            )
        partial.replace(target)
    return target


def _mindspore() -> Path:
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        raise BadInputError("mindspore is not installed; pip install 'telechat-moe[train]'")
    return Path(spec.origin).parent


class SimulatedDevice:
    """Rank ``rank`` of ``size`` devices; see the module's docstring.

    Args:
        size: Number of devices.
        path: Result of :func:`library`.
    """

    def __init__(self, rank: int, size: int, path: Path) -> None:
        self.rank, self.size = rank, size
        self._groups: dict[str, list[int]] = {WORLD: list(range(size))}
        self._library = ctypes.CDLL(str(path))
        self._patch_communication()

    def ranks(self, group: str | None = None) -> list[int]:
        """Return the global ranks of a group, whichever side made it."""
        name = WORLD if group in (None, "nccl_world_group", "mccl_world_group") else group
        if name not in self._groups:
            self._groups.update(self._made_by_front_end())
        return list(self._groups[name])

    def groups(self) -> dict[str, list[int]]:
        """Return all groups by name. Attributes ``group_rank_ids`` in a graph are wrong; this is right."""
        return {**self._groups, **self._made_by_front_end()}

    def to_ascend(self) -> None:
        """Make Ascend the target; tensors can be created on the CPU target only."""
        self._library.set_target(b"Ascend", self.size, self.rank)

    def _made_by_front_end(self) -> dict[str, list[int]]:
        need = self._library.list_groups(ctypes.create_string_buffer(1), 1)
        text = ctypes.create_string_buffer(need)
        self._library.list_groups(text, need)
        lines = (line.split("=") for line in text.value.decode().splitlines())
        return {name: [int(r) for r in ranks.split(",") if r] for name, ranks in lines}

    def _create_group(self, group: str, rank_ids: Sequence[int], options: object = None) -> None:
        self._groups[group] = list(rank_ids)
        array = (ctypes.c_uint * len(rank_ids))(*rank_ids)
        self._library.add_group(group.encode(), array, len(rank_ids))

    def _patch_communication(self) -> None:
        """Let MindSpore's Python side ask us instead of a communication library."""
        import mindspore.communication as communication
        import mindspore.ops.function.comm_func as comm_func
        from mindspore.communication import _comm_helper, management

        rank, size = self.rank, self.size
        _comm_helper.GlobalComm.INITED = True
        _comm_helper.GlobalComm.BACKEND = "hccl"
        _comm_helper.GlobalComm.WORLD_COMM_GROUP = WORLD

        def place(group: str | None = WORLD) -> int:
            ranks = self.ranks(group)
            return ranks.index(rank) if rank in ranks else -1

        answers = {
            "_get_rank_helper": place,
            "_get_local_rank_helper": lambda group=WORLD: rank % 8,
            "_get_size_helper": lambda group=WORLD: len(self.ranks(group)),
            "_get_local_size_helper": lambda group=WORLD: min(8, size),
            "_get_world_rank_from_group_rank_helper": lambda group, group_rank_id: self.ranks(
                group
            )[group_rank_id],
            "_get_group_rank_from_world_rank_helper": lambda world_rank_id, group: self.ranks(
                group
            ).index(world_rank_id),
            "_get_group_ranks": lambda group=WORLD: self.ranks(group),
            "_create_group_helper": self._create_group,
            "_destroy_group_helper": lambda group: self._groups.pop(group, None),
            "_is_initialized": lambda *args, **kwargs: True,
        }

        def init(*args: object, **kwargs: object) -> None:
            """Do nothing: everything is initialised."""

        answers["init"] = init
        homes = (_comm_helper, management, communication, comm_func)
        real = {id(vars(home)[name]) for home in homes for name in answers if name in vars(home)}
        # In every module: one that is imported already, such as MindFormers, may hold them by name.
        for module in list(sys.modules.values()):
            for name in answers:
                if id(getattr(module, "__dict__", {}).get(name)) in real:
                    setattr(module, name, answers[name])

        management._get_group = lambda group: (
            WORLD if group in (None, "nccl_world_group", "mccl_world_group") else group
        )
