"""Width profiles of tiny models, and what is concluded from them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specbisect.cell import Case, Cell, Model, Prompt
from specbisect.errors import BadInput
from specbisect.fault import Fault
from specbisect.llama import files
from specbisect.ops import widths
from specbisect.ops.profile import (
    PROFILE,
    AtWidth,
    Kernels,
    Profile,
    blocks,
    can_fork,
    split,
)
from specbisect.ops.tensors import Key, Node, Operand
from specbisect.ops.trace import Departure, NodeTrace

PROMPTS = [Prompt("a", ids=tuple(range(40, 60))), Prompt("b", ids=tuple(range(200, 231)))]


def cases_of(path: Path, n_predict: int = 32, **settings: int) -> list[Case]:
    model = Model(path.name, "", f"sha256:{files.sha256(path)}", str(path))
    settings = {"n_ctx": 512, "n_ubatch": 64, "n_batch": 64, "n_threads": 1} | settings
    return [Case(Cell(model, n_predict=n_predict, **settings), prompt) for prompt in PROMPTS]


@pytest.fixture(params=["llama-BF16", "moe-Q4_K_M", "swa-Q8_0", "hybrid-Q6_K"])
def cases(request: pytest.FixtureRequest, tiny_models: Callable[..., Path]) -> list[Case]:
    return cases_of(tiny_models(*request.param.split("-")))


def test_rows_and_nodes_agree(cases: list[Case]) -> None:
    profile = widths.measure(cases)
    invariant = {k.width for k in profile.kernels if k.invariant}
    assert [a.width for a in profile.widths] == list(widths.WIDTHS)
    assert {k.width for k in profile.kernels} == set(widths.WIDTHS)
    for at in profile.widths:
        assert at.rows == len(cases) * (32 // at.width) * at.width
        if at.width in invariant:
            assert (at.identical, at.largest, at.flips) == (at.rows, 0, 0)
        assert list(at.margins) == sorted(at.margins)
        assert at.logits[-1] == at.largest
        assert at.flips <= at.inside <= at.rows
        assert at.rms <= at.largest
    departs = profile.departs()
    assert (departs is None) == (invariant == set(widths.WIDTHS))
    assert can_fork(profile, [departs or 2], range(31, 60)) == (departs is not None)


def test_a_profile_costs_at_most_three_vanilla_passes(cases: list[Case]) -> None:
    profile = widths.measure(cases, range(1, 17))
    assert profile.singles == 32 * len(cases)
    assert 0 < profile.batches <= 3 * profile.singles


def test_a_profile_is_the_same_after_json(cases: list[Case]) -> None:
    profile = widths.measure(cases[:1], [2, 5])
    assert PROFILE.validate_json(PROFILE.dump_json(profile)) == profile


def test_a_screening_decodes_little_and_finds_the_same_nodes(cases: list[Case]) -> None:
    screened, measured = widths.screen(cases, [2, 4, 8]), widths.measure(cases, [2, 4, 8])
    assert screened.kernels == measured.kernels
    assert screened.widths == ()
    assert screened.counters.decode_calls < 0.6 * measured.counters.decode_calls


def test_every_number_of_cells_is_traced(tiny_models: Callable[..., Path]) -> None:
    profile = widths.screen(cases_of(tiny_models("llama"), n_predict=300), [3])
    assert [(k.cells, k.width, k.trace.position) for k in profile.kernels] == [
        (256, 3, 20),
        (512, 3, 256),
    ]


def test_widths_beyond_a_micro_batch_are_traced_in_its_pieces(
    tiny_models: Callable[..., Path],
) -> None:
    profile = widths.screen(cases_of(tiny_models("llama"), n_ubatch=4), [7, 8])
    assert [k.width for k in profile.kernels] == [3, 4]


@pytest.mark.parametrize("kind", ["kernel-small", "kernel-baseline"])
def test_a_wrong_kernel_is_in_the_profile(tiny_models: Callable[..., Path], kind: str) -> None:
    planted = Fault(kind, width=3)  # type: ignore[arg-type]
    cases = [replace(c, fault=planted) for c in cases_of(tiny_models("llama", "Q8_0"))]
    profile = widths.measure(cases, [2, 3])
    departed = {a.width for a in profile.widths if not a.identical}
    assert departed >= ({3} if kind == "kernel-small" else {2, 3})


def test_a_wrong_kernel_is_not_screened_away(tiny_models: Callable[..., Path]) -> None:
    planted = Fault("kernel-small", width=3)
    cases = [replace(c, fault=planted) for c in cases_of(tiny_models("llama", "Q8_0"))]
    assert can_fork(widths.screen(cases, [3]), [3], range(31, 60))


def test_no_width_to_compare_is_refused(tiny_models: Callable[..., Path]) -> None:
    with pytest.raises(BadInput, match="no width above 1"):
        widths.measure(cases_of(tiny_models("llama")), [1])


NODE = Node(
    Key("ffn_out-3", "MUL_MAT", 0),
    Operand("ffn_out-3", "f32", (256, 4, 1, 1), "CPU"),
    (
        Operand("blk.3.ffn_down.weight", "q4_K", (512, 256, 1, 1), "CPU_REPACK"),
        Operand("ffn_swiglu-3", "f32", (512, 4, 1, 1), "CPU"),
    ),
    "CPU",
)


def kernels(width: int, cells: int, departs: bool = False, transparent: bool = True) -> Kernels:
    first = Departure(NODE, 0, 1e-6, 4e-7) if departs else None
    return Kernels(cells, NodeTrace(width, 10, first, 0, (), 40, 50, transparent))


def profile_of(*traced: Kernels, rows: tuple[AtWidth, ...] = (), n_ubatch: int = 512) -> Profile:
    return Profile("key", "name", {"n_ubatch": n_ubatch}, {}, rows, traced, 0, 0)


def test_forks_are_ruled_out_only_by_proof() -> None:
    profile = profile_of(kernels(2, 256), kernels(3, 256), kernels(4, 256, departs=True))
    near = range(100, 200)
    assert not can_fork(profile, [1, 2, 3], near)
    assert can_fork(profile, [2, 4], near)
    assert can_fork(profile, [5], near)  # not traced
    assert can_fork(profile, [2], range(200, 257))  # nobody looked at 512 cells
    assert not can_fork(profile, [2], range(200, 256))
    assert can_fork(profile_of(kernels(2, 256, transparent=False)), [2], near)


def test_a_measured_row_outweighs_a_trace() -> None:
    row = AtWidth(2, 8, 7, (0.1,) * 4, (0.2,) * 4, 0.1, 0, 1)
    profile = profile_of(kernels(2, 256), kernels(3, 256), rows=(row,))
    assert can_fork(profile, [2], range(10, 20))
    assert not can_fork(profile, [3], range(10, 20))
    assert profile.departs() == 2


def test_wide_batches_are_judged_by_their_micro_batches() -> None:
    profile = profile_of(kernels(4, 256), kernels(2, 256, departs=True), n_ubatch=4)
    assert not can_fork(profile, [5, 8], range(10, 20))
    assert can_fork(profile, [6], range(10, 20))
    assert split([9, 5, 1], 4) == {4}
    assert split([6, 3], 4) == {2, 3, 4}


def test_blocks_of_cells() -> None:
    assert list(blocks(range(0, 256))) == [256]
    assert list(blocks(range(255, 257))) == [256, 512]
    assert list(blocks(range(512, 1024))) == [768, 1024]


def test_a_profile_in_one_line() -> None:
    few = [kernels(2, 256), kernels(3, 256), kernels(4, 256, departs=True), kernels(5, 256)]
    said = (
        "bit-identical for widths 1–3, 5; departs at 4: MUL_MAT q4_K×f32, blk.3.ffn_down, "
        "relative 4e-7"
    )
    assert str(profile_of(*few)).replace(" (repacked)", "") == said
    assert str(profile_of(kernels(2, 256), kernels(3, 256))) == "bit-identical for widths 1–3"
    both = profile_of(kernels(2, 256), kernels(2, 512, transparent=False))
    assert str(both) == (
        "in 256 cells: bit-identical for widths 1–2, in 512 cells: bit-identical for widths 1; departs at 2: a node "
        "that shows it only when nobody watches"
    )
