"""The one direction of the design, checked: who imports whom, who prints, who writes, how long a module is."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "bisect"
MAX_LINES = 450

# Top-level modules and packages of specbisect; each may import from those before it.
ORDER = [
    "errors",
    "stage",
    "fault",
    "cell",
    "trace",
    "compare",
    "workers",
    "llama",
    "matrix",
    "cmdline",
    "engines",
    "store",
    "runner",
    "cluster",
    "diagnose",
    "narrow",
    "ops",
    "gate",
    "report",
    "cli",
    "__main__",
]

# Modules that may write files which outlive the process, with what they write.
WRITERS = {
    "specbisect.llama.files": "digests of model files",
    "specbisect.llama.quantize": "the cache of quantised models",
    "specbisect.workers": "what a worker prints and where it stands, in a scratch directory",
    "specbisect.store": "the run directory",
    "specbisect.narrow.tensors": "models of mixed types",
    "specbisect.cluster.files": "models that were sent to a host",
    "specbisect.report": "reports",
}
WRITING = {"write_text", "write_bytes", "mkdir", "touch", "GGUFWriter"}

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}
MODULES = pytest.mark.parametrize("module", sorted(SOURCES))


def imports(module: str) -> Iterator[str]:
    """The modules of specbisect that `module` imports, wherever in its text."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "specbisect":
                yield name if name in SOURCES else name.rpartition(".")[0]


def calls(module: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(TREES[module]) if isinstance(node, ast.Call))


def called(call: ast.Call) -> str:
    """Last part of the name of what is called."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def part(module: str) -> str:
    """The entry of `ORDER` that `module` belongs to; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def allowed(module: str, table: dict[str, str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in table)


def writes(call: ast.Call) -> bool:
    name = called(call)
    if name == "open":
        strings = [
            a.value
            for a in [*call.args, *(k.value for k in call.keywords)]
            if isinstance(a, ast.Constant) and isinstance(a.value, str)
        ]
        return any(set(mode) & set("wax+") for mode in strings if set(mode) <= set("rwaxbt+"))
    return name in WRITING


@MODULES
def test_imports_go_up_only(module: str) -> None:
    for imported in imports(module):
        if part(imported) != part(module) and part(imported):
            assert ORDER.index(part(imported)) < ORDER.index(part(module)), imported


def test_every_part_has_its_place() -> None:
    assert {part(module) for module in SOURCES} - {""} <= set(ORDER)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {m: {i for i in imports(m) if i in SOURCES and i != m} for m in SOURCES}
    assert set(TopologicalSorter(graph).static_order()) == set(SOURCES)


@MODULES
def test_modules_are_short(module: str) -> None:
    assert len(SOURCES[module].read_text().splitlines()) <= MAX_LINES


@MODULES
def test_only_the_command_line_prints(module: str) -> None:
    if part(module) != "cli":
        assert {called(call) for call in calls(module)}.isdisjoint(
            {"print", "echo", "secho", "pprint"}
        )


@MODULES
def test_few_modules_write_files(module: str) -> None:
    if not allowed(module, WRITERS):
        assert [call.lineno for call in calls(module) if writes(call)] == []


def test_the_checks_see_what_they_look_for() -> None:
    source = "open(p, 'w'); open(p, mode='ab'); open(p); open(p, 'rb'); p.open(); p.write_text(t); f.write(b)"
    seen = [writes(call) for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call)]
    assert sorted(seen) == [False] * 4 + [True] * 3
