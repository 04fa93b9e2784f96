"""The paper's claim, measured again: does a student trained from the cache equal one trained from the live teacher?

    python benchmarks/parity.py --teacher build/models/smollm2-135m --out benchmarks/results/parity [--steps 500]
    python benchmarks/parity.py --teacher … --out … --steps 40 --runs online,fused/bucket      # reduced, on a CPU
    python benchmarks/parity.py --tiny --out build/parity                                       # a smoke test

One teacher, one student cut from it (every second layer), one seed, one sequence of batches; what differs is the loss:
  online            live teacher, full vocabulary             online/bucket      live teacher, its top 100 and a bucket
  dense/TAIL, forward_chunked/TAIL, fused/TAIL                cached rows, TAIL of bucket, none, renormalize
  fused/bucket/K10, fused/bucket/K50                          the first K' cached entries
  fused/bucket/exact                                          rows not rounded to float16 (what the codec costs)
Each student is then measured on held-out documents against the live teacher: full-vocabulary KL, K+1 KL, top-1
agreement, perplexity, calibration. Training losses of different losses are not comparable; these figures are.

The teacher's rows are computed here, on the training text itself, as the cache would hold them (float16 precision),
so the script needs no store; the text is Python's own reference and library source.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer import student
from trainer.attention import NAME, DocumentLayout, choose_kind
from trainer.bench.loss import machine
from trainer.config import TrainerConfig
from trainer.data import PackedSequence
from trainer.evaluate import evaluate
from trainer.losses import TeacherRows
from trainer.optim import build_optimizer, lr_factor
from trainer.packing import best_fit
from trainer.step import Step, row_logits
from trainer.student import init_student

TAILS = ("bucket", "none", "renormalize")
ALL_RUNS = (
    ["online", "online/bucket"]
    + [f"{method}/bucket" for method in ("dense", "forward_chunked", "fused")]
    + [f"fused/{tail}" for tail in TAILS[1:]]
    + ["fused/bucket/K10", "fused/bucket/K50", "fused/bucket/exact"]
)


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents of each split."""

    train: list[list[int]]
    heldout: list[list[int]]


def real_text(teacher: Path, max_tokens: int, train_tokens: int, heldout_tokens: int) -> Corpus:
    """Python's language reference and library source, by the teacher's tokenizer; every tenth document is held out."""
    import sysconfig
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        texts.extend(source[start : start + 4000] for start in range(0, min(len(source), 40_000), 4000))
    order = np.random.default_rng(0).permutation(len(texts))
    splits: dict[str, list[list[int]]] = {"train": [], "heldout": []}
    wanted = {"train": train_tokens, "heldout": heldout_tokens}
    for index in order:
        split = "heldout" if index % 10 == 9 else "train"
        if wanted[split] > 0:
            ids = tokenizer.encode(texts[index]).ids[:max_tokens]
            if len(ids) >= 32:
                splits[split].append(ids)
                wanted[split] -= len(ids)
    return Corpus(**splits)


def random_text(max_tokens: int, train_tokens: int, heldout_tokens: int) -> Corpus:
    """Documents over a few tokens, for the smoke test."""
    rng = np.random.default_rng(0)

    def documents(tokens: int) -> list[list[int]]:
        return [(3 + 7 * rng.integers(0, 20, size=max_tokens // 2)).tolist() for _ in range(2 * tokens // max_tokens)]

    return Corpus(documents(train_tokens), documents(heldout_tokens))


def pack(documents: list[list[int]], seq_len: int, seed: int) -> list[list[list[int]]]:
    """Sequences of whole documents, longest first, in an order of the seed."""
    bins = best_fit([len(ids) for ids in documents], seq_len)
    order = np.random.default_rng(seed).permutation(len(bins))
    return [sorted((documents[item] for item in bins[index]), key=len, reverse=True) for index in order]


def bare_sequence(documents: list[list[int]]) -> PackedSequence:
    """A packed sequence without teacher rows: every position but the last of each document has one."""
    lengths = tuple(len(ids) for ids in documents)
    position = torch.cat([torch.arange(n) for n in lengths])
    last = torch.tensor(lengths).cumsum(0) - 1
    keep = torch.ones(sum(lengths), dtype=torch.bool)
    keep[last] = False
    ids = torch.tensor([token for document in documents for token in document])
    rows = keep.nonzero()[:, 0]
    empty = torch.zeros(len(rows), 0)
    return PackedSequence(
        input_ids=ids, position_ids=position, document_lengths=lengths, row_index=rows, topk_ids=empty.int(),
        topk_logprobs=empty, tail_logprob=torch.zeros(len(rows)), labels=ids[rows + 1],
        documents=tuple((f"document-{index}", 0) for index in range(len(documents))), tokens_done=0,
    )  # fmt: skip


@torch.no_grad()
def with_rows(sequence: PackedSequence, teacher: torch.nn.Module, top_k: int, kind: str) -> PackedSequence:
    """The same sequence with the teacher's top-K rows in full float32 precision, on the CPU."""
    device = next(teacher.parameters()).device
    moved = sequence.to(device)
    layout = DocumentLayout(sequence.document_lengths, kind, device)
    rows = TeacherRows.from_logits(row_logits(teacher, moved, layout), top_k)
    return replace(
        sequence, topk_ids=rows.topk_ids.int().cpu(), topk_logprobs=rows.topk_logprobs.cpu(),
        tail_logprob=rows.tail_logprob.cpu(),
    )  # fmt: skip


def rounded(sequence: PackedSequence) -> PackedSequence:
    """The rows as the cache holds them: log-probabilities of float16 precision, the tail untouched."""
    return replace(sequence, topk_logprobs=sequence.topk_logprobs.half().float())


def loss_settings(run: str) -> tuple[dict[str, Any], int | None]:
    """A run's name -> (loss section, K')."""
    method, *rest = run.split("/")
    tail = rest[0] if rest else (None if method == "online" else "bucket")
    top_k = next((int(part[1:]) for part in rest if part.startswith("K")), None)
    return {"method": method, "tail": tail}, top_k


def endless(sequences: list[PackedSequence], seed: int) -> Iterator[PackedSequence]:
    epoch = 0
    while True:
        for index in np.random.default_rng([seed, epoch]).permutation(len(sequences)):
            yield sequences[index]
        epoch += 1


def train(
    run: str,
    folder: Path,
    sequences: list[PackedSequence],
    heldout: list[PackedSequence],
    teacher: torch.nn.Module,
    arguments: argparse.Namespace,
    vocab_size: int,
) -> dict[str, Any]:
    """Train one student and measure it; returns the curve, the figures, and time and memory of a step."""
    device = next(teacher.parameters()).device
    kind = choose_kind(device)
    loss, top_k = loss_settings(run)
    config = TrainerConfig(
        cache="memory", student=str(folder), teacher="live", loss=loss, data={"top_k": top_k},
        optim={"lr": arguments.lr, "warmup_steps": arguments.warmup}, seed=arguments.seed,
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    model = student.load_student(folder, dtype=torch.float32, device=device).train()
    step = Step(
        model, build_optimizer(model, config.optim), config, attention_kind=kind, vocab_size=vocab_size, teacher=teacher
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    curve, times = [], []
    batches = endless(sequences, arguments.seed)
    for number in range(arguments.steps):
        lr = config.optim.lr * lr_factor(config.optim, number, number / arguments.steps)
        started = time.perf_counter()
        curve.append(step.run([next(batches)], lr=lr).loss)
        times.append(time.perf_counter() - started)
    figures = evaluate(model, heldout, vocab_size=vocab_size, attention_kind=kind, teacher=teacher)
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "run": run,
        "curve": curve,
        "step_ms": 1e3 * float(np.median(times)),
        "peak_gib": memory,
        **{key: value for key, value in figures.items() if isinstance(value, float) and key != "seconds"},
    }


def verdict(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The two claims, in numbers: methods agree with each other, and cached with online."""
    by_run = {result["run"]: result for result in results}
    claims: dict[str, Any] = {}
    if {"dense/bucket", "fused/bucket"} <= by_run.keys():
        base = np.array(by_run["dense/bucket"]["curve"])
        claims["largest relative difference of training losses, dense and fused"] = float(
            np.max(np.abs(np.array(by_run["fused/bucket"]["curve"]) - base) / np.maximum(base, 1e-9))
        )
    if {"online", "fused/bucket"} <= by_run.keys():
        live, cached = (by_run[run]["heldout_kl_full_vocabulary"] for run in ("online", "fused/bucket"))
        claims["held-out full-vocabulary KL, cached over online"] = cached / live
    return claims


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    for result in results:
        curve = np.array(result["curve"])
        width = max(1, len(curve) // 50)
        smooth = np.convolve(curve, np.ones(width) / width, mode="valid")
        left.plot(np.arange(len(smooth)) + width - 1, smooth, label=result["run"], linewidth=1)
    left.set(xlabel="step", ylabel="its own training loss, nats")
    left.legend(fontsize=7)
    names = [result["run"] for result in results]
    right.barh(names, [result["heldout_kl_full_vocabulary"] for result in results])
    right.invert_yaxis()
    right.set(xlabel="held-out full-vocabulary KL against the live teacher, nats")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def tiny_teacher(out: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", default=",".join(ALL_RUNS), help=f"comma-separated, of {', '.join(ALL_RUNS)}")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--train-tokens", type=int, default=200_000)
    parser.add_argument("--heldout-tokens", type=int, default=20_000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a smoke test with a random teacher")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    scratch = arguments.out / "models"
    if arguments.tiny:
        teacher_folder, arguments.seq_len, arguments.lr = tiny_teacher(scratch / "teacher"), 128, 1e-2
        corpus = random_text(64, 4000, 1000)
        arguments.steps = min(arguments.steps, 60)
    else:
        if arguments.teacher is None:
            parser.error("--teacher is needed unless --tiny")
        teacher_folder = arguments.teacher
        corpus = real_text(teacher_folder, arguments.seq_len, arguments.train_tokens, arguments.heldout_tokens)
    student_folder = scratch / "student"
    if not student_folder.exists():
        init_student(teacher_folder, student_folder, layers="every-2")
    device = torch.device(arguments.device)
    teacher = student.load_student(teacher_folder, dtype=torch.float32, device=device).eval().requires_grad_(False)
    assert teacher.config._attn_implementation == NAME
    vocab_size, kind = teacher.config.vocab_size, choose_kind(device)
    top_k = min(100, vocab_size // 4)
    started = time.monotonic()
    exact = [
        with_rows(bare_sequence(documents), teacher, top_k, kind)
        for documents in pack(corpus.train, arguments.seq_len, arguments.seed)
    ]
    heldout = [
        with_rows(bare_sequence(documents), teacher, top_k, kind)
        for documents in pack(corpus.heldout, arguments.seq_len, arguments.seed)
    ]
    cached = [rounded(sequence) for sequence in exact]
    rows = sum(sequence.num_rows for sequence in cached)
    print(f"{rows:,} teacher rows in {len(cached)} sequences, {time.monotonic() - started:.0f} s", flush=True)
    report: dict[str, Any] = {
        "machine": machine(device),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
        "rows": rows,
        "top_k": top_k,
        "results": [],
    }
    untrained = student.load_student(student_folder, dtype=torch.float32, device=device)
    before = evaluate(untrained, heldout, vocab_size=vocab_size, attention_kind=kind, teacher=teacher)
    report["before"] = before
    print(f"before: full-vocabulary KL {before['heldout_kl_full_vocabulary']:.4f}", flush=True)
    del untrained
    for run in arguments.runs.split(","):
        sequences = exact if run.endswith("/exact") else cached
        result = train(run, student_folder, sequences, heldout, teacher, arguments, vocab_size)
        report["results"].append(result)
        report["claims"] = verdict(report["results"])
        (arguments.out / "parity.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        memory = f", {result['peak_gib']:.1f} GiB" if result["peak_gib"] is not None else ""
        print(
            f"{run:>24}: held-out KL full {result['heldout_kl_full_vocabulary']:.4f}, K+1 {result['heldout_kl']:.4f}, "
            f"top-1 {result['top1_agreement']:.2%}, perplexity {result['perplexity']:.2f}, ECE {result['ece']:.4f}, "
            f"loss {result['curve'][-1]:.4f}, {result['step_ms']:.0f} ms a step{memory}",
            flush=True,
        )
    for claim, value in report["claims"].items():
        print(f"{claim}: {value:.5g}")
    if all(math.isfinite(result["heldout_kl_full_vocabulary"]) for result in report["results"]):
        plot(report["results"], arguments.out / "parity.png")


if __name__ == "__main__":
    main()
