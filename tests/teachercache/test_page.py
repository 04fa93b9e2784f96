"""Elements that escape what they hold, and the page around them."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from teachercache.views.page import Number, markup, page, table, tag


class Page(HTMLParser):
    """Tags, attributes and visible text, as a browser would take them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


OURS = [
    "a",
    "b",
    "body",
    "br",
    "caption",
    "circle",
    "code",
    "dd",
    "details",
    "div",
    "dl",
    "dt",
    "em",
    "figcaption",
    "figure",
    "footer",
    "form",
    "h1",
    "h2",
    "h3",
    "head",
    "header",
    "html",
    "i",
    "input",
    "label",
    "li",
    "line",
    "link",
    "main",
    "meta",
    "output",
    "p",
    "polyline",
    "pre",
    "rect",
    "script",
    "section",
    "span",
    "style",
    "summary",
    "svg",
    "table",
    "tbody",
    "td",
    "text",
    "th",
    "thead",
    "title",
    "tr",
    "ul",
]


def assert_inert(text: str) -> None:
    page = Page(text)
    assert {name for name, _ in page.tags} <= set(OURS)
    assert sum(name == "script" for name, _ in page.tags) == 1
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on") or key == "src"]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "<script>alert(1)</script>" in "".join(page.words)  # shown as it is, and as text


def test_text_and_attributes_are_escaped_and_controls_are_shown():
    node = tag(
        "p", "<b>&", tag("i", "x"), "\x1b]\u202e\n", title='"><img src=x onerror=a>', class_="c", data_v=1, id=None
    )
    assert markup(node) == (
        r'<p title="&quot;&gt;<img src=x onerror=a&gt;" class="c" data-v="1">&lt;b&gt;&amp;<i>x</i>\x1b]\u202e'
        + "\n</p>"
    )
    ((name, attributes), *_) = Page(markup(node)).tags
    assert (name, attributes["title"]) == ("p", '"><img src=x onerror=a>')


def test_a_name_like_a_hole_of_the_template_is_only_shown():
    text = page("{{body}}{{script}}", [tag("p", "{{foot}}")], foot="{{title}}")
    assert text.count("<script") == text.count("<style") == 1
    assert "<h1>{{body}}{{script}}</h1>" in text
    assert "<p>{{foot}}</p>" in text


def test_the_policy_names_the_only_script_by_its_hash():
    text = page("t", [], foot="")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'" in text


def test_a_number_that_is_not_known_has_no_value_to_sort_by():
    cells = [
        attributes
        for name, attributes in Page(
            markup(table("t", ["a", "b"], [["x", Number(None)], ["y", Number(2.5, "two")]]))
        ).tags
        if name == "td"
    ]
    assert [cell.get("data-v") for cell in cells] == [None, None, None, "2.5"]
    assert [cell.get("class") for cell in cells] == [None, "n", None, "n"]
