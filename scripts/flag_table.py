"""Every command-line flag of llama.cpp, read from its common/arg.cpp, as the table that specbisect.cmdline uses.

Usage: python scripts/flag_table.py LLAMA_CPP_DIRECTORY > bisect/specbisect/cmdline/flags.json
"""

import json
import re
import sys
from pathlib import Path

OPTION = "add_opt(common_arg("
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
HANDLER = re.compile(r"\[\]\((common_params &[^)]*)\)")


def names_in(braces: str) -> list[str]:
    return STRING.findall(braces)


def flag(block: str) -> dict[str, object]:
    """One ``add_opt`` block: its names, how many values they take, and what else sets the same thing."""
    positive = re.search(r"\{([^{}]*)\}", block)
    assert positive, block
    rest = block[positive.end() :].lstrip(", \n")
    handler = HANDLER.search(rest)
    assert handler, block
    values = [p for p in handler[1].split(",")[1:] if "bool" not in p]
    entry: dict[str, object] = {"names": names_in(positive[1]), "values": len(values)}
    if rest.startswith("{"):
        entry["negated"] = names_in(rest[: rest.index("}")])
    if env := re.search(r'set_env\("(\w+)"\)', block):
        entry["env"] = env[1]
    if removed := re.search(r'arg_removed\("([^"]*)"\)', block):
        entry["removed"] = removed[1]
    return entry


def main(source: Path) -> None:
    blocks = source.joinpath("common", "arg.cpp").read_text().split(OPTION)[1:]
    flags: dict[tuple[str, ...], dict[str, object]] = {}
    for block in blocks:
        entry = flag(block)
        flags.setdefault(tuple(entry["names"]), entry)  # type: ignore[arg-type]
    lines = ",\n".join(json.dumps(entry) for entry in flags.values())
    print(f"[\n{lines}\n]")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
