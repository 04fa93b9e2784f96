"""Every stock chat template that this machine has × conversations of every kind: no wrong token is learnt.

    python -m tests.pipeline.corpus.test_stock_templates         prints the table of docs/TRAINING.md

Templates are looked up in what is installed (trl, vllm, transformers) and in build/templates, where
scripts/fetch_templates.py puts those of llama.cpp. Checks are naive: words that occur once tell whose text is learnt.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import re
import sys
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.corpus.documents import Dropped
from pipeline.corpus.encode import mask_of_spans
from pipeline.corpus.templates import ChatTemplate, special_pattern
from tests.pipeline.conftest import ROOT, make_tokenizer

pytestmark = pytest.mark.slow
FETCHED = ROOT / "build" / "templates"
PAGE = ROOT / "docs" / "TRAINING.md"
# tokens that a model of such a template would have as special ones
SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"{}]{1,40}?[|｜]>|</?s>|<\w{3,5}_of_\w+>|<turn\|>|<\|turn>|<\|?tool_\w+\|?>|<\|?channel\|?>|"
    r"<SPECIAL_\d+>|<seed:\w+>|\[/?[A-Z_]{3,}\]|\[e~\[|\]~b\]|<sep>|</assistant>"
)


def _call(name: str, arguments: dict[str, Any], identity: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(name: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": "what"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": "does it", "parameters": parameters}}


def _turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _thought(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "thinking": text}


TOOLS = [_tool("addup", "term"), _tool("getday", "city")]
ADD, DAY = _call("addup", {"term": "XX1"}, "abcdefghi"), _call("getday", {"city": "XX2"}, "bcdefghij")
ASK, REPLY, ASK2, REPLY2 = (
    _turn("user", "QQ1 eh?"), _turn("assistant", "AA1 yes."), _turn("user", "QQ2 oh?"), _turn("assistant", "AA2 no."),
)  # fmt: skip
RESULT = _turn("tool", "RR1 was it.", tool_call_id="abcdefghi", name="addup")
RESULT2 = _turn("tool", "RR2 was it.", tool_call_id="bcdefghij", name="getday")
CALLING = _turn("assistant", "", tool_calls=[ADD])
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [ASK, REPLY],
    "two questions": [ASK, REPLY, ASK2, REPLY2],
    "system": [_turn("system", "SS1 brief."), ASK, REPLY],
    "opens": [_turn("assistant", "AA0 welcome."), ASK, REPLY],
    "in a row": [ASK, REPLY, REPLY2],
    "begins with <": [ASK, _turn("assistant", "<AA1>yes</AA1>"), ASK2, _turn("assistant", "<AA2")],
    "begins with Here": [ASK, _turn("assistant", "Here AA1."), ASK2, _turn("assistant", "Hello AA2.")],
    "begins with a line break": [ASK, _turn("assistant", "\nAA1 yes."), ASK2, _turn("assistant", "\nAA2 no.")],
    "blanks around": [ASK, _turn("assistant", "  AA1 yes. "), ASK2, _turn("assistant", " AA2 no.\n\n")],
    "other scripts": [_turn("user", "QQ1 ¿ñ?"), _turn("assistant", "AA1 é🙂ﬁ."), ASK2, _turn("assistant", "AA2 Ωж")],
    "call": [ASK, CALLING, RESULT, REPLY],
    "call, then a question": [ASK, CALLING, RESULT, REPLY, ASK2, REPLY2],
    "words and a call": [ASK, _turn("assistant", "AA0 let me see.", tool_calls=[ADD]), RESULT, REPLY],
    "two calls": [ASK, CALLING, RESULT, _turn("assistant", "", tool_calls=[DAY]), RESULT2, REPLY],
    "parallel calls": [ASK, _turn("assistant", "", tool_calls=[ADD, DAY]), RESULT, RESULT2, REPLY],
    "ends with a call": [ASK, CALLING],
    "thoughts": [ASK, REPLY | _thought("HH1 why."), ASK2, REPLY2 | _thought("HH2 why.")],
    "thoughts and a call": [ASK, CALLING | _thought("HH1 why."), RESULT, REPLY | _thought("HH2 why.")],
}
# What one template family does, seen and judged right: GLM's models stop at the header of what comes next, and TRL's
# template for their training marks that token as the assistant's.
STOPS_AT_A_HEADER = "trl/glm4moe_training"
HEADER_BEHIND_AN_END = re.compile(
    r"(<\|im_end\|>|<\|eot_id\|>|<｜end▁of▁sentence｜>|</s>|<eos>)\s*<[^<>]*assistant", re.I
)
TOOL_MARK_AT_THE_END = "<|tool_response>"  # Gemma 4 stops a call that has no result yet at this token


@lru_cache(maxsize=1)
def found() -> dict[str, str]:
    """Return the templates of this machine by `package/name`, each text once."""
    places: list[tuple[str, Path]] = []
    for package in ("trl", "vllm", "transformers"):
        spec = importlib.util.find_spec(package)
        places += [(package, Path(place)) for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    places.append(("llama.cpp", FETCHED))
    texts: dict[str, str] = {}
    for package, folder in places:
        for path in sorted(folder.rglob("*.jinja")):
            text = path.read_text(encoding="utf-8")
            if "messages" in text:
                texts.setdefault(text, f"{package}/{path.stem}")
    return {name: text for text, name in texts.items()}


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """Return a byte-level tokenizer with the special tokens of all these templates."""
    from transformers import AutoTokenizer

    folder = make_tokenizer(Path(tempfile.mkdtemp()) / "bytes")
    made = AutoTokenizer.from_pretrained(str(folder))
    tokens = {token for text in found().values() for token in SPECIAL.findall(text)}
    made.add_special_tokens({"extra_special_tokens": sorted(tokens)})
    return made


@lru_cache(maxsize=1)
def special() -> re.Pattern[str]:
    return special_pattern(token.content for token in tokenizer().added_tokens_decoder.values() if token.special)


class Pair:
    """One template and one conversation: what became of it, and what is wrong with it."""

    def __init__(self, template: str, chat: ChatTemplate, name: str) -> None:
        self.template = template
        messages = copy.deepcopy(CONVERSATIONS[name])
        tools = copy.deepcopy(TOOLS) if "call" in name else None
        self.messages, self.wrong, self.learnt, self.renders = messages, "", "", False
        try:
            if chat.habits(tools).needs_parts:  # as this template's users would write it
                for message in messages:
                    message["content"] = [{"type": "text", "text": message["content"]}]
            self.plain = chat.render(messages, tools)
            self.renders = all(word in self.plain for word in self.words("assistant"))
        except Dropped:
            self.outcome = "refused"
            return
        try:
            made = chat.spans(copy.deepcopy(CONVERSATIONS[name]), tools)
        except Dropped as drop:
            self.outcome = drop.reason
            return
        self.outcome = "learnt"
        encoding = tokenizer().backend_tokenizer.encode(made.text, add_special_tokens=False)
        learn = mask_of_spans(np.asarray(encoding.offsets, dtype=np.int64), made.spans)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], learn, [False]]).astype(int))).reshape(-1, 2)
        self.runs = [made.text[encoding.offsets[a][0] : encoding.offsets[b - 1][1]] for a, b in edges]
        self.learnt = "".join(self.runs)
        self.wrong = self.judge(made.text, chat, tools)

    def words(self, *roles: str) -> list[str]:
        """Return the words of messages of these roles that occur once, the names of calls among them."""
        chosen = json.dumps([m for m in self.messages if m["role"] in roles])
        return re.findall(r"[QASR]{2}\d", chosen) + re.findall(r'"name": "(addup|getday)", "arguments', chosen)

    def judge(self, text: str, chat: ChatTemplate, tools: Any) -> str:
        """Return what is wrong with the text or with what is learnt of it."""
        if text != self.plain:
            return f"another text than apply_chat_template's: {text!r}"
        foreign = [word for word in self.words("user", "tool", "system") if word in self.learnt]
        lost = [word for word in self.words("assistant") if word not in self.learnt]
        if foreign or lost:
            return f"learnt of others {foreign}, lost {lost}"
        kept = self.learnt.removesuffix(TOOL_MARK_AT_THE_END) if self.messages[-1].get("tool_calls") else self.learnt
        others = re.search(
            r"\buser\b(?!<\|message)|ipython|observation|tool_response|tool_result|tool▁output|<result", kept
        )
        if others and self.template != STOPS_AT_A_HEADER:
            return f"learnt the header of another message: {others[0]}"
        for run in self.runs:
            behind = max((m.end() for m in re.finditer(r"[AHX]{2}\d", run)), default=0)
            if re.search(r"(?<!/)assistant", run[behind:], re.IGNORECASE) or HEADER_BEHIND_AN_END.search(run):
                return f"learnt the header of an answer: {run!r}"
        # the last answer begins where a generation prompt ends, if the text has all of that prompt
        if len(self.messages) == 2 and not self.messages[-1].get("tool_calls"):
            before = chat.render(self.messages[:1], tools, True)
            start = text.index(self.runs[0], len(text) - len(self.runs[0]) - 20 if len(self.runs) > 1 else 0)
            if text.startswith(before) and len(before) <= text.index("AA1") and start != len(before):
                return f"begins at {start}, the generation prompt ends at {len(before)}"
        for turn, run in zip((m for m in self.messages if m["role"] == "assistant"), self.runs, strict=False):
            words = (
                "".join(p["text"] for p in turn["content"]) if isinstance(turn["content"], list) else turn["content"]
            )
            if words.strip() and words.strip() not in self.learnt:
                return f"{words!r} is not learnt as a whole: {run!r}"
        return ""


@lru_cache(maxsize=1)
def pairs() -> dict[tuple[str, str], Pair]:
    result = {}
    for name, text in found().items():
        chat = ChatTemplate(tokenizer(), text, {}, special())
        result |= {(name, kind): Pair(name, chat, kind) for kind in CONVERSATIONS}
    return result


def test_at_least_fifty_templates_are_here(capsys):
    count = Counter(name.split("/")[0] for name in found())
    kept = Counter(pair.outcome for pair in pairs().values())
    with capsys.disabled():
        print(f"\n{len(found())} stock templates ({', '.join(f'{p} {n}' for p, n in count.items())}) ×", end=" ")
        print(f"{len(CONVERSATIONS)} conversations: {', '.join(f'{k} {n}' for k, n in kept.most_common())}")
        if not FETCHED.is_dir():
            print("without those of llama.cpp: run `python scripts/fetch_templates.py` to have them")
    assert len(found()) >= 50


def test_no_wrong_token_is_learnt():
    wrong = {f"{name}, {kind}": pair.wrong for (name, kind), pair in pairs().items() if pair.wrong}
    assert not wrong, json.dumps(wrong, indent=1)


def test_what_a_template_renders_is_kept(capsys):
    rendered = [pair for pair in pairs().values() if pair.renders]
    kept = [pair for pair in rendered if pair.outcome == "learnt"]
    with capsys.disabled():
        share = f"{len(kept) / len(rendered):.1%}"
        print(f"\n{len(kept)} of {len(rendered)} pairs with all answers and calls in the rendering are kept: {share}")
    assert len(kept) >= 0.95 * len(rendered)
    known = {"learnt", "refused", "template_drops_call", "template_drops_turn", "template_mixes_turns"}
    assert {pair.outcome for pair in pairs().values()} <= known


GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def test_templates_that_mark_the_answers_themselves_agree():
    """What transformers finds by `{% generation %}` holds all that is learnt; it adds headers and blanks, no words."""
    from transformers.utils.chat_template_utils import render_jinja_template

    marking = {name: text for name, text in found().items() if GENERATION.search(text)}
    checked = 0
    for name, text in marking.items():
        for kind in ("plain", "two questions", "call, then a question"):
            pair = pairs()[name, kind]
            if pair.outcome != "learnt":
                continue
            rendered, spans = render_jinja_template(
                [copy.deepcopy(pair.messages)],
                tools=TOOLS if "call" in kind else None,
                chat_template=text,
                return_assistant_tokens_mask=True,
                **tokenizer().special_tokens_map,
            )
            theirs = "".join(rendered[0][a:b] for a, b in spans[0])
            if theirs:  # a template may mark its blocks in a branch that is not taken
                assert sorted(re.findall(r"AA\d", theirs)) == sorted(re.findall(r"AA\d", pair.learnt)), (name, kind)
                assert len(pair.learnt) <= len(theirs), (name, kind, pair.learnt, theirs)
                checked += 1
    assert checked >= 20


# -- the table of docs/TRAINING.md -------------------------------------------------------------------------------------

ANSWERS = ("plain", "two questions", "begins with <", "begins with Here", "begins with a line break")
CALLS = ("call", "two calls", "parallel calls")


def outcome(outcomes: set[str]) -> str:
    said = {
        "template_drops_call": "not printed",
        "template_drops_turn": "not printed",
        "template_mixes_turns": "unclear",
    }
    return " / ".join(sorted({said.get(o, o) for o in outcomes}))


def families() -> dict[str, list[str]]:
    """Return the names of trl's templates, without those for its own training, by family."""
    names = sorted(n for n in found() if n.startswith("trl/") and not n.endswith("_training"))
    result: dict[str, list[str]] = {}
    for name in names:
        family = re.sub(
            r"(_v\d+|_think|_nothink|_instruct_2507|_distill|_vl|_super|_ultra|_nano|_lightning)+$", "", name[4:]
        )
        result.setdefault(family, []).append(name)
    return result


def table() -> str:
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for family, names in families().items():
        of = {kind: {pairs()[name, kind].outcome for name in names} for kind in CONVERSATIONS}
        thoughts = [pairs()[name, "thoughts"] for name in names if pairs()[name, "thoughts"].outcome == "learnt"]
        printed = {
            ("all" if "HH1" in p.learnt else "last turn" if "HH2" in p.learnt else "not printed") for p in thoughts
        }
        key = (
            outcome(set().union(*(of[kind] for kind in ANSWERS))),
            outcome(set().union(*(of[kind] for kind in CALLS))),
            outcome(of["words and a call"]),
            " / ".join(sorted(printed)) or "refused",
        )
        rows.setdefault(key, []).append(family)
    lines = [
        "| templates | answers | calls | words with a call | thoughts |",
        "|---|---|---|---|---|",
        *(f"| {', '.join(names)} | {' | '.join(key)} |" for key, names in sorted(rows.items(), key=lambda r: r[1])),
    ]
    return "\n".join(lines)


def test_the_table_of_the_manual_agrees():
    page = PAGE.read_text(encoding="utf-8")
    version = importlib.metadata.version("trl")
    if f"trl {version}" not in page:
        pytest.skip(f"docs/TRAINING.md has the table of another release of trl than {version}")
    assert table() in page, table()


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
