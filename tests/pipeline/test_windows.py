"""Windows tile: every position of a long document has its row exactly once, with the context that was promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import WindowsConfig, parse_job
from pipeline.corpus.documents import Document, Dropped
from pipeline.corpus.encode import Encoder, Tokens
from pipeline.corpus.windows import context_of, spans


@settings(max_examples=300, deadline=None)
@given(
    length=st.integers(1, 400),
    size=st.integers(4, 80),
    min_context=st.integers(0, 40),
    bos=st.booleans(),
    again=st.booleans(),
)
def test_rows_of_all_windows_are_every_position_once(length, size, min_context, bos, again):
    if min_context + 2 >= size:
        return
    config = WindowsConfig(policy="window", min_context=min_context, bos_every_window=again)
    rows: list[int] = []
    for span in spans(length, size, config, int(bos)):
        own_bos = int(bos and (span.index == 0 or again))
        assert span.stop - span.start + own_bos <= size
        if span.index > 0:
            assert span.first_row - span.start >= min_context
        rows += range(span.first_row, span.stop)
    assert rows == list(range(length))


def test_size_and_min_context_must_fit():
    with pytest.raises(ValueError, match="min_context"):
        WindowsConfig(size=100, min_context=100)
    assert context_of(WindowsConfig(), 100) == 25
    assert context_of(WindowsConfig(min_context=60), 100) == 60
    with pytest.raises(ValueError, match="leave no room"):
        context_of(WindowsConfig(min_context=200), 100)


def test_truncation_keeps_the_beginning():
    (span,) = spans(50, 10, WindowsConfig(policy="truncate"), 0)
    assert (span.start, span.stop) == (0, 10)


def test_skip_drops_the_document():
    with pytest.raises(Dropped, match="too_long"):
        list(spans(11, 10, WindowsConfig(policy="skip"), 0))
    assert len(list(spans(9, 10, WindowsConfig(policy="skip"), 1))) == 1


def encoder_for(folder: Path, **recipe: object) -> Encoder:
    teacher = {"model": str(folder), "engine": "noop", "top_k": 8, "max_model_len": 64}
    job = {"cache": "unused", "teacher": teacher, "corpora": [{"files": ["unused"]}], "recipe": recipe}
    return Encoder(parse_job(job), folder)


@pytest.mark.parametrize("bos", ["always", "never"])
@pytest.mark.parametrize("again", [True, False])
def test_windows_reassemble_the_document_and_its_masks(tokenizer_folder, bos, again):
    encoder = encoder_for(tokenizer_folder, bos=bos, windows={"size": 20, "min_context": 5, "bos_every_window": again})
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, 103).astype(np.int32)
    learn = rng.random(103) < 0.5
    document = Document("d", 0, "s", "train", "text", b"", text="x")
    has_bos = bos == "always"
    windows = list(encoder.windows(document, Tokens(ids, learn, has_bos)))
    assert windows[0].start == 0
    predicted: dict[int, tuple[int, bool]] = {}
    for w in windows:
        own_bos = int(has_bos and (w.window == 0 or again))
        assert len(w.input_ids) <= 20
        assert (w.input_ids[own_bos:] == ids[w.start : w.start + len(w.input_ids) - own_bos]).all()
        assert own_bos == 0 or w.input_ids[0] == encoder.bos_id
        for row, mask in zip(w.row_pos, w.loss_mask, strict=True):
            position = int(row) - own_bos + w.start  # −1 is the row of the added BOS
            assert position not in predicted
            predicted[position] = (int(row), bool(mask))
            last_of_window = row == len(w.input_ids) - 1
            assert mask == (not last_of_window and bool(learn[position + 1]))
    assert sorted(predicted) == list(range(-1 if has_bos else 0, 103))


def test_bos_and_eos_stand_exactly_once(tmp_path):
    from tests.pipeline.conftest import make_tokenizer

    folder = make_tokenizer(tmp_path / "m", bos=True)
    encoder = encoder_for(folder)
    for text in ("plain", "<bos>written by hand", "ends with <eos>"):
        document = Document("d", 0, "s", "train", "text", b"", text=text)
        (tokens,) = encoder.tokens([document])
        (window,) = encoder.windows(document, tokens)
        assert (window.input_ids == encoder.bos_id).sum() == 1
        assert (window.input_ids == encoder.eos_id).sum() == 1
        assert window.input_ids[0] == encoder.bos_id
        assert window.input_ids[-1] == encoder.eos_id
    tokens_mode = encoder_for(folder, special_text="as_tokens")
    document = Document("d", 0, "s", "train", "text", b"", text="<bos>already there<eos>")
    (tokens,) = tokens_mode.tokens([document])
    (window,) = tokens_mode.windows(document, tokens)
    assert (window.input_ids == tokens_mode.bos_id).sum() == 1
    assert (window.input_ids == tokens_mode.eos_id).sum() == 1


def test_continuation_alone_is_learned(tokenizer_folder):
    encoder = encoder_for(tokenizer_folder, eos=False)
    document = Document("d", 0, "s", "train", "text", b"", text="prompt: ", continuation="answer")
    (tokens,) = encoder.tokens([document])
    (window,) = encoder.windows(document, tokens)
    learned = window.input_ids[window.row_pos[window.loss_mask] + 1]
    assert encoder.backend.decode(learned.tolist()) == "answer"
