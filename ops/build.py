"""Compile the native libraries, the operators' and the planner's, with g++ and nothing else.

    python -m telechat_moe.ops.build [--checked | --sanitize] [--out FILE]

``pip install`` runs the same code. Files named ``*.simd.cc`` are compiled once for each instruction set (see
``csrc/dispatch.h``); no flag depends on this machine, and ``CXX`` may be a cross compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OPS = Path(__file__).resolve().parent
PLAN_NATIVE = OPS.parent / "tools" / "plan" / "native"
LIBRARY = OPS / "libtelechat_ops.so"
PLANNER_LIBRARY = PLAN_NATIVE / "libtelechat_planner.so"
SOURCES = {LIBRARY: OPS / "csrc", PLANNER_LIBRARY: PLAN_NATIVE}
"""Folder of the sources of each library."""

# MindSpore's wheels use the old string ABI, and std::string is passed between the two (csrc/aot.h).
FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=default",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-D_GLIBCXX_USE_CXX11_ABI=0",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
]
OPTIMIZE = ["-O3"]
CHECKED = ["-O1", "-g", "-DTELECHAT_CHECKED"]
SANITIZE = [
    *CHECKED,
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",  # MindSpore's class is called through our mirror of it (csrc/aot.h)
    "-fno-sanitize-recover=undefined",
]
INSTRUCTION_SETS = {
    "x86_64": {
        "scalar": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": [
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mfma",
            "-mf16c",
            "-mprefer-vector-width=512",
        ],
    },
    "aarch64": {"neon": []},
}


class BuildError(RuntimeError):
    """The library could not be compiled."""


def compiler() -> str:
    """Return the C++ compiler: ``CXX`` or g++.

    Raises:
        BuildError: There is none.
    """
    name = os.environ.get("CXX", "g++")
    program = shutil.which(name)
    if program is None:
        raise BuildError(
            f"telechat-moe compiles its operators with {name}, which is not on the PATH; install it "
            "(Debian, Ubuntu: apt install g++; Red Hat: dnf install gcc-c++) and install again"
        )
    return program


def build(library: Path = LIBRARY, mode: list[str] | None = None, out: Path | None = None) -> Path:
    """Compile and link; the library appears whole or not at all.

    Args:
        library: A key of ``SOURCES``.
        out: File to write; by default the library itself.
        mode: ``OPTIMIZE`` (default), ``CHECKED`` or ``SANITIZE``.

    Raises:
        BuildError: No compiler, or it failed; carries its output.
    """
    mode, folder, out = mode or OPTIMIZE, SOURCES[library], out or library
    cxx = compiler()
    machine, _, _ = _run([cxx, "-dumpmachine"]).partition("-")  # a cross compiler's is another
    sets = INSTRUCTION_SETS.get(machine, {"scalar": []})
    jobs: list[tuple[Path, str, list[str]]] = []
    for source in sorted(folder.rglob("*.cc")):
        name = "_".join(source.relative_to(folder).with_suffix("").parts)
        if source.name.endswith(".simd.cc"):
            jobs += [
                (source, f"{name}.{isa}", [*flags, f"-DSIMD_NS={isa}"])
                for isa, flags in sets.items()
            ]
        else:
            jobs.append((source, name, []))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        objects = [str(Path(scratch) / f"{name}.o") for _, name, _ in jobs]

        def compile_one(i: int) -> None:
            source, _, flags = jobs[i]
            command = [cxx, *FLAGS, *mode, *flags, f"-I{folder}", "-c", str(source), "-o"]
            _run([*command, objects[i]])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, range(len(jobs))))
        partial = out.with_name(f".{out.name}.{os.getpid()}")
        link = [flag for flag in mode if flag.startswith("-fsanitize")]
        _run([cxx, "-shared", "-pthread", *link, *objects, "-ldl", "-o", str(partial)])
        partial.replace(out)
    return out


def _run(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise BuildError(f"{' '.join(command)}\n{process.stderr[-4000:]}")
    return process.stdout


def main() -> int:
    """Build the libraries that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description="Compile the native libraries.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--checked", action="store_true", help="bounds checks, poisoned scratch")
    mode.add_argument("--sanitize", action="store_true", help="AddressSanitizer and UBSan as well")
    parser.add_argument("--out", type=Path, metavar="FILE", help="compile the operators only")
    args = parser.parse_args()
    flags = SANITIZE if args.sanitize else CHECKED if args.checked else OPTIMIZE
    try:
        for library in [LIBRARY] if args.out else SOURCES:
            sys.stdout.write(f"{build(library, flags, args.out)}\n")
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
