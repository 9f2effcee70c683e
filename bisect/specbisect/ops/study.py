"""From a case to its kernel: the first departing node at one place of a text, its capsule, and the proof by change.

`look` and `open_up` evaluate models, and are what worker processes are asked to call. `confirm` runs in the parent: it
has files made and looks again.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specbisect.cell import Case, Cell, Model
from specbisect.engines.account import prompt_ids
from specbisect.engines.faults import tamper_of
from specbisect.engines.models import Models
from specbisect.errors import EngineFault
from specbisect.llama import child, files, header, library, quantize
from specbisect.llama.context import Settings
from specbisect.ops.capsule import Capsule, smallest, take
from specbisect.ops.ggml import Unusable
from specbisect.ops.invariance import TYPES, Invariance, retyped, table
from specbisect.ops.operation import differences
from specbisect.ops.tensors import Key
from specbisect.ops.trace import Departure, NodeTrace, Tracer
from specbisect.ops.widths import Profiler
from specbisect.trace import Cycle, Trace

SUBSTITUTES = (
    "Q8_0",
    "Q5_1",
    "Q5_0",
    "Q4_1",
    "Q4_0",
    "IQ4_NL",
    "F32",
    "BF16",
    "F16",
    "Q6_K",
    "Q4_K",
)
"""Types tried in place of one whose kernel departs, the most precise of the cheap ones first."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a text: `prompt` read in batches, `then` one by one, and the tokens of the batch to look at."""

    prompt: tuple[int, ...]
    then: tuple[int, ...]
    batch: tuple[int, ...]

    def widened(self, rows: int) -> "Spot":
        """The same place with at least `rows` tokens in the batch, filled up with the prompt's."""
        missing = max(0, rows - len(self.batch))
        filling = (*self.prompt * -(-missing // len(self.prompt)),)[:missing]
        return replace(self, batch=(*self.batch, *filling))

    @classmethod
    def of(cls, trace: Trace, cycle: Cycle) -> "Spot":
        """Where a speculative arm verified that cycle, on a width-1 history."""
        committed = trace.ids[: cycle.base - len(trace.prompt_ids)]
        return cls(trace.prompt_ids, committed, cycle.batch)


@dataclass(frozen=True, slots=True)
class Opened:
    """A node taken out: its capsule, and a type in which its weight's kernel departs at no width (empty: none here).

    `host` is the library and the machine.
    """

    capsule: Capsule
    substitute: str
    host: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What became of the first departing node under a change that should move it; `first` is the new one."""

    change: str
    first: Departure | None
    outcome: Literal["gone", "later", "stays"]

    @property
    def confirmed(self) -> bool:
        """Whether the node was the cause: without its kernel the departure is later, or gone."""
        return self.outcome != "stays"

    def __str__(self) -> str:
        where = {"gone": "no node departs", "later": f"the first is later: {self.first}"}
        return f"with {self.change}, {where.get(self.outcome, f'the first is still {self.first}')}"


def spot(case: Case, width: int) -> Spot:
    """Right after the prompt of `case`, with `width` tokens of the target's own text, in this process.

    A text that ends before is filled up with the prompt's tokens.
    """
    models = Models()
    try:
        return _spot(models, case, width)
    finally:
        models.close()


def _spot(models: Models, case: Case, width: int) -> Spot:
    profiler = Profiler(models, case)
    prompt = prompt_ids(case, profiler.model.vocab)
    return Spot(prompt, (), tuple(profiler.text(prompt, width))).widened(width)


def look(case: Case, spot: Spot, widths: Sequence[int]) -> list[NodeTrace]:
    """Node traces at a place, in this process; see `Tracer.traces`."""
    models = Models()
    try:
        with _tracer(models, case, spot) as tracer:
            return tracer.traces(spot.batch, widths)
    finally:
        models.close()


def open_up(case: Case, spot: Spot, node: Key) -> Opened:
    """The capsule of a node at a place, in this process."""
    models = Models()
    try:
        with _tracer(models, case, spot) as tracer:
            whole = take(tracer, spot.batch, node)
            return Opened(smallest(whole), _substitute(whole), library.environment())
    finally:
        models.close()


def types(case: Case, width: int, names: Sequence[str] = TYPES) -> list[Invariance]:
    """The table of types right after the prompt of `case`, in this process.

    It is made for the product that departs first at `width`, or if none does for the widest one of a layer.
    """
    models = Models()
    try:
        at = _spot(models, case, width)
        with _tracer(models, case, at) as tracer:
            first = tracer.trace(at.batch).first
            departs = first is not None and first.node.weight and first.node.key.op == "MUL_MAT"
            key = first.node.key if first and departs else tracer.widest_product(at.batch)
            return table(take(tracer, at.batch, key).operation, names)
    finally:
        models.close()


def _tracer(models: Models, case: Case, spot: Spot) -> Tracer:
    cell = case.cell.vanilla
    settings = Settings.of(cell)
    model = models.get(cell.target, cell)
    return Tracer(model, settings, spot.prompt, spot.then, tamper=tamper_of(case.fault))


def _substitute(whole: Capsule) -> str:
    if whole.node.weight is None or not whole.is_product:
        return ""
    widths = range(2, whole.operation.width + 1)
    for name in SUBSTITUTES:
        try:
            found = differences(retyped(whole.operation, name), widths)
        except Unusable:
            continue
        if not any(d.values for d in found):
            return name
    return ""


def confirm(case: Case, spot: Spot, trace: NodeTrace, opened: Opened) -> list[Confirmation]:
    """Look again without the kernel of the node that departs first: it was the cause if another is first then, or none.

    A weight is put into the substitute type, alone and with all of its kind and type; attention gets another cache, or
    one thread. Stops at the first change that leaves no departure. Empty when nothing can be changed.
    """
    assert trace.first is not None
    found: list[Confirmation] = []
    for change, cell in _changes(case.cell.vanilla, trace.first, opened.substitute):
        try:
            (again,) = child.call(look, replace(case, cell=cell), spot, [trace.width])
        except EngineFault as fault:
            if fault.stage != "context":
                raise
            continue  # a cache that llama.cpp does not make for this model
        found.append(Confirmation(change, again.first, _outcome(trace.first, again)))
        if found[-1].outcome == "gone":
            break
    return found


def _outcome(before: Departure, again: NodeTrace) -> Literal["gone", "later", "stays"]:
    if again.first is None:
        return "gone"
    places = [again.order(departure.node.key) for departure in (before, again.first)]
    return "later" if places[0] < places[1] else "stays"


def _changes(cell: Cell, first: Departure, substitute: str) -> Iterator[tuple[str, Cell]]:
    weight = first.node.weight
    if weight is None:
        for kind in ("q8_0", "bf16", "f32"):
            if not kind.startswith("q") or cell.flash_attn != "off":
                yield f"type_k = type_v = {kind}", replace(cell, type_k=kind, type_v=kind)
            else:
                yield f"type_k = {kind}", replace(cell, type_k=kind)
        yield "n_threads = 1", replace(cell, n_threads=1, n_threads_batch=1)
    elif substitute:
        path = Path(cell.target.path)
        types = tensor_types(path)
        kin = [name for name in _kin(weight, types) if name != weight]
        place = weight.removesuffix(".weight")
        yield f"{place} as {substitute}", _retyped(cell, {weight: substitute})
        if kin:
            kind = re.sub(r"\d+", "*", place)
            every = dict.fromkeys([weight, *kin], substitute)
            yield (
                f"all {len(every)} {kind} of type {types[weight]} as {substitute}",
                _retyped(cell, every),
            )


def _kin(weight: str, types: Mapping[str, str]) -> list[str]:
    """Tensors that are called the same in another layer and have the same type."""
    pattern = re.compile(r"\d+".join(map(re.escape, re.split(r"\d+", weight))))
    return [n for n, kind in types.items() if pattern.fullmatch(n) and kind == types.get(weight)]


def tensor_types(path: Path) -> dict[str, str]:
    """The type of every tensor of a model."""
    return {t.name: t.type for part in files.parts(path) for t in header.read(part).tensors}


def _retyped(cell: Cell, changed: Mapping[str, str]) -> Cell:
    path = retype(Path(cell.target.path), changed)
    identity = f"sha256:{files.sha256(path)}"
    model = Model(path.name, cell.target.quant, identity, str(path))
    return replace(cell, target=model)


def retype(path: Path, changed: Mapping[str, str]) -> Path:
    """A copy of a model in the cache with some tensors in other types, and every other tensor as it is.

    llama.cpp's quantiser leaves a tensor alone that has the wanted type already, so each is told its own.
    """
    by_type: dict[str, list[str]] = {}
    for name, kind in tensor_types(path).items():
        by_type.setdefault(changed.get(name, kind), []).append(name)
    overrides = [(_one_of(names), kind) for kind, names in by_type.items()]
    return quantize.quantize(path, "Q8_0", overrides)


def _one_of(names: Sequence[str]) -> str:
    return f"^({'|'.join(name.replace('.', '[.]') for name in names)})$"
