"""The worker's top-K gives what log_softmax and topk over the whole row give."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pipeline.teachers.topk import reference_row_top_k, row_top_k  # noqa: E402

SHAPES = [(3, 4096, 20), (2, 49152, 100), (2, 50257, 100), (1, 8191, 7), (4, 300, 100)]


def check(logits: torch.Tensor, k: int) -> None:
    target = torch.randint(0, logits.shape[1], (logits.shape[0],), device=logits.device)
    ids, logprobs = row_top_k(logits, k, target)
    wanted_ids, wanted = reference_row_top_k(logits, k, target)
    torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:, 0], wanted_ids[:, 0])
    # equal logits may come in another order: the ids must hold the values that they claim
    claimed = torch.log_softmax(logits.float(), dim=-1).gather(1, ids.long())
    torch.testing.assert_close(claimed, logprobs, rtol=1e-5, atol=1e-5)
    assert all(len(set(row.tolist())) == k for row in ids[:, 1:])


@pytest.mark.parametrize(("n", "vocab", "k"), SHAPES)
def test_equals_the_plain_twin(n, vocab, k):
    torch.manual_seed(0)
    check(torch.randn(n, vocab) * 4, k)


def test_all_of_the_top_in_one_group_and_ties():
    logits = torch.zeros(2, 8192)
    logits[:, 640:672] = torch.arange(32.0)
    check(logits, 100)


def test_masked_vocabulary_has_no_nan():
    logits = torch.randn(2, 8192)
    logits[:, 4000:] = float("-inf")
    ids, logprobs = row_top_k(logits, 50, torch.tensor([1, 2]))
    assert torch.isfinite(logprobs).all()
    assert int(ids.max()) < 4000


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_the_plain_twin(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    for n, vocab, k in [(64, 128_256, 100), (33, 50_257, 100), (8, 201_088, 64)]:
        check((torch.randn(n, vocab, device="cuda") * 4).to(dtype), k)
