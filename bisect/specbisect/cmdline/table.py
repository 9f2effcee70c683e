"""Every flag of llama.cpp: how many values it takes, what else sets it, and why some make no difference here.

``flags.json`` is read from llama.cpp's common/arg.cpp by scripts/flag_table.py. Flags that older versions had are
added here, for they stand in old reports.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag under one of its names. `name` is its long name; `removed` is what llama.cpp says to use instead."""

    name: str
    values: int
    negated: bool = False
    removed: str = ""


LEGACY: tuple[Mapping[str, Any], ...] = (
    {"names": ["-cd", "--ctx-size-draft"], "values": 1, "env": "LLAMA_ARG_CTX_SIZE_DRAFT"},
    {"names": ["--mlock"], "values": 0, "env": "LLAMA_ARG_MLOCK"},
    {"names": ["--mmap"], "values": 0, "negated": ["--no-mmap"], "env": "LLAMA_ARG_MMAP"},
    {"names": ["-dio", "--direct-io"], "values": 0, "negated": ["-ndio", "--no-direct-io"]},
    {"names": ["--spec-replace"], "values": 2},
    {"names": ["--spec-use-checkpoints"], "values": 1},
    {"names": ["-ld", "--logdir"], "values": 1},
    {"names": ["--log-new"], "values": 0},
    {"names": ["--log-append"], "values": 0},
    {"names": ["--tfs"], "values": 1},
    {"names": ["--penalize-nl"], "values": 0, "negated": ["--no-penalize-nl"]},
    {"names": ["-cml", "--chatml"], "values": 0},
    {"names": ["--nobrowser"], "values": 0},
)

RENAMED: Mapping[str, str] = {
    "--draft": "--spec-draft-n-max",
    "--draft-min": "--spec-draft-n-min",
    "--spec-ngram-size-n": "--spec-ngram-simple-size-n",
    "--spec-ngram-size-m": "--spec-ngram-simple-size-m",
    "--spec-ngram-min-hits": "--spec-ngram-simple-min-hits",
}
"""Flags that llama.cpp once had, under the names of what they meant."""

_IRRELEVANT: Mapping[str, str] = {
    "serves requests; changes no token": """
        --host --port --reuse-port --path --api-prefix --cors-origins --cors-methods --cors-headers
        --cors-credentials --ui --ui-config --ui-config-file --ui-mcp-proxy --tools --tools-runtime
        --mcp-servers-config --mcp-servers-json --agent --api-key --api-key-file --ssl-key-file --ssl-cert-file
        --timeout --sse-ping-interval --threads-http --metrics --props --slots --slot-save-path --media-path
        --models-dir --models-preset --models-max --models-autoload --alias --tags --sleep-idle-seconds
        --server-base --nobrowser""",
    "writes a log": """
        --log-disable --log-file --log-jsonl --log-prompts-dir --log-colors --log-prefix --log-timestamps --verbose
        --verbosity --verbose-prompt --log-new --log-append --logdir""",
    "shows or reads text on a terminal": """
        --color --simple-io --display-prompt --perf --show-timings --print-token-count --multiline-input
        --interactive --interactive-first --single-turn --in-prefix --in-suffix --in-prefix-bos --special
        --help --version --cache-list --completion-bash --list-devices""",
    "fetches a file; files are given by path": "--offline --hf-token --docker-repo",
    "says how a file is read, not what is in it": """
        --load-mode --lazy-mode --mlock --mmap --direct-io --check-tensors""",
    "places threads; the arithmetic is the same": """
        --cpu-mask --cpu-range --cpu-strict --prio --poll --cpu-mask-batch --cpu-range-batch --cpu-strict-batch
        --prio-batch --poll-batch --numa""",
    "places the draft model, which decides what is proposed and not what is right": """
        --spec-draft-threads --spec-draft-threads-batch --spec-draft-cpu-mask --spec-draft-cpu-range
        --spec-draft-cpu-strict --spec-draft-prio --spec-draft-poll --spec-draft-cpu-mask-batch
        --spec-draft-cpu-range-batch --spec-draft-cpu-strict-batch --spec-draft-prio-batch
        --spec-draft-poll-batch --spec-draft-ngl --spec-draft-device --spec-draft-override-tensor
        --spec-draft-cpu-moe --spec-draft-n-cpu-moe --spec-draft-backend-sampling --ctx-size-draft""",
    "belongs to drafting in trees, which is not done here": "--spec-draft-p-split",
    "renders chats; prompts are compared as token ids": """
        --jinja --chat-template --chat-template-file --chat-template-kwargs --skip-chat-parsing --prefill-assistant
        --reasoning-format --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message
        --reasoning-preserve --conversation --chatml""",
    "shapes sampling; both arms decode greedily": """
        --samplers --sampler-seq --temp --top-k --top-p --min-p --top-nsigma --xtc-probability --xtc-threshold
        --typical --repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier
        --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target
        --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent
        --backend-sampling --tfs --penalize-nl""",
    "matters only from one request to the next, and a case begins with an empty memory": """
        --cache-reuse --cache-ram --cache-idle-slots --ctx-checkpoints --checkpoint-min-step
        --slot-prompt-similarity --prompt-cache --prompt-cache-all --prompt-cache-ro""",
    "matters only beyond the end of the context, where a case ends": "--context-shift --keep --defrag-thold",
    "warms up, or fits settings into memory; they are taken as they stand": """
        --warmup --fit --fit-print --fit-target --fit-ctx""",
    "fills free slots; a case has the slots it asks for": "--cont-batching",
}
IRRELEVANT: Mapping[str, str] = {
    name: reason for reason, names in _IRRELEVANT.items() for name in names.split()
}
"""Why a flag makes no difference to what is compared, by its long name."""


def _long(names: list[str]) -> str:
    return next((name for name in names if name.startswith("--")), names[0])


@functools.cache
def _flags() -> tuple[dict[str, Flag], dict[str, Flag]]:
    """Flags by every name, and by every environment variable."""
    by_name: dict[str, Flag] = {}
    by_variable: dict[str, Flag] = {}
    shipped = json.loads(files(__package__).joinpath("flags.json").read_text())
    for entry in (*shipped, *LEGACY):
        name = _long(entry["names"])
        flag = Flag(name, entry["values"], removed=entry.get("removed", ""))
        against = Flag(name, 0, negated=True)
        by_name.update(dict.fromkeys(entry["names"], flag))
        by_name.update(dict.fromkeys(entry.get("negated", ()), against))
        if variable := entry.get("env"):
            by_variable[variable] = flag
            if "negated" in entry:
                by_variable[variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")] = against
    return by_name, by_variable


def flag(word: str) -> Flag | None:
    """The flag of that name; underscores stand for hyphens in long names, as in llama.cpp."""
    name = word.replace("_", "-") if word.startswith("--") else word
    return _flags()[0].get(name)


def variable(name: str) -> Flag | None:
    """The flag that an environment variable sets."""
    return _flags()[1].get(name)
