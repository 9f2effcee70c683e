"""Words as options: each flag with its value, its long name, and what is to be said about it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from specbisect.cmdline import table
from specbisect.cmdline.words import Words
from specbisect.errors import BadInput

Fate = Literal["used", "irrelevant", "not understood"]

_TRUE = frozenset({"1", "on", "true", "enabled"})
_FLASH_ATTN = frozenset(
    {"on", "off", "auto", "1", "0", "true", "false", "enabled", "disabled", "-1"}
)


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one word of a command line: its fate, and why, as a clause."""

    written: str
    fate: Fate
    why: str


@dataclass(frozen=True, slots=True)
class Option:
    """One flag as given. `name` is its long name in today's llama.cpp, `written` what stands in the line."""

    name: str
    written: str
    value: str = ""
    negated: bool = False
    renamed: bool = False

    @property
    def shown(self) -> str:
        """The flag with its value, as written, in one line."""
        return " ".join(f"{self.written} {self.value}".split())


@dataclass(frozen=True, slots=True)
class Given:
    """A command line taken apart: the options in effect, the rest of the environment, and notes on the others."""

    program: str
    options: dict[str, Option]
    environment: dict[str, str]
    notes: tuple[Note, ...]

    def value(self, name: str, default: str = "") -> str:
        """The value of a flag by its long name."""
        return self.options[name].value if name in self.options else default

    def has(self, name: str) -> bool:
        """Whether a flag is given, and not in its negated form."""
        return name in self.options and not self.options[name].negated

    def integer(self, name: str, default: int) -> int:
        """The value of a flag as a whole number. Raises `BadInput` when it is none."""
        return int(self._number(name, default, int))

    def real(self, name: str, default: float) -> float:
        """The value of a flag as a number. Raises `BadInput` when it is none."""
        return self._number(name, default, float)

    def _number(self, name: str, default: float, kind: type[int] | type[float]) -> float:
        if name not in self.options:
            return default
        try:
            return kind(self.options[name].value)
        except ValueError:
            raise BadInput(f"{self.options[name].shown}: that is no number; correct it") from None


def read(words: Words) -> Given:
    """Options of a command. Variables come first, so that flags win over them, as in llama.cpp.

    Raises `BadInput` when the last flag lacks its value.
    """
    notes: list[Note] = []
    environment: dict[str, str] = {}
    found: list[Option] = []
    for name, value in words.variables:
        if flag := table.variable(name):
            found.append(_of_variable(flag, name, value))
        else:
            environment[name] = value
            notes.append(_note_on_variable(name, value))
    found += _options(words.arguments, notes)

    options: dict[str, Option] = {}
    for option in found:
        if option.name == "--spec-type" and option.name in options:  # adds up, as in llama.cpp
            both = f"{options[option.name].value},{option.value}"
            option = Option(option.name, option.written, both)
        elif earlier := options.pop(option.name, None):
            notes.append(Note(earlier.shown, "irrelevant", f"{option.shown} comes later and wins"))
        options[option.name] = option
    return Given(words.program, options, environment, tuple(notes))


def _options(arguments: Sequence[str], notes: list[Note]) -> Iterator[Option]:
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = table.flag(name if equals and word.startswith("--") else word)
        if flag is None:
            strange = word.startswith("-")
            if strange and not equals and rest and not rest[0].startswith("-"):
                word += f" {rest.pop(0)}"
            why = (
                "llama.cpp has no such flag"
                if strange
                else "stands alone, where a flag was expected"
            )
            notes.append(Note(" ".join(word.split()), "not understood", why))
            continue
        written = name if equals else word
        if equals:
            rest.insert(0, value)
        if flag.name == "--flash-attn" and (not rest or rest[0] not in _FLASH_ATTN):
            rest.insert(0, "on")  # it took no value until 2025
        if len(rest) < flag.values:
            raise BadInput(f"{written} lacks its value; complete the line")
        yield _option(flag, written, " ".join(rest.pop(0) for _ in range(flag.values)))


def _option(flag: table.Flag, written: str, value: str) -> Option:
    today = table.RENAMED.get(flag.name, flag.name)
    return Option(today, written, value, flag.negated, renamed=bool(flag.removed))


def _of_variable(flag: table.Flag, name: str, value: str) -> Option:
    if flag.values:
        return _option(flag, name, value)
    negated = flag.negated or value.lower() not in _TRUE
    return Option(flag.name, f"{name}={value}", negated=negated)


def _note_on_variable(name: str, value: str) -> Note:
    if name.startswith(("GGML_", "LLAMA_", "CUDA_", "HIP_", "ROCR_", "OMP_", "VK_")):
        why = "may change what is computed; set it for the run too"
        return Note(f"{name}={value}", "not understood", why)
    return Note(f"{name}={value}", "irrelevant", "is no variable of llama.cpp")
