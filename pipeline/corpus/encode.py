"""Documents → windows of token ids with row positions and loss masks: exactly what the teacher will see."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pipeline.config import JobConfig
from pipeline.corpus.documents import Document, Dropped
from pipeline.corpus.templates import ChatTemplate, special_pattern
from pipeline.corpus.windows import context_of, spans
from teachercache import TokenizerSpec, fingerprint_tokenizer
from teachercache.errors import UsageError

ENDS_WITH_ASSISTANT = "ends_with_assistant"  # why a conversation cannot be continued in generate mode


@dataclass(slots=True)
class Window:
    """One input of the teacher.

    input_ids int32 [n]; row_pos int32 [r], ascending; loss_mask bool [r], about the token at row_pos + 1.
    start: offset of the first token in the document, an added BOS not counted.
    """

    doc_id: str
    window: int
    start: int
    source: str
    split: str
    input_ids: np.ndarray
    row_pos: np.ndarray
    loss_mask: np.ndarray
    ordinal: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Tokens:
    """A whole document in tokens: ids int32 [n] without an added BOS; learn bool [n], per token.

    unprinted: what of a conversation its template leaves out.
    """

    ids: np.ndarray
    learn: np.ndarray
    bos: bool
    unprinted: frozenset[str] = frozenset()


class Encoder:
    """Tokenises documents of one job. Thread-safe for reading; the Rust tokenizer releases the GIL."""

    def __init__(self, job: JobConfig, model_path: str | Path, spec: TokenizerSpec | None = None) -> None:
        self.job = job
        spec = spec or fingerprint_tokenizer(model_path)
        # two instances: whether markup is read as special tokens is a state, and shards of both kinds may overlap
        self.backend: Any = _load(model_path)
        self._text_backend: Any = _load(model_path)
        self._text_backend.encode_special_tokens = job.recipe.special_text == "as_text"
        self.bos_id, self.eos_id, self.vocab_size = spec.bos_id, spec.eos_id, spec.vocab_size
        added = self.backend.get_added_tokens_decoder().values()
        self._special = special_pattern(token.content for token in added if token.special)
        self.add_bos = self._decide_bos(Path(model_path))
        if job.recipe.eos and self.eos_id is None and any(c.fields.kind == "text" for c in job.corpora):
            raise UsageError(f"{model_path}: recipe.eos is true, the tokenizer has no EOS token; set recipe.eos=false")
        self.chat: ChatTemplate | None = None
        self.chat_template: str | None = None  # what conversations are rendered by
        self.stop_ids: list[int] = []  # in generate mode: ends of an answer, in addition to the teacher's
        if any(c.fields.kind == "messages" for c in job.corpora):
            self.chat = self._make_chat(model_path)
            self.chat_template = self.chat.source
            if job.recipe.mode == "generate":
                ends = self.chat.end_markers()
                self.stop_ids = [i for i in map(self.backend.token_to_id, ends) if i is not None]
        try:
            context_of(job.recipe.windows, job.window_size)
        except ValueError as error:
            raise UsageError(f"recipe.windows: {error}") from error

    def _decide_bos(self, folder: Path) -> bool:
        """Return whether a BOS is put in front: by the recipe, else as transformers would do it with this tokenizer."""
        choice = self.job.recipe.bos
        if choice == "always" and self.bos_id is None:
            raise UsageError("recipe.bos is always, but the tokenizer has no BOS token; set recipe.bos=never")
        if choice != "auto" or self.bos_id is None:
            return choice == "always"
        config = folder / "tokenizer_config.json"
        stated = json.loads(config.read_bytes()).get("add_bos_token") if config.is_file() else None
        if stated is not None:
            return bool(stated)
        return bool(self.backend.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id])

    def _make_chat(self, model_path: str | Path) -> ChatTemplate:
        from transformers import AutoTokenizer  # takes seconds to import: only where a template is rendered

        chat = self.job.recipe.chat
        try:
            template = None if chat.template is None else Path(chat.template).read_text(encoding="utf-8")
            trusted = self.job.teacher.trust_remote_code
            tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=trusted)
        except OSError as error:
            raise UsageError(f"recipe.chat.template or {model_path}: {str(error).splitlines()[0]}") from error
        if not (template or tokenizer.chat_template):
            raise UsageError(f"{model_path}: the tokenizer has no chat template; set recipe.chat.template")
        return ChatTemplate(tokenizer, template, chat.template_args, self._special, chat.date)

    def set_date(self, day: str) -> JobConfig:
        """Let the template print this day (YYYY-MM-DD) and return the job with it, as actors must get it."""
        assert self.chat is not None, "a job without messages has no template"
        date = datetime.date.fromisoformat(day)
        self.chat.set_date(date)
        recipe = self.job.recipe
        chat = recipe.chat.model_copy(update={"date": date})
        self.job = self.job.model_copy(update={"recipe": recipe.model_copy(update={"chat": chat})})
        return self.job

    def render(self, *arguments: Any, **named: Any) -> str:
        """Render a conversation by the job's chat template; see ChatTemplate.render."""
        assert self.chat is not None, "a job without messages has no template"
        return self.chat.render(*arguments, **named)

    # -- text → tokens -------------------------------------------------------------------------------------------

    def tokens(self, documents: Sequence[Document]) -> list[Tokens | Dropped]:
        """Return tokens of documents; in the place of one that cannot be used, its Dropped."""
        texts = [d.text for d in documents if d.kind in ("text", "prompt")]
        continuations = [d.continuation for d in documents if d.continuation is not None]
        encoded = self._text_backend.encode_batch_fast([*texts, *continuations], add_special_tokens=False)
        ids = [np.asarray(e.ids, dtype=np.int32) for e in encoded]
        first, second = iter(ids[: len(texts)]), iter(ids[len(texts) :])
        result: list[Tokens | Dropped] = []
        for document in documents:
            try:
                if document.kind in ("text", "prompt"):
                    tail = None if document.continuation is None else next(second)
                    result.append(self._text_tokens(document, next(first), tail))
                elif document.kind == "messages":
                    result.append(self._chat_tokens(document))
                else:
                    result.append(self._given_tokens(document))
            except Dropped as drop:
                result.append(drop)
        return result

    def _text_tokens(self, document: Document, ids: np.ndarray, continuation: np.ndarray | None) -> Tokens:
        if not ids.size:
            raise Dropped("empty")
        learn = np.full(ids.size, document.kind != "prompt")
        if continuation is not None:
            if not continuation.size:
                raise Dropped("empty_continuation")
            learn = np.arange(ids.size + continuation.size) >= ids.size
            ids = np.concatenate([ids, continuation])
        bos = self._leading_bos(ids)
        ids, learn = ids[bos:], learn[bos:]
        if self.job.recipe.eos and document.kind == "text" and ids.size and ids[-1] != self.eos_id:
            ids, learn = np.append(ids, np.asarray(self.eos_id, dtype=np.int32)), np.append(learn, True)
        return Tokens(ids, learn, self.add_bos)

    def _leading_bos(self, ids: np.ndarray) -> int:
        """Return how many BOS tokens are in front already: BOS must come exactly once."""
        if not self.add_bos:
            return 0
        others = np.flatnonzero(ids != self.bos_id)
        return int(others[0]) if others.size else ids.size - 1

    def _chat_tokens(self, document: Document) -> Tokens:
        """Return the tokens of a conversation; in generate mode up to where the answer begins, none of them learned."""
        recipe, chat = self.job.recipe, self.job.recipe.chat
        messages, tools, generates = document.messages, document.tools, recipe.mode == "generate"
        if chat.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": chat.system}, *messages]
        written = json.dumps([messages, tools], ensure_ascii=False, default=str)
        if recipe.special_text == "as_text" and (found := self._special.search(written)):  # it would become a real one
            raise Dropped("special_text", f"a message holds {found[0]!r}; recipe.special_text=as_tokens allows that")
        if generates and messages[-1]["role"] == "assistant":
            raise Dropped(ENDS_WITH_ASSISTANT, "there is no turn left to answer")
        assert self.chat is not None, "a job without messages has no template"
        by_spans = chat.mask == "assistant" and not generates
        if generates:
            rendered = self.chat.prompt(messages, tools)
        else:
            rendered = self.chat.spans(messages, tools) if by_spans else self.chat.whole(messages, tools)
        try:
            encoding = self.backend.encode(rendered.text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:  # half a surrogate pair, in a part of a message or a tool
            raise Dropped("invalid_utf8", "the rendered conversation") from error
        ids = np.asarray(encoding.ids, dtype=np.int32)
        if not ids.size:
            raise Dropped("empty")
        learn = np.full(ids.size, not generates)
        if by_spans:
            learn = mask_of_spans(np.asarray(encoding.offsets, dtype=np.int64), rendered.spans)
            if not learn.any():
                raise Dropped("mask_all_false", "no token is the assistant's")
        # `auto` leaves the BOS to the template; one that it writes is counted as the added one
        bos = self._leading_bos(ids)
        return Tokens(ids[bos:], learn[bos:], bos > 0 or recipe.bos == "always", rendered.unprinted)

    def _given_tokens(self, document: Document) -> Tokens:
        ids = document.input_ids
        assert ids is not None
        if int(ids.max()) >= self.vocab_size:
            raise Dropped("id_out_of_range", f"id {int(ids.max())} ≥ vocabulary {self.vocab_size}")
        learn = np.ones(ids.size, dtype=bool) if document.given_mask is None else document.given_mask
        if not learn.any():
            raise Dropped("mask_all_false")
        return Tokens(ids, learn, False)  # given ids are taken as they are: the corpus decides about BOS and EOS

    # -- tokens → windows ----------------------------------------------------------------------------------------

    def windows(self, document: Document, tokens: Tokens) -> Iterator[Window]:
        """Yield the windows of a document. Raises Dropped for too few or too many tokens."""
        filters, recipe = self.job.recipe.filters, self.job.recipe
        length = int(tokens.ids.size)
        if length < filters.min_tokens:
            raise Dropped("too_few_tokens")
        if filters.max_tokens is not None and length > filters.max_tokens:
            raise Dropped("too_many_tokens")
        masked = recipe.chat.rows == "masked"
        for span in spans(length, self.job.window_size, recipe.windows, int(tokens.bos)):
            own_bos = tokens.bos and (span.index == 0 or recipe.windows.bos_every_window)
            ids, shift = tokens.ids[span.start : span.stop], int(own_bos)
            if own_bos:
                ids = np.concatenate([np.asarray([self.bos_id], dtype=np.int32), ids])
            # the row at an added BOS predicts the first token: it exists once, in the first window
            first = span.first_row - span.start + (shift if span.index > 0 else 0)
            row_pos = np.arange(first, span.stop_row - span.start + shift, dtype=np.int32)
            # row at position p of the document is about token p + 1; nothing in this input follows its last one
            following = row_pos.astype(np.int64) + 1 - shift + span.start
            loss_mask = tokens.learn[np.minimum(following, length - 1)] & (following < span.stop)
            if masked:
                row_pos, loss_mask = row_pos[loss_mask], loss_mask[loss_mask]
                if not row_pos.size:
                    continue
            yield Window(
                doc_id=document.doc_id,
                window=span.index,
                start=span.start,
                source=document.source,
                split=document.split,
                input_ids=np.ascontiguousarray(ids, dtype=np.int32),
                row_pos=row_pos,
                loss_mask=loss_mask,
                ordinal=document.ordinal,
                meta=document.meta,
            )


def _load(model_path: str | Path) -> Any:
    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def mask_of_spans(offsets: np.ndarray, parts: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return bool [n]: tokens whose characters are wholly inside one of the spans. offsets int64 [n, 2]."""
    learn = np.zeros(len(offsets), dtype=bool)
    for start, end in parts:
        learn |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
    return learn
