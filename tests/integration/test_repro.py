"""Every kind of repro, run as somebody who has only llama_cpp and numpy would run it."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.compare import compare
from specbisect.diagnose.conclusion import Options
from specbisect.diagnose.envelope import measure
from specbisect.diagnose.examine import examine
from specbisect.diagnose.finding import Finding
from specbisect.engines import binding
from specbisect.engines.libllama import LibLlama, make
from specbisect.errors import EngineFault
from specbisect.fault import Fault
from specbisect.llama import files, quantize
from specbisect.report import case as report
from specbisect.report import subject
from specbisect.trace import Trace

N_MAX = 4
NEEDED = (
    "llama_cpp",
    "numpy",
    "numpy.libs",
    "typing_extensions",
    "diskcache",
    "jinja2",
    "markupsafe",
)
"""llama_cpp, numpy, and what those import themselves."""
TEXT = "Once upon a time there was a"
TEXTS = (
    "def quicksort(arr):\n",
    "The history of the bicycle begins",
    "Once upon a time, in a small village",
    "<|im_start|>user\nExplain why the sky is blue.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def lab() -> Iterator[LibLlama]:
    engine = make()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory from which llama_cpp and numpy can be imported, and nothing of this project."""
    directory = tmp_path_factory.mktemp("site")
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    for name in NEEDED:
        found = next(p for p in (packages / name, packages / f"{name}.py") if p.exists())
        (directory / found.name).symlink_to(found)
    return directory


def model(path: Path) -> Model:
    known = files.inspect(path)
    return Model(path.stem, known.file_type, f"sha256:{known.sha256}", str(path))


@dataclass
class Repro:
    """A generated ``repro.py`` and the model it is for."""

    script: Path
    model: str
    site: Path

    def run(self, *arguments: str, model: str = "", **environment: str) -> tuple[int, str]:
        """Exit code and output, without this project and without site-packages."""
        done = subprocess.run(
            [sys.executable, "-S", str(self.script), model or self.model, *arguments],
            env=os.environ | {"PYTHONPATH": str(self.site)} | environment,
            cwd=self.script.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout


@pytest.fixture
def repro(tmp_path: Path, site: Path) -> Callable[[Finding], Repro]:
    def written(finding: Finding) -> Repro:
        texts = report.files(finding)
        report.write(tmp_path, texts)
        return Repro(tmp_path / "repro.py", finding.case.cell.target.path, site)

    return written


@pytest.fixture(scope="module")
def tiny(tiny_models: Callable[..., Path]) -> Callable[..., Case]:
    """A case on tiny models, whose fault strikes at batches of full width."""

    def case(kind: str = "llama", fault: str = "", noise: float = 0.25) -> Case:
        target, draft = tiny_models(kind, "Q4_K_M"), tiny_models(kind, noise=noise)
        drafter = DraftModel(model(draft), N_MAX)
        cell = Cell(model(target), drafter, n_threads=1, n_ctx=512, n_predict=32)
        planted = Fault(fault, cycle=2, width=N_MAX + 1) if fault else None  # type: ignore[arg-type]
        return Case(cell, Prompt("tiny", TEXT), planted)

    return case


def diagnosed(
    lab: LibLlama, case: Case, *, reference: bool = False, audit: bool = False
) -> Finding:
    """The finding of the diagnosis itself."""
    vanilla, speculative = lab.run(case.vanilla), lab.run(case)
    copy = quantize.quantize(Path(case.cell.target.path), "F32") if reference else ""
    options = Options(
        audit=audit,
        reference=str(copy),
        envelope=measure(lab, case.vanilla, vanilla, (2, N_MAX + 1)) if reference else None,
    )
    return examine(lab, case, vanilla, speculative, options)


PLANTED = (
    ("state", "llama", "stale-kv", "planted=0"),
    ("state", "llama", "swapped-positions", "width=1"),
    ("state", "moe", "rollback-too-few", "planted=0"),
    ("state", "swa", "rollback-too-many", "planted=0"),
    ("state", "llama", "rollback-skipped", "width=1"),
    ("state", "llama", "foreign-token", "planted=0"),
    ("state", "recurrent", "wrong-checkpoint", "planted=0"),
    ("nondeterministic", "llama", "noise", "planted=0"),
    ("kernel-defect", "llama", "kernel-large", f"width={N_MAX}"),
    ("kernel-defect", "llama", "nan-row", f"width={N_MAX}"),
    ("kernel-defect", "llama", "kernel-small", f"width={N_MAX}"),
    ("baseline", "llama", "kernel-baseline", "planted=0"),
)


@pytest.mark.parametrize(("label", "kind", "fault", "passing"), PLANTED)
def test_a_planted_fault_is_shown_and_its_neighbour_is_not(
    label: str,
    kind: str,
    fault: str,
    passing: str,
    lab: LibLlama,
    tiny: Callable[..., Case],
    repro: Callable[[Finding], Repro],
) -> None:
    by_kernel = label in ("kernel-defect", "baseline")
    found = diagnosed(lab, tiny(kind, fault), reference=by_kernel, audit=True)
    assert found.label == label, found.summary
    program = repro(found)
    code, said = program.run()
    assert code == 1, said
    assert "recorded:" not in said, said
    code, said = program.run(passing)
    assert code == 0, said


@pytest.mark.parametrize(
    "fault", ["row-off-by-one", "accept-too-many", "bonus-wrong-row", "constant-loop"]
)
def test_a_wrong_choice_of_tokens_is_shown(
    fault: str, lab: LibLlama, tiny: Callable[..., Case], repro: Callable[[Finding], Repro]
) -> None:
    found = diagnosed(lab, tiny(fault=fault))
    assert found.label == "verification", found.summary
    code, said = repro(found).run()
    assert code == 1, said
    healthy = found.model_copy(update={"evidence": (), "speculative": lab.run(tiny())})
    code, said = repro(healthy).run()
    assert code == 0, said


def test_an_answer_that_goes_on_after_its_end_is_shown(
    lab: LibLlama,
    tiny: Callable[..., Case],
    tiny_models: Callable[..., Path],
    repro: Callable[[Finding], Repro],
) -> None:
    plain = tiny(fault="past-eog")
    for word in lab.run(tiny().vanilla).ids[8:]:
        target = tiny_models("llama", "Q4_K_M", ends_as=word)
        draft = tiny_models("llama", noise=0.25, ends_as=word)
        cell = replace(plain.cell, target=model(target), drafter=DraftModel(model(draft), N_MAX))
        with suppress(
            EngineFault
        ):  # the fault leaves a draft unfinished when the end is inside one
            found = diagnosed(lab, replace(plain, cell=cell))
            if found.kind == "past-eog":
                break
    assert (found.label, found.kind) == ("verification", "past-eog"), found.summary
    code, said = repro(found).run()
    assert code == 1, said
    assert "ends generation" in said


def test_drafts_in_the_wrong_place_are_shown(
    lab: LibLlama, tiny: Callable[..., Case], repro: Callable[[Finding], Repro]
) -> None:
    found = diagnosed(lab, tiny(fault="draft-shift", noise=0.05), audit=True)
    assert (found.label, found.kind) == ("draft-alignment", "shift +1"), found.summary
    code, said = repro(found).run()
    assert code == 1, said
    healthy = found.model_copy(update={"speculative": lab.run(tiny(noise=0.05))})
    code, said = repro(healthy).run()
    assert code == 0, said


def test_a_fork_without_a_cause_is_shown_with_its_rollback(
    lab: LibLlama, tiny: Callable[..., Case], repro: Callable[[Finding], Repro]
) -> None:
    found = diagnosed(lab, tiny(fault="stale-kv")).model_copy(update={"label": "unexplained"})
    program = repro(found)
    code, said = program.run()
    assert code == 1, said
    assert "as recorded" in said
    assert program.run("planted=0")[0] == 0


def test_a_batch_that_flips_at_once_is_shown_at_its_width(
    lab: LibLlama, tiny: Callable[..., Case], repro: Callable[[Finding], Repro]
) -> None:
    found = diagnosed(lab, tiny(fault="kernel-large"), audit=True)
    assert found.verdict.fork is not None
    program = repro(found.model_copy(update={"label": "batch-width", "kind": "at-fork"}))
    code, said = program.run()
    assert code == 1, said
    assert "as recorded" in said
    assert program.run(f"width={N_MAX}")[0] == 0


def test_what_cannot_be_tested_is_neither_good_nor_bad(
    lab: LibLlama,
    tiny: Callable[..., Case],
    tiny_models: Callable[..., Path],
    repro: Callable[[Finding], Repro],
) -> None:
    program = repro(diagnosed(lab, tiny(fault="stale-kv")))
    other = str(tiny_models("llama"))
    for arguments, wanted in (
        ({"model": other}, "another model"),
        ({"model": "missing.gguf"}, "No such file"),
        ({"LLAMA_CPP_LIB_PATH": str(program.site)}, "not found"),
    ):
        code, said = program.run(**arguments)
        assert code == 125, said
        assert wanted in said
    for wrong in ("n_ctx=many", "nothing=1", "type_k=q9"):
        code, said = program.run(wrong)
        assert code == 125, said
    assert program.run("sha256=any", model=other)[0] in (0, 1)


def test_nothing_of_this_project_is_in_reach(repro: Callable[[Finding], Repro], site: Path) -> None:
    code = "import llama_cpp, numpy, importlib.util as u; print(u.find_spec('specbisect'), u.find_spec('gguf'))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=site,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith("None None")


def test_a_redacted_repro_takes_the_prompt_from_a_file(
    lab: LibLlama, tiny: Callable[..., Case], site: Path, tmp_path: Path
) -> None:
    found = diagnosed(lab, tiny(fault="stale-kv"))
    report.write(tmp_path, report.files(found, redact_prompt=True))
    program = Repro(tmp_path / "repro.py", found.case.cell.target.path, site)
    ids = list(subject.of(found).prompt_ids)
    (tmp_path / "ids.json").write_text(str(ids))
    assert program.run("prompt=ids.json")[0] == 1
    (tmp_path / "ids.json").write_text(str(ids[::-1]))
    code, said = program.run("prompt=ids.json")
    assert (code, "another prompt" in said) == (125, True)


@pytest.fixture(scope="module")
def natural(lab: LibLlama, ladder: Callable[[str], Path]) -> Finding:
    """A fork that nobody planted: the first among some prompts and draft lengths on a quantised target."""
    draft = model(ladder("Q2_K"))
    for quant in ("Q4_K_M", "Q6_K", "BF16"):
        for n_max in (3, 7):
            for text in TEXTS:
                drafter = DraftModel(draft, n_max)
                cell = Cell(model(ladder(quant)), drafter, n_threads=1, n_ctx=512, n_predict=48)
                case = Case(cell, Prompt("natural", text))
                if compare(lab.run(case.vanilla), lab.run(case)).outcome == "fork":
                    return diagnosed(lab, case)
    pytest.skip("NOT RUN: this machine shows no natural fork in 24 cases")


def test_a_natural_fork_gives_the_recorded_tokens(
    natural: Finding, repro: Callable[[Finding], Repro]
) -> None:
    assert natural.label == "batch-width", natural.summary
    program = repro(natural)
    code, said = program.run()
    assert code == 1, said
    verdict = natural.verdict
    assert re.search(
        rf"\b{verdict.reference_token}\b.*\b{verdict.speculative_token}\b.*as recorded", said
    )
    code, said = program.run("width=1")
    assert code == 0, said
    assert "does not say that it is gone where it was recorded" in said


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def run_shell(directory: Path, server: Path, *models: str) -> tuple[int, str]:
    """Exit code and output of a ``repro.sh`` with upstream's own server."""
    done = subprocess.run(
        ["bash", str(directory / "repro.sh"), *models],
        env=os.environ | {"LLAMA_SERVER": str(server), "PORT": str(free_port())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_natural_fork_is_there_on_upstreams_own_server(
    natural: Finding, llama_server: Path, lab: LibLlama, tmp_path: Path
) -> None:
    cell = natural.case.cell
    assert isinstance(cell.drafter, DraftModel)
    models = cell.target.path, cell.drafter.model.path
    report.write(tmp_path, report.files(natural))
    code, said = run_shell(tmp_path, llama_server, *models)
    assert code == 1, said
    verdict = natural.verdict
    assert f"token {verdict.fork}: {verdict.reference_token} without the drafter" in said
    assert f"{verdict.speculative_token} with it" in said

    code, said = run_shell(tmp_path, llama_server, models[1], models[0])
    assert (code, "another model" in said) == (125, True)

    assert isinstance(natural.speculative, Trace)
    shorter = replace(natural.case, cell=replace(cell, n_predict=max(2, verdict.fork or 0)))
    agreeing = natural.model_copy(
        update={
            "case": shorter,
            "speculative": lab.run(shorter),
            "vanilla": lab.run(shorter.vanilla),
        }
    )
    report.write(tmp_path, report.files(agreeing))
    code, said = run_shell(tmp_path, llama_server, *models)
    assert code == 0, said


@pytest.mark.parametrize("label", ["prompt-cache", "batch-composition", "cross-sequence"])
def test_requests_around_a_case_can_be_made_on_upstreams_own_server(
    label: str, lab: LibLlama, tiny: Callable[..., Case], llama_server: Path, tmp_path: Path
) -> None:
    case = tiny()
    axes = {"cache_prompt": True} if label == "prompt-cache" else {"n_parallel": 3, "n_ctx": 1536}
    around = replace(case, cell=replace(case.cell, engine="server", **axes))  # type: ignore[arg-type]
    found = diagnosed(lab, case).model_copy(update={"label": label, "case": around})
    report.write(tmp_path, report.files(found))
    assert isinstance(case.cell.drafter, DraftModel)
    models = case.cell.target.path, case.cell.drafter.model.path
    code, said = run_shell(tmp_path, llama_server, *models)
    assert code in (0, 1), said
    assert re.search(r"no difference in 32 tokens|token \d+: \d+ .*, \d+ .* other requests", said)


@pytest.mark.parametrize("n_max", [3, 7])
def test_a_fork_of_the_binding_is_shown_by_the_binding(
    n_max: int, ladder: Callable[[str], Path], repro: Callable[[Finding], Repro]
) -> None:
    engine = binding.make()
    drafter = DraftModel(model(ladder("Q2_K")), n_max)
    cell = Cell(
        model(ladder("Q4_K_M")), drafter, engine="binding", n_threads=1, n_ctx=512, n_predict=48
    )
    for text in TEXTS:
        case = Case(cell, Prompt("natural", text))
        vanilla, speculative = engine.run(case.vanilla), engine.run(case)
        verdict = compare(vanilla, speculative)
        if verdict.outcome == "fork":
            break
    else:
        pytest.skip("NOT RUN: the binding does not fork on this machine")
    found = Finding(
        case=case,
        verdict=verdict,
        label="binding-only",
        summary="only in the binding",
        vanilla=vanilla,
        speculative=speculative,
    )
    program = repro(found)
    code, said = program.run()
    assert code == 1, said
    assert "as recorded" in said
    assert program.run("width=1")[0] == 0
