"""Load: requests that wait for nobody, times from when they were due, and what is made of them."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from specbisect.cell import Cell, DraftModel, Model, PromptLookup
from specbisect.engines.server.client import Refused
from specbisect.errors import BadInput
from specbisect.gate.load import Answered, load, play, served

CELL = Cell(Model("m", "Q8_0", "sha256:t"), DraftModel(Model("m", "Q2_K", "sha256:d")))
PATIENCE_S = 60


def test_no_request_waits_for_another() -> None:
    second_is_here = threading.Event()

    def send(prompt: tuple[int, ...]) -> Iterator[int]:
        if prompt == (0,):
            assert second_is_here.wait(PATIENCE_S)
        else:
            second_is_here.set()
        yield 1

    answers = play(send, [(0,), (1,)], interval=0.001)
    assert [answer.tokens for answer in answers] == [1, 1]


def test_requests_are_sent_when_they_are_due_and_answers_keep_their_order() -> None:
    def send(prompt: tuple[int, ...]) -> Iterator[int]:
        yield from prompt

    answers = play(send, [(3, 0, 2), (), (1,)], interval=0.01)
    assert [answer.tokens for answer in answers] == [5, 0, 1]
    assert [answer.refused for answer in answers] == ["", "it answered without a token", ""]
    first, _, last = answers
    assert first.first_s is not None
    assert first.done_s is not None
    assert 0 <= first.first_s <= first.done_s
    assert last.first_s == last.done_s


def test_a_refusal_is_an_answer() -> None:
    def send(prompt: tuple[int, ...]) -> Iterator[int]:
        yield 1
        raise Refused("request", "/completion answered HTTP 503: no slot is free")

    (answer,) = play(send, [(1,)], interval=1.0)
    assert answer == Answered(None, None, (), 1, "/completion answered HTTP 503: no slot is free")


def test_worked_example() -> None:
    # One request a second; the third is refused, the last is done 2 s after it was due, at 5 s.
    answers = [
        Answered(0.1, 1.0, (0.3, 0.3), 10),
        Answered(0.2, 1.2, (0.5,), 10),
        Answered(None, None, (), 0, "busy"),
        Answered(0.4, 2.0, (), 20),
    ]
    found = load(replace(CELL, n_parallel=2), answers, interval=1.0, limit=1.5)
    assert (found.slots, found.requests, found.refusals) == (2, 4, ("busy",))
    assert found.first_s == pytest.approx((0.2, 0.38, 0.396))
    assert found.gap_s == pytest.approx((0.3, 0.48, 0.496))
    assert found.done_s == pytest.approx((1.2, 1.92, 1.984))
    assert found.tokens_per_s == 40 / 5
    assert found.goodput == 2 / 5
    assert load(CELL, answers, 1.0).goodput is None


def test_nothing_answered() -> None:
    found = load(CELL, [Answered(None, None, (), 0, "busy")] * 3, interval=1.0, limit=1.0)
    assert (found.first_s, found.gap_s, found.done_s) == ((), (), ())
    assert (found.tokens_per_s, found.goodput) == (0.0, 0.0)


def test_every_slot_has_the_context_of_the_cell() -> None:
    found = served(CELL, 4)
    assert (found.engine, found.n_parallel, found.n_ctx) == ("server", 4, 4 * CELL.n_ctx)
    assert served(replace(CELL, kv_unified=True), 4).n_ctx == CELL.n_ctx


def test_what_no_server_can_run() -> None:
    with pytest.raises(BadInput, match="--parallel needs llama-server: drafter prompt-lookup"):
        served(replace(CELL, drafter=PromptLookup()), 2)
