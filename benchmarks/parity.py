"""The paper's claim, measured again: does a student trained from the cache equal one trained from the live teacher?

    python benchmarks/parity.py --teacher build/models/smollm2-135m --out benchmarks/results/parity [--steps 500]
    python benchmarks/parity.py --teacher … --out … --steps 40 --runs online,fused/bucket      # reduced, on a CPU
    python benchmarks/parity.py --tiny --out build/parity                                       # a smoke test
    python benchmarks/parity.py --teacher … --out … --group 1 --jobs 4        # half of the runs, four at a time on a GPU
    python benchmarks/parity.py --merge a/parity.json,b/parity.json --out FOLDER                # runs taken apart

One teacher, one student cut from it (every second layer), one seed, one sequence of batches; what differs is the loss:
  online            live teacher, full vocabulary             online/bucket      live teacher, its top 100 and a bucket
  dense/TAIL, forward_chunked/TAIL, fused/TAIL                cached rows, TAIL of bucket, none, renormalize
  fused/bucket/K10, fused/bucket/K50                          the first K' cached entries
  fused/bucket/compact                                        rows that the compact codec stored
  fused/bucket/bf16-split, fused/bucket/bf16-stochastic       bf16 weights, with and without the bits of a float32 copy
  fused/bucket/ce0.1                                          a share of cross-entropy on the real next token
  sampled/N                                                   a sampled cache of N entries a row
  thin/N                                                      one of N entries, thinned from the sampled cache of 100
  …/x4                                                        a quarter of the documents, each seen four times
  …/seedN                                                     another order of the documents: how large chance is
Each student is then measured on held-out documents against the live teacher: full-vocabulary KL, K+1 KL, top-1
agreement, perplexity, calibration. Training losses of different losses are not comparable; these figures are.

The teacher's rows are computed here (float32, as the `hf` engine does), written to real caches, published and read back
by PackedCache; every run trains on the same packed sequences. A student of a sampled cache is also measured by that
cache alone. Bytes a row are those of the held-out files, all columns and footers. The text is Python's own reference and
library source. Caches below OUT/models are used again by the next command with the same OUT.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache as cache_of
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import teachercache
from teachercache.fingerprint import fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.format.record import Record, content_key, row_uniforms
from teachercache.format.spec import CacheSpec, Rows, SampledRows, TeacherSpec, TopKRows
from teachercache.testing import synthetic_spec
from teachercache.upkeep.thin import thin
from trainer.bench.measure import GIB, machine
from trainer.bench.shapes import SHAPES
from trainer.config import TrainerConfig
from trainer.data import PackedCache, PackedSequence
from trainer.evaluate import evaluate
from trainer.losses import TeacherRows
from trainer.losses.online import sampled_rows
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
GROUPS = {
    # 1: what a row of each kind and size gives. 2: data seen four times, second orders, other mixes. The longest first.
    1: "online online/seed1 fused/bucket sampled/100 sampled/24 thin/24 sampled/12 sampled/50 fused/bucket/K10 "
    "fused/bucket/K50",
    2: "online/x4 sampled/100/seed1 sampled/24/seed1 sampled/12/seed1 thin/24/seed1 fused/bucket/x4 sampled/100/x4 "
    "sampled/24/x4 sampled/12/x4 fused/bucket/ce0.1 fused/bucket/ce0.3",
}
QUARTER = "quarter"
"""The source of every fourth training document; all others are of "rest"."""
PIECE = 4000  # characters of library source in a document
Corpus = dict[str, list[list[int]]]  # tokenised documents of each split
Batches = list[PackedSequence]


def real_documents() -> list[tuple[int, str]]:
    """Return Python's language reference and library source in pieces, numbered, in a fixed random order."""
    import sysconfig
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        texts.extend(source[start : start + PIECE] for start in range(0, len(source), PIECE))
    return [(index, texts[index]) for index in np.random.default_rng(0).permutation(len(texts))]


def real_text(teacher: Path, max_tokens: int, train_tokens: int, heldout_tokens: int) -> Corpus:
    """Return `real_documents` by the teacher's tokenizer; every tenth document is held out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    splits: Corpus = {"train": [], "heldout": []}
    wanted = {"train": train_tokens, "heldout": heldout_tokens}
    for index, text in real_documents():
        split = "heldout" if index % 10 == 9 else "train"
        if wanted[split] > 0 and len(ids := tokenizer.encode(text).ids[:max_tokens]) >= 32:
            splits[split].append(ids)
            wanted[split] -= len(ids)
    return splits


def random_text() -> Corpus:
    """Return documents of 32 tokens, of twenty different ones, for the smoke test."""
    documents = (3 + 7 * np.random.default_rng(0).integers(0, 20, size=(156, 32))).tolist()
    return {"train": documents[:125], "heldout": documents[125:]}


@torch.no_grad()
def teacher_records(
    teacher: torch.nn.Module, ids: list[int], doc_id: str, source: str, split: str, specs: dict[str, CacheSpec]
) -> dict[str, Record]:
    """Return one document as the pipeline stores it, with the rows of each spec: float32 logits, all positions."""
    device = next(teacher.parameters()).device
    tokens = torch.tensor(ids, device=device)
    layout = DocumentLayout((len(ids),), "documents", device)
    hidden = student.hidden_states(teacher, tokens, torch.arange(len(ids), device=device), layout)
    logits = student.head(teacher).logits(hidden)
    logprobs = logits.log_softmax(dim=1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=1).cpu().numpy()
    target = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].cpu().numpy()
    input_ids, row_pos = np.array(ids, dtype=np.int32), np.arange(len(ids), dtype=np.int32)
    mask = np.ones(len(ids), dtype=bool)
    mask[-1] = False
    found = {}
    for name, spec in specs.items():
        if isinstance(spec.rows, SampledRows):
            u = row_uniforms(spec.digest, content_key(spec.digest, input_ids, row_pos), row_pos)
            rows = sampled_rows(
                logits, spec.rows.entries, spec.rows.exact, torch.from_numpy(u).to(device), chunk_size=512
            )
            assert rows.exact is not None
            exact = rows.exact.cpu().numpy().astype(np.uint16)
        else:
            rows, exact = TeacherRows.from_logits(logprobs, spec.top_k), None
        found[name] = Record(
            doc_id=doc_id,
            split=split,
            source=source,
            input_ids=input_ids,
            row_pos=row_pos,
            topk_ids=rows.topk_ids.int().cpu().numpy(),
            topk_logprobs=rows.topk_logprobs.float().cpu().numpy(),
            tail_logprob=rows.tail_logprob.float().cpu().numpy(),
            target_logprob=np.append(target, np.float32("nan")),
            loss_mask=mask,
            entropy=entropy,
            exact=exact,
        )
    return found


def open_caches(
    teacher: torch.nn.Module, corpus: Corpus, folder: Path, specs: dict[str, CacheSpec]
) -> dict[str, teachercache.Cache]:
    """Return a cache of each name, written where it is not there yet: open, compact, sampled-N, and thin-N."""
    wanted = {name: spec for name, spec in specs.items() if not published(folder / name)}
    drawn = {name: spec for name, spec in wanted.items() if not name.startswith("thin")}
    records: dict[str, list[Record]] = {name: [] for name in drawn}
    for split, documents in corpus.items() if drawn else ():
        for index, ids in enumerate(documents):
            source = QUARTER if split == "train" and index % 4 == 0 else "rest"
            found = teacher_records(teacher, ids, f"{split}-{index:05d}", source, split, drawn)
            for name, record in found.items():
                records[name].append(record)
    for name, spec in drawn.items():
        writer = teachercache.create(folder / name, spec, codec="compact" if name == "compact" else "open")
        writer.commit("all", records[name])
        writer.publish(allow_partial=True, allow_repeated_content=True)
    for name in wanted.keys() - drawn.keys():
        thin(teachercache.open(folder / "sampled-100"), folder / name, entries=int(name.removeprefix("thin-")))
    return {name: teachercache.open(folder / name) for name in specs}


def published(folder: Path) -> bool:
    """Return whether an earlier command finished a cache."""
    return any((folder / "manifests").glob("*.json"))


def bytes_per_row(caches: dict[str, teachercache.Cache], scratch: Path) -> dict[str, float]:
    """Return bytes of a held-out row by kind and codec: files of one split, all columns and footers."""
    found = {}
    for name in [name for name in caches if name != "compact"]:
        spec, records = caches[name].spec, list(caches[name].records(split="heldout"))
        cuts = (10, 50, spec.top_k) if spec.rows.kind == "top_k" else (spec.top_k,)
        for k, codec in product(cuts, ("open", "compact")):
            label = f"{'top' if spec.rows.kind == 'top_k' else name.split('-')[0]}-{k}/{codec}"
            with TemporaryDirectory(dir=scratch) as folder:
                rows = spec.rows if k == spec.top_k else TopKRows(entries=k)
                writer = teachercache.create(folder, spec.model_copy(update={"rows": rows}), codec=codec, probe=False)
                writer.commit("all", [record if k == spec.top_k else first(record, k) for record in records])
                manifest = writer.publish(allow_partial=True)
                found[label] = round(sum(entry.size for entry in manifest.files) / manifest.rows, 2)
    return found


def first(record: Record, k: int) -> Record:
    """Return a record with the first k entries of its top-K rows."""
    logprobs = record.topk_logprobs
    rest = np.logaddexp.reduce(np.column_stack([record.tail_logprob, logprobs[:, k:]]), axis=1)
    return replace(
        record,
        topk_ids=record.topk_ids[:, :k],
        topk_logprobs=logprobs[:, :k],
        tail_logprob=rest.astype(np.float32),
        target_logprob=np.full_like(record.target_logprob, np.nan),
        content_key=b"",
    )


def cache_spec(teacher: Path, config: Any, rows: Rows) -> CacheSpec:
    """Return the identity of the teacher's cache."""
    if not (teacher / "tokenizer.json").exists():
        return synthetic_spec(vocab_size=config.vocab_size, rows=rows)
    digests = {"weights_digest": fingerprint_weights(teacher), "config_digest": fingerprint_config(teacher)}
    identity = TeacherSpec(name=teacher.name, dtype="float32", engine="hf", head_dtype="float32", **digests)
    return CacheSpec(teacher=identity, tokenizer=fingerprint_tokenizer(teacher), rows=rows)


def specs_for(runs: list[Run], teacher: Path, config: Any) -> dict[str, CacheSpec]:
    """Return the spec of each cache that the runs need, by name; held-out rows are always those of `open`."""
    vocab = config.vocab_size
    plain = cache_spec(teacher, config, TopKRows(entries=min(100, vocab // 4)))
    names = {"open"} | {run.cache for run in runs}
    if any(name.startswith("thin") for name in names):
        names.add("sampled-100")
    found = {}
    for name in sorted(names):  # open, sampled, thin: what is thinned comes before
        kind, _, entries = name.partition("-")
        rows = SampledRows.model_validate({"entries": int(entries)}) if entries else plain.rows
        found[name] = plain.model_copy(update={"rows": rows}) if kind != "compact" else plain
    return found


@dataclass(frozen=True)
class Run:
    """What a run's name says."""

    name: str
    loss: dict[str, Any]
    top_k: int | None
    cache: str
    seed: int
    passes: int
    master: str | None  # of bf16 weights; None = float32 weights

    @classmethod
    def parse(cls, name: str, seed: int) -> Run:
        """Return the run of that name."""
        method, *rest = name.split("/")
        cache = "compact" if "compact" in rest else "open"
        loss: dict[str, Any] = {"method": method, "tail": rest[0] if rest and rest[0] in TAILS else "auto"}
        if method in ("sampled", "thin"):
            cache, loss = f"{method}-{rest[0]}", {"method": "fused", "tail": "sampled"}
        elif method == "online" and loss["tail"] == "auto":
            loss["tail"] = None
        loss["ce_weight"] = next((float(part[2:]) for part in rest if part.startswith("ce")), 0.0)
        top_k = next((int(part[1:]) for part in rest if part.startswith("K")), None)
        master = next((part.removeprefix("bf16-") for part in rest if part.startswith("bf16-")), None)
        seed += sum(int(part.removeprefix("seed")) for part in rest if part.startswith("seed"))
        return cls(name, loss, top_k, cache, seed, 4 if "x4" in rest else 1, master)


def train(
    run: Run, folder: Path, sequences: Batches, heldout: dict[str, Batches], teacher: Any, arguments: argparse.Namespace
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
    figures = evaluate(model, heldout["open"], **measured)
    if run.cache in heldout and run.cache not in ("open", "compact"):
        alone = evaluate(model, heldout[run.cache], **(measured | {"teacher": None}))
        figures |= {"cache_alone_kl": alone["heldout_kl"], "cache_alone_error": alone["heldout_kl_standard_error"]}
    return {
        "run": run.name,
        "curve": curve,
        "step_ms": 1e3 * float(np.median(times)),
        "peak_gib": memory,
        **{key: value for key, value in figures.items() if isinstance(value, float) and key != "seconds"},
    }


def live_run(name: str) -> str:
    """Return the run of the live teacher on the same documents in the same order."""
    last = name.rsplit("/", 1)[-1]
    return f"online/{last}" if re.fullmatch(r"x4|seed\d+", last) else "online"


def verdict(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the claims in numbers: methods against each other, students of the cache against the live teacher's."""
    by_run = {result["run"]: result for result in results}
    claims: dict[str, Any] = {}
    orders: dict[str, list[float]] = {}
    for other in ("forward_chunked", "fused"):
        if {"dense/bucket", f"{other}/bucket"} <= by_run.keys():
            base, theirs = (np.array(by_run[f"{method}/bucket"]["curve"]) for method in ("dense", other))
            difference = np.abs(theirs - base) / np.maximum(base, 1e-9)
            for steps in (10, 100, len(difference)):
                name = f"training loss, {other} against dense: largest relative difference of {steps} steps"
                claims[name] = float(difference[:steps].max())
    for name, result in by_run.items():
        live = by_run.get(live_run(name))
        if live is not None and live is not result:
            ratio = result["heldout_kl_full_vocabulary"] / live["heldout_kl_full_vocabulary"]
            claims[f"held-out full-vocabulary KL over online's: {name}"] = ratio
            orders.setdefault(re.sub(r"/seed\d+$", "", name), []).append(ratio)
    for name, ratios in orders.items():
        if len(ratios) > 1:
            claims[f"mean over {len(ratios)} orders of the documents: {name}"] = statistics.mean(ratios)
            claims[f"its standard error: {name}"] = statistics.stdev(ratios) / math.sqrt(len(ratios))
    for name, result in by_run.items():
        if "cache_alone_kl" in result:
            gap = result["cache_alone_kl"] - result["heldout_kl_full_vocabulary"]
            claims[f"held-out KL from the cache alone, in standard errors from the live figure: {name}"] = (
                gap / result["cache_alone_error"]
            )
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


def print_claims(report: dict[str, Any]) -> None:
    """Print the claims, a line each."""
    for claim, value in report["claims"].items():
        print(f"{claim}: {value:.5g}")


def merge(paths: list[Path], out: Path) -> dict[str, Any]:
    """Write runs of one setting that were taken by several commands as one report, and return it."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    order = [*ALL_RUNS, *GROUPS[1].split(), *GROUPS[2].split()]
    reports = [one for one in reports if one["results"] or one["bytes_per_row"]]
    begun = [one for one in reports if "before" in one]
    for other in begun[1:]:
        if not math.isclose(other["before"]["heldout_kl"], begun[0]["before"]["heldout_kl"], rel_tol=1e-4):
            raise SystemExit("the reports began with different students or documents: they cannot be compared")
    sizes = {name: size for one in reports for name, size in one.get("bytes_per_row", {}).items()}
    results = [result for one in reports for result in one["results"]]
    results.sort(key=lambda result: order.index(result["run"]) if result["run"] in order else len(order))
    report = begun[0] | {"bytes_per_row": sizes, "results": results}
    write(report, out)
    return report


def tiny_teacher(out: Path) -> Path:
    """Write a random teacher for the smoke test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = SHAPES["tiny"] | {"num_hidden_layers": 4, "vocab_size": 320}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.4, tie_word_embeddings=False)).save_pretrained(out)
    return out


def in_parallel(runs: list[Run], arguments: argparse.Namespace, models: Path) -> list[Path]:
    """Start a process for each of --jobs shares of the runs, on the caches below `models`; return their reports.

    A step waits for the CPU more than for the GPU, so some of them share one. Raises SystemExit where one fails.
    """
    folders = [arguments.out / f"job-{number}" for number in range(min(arguments.jobs, len(runs)))]
    passed = ("device", "steps", "seq_len", "train_tokens", "heldout_tokens", "lr", "warmup", "seed")
    common = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in passed]
    common += ["--tiny"] if arguments.tiny else [f"--teacher={arguments.teacher}"]
    children = []
    for number, folder in enumerate(folders):
        names = ",".join(run.name for run in runs[number :: len(folders)])
        command = [sys.executable, __file__, *common, f"--runs={names}", f"--out={folder}", f"--models={models}"]
        children.append(subprocess.Popen(command))
    failed = [child.args for child in children if child.wait()]
    if failed:
        print(f"{len(failed)} of {len(children)} processes failed: {failed}", file=sys.stderr)
    return [path for folder in folders if (path := folder / "parity.json").exists()]


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="where student and caches are made and found; default: OUT/models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", help=f"comma-separated, of {', '.join(ALL_RUNS)}, or the names of --group")
    parser.add_argument("--group", type=int, choices=GROUPS, help="the runs of one half of the comparison of rows")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the GPU")
    numbers = {"steps": 500, "seq-len": 2048, "train-tokens": 1_000_000, "heldout-tokens": 50_000, "lr": 1e-3}
    for name, default in (numbers | {"warmup": 10, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--merge", help="comma-separated parity.json files: write them as one report, run nothing")
    parser.add_argument("--tiny", action="store_true", help="a smoke test with a random teacher")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.merge:
        print_claims(merge([Path(path) for path in arguments.merge.split(",")], arguments.out))
        return
    models = arguments.models or arguments.out / "models"
    if arguments.tiny:
        teacher_folder, arguments.seq_len, arguments.lr = models / "teacher", 128, 1e-2
        if not teacher_folder.exists():
            tiny_teacher(teacher_folder)
        corpus, arguments.steps = random_text(), min(arguments.steps, 60)
    elif arguments.teacher is None:
        parser.error("--teacher is needed unless --tiny")
    else:
        teacher_folder = arguments.teacher
        corpus = real_text(teacher_folder, arguments.seq_len, arguments.train_tokens, arguments.heldout_tokens)
    student_folder = models / "student"
    if not student_folder.exists():
        init_student(teacher_folder, student_folder, layers="every-2")
    device = torch.device(arguments.device)
    teacher = student.load_student(teacher_folder, dtype=torch.float32, device=device).eval().requires_grad_(False)
    started = time.monotonic()
    names = GROUPS[arguments.group].split() if arguments.group else ALL_RUNS
    names = arguments.runs.split(",") if arguments.runs else names
    runs = [Run.parse(name, arguments.seed) for name in names]
    caches = open_caches(teacher, corpus, models / "cache", specs_for(runs, teacher_folder, teacher.config))
    rows, top_k = caches["open"].manifest.rows, caches["open"].spec.top_k
    print(f"{rows:,} teacher rows in {len(caches)} caches, {time.monotonic() - started:.0f} s", flush=True)
    report: dict[str, Any] = {
        "machine": machine(device),
        "settings": {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)},
        "rows": rows,
        "top_k": top_k,
        "bytes_per_row": {} if arguments.models else bytes_per_row(caches, models),
        "results": [],
    }
    print(json.dumps(report["bytes_per_row"]), f"{time.monotonic() - started:.0f} s", flush=True)
    if arguments.jobs > 1:
        del teacher
        write(report, arguments.out)
        reports = in_parallel(runs, arguments, models)
        report = merge([*reports, arguments.out / "parity.json"], arguments.out)
    else:
        train_all(runs, caches, report, student_folder, teacher, arguments)
    print_claims(report)
    print(f"{len(report['results'])} of {len(runs)} runs, {time.monotonic() - started:.0f} s", flush=True)
    if len(report["results"]) < len(runs):
        raise SystemExit(1)


def train_all(
    runs: list[Run],
    caches: dict[str, teachercache.Cache],
    report: dict[str, Any],
    student_folder: Path,
    teacher: Any,
    arguments: argparse.Namespace,
) -> None:
    """Train and measure the student of each run, and write the report after each."""
    device = next(teacher.parameters()).device
    heldout = {
        name: list(PackedCache(cache, split="heldout", seq_len=arguments.seq_len, shuffle=False, epochs=1))
        for name, cache in caches.items()
    }

    @cache_of
    def batches(name: str, seed: int, passes: int) -> Batches:
        weights = {QUARTER: 1.0} if passes > 1 else None
        packed = PackedCache(caches[name], seq_len=arguments.seq_len, epochs=None, seed=seed, weights=weights)
        return list(islice(packed, arguments.steps))

    untrained = student.load_student(student_folder, dtype=torch.float32, device=device)
    measured = {"vocab_size": teacher.config.vocab_size, "attention_kind": "documents", "teacher": teacher}
    report["before"] = evaluate(untrained, heldout["open"], **measured)
    print(f"before: full-vocabulary KL {report['before']['heldout_kl_full_vocabulary']:.4f}", flush=True)
    del untrained
    for run in runs:
        sequences, same = (batches(name, run.seed, run.passes) for name in (run.cache, "open"))
        assert [s.documents for s in sequences] == [s.documents for s in same], "the caches gave different batches"
        result = train(run, student_folder, sequences, heldout, teacher, arguments)
        report["results"].append(result)
        write(report, arguments.out)
        memory = f", {result['peak_gib']:.1f} GiB" if result["peak_gib"] is not None else ""
        alone = ""
        if "cache_alone_kl" in result:
            alone = f" (cache alone {result['cache_alone_kl']:.4f} ± {result['cache_alone_error']:.4f})"
        print(
            f"{run.name:>28}: held-out KL full {result['heldout_kl_full_vocabulary']:.4f}"
            f"{alone}, K+1 {result['heldout_kl']:.4f}, "
            f"top-1 {result['top1_agreement']:.2%}, perplexity {result['perplexity']:.2f}, ECE {result['ece']:.4f}, "
            f"loss {result['curve'][-1]:.4f}, {result['step_ms']:.0f} ms a step{memory}",
            flush=True,
        )


if __name__ == "__main__":
    main()
