"""The paper's claim, measured again: does a student trained from the cache equal one trained from the live teacher?

    python benchmarks/parity.py --teacher build/models/smollm2-135m --out benchmarks/results/parity [--steps 500]
    python benchmarks/parity.py --teacher … --out … --steps 40 --runs online,fused/bucket      # reduced, on a CPU
    python benchmarks/parity.py --tiny --out build/parity                                       # a smoke test
    python benchmarks/parity.py --merge a/parity.json,b/parity.json --out FOLDER                # runs taken apart

One teacher, one student cut from it (every second layer), one seed, one sequence of batches; what differs is the loss:
  online            live teacher, full vocabulary             online/bucket      live teacher, its top 100 and a bucket
  dense/TAIL, forward_chunked/TAIL, fused/TAIL                cached rows, TAIL of bucket, none, renormalize
  fused/bucket/K10, fused/bucket/K50                          the first K' cached entries
  fused/bucket/compact                                        rows that the compact codec stored
  fused/bucket/bf16-split, fused/bucket/bf16-stochastic       bf16 weights, with and without the bits of a float32 copy
  online/seed1                                                another order of the documents: how large chance is
Each student is then measured on held-out documents against the live teacher: full-vocabulary KL, K+1 KL, top-1
agreement, perplexity, calibration. Training losses of different losses are not comparable; these figures are.

The teacher's rows are computed here (float32), written to two real caches, of the open and of the compact codec, and
read back by PackedCache; every run trains on the same packed sequences. The text is Python's own reference and
library source.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import teachercache
from teachercache.fingerprint import fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.format.record import Record
from teachercache.format.spec import CacheSpec, TeacherSpec, TopKRows
from teachercache.testing import synthetic_spec
from trainer.bench.measure import GIB, machine
from trainer.bench.shapes import SHAPES
from trainer.config import TrainerConfig
from trainer.data import PackedCache, PackedSequence
from trainer.evaluate import evaluate
from trainer.losses import TeacherRows
from trainer.model import student
from trainer.model.attention import DocumentLayout
from trainer.model.init_student import init_student
from trainer.optim import build_optimizer, lr_factor
from trainer.step import Step

TAILS = ("bucket", "none", "renormalize")
ALL_RUNS = (
    ["online", "online/bucket"]
    + [f"{method}/bucket" for method in ("dense", "forward_chunked", "fused")]
    + [f"fused/{tail}" for tail in TAILS[1:]]
    + [f"fused/bucket/{variant}" for variant in ("K10", "K50", "compact", "bf16-split", "bf16-stochastic")]
    + ["online/seed1"]
)
PIECE = 4000  # characters of library source in a document
Corpus = dict[str, list[list[int]]]  # tokenised documents of each split
Batches = list[PackedSequence]


def real_text(teacher: Path, max_tokens: int, train_tokens: int, heldout_tokens: int) -> Corpus:
    """Return Python's language reference and library source, by the teacher's tokenizer; every tenth document is held out."""
    import sysconfig
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        texts.extend(source[start : start + PIECE] for start in range(0, len(source), PIECE))
    order = np.random.default_rng(0).permutation(len(texts))
    splits: Corpus = {"train": [], "heldout": []}
    wanted = {"train": train_tokens, "heldout": heldout_tokens}
    for index in order:
        split = "heldout" if index % 10 == 9 else "train"
        if wanted[split] > 0 and len(ids := tokenizer.encode(texts[index]).ids[:max_tokens]) >= 32:
            splits[split].append(ids)
            wanted[split] -= len(ids)
    return splits


def random_text() -> Corpus:
    """Return documents of 32 tokens, of twenty different ones, for the smoke test."""
    documents = (3 + 7 * np.random.default_rng(0).integers(0, 20, size=(156, 32))).tolist()
    return {"train": documents[:125], "heldout": documents[125:]}


@torch.no_grad()
def teacher_record(teacher: torch.nn.Module, ids: list[int], doc_id: str, split: str, top_k: int) -> Record:
    """Return one document's rows as the pipeline stores them: float32 softmax over the full vocabulary, all positions."""
    device = next(teacher.parameters()).device
    tokens = torch.tensor(ids, device=device)
    layout = DocumentLayout((len(ids),), "documents", device)
    hidden = student.hidden_states(teacher, tokens, torch.arange(len(ids), device=device), layout)
    logprobs = student.head(teacher).logits(hidden).log_softmax(dim=1)
    rows = TeacherRows.from_logits(logprobs, top_k)
    target = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].cpu().numpy()
    mask = np.ones(len(ids), dtype=bool)
    mask[-1] = False
    return Record(
        doc_id=doc_id,
        split=split,
        input_ids=np.array(ids, dtype=np.int32),
        row_pos=np.arange(len(ids), dtype=np.int32),
        topk_ids=rows.topk_ids.int().cpu().numpy(),
        topk_logprobs=rows.topk_logprobs.float().cpu().numpy(),
        tail_logprob=rows.tail_logprob.float().cpu().numpy(),
        target_logprob=np.append(target, np.float32("nan")),
        loss_mask=mask,
    )


def write_caches(
    teacher: torch.nn.Module, corpus: Corpus, spec: CacheSpec, folder: Path, codecs: set[str]
) -> dict[str, teachercache.Cache]:
    """Write the same records into a cache of each codec."""
    records = [
        teacher_record(teacher, ids, f"{split}-{index:05d}", split, spec.top_k)
        for split, documents in corpus.items()
        for index, ids in enumerate(documents)
    ]
    for codec in codecs:
        writer = teachercache.create(folder / codec, spec, codec=codec)
        writer.commit("all", records)
        writer.publish(allow_partial=True, allow_repeated_content=True)
    return {codec: teachercache.open(folder / codec) for codec in codecs}


def cache_spec(teacher: Path, config: Any, top_k: int) -> CacheSpec:
    """Return the identity of the teacher's cache."""
    if not (teacher / "tokenizer.json").exists():
        return synthetic_spec(vocab_size=config.vocab_size, top_k=top_k)
    digests = {"weights_digest": fingerprint_weights(teacher), "config_digest": fingerprint_config(teacher)}
    identity = TeacherSpec(name=teacher.name, dtype="float32", engine="hf", head_dtype="float32", **digests)
    return CacheSpec(teacher=identity, tokenizer=fingerprint_tokenizer(teacher), rows=TopKRows(entries=top_k))


@dataclass(frozen=True)
class Run:
    """What a run's name says."""

    name: str
    loss: dict[str, Any]
    top_k: int | None
    codec: str
    seed: int
    master: str | None  # of bf16 weights; None = float32 weights

    @classmethod
    def parse(cls, name: str, seed: int) -> Run:
        """Return the run of that name."""
        method, *rest = name.split("/")
        tail = rest[0] if rest and rest[0] in TAILS else (None if method == "online" else "bucket")
        top_k = next((int(part[1:]) for part in rest if part.startswith("K")), None)
        master = next((part.removeprefix("bf16-") for part in rest if part.startswith("bf16-")), None)
        seed += sum(int(part.removeprefix("seed")) for part in rest if part.startswith("seed"))
        codec = "compact" if "compact" in rest else "open"
        return cls(name, {"method": method, "tail": tail}, top_k, codec, seed, master)


def train(
    run: Run, folder: Path, sequences: Batches, heldout: Batches, teacher: Any, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train one student and measure it; return the curve, the figures, and time and memory of a step."""
    device = next(teacher.parameters()).device
    # Float32 has one path on a GPU; for bf16, varlen needs no compilation for each new shape.
    kind = "varlen" if run.master and device.type == "cuda" else "documents"
    optim = {"lr": arguments.lr, "warmup_steps": arguments.warmup, "master": run.master or "auto"}
    sections = {"loss": run.loss, "data": {"top_k": run.top_k}, "optim": optim, "seed": arguments.seed}
    config = TrainerConfig(cache="memory", student=str(folder), teacher="live", **sections)
    torch.manual_seed(arguments.seed)
    dtype = torch.bfloat16 if run.master else torch.float32
    model = student.load_student(folder, dtype=dtype, device=device).train()
    measured = {"vocab_size": teacher.config.vocab_size, "attention_kind": kind, "teacher": teacher}
    step = Step(model, build_optimizer(model, config.optim), config, **measured)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    curve, times = [], []
    for number, sequence in enumerate(sequences):
        lr = config.optim.lr * lr_factor(config.optim, number, number / arguments.steps)
        started = time.perf_counter()
        curve.append(step.run([sequence], lr=lr).loss)
        times.append(time.perf_counter() - started)
    memory = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    figures = evaluate(model, heldout, **measured)
    return {
        "run": run.name,
        "curve": curve,
        "step_ms": 1e3 * float(np.median(times)),
        "peak_gib": memory,
        **{key: value for key, value in figures.items() if isinstance(value, float) and key != "seconds"},
    }


def verdict(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the claims in numbers: methods against each other, students of the cache against the live teacher's."""
    by_run = {result["run"]: result for result in results}
    claims: dict[str, Any] = {}
    for other in ("forward_chunked", "fused"):
        if {"dense/bucket", f"{other}/bucket"} <= by_run.keys():
            base, theirs = (np.array(by_run[f"{method}/bucket"]["curve"]) for method in ("dense", other))
            difference = np.abs(theirs - base) / np.maximum(base, 1e-9)
            for steps in (10, 100, len(difference)):
                name = f"training loss, {other} against dense: largest relative difference of {steps} steps"
                claims[name] = float(difference[:steps].max())
    if "online" in by_run:
        live = by_run["online"]["heldout_kl_full_vocabulary"]
        for name, result in by_run.items():
            if name != "online":
                ratio = result["heldout_kl_full_vocabulary"] / live
                claims[f"held-out full-vocabulary KL over online's: {name}"] = ratio
    return claims


def write(report: dict[str, Any], out: Path) -> None:
    """Write parity.json, as far as the report has come; docs/figures/make_figures.py draws it."""
    report["claims"] = verdict(report["results"])
    text = json.dumps(report, indent=1)
    # A curve in one line, five digits of each loss.
    for result in report["results"]:
        curve = [float(f"{loss:.5g}") for loss in result["curve"]]
        text = text.replace(json.dumps(result["curve"], indent=1).replace("\n", "\n   "), json.dumps(curve))
    (out / "parity.json").write_text(text + "\n", encoding="utf-8")


def merge(paths: list[Path], out: Path) -> None:
    """Write runs of one setting that were taken by several commands as one report."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for other in reports[1:]:
        if other["before"]["heldout_kl"] != reports[0]["before"]["heldout_kl"]:
            raise SystemExit("the reports began with different students or documents: they cannot be compared")
    write(reports[0] | {"results": [result for one in reports for result in one["results"]]}, out)


def tiny_teacher(out: Path) -> Path:
    """Write a random teacher for the smoke test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = SHAPES["tiny"] | {"num_hidden_layers": 4, "vocab_size": 320}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.4, tie_word_embeddings=False)).save_pretrained(out)
    return out


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", default=",".join(ALL_RUNS), help=f"comma-separated, of {', '.join(ALL_RUNS)}")
    numbers = {"steps": 500, "seq-len": 2048, "train-tokens": 1_000_000, "heldout-tokens": 50_000, "lr": 1e-3}
    for name, default in (numbers | {"warmup": 10, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--merge", help="comma-separated parity.json files: write them as one report, run nothing")
    parser.add_argument("--tiny", action="store_true", help="a smoke test with a random teacher")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.merge:
        merge([Path(path) for path in arguments.merge.split(",")], arguments.out)
        return
    scratch = arguments.out / "models"
    if arguments.tiny:
        teacher_folder, arguments.seq_len, arguments.lr = tiny_teacher(scratch / "teacher"), 128, 1e-2
        corpus, arguments.steps = random_text(), min(arguments.steps, 60)
    elif arguments.teacher is None:
        parser.error("--teacher is needed unless --tiny")
    else:
        teacher_folder = arguments.teacher
        corpus = real_text(teacher_folder, arguments.seq_len, arguments.train_tokens, arguments.heldout_tokens)
    student_folder = scratch / "student"
    if not student_folder.exists():
        init_student(teacher_folder, student_folder, layers="every-2")
    device = torch.device(arguments.device)
    teacher = student.load_student(teacher_folder, dtype=torch.float32, device=device).eval().requires_grad_(False)
    vocab_size = teacher.config.vocab_size
    started = time.monotonic()
    spec = cache_spec(teacher_folder, teacher.config, min(100, vocab_size // 4))
    runs = [Run.parse(name, arguments.seed) for name in arguments.runs.split(",")]
    # Held-out rows come from the open codec whatever a student trains on.
    codecs = {"open"} | {run.codec for run in runs}
    caches = write_caches(teacher, corpus, spec, scratch / "cache", codecs)
    rows = caches["open"].manifest.rows
    heldout = list(PackedCache(caches["open"], split="heldout", seq_len=arguments.seq_len, shuffle=False, epochs=1))
    print(f"{rows:,} teacher rows in {len(caches)} caches, {time.monotonic() - started:.0f} s", flush=True)

    @cache
    def batches(codec: str, seed: int) -> Batches:
        packed = PackedCache(caches[codec], seq_len=arguments.seq_len, epochs=None, seed=seed)
        return list(islice(packed, arguments.steps))

    settings = {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)}
    report: dict[str, Any] = {"machine": machine(device), "settings": settings, "rows": rows, "top_k": spec.top_k}
    untrained = student.load_student(student_folder, dtype=torch.float32, device=device)
    before = evaluate(untrained, heldout, vocab_size=vocab_size, attention_kind="documents", teacher=teacher)
    report |= {"results": [], "before": before}
    print(f"before: full-vocabulary KL {before['heldout_kl_full_vocabulary']:.4f}", flush=True)
    del untrained
    for run in runs:
        sequences, same = batches(run.codec, run.seed), batches("open", run.seed)
        assert [s.documents for s in sequences] == [s.documents for s in same], "the codecs gave different batches"
        result = train(run, student_folder, sequences, heldout, teacher, arguments)
        report["results"].append(result)
        write(report, arguments.out)
        memory = f", {result['peak_gib']:.1f} GiB" if result["peak_gib"] is not None else ""
        print(
            f"{run.name:>28}: held-out KL full {result['heldout_kl_full_vocabulary']:.4f}, K+1 {result['heldout_kl']:.4f}, "
            f"top-1 {result['top1_agreement']:.2%}, perplexity {result['perplexity']:.2f}, ECE {result['ece']:.4f}, "
            f"loss {result['curve'][-1]:.4f}, {result['step_ms']:.0f} ms a step{memory}",
            flush=True,
        )
    for claim, value in report["claims"].items():
        print(f"{claim}: {value:.5g}")


if __name__ == "__main__":
    main()
