"""Texts that want out of where they are shown."""

import pytest

HOSTILE = (
    "```\n</details>\n```",
    "`a` | ``b`` | |c|",
    "</code></details><script>alert(1)</script><!-- -->",
    "\x00\x1b[31mred\x07\r\nnext\x85line",
    "right \u202eto left\u202c \u200fmark \u2066isolate\u2069",
    "half \ud83d of a pair",
    "* _ [link](http://x) ![img](y) @someone #123 $x$ ~~no~~ \\",
    "\"\"\"\n''' \\N{BULLET} %s {} {{ }} {% raw %}",
    "x" * 100_000,
)
hostile = pytest.mark.parametrize("found", HOSTILE, ids=lambda t: repr(t[:12]))
