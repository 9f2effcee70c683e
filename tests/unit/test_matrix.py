"""Matrix files: what a plan holds, in which order, and one line for everything that can be wrong."""

import itertools
import json
import re
import shutil
import tomllib
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specbisect import matrix
from specbisect.cell import (
    AXES,
    Case,
    Cell,
    DraftModel,
    NgramSimple,
    Prompt,
    Scripted,
    SelfDraft,
    ServerSpec,
)
from specbisect.errors import BadInput
from specbisect.llama import files
from specbisect.matrix import Overrides, Plan
from specbisect.matrix.product import parameter
from specbisect.matrix.values import expand

DEFECTS = Path(__file__).parents[1] / "cases" / "matrix"
PROMPTS = (Prompt("a", "Once"), Prompt("b", "upon a time"))
SELF = {"method": "self"}

Tiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECBISECT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan(tiny_models: Tiny) -> Callable[..., Plan]:
    """Builds a plan; keyword arguments are its tables, by default one tiny target that drafts for itself."""

    def build(overrides: Overrides = Overrides(), **tables: Any) -> Plan:  # noqa: B008
        defaults = {"target": {"base": str(tiny_models())}, "drafter": [SELF]}
        overrides = replace(overrides, prompts=overrides.prompts or PROMPTS)
        return matrix.build({"schema": "specbisect.matrix/1"} | defaults | tables, overrides)

    return build


@pytest.mark.parametrize("defect", sorted(DEFECTS.iterdir()), ids=lambda path: path.name)
def test_defect_gives_one_line(defect: Path, tmp_path: Path, tiny_models: Tiny) -> None:
    here = tmp_path / "here"
    shutil.copytree(defect, here)
    (here / "model.gguf").symlink_to(tiny_models())
    if not (here / "prompts.jsonl").exists():
        (here / "prompts.jsonl").write_text('{"id": "a", "text": "Once"}\n')
    expected = (here / "message.txt").read_text().strip().replace("{here}", str(here))

    with pytest.raises(BadInput) as caught:
        matrix.load(here / "matrix.toml")

    # "…" stands for words of the Python library, which change with its version.
    pattern = ".*".join(map(re.escape, expected.split("…")))
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (4, [4]),
        ("on", ["on"]),
        ([4, 1], [4, 1]),
        ("1..4", [1, 2, 3, 4]),
        ("1..8+3", [1, 4, 7]),
        ("1..8*2", [1, 2, 4, 8]),
        ("3..20*3", [3, 9]),
        ("5..5", [5]),
        ("-2..0", [-2, -1, 0]),
        (["1..3", 16, "32..64*2"], [1, 2, 3, 16, 32, 64]),
    ],
)
def test_ranges(written: object, meant: list[object]) -> None:
    assert expand(written) == meant


def test_lists_multiply(plan: Callable[..., Plan]) -> None:
    made = plan(
        drafter=[
            {"method": "self", "n_max": [1, 2]},
            {"method": "ngram-simple", "size_n": "2..3", "size_m": [4, 8]},
        ],
        axes={"n_ubatch": [512, 8], "flash_attn": ["on", "off"]},
    )
    cells = list(made.cells())
    assert made.count() == len(cells) == len(set(cells)) == 2 * 2 * (2 + 4)
    assert {c.drafter for c in cells} == {
        SelfDraft(1),
        SelfDraft(2),
        *(NgramSimple(n, m) for n in (2, 3) for m in (4, 8)),
    }
    assert set(itertools.product([512, 8], ["on", "off"])) == {
        (c.n_ubatch, c.flash_attn) for c in cells
    }


def test_parameters_that_are_lists_do_not_multiply(plan: Callable[..., Plan]) -> None:
    script = {"method": "scripted", "drafts": [[0, [5, 6]], [3, [7]]]}
    assert [c.drafter for c in plan(drafter=[script]).cells()] == [
        Scripted(((0, (5, 6)), (3, (7,))))
    ]
    flags = {
        "method": "server",
        "spec_type": ["ngram-mod", "ngram-map-k"],
        "args": ["--lookup-min", "2"],
    }
    made = plan(drafter=[flags], axes={"engine": "server"})
    assert made.drafters == tuple(
        ServerSpec(name, args=("--lookup-min", "2")) for name in ("ngram-mod", "ngram-map-k")
    )


def test_models_load_once_and_vanilla_arms_are_shared(
    plan: Callable[..., Plan], tiny_models: Tiny
) -> None:
    made = plan(
        target={"base": str(tiny_models()), "quants": ["BF16", "Q8_0", "Q4_K_M"]},
        drafter=[{"method": "self", "n_max": "1..4"}],
        axes={"n_ubatch": [512, 8], "use_extra_bufts": [True, False], "n_ctx": [1024, 2048]},
    )
    loaded = [
        key for key, _ in itertools.groupby((c.target, c.use_extra_bufts) for c in made.cells())
    ]
    assert len(loaded) == len(set(loaded)) == 3 * 2
    vanilla = [key for key, _ in itertools.groupby(case.vanilla for case in made.cases())]
    assert len(vanilla) == len(set(vanilla)) == 3 * 2 * 2 * 2 * len(PROMPTS)


def test_cells_are_made_one_at_a_time(plan: Callable[..., Plan]) -> None:
    tables = {
        "drafter": [{"method": "self", "n_max": "1..10"}],
        "axes": {"n_ubatch": "1..10", "n_batch": "100..199", "n_ctx": "512..521"},
    }
    tracemalloc.start()
    made = plan(**tables)
    assert made.count() == sum(1 for _ in made.cells()) == 100_000
    assert made.count_cases() == 200_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert next(made.cases()) == Case(next(made.cells()), PROMPTS[0])


def test_doubles_are_planned_once_and_counted(plan: Callable[..., Plan]) -> None:
    made = plan(
        drafter=[SELF, {"method": "self", "n_max": [3, 4]}], axes={"n_batch": [512, "512..513"]}
    )
    assert made.count() == len(set(made.cells())) == 4
    assert made.counts.duplicates == 3 * 3 - 4


def test_exclude_matches_all_keys_given_and_any_of_their_values(
    plan: Callable[..., Plan], tiny_models: Tiny
) -> None:
    made = plan(
        target={"base": str(tiny_models()), "quants": ["BF16", "Q8_0"]},
        drafter=[{"method": "self", "n_max": "1..3"}, {"method": "ngram-simple"}],
        axes={"n_ubatch": [1, 2, 3]},
        exclude=[
            {"quant": "q8_0", "n_ubatch": [1, 2], "drafter": {"method": "self", "n_max": "2..3"}},
            {"n_ubatch": 3, "drafter": "ngram-simple"},
        ],
    )

    def dropped(cell: Cell) -> bool:
        long = cell.drafter in (SelfDraft(2), SelfDraft(3))
        first = cell.target.quant == "Q8_0" and cell.n_ubatch in (1, 2) and long
        return first or (cell.n_ubatch == 3 and isinstance(cell.drafter, NgramSimple))

    pruned = [cell for cell, _ in made.pruned()]
    assert len(pruned) == made.counts.pruned == 2 * 2 + 2
    assert all(map(dropped, pruned))
    assert not any(map(dropped, made.cells()))
    assert made.count() + made.counts.pruned == 2 * 3 * 4
    assert {reason for _, reason in made.pruned()} == {"matches exclude[0]", "matches exclude[1]"}


def test_an_excluded_cell_may_be_impossible_and_says_why(plan: Callable[..., Plan]) -> None:
    made = plan(axes={"n_batch": [512, 8]}, exclude=[{"n_batch": 8}])
    ((cell, reason),) = made.pruned()
    assert cell.n_batch == 8
    assert reason == "matches exclude[0]; n_ubatch = 512 is larger than n_batch = 8; lower n_ubatch"


def test_include_adds_what_exclude_drops(plan: Callable[..., Plan]) -> None:
    made = plan(
        n_predict=32,
        axes={"n_ubatch": [512, 8], "n_ctx": 1024},
        exclude=[{"n_ubatch": 8}],
        include=[
            {"n_ubatch": 8, "drafter": {"method": "self", "n_max": [1, 2]}},
            {"n_batch": [512, 2048]},
        ],
    )
    summary = [(c.n_ubatch, c.n_batch, c.n_ctx, c.n_predict, c.drafter) for c in made.cells()]
    assert summary == [
        (512, 2048, 1024, 32, SelfDraft(3)),
        (8, 2048, 1024, 32, SelfDraft(1)),
        (8, 2048, 1024, 32, SelfDraft(2)),
        (512, 512, 1024, 32, SelfDraft(3)),
    ]
    assert made.counts.duplicates == 1  # the second include repeats the one cell that is left


def test_included_quantisation_is_made_too(plan: Callable[..., Plan]) -> None:
    made = plan(include=[{"quant": "Q4_0"}])
    assert [c.target.quant for c in made.cells()] == ["BF16", "Q4_0"]
    assert [recipe.type for recipe in made.recipes.values()] == ["Q4_0"]


def test_models_are_named_by_content(
    plan: Callable[..., Plan], tiny_models: Tiny, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(tiny_models(), copy)
    made, again = (
        plan(target={"base": str(path), "quants": ["BF16", "Q8_0"]})
        for path in (tiny_models(), copy)
    )
    sha = files.sha256(copy)
    assert [t.identity.split(":")[:3] for t in again.targets] == [
        ["sha256", sha],
        ["quantize", sha, "Q8_0"],
    ]
    assert [t.name for t in again.targets] == ["copy", "copy"]
    assert [c.key for c in made.cells()] == [c.key for c in again.cells()]
    assert made.digest == again.digest


def test_a_file_is_labelled_by_what_it_was_made_as(
    plan: Callable[..., Plan], tiny_models: Tiny
) -> None:
    made = plan(target={"files": [str(tiny_models("llama", "Q4_K_M"))]})
    assert [t.quant for t in made.targets] == ["Q4_K_M"]
    assert not made.recipes


def test_files_to_make_and_prepare(
    plan: Callable[..., Plan], tiny_models: Tiny, cache: Path
) -> None:
    made = plan(
        target={"base": str(tiny_models()), "quants": ["Q8_0"]},
        drafter=[{"method": "draft-model", "quant": ["Q2_K", "Q8_0"]}],
    )
    assert not (cache / "models").exists()
    assert [recipe.type for recipe, _ in made.files_to_make()] == ["Q8_0", "Q2_K"]
    seen: list[tuple[str, str]] = []
    sizes = {recipe.path: size for recipe, size in made.files_to_make()}
    made.prepare(lambda recipe, state: seen.append((recipe.type, state)))
    assert seen == list(itertools.product(["Q8_0", "Q2_K"], ["started", "finished"]))
    assert all(0.9 < size / path.stat().st_size <= 1 for path, size in sizes.items())
    assert all(Path(c.target.path).exists() for c in made.cells())
    assert made.files_to_make() == ()


class TestOverrides:
    def test_targets_replace_targets(self, plan: Callable[..., Plan], tiny_models: Tiny) -> None:
        paths = tiny_models("llama", "Q8_0"), tiny_models("llama", "Q4_0")
        made = plan(Overrides(targets=paths), target={"base": "nowhere.gguf", "quants": ["Q6_K"]})
        assert [t.quant for t in made.targets] == ["Q8_0", "Q4_0"]

    def test_base_keeps_quants(self, plan: Callable[..., Plan], tiny_models: Tiny) -> None:
        written = {"base": "nowhere.gguf", "quants": ["BF16", "Q6_K"]}
        made = plan(Overrides(base=tiny_models()), target=written)
        assert [t.quant for t in made.targets] == ["BF16", "Q6_K"]
        made = plan(Overrides(base=tiny_models(), quants=("Q5_0",)), target=written)
        assert [t.quant for t in made.targets] == ["Q5_0"]

    def test_draft_replaces_the_model_of_draft_models(
        self, plan: Callable[..., Plan], tiny_models: Tiny
    ) -> None:
        given = Overrides(draft=tiny_models("llama", "Q4_0"))
        made = plan(given, drafter=[{"method": "draft-model", "quant": ["Q2_K", "Q8_0"]}, SELF])
        first, second = made.drafters
        assert isinstance(first, DraftModel)
        assert first.model.path == str(given.draft)
        assert second == SelfDraft()
        with pytest.raises(BadInput, match="--draft: matrix has no drafter of method draft-model"):
            plan(given)

    def test_the_only_target_is_the_base_of_its_drafter(
        self, plan: Callable[..., Plan], tiny_models: Tiny
    ) -> None:
        target = tiny_models("llama", "Q8_0")
        made = plan(
            Overrides(targets=(target,)), drafter=[{"method": "draft-model", "quant": "Q2_K"}]
        )
        (recipe,) = made.recipes.values()
        assert recipe.base == target

    def test_drafters_replace_drafters(
        self, plan: Callable[..., Plan], tiny_models: Tiny, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = plan(Overrides(drafters=({"method": "ngram-simple", "size_n": "1..2"},)))
        assert made.drafters == (NgramSimple(1), NgramSimple(2))
        monkeypatch.chdir(tiny_models().parent)
        made = plan(Overrides(drafters=({"method": "draft-model", "model": tiny_models().name},)))
        assert parameter(made.drafters[0], "model") == files.stem(tiny_models())
        with pytest.raises(
            BadInput, match=r"--drafter: unknown key drafter\[0\].size; did you mean"
        ):
            plan(Overrides(drafters=({"method": "ngram-simple", "size": 3},)))

    def test_axes_replace_axes(self, plan: Callable[..., Plan]) -> None:
        flags = {"n_batch": "512..514*2,600", "kv_unified": "false,true", "n_predict": "9"}
        made = plan(Overrides(axes=flags), n_predict=8, axes={"n_batch": 1024, "n_ubatch": 4})
        assert [(c.n_batch, c.kv_unified) for c in made.cells()] == [
            (512, False),
            (512, True),
            (600, False),
            (600, True),
        ]
        assert {(c.n_ubatch, c.n_predict) for c in made.cells()} == {(4, 9)}

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"n_bach": "8"}, "--set: unknown key n_bach; did you mean n_batch"),
            ({"n_batch": "x"}, "--set: n_batch = 'x' has the wrong type; give an integer"),
            ({"flash_attn": "onn"}, "--set: flash_attn = 'onn' is unknown; did you mean on"),
            ({"n_predict": "0"}, "--set: n_predict = 0 is below 1; raise it"),
        ],
    )
    def test_bad_axes(self, plan: Callable[..., Plan], flags: dict[str, str], message: str) -> None:
        with pytest.raises(BadInput, match=re.escape(message)):
            plan(Overrides(axes=flags))

    def test_prompts_and_their_number(self, plan: Callable[..., Plan], tmp_path: Path) -> None:
        written, given = tmp_path / "written.jsonl", tmp_path / "given.jsonl"
        written.write_text('{"id": "w", "text": "Once"}\n')
        given.write_text('{"id": "g", "ids": [5, 6], "group": "x"}\n\n{"id": "h", "text": "é"}\n')
        expected = (Prompt("g", group="x", ids=(5, 6)), Prompt("h", "é"))
        assert plan(Overrides(prompts=given), prompts=str(written)).prompts == expected
        assert plan(Overrides(prompts=given, max_prompts=1)).prompts == expected[:1]
        assert plan(Overrides(prompts=given), max_prompts=1).prompts == expected[:1]

    def test_only_restricts_cases(self, plan: Callable[..., Plan]) -> None:
        tables = {"drafter": [{"method": "self", "n_max": [3, 4]}], "axes": {"n_ubatch": [512, 8]}}
        made = plan(Overrides(only="N_max=3/*n_ubatch=8/*/b"), **tables)
        (case,) = made.cases()
        assert made.count_cases() == 1
        assert (case.cell.drafter, case.cell.n_ubatch, case.prompt.id) == (SelfDraft(3), 8, "b")
        assert made.digest == plan(**tables).digest


def test_labels_name_what_is_not_default(plan: Callable[..., Plan], tiny_models: Tiny) -> None:
    made = plan(
        drafter=[
            {"method": "draft-model", "quant": "Q2_K", "n_max": 7},
            {"method": "ngram-simple"},
        ],
        axes={"n_ubatch": 8},
    )
    name = files.stem(tiny_models())
    assert [matrix.label(case) for case in made.cases()][::2] == [
        f"{name}/BF16/draft-model/model=Q2_K/n_max=7/n_ubatch=8/a",
        f"{name}/BF16/draft-model/model=Q2_K/n_max=7/n_ubatch=8/b",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"axes": {"n_ubatch": 8}},
        {"drafter": [{"method": "self", "n_max": 4}]},
        {"n_predict": 8},
        {"overrides": Overrides(prompts=PROMPTS[:1])},
        {"overrides": Overrides(prompts=(Prompt("a", "One"), PROMPTS[1]))},
        {"overrides": Overrides(quants=("Q8_0",))},
        {"include": [{"n_ubatch": 8}]},
    ],
)
def test_digest_changes_with_what_is_asked(
    plan: Callable[..., Plan], change: dict[str, Any]
) -> None:
    assert plan(**change).digest != plan().digest


def test_resolved_spells_everything_out_without_paths(
    plan: Callable[..., Plan], tmp_path: Path
) -> None:
    made = plan(axes={"n_ubatch": [8, 4]}, exclude=[{"n_ubatch": 4, "drafter": {"n_max": 9}}])
    resolved = json.loads(made.resolved_json())
    assert resolved["digest"] == made.digest
    assert resolved["blocks"][0]["axes"] == {n: [a.default] for n, a in AXES.items()} | {
        "n_ubatch": [8, 4]
    }
    assert resolved["prompts"]["ids"] == ["a", "b"]
    assert "/" not in json.dumps(resolved["blocks"])


class TestVocabularies:
    def test_prompts_that_fit(self, plan: Callable[..., Plan]) -> None:
        matrix.validate_prompts(plan())

    def test_prompt_longer_than_the_context(self, plan: Callable[..., Plan]) -> None:
        # Two sequences share 512 cells; the text has no merges, so that it is a token a byte after the BOS.
        prompts = (Prompt("short", "x"), Prompt("long", "x" * 247))
        tables = {"n_predict": 8, "axes": {"n_ctx": [2048, 512], "n_parallel": 2}}
        matrix.validate_prompts(plan(Overrides(prompts=prompts), **tables))
        prompts = (*prompts, Prompt("longer", "x" * 248))
        with pytest.raises(
            BadInput, match="prompt 'longer' has 249 tokens.*n_predict = 8.*256.*n_ctx = 512"
        ):
            matrix.validate_prompts(plan(Overrides(prompts=prompts), **tables))
        tables["axes"]["kv_unified"] = True
        matrix.validate_prompts(plan(Overrides(prompts=prompts), **tables))

    def test_prompt_ids_the_model_does_not_have(self, plan: Callable[..., Plan]) -> None:
        with pytest.raises(BadInput, match="prompt 'a' has ids outside 0..263"):
            matrix.validate_prompts(plan(Overrides(prompts=(Prompt("a", ids=(5, 264)),))))

    def test_draft_with_the_same_vocabulary(
        self, plan: Callable[..., Plan], tiny_models: Tiny
    ) -> None:
        draft = Overrides(draft=tiny_models("swa", "Q4_0"))
        matrix.validate_drafters(plan(draft, drafter=[{"method": "draft-model"}]))

    def test_draft_with_another_vocabulary(
        self, plan: Callable[..., Plan], tiny_models: Tiny, tmp_path: Path
    ) -> None:
        other = tmp_path / "other.gguf"
        other.write_bytes(tiny_models().read_bytes().replace(b"<0x41>", b"<0x\xc3\xa9>"))
        made = plan(Overrides(draft=other), drafter=[{"method": "draft-model"}])
        with pytest.raises(BadInput) as caught:
            matrix.validate_drafters(made)
        assert str(caught.value) == (
            f"other.gguf cannot draft for {tiny_models().name}: token 68 is '<0xé>' instead of '<0x41>'; "
            "choose a draft model with the same vocabulary"
        )


class TestShipped:
    @pytest.mark.parametrize("name", sorted(matrix.shipped()))
    def test_runs_as_it_is(self, name: str, tiny_models: Tiny) -> None:
        base = Overrides(base=tiny_models())
        made = matrix.load(matrix.find(name), base)
        assert made.count_cases() == made.count() * len(made.prompts)
        made = matrix.load(
            matrix.find(name), Overrides(targets=(tiny_models(),), draft=tiny_models())
        )
        assert {d.model.path for d in made.drafters if isinstance(d, DraftModel)} == {
            str(tiny_models())
        }
        with pytest.raises(BadInput, match="names no target; give --base FILE or --target FILE"):
            matrix.load(matrix.find(name))

    @pytest.mark.parametrize("name", sorted(matrix.shipped()))
    def test_follows_the_published_schema(self, name: str) -> None:
        jsonschema.validate(tomllib.loads(matrix.find(name).read_text()), matrix.json_schema())

    def test_draft_lengths_of_batch_sizes(self, tiny_models: Tiny) -> None:
        made = matrix.load(matrix.find("batch-sizes"), Overrides(base=tiny_models()))
        assert {c.width for c in made.cells()} == set(range(2, 18))

    def test_names(self) -> None:
        assert {"demo", "quant-ladder", "batch-sizes"} <= set(matrix.shipped())
        with pytest.raises(
            BadInput, match="matrix 'demmo' is neither a file nor .*; did you mean demo"
        ):
            matrix.find("demmo")


def test_schema_refuses_what_reading_refuses() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {"schema": "specbisect.matrix/1", "axes": {"n_batch": "8-1"}}, matrix.json_schema()
        )


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "text": "Once"}\r\n')
    assert matrix.prompts.read(path) == (Prompt("a", "Once"),)
    path = tmp_path / "matrix.toml"
    path.write_bytes(b'\xef\xbb\xbfschema = "specbisect.matrix/1"\r\n')
    assert matrix.reading.read(path)[0] == {"schema": "specbisect.matrix/1"}


def test_bytes_that_are_no_text_are_no_prompt(tiny_models: Tiny) -> None:
    prompts = (Prompt("a", "Once \udcff"),)
    tables = {"schema": "specbisect.matrix/1", "drafter": [SELF]}
    with pytest.raises(BadInput, match=r"prompt a holds \\udcff, which is no UTF-8"):
        matrix.build(tables, Overrides(targets=(tiny_models(),), prompts=prompts), source="check")


def test_a_name_that_is_no_text_is_refused(tiny_models: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "model-\udcff.gguf"
    path.symlink_to(tiny_models())
    with pytest.raises(BadInput, match="is no name in UTF-8; rename the file"):
        files.inspect(path)
