"""Quantising: what llama.cpp would make, once, whole or not at all, and one line when it cannot be made."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest

from specbisect.errors import BadInput, EngineFault
from specbisect.llama import files, quantize

Tiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_makes_what_the_library_makes_once(tiny_models: Tiny, cache: Path) -> None:
    states: list[str] = []

    def progress(recipe: quantize.Recipe, state: str) -> None:
        states.append(f"{recipe.type} {state}")

    made = quantize.quantize(tiny_models(), "q4_k_m", progress=progress)
    assert made.read_bytes() == tiny_models("llama", "Q4_K_M").read_bytes()
    assert made.name == f"{tiny_models().stem}.Q4_K_M.gguf"
    assert made.parent.name.startswith(f"{tiny_models().stem}-")
    assert made.parent.parent == cache / "models"
    before = made.stat()
    assert quantize.quantize(tiny_models(), "Q4_K_M", progress=progress) == made
    assert made.stat() == before
    assert states == ["Q4_K_M started", "Q4_K_M finished"]
    assert sorted(p.name for p in made.parent.iterdir()) == [made.name, "lock"]


def test_named_by_content_not_by_name(tiny_models: Tiny, tmp_path: Path) -> None:
    made = quantize.quantize(tiny_models(), "Q8_0")
    shutil.copy(tiny_models(), tmp_path / "copy.gguf")
    assert quantize.quantize(tmp_path / "copy.gguf", "Q8_0") == made
    assert quantize.recipe(tiny_models("llama", "Q8_0"), "Q4_0").path != made


def test_a_recipe_depends_on_all_it_is_made_from(
    tiny_models: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_models()
    monkeypatch.setattr(quantize.library, "build", lambda: "another build")
    other_build = quantize.recipe(base, "Q8_0")
    monkeypatch.undo()
    recipes = [
        other_build,
        quantize.recipe(base, "Q8_0"),
        quantize.recipe(base, "Q4_0"),
        quantize.recipe(base, "Q4_0", [("ffn_down", "Q8_0")]),
        quantize.recipe(base, "Q4_0", [("ffn_up", "Q8_0")]),
        quantize.recipe(tiny_models("moe"), "Q4_0"),
    ]
    assert len({r.identity for r in recipes}) == len({r.path for r in recipes}) == len(recipes)


def test_base_of_the_asked_type_is_returned_as_it_is(tiny_models: Tiny, cache: Path) -> None:
    assert quantize.quantize(tiny_models(), "bf16") == tiny_models()
    assert not (cache / "models").exists()
    override = [("ffn_down", "F16")]
    base = tiny_models("llama", "Q8_0")
    assert quantize.quantize(base, "Q8_0") == base
    assert quantize.quantize(base, "Q8_0", override) != base


def test_quantised_base_is_quantised_again(tiny_models: Tiny) -> None:
    made = quantize.quantize(tiny_models("llama", "Q8_0"), "Q4_0")
    assert files.inspect(made).file_type == "Q4_0"


def test_overrides_decide_by_tensor_name(tiny_models: Tiny) -> None:
    overrides = [(r"blk\.0\.ffn_down", "q8_0"), ("ffn_down", "bf16")]
    made = gguf.GGUFReader(quantize.quantize(tiny_models(), "Q4_0", overrides))
    types = {t.name: t.tensor_type.name for t in made.tensors}
    assert types["blk.0.ffn_down.weight"] == "Q8_0"
    assert types["blk.1.ffn_down.weight"] == "BF16"
    assert types["blk.1.ffn_up.weight"] == "Q4_0"


def test_rows_that_do_not_fit_fall_back_and_the_histogram_says_so(tiny_models: Tiny) -> None:
    facts = files.inspect(quantize.quantize(tiny_models("recurrent"), "Q4_K_M"))
    assert facts.file_type == "Q4_K_M"
    assert facts.tensor_types["Q5_0"] == 4  # ssm_dt has rows of 32


def test_sizes_are_known_beforehand(tiny_models: Tiny, cache: Path) -> None:
    recipes = [quantize.recipe(tiny_models(), name) for name in ("Q8_0", "Q4_K_M")]
    sizes = quantize.sizes(recipes)
    assert not (cache / "models").exists()
    for recipe, size in zip(recipes, sizes, strict=True):
        weights = sum(t.n_bytes for t in gguf.GGUFReader(quantize.make(recipe)).tensors)
        assert abs(size - weights) <= (1 << 20) / 100  # the library says it in hundredths of a MiB


@pytest.mark.parametrize(
    ("type_", "overrides", "message"),
    [
        ("Q4_KM", [], "quantisation 'Q4_KM' is unknown; did you mean Q4_K_M"),
        ("Q4_0", [("x", "Q4_KK")], "tensor type 'Q4_KK' is unknown; did you mean Q4_K"),
        ("F16", [("x", "Q4_0")], "tensor overrides have no effect on F16"),
        ("IQ2_XXS", [], "IQ2_XXS of .* needs an importance matrix; choose another type"),
    ],
)
def test_bad_types(
    tiny_models: Tiny, type_: str, overrides: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        quantize.quantize(tiny_models(), type_, overrides)


def test_failure_of_the_library_is_a_fault_with_its_last_words(
    tiny_models: Tiny, cache: Path
) -> None:
    with pytest.raises(
        EngineFault, match="quantize: .* as Q4_0: .*last words: .*regular expression"
    ):
        quantize.quantize(tiny_models(), "Q4_0", [("(((", "Q8_0")])
    assert not list(cache.rglob("*.gguf"))
    assert not list(cache.rglob("*.partial"))


def test_disk_that_is_too_small(
    tiny_models: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        quantize.shutil, "disk_usage", lambda path: usage(9 << 20, 8 << 20, 1 << 20)
    )
    quantize.check_space(1 << 20)
    with pytest.raises(BadInput) as caught:
        quantize.check_space(5 << 20)
    assert str(caught.value) == (
        f"no disk space: needs 5 MiB, has 1 MiB at {cache.parent}; free space or set SPECBISECT_CACHE"
    )


def test_cache_that_cannot_be_written(tiny_models: Tiny, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(BadInput, match="Not a directory; mend that or set SPECBISECT_CACHE"):
        quantize.quantize(tiny_models(), "Q8_0")


def test_base_that_changes_between_plan_and_making(tiny_models: Tiny, tmp_path: Path) -> None:
    base = tmp_path / "base.gguf"
    shutil.copy(tiny_models(), base)
    recipe = quantize.recipe(base, "Q8_0")
    shutil.copy(tiny_models(noise=0.1), base)
    with pytest.raises(BadInput, match="base.gguf changed while the run was planned"):
        quantize.make(recipe)


def test_two_runs_share_one_file(tiny_models: Tiny, cache: Path) -> None:
    recipe = quantize.recipe(tiny_models(), "Q6_K")
    with ThreadPoolExecutor(2) as runs:
        first, second = runs.map(quantize.make, [recipe, recipe])
    assert first == second
    assert list(cache.rglob("*.gguf")) == [first]
    assert first.read_bytes() == tiny_models("llama", "Q6_K").read_bytes()
