"""An op capsule on disk: one GGUF, and a program that needs llama_cpp and numpy only."""

import ast
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np

from specbisect import __version__
from specbisect.ops import ggml, operation
from specbisect.ops.capsule import Capsule
from specbisect.ops.operation import KEY, Source
from specbisect.report import render

DATA, PROGRAM = "capsule.gguf", "op_repro.py"


def write(capsule: Capsule, directory: Path, facts: Sequence[str] = ()) -> tuple[Path, Path]:
    """Put the capsule and its program into `directory`, which is made; `facts` are lines for the program's head."""
    directory.mkdir(parents=True, exist_ok=True)
    data, program = directory / DATA, directory / PROGRAM
    writer = gguf.GGUFWriter(data, "specbisect-operation")
    writer.add_string(KEY, capsule.operation.to_json())
    for slot, source in enumerate(capsule.operation.sources):
        if source is not None:
            _add(writer, f"source.{slot}", source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    program.write_text(text(capsule, facts))
    return data, program


def _add(writer: gguf.GGUFWriter, name: str, source: Source) -> None:
    """The data as raw bytes, so that every type goes in as it is."""
    values = np.ascontiguousarray(source.data)
    raw = values.view(np.uint8).reshape(*values.shape[:-1], -1)
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType(source.type))


def text(capsule: Capsule, facts: Sequence[str] = ()) -> str:
    """The program. It carries the text of the modules that found the difference."""
    imports, code = _joined(ggml, operation)
    return (
        render.script()
        .get_template("op_repro.py.j2")
        .render(
            described=capsule.described(),
            facts=[*_facts(capsule), *facts],
            version=__version__,
            imports=imports,
            code=code,
        )
    )


def _facts(capsule: Capsule) -> list[str]:
    block = capsule.block
    whole = capsule.node.result.ne[0]
    kept = (
        f" Of its weight's {whole} rows, {block.start}–{block.stop - 1} are kept." if block else ""
    )
    widths = ", ".join(map(str, capsule.departs)) or "none"
    faithful = (
        "The whole node gives the very bits here that it gave inside the model."
        if capsule.faithful
        else "Inside the model the node gave other bits, since fused kernels or another order played a part."
    )
    return [f"Node: {capsule.node}.{kept}", faithful, f"Found to differ for n = {widths}."]


def _joined(*modules: ModuleType) -> tuple[list[str], str]:
    """Their import statements, without those of specbisect, and the rest of their text in order."""
    imports: set[str] = set()
    code: list[str] = []
    for module in modules:
        source = Path(str(module.__file__)).read_text()
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if not ast.unparse(statement).startswith("from specbisect"):
                    imports.add(ast.unparse(statement))
                last = statement.end_lineno or 0
        code.append("".join(source.splitlines(keepends=True)[last:]).strip())
    return sorted(imports), "\n\n\n".join(code) + "\n"
