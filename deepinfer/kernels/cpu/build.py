"""Compiles the C sources of this folder into one shared library, once for a machine and compiler.

The cache entry is named by a hash of all that decides the result (sources, flags, compiler, CPU features). Every
process builds in its own temporary folder and renames the finished file into place, so many may start at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from deepinfer import envs
from deepinfer.terminal import waiting

HERE = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall")
# Formats are rounded bit for bit: a fused multiply-add would round differently.
FILE_FLAGS = {"cache_rows.c": ("-ffp-contract=off",)}
# Tried in order: what the machine offers, then plain code. PyTorch has loaded its OpenMP runtime already; not linking
# another one makes our threads the same pool.
VARIANTS = (
    (("-march=native", "-fopenmp"), ()),
    (("-march=native", "-fopenmp"), ("-fopenmp",)),
    (("-march=native", "-fopenmp-simd"), ()),
    ((), ()),
)
SECONDS_A_FILE = 120


class BuildError(Exception):
    """No library could be built; the text says why in one line."""


def find_compiler() -> list[str] | None:
    """The C compiler's command: $CC (which may be two words, "ccache gcc"), else gcc, cc or clang; None without one."""
    wanted = os.environ.get("CC")
    for command in (wanted,) if wanted else ("gcc", "cc", "clang"):
        try:
            program, *arguments = shlex.split(command)
        except ValueError:  # blank, or a quote that is not closed
            continue
        path = shutil.which(program)
        if path:
            return [path, *arguments]
    return None


def cache_dir() -> Path:
    """DEEPINFER_CACHE_DIR, else XDG_CACHE_HOME/deepinfer, else ~/.cache/deepinfer, else a temporary folder of the user.

    Raises BuildError if somebody else could put libraries into the last one.
    """
    chosen = envs.get("DEEPINFER_CACHE_DIR")
    if chosen is not None:
        return chosen
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "deepinfer"
    try:
        return Path.home() / ".cache" / "deepinfer"
    except RuntimeError:  # no HOME and no entry in the user database: a container run under any user id
        return _private_folder(Path(tempfile.gettempdir()) / f"deepinfer-{os.getuid()}")


def _private_folder(folder: Path) -> Path:
    """`folder`, made if necessary; nobody else may write there."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat()
    except OSError as error:
        raise BuildError(f"cannot make {folder}: {error.strerror or error}") from None
    if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise BuildError(f"{folder} can be written by another user; set DEEPINFER_CACHE_DIR")
    return folder


def libraries() -> list[Path]:
    """Where the library of each variant is or will be, in the order in which they should be tried.

    Raises BuildError without a compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C compiler found (gcc or clang)")
    return [cache_dir() / f"kernels-{_key(compiler, index)}.so" for index in range(len(VARIANTS))]


def build(index: int, target: Path) -> None:
    """Compile variant `index` to `target`. Raises BuildError with the compiler's first error line."""
    compiler = find_compiler()
    assert compiler is not None
    compile_flags, link_flags = VARIANTS[index]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        note = waiting("compiling the CPU kernels, once on this machine")
        with note, tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            objects = [f"{folder}/{source.stem}.o" for source in _sources()]
            commands = [
                [*compiler, *FLAGS, *FILE_FLAGS.get(source.name, ()), *compile_flags, "-c", str(source), "-o", out]
                for source, out in zip(_sources(), objects, strict=True)
            ]
            _run_all(commands)
            library = f"{folder}/{target.name}"
            _run_all([[*compiler, "-shared", *objects, "-o", library, *link_flags, "-lm"]])
            os.replace(library, target)
    except OSError as error:
        raise BuildError(f"cannot write {target.parent}: {error.strerror or error}") from None


def _sources() -> list[Path]:
    return sorted(HERE.glob("*.c"))


def _key(compiler: list[str], index: int) -> str:
    # A new compiler version is a new file; asking for --version costs 3 ms a start.
    files = [os.stat(path) for path in map(shutil.which, compiler) if path]
    parts = [
        *compiler,
        *(f"{file.st_size} {file.st_mtime_ns}" for file in files),
        platform.machine(),
        cpu_features(),
        repr(VARIANTS[index]),
    ]
    digest = hashlib.sha256(repr((parts, FLAGS, FILE_FLAGS)).encode())
    for source in sorted([*_sources(), *HERE.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def cpu_features() -> str:
    """Model and feature flags of the first core: `-march=native` follows them."""
    try:
        core = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in core.splitlines() if line.startswith(wanted))


def _run_all(commands: list[list[str]]) -> None:
    """Run the commands side by side; the first failure is raised as BuildError."""
    running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for c in commands]
    failure = None
    for process, (program, *_) in zip(running, commands, strict=True):
        try:
            _, errors = process.communicate(timeout=SECONDS_A_FILE)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            failure = failure or f"{program} took more than {SECONDS_A_FILE} s"
        if process.returncode and failure is None:
            lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or ["no message"]
            failure = f"{program} failed: {lines[0]}"
    if failure:
        raise BuildError(failure)
