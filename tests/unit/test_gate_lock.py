"""Locks: everything a run depends on is pinned, and every change is named with the part it belongs to."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specbisect.errors import BadInput
from specbisect.gate import identity, lock
from specbisect.gate.acceptance import Acceptance
from specbisect.gate.identity import Identity, changes, identify, resolve
from specbisect.gate.lock import Lock, compare
from specbisect.matrix import Overrides, Plan, build
from specbisect.store import Row

Tiny = Callable[..., Path]
TABLES: dict[str, Any] = {
    "schema": "specbisect.matrix/1",
    "n_predict": 8,
    "drafter": [
        {"method": "draft-model", "n_max": [1, 3]},
        {"method": "ngram-simple", "size_n": 3},
    ],
    "axes": {"n_threads": 1},
}
COUNTS = Acceptance(9, 6, 3, 3, 9, (0, 0, 3, 0), (3, 3, 3), (3, 3, 3))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text('{"id": "a", "text": "Hello"}\n{"id": "b", "text": "in the end"}\n')
    return path


@pytest.fixture(scope="module")
def plan(tiny_models: Tiny, prompts: Path) -> Callable[..., Plan]:
    """A plan, with other models or other tables on demand."""

    def make(target: Path | None = None, draft: Path | None = None, **tables: Any) -> Plan:
        given = Overrides(
            targets=(target or tiny_models(),),
            draft=draft or tiny_models(noise=0.1),
            prompts=prompts,
        )
        return build(TABLES | tables, given)

    return make


@pytest.fixture(scope="module")
def pinned(plan: Callable[..., Plan]) -> Identity:
    return identify(plan())


def rows(plan: Plan, **resolved: Any) -> list[Row]:
    shown: dict[str, Any] = dict.fromkeys(Row._fields)
    shown["resolved"] = {"target": {"flash_attn": "on"} | resolved}
    return [Row(**shown | {"cell": cell}) for cell in plan.cells()]


def test_everything_is_pinned(pinned: Identity, tiny_models: Tiny) -> None:
    (target,), (draft,) = pinned.target, pinned.drafter
    assert target.size == tiny_models().stat().st_size
    assert len(target.sha256) == 64 != draft.sha256
    assert (target.name, target.quant, target.architecture) == ("llama-BF16", "BF16", "llama")
    assert target.tensor_types["BF16"] > 0
    assert target.tokenizer == draft.tokenizer
    assert target.tokenizer["tokens"] == 264
    assert (target.tokenizer["bos"], target.tokenizer["add_bos"]) == (1, True)
    assert target.special["eos"] == target.tokenizer["eos"] == 2
    assert pinned.library["llama.cpp"].startswith("llama-cpp-python ")
    assert pinned.machine["cpu"]
    assert [s.drafter["method"] for s in pinned.settings] == ["draft-model"] * 2 + ["ngram-simple"]
    assert [s.drafter.get("n_max") for s in pinned.settings] == [1, 3, None]
    assert {s.axes["n_threads"] for s in pinned.settings} == {1}
    assert set(pinned.prompts) == {"digest", "a", "b"}


def test_the_same_again_has_no_changes(plan: Callable[..., Plan], pinned: Identity) -> None:
    assert changes(pinned, identify(plan())) == {}


def test_another_file_is_another_target(
    plan: Callable[..., Plan], pinned: Identity, tiny_models: Tiny
) -> None:
    found = changes(pinned, identify(plan(target=tiny_models("llama", "Q8_0"))))
    assert set(found) == {"target"}
    assert 'target[0].quant: "BF16" → "Q8_0"' in found["target"]


def test_a_drafter_of_another_quant_is_refused_by_name(
    plan: Callable[..., Plan], pinned: Identity, tiny_models: Tiny
) -> None:
    swapped = identify(plan(draft=tiny_models("llama", "Q4_0", noise=0.1)))
    with pytest.raises(BadInput) as caught:
        compare(pinned, swapped, ["target", "machine"])
    assert str(caught.value).startswith("this is not what was locked: drafter[0].name: ")
    assert str(caught.value).endswith("If that is meant, give --accept drafter, or make a new lock")
    meant = compare(pinned, swapped, ["drafter"])
    assert 'drafter[0].quant: "BF16" → "Q4_0"' in meant


def test_another_vocabulary_is_seen_in_the_tokenizer(
    plan: Callable[..., Plan], pinned: Identity, tiny_models: Tiny, tmp_path: Path
) -> None:
    other = tmp_path / "llama-BF16.gguf"
    other.write_bytes(tiny_models().read_bytes().replace(b"<0x41>", b"<0x4X>"))
    found = changes(pinned, identify(plan(target=other)))
    assert any(line.startswith("target[0].tokenizer.digest: ") for line in found["target"])


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"n_predict": 9}, "settings[0].axes.n_predict: 8 → 9"),
        ({"axes": {"n_threads": 2}}, "settings[0].axes.n_threads: 1 → 2"),
    ],
)
def test_other_settings(
    plan: Callable[..., Plan], pinned: Identity, tables: dict[str, Any], line: str
) -> None:
    found = changes(pinned, identify(plan(**tables)))
    assert set(found) == {"settings"}
    assert line in found["settings"]


def test_settings_resolved_otherwise(plan: Callable[..., Plan], pinned: Identity) -> None:
    was = resolve(pinned, rows(plan()))
    assert was.settings[0].resolved == [{"target": {"flash_attn": "on"}}]
    # Before a run there is nothing to compare, and that is no change.
    assert changes(was, pinned) == {}
    found = changes(was, resolve(pinned, rows(plan(), flash_attn="off")))
    assert found["settings"][0] == 'settings[0].resolved[0].target.flash_attn: "on" → "off"'


def test_what_a_run_happened_to_do_is_no_setting(
    plan: Callable[..., Plan], pinned: Identity
) -> None:
    some = [row._replace(resolved={**row.resolved, "planted": 2}) for row in rows(plan())]
    some += [
        row._replace(resolved={"server": {"slots": 1, "cached": 7}}) for row in rows(plan())[:1]
    ]
    found = resolve(pinned, some).settings[0].resolved
    assert found == [{"target": {"flash_attn": "on"}}, {"server": {"slots": 1}}]


def test_other_prompts_library_and_machine(plan: Callable[..., Plan], pinned: Identity) -> None:
    other = replace(plan(), prompts=plan().prompts[:1])
    assert any(
        line.startswith("prompts.b: ") for line in changes(pinned, identify(other))["prompts"]
    )
    built = pinned.model_copy(update={"library": {"llama.cpp": "llama-cpp-python 9"}})
    assert set(changes(pinned, built)) == {"library"}
    moved = pinned.model_copy(update={"machine": pinned.machine | {"drivers": ["nvidia 1"]}})
    assert changes(pinned, moved)["machine"] == ('machine.drivers: [] → ["nvidia 1"]',)


def test_a_server_of_somebody_else_cannot_be_pinned(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBISECT_VANILLA_URL", "http://localhost:1")
    with pytest.raises(BadInput, match="cannot be pinned; let specbisect start one"):
        identify(plan(axes={"engine": "server"}))


def test_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia" / "version"
    driver.parent.mkdir()
    driver.write_text("NVRM version: 550.1\n  GCC 12\n")
    monkeypatch.setattr(identity, "DRIVERS", (driver, tmp_path / "none"))
    assert list(identity.drivers()) == ["nvidia NVRM version: 550.1 GCC 12"]


def made(plan: Plan, pinned: Identity) -> Lock:
    counts = {(cell, "default"): COUNTS for cell in plan.cells()}
    return Lock.make(plan, resolve(pinned, rows(plan)), counts)


def test_a_lock_is_read_as_it_was_written(
    plan: Callable[..., Plan], pinned: Identity, tmp_path: Path
) -> None:
    written = made(plan(), pinned)
    path = tmp_path / "specbisect.lock"
    written.write(path)
    assert lock.load(path) == written
    assert list(tmp_path.iterdir()) == [path]
    jsonschema.validate(json.loads(path.read_text()), lock.json_schema())
    assert str(tmp_path) not in path.read_text()


def test_the_baseline_of_a_swapped_model_is_that_of_the_one_it_replaces(
    plan: Callable[..., Plan], pinned: Identity, tiny_models: Tiny
) -> None:
    first = made(plan(), pinned)
    other = plan(target=tiny_models("llama", "Q8_0"), draft=tiny_models("llama", "Q4_0", noise=0.1))
    baseline = first.baseline(other)
    cells = list(other.cells())
    assert [baseline(cell, "default") for cell in cells] == [COUNTS] * 3
    assert baseline(cells[0], "code") is None
    longer = plan(drafter=[{"method": "draft-model", "n_max": 5}])
    assert first.baseline(longer)(next(longer.cells()), "default") is None


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "specbisect.gate/1"}', "schema = 1"])
def test_other_files_are_no_locks(tmp_path: Path, text: str) -> None:
    path = tmp_path / "specbisect.lock"
    path.write_text(text)
    with pytest.raises(BadInput, match="is no lock file of this version .* `specbisect lock`"):
        lock.load(path)
    with pytest.raises(BadInput, match="cannot be read .* `specbisect lock`"):
        lock.load(tmp_path / "none")
