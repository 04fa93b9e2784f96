"""vLLM's front end without an engine: the fast path and the public one, fed one recorded output, agree bit for bit."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from pipeline.errors import RowsInvalid  # noqa: E402
from pipeline.teachers import raw_tensors  # noqa: E402
from pipeline.teachers.base import Columns, RowsWanted, rows_from_columns  # noqa: E402
from pipeline.teachers.vllm_teacher import columns_of  # noqa: E402
from teachercache.format.spec import TopKRows  # noqa: E402

K, N, VOCAB = 20, 37, 500
WANTED = RowsWanted(TopKRows(entries=K), VOCAB)


def recorded_output(seed: int, chunks: int):
    """(input_ids, prompt tensors in chunks, sampled lists): what an engine core sends for one document."""
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    rng = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCAB, (N,), generator=rng)
    logprobs = torch.log_softmax(torch.randn(N, VOCAB, generator=rng) * 3, dim=-1)
    logprobs[5, 3] = logprobs[5, 4]  # a tie
    target = torch.cat([input_ids[1:], torch.tensor([7])])
    top = torch.topk(logprobs, K, dim=-1)
    ids = torch.cat([target[:, None], top.indices], dim=1).to(torch.int32)
    values = torch.cat([logprobs.gather(1, target[:, None]), top.values], dim=1)
    ranks = (logprobs >= values[:, :1]).sum(dim=1).to(torch.int32)
    edges = np.linspace(0, N - 1, chunks + 1).astype(int)
    prompt = [LogprobsTensors(ids[a:b], values[a:b], ranks[a:b]) for a, b in pairwise(edges)]
    last = LogprobsLists(ids[-1:].numpy(), values[-1:].numpy(), ranks[-1:].numpy(), None)
    return input_ids.numpy().astype(np.int32), prompt, last


def through_front_end(prompt, last, *, fast: bool, flat: bool = True):
    """The request output that vLLM's own LogprobsProcessor builds."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.logprobs import LogprobsProcessor

    extra = {"extra_args": {raw_tensors.FLAG: True}} if fast else {}
    sampling = SamplingParams(
        prompt_logprobs=K, logprobs=K, max_tokens=1, detokenize=False, flat_logprobs=flat, **extra
    )
    processor = LogprobsProcessor.from_new_request(tokenizer=None, request=SimpleNamespace(sampling_params=sampling))
    for tensors in prompt[:-1]:
        processor.update_from_output(
            EngineCoreOutput(request_id="1", new_token_ids=[], new_prompt_logprobs_tensors=tensors)
        )
    processor.update_from_output(
        EngineCoreOutput(request_id="1", new_token_ids=[7], new_prompt_logprobs_tensors=prompt[-1], new_logprobs=last)
    )
    completion = SimpleNamespace(logprobs=processor.logprobs, finish_reason="length")
    return SimpleNamespace(prompt_logprobs=processor.prompt_logprobs, outputs=[completion])


@pytest.fixture(scope="module", autouse=True)
def installed():
    assert raw_tensors.unsupported() is None
    raw_tensors.install()
    raw_tensors.install()  # twice is once


@pytest.mark.parametrize("chunks", [1, 3])
def test_fast_and_public_front_end_agree_bit_for_bit(chunks):
    for seed in range(5):
        input_ids, prompt, last = recorded_output(seed, chunks)
        fast_output = through_front_end(prompt, last, fast=True)
        assert isinstance(fast_output.prompt_logprobs, raw_tensors.RawRows)
        fast = columns_of(fast_output, K)
        public = columns_of(through_front_end(prompt, last, fast=False), K)
        np.testing.assert_array_equal(fast[0], public[0])
        np.testing.assert_array_equal(fast[1].view(np.int32), public[1].view(np.int32))
        positions = np.arange(N, dtype=np.int32)
        a, b = (rows_from_columns(input_ids, positions, c, WANTED) for c in (fast, public))
        for name in ("topk_ids", "topk_logprobs", "tail_logprob", "target_logprob"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_other_requests_are_untouched():
    _, prompt, last = recorded_output(0, 2)
    output = through_front_end(prompt, last, fast=False, flat=False)
    assert isinstance(output.prompt_logprobs, list)
    assert len(output.prompt_logprobs) == N


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda ids, lp: ids.__setitem__((4, 0), (ids[4, 0] + 1) % VOCAB), "column_zero"),
        (lambda ids, lp: lp.__setitem__((4, 3), np.nan), "nan"),
        (lambda ids, lp: lp.__setitem__((4, 3), -np.inf), "inf"),
        (lambda ids, lp: lp.__setitem__(4, 0.0), "zero_row"),
        (lambda ids, lp: lp.__setitem__((4, 3), lp[4, 1] + 1), "unsorted"),
        (lambda ids, lp: ids.__setitem__((4, 3), VOCAB), "id_out_of_range"),
    ],
)
def test_broken_rows_are_told_apart(damage, reason):
    input_ids, prompt, last = recorded_output(1, 1)
    ids, logprobs = (c.copy() for c in columns_of(through_front_end(prompt, last, fast=True), K)[:2])
    damage(ids, logprobs)
    with pytest.raises(RowsInvalid) as caught:
        rows_from_columns(input_ids, np.arange(N, dtype=np.int32), Columns(ids, logprobs), WANTED)
    assert caught.value.reason == reason


def test_rows_at_chosen_positions_are_a_selection_of_all_rows():
    input_ids, prompt, last = recorded_output(2, 1)
    columns = columns_of(through_front_end(prompt, last, fast=True), K)
    every = rows_from_columns(input_ids, np.arange(N, dtype=np.int32), columns, WANTED)
    some = np.asarray([0, 3, 17, N - 1], dtype=np.int32)
    few = rows_from_columns(input_ids, some, columns, WANTED)
    np.testing.assert_array_equal(few.topk_ids, every.topk_ids[some])
    np.testing.assert_array_equal(few.tail_logprob, every.tail_logprob[some])
    np.testing.assert_array_equal(few.target_logprob, every.target_logprob[some])
    assert np.isnan(few.target_logprob[-1])
