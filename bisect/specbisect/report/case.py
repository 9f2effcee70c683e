"""A report on one case: the issue, programs that show it, and everything behind it, in one directory."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from specbisect.diagnose.finding import Finding
from specbisect.errors import BadInput
from specbisect.narrow.result import Narrowed
from specbisect.report import file, hardware, issue, render, repro, shell, subject
from specbisect.report.repro import Script, model_file
from specbisect.report.scrub import Scrubber
from specbisect.report.subject import Subject

SUMS = "SHA256SUMS"


def files(
    finding: Finding,
    narrowed: Narrowed | None = None,
    *,
    created: str = "",
    redact_prompt: bool = False,
    scrubber: Scrubber | None = None,
) -> dict[str, str]:
    """Every file of the report by name. The same finding gives the same text; only finding.json has `created` in it.

    `narrowed` is what narrowing this finding came to; the issue and ``repro.py`` are then about its minimal case.
    """
    clean = scrubber or Scrubber.of_this_machine()
    original = subject.of(finding, redact_prompt=redact_prompt, scrubber=clean)
    minimal = original
    if narrowed is not None:
        minimal = subject.of(finding, narrowed, redact_prompt=redact_prompt, scrubber=clean)
    python, curl = repro.script(minimal), shell.script(original)
    digest = subject.ids_digest(original.prompt_ids)
    found = {
        "issue.md": issue.issue(minimal, original, python, curl),
        "repro.py": python.text,
        "repro.sh": curl.text,
        "git-bisect.md": _bisect(minimal, original, python, curl),
        "finding.json": file.dump(original, minimal, created, digest),
    }
    kept = {name: text for name, text in found.items() if text}
    return kept | {SUMS: _sums(kept)}


def _bisect(minimal: Subject, original: Subject, python: Script, curl: Script) -> str:
    if not (python.text or curl.text):
        return ""
    about = minimal if python.text else original
    cell = about.finding.case.cell
    draft = getattr(cell.drafter, "model", None)
    return (
        render.markdown()
        .get_template("git-bisect.md.j2")
        .render(
            python=bool(python.text),
            model=model_file(cell.target),
            draft="" if python.text or draft is None else model_file(draft),
            library=hardware.of(about).library,
            version=about.version,
        )
    )


def _sums(texts: Mapping[str, str]) -> str:
    """As ``sha256sum`` writes them."""
    return "".join(
        f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n"
        for name, text in sorted(texts.items())
    )


def write(directory: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write the files of a report into `directory`, made if need be; their paths."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / name for name in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_bytes(text.encode())
    except OSError as error:
        where = error.filename or directory
        raise BadInput(
            f"cannot write {where}: {error.strerror}; choose another directory"
        ) from None
    return paths
