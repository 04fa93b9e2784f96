"""How many requests each command sends to a store, counted by a proxy, for a cache of a given number of shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import teachercache
from pipeline.config import JobConfig
from pipeline.running.job import run_job
from pipeline.watching.status import read_status
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.verify import verify
from teachercache.write.writer import CacheWriter
from tests.pipeline.faulty_s3 import FaultyProxy
from tests.servers import Server


def upload(folder: Path, server: Server, bucket: str) -> None:
    """Copy a local cache into a bucket under the same names."""
    client = server.client()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=f"cache/{path.relative_to(folder)}", Body=path.read_bytes())


def check(url: str, sample: int) -> None:
    """Verify a sample, which must be sound."""
    store = Store.open(url)
    found = verify(store, Ledger.open(url).spec(), sample=sample)
    assert (found.problems, found.files_read) == ([], sample)


def measured(
    load: Callable[[str, list[Path]], JobConfig], corpus: Callable[[int, int], Path], folder: Path, server: Server,
    shards: int, use: Callable[[str], None], *, upkeep: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Make a cache of `shards` shards by a job, put it behind a proxy, and count the requests of each command.

    load(cache, files) gives the job, corpus(first, count) a file of `count` documents, each of which becomes a shard;
    use(endpoint) points the client at an endpoint; upkeep also counts publishing anew and optimising.
    """
    files = [corpus(0, shards)]
    made = run_job(load(str(folder / "cache"), files), say=lambda text: None).manifest
    assert made is not None
    bucket = server.new_bucket().removeprefix("s3://")
    upload(folder / "cache", server, bucket)
    proxy = FaultyProxy(server.endpoint)
    use(proxy.endpoint)
    url, counts = f"s3://{bucket}/cache", {"shards": made.shards_committed, "files": len(made.files)}
    try:
        counts["open"] = proxy.count(lambda: teachercache.open(url))
        counts["status"] = proxy.count(lambda: read_status(url))
        counts["run, complete"] = proxy.count(lambda: run_job(load(url, files), say=lambda text: None))
        counts["gc, dry"] = proxy.count(lambda: collect(Store.open(url), Ledger.open(url).spec()))
        counts["verify, a sample of 10"] = proxy.count(lambda: check(url, sample=10))
        files.append(corpus(shards, 10))
        counts["run, 10 shards more"] = proxy.count(lambda: run_job(load(url, files), say=lambda text: None))
        added = teachercache.open(url).manifest
        counts["shards added"] = added.shards_committed - made.shards_committed
        assert added.records >= made.records + 10
        unpublished = CacheWriter(Store.open(url), Ledger.open(url).spec())
        for item in unpublished.store.list("manifests/"):
            unpublished.store.delete(item.path)
        counts["commits"] = len(unpublished.committed())
        counts["status, nothing published"] = proxy.count(lambda: read_status(url))
        if not upkeep:
            return counts
        counts["publish, nothing remembered"] = proxy.count(unpublished.publish)
        counts["optimize"] = proxy.count(lambda: optimize(unpublished))
        counts["status, optimized"] = proxy.count(lambda: read_status(url))
    finally:
        proxy.close()
    return counts
