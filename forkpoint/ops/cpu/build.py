"""Compiles the C++ operators once per machine and loads them.

The library is kept in the user's cache folder under a key of the sources, the compiler, torch's version and the
processor's features. A new checkout, torch or machine compiles again; otherwise the library loads in milliseconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from forkpoint.python_process import python_process

FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wno-psabi",
)
NAME = "forkpoint_cpu_ops"
BUILD = "build-"  # how the folder of a running build begins
PARENT_CHECK_S = 1.0  # seconds between two looks whether the process that waits for a build still runs


@dataclass(frozen=True, slots=True)
class CpuBuild:
    """The loaded module, or the reason why it is missing."""

    module: ModuleType | None
    reason: str


def load_operators() -> CpuBuild:
    """Load the operators; if that is not possible, return a CpuBuild that says why. Raises nothing.

    They are compiled first if this machine has not done so yet (about half a minute). If two processes start at once,
    one compiles and the other waits.
    """
    compiler = os.environ.get("CXX", "g++" if platform.system() == "Linux" else "c++")
    compiler_version = _compiler_version(compiler)
    if compiler_version is None:
        return CpuBuild(None, f"no C++ compiler: '{compiler}' does not run (install g++ or set CXX)")
    sources = _sources()
    try:
        folder = _cache_root() / _key(sources, compiler_version)
    except RuntimeError:  # the user has no home folder, such as one whose number alone a container names
        return CpuBuild(None, "no home folder for the compiled C++ operators (set HOME or XDG_CACHE_HOME)")
    library = folder / f"{NAME}.so"
    marker = folder / "complete"
    try:
        if not marker.exists():
            if (missing := _missing_for_compiling()) is not None:
                return CpuBuild(None, missing)
            _compile(sources, library, marker)
        return CpuBuild(_import(library), f"compiled by {compiler}, in {folder}")
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        wrong = next((line for line in lines if "error:" in line), lines[0])
        way_out = "; set XDG_CACHE_HOME to a folder that can be written" if isinstance(error, OSError) else ""
        return CpuBuild(None, f"the C++ operators did not build or load: {wrong} (folder {folder}{way_out})")


def _sources() -> list[Path]:
    here = Path(__file__).parent
    return sorted(p for p in here.iterdir() if p.suffix in (".cpp", ".h"))


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "forkpoint" / "cpu_ops"


def _compiler_version(compiler: str) -> str | None:
    """Return what the compiler says about itself, or None if it does not run."""
    try:
        return subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _missing_for_compiling() -> str | None:
    """Return what a build of a torch extension needs next to a compiler and is not here; None if all is here."""
    from torch.utils import cpp_extension  # imports setuptools, which loading a compiled library does not need

    if not cpp_extension.is_ninja_available():
        return "no ninja (pip install ninja)"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"no Python headers ({header}); install python{platform.python_version()[:4]}-dev"
    return None


def _key(sources: list[Path], compiler_version: str) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(
        repr((FLAGS, compiler_version, torch.__version__, platform.python_version(), _cpu_features())).encode()
    )
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """Return the features that -march=native depends on. A shared home folder may serve several kinds of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(sources: list[Path], library: Path, marker: Path) -> None:
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "forkpoint.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.exists():
            return
        logging.getLogger("forkpoint").info("compiling the C++ operators, once for this machine: about half a minute")
        for left in folder.glob(f"{BUILD}*"):
            shutil.rmtree(left, ignore_errors=True)
        # The compilers of a build that was stopped may still run and write, so that each build has its own folder.
        with tempfile.TemporaryDirectory(prefix=BUILD, dir=folder, ignore_cleanup_errors=True) as place:
            _run_compilers(place, [str(p) for p in sources if p.suffix == ".cpp"])
            os.replace(Path(place) / library.name, library)
        marker.touch()


def _run_compilers(place: str, sources: list[str]) -> None:
    """Build the library in the folder `place`, in a process that ends with this one. Raises RuntimeError."""
    run = f"from forkpoint.ops.cpu.build import run_compilers; run_compilers({os.getpid()})"
    with python_process(run, place, *sources, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(output or f"the compiling process ended with exit code {process.returncode}")


def run_compilers(parent: int) -> None:
    """Build the library as the arguments of this process say; print what failed. Warnings go to standard error.

    When the process `parent` ends or closes its end of standard input, SIGTERM ends this process and ninja, which then
    ends its compilers.
    """
    from torch.utils import cpp_extension

    def end_with_parent() -> None:
        while os.getppid() == parent and not select.select([0], [], [], PARENT_CHECK_S)[0]:
            pass  # forks of the parent may hold its end open
        os.killpg(0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the process of the engine ignores it
    threading.Thread(target=end_with_parent, daemon=True).start()
    place, *sources = sys.argv[1:]
    options: dict[str, Any] = {"extra_cflags": list(FLAGS), "extra_ldflags": ["-fopenmp"], "build_directory": place}
    try:
        cpp_extension.load(NAME, sources, is_python_module=False, **options)
    except (RuntimeError, OSError) as error:
        print(error)
        sys.exit(1)


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is not a loadable module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
