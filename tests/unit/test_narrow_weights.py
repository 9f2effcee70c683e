"""Files that a search makes: what is in them, which are left on disk, and what becomes of a trial that goes wrong."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from findings import finding
from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.compare import Verdict
from specbisect.diagnose.finding import Finding
from specbisect.diagnose.numeric import NEEDS_REFERENCE
from specbisect.errors import BadInput, EngineFault
from specbisect.llama import files, header, quantize
from specbisect.narrow.candidate import Candidate, Weights
from specbisect.narrow.ddmin import Reason
from specbisect.narrow.gate import Seen, Wanted
from specbisect.narrow.result import Narrowed
from specbisect.narrow.run import Narrowing
from specbisect.narrow.running import Trials
from specbisect.narrow.trial import Look
from specbisect.narrow.weights import FromBase
from specbisect.trace import Failure

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))


def weights_of(path: Path) -> Weights:
    facts = files.inspect(path)
    return Weights.of(Model(path.stem, facts.file_type, f"sha256:{facts.sha256}", str(path)))


def made(weights: Weights) -> dict[str, str]:
    """Types by tensor, of a file that is made if need be."""
    if weights.recipe is not None:
        quantize.make(weights.recipe, n_threads=1)
    return {t.name: t.type for t in header.read(Path(weights.model.path)).tensors}


def test_all_finer_types_the_least_fine_first(tiny_models: Make) -> None:
    base = tiny_models()
    ladder = FromBase(base)
    rungs = ladder.above(weights_of(tiny_models("llama", "Q4_K_M")))
    assert [rung.type for rung in rungs] == ["Q5_K_M", "Q6_K", "Q8_0", "F16", "BF16"]
    assert (rungs[-1].recipe, rungs[-1].model.path) == (None, str(base.resolve()))
    assert ladder.above(rungs[-1]) == []
    assert set(made(rungs[0]).values()) <= {"Q5_K", "Q6_K", "F32"}


@pytest.mark.parametrize("safe_type", ["Q8_0", "BF16"])
@pytest.mark.parametrize("base_type", ["BF16", "Q4_K_M"])
def test_only_the_tensors_that_are_kept_have_the_unsafe_type(
    tiny_models: Make, safe_type: str, base_type: str
) -> None:
    unsafe = weights_of(tiny_models("llama", "Q4_K_M"))
    ladder = FromBase(tiny_models("llama", base_type))
    safe = next(rung for rung in ladder.above(unsafe) if rung.type == safe_type)
    ours, theirs = made(unsafe), made(safe)
    names = ladder.tensors(unsafe, safe)
    assert set(names) == {n for n in ours if ours[n] != theirs[n]}

    kept = ("blk.1.ffn_up.weight", "blk.0.attn_q.weight")
    mixed = ladder.mixed(unsafe, safe, kept)
    assert made(mixed) == theirs | {name: ours[name] for name in kept}
    assert (mixed.kept, mixed.type) == (kept, "Q4_K_M")
    assert mixed.model.quant.split("+")[0] == mixed.recipe.type  # what a report makes it with
    assert ladder.types(unsafe, kept) == {"Q4_K"}

    assert ladder.mixed(unsafe, safe, names) is unsafe
    assert ladder.mixed(unsafe, safe, ()) is safe


def test_tensors_alike_lie_next_to_each_other(tiny_models: Make) -> None:
    unsafe = weights_of(tiny_models("llama", "Q4_0"))
    ladder = FromBase(tiny_models())
    names = ladder.tensors(unsafe, ladder.above(unsafe)[-1])
    assert names.index("blk.0.ffn_up.weight") + 1 == names.index("blk.1.ffn_up.weight")
    groups = ["attn" if "attn" in n else "ffn" if "ffn" in n else n for n in names]
    assert len(set(groups)) == sum(a != b for a, b in zip(groups, [None, *groups], strict=False))


class Answers:
    """A `Submit` that gives out answers and remembers what it was asked."""

    slots = 1

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Case, Look]] = []

    def submit(self, *call: Any, timeout: float | None = None) -> Future[Any]:
        case, how = call[-2:]
        self.asked.append((case, how))
        future: Future[Any] = Future()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future


def candidate(path: Path) -> Candidate:
    cell = Cell(weights_of(path).model, DraftModel(Model("d", "BF16", "sha256:d"), 3))
    return Candidate(Case(cell, Prompt("p", ids=(1, 2))))


HOW = Look("batch-width", "at-fork")


@pytest.mark.parametrize(
    ("answer", "label", "reason"),
    [
        (Failure("verify 3", "aborted (SIGABRT)"), "failed", "verify 3: aborted (SIGABRT)"),
        (Failure("prompt", "no answer within 5 s"), "failed", "no answer within 5 s"),
        (BadInput("token 7 is not in the vocabulary"), "unresolved", "not in the vocabulary"),
    ],
)
def test_what_goes_wrong_is_a_result(
    tiny_models: Make, answer: object, label: str, reason: str
) -> None:
    seen = Trials(Answers(answer), HOW)(candidate(tiny_models()))
    assert seen.label == label
    assert reason in seen.reason


def test_a_float32_copy_is_made_when_a_trial_asks_for_it(tiny_models: Make) -> None:
    workers = Answers(Seen("unexplained", NEEDS_REFERENCE), Seen("baseline"), Seen("baseline"))
    trials = Trials(workers, Look("baseline", weighed=True))
    assert trials(candidate(tiny_models())) == Seen("baseline")
    (_, first), (_, second) = workers.asked
    assert first.reference is None
    assert files.inspect(second.reference or "").file_type == "F32"
    trials(candidate(tiny_models()))
    assert workers.asked[2][1] == second  # once for each target


def test_the_smallest_case_is_examined_where_its_trials_ran(tiny_models: Make) -> None:
    case = candidate(tiny_models()).case
    workers = Answers(
        finding(kind=NEEDS_REFERENCE), found := finding(), Failure("verify 3", "aborted (SIGABRT)")
    )
    trials = Trials(workers, Look("baseline", weighed=True))
    assert trials.examine(case) == found
    assert [asked for asked, _ in workers.asked] == [case, case]
    assert files.inspect(workers.asked[1][1].reference or "").file_type == "F32"
    with pytest.raises(EngineFault, match=r"verify 3: aborted \(SIGABRT\)"):
        trials.examine(case)


def test_only_the_mixed_file_in_use_is_left_on_disk(tiny_models: Make, tmp_path: Path) -> None:
    unsafe = weights_of(tiny_models("llama", "Q4_K_M"))
    ladder = FromBase(tiny_models())
    safe = ladder.above(unsafe)[0]
    made(safe)
    one, two, three = (
        ladder.mixed(unsafe, safe, (f"blk.{name}.weight",))
        for name in ("0.attn_q", "1.attn_q", "1.ffn_up")
    )
    trials = Trials(Answers(*[Seen("none")] * 3), HOW)
    start = candidate(tiny_models("llama", "Q4_K_M"))
    trials(start.but(target=one))
    trials.in_use = lambda: one.recipe
    trials(start.but(target=two))
    trials(start.but(target=three))
    assert [Path(w.model.path).exists() for w in (one, two, three)] == [True, False, True]
    trials.tidy()
    assert [Path(w.model.path).exists() for w in (one, two, three)] == [True, False, False]
    assert Path(safe.model.path).exists()


@pytest.mark.parametrize(
    ("label", "kind", "code"),
    [("state", "", 1), ("state", "silent", 3), ("batch-width", "", 3), ("none", "", 3)],
)
def test_a_smallest_case_that_does_not_hold_is_an_inconclusive_end(
    label: str, kind: str, code: int
) -> None:
    case = Case(Cell(Model("m", "BF16", "sha256:m")), Prompt("p", ids=(1,)))
    gone = Failure("load", "made up")
    finding = Finding(
        case=case,
        verdict=Verdict("fork"),
        label=label,
        kind=kind,
        summary="",
        vanilla=gone,
        speculative=gone,
    )
    narrowed = Narrowed(original=case, minimal=finding)
    narrowing = Narrowing(narrowed, Reason.COMPLETE, Wanted("state"))
    assert narrowing.exit_code == code
    assert narrowing.holds == (code == 1)
