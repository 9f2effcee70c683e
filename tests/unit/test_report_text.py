"""Text that wants out of where it is shown."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import hostile
from specbisect.diagnose.percentile import ordinal, percentile_of
from specbisect.report import render, text


def fence_of(block: str) -> tuple[str, list[str]]:
    """The fence of a code block, and the lines inside."""
    first, *inside, last = block.split("\n")
    assert first.removesuffix("text") == last
    return last, inside


@given(st.text(st.characters()))
def test_nothing_that_is_shown_is_invisible(found: str) -> None:
    shown = text.visible(found, keep="\n\t")
    shown.encode()
    assert all(c in "\n\t" or c.isprintable() for c in shown)


@given(st.text(st.characters()))
def test_no_line_inside_ends_a_code_block(found: str) -> None:
    fence, inside = fence_of(text.fenced(found))
    assert not any(line.strip().startswith(fence) for line in inside)


@given(st.lists(st.text(st.characters(), max_size=20), min_size=3, max_size=3))
def test_a_row_of_a_table_is_one_line_with_its_cells(cells: list[str]) -> None:
    *_, row = text.table(["a", "b", "c"], [cells]).split("\n")
    assert text.table(["a", "b", "c"], [cells]).count("\n") == 2
    assert len(re.findall(r"(?<!\\)\|", row)) == 4


@given(st.text(st.characters(), min_size=1))
def test_inline_code_is_one_span_on_one_line(found: str) -> None:
    shown = text.code(found)
    assert "\n" not in shown
    if shown.startswith("`"):
        assert shown.count("`") == 2
        assert "|" not in shown
    else:
        body = shown.removeprefix("<code>").removesuffix("</code>")
        assert not set(body) & set("`|<>*_[]\\@$~")


@given(st.text(st.characters()))
def test_an_escaped_text_has_no_tag_and_no_code(found: str) -> None:
    shown = text.escape(found)
    assert not re.search(r"<(?!/?span>)", shown)
    assert not re.search(r"(?<!\\)`", re.sub(r"\\\\", "", shown))
    assert not re.search(r"(?<!>)@(?=\w)", shown)


class Tags(HTMLParser):
    """Names of the elements in a text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@hostile
def test_html_shows_it_as_text(found: str) -> None:
    page = render.html().from_string("<p title='{{ t }}'>{{ t }}</p>").render(t=found)
    page.encode()
    assert Tags(page).names == ["p"]
    assert Tags(page).text == text.visible(found, keep="\n\t")


@hostile
def test_a_comment_of_a_script_stays_one(found: str) -> None:
    shown = text.comment(found)
    source = f'"""{shown} """  # {shown}\nanswer = 42'
    names: dict[str, object] = {}
    exec(compile(source, "script", "exec"), names)
    assert names["answer"] == 42


def test_markdown_that_is_made_here_is_left_alone() -> None:
    assert text.escape(text.code("a_b")) == "`a_b`"
    assert text.escape("n_ubatch = 8") == "n_ubatch = 8"
    assert text.escape("*") == "\\*"


def test_bytes_of_half_a_character_are_written_out() -> None:
    assert text.piece("\xe2\x82") == "\\xe2\\x82"
    assert text.piece("\xe2\x82\xac") == "€"


def test_what_is_left_out_in_the_middle_is_counted() -> None:
    shown, left_out = text.shortened("a" * 60 + "b" * 60, 20)
    assert left_out == 100
    assert shown.startswith("a" * 10)
    assert shown.endswith("b" * 10)
    assert text.shortened("short", 20) == ("short", 0)


def test_tensors_of_several_layers_are_one_name() -> None:
    names = [f"blk.{n}.ffn_up.weight" for n in (0, 1, 2, 7)]
    assert text.ranges([*names, "blk.3.attn_k.weight", "output.weight"]) == (
        "blk.{0-2,7}.ffn_up.weight, blk.3.attn_k.weight, output.weight"
    )


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (0, "0th"),
        (1.7, "2nd"),
        (3.1, "3rd"),
        (11, "11th"),
        (12, "12th"),
        (21, "21st"),
        (100, "100th"),
    ],
)
def test_a_percentile_is_an_ordinal(at: float, expected: str) -> None:
    assert ordinal(at) == expected


def test_a_percentile_counts_what_is_as_large() -> None:
    assert percentile_of(2.0, (1.0, 2.0, 2.0, 5.0)) == 75.0
