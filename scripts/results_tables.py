"""The tables of docs/RESULTS.md, one function a section, made from benchmarks/results/ for scripts/make_docs.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results"


def load(name: str) -> dict[str, Any]:
    """Return one file of benchmarks/results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def gpu_machine(machine: dict[str, Any], count: int = 1) -> tuple[str, str]:
    """Return (machine and versions, date) of a result that was taken on a GPU."""
    torch = machine["torch"].partition("+")[0]
    name = machine["gpu"].removeprefix("NVIDIA ")
    return f"{count} × {name}; torch {torch}, triton {machine['triton']}", machine["date"]


class Lines:
    """The lines of one table: what, figure, machine and versions, date, command."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def add(self, what: str, figure: str, where: tuple[str, str], command: str) -> None:
        """Add a line; `where` is (machine and versions, date)."""
        self.rows.append([what, figure, *where, f"`{command}`"])

    def markdown(self) -> str:
        """Return the table as Markdown."""
        header = ["what", "figure", "machine and versions", "date", "command"]
        rows = [header, ["---"] * len(header), *self.rows]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


METHOD_NAMES = {
    "fused": "`fused`",
    "forward_chunked": "`forward_chunked`",
    "dense": "`dense`",
    "closed_form": "closed form with recompute, chunk 4,096",
}


def loss() -> str:
    """Return the table of the loss: forward and backward in one run, memory beyond the inputs with gradients included."""
    lines = Lines()
    runs = load("loss_h200.json")["runs"]
    whole = next(run for run in runs if "whole_logits" in run)
    committed = next(run for run in runs if "long" in run)
    where, command = gpu_machine(whole["machine"]), "python benchmarks/loss_h200.py OUT"
    for result in sorted(whole["whole_logits"], key=lambda result: result["extra_gib"]):
        figure = f"{result['time_ms']:.0f} ms, {result['extra_gib']:.2f} GiB"
        lines.add(f"{METHOD_NAMES[result['method']]}, {result['rows']:,} rows", figure, where, command)
    where = gpu_machine(committed["machine"])
    for name, (time_ms, gib, _) in committed["long"].items():
        rows, method = name.split(" ", 1)
        lines.add(f"{METHOD_NAMES[method]}, {int(rows):,} rows", f"{time_ms:,.0f} ms, {gib:.2f} GiB", where, command)
    for head, (time_ms, gib, _) in committed["heads"].items():
        lines.add(f"`fused`, 32,768 rows, head of {head}", f"{time_ms:.0f} ms, {gib:.2f} GiB", where, command)
    time_ms, gib, _ = committed["single_chunk"]["4096"]
    lines.add("`fused`, d = 4,096, 4,096 rows in one chunk", f"{time_ms:.1f} ms, {gib:.2f} GiB", where, command)
    return lines.markdown()


def step() -> str:
    """Return the table of whole training steps: by checkpointing policy, by length, fed from a store; attention alone."""
    lines = Lines()
    rate = load("step_h200_rate_documents.json")
    where, command = gpu_machine(rate["machine"]), "python benchmarks/step_h200.py --groups rate"
    for row in (row for row in rate["rows"] if row["group"] == "rate"):
        figure = f"{row['tflops']:.0f} TFLOP/s, {row['tokens_per_s']:,.0f} tokens/s, {row['memory_gib']:.0f} GiB"
        lines.add(f"{row['case']['tokens']:,} tokens, checkpointing `{row['case']['policy']}`", figure, where, command)
    lengths = load("step_h200_lengths.json")
    where, command = gpu_machine(lengths["machine"]), "python benchmarks/step_h200.py --groups lengths"
    for row in lengths["rows"]:
        case = row["case"]
        tile = f", MLP tiles of {case['mlp_tile']:,}" if case["mlp_tile"] else ""
        figure = f"{row['seconds']:.2f} s, {row['memory_gib']:.0f} GiB, {row['tflops']:.0f} TFLOP/s"
        lines.add(f"{case['tokens']:,} tokens, checkpointing `{case['policy']}`{tile}", figure, where, command)
    for file, name, what, options in (
        ("stream", "full:none", "an S3 server, documents that fill the sequence", "--cache s3://bucket/synthetic"),
        (
            "stream_lengths",
            "mixed:none",
            "a disk, documents of log-normal length",
            "--cache FOLDER --cases mixed:none:4",
        ),
    ):
        stream = load(f"{file}_h200.json")
        case, where = stream["cases"][name], gpu_machine(stream["machine"])
        figure = f"{case['tflops']:.0f} TFLOP/s, data wait {case['data_wait']:.2%} of the step"
        what = f"32,768 tokens, rows decoded during training from {what}"
        lines.add(what, figure, where, f"python benchmarks/stream_h200.py {options}")
    attention = load("attention_h200.json")
    rates = {(row["path"], row["layout"]): row["both_tflops"] for row in attention["rows"]}
    plain, where = rates["plain causal, SDPA", "one document"], gpu_machine(attention["machine"])
    for layout, what in (
        ("8 equal", "8 documents of 4,096"),
        ("64 equal", "64 of 512"),
        ("6 unequal", "6 unequal"),
        ("49 log-normal", "49 of log-normal length"),
    ):
        best = max((rate, path) for (path, other), rate in rates.items() if other == layout and path != "ragged")
        figure = f"{best[0]:.0f} TFLOP/s (`{best[1]}`); plain causal cuDNN over one document {plain:.0f}"
        what = f"attention alone, 32,768 tokens, documents kept apart: {what}"
        lines.add(what, figure, where, "python benchmarks/attention_h200.py")
    return lines.markdown()


def teacher() -> str:
    """Return the table of the teacher's side: rows committed a second, and the driver's cost."""
    lines = Lines()
    for name, gpus, extra in (
        ("teacher_rows_h200.json", 1, ""),
        ("teacher_rows_h200_tp2.json", 2, " --tensor-parallel 2"),
    ):
        result = load(name)
        rates, shares = result["rates_tokens_per_s"], result["share_of_plain"]
        where = (f"{gpus} × H200; {result['provenance']['engine']}", result["host"]["date"])
        over = "one GPU" if gpus == 1 else f"{gpus} GPUs, tensor-parallel"
        command = f"python benchmarks/teacher_rows_h200.py{extra}"
        lines.add(f"plain prefill, no rows, {over}", f"{rates['plain']:,.0f} tokens/s", where, command)
        for key, what in (
            ("pipeline", "rows encoded, uploaded and committed"),
            ("raw + worker", "rows made, not yet encoded"),
            ("dictionaries", "vLLM's default `prompt_logprobs`"),
        ):
            figure = f"{rates[key]:,.0f} tokens/s = {shares[key]:.1%} of plain prefill"
            lines.add(f"{what}, {over}", figure, where, command)
    kinds = load("teacher_rows_h200_rows.json")
    where = (f"1 × H200; {kinds['provenance']['engine']}", kinds["host"]["date"])
    command = "python benchmarks/teacher_rows_h200.py --shards 3"
    rates, times = kinds["rates_tokens_per_s"], kinds["row_us"]
    figure = (
        f"{rates['pipeline, sampled']:,.0f} tokens/s = {kinds['sampled_over_top_k']:.3f} × top-100 in the same run "
        f"({rates['pipeline']:,.0f} and {rates['pipeline again']:,.0f})"
    )
    lines.add("sampled rows of 24 entries, committed, one GPU", figure, where, command)
    figure = f"{times['sampled 24, float32']:.2f} µs a row; top-100 {times['top-100, float32']:.2f} µs"
    lines.add("the sampler of rows of 24 entries by itself, V = 128,256, float32 logits", figure, where, command)
    overhead = load("pipeline_overhead_cpu.json")
    where = (f"{overhead['cpus']}-core CPU; {overhead['provenance']['engine']}", overhead["date"])
    figure = f"{overhead['median_ratio']:.3f} × (median of {len(overhead['pairs'])} pairs)"
    what = "the pipeline against a bare `LLM.generate`, SmolLM2-135M"
    lines.add(what, figure, where, "python benchmarks/pipeline_overhead.py")
    simulation = load("pipeline_simulation.json")
    figure = (
        f"{simulation['receipts_per_cpu_second']:,} receipts a CPU-second, {simulation['peak_rss_gib']:.2f} GiB; "
        f"a half-done job resumes in {simulation['resume_half_done_s']:.1f} s"
    )
    what = f"the driver, simulated: {simulation['shards']:,} shards, {simulation['actors']:,} actors"
    load_note = f"; {simulation['load']}" if "load" in simulation else ""
    where = (f"{simulation['cpus']}-core CPU{load_note}", simulation["date"])
    lines.add(what, figure, where, "python benchmarks/pipeline_simulation.py")
    if large := simulation.get("large_cache"):
        what = f"`open` and `status` of {large['shards']:,} shards, {large['files']:,} files on a disk"
        taken = [(name, large[name]) for name in ("open", "status")]
        figure = "; ".join(
            f"`{name}` {found['seconds']:,.0f} s ({found['cpu_s']:,.0f} s of CPU), {found['peak_rss_gib']:.1f} GiB"
            for name, found in taken
        )
        lines.add(what, figure, where, "python benchmarks/pipeline_simulation.py")
    counted = load("requests.json")
    requests = counted["requests"]
    figure = ", ".join(f"`{name}` {count:,}" for name, count in requests.items() if name in counted["budgets"])
    what = f"requests to a store, {requests['shards']:,} shards, counted by a proxy"
    where = (f"{counted['store']}, {counted['cpus']}-core CPU", counted["date"])
    lines.add(what, figure, where, "python benchmarks/requests_scale.py")
    return lines.markdown()


def storage() -> str:
    """Return the table of bytes a row of both codecs, and the rate of the reader."""
    lines = Lines()
    for name in ("encodings.json", "encodings_gemma3_270m.json"):
        result = load(name)
        where = (f"{result['machine']}, load average {result['load_before']:.0f}", result["taken"])
        real = result["real"]
        for codec in ("open", "compact"):
            variant = real["variants"][f"{codec} (as shipped)"]
            figure = f"{variant['bytes_per_row']:.0f} bytes a row, {variant['decode_rows_per_s']:,} rows/s decoded"
            if codec == "compact":
                loss = real["compact_loss"]
                figure += f"; worst-row L1 error {loss['worst_row_l1']:.3f}, top-1 kept in {loss['top1_agreement']:.2%}"
            what = f"codec `{codec}`, real rows of {result['teacher']} (V = {real['vocab_size']:,})"
            lines.add(what, figure, where, "python benchmarks/encodings.py CACHE")
        for entries in (100, 24, 12) if "sampled" in result else ():
            sizes = [result["sampled"][f"sampled {entries}, {codec}"]["bytes_per_row"] for codec in ("open", "compact")]
            figure = f"{sizes[0]:.1f} bytes a row in `open`, {sizes[1]:.1f} in `compact`"
            what = f"sampled rows of {entries} entries, {result['teacher']} (V = {real['vocab_size']:,})"
            lines.add(what, figure, where, "python benchmarks/encodings.py CACHE --sampled SAMPLED_CACHE")
    for name in ("stream_idle.json", "stream.json"):
        result = load(name)
        where = (f"{result['cores']}-core CPU, load average {result['load_before']:.0f}", result["taken"])
        figure = f"{result['rows_per_s']:,} rows/s, {result['peak_rss_mib']} MiB resident"
        what = f"shuffled training stream from an S3 server, {result['cache_gib']:.0f} GiB cache"
        lines.add(what, figure, where, "python benchmarks/stream.py")
    return lines.markdown()


def quality() -> str:
    """Return the table of students of the cache next to students of the live teacher."""
    lines = Lines()
    report = load("parity_h200.json")
    results = {result["run"]: result for result in report["results"]}
    where, live = gpu_machine(report["machine"]), results["online"]
    for run, what in (
        ("online", "student of the live teacher, full vocabulary"),
        ("online/bucket", "student of the live teacher, its top 100 and the tail"),
        ("fused/bucket", "student of the cache, K = 100"),
        ("fused/bucket/compact", "student of the cache, K = 100, codec `compact`"),
        ("fused/bucket/K50", "student of the cache, K = 50"),
        ("fused/bucket/K10", "student of the cache, K = 10"),
    ):
        result = results[run]
        kl = result["heldout_kl_full_vocabulary"]
        over = kl / live["heldout_kl_full_vocabulary"] - 1
        against = "" if run == "online" else f" ({over:+.1%})"
        figure = f"full-vocabulary KL {kl:.4f}{against}, top-1 agreement {result['top1_agreement']:.1%}"
        lines.add(what, figure, where, "python benchmarks/parity.py --teacher build/models/smollm2-135m --out OUT")
    report = load("parity_rows_h200.json")
    results, where = {result["run"]: result for result in report["results"]}, gpu_machine(report["machine"])
    for entries in (100, 24, 12):
        figures = []
        for run in filter(re.compile(rf"sampled/{entries}(/seed\d+)?").fullmatch, results):
            over = report["claims"][f"held-out full-vocabulary KL over online's: {run}"]
            figures.append(f"{results[run]['heldout_kl_full_vocabulary']:.4f} ({over - 1:+.1%})")
        what = f"student of a sampled cache, {entries} entries, {len(figures)} orders of the documents"
        command = "python benchmarks/parity.py --teacher build/models/smollm2-135m --out OUT --group 1 (and 2)"
        lines.add(what, f"full-vocabulary KL {' and '.join(figures)}", where, command)
    return lines.markdown()


def robustness() -> str:
    """Return the table of chaos runs, another store, and the demo."""
    lines = Lines()
    soak = load("soak.json")
    faults = [run["faults"] for run in soak["runs"]]
    killed = {key: sum(fault.get(key, 0) for fault in faults) for key in ("actor", "driver", "node", "errors")}
    what = (
        f"{soak['seeds']} random jobs: {killed['actor']} actors, {killed['driver']} drivers, {killed['node']} nodes "
        f"killed, {killed['errors']} outages of S3 for {soak['errors_s']:.0f} s"
    )
    passed = soak["seeds"] - soak["failed"]
    figure = f"{passed} of {soak['seeds']}: every document once, or quarantined with a reason"
    lines.add(what, figure, (f"{soak['cpus']}-core CPU", soak["date"]), "make soak")
    gateway = (RESULTS / "radosgw.txt").read_text(encoding="utf-8")
    version = re.search(r"ceph version (\S+)", gateway)
    assert version is not None
    figure = f"{gateway.count(' PASSED')} of {gateway.count('::test_')} tests pass"
    where = (f"Ceph RADOS gateway {version[1]}", "2026-11-30")
    lines.add("the commit protocol on a third S3 server", figure, where, "scripts/protocol_on_radosgw.sh")
    demo = load("demo_cpu.json")
    first = demo["first"]
    figure = (
        f"{first['seconds.whole'] / 60:.0f} min with set-up; held-out KL {first['student.heldout_kl_before']:.2f} → "
        f"{first['student.heldout_kl_after']:.2f} in {first['student.steps']} steps"
    )
    what = f"SmolLM2-135M to an {first['student.parameters'] / 1e6:.0f} M student, nothing faked"
    lines.add(what, figure, (demo["machine"], demo["date"]), "make demo")
    return lines.markdown()
