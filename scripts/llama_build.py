"""llama.cpp, compiled once per user: the llama-cpp-python wheel and `llama-server`, from one source archive.

Both come from the source distribution pinned in constraints.txt, so that what the library does and what
upstream's own binary does can be compared. Standard library only: it runs before anything is installed.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from build_cache import Trouble, cache_directory, cached, run, say, start

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
LOG = cache_directory() / "logs"

SERVER_OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",  # as in the wheel: the same kernels, compiled with the same flags
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",  # the binary finds its libraries wherever the directory is moved
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",  # neither npm nor a download for the web page
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
]


def pinned(package: str) -> str:
    """The version of `package` in constraints.txt."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    if found is None:
        raise Trouble(f"{CONSTRAINTS} does not pin {package}")
    return found[1]


def pinned_environment() -> dict[str, str]:
    """An environment in which pip keeps to constraints.txt, for what it builds with too."""
    pins = str(CONSTRAINTS)
    return {**os.environ, "PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins}


def compiler() -> list[str]:
    """The C compiler as a command, or `Trouble`. A C++ compiler must be there too."""
    c = shlex.split(os.environ.get("CC", "")) or [
        next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")
    ]
    cpp = shlex.split(os.environ.get("CXX", "")) or [
        next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")
    ]
    if not shutil.which(c[0]) or not shutil.which(cpp[0]):
        raise Trouble(
            "no C and C++ compiler found; install one (Debian: apt install build-essential, "
            "macOS: xcode-select --install) or set CC and CXX"
        )
    return c


def build_key(*options: str) -> str:
    """What decides the machine code: source, compiler, what it makes of this CPU, and all options."""
    c = compiler()
    version = subprocess.run([*c, "--version"], capture_output=True, check=False).stdout
    macros = subprocess.run(
        [*c, "-march=native", "-dM", "-E", "-x", "c", "-"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    ).stdout
    given = [os.environ.get(name, "") for name in ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS", "LDFLAGS")]
    text = [SDIST_SHA256, sysconfig.get_platform(), *given, *options]
    digest = hashlib.sha256(b"\0".join([version, macros, *(part.encode() for part in text)]))
    return f"{pinned('llama_cpp_python')}-{digest.hexdigest()[:12]}"


def sdist(python: str = sys.executable) -> Path:
    """The pinned source archive of llama-cpp-python, fetched by `python`'s pip and checked."""
    version = pinned("llama_cpp_python")

    def fetch(path: Path) -> None:
        pip = [python, "-m", "pip", "download", "--no-deps", "--no-binary=:all:"]
        pip += ["--dest", str(path.parent), f"llama-cpp-python=={version}"]
        doing = f"fetching the source of llama-cpp-python {version}"
        run(pip, doing, LOG / "sdist.log", pinned_environment())
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != SDIST_SHA256:
            raise Trouble(f"{path.name} has SHA-256 {found}, expected {SDIST_SHA256}")

    return cached(cache_directory() / "sdist" / f"llama_cpp_python-{version}.tar.gz", fetch)


def wheel(python: str = sys.executable) -> Path:
    """The compiled llama-cpp-python wheel for this machine."""

    def build(path: Path) -> None:
        source = sdist(python)
        say("compiling llama-cpp-python: 5-6 minutes on two cores, once for this user and machine")
        pip = [python, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir"]
        command = [*pip, str(path), str(source)]
        run(command, "compiling llama-cpp-python", LOG / "wheel.log", pinned_environment())

    directory = cached(cache_directory() / "wheels" / build_key(), build)
    return next(directory.glob("llama_cpp_python-*.whl"))


def server(python: str = sys.executable) -> Path:
    """The `llama-server` binary for this machine, beside its libraries."""

    def build(path: Path) -> None:
        source = sdist(python)
        say("compiling llama-server: 6-8 minutes on two cores, once for this user and machine")
        with tarfile.open(source) as archive:
            changes = archive.extractfile(f"{_top(source)}/CHANGELOG.md")
            assert changes is not None
            commit = re.search(rb"ggml-org/llama\.cpp@([0-9a-f]+)", changes.read())
            assert commit is not None
            vendored = f"{_top(source)}/vendor/llama.cpp/"
            members = [m for m in archive if m.name.startswith(vendored)]
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since 3.11.4
            archive.extractall(path.parent, members)
        env = _with_cmake(python)
        tree = path.parent / "build"
        configure = ["cmake", "-G", "Ninja", "-S", str(path.parent / vendored)]
        configure += ["-B", str(tree), *SERVER_OPTIONS]
        # The archive's own statement; the number is a count of commits, which an archive does not have.
        configure += [f"-DLLAMA_BUILD_COMMIT={commit[1].decode()}", "-DLLAMA_BUILD_NUMBER=0"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        run(configure, "configuring llama-server", LOG / "server-configure.log", env)
        make = ["cmake", "--build", str(tree), "--target", "llama-server"]
        make += ["--parallel", str(os.cpu_count() or 1)]
        run(make, "compiling llama-server", LOG / "server-build.log", env)
        run([tree / "bin/llama-server", "--version"], "trying it", LOG / "server-version.log")
        shutil.copytree(tree / "bin", path, symlinks=True)

    directory = cache_directory() / "llama-server" / build_key(*SERVER_OPTIONS)
    return cached(directory, build) / "llama-server"


def _with_cmake(python: str) -> dict[str, str]:
    """An environment in which `cmake` and `ninja` are found, from the package index if need be."""
    if shutil.which("cmake") and shutil.which("ninja"):
        return dict(os.environ)
    tools = [f"{name}=={pinned(name)}" for name in ("cmake", "ninja")]

    def install(path: Path) -> None:
        pip = [python, "-m", "pip", "install", "--target", str(path), *tools]
        run(pip, "fetching cmake and ninja", LOG / "cmake.log")

    path = cached(cache_directory() / "tools" / "-".join(tools), install)
    search = os.pathsep.join([str(path / "bin"), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": search, "PYTHONPATH": str(path)}


def _top(archive: Path) -> str:
    return archive.name.removesuffix(".tar.gz")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile what is missing; print its path.")
    parser.add_argument("what", choices=["wheel", "server"])
    print({"wheel": wheel, "server": server}[parser.parse_args().what]())


if __name__ == "__main__":
    start(main)
