"""Documents become windows of tokens: every token once, BOS and EOS exactly once, masks about the predicted token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import parse_job
from pipeline.corpus.documents import Document
from pipeline.corpus.encode import Encoder, Tokens


def encoder_for(folder: Path, **recipe: object) -> Encoder:
    teacher = {"model": str(folder), "engine": "noop", "max_model_len": 64}
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
    assert [p + 1 for p, (_, mask) in sorted(predicted.items()) if mask] == np.flatnonzero(learn[:103])[
        int(not has_bos and bool(learn[0])) :
    ].tolist()


def test_an_eos_behind_the_last_whole_window_is_learned_once(tokenizer_folder):
    encoder = encoder_for(tokenizer_folder, bos="never")  # of 63 tokens
    document = Document("d", 0, "s", "train", "text", b"", text="x" * 63)
    (tokens,) = encoder.tokens([document])
    assert tokens.ids.size == 64
    first, second = encoder.windows(document, tokens)
    assert (len(first.input_ids), first.row_pos[-1]) == (63, 61)  # the row about token 62 is its last
    learned = [w.start + w.row_pos[w.loss_mask] + 1 for w in (first, second)]
    assert np.concatenate(learned).tolist() == list(range(1, 64))
    assert second.input_ids[-1] == encoder.eos_id


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
