"""What is put around vLLM's runners gives each token the row of its request and position, of either kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pipeline.errors import RowsInvalid  # noqa: E402
from pipeline.teachers import raw_tensors, worker_rows  # noqa: E402
from pipeline.teachers.base import Columns, RowsWanted, rows_from_columns  # noqa: E402
from pipeline.teachers.hf import rows_of_logits  # noqa: E402
from pipeline.teachers.vllm_teacher import columns_of_worker, without_padding  # noqa: E402
from teachercache.format.record import key_uniforms  # noqa: E402
from teachercache.format.spec import SampledRows, TopKRows  # noqa: E402
from tests.pipeline.top_k_checks import on_ranks  # noqa: E402

VOCAB, HEAD, D = 150, 167, 12  # a head that is padded beyond the tokenizer
KINDS = {"top_k": TopKRows(entries=9), "sampled": SampledRows(entries=9)}


class Model:
    """A head without a body: the hidden state of a token is a function of it and its position."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.head = torch.randn(HEAD, D, generator=rng)
        self.head[VOCAB:] *= 3  # padding that would rank first
        self.embedding = torch.randn(VOCAB, D, generator=rng)

    def hidden(self, tokens: np.ndarray, start: int = 0) -> Any:
        position = torch.arange(start, start + len(tokens))[:, None]
        return self.embedding[torch.as_tensor(tokens).long()] + torch.sin(position * torch.arange(1, D + 1) / 7)

    def compute_logits(self, hidden: Any) -> Any:
        return hidden @ self.head.T


def prompts() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.integers(0, VOCAB, size).astype(np.int32) for name, size in (("a", 30), ("b", 7), ("c", 41))}


def expected(model: Model, wanted: RowsWanted, ids: np.ndarray) -> Columns:
    """What the reference teacher makes of the same logits."""
    every = np.arange(len(ids), dtype=np.int32)
    following = torch.as_tensor(np.append(ids[1:], ids[-1])).long()
    u = key_uniforms(wanted.key(ids, every), every)
    return rows_of_logits(model.compute_logits(model.hidden(ids)), following, wanted, u)


def check(found: Columns, wanted: RowsWanted, ids: np.ndarray, theirs: Columns) -> None:
    every = np.arange(len(ids), dtype=np.int32)
    a, b = (rows_from_columns(ids, every, columns, wanted) for columns in (found, theirs))
    np.testing.assert_array_equal(a.topk_ids, b.topk_ids)
    assert a.topk_ids.max() < wanted.vocab_size
    np.testing.assert_allclose(np.exp(a.tail_logprob), np.exp(b.tail_logprob), atol=1e-5)
    for name in ("topk_logprobs", "target_logprob", "entropy"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4, equal_nan=True)
    assert (a.exact is None) == (wanted.rows.kind == "top_k")
    if a.exact is not None:
        np.testing.assert_array_equal(a.exact, b.exact)


def as_output(ids: Any, logprobs: Any) -> Any:
    raw = raw_tensors.RawRows()
    raw.add(ids, logprobs)
    return SimpleNamespace(prompt_logprobs=raw)


def params(key: int | None, width: int) -> Any:
    extra = None if key is None else {worker_rows.KEY: worker_rows.signed(key)}
    return SimpleNamespace(prompt_logprobs=width - 1, extra_args=extra)


@pytest.mark.parametrize("kind", KINDS)
def test_v1_chunks_batches_and_preemption(kind):
    """Three requests in steps of uneven parts, one of them preempted and begun again, next to one of vLLM's own."""
    pytest.importorskip("vllm")
    model, wanted = Model(), RowsWanted(KINDS[kind], VOCAB, "f" * 64)
    make = worker_rows.RowsMaker(wanted.rows, VOCAB)
    seen: list[dict[str, int]] = []
    runner = SimpleNamespace(
        model=model,
        requests={},
        num_prompt_logprobs={"other": 5},
        input_batch=SimpleNamespace(req_id_to_index={}),
        query_start_loc=SimpleNamespace(np=None),
        _get_prompt_logprobs_dict=lambda hidden, scheduled: (
            seen.append(dict(runner.num_prompt_logprobs)) or {"other": 1}
        ),
    )
    runner.requests["other"] = SimpleNamespace(sampling_params=params(None, 6))
    assert worker_rows.install_v1(runner, make) is None
    longer = {}
    for name, ids in prompts().items():
        every = np.arange(len(ids), dtype=np.int32)
        longer[name] = np.append(ids, ids[-1])
        runner.num_prompt_logprobs[name] = make.width - 1
        runner.requests[name] = SimpleNamespace(
            sampling_params=params(wanted.key(ids, every), make.width),
            prompt_token_ids=longer[name].tolist(),
            in_progress_prompt_logprobs_cpu=None,
            num_computed_tokens=0,
        )
    done: dict[str, Any] = {}
    steps = [{"a": 13, "b": 3}, {"a": 5, "c": 20}, {"b": 5}, {"c": 0}, {"a": 13, "c": 22}]
    for number, step in enumerate(steps):
        if number == 3:  # c was preempted: it starts again
            runner.requests["c"].num_computed_tokens, step["c"] = 0, 20
        starts = np.cumsum([0, *step.values()])
        runner.input_batch.req_id_to_index = {name: i for i, name in enumerate(step)}
        runner.query_start_loc.np = starts
        parts = [
            model.hidden(longer[name][(at := runner.requests[name].num_computed_tokens) : at + count], at)
            for name, count in step.items()
        ]
        finished = runner._get_prompt_logprobs_dict(torch.cat(parts), step)
        assert finished.pop("other") == 1
        done |= finished
        for name, count in step.items():
            runner.requests[name].num_computed_tokens += count
    assert all(table == {"other": 5} for table in seen)
    assert set(done) == set(prompts())
    assert runner.num_prompt_logprobs == {"other": 5}
    for name, ids in prompts().items():
        every = np.arange(len(ids), dtype=np.int32)
        output = as_output(done[name].logprob_token_ids, done[name].logprobs)
        check(columns_of_worker(output, wanted, wanted.key(ids, every)), wanted, ids, expected(model, wanted, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_v2_knows_whose_each_token_is(kind):
    model, wanted = Model(), RowsWanted(KINDS[kind], VOCAB, "f" * 64)
    make = worker_rows.RowsMaker(wanted.rows, VOCAB)
    module = SimpleNamespace(compute_prompt_logprobs_with_chunking=lambda *a: ("plain", *a))

    class Worker:
        """As vLLM's: asks for the rows of the whole batch and cuts them by request."""

        uses_prompt_logprobs = np.array([True, True, True, True])

        def add_request(self, req_id, req_idx, sampling_params):
            pass

        def remove_request(self, req_id):
            pass

        def compute_prompt_logprobs(self, logits_fn, hidden, batch, tokens):
            return module.compute_prompt_logprobs_with_chunking(tokens, hidden, logits_fn, make.width - 1)

    worker = Worker()
    worker_rows.V2Hooks(worker, module, make)
    texts = prompts()
    for i, (name, ids) in enumerate(texts.items()):
        worker.add_request(name, i, params(wanted.key(ids, np.arange(len(ids), dtype=np.int32)), make.width))
    made: dict[str, list[Any]] = {name: [] for name in texts}
    at = dict.fromkeys(texts, 0)
    for step in ({"a": 13, "b": 7}, {"a": 17, "c": 20}, {"c": 21}):
        batch = SimpleNamespace(
            req_ids=list(step),
            idx_mapping_np=np.array([list(texts).index(name) for name in step]),
            query_start_loc_np=np.cumsum([0, *step.values()]),
            num_computed_prefill_tokens_np=np.array([at[name] for name in step]),
        )
        hidden = torch.cat([model.hidden(texts[name][at[name] : at[name] + n], at[name]) for name, n in step.items()])
        following = [np.append(texts[name][1:], texts[name][-1])[at[name] : at[name] + n] for name, n in step.items()]
        tokens = torch.as_tensor(np.concatenate(following)).long()
        ids, logprobs, _ = worker.compute_prompt_logprobs(model.compute_logits, hidden, batch, tokens)
        for (name, n), start in zip(step.items(), batch.query_start_loc_np, strict=False):
            made[name].append((ids[start : start + n], logprobs[start : start + n]))
            at[name] += n
    for name, ids in texts.items():
        output = as_output(*(torch.cat(column) for column in zip(*made[name], strict=True)))
        key = wanted.key(ids, np.arange(len(ids), dtype=np.int32))
        check(columns_of_worker(output, wanted, key), wanted, ids, expected(model, wanted, ids))
        with pytest.raises(RowsInvalid, match="another input"):
            columns_of_worker(output, wanted, key ^ 1)
    worker.remove_request("a")  # a request that is not ours takes vLLM's own way, and the whole batch with it
    assert worker.compute_prompt_logprobs(model.compute_logits, hidden, batch, tokens)[0] != "plain"
    batch.req_ids[0] = "unknown"
    assert worker.compute_prompt_logprobs(model.compute_logits, hidden, batch, tokens)[0] == "plain"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("soft_cap", "scale"), [(None, 1.0), (5.0, 0.5)])
@pytest.mark.slow
def test_worker_without_the_gather_gives_what_vllm_would_have_gathered(kind, soft_cap, scale, monkeypatch):
    """vLLM's own LogitsProcessor on two ranks: soft cap, scale and padding as in the gathered logits."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    torch.manual_seed(0)

    def exact(
        x: torch.Tensor,
    ) -> torch.Tensor:  # so that the products have no rounding, in whatever order they are summed
        return (x * 512).round() / 512

    ranks, vocab, tokens, width, hidden_size, rows = 2, 1000, 977, 512, 16, 70
    weight = torch.nn.functional.pad(exact(torch.randn(vocab, hidden_size)), (0, 0, 0, ranks * width - vocab))
    hidden, target = exact(torch.randn(rows, hidden_size)), torch.randint(0, tokens, (rows,))
    u = torch.rand(rows, dtype=torch.float64)
    with set_current_vllm_config(VllmConfig()):
        processors = [LogitsProcessor(vocab, scale=scale, soft_cap=soft_cap) for _ in range(ranks)]
    monkeypatch.setattr(worker_rows, "CHUNK_ROWS", 16)  # three chunks, the last one short
    wanted = KINDS[kind]

    def work(rank: int, all_gather: Any) -> Any:
        part = weight[rank * width : (rank + 1) * width]
        head = SimpleNamespace(tp_size=ranks, quant_method=SimpleNamespace(apply=lambda head, x, bias=None: x @ part.T))
        make = worker_rows.RowsMaker(wanted, tokens, rank, ranks, processors[rank], all_gather)
        return make(hidden, lambda x: processors[rank](head, x), target, u)

    logits = hidden @ weight[:vocab].T
    logits = (logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap) * scale
    theirs = worker_rows.RowsMaker(wanted, tokens).of_logits(logits, target, u)
    for found in on_ranks(ranks, work):
        for ours, other in zip(found, theirs, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=2e-5, equal_nan=True)
        assert int(found[0][:, 1:10].max()) < tokens
    assert all("_gather_logits" not in vars(p) for p in processors)


def test_ids_beyond_the_tokenizer_never_enter_a_row_of_the_public_path():
    """A head's padding that ranks among the K makes room for the next real id; its mass stays in the tail."""
    wanted = RowsWanted(TopKRows(entries=3), 100)
    ids = np.array([[7, 100, 5, 101, 9, 2], [8, 4, 3, 2, 1, 0]], dtype=np.int32)
    logprobs = np.log(np.array([[0.1, 0.3, 0.2, 0.1, 0.1, 0.05], [0.1, 0.4, 0.2, 0.1, 0.1, 0.05]], dtype=np.float32))
    found = without_padding(Columns(ids, logprobs), wanted)
    assert found.ids.tolist() == [[7, 5, 9, 2], [8, 4, 3, 2]]
    np.testing.assert_allclose(np.exp(found.logprobs[0]), [0.1, 0.2, 0.1, 0.05], rtol=1e-6)
    rows = rows_from_columns(np.array([1, 7], dtype=np.int32), np.arange(2, dtype=np.int32), found, wanted)
    np.testing.assert_allclose(np.exp(rows.tail_logprob), [0.65, 0.3], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_heads_mass(kind):
    """Top-K: in the tail and the entropy. Sampled: left out of p, since no draw could have it."""
    model, wanted = Model(), RowsWanted(KINDS[kind], VOCAB)
    ids = prompts()["a"]
    found = expected(model, wanted, ids)
    logits = model.compute_logits(model.hidden(ids)).double()
    inside = logits[:, :VOCAB]
    p = torch.softmax(inside if kind == "sampled" else logits, dim=1)
    assert float(p.sum(1)[0]) == pytest.approx(1)
    entropy = torch.special.entr(p).sum(1)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-4)
    assert found.ids[:, 1:].max() < VOCAB
    np.testing.assert_allclose(found.logprobs[:, 1], p[:, :VOCAB].log().amax(1), atol=1e-4)
    if kind == "sampled":
        np.testing.assert_allclose(np.exp(found.logprobs[:, 1:]).sum(1), 1, atol=1e-5)
