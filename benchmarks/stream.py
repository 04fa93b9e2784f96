"""How fast `stream()` reads from an S3 server, and in how much memory.

    python benchmarks/stream.py [--gib 5] [--seconds 60] [--server localbucket] [--keep FOLDER]

Fills a cache with synthetic rows (K = 100, vocabulary 49,152; one shard's file is committed under many shard ids, so that filling
is cheap and reading is not), starts an S3 server on this machine, and streams with shuffling for the given time in a
separate process. The server shares the machine's cores. Prints rows a second and the reader's peak resident memory;
results: benchmarks/results/stream.json.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

import teachercache
from benchmarks.report import RESULTS, parser, write
from teachercache.format import layout
from teachercache.format.sealed import seal
from teachercache.testing import synthetic_record, synthetic_spec
from tests.servers import serve


def fill(url: str, gib: float) -> None:
    """Commit one shard of about 64 MiB honestly, then put its bytes under other shard ids until `gib` are there.

    Only the names in the footer change (same length, not compressed). Documents repeat, which `publish` would refuse, so
    the manifest is written here.
    """
    spec = synthetic_spec(vocab_size=49_152, top_k=100)
    writer = teachercache.create(url, spec)
    rng = np.random.default_rng(0)
    shard, attempt = "s00000", writer.new_attempt("s00000")
    writer.commit(shard, (synthetic_record(rng, spec, f"d{i}", length=1024) for i in range(200)), attempt=attempt)
    first = writer.publish()
    entry = first.files[0]
    data = writer.store.read(entry.path)
    files = [entry]
    while sum(f.size for f in files) < gib * 2**30:
        name, other = f"s{len(files):05d}", uuid.uuid4().hex
        copy = data.replace(shard.encode(), name.encode()).replace(attempt.attempt.encode(), other.encode())
        path = entry.path.replace(shard, name).replace(attempt.attempt, other)
        writer.store.create(path, copy)
        digest = hashlib.sha256(copy).hexdigest()
        files.append(entry.model_copy(update={"path": path, "sha256": digest, "shard_id": name}))
    sums = {n: sum(getattr(f, n) for f in files) for n in ("rows", "tokens", "records", "documents")}
    manifest = first.model_copy(update={"number": 2, "files": files, "publisher": uuid.uuid4().hex, **sums})
    writer.store.create(layout.manifest_path(2), seal(manifest))


def read(url: str, seconds: float) -> dict[str, float]:
    """Stream for a while; in a process that has done nothing else."""
    cache = teachercache.open(url)
    with cache.stream(seed=1) as stream:
        opened = time.perf_counter()
        next(stream)
        first = time.perf_counter() - opened
        rows, touched, began = 0, 0.0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            record = next(stream)
            rows += len(record.row_pos)
            touched += float(record.topk_logprobs[0, 0]) + int(record.topk_ids[-1, -1])
        elapsed = time.perf_counter() - began
    found = {"rows_per_s": round(rows / elapsed), "seconds": round(elapsed, 1), "first_record_s": round(first, 2)}
    # the peak since this process's exec; getrusage would count the parent's memory before it
    peak = re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0]
    return {**found, "peak_rss_mib": int(peak) // 1024}


def main() -> None:
    keep = (None, "folder of the server's data; re-used when it holds a cache")
    line = parser(__doc__, gib=5.0, seconds=60.0, keep=keep, out=RESULTS / "stream.json")
    line.add_argument("--server", choices=["localbucket", "moto"], default="localbucket")
    args = line.parse_args()
    with tempfile.TemporaryDirectory() as temp, serve(args.server, (args.keep or Path(temp)) / "s3") as server:
        os.environ.update(server.env())
        url = "s3://bench-stream/cache"
        try:
            manifest = teachercache.open(url).manifest
        except teachercache.errors.TeacherCacheError:
            server.new_bucket("bench-stream")
            print(f"filling {args.gib} GiB", flush=True)
            fill(url, args.gib)
            manifest = teachercache.open(url).manifest
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            result = pool.submit(read, url, args.seconds).result(timeout=args.seconds + 120)
    size = sum(f.size for f in manifest.files)
    result |= {
        "cache_gib": round(size / 2**30, 2),
        "cache_rows": manifest.rows,
        "bytes_per_row": round(size / manifest.rows, 1),
        "server": args.server,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": os.getloadavg()[0],
        "taken": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(result, indent=2))
    write(args.out, result)


if __name__ == "__main__":
    main()
