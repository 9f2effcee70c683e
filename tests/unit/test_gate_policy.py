"""Policies: what a file may say, which rule counts, and the bounds behind the rates."""

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from specbisect.cell import Cell, DraftModel, Model, NgramSimple
from specbisect.errors import BadInput
from specbisect.gate import policy
from specbisect.gate.policy import load, lower_bound, prompts_needed, upper_bound
from specbisect.store import Row

UNTIMED = settings(deadline=None)  # a busy machine is no defect

DRAFT = DraftModel(Model("m", "Q2_K", "sha256:d"))


def row(
    quant: str = "Q8_0",
    group: str = "chat",
    drafter: DraftModel | NgramSimple = DRAFT,
) -> Row:
    cell = Cell(Model("m", quant, f"sha256:{quant}"), drafter)
    shown: dict[str, Any] = dict.fromkeys(Row._fields)
    return Row(**shown | {"quant": quant, "prompt_group": group, "cell": cell})


def read(tmp_path: Path, text: str) -> policy.Policy:
    path = tmp_path / "gate.toml"
    path.write_text(f'schema = "specbisect.gate/1"\n{text}')
    return load(path)


def test_nothing_is_allowed_where_nothing_is_said(tmp_path: Path) -> None:
    made = read(tmp_path, "")
    assert made.audit
    assert made.allowed("batch-width", row()) is None
    assert made.floor(row()) is None


def test_the_last_rule_that_fits_counts(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        """
        [[allow]]
        label = "batch-width"
        rate = 0.5
        [[allow]]
        label = "batch-width"
        quant = "q4_k_m"
        group = ["code", "chat"]
        drafter = "draft-model"
        rate = 0.1
        [[allow]]
        label = "unexplained"
        rate = 1
        """,
    )
    rates = [
        made.allowed("batch-width", r).rate  # type: ignore[union-attr]
        for r in (
            row("Q4_K_M"),
            row("Q4_K_M", "code"),
            row("Q4_K_M", "prose"),
            row("Q8_0"),
            row("Q4_K_M", drafter=NgramSimple()),
        )
    ]
    assert rates == [0.1, 0.1, 0.5, 0.5, 0.5]
    assert made.allowed("kernel-defect", row()) is None


BAD = {
    'allow = [{label = "state", rate = 0.5}]': (
        "allow[0].label = 'state' cannot be allowed; choose one of batch-width, kernel-defect, baseline, "
        "prompt-cache, batch-composition, server-only, binding-only, unexplained"
    ),
    "[[allow]]\nrate = 0.5": "allow[0].label is missing; add label",
    '[[allow]]\nlabel = "batch-width"\nnot_befor = 5': (
        "unknown key allow[0].not_befor; did you mean not_before?"
    ),
    "[[acceptance]]\ntolerence = 0.5": "unknown key acceptance[0].tolerence; did you mean tolerance?",
    "audits = true": "unknown key audits; did you mean audit?",
    '[[allow]]\nlabel = "batch-width"\nrate = 5': (
        "allow[0].rate = 5: Input should be less than or equal to 1; mend the value"
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_policy_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, text)
    assert str(caught.value) == f"{tmp_path / 'gate.toml'}: {BAD[text]}"


def test_other_files_are_no_policies(tmp_path: Path) -> None:
    path = tmp_path / "matrix.toml"
    path.write_text('schema = "specbisect.matrix/1"')
    with pytest.raises(BadInput, match="is another kind of file; a policy has specbisect.gate/1"):
        load(path)
    path.write_text("audit = false")
    with pytest.raises(BadInput, match=r'schema is missing; add schema = "specbisect.gate/1"'):
        load(path)


def test_shipped_policy_follows_the_published_schema() -> None:
    shipped = policy.shipped()
    assert set(shipped) == {"gate"}
    for path in shipped.values():
        jsonschema.validate(tomllib.loads(path.read_text()), policy.json_schema())
        load(path)


def test_bounds_worked_examples() -> None:
    # Nothing in 59 trials rules out 5 % at 95 %; that is the rule of three, 3 / n, exactly.
    assert upper_bound(0, 59, 0.95) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert upper_bound(0, 58, 0.95) > 0.05 > upper_bound(0, 59, 0.95)
    assert prompts_needed(0, 0.05, 0.95) == 59
    assert lower_bound(0, 59, 0.95) == 0.0
    assert upper_bound(7, 7, 0.95) == 1.0
    assert lower_bound(7, 7, 0.95) == pytest.approx(0.05 ** (1 / 7))


@UNTIMED
@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_bounds_are_clopper_and_pearsons(trials: tuple[int, int]) -> None:
    events, n = trials
    if events < n:
        assert upper_bound(events, n, 0.9) == pytest.approx(beta.ppf(0.9, events + 1, n - events))
    if events:
        assert lower_bound(events, n, 0.9) == pytest.approx(beta.ppf(0.1, events, n - events + 1))
    assert lower_bound(events, n, 0.9) <= events / n <= upper_bound(events, n, 0.9)


@UNTIMED
@given(st.integers(0, 10), st.sampled_from([0.02, 0.1, 0.3]))
def test_as_many_prompts_as_needed_and_no_more(events: int, rate: float) -> None:
    n = prompts_needed(events, rate, 0.95)
    assert upper_bound(events, n, 0.95) <= rate
    assert n == max(1, events) or upper_bound(events, n - 1, 0.95) > rate
