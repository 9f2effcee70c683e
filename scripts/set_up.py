"""Make .venv ready: this project, what it needs at the pinned versions, and llama-cpp-python compiled once.

Standard library only. Does nothing, in a fraction of a second, when all of it is there already.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import llama_build
from build_cache import Trouble, cache_directory, locked, run, say, start

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "specbisect-set-up"
INPUTS = ["pyproject.toml", "constraints.txt", "scripts/set_up.py"]


def wanted() -> str:
    """What `STAMP` holds when the environment is up to date."""
    digest = hashlib.sha256(b"\0".join((ROOT / name).read_bytes() for name in INPUTS))
    return f"{digest.hexdigest()} {llama_build.build_key()} {ROOT}\n"


def up_to_date() -> bool:
    try:
        return STAMP.read_text() == wanted()
    except FileNotFoundError:
        return False


def make_venv() -> None:
    """Create .venv with pip in it, unless it is there."""
    with locked(ROOT / "pyproject.toml"):
        pip = [str(PYTHON), "-m", "pip", "--version"]
        if (
            PYTHON.exists()
            and subprocess.run(pip, capture_output=True, check=False).returncode == 0
        ):
            return
        say(f"making {VENV} with Python {sys.version.split()[0]}")
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", VENV],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise Trouble(
                "python's venv module does not work; install it (Debian: apt install python3-venv)\n"
                + made.stdout.strip()
            )


def install() -> None:
    """Bring .venv to what `wanted` says."""
    llama_build.compiler()
    make_venv()
    wheel = llama_build.wheel(str(PYTHON))
    with locked(ROOT / "pyproject.toml"):
        if up_to_date():
            return
        STAMP.unlink(missing_ok=True)
        pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
        log = cache_directory() / "logs" / "pip.log"
        env = llama_build.pinned_environment()
        # By itself and by force: pip would keep an older build of the same version.
        alone = [*pip, "--no-deps", "--force-reinstall", str(wheel)]
        run(alone, "installing llama-cpp-python", log, env)
        run(
            [*pip, "--editable", f"{ROOT}[cluster,test]"],
            "installing what specbisect needs",
            log,
            env,
        )
        STAMP.write_text(wanted())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv-only", action="store_true", help="only an empty .venv with pip")
    os.chdir(ROOT)
    if parser.parse_args().venv_only:
        make_venv()
    elif not up_to_date():
        install()


if __name__ == "__main__":
    start(main)
