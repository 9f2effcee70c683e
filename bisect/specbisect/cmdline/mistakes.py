"""Mistakes that people make with llama.cpp's speculation flags, each found by one small function.

Limits are those of llama.cpp's common/speculative.cpp and common/ngram-map.cpp; defaults those of common/common.h.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specbisect.cell import AXES
from specbisect.cmdline.given import Given

Types = tuple[str, ...]
Settings = Mapping[str, Any]

SURE = 0.95
"""From this p_min on, hardly any draft token is probable enough."""
MANY_HITS = 3
"""An n-gram seldom comes more often than this before the answer ends."""

NEUTRAL = {
    "--temp": 0.0,
    "--repeat-penalty": 1.0,
    "--presence-penalty": 0.0,
    "--frequency-penalty": 0.0,
    "--dry-multiplier": 0.0,
    "--mirostat": 0.0,
    "--xtc-probability": 0.0,
    "--dynatemp-range": 0.0,
}
"""Sampling flags, and the value at which each leaves greedy decoding alone."""

_DEFAULT_N_MAX = {
    "ngram-simple": ("--spec-ngram-simple-size-m", 48),
    "ngram-map-k": ("--spec-ngram-map-k-size-m", 48),
    "ngram-map-k4v": ("--spec-ngram-map-k4v-size-m", 48),
    "ngram-mod": ("--spec-ngram-mod-n-max", 64),
}
_CACHE_N_MAX = 8  # create_state_ngram_cache


def longest_draft(given: Given, spec_type: str) -> int:
    """Most tokens the method drafts at once."""
    if spec_type == "ngram-cache":
        return _CACHE_N_MAX
    return given.integer(*_DEFAULT_N_MAX.get(spec_type, ("--spec-draft-n-max", 3)))


def find(given: Given, types: Types, settings: Settings) -> Iterator[str]:
    """What is likely to be a mistake, one sentence each."""
    for rule in RULES:
        yield from rule(given, types, settings)


def never_engaged(given: Given, types: Types, _: Settings) -> Iterator[str]:
    """``-md`` alone loads a draft model and never uses it."""
    model = given.value("--spec-draft-model") or given.value("--spec-draft-hf")
    if model and not types:
        yield (
            "a draft model without --spec-type is loaded and never drafts; "
            "add --spec-type draft-simple to speculate with it"
        )
    if not model and "draft-simple" in types:
        yield "draft-simple without -md has nothing to draft with; llama-server goes on without it"
    if not model and not types and any(name.startswith("--spec-draft-n") for name in given.options):
        yield "draft lengths are given, but no drafter: add -md and --spec-type"


def not_greedy(given: Given, _: Types, __: Settings) -> Iterator[str]:
    """Sampling that is left on makes two runs differ by itself."""
    for name, neutral in NEUTRAL.items():
        if name in given.options and given.real(name, neutral) != neutral:
            yield (
                f"{given.options[name].shown} is left on; both arms decode greedily here ({name} "
                f"{neutral:g}), so a difference that comes from it will not show"
            )
    if given.program != "llama-server" and "--temp" not in given.options:
        yield f"{given.program} samples unless --temp 0 is given; both arms decode greedily here"


def automatic_slots(given: Given, _: Types, settings: Settings) -> Iterator[str]:
    """llama-server makes several slots when it is not told how many."""
    if given.program == "llama-server" and "n_parallel" not in settings:
        yield (
            "-np is not given: llama-server makes 4 slots with a unified KV buffer by itself; "
            "one slot is used here, give -np for another number"
        )


def too_strict(given: Given, types: Types, settings: Settings) -> Iterator[str]:
    """Minimums that keep the drafter silent."""
    n_predict = settings.get("n_predict", AXES["n_predict"].default)
    if any(kind.startswith("draft-") for kind in types):
        p_min = given.real("--spec-draft-p-min", 0.0)
        if p_min >= SURE:
            yield f"--spec-draft-p-min {p_min:g} is so high that hardly anything is drafted; lower it"
        n_min, n_max = given.integer("--spec-draft-n-min", 0), longest_draft(given, "draft-simple")
        if n_min > n_max:
            yield f"--spec-draft-n-min {n_min} is above the longest draft of {n_max}: nothing is drafted"
    if "ngram-simple" in types:
        n = given.integer("--spec-ngram-simple-size-n", 12)
        m = longest_draft(given, "ngram-simple")
        if m < n:
            yield (
                f"ngram-simple drafts no continuation shorter than its n-gram, and size-m {m} is below "
                f"size-n {n}: nothing is drafted"
            )
    if "ngram-mod" in types:
        n_min = given.integer("--spec-ngram-mod-n-min", 48)
        if n_min >= n_predict:
            yield (
                f"ngram-mod drafts no fewer than {n_min} tokens, and {n_predict} are generated: "
                "nothing is drafted; lower --spec-ngram-mod-n-min or raise -n"
            )
    hits = given.integer(
        "--spec-ngram-map-k4v-min-hits", 1
    )  # the other methods read theirs and do not use it
    if "ngram-map-k4v" in types and hits > MANY_HITS:
        yield f"--spec-ngram-map-k4v-min-hits {hits} is so high that hardly anything is drafted; lower it"


def rendered_prompt(given: Given, _: Types, __: Settings) -> Iterator[str]:
    """A terminal program puts the prompt into the chat template; a raw completion does not."""
    conversation = given.options.get("--conversation")
    off = conversation is not None and conversation.negated
    if given.program in ("llama-cli", "llama-completion") and given.has("--prompt") and not off:
        yield (
            f"{given.program} puts the prompt into the model's chat template unless -no-cnv is given; "
            "it is used as it stands here, so give the rendered prompt"
        )


def invalid_output(given: Given, _: Types, __: Settings) -> Iterator[str]:
    """Synthetic acceptance is for measuring speed."""
    if "--spec-synth-len" in given.options or "--spec-synth-rates" in given.options:
        yield "synthetic acceptance takes draft tokens at random: its output differs by design"


def removed_names(given: Given, _: Types, __: Settings) -> Iterator[str]:
    """Names that today's llama.cpp refuses."""
    for option in given.options.values():
        if option.renamed:
            yield f"today's llama.cpp refuses {option.written}; it is taken as {option.name}"


RULES: tuple[Callable[[Given, Types, Settings], Iterator[str]], ...] = (
    never_engaged,
    not_greedy,
    automatic_slots,
    too_strict,
    rendered_prompt,
    invalid_output,
    removed_names,
)
