"""Planted rules, found exactly: nothing more than the rule and nothing less, whatever the case around it.

The trial here only looks at the case, so that many searches take a moment. It has the shape of the real one: verify
batches at their places, cut short at the end of the answer, and a fork at the first of them for which the rule holds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, Prompt, Scripted
from specbisect.narrow.candidate import Candidate, Drafts, Weights, own_tokens
from specbisect.narrow.ddmin import Reason
from specbisect.narrow.gate import Budget, Gate, Memory, Seen, Wanted
from specbisect.narrow.search import Search
from specbisect.narrow.smallest import Ending, NotReproduced, smallest
from specbisect.narrow.weights import RUNGS, precision

SEEDS = range(5)
NEEDLE, SECOND = 17, 23
POISON = 9
TENSORS = tuple(
    f"blk.{layer}.{name}.weight"
    for name in ("attn_k", "attn_q", "ffn_down", "ffn_up")
    for layer in range(4)
)


@dataclass(frozen=True)
class Batch:
    """A verify batch: the case, tokens generated before it, and what it drafts."""

    case: Case
    start: int
    ids: tuple[int, ...]

    @property
    def cell(self) -> Cell:
        return self.case.cell

    @property
    def width(self) -> int:
        return len(self.ids) + 1

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.case.prompt.ids or ()

    @property
    def unsafe(self) -> frozenset[str]:
        """Tensors that are Q4_K in the target."""
        kind, _, names = self.cell.target.identity.partition(":")
        if kind == "mixed":
            return frozenset(names.split(","))
        return frozenset(TENSORS if precision(names) >= precision("Q4_K_M") else ())


Rule = Callable[[Batch], bool]


@dataclass
class Planted:
    """A trial: the label `label` where `rule` holds of a batch, `otherwise` where it does not.

    A rule that `speculates` never holds where widths are only compared.
    """

    rule: Rule
    label: str = "batch-width"
    kind: str = "at-fork"
    otherwise: str = "none"
    recorded: Drafts = ()
    speculates: bool = False
    crashes: Rule = lambda batch: False
    asked: list[str] = field(default_factory=list)

    def __call__(self, candidate: Candidate) -> Seen:
        self.asked.append(candidate.key)
        case = candidate.case
        for batch in self.batches(candidate):
            if self.crashes(batch):
                return Seen("failed", reason="aborted")
            compared = candidate.layer == "widths" and self.speculates
            if self.rule(batch) and not compared:
                return self.seen(batch, self.label, self.kind)
            if self.otherwise != "none":
                return self.seen(batch, self.otherwise, "at-fork")
        return Seen("none" if case.cell.width > 1 else "not-engaged")

    def batches(self, candidate: Candidate) -> Iterator[Batch]:
        case, cell, script = candidate.case, candidate.cell, candidate.drafts
        if candidate.layer in ("drafter", "binding", "server") and self.recorded:
            script = self.recorded
        elif candidate.layer not in ("drafts", "batch"):
            script = own_tokens((7,) * cell.n_predict, cell.width)
        for start, ids in script:
            if cut := ids[: max(0, cell.n_predict - start - 1)]:
                yield Batch(case, start, cut)

    def seen(self, batch: Batch, label: str, kind: str) -> Seen:
        return Seen(
            label,
            kind,
            fork=batch.start,
            start=batch.start,
            needed=batch.start + batch.width,
            drafts=(*self.before(batch), (batch.start, batch.ids)),
            history=tuple(range(100, 99 + batch.start)),
        )

    def before(self, batch: Batch) -> Drafts:
        drafter = batch.cell.drafter
        script = drafter.drafts if isinstance(drafter, Scripted) else self.recorded
        return tuple(entry for entry in script if entry[0] < batch.start)


class Files:
    """A ladder of files that are only names."""

    def above(self, weights: Weights) -> list[Weights]:
        finer = [name for name in RUNGS if precision(name) < precision(weights.type)]
        return [Weights(Model("m", n, f"whole:{n}"), n) for n in reversed(finer)]

    def tensors(self, unsafe: Weights, safe: Weights) -> tuple[str, ...]:
        return TENSORS

    def types(self, unsafe: Weights, names: Sequence[str]) -> frozenset[str]:
        return frozenset([unsafe.type] if names else [])

    def mixed(self, unsafe: Weights, safe: Weights, kept: Sequence[str]) -> Weights:
        if len(kept) == len(TENSORS):
            return unsafe
        if not kept:
            return safe
        model = Model("m", f"{safe.type}+{len(kept)}", f"mixed:{','.join(kept)}")
        return Weights(model, unsafe.type, kept=tuple(kept))


def original(seed: int, *, tokens: Sequence[int] = (), **axes: Any) -> Case:
    """A case far from simple: a dozen axes off their defaults, a long prompt with `tokens` somewhere in it."""
    dice = Random(seed)
    crowd = {
        "n_batch": dice.choice([64, 128, 4096]),
        "n_ubatch": dice.choice([32, 64]),
        "n_parallel": dice.choice([3, 4]),
        "kv_unified": True,
        "n_ctx": dice.choice([4096, 8192]),
        "n_threads": dice.choice([1, 2, 7]),
        "n_threads_batch": dice.choice([1, 2]),
        "flash_attn": "on",
        "type_k": dice.choice(["f32", "q5_1", "q4_0"]),
        "type_v": dice.choice(["f32", "bf16"]),
        "use_extra_bufts": False,
        "op_offload": False,
        "n_predict": dice.randrange(60, 90),
    } | axes
    prompt = [dice.randrange(100, 1000) for _ in range(50)]
    for place, token in zip(sorted(dice.sample(range(50), len(tokens))), tokens, strict=True):
        prompt[place] = token
    target = Model("m", "Q4_K_M", "whole:Q4_K_M")
    drafter = DraftModel(Model("d", "Q2_K", "whole:Q2_K"), n_max=dice.randrange(8, 12))
    return Case(Cell(target, drafter, **crowd), Prompt("p", ids=tuple(prompt)))


def narrow(case: Case, planted: Planted, **how: Any) -> tuple[Search, Ending]:
    wanted = Wanted(planted.label, planted.kind)
    gate = Gate(Candidate(case), wanted, planted, **how)
    ends = frozenset(token for token in case.prompt.ids or () if token % 10 == 0)
    search = Search(gate, planted.recorded, ends, Files())
    return search, smallest(search)


def minimum(search: Search) -> dict[str, Any]:
    """Everything about the smallest case that is not as simple as can be."""
    best = search.best
    found: dict[str, Any] = {name: getattr(best.cell, name) for name in best.changed()}
    if best.layer != "batch":
        found["layer"] = best.layer
    if best.cell.engine != "libllama":
        found["engine"] = best.cell.engine
    if best.weights.type != "BF16":
        found["type"] = best.weights.type
    if best.weights.kept is not None:
        found["tensors"] = best.weights.kept
    if best.cell.width != 2:
        found["width"] = best.cell.width
    if len(best.prompt) > 1 or NEEDLE in best.prompt or SECOND in best.prompt:
        found["prompt"] = best.prompt
    if best.drafts != ((1, (0,) * (best.cell.width - 1)),):
        found["drafts"] = best.drafts
    if best.cell.n_predict != 1 + best.cell.width:
        found["n_predict"] = best.cell.n_predict
    return found


@dataclass(frozen=True)
class Known:
    """A rule, what its case must have at least, and the exact minimum."""

    rule: Rule
    minimum: dict[str, Any]
    axes: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()


RULES = {
    "type_k is q8_0 and width at least 5": Known(
        lambda b: b.cell.type_k == "q8_0" and b.width >= 5,
        {"type_k": "q8_0", "width": 5},
        axes={"type_k": "q8_0"},
    ),
    "a token is in the prompt": Known(
        lambda b: NEEDLE in b.prompt, {"prompt": (NEEDLE,)}, tokens=(NEEDLE,)
    ),
    "one tensor is Q4_K": Known(
        lambda b: "blk.1.ffn_down.weight" in b.unsafe,
        {"type": "Q4_K_M", "tensors": ("blk.1.ffn_down.weight",)},
    ),
    "n_ubatch below the width and two sequences": Known(
        lambda b: b.cell.n_ubatch < b.width and b.cell.n_parallel == 2,
        {"n_ubatch": 1, "n_parallel": 2},
        axes={"n_ubatch": 4, "n_parallel": 2},
        together=(("n_ubatch", "n_parallel"),),
    ),
    "always": Known(lambda b: True, {}),
    "flash attention is off": Known(
        lambda b: b.cell.flash_attn == "off", {"flash_attn": "off"}, axes={"flash_attn": "off"}
    ),
    "a quantised cache needs flash attention": Known(
        lambda b: b.cell.type_v == "q4_0" and b.cell.flash_attn == "on",
        {"type_v": "q4_0", "flash_attn": "on"},
        axes={"type_v": "q4_0"},
        together=(("flash_attn", "type_v"),),
    ),
    "two tokens in their order": Known(
        lambda b: tuple(t for t in b.prompt if t in (NEEDLE, SECOND)) == (NEEDLE, SECOND),
        {"prompt": (NEEDLE, SECOND)},
        tokens=(NEEDLE, SECOND),
    ),
    "more than 40 tokens generated": Known(
        lambda b: b.start > 40,
        {"drafts": ((41, (0,)),), "n_predict": 43},
    ),
    "at least 5 threads": Known(
        lambda b: b.cell.n_threads >= 5, {"n_threads": 5}, axes={"n_threads": 30}
    ),
    "two tensors are Q4_K": Known(
        lambda b: {"blk.0.attn_q.weight", "blk.3.ffn_up.weight"} <= b.unsafe,
        {"type": "Q4_K_M", "tensors": ("blk.0.attn_q.weight", "blk.3.ffn_up.weight")},
    ),
    "Q6_K and Q4_K_M, but not between them": Known(
        lambda b: b.cell.target.quant in ("Q6_K", "Q4_K_M"),
        {"type": "Q6_K"},
    ),
    "widths 4 and 7 and from 9 on": Known(
        lambda b: b.width in (4, 7) or b.width >= 9, {"width": 4}
    ),
    "no repacking on a single thread": Known(
        lambda b: not b.cell.use_extra_bufts and b.cell.n_threads == 1,
        {"use_extra_bufts": False, "n_threads": 1},
        axes={"n_threads": 1},
        together=(("n_threads", "use_extra_bufts"),),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RULES)
def test_the_minimum_is_the_planted_rule(name: str, seed: int) -> None:
    known = RULES[name]
    case = original(seed, tokens=known.tokens, **known.axes)
    planted = Planted(known.rule)
    search, ending = narrow(case, planted)

    assert minimum(search) == known.minimum
    assert ending.proved
    assert ending.reason is Reason.COMPLETE
    assert search.interactions == known.together
    assert len(planted.asked) == len(set(planted.asked)) == search.gate.trials


RECORDED: Drafts = tuple((at, (7, POISON if at in (9, 21) else 8, 6)) for at in range(1, 50, 4))


def poisoned(batch: Batch) -> bool:
    """A wrong state, as it shows in a batch that follows one with a poisonous draft."""
    drafter = batch.cell.drafter
    script = drafter.drafts if isinstance(drafter, Scripted) else RECORDED
    return any(POISON in ids for start, ids in script if start < batch.start)


def in_a_batch_with(token: int) -> Rule:
    return lambda batch: token in batch.ids


@pytest.mark.parametrize("seed", SEEDS)
def test_two_drafts_are_left_where_the_second_shows_what_the_first_did(seed: int) -> None:
    planted = Planted(poisoned, "state", "", recorded=RECORDED, speculates=True)
    search, ending = narrow(original(seed), planted)

    assert ending.proved
    assert search.best.layer == "drafts"
    (first, wrong), (second, shows) = search.best.drafts
    assert first < second
    assert (wrong[-1], wrong.count(0), len(shows)) == (POISON, len(wrong) - 1, 1)
    assert search.best.changed() == ()
    assert len(search.best.prompt) == 1
    assert search.best.cell.n_predict == second + 2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rejected_token_that_matters_stays(seed: int) -> None:
    rule = in_a_batch_with(POISON)
    planted = Planted(rule, "state", "", recorded=RECORDED, speculates=True)
    search, ending = narrow(original(seed), planted)

    assert search.best.drafts == ((1, (0, POISON)),)
    assert ending.proved


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_state_never_ends_as_batch_width(seed: int) -> None:
    """Every batch departs by its width alone; what is looked for is the state that one token leaves behind."""
    planted = Planted(
        poisoned, "state", "", otherwise="batch-width", recorded=RECORDED, speculates=True
    )
    case = original(seed)
    case = replace(case, cell=replace(case.cell, n_predict=80))

    def state_first(candidate: Candidate) -> Seen:
        """As the real trial: a fork that its width explains does not end the search for a wrong state."""
        later = [b for b in planted.batches(candidate) if poisoned(b)]
        if later and candidate.layer != "widths":
            return planted.seen(later[0], "state", "")
        return planted(candidate)

    gate = Gate(Candidate(case), Wanted("state"), state_first)
    search = Search(gate, RECORDED)
    ending = smallest(search)

    assert ending.proved
    assert (gate.shown.label, gate.shown.kind) == ("state", "")
    assert any(POISON in ids for _, ids in search.best.drafts)
    assert all(w.shows in ("state", "batch-width", "none") for w in ending.widths)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_only_the_server_shows_stays_with_the_server(seed: int) -> None:
    case = original(seed, kv_unified=False, use_extra_bufts=True)
    case = replace(case, cell=replace(case.cell, engine="server", cache_prompt=True))
    planted = Planted(
        lambda b: b.cell.engine == "server" and b.cell.cache_prompt, "server-only", ""
    )
    search, ending = narrow(case, planted)

    assert search.best.cell.engine == "server"
    assert search.best.changed() == ("cache_prompt",)
    assert ending.proved


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_server_shows_too_goes_down_to_one_batch(seed: int) -> None:
    case = original(seed)
    case = replace(case, cell=replace(case.cell, engine="server", cache_prompt=True))
    search, _ = narrow(case, Planted(lambda b: True))
    assert minimum(search) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crash_is_neither_shown_nor_gone(seed: int) -> None:
    """Below 4 rows the process aborts: smaller widths are not results, and not proofs."""
    planted = Planted(lambda b: b.width >= 4, crashes=lambda b: b.width < 4)
    search, ending = narrow(original(seed), planted)

    assert search.best.cell.width == 4
    assert [w.shows for w in ending.widths[:3]] == ["failed", "failed", "batch-width"]
    assert next(n for n in ending.neighbours if n.axis == "n_max").neighbour is None


def test_the_cause_is_the_tensors_that_take_it_away() -> None:
    """Any Q4_K tensor is enough; only all of them together are the cause."""
    search, _ = narrow(original(0), Planted(lambda b: bool(b.unsafe)))
    tensors = search.tensors
    assert tensors is not None
    assert tensors.causal
    assert tensors.names == TENSORS
    assert len(tensors.enough) == 1
    assert search.best.weights.kept == tensors.enough


@pytest.mark.parametrize("seed", SEEDS)
def test_what_shows_by_luck_in_some_texts_is_followed_through_others(seed: int) -> None:
    """Every second case shows it, as near-ties fall; which settings matter does not depend on luck."""

    def trial(candidate: Candidate) -> Seen:
        seen = planted(candidate)
        lucky = candidate.layer == "drafter" or Random(candidate.key).random() < 0.5
        return seen if seen.label == "none" or lucky else Seen("none", departs=True)

    planted = Planted(lambda b: b.cell.type_k == "q8_0" and b.width >= 3)
    gate = Gate(Candidate(original(seed, type_k="q8_0")), Wanted("batch-width", "at-fork"), trial)
    ending = smallest(Search(gate))

    assert ending.proved
    assert gate.best.changed() == ("type_k",)
    assert gate.best.cell.width == 3
    assert len(gate.best.prompt) == 1


def test_every_precision_is_tried_and_told() -> None:
    search, _ = narrow(original(0), Planted(RULES["Q6_K and Q4_K_M, but not between them"].rule))
    shown = {p.type: p.shows for p in search.precisions}
    assert {t for t, s in shown.items() if s == "batch-width"} == {"Q4_K_M", "Q6_K"}
    assert {t for t, s in shown.items() if s == "none"} == {"Q5_K_M", "Q8_0", "F16", "BF16"}


def test_nothing_starts_with_a_case_that_does_not_show_it() -> None:
    planted = Planted(lambda b: False)
    with pytest.raises(NotReproduced, match="the case now shows none"):
        narrow(original(0), planted)
    assert len(planted.asked) == 1


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("budget", [1, 3, 10, 25])
def test_out_of_budget_the_best_so_far_still_shows_it(name: str, budget: int) -> None:
    known = RULES[name]
    planted = Planted(known.rule)
    case = original(1, tokens=known.tokens, **known.axes)
    search, ending = narrow(case, planted, budget=Budget(trials=budget))

    assert len(planted.asked) == budget
    assert ending.reason is Reason.BUDGET
    assert not ending.proved or minimum(search) == known.minimum
    assert planted(search.best).label == planted.label
    assert search.best.complexity <= Candidate(case).complexity


@pytest.mark.parametrize("stop", range(0, 22, 2))
def test_interrupted_at_any_trial_it_returns_the_best_and_goes_on_where_it_was(stop: int) -> None:
    known = RULES["n_ubatch below the width and two sequences"]
    case = original(2, **known.axes)
    planted = Planted(known.rule)
    journal = Kept()

    def interrupted(candidate: Candidate) -> Seen:
        if len(planted.asked) == stop:
            raise KeyboardInterrupt
        return planted(candidate)

    gate = Gate(Candidate(case), Wanted("batch-width", "at-fork"), interrupted, journal)
    ending = smallest(Search(gate, ladder=Files()))
    assert ending.reason is Reason.INTERRUPTED
    assert not ending.proved or stop > 12
    assert known.rule(next(planted.batches(gate.best)))

    before = list(planted.asked)
    search, ending = narrow(case, planted, journal=journal)
    assert ending.proved
    assert minimum(search) == known.minimum
    assert len(planted.asked) == len(set(planted.asked))  # nothing that had ended ran again
    assert planted.asked[: len(before)] == before
    assert search.gate.trials == len(planted.asked)


class Kept(Memory):
    """A journal that outlives its search."""

    def __init__(self) -> None:
        self.results: dict[str, Seen] = {}

    def ended(self) -> dict[str, Seen]:
        return dict(self.results)

    def end(self, key: str, seen: Seen | None) -> None:
        if seen is not None:
            self.results[key] = seen
