"""A pasted bug report: the command lines, requests, prompts and models in it, and what it does not say.

Markdown as people paste it: fenced and indented blocks, code in a line, prompt signs. What stands outside of code is
prose, and read for names only.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specbisect.cmdline.line import CommandLine, parse
from specbisect.cmdline.words import PROGRAM
from specbisect.errors import BadInput

CHAT = ("/chat/completions", "/v1/messages", "/v1/responses", "/api/chat")
RAW = ("/completion", "/completions", "/infill", "/api/generate")

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^(?: {4}|\t)[^\n]*\n?)+", re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_CONTINUES = re.compile(r"[\\^`][ \t]*$")
_CURL = re.compile(r"^[^\n]*\bcurl\b(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_URL = re.compile(r"https?://[^\s'\"]+")
_LONGEST = 200  # lines of one command; a quote that stays open does not swallow a whole log
_BODY_FLAGS = ("-d", "--data", "--data-raw", "--data-binary", "--json")
_STRING = r'"((?:[^"\\]|\\.)*)"'
_JSON_PROMPT = re.compile(r'"prompt"\s*:\s*' + _STRING)
_JSON_CONTENT = re.compile(r'"role"\s*:\s*"user"\s*,\s*"content"\s*:\s*' + _STRING)
_HEADING = re.compile(r"^(?:#+[ \t]*|\*\*)?[^\n]*\bprompt\b[^\n]*$", re.IGNORECASE)
_GGUF = re.compile(r"[\w./\\:-]*[\w-]\.gguf\b", re.IGNORECASE)
_REPOSITORY = re.compile(r"(?<![\w/.-])[\w.-]+/[\w.-]*-GGUF\b(?::[\w.-]+)?", re.IGNORECASE)
_VERSION = re.compile(
    r"(?:version: ?)(\d[^\n]*)|\b(build:? ?\d+ \([0-9a-f]{7,}\)|b\d{4,5}\b|commit:? ?`?[0-9a-f]{7,40}\b)"
)
_PROGRAM_WORD = re.compile(
    r"(?:^|[\s/\\\"'`])(?:llama-[a-z-]+|llama\.cpp:\S+|main|server)(?:\.exe)?[\s\"']"
)


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request in a report: where it goes, whether the server renders a chat from it, and its JSON body."""

    endpoint: str
    chat: bool
    body: Mapping[str, Any]

    @property
    def prompt(self) -> str | None:
        """The text it sends: its prompt, or the last user message."""
        if isinstance(prompt := self.body.get("prompt"), str):
            return prompt
        messages = self.body.get("messages")
        texts = [m.get("content") for m in messages or () if isinstance(m, dict)]
        return texts[-1] if texts and isinstance(texts[-1], str) else None


@dataclass(frozen=True, slots=True)
class Report:
    """What a bug report holds. `problems` are lines that look like commands and cannot be read, with the reason."""

    commands: tuple[CommandLine, ...]
    requests: tuple[Request, ...]
    prompts: tuple[str, ...]
    models: tuple[str, ...]
    versions: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def command(self) -> CommandLine | None:
        """The command to check: the first that speculates, or that means to; else the first."""
        speculating = [c for c in self.commands if c.spec_types or c.draft]
        return next(iter((*speculating, *self.commands)), None)

    @property
    def understood(self) -> tuple[str, ...]:
        """What was found, one line each."""
        lines = [f"command: {c.program}, {_arms(c)}" for c in self.commands]
        lines += [
            f"request: {'chat' if r.chat else 'raw prompt'} to {r.endpoint}" for r in self.requests
        ]
        lines += [f"prompt: {_shown(p)}" for p in self.prompts]
        lines += [f"model: {m}" for m in self.models]
        return (*lines, *(f"version: {v}" for v in self.versions))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Likely mistakes of the commands, and of the requests together."""
        found = [w for c in self.commands for w in c.warnings]
        if len({r.chat for r in self.requests}) > 1:
            found.append(
                "one request goes to a chat endpoint and another sends a raw prompt: they are not given "
                "the same tokens, so their answers cannot be compared"
            )
        for request in self.requests:
            for name, neutral in _SAMPLING.items():
                if (value := request.body.get(name, neutral)) != neutral:
                    found.append(f"a request sets {name} = {value}; both arms decode greedily here")
        return tuple(dict.fromkeys(found))

    @property
    def missing(self) -> tuple[str, ...]:
        """What is needed, or would be asked for, one phrase each."""
        return tuple(dict.fromkeys(self._missing()))

    def _missing(self) -> Iterator[str]:
        command = self.command
        if command is None:
            yield "the command line"
        else:
            yield from (m for m in command.missing if m != "a prompt")
            if not command.spec_types:
                yield "how it speculates: --spec-type"
            if command.program == "llama-server" and "n_parallel" not in command.settings:
                yield "the number of slots: -np"
        if not self.prompts and not (command and command.prompt_file):
            yield "a prompt"
        if not any("n_predict" in c.settings for c in self.commands) and not any(
            {"n_predict", "max_tokens"} & r.body.keys() for r in self.requests
        ):
            yield "how many tokens were generated: -n"
        greedy = any(r.body.get("temperature") == 0 for r in self.requests)
        if not greedy and not any(c.given.value("--temp") for c in self.commands):
            yield "whether decoding was greedy: temperature 0"
        if not self.versions:
            yield "the version or commit of llama.cpp"


_SAMPLING = {"temperature": 0, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


def issue_file(text: str, maps: Sequence[tuple[str, str]] = ()) -> Report:
    """What the bug report in `text` holds; `maps` as for `parse`. A report with nothing in it is no error."""
    blocks = list(_code(text))
    commands: list[CommandLine] = []
    requests: list[Request] = []
    problems: list[str] = []
    for block in blocks:
        for line in _logical_lines(block):
            if request := _request(line):
                requests.append(request)
            elif _PROGRAM_WORD.search(f" {line} ") and re.search(r"\s--?[A-Za-z]", line):
                try:
                    command = parse(line, maps)
                except BadInput as reason:
                    problems.append(str(reason))
                    continue
                if command.target or command.draft or command.spec_types:  # not --version
                    commands.append(command)
    return Report(
        commands=tuple({c.notes: c for c in commands}.values()),
        requests=tuple(requests),
        prompts=tuple(dict.fromkeys(_prompts(text, commands, requests))),
        models=tuple(dict.fromkeys([*_GGUF.findall(text), *_REPOSITORY.findall(text)])),
        versions=tuple(dict.fromkeys((a or b).strip() for a, b in _VERSION.findall(text))),
        problems=tuple(problems),
    )


def _code(text: str) -> Iterator[str]:
    """Code in `text`: fenced and indented blocks and code in a line; lines of plain text that begin like a command."""
    yield from (found[2] for found in _FENCE.finditer(text))
    prose = _FENCE.sub("\n", text)
    for found in _INDENTED.finditer(prose):
        yield re.sub(r"^(?: {4}|\t)", "", found[0], flags=re.MULTILINE)
    prose = _INDENTED.sub("\n", prose)
    yield from (found[1] for found in _INLINE.finditer(prose))
    for line in _logical_lines(_INLINE.sub("", prose)):
        first = line.split()[:1] if not line.startswith("$") else line.split()[1:2]
        if first and (PROGRAM.match(re.split(r"[/\\]", first[0])[-1]) or first[0] == "curl"):
            yield line


def _logical_lines(block: str) -> Iterator[str]:
    """Lines of a block, those that a shell would read on joined: continued ones, and ones with an open quote."""
    held: list[str] = []
    for line in block.splitlines():
        held.append(line)
        text = "\n".join(held)
        if len(held) < _LONGEST and (
            _CONTINUES.search(line) or ("curl" in held[0] and _open_quote(text))
        ):
            continue
        yield text.strip()
        held = []
    if held:
        yield "\n".join(held).strip()


def _open_quote(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return True
    return False


def _request(line: str) -> Request | None:
    """The llama-server request that a ``curl`` line makes."""
    if not re.search(r"\bcurl\b", line) or not (url := _URL.search(line)):
        return None
    path = "/" + url[0].split("//", 1)[1].partition("/")[2].split("?")[0].rstrip("/")
    if not path.endswith((*CHAT, *RAW)):
        return None
    return Request(path, path.endswith(CHAT), _body(line))


def _body(line: str) -> Mapping[str, Any]:
    try:
        words = shlex.split(re.sub(r"\\\n", " ", line))
    except ValueError:
        return {}
    for flag, value in pairwise(words):
        if flag in _BODY_FLAGS:
            try:
                body = json.loads(value)
            except ValueError:
                continue
            return body if isinstance(body, dict) else {}
    return {}


def _prompts(
    text: str, commands: Sequence[CommandLine], requests: Sequence[Request]
) -> Iterator[str]:
    yield from (c.prompt for c in commands if c.prompt)
    yield from (r.prompt for r in requests if r.prompt)
    for pattern in (_JSON_PROMPT, _JSON_CONTENT):
        for found in pattern.findall(_CURL.sub("", text)):  # whose quotes only a shell can read
            try:
                yield json.loads(f'"{found}"', strict=False)
            except ValueError:
                continue
    for fence in _FENCE.finditer(text):  # a block under a heading that speaks of the prompt
        before = text[: fence.start()].rstrip().splitlines()
        block = fence[2].strip("\n")
        plain = not block.lstrip().startswith(("{", "curl", "$", "llama-", "./"))
        if before and _HEADING.match(before[-1].strip()) and plain and block.strip():
            yield block


def _arms(command: CommandLine) -> str:
    if command.spec_types:
        return f"speculative by {', '.join(command.spec_types)}"
    return "with a draft model and no --spec-type" if command.draft else "vanilla"


def _shown(prompt: str) -> str:
    line = " ".join(prompt.split())
    return repr(line if len(line) <= 70 else line[:69] + "…")
