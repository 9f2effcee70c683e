"""Planted rules on real arms: a defect that a tiny model's verify loop has only under a condition.

The rule decides case by case whether the defect is planted; everything else, from the race of the two arms to files
of mixed types, is what a search does on a real machine. The defect is a wrong row, because no CPU has that by itself.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt
from specbisect.fault import Fault
from specbisect.llama import files, header, quantize
from specbisect.narrow.candidate import Candidate
from specbisect.narrow.gate import Gate, Seen, Wanted
from specbisect.narrow.search import Search
from specbisect.narrow.smallest import Ending, smallest
from specbisect.narrow.trial import Look, look
from specbisect.narrow.weights import FromBase

NEEDLE = 77
WRONG_ROW = Fault("row-off-by-one", cycle=0)
WANTED = Wanted("verification", "not-argmax")
CROWD = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 4, "n_parallel": 2, "kv_unified": True}
Rule = Callable[[Case], bool]


def model(path: Path) -> Model:
    facts = files.inspect(path)
    return Model(path.stem, facts.file_type, f"sha256:{facts.sha256}", str(path))


def types(case: Case) -> dict[str, str]:
    return {t.name: t.type for t in header.read(Path(case.cell.target.path)).tensors}


def narrow(case: Case, rule: Rule, ladder: FromBase | None = None) -> tuple[Search, Ending]:
    how = Look(WANTED.label, WANTED.kind)

    def trial(candidate: Candidate) -> Seen:
        recipe = candidate.weights.recipe
        if recipe is not None:
            quantize.make(recipe, n_threads=1)
        case = candidate.case
        return look(replace(case, fault=WRONG_ROW if rule(case) else None), how)

    search = Search(Gate(Candidate(case), WANTED, trial), ladder=ladder)
    return search, smallest(search)


@pytest.fixture
def case(tiny_models: Callable[..., Path]) -> Callable[..., Case]:
    def make(seed: int = 0, quant: str = "BF16", **axes: Any) -> Case:
        dice = Random(seed)
        ids = [dice.randrange(100, 260) for _ in range(20)]
        ids[dice.randrange(20)] = NEEDLE
        target, draft = model(tiny_models("llama", quant)), model(tiny_models("llama", noise=0.1))
        settings = {"n_predict": 30, "n_threads": 1} | CROWD | axes
        cell = Cell(target, DraftModel(draft, n_max=7), **settings)
        return Case(cell, Prompt("p", ids=tuple(ids)))

    return make


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("rule", "axes", "minimum"),
    [
        (
            lambda c: c.cell.type_k == "q8_0" and c.cell.width >= 5,
            {"type_k": "q8_0"},
            ({"type_k": "q8_0"}, 5, None),
        ),
        (lambda c: NEEDLE in (c.prompt.ids or ()), {}, ({}, 2, (NEEDLE,))),
        (
            lambda c: c.cell.n_ubatch < c.cell.width and c.cell.n_parallel == 2,
            {},
            ({"n_ubatch": 1, "n_parallel": 2}, 2, None),
        ),
    ],
    ids=["cache type and width", "token", "two sequences"],
)
def test_the_minimum_is_the_planted_rule(
    case: Callable[..., Case], seed: int, rule: Rule, axes: dict, minimum: tuple
) -> None:
    changed, width, prompt = minimum
    search, ending = narrow(case(seed, **axes), rule)
    best = search.best

    assert ending.proved
    assert {name: getattr(best.cell, name) for name in best.changed()} == changed
    assert best.cell.width == width
    assert len(best.prompt) == 1
    assert prompt in (None, best.prompt)
    assert best.layer == "batch"
    assert best.cell.n_predict == best.drafts[0][0] + width
    assert {w.width for w in ending.widths if w.shows == "verification"} == {
        w for w in range(2, 17) if rule(replace(best.case, cell=with_width(best, w)))
    }


def with_width(best: Candidate, width: int) -> Cell:
    ((start, _),) = best.drafts
    drafter = replace(best.cell.drafter, drafts=((start, (0,) * (width - 1)),))
    return replace(best.cell, drafter=drafter)


def test_the_one_tensor_is_found(
    case: Callable[..., Case],
    tiny_models: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path))
    guilty = "blk.1.ffn_up.weight"
    original = case(quant="Q4_K_M")
    assert types(original)[guilty] == "Q4_K"

    search, ending = narrow(
        original, lambda c: types(c)[guilty] == "Q4_K", FromBase(tiny_models("llama"))
    )
    assert ending.proved
    assert search.best.weights.kept == (guilty,)
    kinds = types(search.best.case)
    assert [name for name, kind in kinds.items() if kind == "Q4_K"] == [guilty]
    assert search.tensors is not None
    assert search.tensors.causal
    assert (search.tensors.names, search.tensors.unsafe) == ((guilty,), "Q4_K")
    target = next(n for n in ending.neighbours if n.axis == "target")
    assert target.shows == "none"
