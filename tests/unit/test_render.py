"""What tables and single cases look like, from made-up traces."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specbisect.cell import Case, Cell, DraftModel, Model, NgramSimple, Prompt
from specbisect.cli import render
from specbisect.cli.naming import Naming
from specbisect.cli.pair import Pair
from specbisect.compare import compare
from specbisect.store import Row, Store
from specbisect.trace import ArmResult, Cycle, Failure, Trace

DRAFT = Model("draft", "Q2_K", "sha256:d")
Q8 = Cell(Model("smol", "Q8_0", "sha256:8"), DraftModel(DRAFT, 3))
Q4 = replace(Q8, target=Model("smol", "Q4_K_M", "sha256:4"))
WORDS = tuple(["", "one", "two", "three", "four", "five", "six"][1:])
VANILLA = Trace(
    "vanilla",
    (1, 2),
    (10, 11, 12, 13, 14, 15),
    "length",
    pieces=tuple(f" {word}" for word in WORDS),
    margins=(3.0, 0.25, 2.0, 0.5, 1.0, 4.0),
    resolved={"target": {"n_ctx": 256, "flash_attn": "on"}},
)
SAME = replace(
    VANILLA,
    arm="speculative",
    cycles=(Cycle(1, (2, 10, 11, 99), 2), Cycle(4, (12, 13, 98), 1)),
    drafted=5,
    accepted=3,
)
FORKED = replace(
    SAME, ids=(10, 11, 12, 77, 78, 79), pieces=(*VANILLA.pieces[:3], " 7", "\x1b[31m", "\n\xe2")
)
NOTHING_REJECTED = replace(SAME, drafted=3, accepted=3)
NOTHING_DRAFTED = replace(SAME, cycles=(), drafted=0, accepted=0)
SHORTER = replace(SAME, ids=SAME.ids[:4], pieces=SAME.pieces[:4])
CRASHED = Failure("verify 3", "aborted (SIGABRT)", ("GGML_ASSERT(n <= m) failed",))

Rows = Callable[..., list[Row]]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Rows of a store that holds these arms, by cell."""

    def save(arms: dict[Cell, list[ArmResult]]) -> list[Row]:
        with Store.create(tmp_path / "run", "plan", {}) as store:
            for i, (cell, results) in enumerate(arms.items()):
                for j, speculative in enumerate(results):
                    case = Case(cell, Prompt(f"p{j}"))
                    verdict = compare(VANILLA, speculative)
                    store.save_arm(case.vanilla.key, VANILLA)
                    store.save_arm(case.key, speculative)
                    store.save_case(10 * i + j, case, verdict, speculative)
            return list(store.rows())

    return save


def words(rows: list[Row]) -> list[str]:
    (cell,) = render.by_cell(rows)
    return cell.words()


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([SAME, SAME], ["0/2 in 12 tokens"]),
        ([SAME, FORKED, FORKED], ["2/3, first at 3"]),
        ([SHORTER, FORKED], ["2/2, first at 3"]),
        ([replace(SAME, nonfinite=(2,))], ["1/1"]),
        ([SAME, NOTHING_DRAFTED], ["0/1 in 6 tokens", "1 unexercised"]),
        ([NOTHING_DRAFTED] * 2, ["unexercised"]),
        ([CRASHED], ["failed"]),
        ([FORKED, CRASHED, CRASHED], ["1/1, first at 3", "2 failed"]),
        ([replace(SAME, prompt_ids=(1,))], ["invalid"]),
        ([NOTHING_REJECTED], ["0/1 in 6 tokens*"]),
        ([NOTHING_REJECTED, SAME], ["0/2 in 12 tokens"]),
    ],
)
def test_cases_of_a_cell_in_a_few_words(
    rows: Rows, results: list[ArmResult], expected: list[str]
) -> None:
    assert words(rows({Q8: results})) == expected


def test_table_is_a_grid_where_it_fits_and_a_list_where_not(rows: Rows) -> None:
    ngram = NgramSimple(3, 8)
    found = rows(
        {
            Q8: [SAME],
            replace(Q8, drafter=ngram): [NOTHING_DRAFTED],
            Q4: [FORKED],
            replace(Q4, drafter=ngram): [CRASHED],
            replace(Q4, n_ubatch=4): [SAME, NOTHING_DRAFTED],
        }
    )
    assert render.table(render.by_cell(found), 80) == "\n".join(
        [
            "quant   n_ubatch  draft-model      ngram-simple",
            "                  n_max 3          n_max 8",
            "------  --------  ---------------  ------------",
            "Q8_0    512       0/1 in 6 tokens  unexercised",
            "Q4_K_M  512       1/1, first at 3  failed",
            "Q4_K_M  4         0/1 in 6 tokens",
            "                  1 unexercised",
        ]
    )
    assert render.table(render.by_cell(found), 40).splitlines()[2:] == [
        "Q8_0    512       draft-model n_max 3   0/1 in 6 tokens",
        "Q8_0    512       ngram-simple n_max 8  unexercised",
        "Q4_K_M  512       draft-model n_max 3   1/1, first at 3",
        "Q4_K_M  512       ngram-simple n_max 8  failed",
        "Q4_K_M  4         draft-model n_max 3   0/1 in 6 tokens, 1 unexercised",
    ]


def test_legend_claims_no_more_than_was_measured(rows: Rows) -> None:
    found = rows({Q8: [SAME, NOTHING_DRAFTED], Q4: [FORKED], replace(Q4, n_batch=64): [CRASHED]})
    text = " ".join(render.legend(render.by_cell(found)))
    assert text.startswith(
        "4 cases: 1 fork, 1 agree, 1 unexercised, 1 failed. 1/1, first at 3: 1 of 1"
    )
    assert "No difference in 6 tokens over 1 prompt where cases agree" in text
    assert "no pass" in text
    assert "lossless" not in text
    assert "rollback" not in text


def test_legend_says_where_rollback_was_not_tested(rows: Rows) -> None:
    untested = " ".join(render.legend(render.by_cell(rows({Q8: [NOTHING_REJECTED]}))))
    assert "* no drafted token was rejected: rollback was not tested." in untested


def test_one_line_for_each_case(rows: Rows) -> None:
    found = rows({Q8: [SAME, FORKED], Q4: [SHORTER, CRASHED]})
    lines = render.cases(found, 100).splitlines()[2:]
    assert [line.split()[0] for line in lines] == [row.id[:8] for row in found]
    assert [line.partition("/")[2].split(maxsplit=1)[1] for line in lines] == [
        "agree, 6 tokens",
        "fork at 3, margin 0.5",
        "length: the speculative arm ends after 4 t…",
        "failed: speculative arm, verify 3: aborted…",
    ]
    assert max(map(len, lines)) <= 100


def test_ids_are_as_long_as_it_takes_to_tell_them_apart() -> None:
    assert render.id_length([]) == 8
    assert render.id_length(["0123456789abcdef", "0123456799abcdef"]) == 9
    assert render.id_length(["0123456789abcdef", "0123456789abcdee"]) == 16


def test_names_tell_apart_what_differs_and_nothing_else() -> None:
    other = replace(Q8, target=Model("large", "Q8_0", "sha256:9"), flash_attn="on")
    strict = replace(Q8, drafter=DraftModel(DRAFT, 3, p_min=0.5))
    naming = Naming([Q8, other, strict])
    assert naming.headers == ("target", "flash_attn")
    assert naming.settings(other) == ("large", "on")
    assert naming.drafter(Q8) == ("draft-model", "n_max 3", "p_min 0.0")
    assert naming.drafter(strict) == ("draft-model", "n_max 3", "p_min 0.5")
    assert Naming([Q8, other, Q4]).settings(Q4) == ("smol Q4_K_M", "auto")


def shown(speculative: ArmResult, width: int = 60) -> str:
    case = Case(Q8, Prompt("p"))
    return "\n".join(Pair(case, VANILLA, speculative).render(width))


def test_a_fork_is_shown_with_both_texts_side_by_side() -> None:
    text = shown(FORKED)
    assert "fork at generated token 3: vanilla 13 ' four', speculative 77 ' 7'\n" in text
    assert "vanilla margin there 0.5; the 33rd percentile of this arm's margins" in text
    assert " one two three▶ four five       one two three▶ 7\\x1b[31m" in text
    assert "\n▶  3   13       ' four'   0.5     77           ' 7'\n" in text
    assert "drafted 5, accepted 3 (60 %) in 2 cycles" in text
    assert "place in the draft: 2/2 1/2 0/1" in text
    assert "target context: n_ctx 256, flash_attn on" in text
    assert "\x1b" not in text


def test_an_arm_that_ends_early_is_shown_as_ended() -> None:
    text = shown(SHORTER)
    assert "length: the speculative arm ends after 4 tokens, the other goes on" in text
    assert "▶  4   14       ' five'   1       (end)" in text


def test_a_crash_is_shown_with_the_last_words() -> None:
    text = shown(CRASHED)
    assert "speculative arm, verify 3: aborted (SIGABRT)\n  GGML_ASSERT(n <= m) failed" in text
