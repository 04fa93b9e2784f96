"""The process in which mutated input is read: its address space is bounded, and it may write in its sandbox alone."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import apply_bytes, apply_tree

ROOM = 2**30 + 2**28  # a gibibyte, and 256 MiB of address space for stacks and arenas that nothing fills
# Audit event -> (place of a path, place of its dir_fd) among the arguments.
WRITES: dict[str, list[tuple[int, int]]] = {
    "os.remove": [(0, 1)], "os.rmdir": [(0, 1)], "os.mkdir": [(0, 2)], "os.rename": [(0, 2), (1, 3)],
    "os.link": [(1, 3)], "os.symlink": [(1, 2)], "os.truncate": [(0, 9)], "os.chmod": [(0, 2)], "shutil.rmtree": [(0, 1)],
}  # fmt: skip


class Escaped(BaseException):
    """Something was written outside the sandbox; no handler of ours or of a library takes it."""


def serve(pipe: Connection, kinds: str) -> None:
    """Answer plans until the pipe ends: (outcome, traceback)."""
    sandbox = Path(tempfile.mkdtemp(prefix="fuzz-")).resolve()
    os.environ.update(HOME=str(sandbox), TMPDIR=str(sandbox), XDG_CACHE_HOME=str(sandbox / "cache"))
    tempfile.tempdir = str(sandbox)
    warnings.simplefilter("ignore")
    base = Cache(sandbox) if kinds == "cache" else Trainer(sandbox, resume=kinds == "state")
    sys.addaudithook(_watch(str(sandbox)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_outcome(base, *pipe.recv()))
    shutil.rmtree(sandbox, ignore_errors=True)


def _outcome(base: Cache | Trainer, kind: str, plan: Any) -> tuple[str, str]:
    from teachercache.errors import TeacherCacheError

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            base.run(kind, plan)
        except TeacherCacheError as error:
            if not str(error).isprintable():
                return "not one printable line", str(error)
            return error.code, ""
        except BaseException as error:
            return type(error).__name__, traceback.format_exc()[-3000:]
    return "right", ""


def _watch(sandbox: str) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, (str, bytes)) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return
            touched = [(path, None)]
        elif event in WRITES:
            touched = [(arguments[i], arguments[j] if j < len(arguments) else None) for i, j in WRITES[event]]
        else:
            return
        for item, folder in touched:
            if isinstance(item, int):
                continue
            above = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else ""
            full = os.path.realpath(os.path.join(above, os.fsdecode(item)))
            if not full.startswith((sandbox, "/dev/", "/proc/")):
                raise Escaped(f"{event} of {full!r}")

    return hook


class Cache:
    """Caches of each codec and kind of rows, one of whose objects is mutated; all readers go over it."""

    def __init__(self, sandbox: Path) -> None:
        import numpy as np
        import pyarrow.dataset  # noqa: F401 - what readers import later would count as theirs
        from tokenizers import Tokenizer, models

        import teachercache
        from pipeline.config import load_job
        from teachercache.testing import synthetic_records
        from tests.fuzz.specs import SPECS

        self.sandbox, self.load_job, self.np = sandbox, load_job, np
        self.cases: dict[str, dict[str, bytes]] = {}
        self.specs = SPECS
        self.more = {spec.digest: synthetic_records(spec, 2, seed=7, prefix="u") for spec, _ in SPECS.values()}
        for name, (spec, codec) in SPECS.items():
            root = sandbox / "base" / name
            writer = teachercache.create(root, spec, probe=False, codec=codec)
            writer.rows_per_group = 60
            from teachercache.format.objects import Plan, PlanShard
            from teachercache.format.sealed import utc_now

            shards = [PlanShard(shard_id=s, source="default", input="x.jsonl", input_digest="d", stop=9) for s in "st"]
            writer.put_plan(
                Plan(spec_digest=spec.digest, created=utc_now(), shards=shards, job={"a": [1, {"b": None}]})
            )
            both = synthetic_records(spec, 4, length=20) + synthetic_records(spec, 2, prefix="h", split="heldout")
            writer.commit("s", both, drops={"empty": 2}, provenance={"engine": "x", "shard_seconds": 1.5})
            writer.commit("t", synthetic_records(spec, 3, seed=3, prefix="t"))
            writer.quarantine("s", reason="nan", message="a row", documents=["a"], scope="document")
            writer.publish()
            from teachercache.format.objects import Run, TokenizerIndex, TokenizerIndexEntry
            from teachercache.format.sealed import seal

            body = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str().encode()
            entry = TokenizerIndexEntry(name="tokenizer.json", size=len(body), sha256=hashlib.sha256(body).hexdigest())
            folder = root / "tokenizer" / spec.tokenizer.digest
            folder.mkdir(parents=True)
            (folder / "tokenizer.json").write_bytes(body)
            (folder / "index.json").write_bytes(seal(TokenizerIndex(files=[entry])))
            run = Run(
                spec_digest=spec.digest, run="a" * 32, manifest=1, student="s", parameters=5, steps=2, rows=3, heldout_kl=0.5,
                created=utc_now(),
            )  # fmt: skip
            (root / "runs").mkdir()
            (root / f"runs/{run.run}-00000002.json").write_bytes(seal(run))
            self.cases[name] = {
                str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
            }
        self.job = Path("deploy/examples/tutorial-job.yaml").read_bytes()

    def run(self, kind: str, plan: Any) -> None:
        """Mutate one object and read everything."""
        if kind == "job":
            path = self.sandbox / "job.yaml"
            path.write_bytes(_changed_yaml(self.job, *plan))
            self.load_job(path)
            return
        case, number, changes, options = plan
        files = dict(self.cases[case])
        prefix = {"data": "data/", "footer": "data/", "table": "data/"}.get(kind, f"{kind}")
        wanted = {"tokenizer/": "index.json", "data/": ".parquet", "manifests/keys/": ".parquet"}.get(prefix, ".json")
        names = [n for n in files if n.startswith(prefix) and n.endswith(wanted)]
        name = names[number % len(names)]
        spec, _ = self.specs[case]
        honest = not options["sealed"]
        if kind in ("data", "footer"):
            files[name] = _changed_part(files[name], changes, footer=kind == "footer")
        elif kind == "table":
            from tests.fuzz.tables import rewritten

            files[name] = rewritten(files[name], changes, options, self.sandbox / "scratch.parquet")
        elif options["raw"]:
            files[name] = apply_bytes(files[name], changes)
        else:
            value = json.loads(files[name])
            value.pop("seal")
            files[name] = _sealed(
                json.dumps(apply_tree(value, changes), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            )
            honest = False
        if prefix == "data/" and not honest:
            _describe(files, name, options)
        if prefix == "manifests/keys/" and not honest:
            _describe_keys(files, name)
        root = self.sandbox / "cache-under-test"
        shutil.rmtree(root, ignore_errors=True)
        for path, data in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        self.read(root, spec, options["reader"], expected=case if honest and prefix == "data/" else None)

    def read(self, root: Path, spec: Any, reader: int, expected: str | None) -> None:
        """Read the cache in one of many ways, and check what comes back."""
        import teachercache
        from teachercache.cli import describe
        from teachercache.store.ledger import Ledger
        from teachercache.store.store import Store
        from teachercache.upkeep.gc import collect
        from teachercache.upkeep.optimize import optimize
        from teachercache.upkeep.verify import verify
        from teachercache.views import show
        from teachercache.views.export import export
        from teachercache.views.report import report

        store = Store.open(root)
        way = reader % 10
        if way == 0:
            verify(store, Ledger(store).spec())
            return
        if way == 1:
            describe(store)
            ledger = Ledger(store)
            for part in (ledger.commits, ledger.plans, ledger.quarantines, ledger.newest_manifest, ledger.runs):
                part()
            collect(store, ledger.spec(), dry_run=True)
            return
        if way == 2:
            writer = teachercache.CacheWriter(store, Ledger(store).spec())
            writer.commit("u", self.more[writer.spec.digest])  # so that publishing looks into the key runs
            writer.publish(allow_partial=True, allow_repeated_content=True)
            optimize(writer, allow_partial=True, allow_repeated_content=True)
            return
        cache = teachercache.open(root)
        if way == 3:
            Store.open(root.parent / "site").replace("index.html", report(cache).encode())
        elif way == 4:
            shutil.rmtree(root.parent / "export", ignore_errors=True)
            export(cache, root.parent / "export")
        elif way == 5:
            show.summary(cache)
            text = show.TokenText(cache)
            for record in cache.records(limit=2):
                show.head_rows(record, text, positions=5, top=3)
        elif way == 6:
            for record in cache.stream(repeat=False, prefetch=1, shuffle_groups=2):
                self.check(record, cache.spec)
        else:
            for record in cache.records():
                self.check(record, cache.spec)

    def check(self, record: Any, spec: Any) -> None:
        """Check what a batch is made of."""
        n, r, k, vocab = len(record.input_ids), len(record.row_pos), spec.top_k, spec.tokenizer.vocab_size
        assert n > 0
        assert r > 0
        assert record.topk_ids.shape == record.topk_logprobs.shape == (r, k)
        assert len(record.tail_logprob) == len(record.target_logprob) == len(record.loss_mask) == r
        for ids in (record.input_ids, record.topk_ids):
            assert 0 <= ids.min() <= ids.max() < vocab
        assert 0 <= record.row_pos[0] <= record.row_pos[-1] < n
        assert (self.np.diff(record.row_pos) > 0).all()
        assert self.np.isfinite(record.topk_logprobs).all()
        assert self.np.isfinite(record.tail_logprob).all()


def _changed_yaml(text: bytes, changes: Any, raw: bool) -> bytes:
    """Change a YAML file's bytes, or its values."""
    import yaml

    if raw:
        return apply_bytes(text, changes)
    return json.dumps(apply_tree(yaml.safe_load(text), changes)).encode()


def _changed_part(data: bytes, changes: Any, *, footer: bool) -> bytes:
    """Change the footer, or what is before it."""
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if not footer:
        return apply_bytes(data, changes)
    changed = apply_bytes(data[start:-8], changes)
    return data[:start] + changed + len(changed).to_bytes(4, "little") + b"PAR1"


def _describe(files: dict[str, bytes], name: str, options: dict[str, Any]) -> None:
    """Make commit and manifest agree with a changed data file, its counts as the footer has them where it can be read."""
    import pyarrow.parquet as pq

    data = files[name]
    changes: dict[str, Any] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if options["agree"]:
        with contextlib.suppress(Exception):
            footer = pq.read_metadata(io.BytesIO(data))
            changes |= {"records": footer.num_rows, "row_groups": footer.num_row_groups}
            at = {footer.schema.column(i).path.split(".")[0]: i for i in range(footer.num_columns)}
            for field, column in (("tokens", "input_ids"), ("rows", "row_pos")):
                changes[field] = sum(
                    footer.row_group(g).column(at[column]).num_values for g in range(footer.num_row_groups)
                )
    for path in files:
        if path.startswith(("commits/", "manifests/")) and path.endswith(".json"):
            value = json.loads(files[path])
            value.pop("seal")
            for entry in value["files"]:
                if entry["path"] == name:
                    entry.update(changes)
            for field in ("records", "tokens", "rows"):
                value[field] = sum(entry[field] for entry in value["files"])
            files[path] = _sealed(value)


def _describe_keys(files: dict[str, bytes], name: str) -> None:
    """Make the manifest agree with a changed key run."""
    for path in files:
        if path.startswith("manifests/") and path.endswith(".json"):
            value = json.loads(files[path])
            value.pop("seal")
            for run in value["keys"]:
                if run["name"] in name:
                    run |= {"size": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
            files[path] = _sealed(value)


def _sealed(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    body = text.encode("utf-8", "surrogatepass")
    return body[:-1] + b',"seal":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


class Trainer:
    """A run's folder with three checkpoints, whose index or state is mutated; and training files."""

    def __init__(self, sandbox: Path, *, resume: bool) -> None:
        from trainer.checkpoint import CheckpointFolder
        from trainer.config import load_config

        self.sandbox, self.load_config, self.folder = sandbox, load_config, CheckpointFolder
        self.newest: Callable[[Any], object] = lambda run: None
        if resume:  # imports torch, which takes its time
            from trainer.resume import newest

            self.newest = newest
        self.base = sandbox / "run-base"
        run = CheckpointFolder(str(self.base))
        for step in (1, 2, 3):
            run.save(step, partial(self._write, step), heldout_kl=1.0 / step, keep_last=3)
        self.train = Path("deploy/examples/demo-train.yaml").read_bytes()

    def _write(self, step: int, folder: Path) -> None:
        data = {"epoch": 0, "stream": None, "used": 0}
        state = {
            "step": step, "rows": 5, "tokens": 9, "mean_loss": 1.5, "data": data, "manifest_number": 1, "config": {},
            "spec_digest": "0" * 64,
        }  # fmt: skip
        (folder / "config.json").write_text("{}")
        (folder / "trainer_state.json").write_text(json.dumps(state))

    def run(self, kind: str, plan: Any) -> None:
        """Mutate and read."""
        if kind == "train":
            path = self.sandbox / "train.yaml"
            path.write_bytes(_changed_yaml(self.train, *plan))
            self.load_config(path)
            return
        _, changes, raw = plan
        root = self.sandbox / "victims" / "run"
        shutil.rmtree(root.parent, ignore_errors=True)
        shutil.copytree(self.base, root)
        (root.parent / "x").mkdir()  # what `../x` would remove
        folders = sorted(p for p in root.iterdir() if p.is_dir())
        path = root / "checkpoints.json" if kind == "checkpoints" else folders[-1] / "trainer_state.json"
        if raw:
            path.write_bytes(apply_bytes(path.read_bytes(), changes))
        else:
            path.write_bytes(
                json.dumps(apply_tree(json.loads(path.read_bytes()), changes)).encode("utf-8", "surrogatepass")
            )
        names = {p.name for p in folders}
        try:
            run = self.folder(str(root))
            run.index()
            run.sweep()
            self.newest(run)
            run.save(4, partial(self._write, 4), heldout_kl=0.1, keep_last=1)
        finally:
            assert (root.parent / "x").is_dir(), "a folder outside the run was removed"
            assert root.is_dir(), "the run was removed"
            assert {p.name for p in root.iterdir() if p.is_dir()} <= names | {"step-00000004"}, (
                "a folder came from nowhere"
            )
