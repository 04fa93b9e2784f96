"""HTML pages without a template engine: elements that escape what they hold, one style sheet, one script, no network.

`tag` builds `xml.etree` elements, so text and attributes are escaped where they are written out, and no string is ever
taken for markup. The page's policy names the script by its hash: nothing else runs, wherever it came from.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from teachercache.console import printable


class Number(NamedTuple):
    """A cell that sorts by its value; None sorts last and is shown as a dash."""

    value: float | None
    text: str = ""
    note: str = ""


Child = Element | str | None
Cell = Element | str | Number


def tag(name: str, *children: Child, **attributes: object) -> Element:
    """Return an element. `class_` is class, `data_v` is data-v; an attribute or child that is None is left out.

    Characters that control a terminal or the order of letters are shown as `printable` shows them.
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    node = Element(name, {key: printable(str(value)) for key, value in named.items()})
    for child in children:
        if isinstance(child, Element):
            node.append(child)
        elif child is not None and len(node):
            node[-1].tail = (node[-1].tail or "") + printable(child)
        elif child is not None:
            node.text = (node.text or "") + printable(child)
    return node


def page(title: str, parts: Iterable[Element | None], *, foot: str, back: str | None = None) -> str:
    """Return a whole page; `back` is the address of the catalog that it belongs to."""
    folder = resources.files("teachercache").joinpath("templates")
    script = folder.joinpath("page.js").read_text(encoding="utf-8")
    holes = {
        "title": markup(tag("title", title)),
        "policy": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": folder.joinpath("page.css").read_text(encoding="utf-8"),
        "back": markup(tag("a", "‹ all caches", href=back)) if back else "",
        "heading": markup(tag("h1", title)),
        "body": "\n".join(markup(part) for part in parts if part is not None),
        "foot": markup(tag("footer", foot)),
        "script": script,
    }
    template = folder.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: holes[hole[1]], template)  # in one pass: a name may hold {{body}}


def markup(node: Element) -> str:
    """Return an element as HTML."""
    return ElementTree.tostring(node, encoding="unicode", method="html")


def section(title: str, *children: Child, id_: str | None = None) -> Element:
    """Return a card with a heading."""
    return tag("section", tag("h2", title), *children, id=id_)


def folded(title: str, *children: Child) -> Element:
    """Return a card that opens on demand."""
    return tag("details", tag("summary", tag("h2", title)), *children, class_="card")


def tiles(items: Iterable[tuple[str, str]]) -> Element:
    """Return large numbers over their names."""
    return tag("div", *(tag("div", tag("b", value), tag("span", name)) for name, value in items), class_="tiles")


def code(title: str, text: str) -> Element:
    """Return text to copy under a small title."""
    return tag("figure", tag("figcaption", title), tag("pre", text, tabindex=0, class_="copy"), class_="code")


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Element:
    """Return a table that sorts by a click or a key; on a phone each row is a card. `caption` is for screen readers."""
    numbers = [any(isinstance(row[i], Number) for row in rows) for i in range(len(head))]
    kinds = ["n" if number else None for number in numbers]
    top = [tag("th", name, scope="col", class_=kind) for name, kind in zip(head, kinds, strict=True)]
    body = [tag("tr", *map(_cell, row, head, kinds)) for row in rows]
    inner = tag("table", tag("caption", caption), tag("thead", tag("tr", *top)), tag("tbody", *body))
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _cell(cell: Cell, name: str, kind: str | None) -> Element:
    if not isinstance(cell, Number):
        return tag("td", cell, data_label=name, class_=kind)
    text = "–" if cell.value is None else cell.text or f"{cell.value:,.0f}"
    shown = tag("div", text, tag("span", cell.note, class_="note")) if cell.note else text
    return tag("td", shown, data_label=name, data_v=None if cell.value is None else repr(cell.value), class_=kind)


def facts(items: Iterable[tuple[str, Child]]) -> Element:
    """Return names and what they are, one pair a line."""
    pairs = (node for name, value in items for node in (tag("dt", name), tag("dd", value)))
    return tag("dl", *pairs)


def bars(items: Sequence[tuple[str, float, str]]) -> Element:
    """Return (name, size, label) as horizontal bars."""
    longest = max(size for _, size, _ in items) or 1
    cells = []
    for name, size, label in items:
        cells += [tag("span", name), tag("div", tag("i", style=f"width:{100 * size / longest:.1f}%")), tag("em", label)]
    return tag("div", *cells, class_="bars")
