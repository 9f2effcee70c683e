"""What a case is asked for with: from flags, from a pasted command line, or from a pasted bug report."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbisect.cell import AXES, DRAFTERS, Prompt
from specbisect.cli.flags import METHODS, of_drafter, plain
from specbisect.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from specbisect.cmdline import CommandLine, Report

Maps = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A case in the words of a matrix file; what is empty or None was not said.

    `drafter` is a drafter's table without its model, which `draft` names. `account` says what became of every word
    of a pasted text, `warnings` what in it is likely a mistake.
    """

    target: Path | None = None
    draft: Path | None = None
    drafter: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)
    prompt: Prompt | None = None
    account: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def under(self, flags: "Asked") -> "Asked":
        """The same with what `flags` say put over it."""
        method = flags.drafter.get("method", self.drafter.get("method"))
        inherited = self.drafter if method == self.drafter.get("method") else {}
        return replace(
            self,
            target=flags.target or self.target,
            draft=flags.draft or self.draft,
            drafter={**inherited, **flags.drafter},
            axes={**self.axes, **flags.axes},
            prompt=flags.prompt or self.prompt,
        )

    def tables(self) -> dict[str, Any]:
        """A matrix without a target. Raises `BadInput` when there is no drafter, or not all of it."""
        table = dict(self.drafter)
        if "method" not in table:
            if self.draft is None:
                raise BadInput("no drafter is given; add -md FILE, or --drafter with a method")
            table["method"] = "draft-model"
        if self.draft is not None:
            table["model"] = str(self.draft.absolute())
        _check_drafter(table)
        return {"schema": "specbisect.matrix/1", "drafter": [table]}


def _check_drafter(table: Mapping[str, Any]) -> None:
    method = table["method"]
    if method not in METHODS:
        raise BadInput(f"--drafter {method} is unknown{did_you_mean(method, METHODS)}")
    known = {f.name: f for f in fields(DRAFTERS[method])}
    for name in table:
        if name not in known:
            longest = "; its longest draft is --size-m" if name == "n_max" else ""
            others = ", ".join(of_drafter(n) for n in known if n not in ("method", "args"))
            raise BadInput(
                f"drafter {method} has no {of_drafter(name)}{longest}; choose one of {others}"
            )
    if "model" in known and known["model"].default is not None and "model" not in table:
        raise BadInput(f"drafter {method} needs a draft model; add -md FILE")


def from_line(text: str, maps: Maps) -> Asked:
    """What a llama.cpp command line asks for."""
    from specbisect.cmdline import mapped, parse

    line = parse(text, maps)
    file = line.prompt_file and Path(mapped(line.prompt_file, maps))
    prompt = Prompt("prompt", line.prompt) if line.prompt else read_prompt(file) if file else None
    return _asked(line, prompt, line.warnings)


def from_report(path: Path, maps: Maps) -> Asked:
    """What the bug report at `path` asks for, by its first command that speculates and its first prompt."""
    from specbisect.cmdline import issue_file

    report = issue_file(_text(path, "--issue-file"), maps)
    if report.command is None:
        problems = "; ".join(report.problems) or "paste the line that starts llama.cpp into it"
        raise BadInput(f"{path} holds no llama.cpp command that can be read: {problems}")
    prompt = Prompt(path.stem, report.prompts[0]) if report.prompts else None
    asked = _asked(report.command, prompt, report.warnings)
    account = [*(f"found {line}" for line in report.understood), *asked.account]
    account += [f"not readable: {problem}" for problem in report.problems]
    account += [f"the report does not say {missing}" for missing in report.missing]
    return replace(asked, account=tuple(account), axes={**_length(report), **asked.axes})


def _length(report: "Report") -> dict[str, str]:
    """How many tokens a request in the report asks for."""
    bodies = [request.body for request in report.requests]
    counts = [body[name] for body in bodies for name in ("n_predict", "max_tokens") if name in body]
    return {"n_predict": str(counts[0])} if counts else {}


def _asked(line: "CommandLine", prompt: Prompt | None, warnings: Sequence[str]) -> Asked:
    drafter = line.drafter_without_model
    table = {f.name: getattr(drafter, f.name) for f in fields(drafter)} if drafter else {}
    table = {name: list(v) if isinstance(v, tuple) else v for name, v in table.items()}
    return Asked(
        target=Path(line.target) if line.target else None,
        draft=Path(line.draft) if line.draft else None,
        drafter={name: value for name, value in table.items() if name != "model"},
        axes={"engine": line.engine}
        | {name: plain(value) for name, value in line.settings.items() if name in AXES},
        prompt=prompt,
        account=tuple(f"{note.fate}: {note.written} ({note.why})" for note in line.notes),
        warnings=tuple(warnings),
    )


def read_prompt(path: Path) -> Prompt:
    """The prompt in a file, without a last line feed, as llama.cpp's ``-f`` reads it."""
    name = os.fsencode(path.stem).decode("utf-8", "replace")
    return Prompt(name, _text(path, "--prompt-file").removesuffix("\n"))


def _text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise BadInput(f"{option} {path} is not UTF-8 text; save it as UTF-8") from None


def parse_maps(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs from ``FROM=TO`` words."""
    for word in words:
        there, sign, here = word.partition("=")
        if not (there and sign and here):
            raise BadInput(f"--map {word}: write FROM=TO, such as --map /models=./models")
        yield there, here
