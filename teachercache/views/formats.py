"""The columns that other trainers read, one line for each record: what `export --format` writes.

`labels` are Hugging Face's: the token itself where it must be learnt, else -100. A row lies at the position that predicts
the next token, as in every record. The entries of a sampled row are log-weights that sum to 1, as `row_weights` has them:
a loss that is linear in them, forward KL at temperature 1, stays unbiased.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from teachercache.errors import UsageError
from teachercache.format.sampled import row_weights
from teachercache.format.spec import Rows
from teachercache.parquet.block import Block

NO_LABEL = -100
Array = npt.NDArray[np.generic]


def axolotl(block: Block) -> pa.Table:
    """Return the columns of a tokenised data set of axolotl's `KDPlugin`.

    target_token_ids, target_logprobs, target_mask   [n, K] at each token: log-probabilities of the K, which sum to 1, as
    axolotl's own preparation makes them; mask 0, id 0 and -1e9 where a row is missing or must not be learnt
    """
    kept, at = _rows(block)
    values = _logprobs(block, kept)
    values -= np.logaddexp.reduce(values, axis=1, keepdims=True)
    return _table(
        block,
        labels=_labels(block, at + 1),
        target_token_ids=_spread(block, at, block.topk_ids[kept], np.int32(0)),
        target_logprobs=_spread(block, at, values.astype(np.float32), np.float32(-1e9)),
        target_mask=_spread(block, at, np.ones_like(values, np.int8), np.int8(0)),
    )


def distillkit(block: Block) -> pa.Table:
    """Return the columns of DistillKit's offline teacher, in its form of uncompressed rows.

    token_ids, top_values   [n, K] at each token: the K ids and their log-probabilities of the full softmax
    labels                  not -100 exactly where a row must be learnt: DistillKit takes its mask from them. So they are
                            one position earlier than usual at the border of an answer
    """
    kept, at = _rows(block)
    k = block.topk_ids.shape[1]
    # Distinct ids that share half of the mass: DistillKit multiplies what it computes of them by a mask of 0.
    harmless = np.arange(k, dtype=np.int32), np.full(k, -np.log(2 * k), np.float32)
    return _table(
        block,
        labels=_labels(block, at),
        token_ids=_spread(block, at, block.topk_ids[kept], harmless[0]),
        top_values=_spread(block, at, _logprobs(block, kept).astype(np.float32), harmless[1]),
    )


def trl(block: Block) -> pa.Table:
    """Return tokens and labels for TRL's SFTTrainer, which reads no rows: the baseline of hard labels on the same text."""
    return _table(block, labels=_labels(block, _rows(block)[1] + 1))


FORMATS: Mapping[str, Callable[[Block], pa.Table]] = {"axolotl": axolotl, "distillkit": distillkit, "trl": trl}
NOT_WRITTEN = {
    "megatron": "Megatron-LM's stored rows have no tokens: they are those of one run's iterations, micro-batches and ranks, "
    "and read by a run of the same data order alone. Its own teacher run (--logits-save-dir) writes them",
}


def columns_of(name: str) -> Callable[[Block], pa.Table]:
    """Return the function that makes a format's table of a block. Raises UsageError for a name that is none."""
    if name in FORMATS:
        return FORMATS[name]
    known = ", ".join(FORMATS)
    if name in NOT_WRITTEN:
        raise UsageError(f"--format {name} is not written: {NOT_WRITTEN[name]}. Formats: {known}.")
    raise UsageError(
        f"--format must be one of {known}, found {name!r}; without it, the cache's own columns are written."
    )


def trainer_columns(name: str, rows: Rows) -> str:
    """Return what the data card says of a format's columns, filled from that kind of rows."""
    said = "One line for each record: " + inspect.cleandoc(columns_of(name).__doc__ or "").removeprefix("Return ")
    if rows.kind == "sampled" and name != "trl":
        said += (
            "\n\n**The rows are sampled, no top-K rows.** Their log-probabilities are log-weights on distinct ids, an unbiased "
            "estimate of\nthe whole distribution for forward KL at temperature 1. Reverse KL, JSD and other temperatures are "
            "biased."
        )
    return said


def _rows(block: Block) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return which of the R rows must be learnt, and the positions of those in the T tokens of the block."""
    first = np.repeat(block.token_offsets[:-1], np.diff(block.row_offsets))
    kept = block.loss_mask.astype(bool)
    return kept, (first + block.row_pos)[kept]


def _logprobs(block: Block, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the log-probabilities [R', K] of some rows; of sampled ones the log-weights, free of a codec's rounding."""
    values = block.topk_logprobs[kept]
    if block.exact is None:
        return values.astype(np.float64)
    return np.log(row_weights(values, block.tail_logprob[kept], block.exact[kept]))


def _labels(block: Block, at: npt.NDArray[np.int64]) -> Array:
    labels = np.full(len(block.input_ids), NO_LABEL, np.int32)
    labels[at] = block.input_ids[at]
    return labels


def _spread(block: Block, at: npt.NDArray[np.int64], values: Array, elsewhere: Array | np.generic) -> Array:
    """Return [T, K] with `values` at the positions `at`, and `elsewhere`, one value or [K], at the others."""
    whole = np.full((len(block.input_ids), values.shape[1]), elsewhere, values.dtype)
    whole[at] = values
    return whole


def _table(block: Block, **columns: Array) -> pa.Table:
    """Return a table with a list of tokens, or of K entries for each token, in each of the block's records."""
    offsets = pa.array(block.token_offsets, pa.int32())
    columns = {"input_ids": block.input_ids, "attention_mask": np.ones(len(block.input_ids), np.int8), **columns}
    arrays = {}
    for name, values in columns.items():
        flat = pa.array(values.reshape(-1))
        each = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        arrays[name] = pa.ListArray.from_arrays(offsets, each)
    return pa.table(arrays)
