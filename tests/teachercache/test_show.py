"""show and head: a cache for people."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from teachercache.console import text_console
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.views.show import TokenText, head_table
from tests.teachercache.caches import make

SPEC = synthetic_spec()


def test_a_document_named_like_markup_is_shown_by_its_name(capsys):
    (record,) = synthetic_records(SPEC, 1, prefix="app/[id]/[/b]")
    text_console().print(head_table(record, [], 3))
    assert "[id]/[/b]" in capsys.readouterr().out


def test_pieces_of_a_document_join_to_its_text_whatever_the_tokens_cut(tmp_path, monkeypatch):
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = TokenText(make(tmp_path))
    monkeypatch.setattr(words, "_tokenizer", tokenizer)
    text = "naïve 🙂🙂 end\n  中文"
    ids = tokenizer.encode(text).ids  # one token a byte
    pieces = words.pieces(ids)
    assert len(pieces) == len(ids) == len(text.encode())
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    monkeypatch.setattr(words, "_tokenizer", None)
    assert words.pieces([5, 7]) == ["#5 ", "#7 "]
