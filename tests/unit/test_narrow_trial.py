"""Cheap trials say what a full examination says, and states that are handed over are the states they should be."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt, Scripted
from specbisect.diagnose.lab import Lab
from specbisect.engines import run_arm
from specbisect.engines.libllama import LibLlama
from specbisect.fault import Fault
from specbisect.llama.context import Context, Settings, rows_of
from specbisect.llama.logits import digest
from specbisect.narrow.candidate import own_tokens, padded, widths_only
from specbisect.narrow.gate import Seen
from specbisect.narrow.tape import Tape, TapeLab, Tapes
from specbisect.narrow.trial import Look, line_ends, look

IDS = (1, 40, 77, 120, 9, 201, 33, 64, 150, 8)
KINDS = ("llama", "moe", "swa", "recurrent", "hybrid")
FAULTS = [
    Fault("stale-kv", cycle=2),
    Fault("swapped-positions", cycle=1),
    Fault("rollback-too-few", cycle=2),
    Fault("rollback-skipped", cycle=1),
    Fault("foreign-token", cycle=3),
    Fault("row-off-by-one", cycle=2),
    Fault("accept-too-many", cycle=2),
    Fault("kernel-large", width=3, wider=True),
]
Make = Callable[..., Path]


def case_of(
    tiny_models: Make, kind: str = "llama", quant: str = "Q8_0", fault: Fault | None = None, **axes
) -> Case:
    path, draft = tiny_models(kind, quant), tiny_models(kind, noise=0.1)
    drafter = DraftModel(Model("draft", "BF16", "x:draft", str(draft)), n_max=3)
    settings = {"n_predict": 40, "n_ctx": 256, "n_threads": 1} | axes
    cell = Cell(Model("tiny", quant, "x:target", str(path)), drafter, **settings)
    return Case(cell, Prompt("p", ids=IDS), fault)


def label(seen: Seen) -> tuple[str, str]:
    return seen.label, seen.kind


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_a_cheap_look_sees_what_an_examination_does(tiny_models: Make, fault: Fault) -> None:
    case = case_of(tiny_models, fault=fault)
    examined = look(case, Look("draft-alignment"))
    cheap = look(case, Look(examined.label, examined.kind))

    assert label(cheap) == label(examined)
    assert cheap.fork == examined.fork
    assert cheap.counters.decoded_tokens < examined.counters.decoded_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_no_difference_is_none(tiny_models: Make, kind: str) -> None:
    case = case_of(tiny_models, kind, n_predict=12)
    seen = look(case, Look("state", "silent"))
    assert label(seen) == label(look(case, Look("draft-alignment")))


def test_a_state_that_shows_in_no_token_is_seen_when_looked_for(tiny_models: Make) -> None:
    """A draft at the last place: what it leaves behind changes rows, and the answer ends."""
    case = case_of(tiny_models, fault=Fault("stale-kv", cycle=2))
    fork = look(case, Look("state")).fork
    assert fork is not None
    short = replace(case, cell=replace(case.cell, n_predict=fork))
    silent = look(short, Look("state", "silent"))
    assert label(look(short, Look("state"))) == ("none", "")
    assert label(silent) == label(look(short, Look("draft-alignment")))


def test_an_earlier_fork_of_another_cause_does_not_hide_a_wrong_state(tiny_models: Make) -> None:
    """Both in one case: a width that departs at once, and a state that goes wrong later."""
    case = case_of(tiny_models, fault=Fault("stale-kv", cycle=6), n_predict=80)
    alone = look(case, Look("state"))
    assert alone.label == "state"

    wide = replace(case, cell=replace(case.cell, target=departing(tiny_models, case)))
    seen = look(wide, Look("state"))
    assert seen.label == look(wide, Look("draft-alignment")).label


def departing(tiny_models: Make, case: Case) -> Model:
    """The same model in a type whose kernels depend on the width on most machines."""
    return replace(case.cell.target, quant="Q4_K_M", path=str(tiny_models("llama", "Q4_K_M")))


def test_widths_alone_are_the_vanilla_tokens_in_batches(tiny_models: Make) -> None:
    case = case_of(tiny_models, fault=Fault("kernel-small", width=3, wider=True), n_predict=60)
    ids = run_arm(case.vanilla).ids
    for width in (2, 4, 5):
        compared = replace(case, cell=replace(case.cell, drafter=widths_only(width)))
        scripted = replace(case, cell=replace(case.cell, drafter=Scripted(own_tokens(ids, width))))
        one, two = (look(c, Look("batch-width")) for c in (compared, scripted))
        assert (label(one), one.fork, one.start, one.row) == (
            label(two),
            two.fork,
            two.start,
            two.row,
        )
        assert one.departs == two.departs


def test_where_no_token_differs_it_is_told_whether_rows_do(tiny_models: Make) -> None:
    """An error far smaller than any margin, and a width at which there is none."""
    planted = case_of(tiny_models, fault=Fault("kernel-small", width=3, wider=True), n_predict=6)
    at = {w: replace(planted, cell=replace(planted.cell, drafter=widths_only(w))) for w in (2, 3)}
    clean = replace(at[3], fault=None)
    if look(clean, Look("batch-width")).departs:
        pytest.skip("this machine's kernels depend on this width by themselves")
    assert look(at[3], Look("batch-width")).departs
    assert look(at[3], Look("batch-width")).label == "none"


def test_the_place_that_is_told_is_enough_for_one_batch(tiny_models: Make) -> None:
    """What a search does next: a single batch with the row that departs first, and an answer that ends with it."""
    case = case_of(tiny_models, fault=Fault("kernel-large", width=3, wider=True), n_predict=60)
    seen = look(case, Look("batch-width"))
    drafter = padded(((seen.start + seen.row, ()),), 3)
    single = replace(case.cell, drafter=drafter, n_predict=seen.start + seen.row + 3)
    found = look(replace(case, cell=single), Look("batch-width"))
    assert (label(found), found.fork, found.row) == (("batch-width", "at-fork"), seen.fork, 0)
    assert found.needed == single.n_predict
    shorter = replace(case, cell=replace(single, n_predict=single.n_predict - 1))
    assert look(shorter, Look("batch-width")).label == "none"


def test_nothing_drafted_is_not_engaged(tiny_models: Make) -> None:
    case = case_of(tiny_models)
    silent = replace(case, cell=replace(case.cell, drafter=Scripted(((100, (1,)),))))
    assert look(silent, Look("batch-width")).label == "not-engaged"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"type_k": "q8_0"}, {"n_ubatch": 4, "n_batch": 8}])
def test_a_state_that_is_lent_gives_the_rows_of_one_that_was_decoded(
    tiny_models: Make, kind: str, settings: dict
) -> None:
    engine = LibLlama()
    case = case_of(tiny_models, kind, **settings)
    tape = Tapes(engine).get(case)
    decoded: list[int] = []
    for n in (1, 2, 9):
        ids = tape.ids(n)
        with Context(tape.model, Settings.of(case.cell)) as context:
            tape.lend(context, n)
            decoded.append(context.counters.decoded_tokens)
            row = context.evaluate(rows_of(ids[-1:], len(IDS) + n - 1))[0].copy()
        assert digest(row) == tape.choices(n + 1)[n].digest
    if kind in ("llama", "moe"):
        assert decoded == [1, 0, 0]  # one to see whether it may be lent
    tape.close()
    engine.close()


@pytest.mark.parametrize("kind", ["llama", "moe", "swa"])
def test_a_bench_that_starts_late_gives_the_rows_of_one_that_starts_early(
    tiny_models: Make, kind: str
) -> None:
    engine = LibLlama()
    case = case_of(tiny_models, kind)
    tape = Tapes(engine).get(case)
    ids, base = tape.ids(9), len(IDS) + 8
    with TapeLab(engine, case, IDS, tape=tape, start=9).bench() as bench:
        late = bench.try_out([*ids[-1:], 5, 6], base)
    with Lab(engine, case, IDS).bench() as bench:
        bench.commit_singly(ids[:-1], len(IDS))
        early = bench.try_out([*ids[-1:], 5, 6], base)
    assert np.array_equal(late, early)
    tape.close()
    engine.close()


def test_a_tape_decodes_nothing_twice(tiny_models: Make) -> None:
    engine = LibLlama()
    case = case_of(tiny_models)
    tapes = Tapes(engine)
    tape = tapes.get(case)
    assert tape.ids(20)[:5] == tape.ids(5)
    assert (
        tape.ids(20)
        == run_arm(replace(case.vanilla, cell=replace(case.cell.vanilla, n_predict=20))).ids
    )
    assert tapes.spent().decoded_tokens == len(IDS) + 19
    assert tapes.get(replace(case, cell=replace(case.cell, n_predict=30))) is tape
    assert tapes.spent().decoded_tokens == 0
    other = tapes.get(replace(case, prompt=Prompt("p", ids=IDS[:3])))
    assert isinstance(other, Tape)
    assert other is not tape
    tapes.close()
    engine.close()


def test_line_ends_are_what_ends_a_line_or_sentence(tiny_models: Make) -> None:
    byte = {char: 3 + ord(char) for char in ".!?\nab "}
    found = line_ends(str(tiny_models("llama")), tuple(byte.values()))
    assert found == {byte[char] for char in ".!?\n"}
