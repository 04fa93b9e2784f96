"""What the report says about rows: statistics of some files, and what a cache's commits say about their cost."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from teachercache.format.objects import Commit, ManifestFile
from teachercache.format.record import Record
from teachercache.parquet.block import Block
from teachercache.read.cache import Cache

Floats = npt.NDArray[np.floating]
CUTS = (10, 25, 50, 100)  # entries of a row whose mass is shown
EXAMPLES = 3  # documents that are shown
COLUMNS = {
    "doc_id", "window", "start", "input_ids", "row_pos", "topk_ids", "topk_logprobs", "tail_logprob", "target_logprob",
    "loss_mask", "entropy", "exact", "meta",
}  # fmt: skip
LICENCE = {"licence", "license"}  # columns of the corpus
MAX_NATS = 128.0  # beyond it no probability is stored
MAX_SECONDS = 1e9  # beyond it a commit's provenance is not believed


@dataclass
class Part:
    """Rows of one split and source. Of the arrays, those of `learnt` rows are of one length, which others may not have."""

    weight: int = 0  # rows in the whole cache
    licences: Counter[str] = field(default_factory=Counter)
    arrays: dict[str, list[Floats]] = field(default_factory=lambda: defaultdict(list))

    def values(self, name: str) -> Floats:
        """Return all values of one statistic."""
        return np.concatenate([np.empty(0), *self.arrays[name]])


@dataclass
class Sample:
    """Statistics of some row groups of a cache: at least one of each split and source, as far as the files go."""

    parts: dict[tuple[str, str], Part]
    files: int = 0
    rows: int = 0
    column_bytes: Counter[str] = field(default_factory=Counter)
    examples: list[Record] = field(default_factory=list)

    def weighted(self, name: str) -> tuple[Floats, Floats]:
        """Return the values [N] of a statistic over all parts and weights [N], which sum to the parts' rows in the cache."""
        pairs = [(part.values(name), part.weight) for part in self.parts.values()]
        values = np.concatenate([np.empty(0), *(v for v, _ in pairs)])
        weights = np.concatenate([np.empty(0), *(np.full(len(v), w / max(len(v), 1)) for v, w in pairs)])
        return values, weights

    def mean(self, name: str) -> float | None:
        """Return the weighted mean of a statistic; None where nothing has it."""
        values, weights = self.weighted(name)
        return float(np.average(values, weights=weights)) if weights.sum() > 0 else None


def take_sample(cache: Cache, most_files: int, progress: Callable[[int, int], None] | None = None) -> Sample:
    """Read the first row group of at most `most_files` files, chosen by a fixed seed, in turn from each split and source."""
    groups: dict[tuple[str, str], list[ManifestFile]] = defaultdict(list)
    for entry in cache.manifest.files:
        groups[entry.split, entry.source].append(entry)
    found = Sample({key: Part(sum(f.rows for f in files)) for key, files in sorted(groups.items())})
    draw = random.Random(0)
    orders = [draw.sample(files, len(files)) for _, files in sorted(groups.items())]
    turns = (entry for turn in itertools.zip_longest(*orders) for entry in turn if entry is not None)
    chosen = list(itertools.islice(turns, most_files))
    examples: list[list[Record]] = []
    for done, entry in enumerate(chosen, 1):
        block = _read(cache, entry, found)
        if block is not None:
            _add(block, found.parts[entry.split, entry.source])
            found.files, found.rows = found.files + 1, found.rows + len(block.row_pos)
            if len(examples) < EXAMPLES:
                examples.append([block.record(i) for i in range(min(EXAMPLES, len(block)))])
        if progress:
            progress(done, len(chosen))
    in_turn = (record for turn in itertools.zip_longest(*examples) for record in turn if record is not None)
    found.examples = list(itertools.islice(in_turn, EXAMPLES))
    return found


def _read(cache: Cache, entry: ManifestFile, into: Sample) -> Block | None:
    with cache.open_file(entry) as file:
        footer = file.footer
        for g, c in itertools.product(range(footer.num_row_groups), range(footer.num_columns)):
            column = footer.row_group(g).column(c)
            into.column_bytes[column.path_in_schema.split(".")[0]] += column.total_compressed_size
        return file.read_group(0, COLUMNS) if file.num_groups else None


def _add(block: Block, part: Part) -> None:
    p = np.exp(block.topk_logprobs, dtype=np.float32)
    lengths = np.diff(block.token_offsets)
    owner = np.repeat(np.arange(len(block)), np.diff(block.row_offsets))
    # False after a record's last token, so that the next token of a learnt row is in its record.
    learnt = block.loss_mask & (block.row_pos + 1 < lengths[owner])
    after = block.input_ids[(block.token_offsets[owner] + block.row_pos + 1)[learnt]]
    known = ~np.isnan(block.target_logprob) & learnt
    entropy = np.empty(0) if block.entropy is None else block.entropy[np.isfinite(block.entropy)]
    mass = np.cumsum(p, axis=1)
    cuts = {f"mass{k}": mass[:, k - 1] for k in CUTS if k <= p.shape[1]} if block.exact is None else {}
    values: dict[str, Any] = cuts | {
        "coverage": 1 - np.exp(block.tail_logprob),  # mass of the K, or of the exact entries
        "top1": p[:, 0],
        "entropy": np.clip(entropy, 0, MAX_NATS),
        "exact": np.empty(0) if block.exact is None else block.exact,  # entries
        "loss": np.clip(-block.target_logprob[known], 0, MAX_NATS),
        "hit": block.topk_ids[learnt, 0] == after,
        "believed": p[learnt, 0],
        "position": block.row_pos[learnt],
        "of_length": lengths[owner][learnt],
        "length": lengths,
    }
    for name, array in values.items():
        part.arrays[name].append(np.asarray(array, np.float32))
    for name in LICENCE & block.meta.keys():
        part.licences.update(str(v) for v in block.meta[name] if v is not None)


def calibration_bins(believed: Floats, hit: Floats, weights: Floats) -> tuple[list[tuple[float, float, int]], float]:
    """Return (mean probability, share that followed, rows) of ten bins of the best token's probability, and the mean error.

    The error is the expected calibration error (Guo et al., 2017, eq. 5): the mean over rows of |probability - share| of
    their bin.
    """
    points, error, whole = [], 0.0, float(weights.sum())
    bins = np.minimum((believed * 10).astype(np.int64), 9)
    for b in range(10):
        inside = bins == b
        weight = float(weights[inside].sum())
        if weight > 0:
            p, share = (float(np.average(v[inside], weights=weights[inside])) for v in (believed, hit))
            points.append((p, share, int(inside.sum())))
            error += weight / whole * abs(p - share)
    return points, error


def losses_by_length(sample: Sample) -> list[tuple[int, float, float, float]]:
    """Return (seq_len, records longer, rows lost by truncate, rows lost by drop), as shares, up to what loses nothing."""
    length, per_record = sample.weighted("length")
    position, per_row = sample.weighted("position")
    owner, _ = sample.weighted("of_length")
    if not len(length):
        return []
    shortest = max(8, 2 ** math.floor(math.log2(max(float(np.median(length)), 1.0))))
    lines = []
    for seq_len in (shortest * 2**i for i in range(16)):
        cut, lost, dropped = length > seq_len, position >= seq_len, owner > seq_len
        shares = [
            float(w[mask].sum() / max(w.sum(), 1e-9))
            for mask, w in ((cut, per_record), (lost, per_row), (dropped, per_row))
        ]
        lines.append((seq_len, *shares))
        if not cut.any():
            break
    return lines


class Cost(NamedTuple):
    """What rows cost on one engine and device, by the provenance of some commits."""

    engine: str
    device: str
    commits: int
    rows: int
    hours: float  # of one accelerator
    median_rate: float  # rows a second of a commit

    @property
    def per_million(self) -> float:
        """Return hours of one accelerator for a million rows."""
        return 1e6 * self.hours / self.rows


def costs(commits: Iterable[Commit]) -> list[Cost]:
    """Return the cost by engine and device, most rows first. Provenance is free-form: what is no time counts as none."""
    found: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for commit in commits:
        said = commit.provenance
        busy, wall = (_number(said.get(name)) for name in ("teacher_seconds", "shard_seconds"))
        busy, wall = busy or wall, wall or busy
        if commit.rows and busy and wall:
            devices = _number(said.get("tensor_parallel")) or 1.0
            key = (str(said.get("engine", "?"))[:200], str(said.get("device", "?"))[:200])
            found[key].append((commit.rows, busy * devices, commit.rows / wall))
    lines = [
        Cost(
            *key,
            len(of),
            sum(r for r, _, _ in of),
            sum(s for _, s, _ in of) / 3600,
            float(np.median([v for _, _, v in of])),
        )
        for key, of in found.items()
    ]
    return sorted(lines, key=lambda cost: -cost.rows)


def _number(value: object) -> float | None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < MAX_SECONDS
    return float(value) if ok else None  # type: ignore[arg-type]


def per_million_rows(lines: Sequence[Cost]) -> float | None:
    """Return accelerator-hours for a million rows over all engines; None where no commit says."""
    rows = sum(line.rows for line in lines)
    return 1e6 * sum(line.hours for line in lines) / rows if rows else None
