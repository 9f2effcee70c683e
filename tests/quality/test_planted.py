"""Every kind of planted fault gets its exact label, natural forks theirs; see `scripts/confusion.py`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import confusion
from confusion import EXPECTED, N_PROMPTS, Result, Target, Trial, attempt, natural, planted, shipped
from specbisect.fault import FAULT_KINDS, FaultKind

KINDS = ("llama", "moe", "recurrent")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    confusion.TINY = KINDS
    return list(confusion.tiny_targets(tmp_path_factory.mktemp("planted")))


@pytest.fixture(scope="module")
def trials(targets: list[Target]) -> dict[FaultKind, list[Trial]]:
    found: dict[FaultKind, list[Trial]] = {kind: [] for kind in FAULT_KINDS}
    for trial in planted(targets, shipped()[:N_PROMPTS], n_predict=24):
        assert trial.case.fault is not None
        found[trial.case.fault.kind].append(trial)
    return found


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_a_planted_fault_gets_its_label(
    kind: FaultKind, trials: dict[FaultKind, list[Trial]]
) -> None:
    done = [result for trial in trials[kind] if (result := attempt(trial)) is not None]
    effective = [result for result in done if result.effect]
    assert effective, "no fault of this kind had an effect: plant it elsewhere"
    for result in effective:
        assert result.right, result
        if EXPECTED[kind] == "state":
            assert result.first_bad == result.planted
    for result in done:
        assert result.effect or result.label == ""


def test_natural_forks_are_batch_width(targets: list[Target]) -> None:
    found = list(_forks(targets))
    assert all(result.right for result in found), found


def _forks(targets: list[Target]) -> Iterator[Result]:
    for trial in natural(targets, shipped()[:1], n_predict=48):
        if (result := attempt(trial)) is not None:
            yield result


def test_every_kind_has_an_expected_label() -> None:
    assert set(EXPECTED) == set(FAULT_KINDS)


def test_a_result_is_right_only_with_the_exact_cycle() -> None:
    result = Result(
        "t", "stale-kv", 2, "p", True, 1, "state", (), "", planted=3, first_bad=3, passes=1.0
    )
    assert result.right
    assert not replace(result, first_bad=4).right
    assert not replace(result, label="batch-width").right


def test_the_fixture_made_models(targets: list[Target]) -> None:
    assert all(Path(target.model.path).is_file() for target in targets)
