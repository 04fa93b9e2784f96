"""The loop around the teacher: input order, bounded memory, what a death and a NaN cost, several shards at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.config import GenerateConfig, TeacherConfig, parse_job
from pipeline.corpus.documents import Document
from pipeline.corpus.encode import Encoder, Tokens, Window
from pipeline.errors import EngineDied
from pipeline.running.engine_loop import EngineLoop
from pipeline.teachers.base import Prompt, RowsWanted
from pipeline.teachers.noop import NoopTeacher
from teachercache import fingerprint_tokenizer
from teachercache.format.spec import TopKRows
from tests.waiting import wait_for

VOCAB = 300


def window(ordinal: int, length: int = 50, first: int = 0) -> Window:
    ids = np.full(length, (ordinal + first) % 250, dtype=np.int32)
    every = np.arange(length, dtype=np.int32)
    return Window(f"d{ordinal}", 0, 0, "s", "train", ids, every, every > 0, ordinal=ordinal)


class OutOfOrder(NoopTeacher):
    """Finishes the newest input first, one a step; records how many tokens were inside."""

    most_tokens = 0

    def collect(self):
        self.most_tokens = max(self.most_tokens, sum(len(item.input_ids) for item in self.queue))
        kept, self.queue = self.queue[:-1], self.queue[-1:]
        done = super().collect()
        self.queue = kept
        return done


def start(kind=NoopTeacher, tokens: int = 500, **faults) -> EngineLoop:
    config = TeacherConfig(model="unused", engine="noop", engine_args=faults)
    return EngineLoop(lambda: kind(config, RowsWanted(TopKRows(entries=8), VOCAB)), tokens)


def test_answers_come_in_input_order_and_the_engine_stays_within_its_limit():
    loop = start(OutOfOrder)
    answers = [w.ordinal for w, s in loop.score(window(i) for i in range(100)) if s.rows is not None]
    assert answers == list(range(100))
    assert loop.teacher.most_tokens <= 500
    loop.stop()


def test_a_slow_consumer_stops_the_reader():
    loop = start(tokens=500)
    read = []

    def source():
        for i in range(1000):
            read.append(i)
            yield window(i)

    most = 2 * 500 // 50 + 2  # twice the engine's limit, the one in hand, the one that waits for room
    answers = loop.score(source())
    next(answers)
    # a reader without a bound would go on for as long as the engine has something to do
    wait_for(lambda: len(read) >= most and loop.depths() == (0, 0), what="an idle engine and a full buffer")
    assert len(read) == most
    answers.close()
    loop.stop()


def test_an_input_larger_than_the_limit_passes_alone():
    loop = start(tokens=100)
    answers = [w.ordinal for w, s in loop.score(iter([window(0), window(1, 5000), window(2)]))]
    assert answers == [0, 1, 2]
    loop.stop()


def test_an_error_of_the_source_comes_after_everything_before_it():
    loop = start()

    def source():
        yield from (window(i) for i in range(5))
        raise ValueError("the file ends here")

    answers = loop.score(source())
    assert [next(answers)[0].ordinal for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="the file ends here"):
        next(answers)
    loop.stop()


def test_death_names_each_shards_own_suspects_and_later_calls_fail_at_once():
    loop = start(tokens=10_000, poison=77, delay_s=0.2)
    suspects: dict[str, tuple[int, ...]] = {}

    def endless(first: int) -> Iterator[Window]:
        # until the engine is dead: a shard that had ended before would have no suspects to name
        while not loop.dead:
            yield from (window(i) for i in range(first, first + 10))

    def shard(name: str, first: int) -> None:
        try:
            for _ in loop.score(endless(first)):
                pass
        except EngineDied as error:
            suspects[name] = error.suspects

    threads = [threading.Thread(target=shard, args=a) for a in (("a", 0), ("b", 70))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert 77 in suspects["b"]
    assert all(i < 10 for i in suspects["a"])
    assert all(i >= 70 for i in suspects["b"])
    assert loop.dead
    with pytest.raises(EngineDied):
        list(loop.score(iter([window(1)])))
    with pytest.raises(EngineDied):
        loop.call(lambda teacher: None)


def test_nan_is_tried_again_alone_and_neighbours_keep_their_rows():
    class OnceGarbage(NoopTeacher):
        """A batch that holds token 5 comes back as NaN wholesale, unless it is alone."""

        def collect(self):
            self.garbage = len(self.queue) > 1 and any((item.input_ids == 5).any() for item in self.queue)
            return super().collect()

        def columns(self, item):
            self.nan = int(item.input_ids[0]) if self.garbage else None
            return super().columns(item)

    loop = start(OnceGarbage)
    answers = list(loop.score(window(i) for i in range(20)))
    assert [w.ordinal for w, _ in answers] == list(range(20))
    assert all(s.rows is not None for _, s in answers)
    loop.stop()


def test_shards_share_the_engine():
    loop = start(tokens=200, delay_s=0.02)
    done: list[list[int]] = [[], [], []]

    def shard(k: int) -> None:
        done[k] = [w.ordinal for w, _ in loop.score(window(i) for i in range(30))]

    threads = [threading.Thread(target=shard, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert done == [list(range(30))] * 3
    assert loop.call(lambda teacher: teacher.wanted.rows.entries) == 8
    assert loop.tokens == 3 * 30 * 50
    loop.stop()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a tiny random Llama."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from tests.pipeline.conftest import make_tokenizer

    folder = make_tokenizer(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=fingerprint_tokenizer(folder).vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_models_own_settings_do_not_change_how_the_job_file_samples(llama):
    from pipeline.teachers.hf import HfTeacher

    config, made = TeacherConfig(model=str(llama), engine="hf", dtype="float32"), []
    prompt = Prompt(np.arange(5, 25, dtype=np.int32), seed=1, most=12)
    for own in ({"eos_token_id": 1}, {"eos_token_id": 1, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1}):
        (llama / "generation_config.json").write_text(json.dumps(own))
        teacher = HfTeacher(config, str(llama), RowsWanted(TopKRows(entries=4), 200))
        assert teacher.model.generation_config.eos_token_id == 1  # where an answer ends is the model's to say
        for temperature in (0.0, 1.0):
            made += teacher.generate([prompt], GenerateConfig(temperature=temperature))
    greedy, drawn, *others = [answer.ids.tolist() for answer in made]
    assert others == [greedy, drawn]


def test_windows_equal_one_long_pass_where_the_context_is_the_same(llama):
    """In float32: the first window's rows are the long pass's; later rows have their context."""
    from pipeline.teachers.hf import HfTeacher

    folder = llama
    settings = {"model": str(folder), "engine": "hf", "dtype": "float32", "max_model_len": 512}
    recipe = {"windows": {"size": 40, "min_context": 10}, "eos": False}
    job = parse_job({"cache": "c", "teacher": settings, "corpora": [{"files": ["f"]}], "recipe": recipe})
    encoder = Encoder(job, folder)
    teacher = HfTeacher(job.teacher, str(folder), RowsWanted(TopKRows(entries=10), encoder.vocab_size))
    ids = np.random.default_rng(0).integers(0, 250, 130).astype(np.int32)
    (long_pass,) = teacher.score([ids])
    document = Document("d", 0, "s", "train", "text", b"", text="x")
    seen = []
    for w in encoder.windows(document, Tokens(ids, np.ones(130, dtype=bool), False)):
        (scored,) = teacher.score([w.input_ids])
        (from_context,) = teacher.score([ids[w.start : w.start + len(w.input_ids)]])
        for row in w.row_pos:
            position = int(row) + w.start
            seen.append(position)
            np.testing.assert_allclose(scored.rows.topk_logprobs[row], from_context.rows.topk_logprobs[row], atol=1e-6)
            if w.window == 0:
                np.testing.assert_allclose(
                    scored.rows.topk_logprobs[row], long_pass.rows.topk_logprobs[position], atol=2e-5
                )
    assert seen == list(range(130))
