"""What data.long_documents does to a split: how many documents are longer than a sequence, and what becomes of their rows."""

from __future__ import annotations

import numpy as np

from teachercache import Cache
from trainer.data.sequence import min_context

SAMPLED_GROUPS = 8
"""Row groups whose lengths are read; a split with more of them is extrapolated."""
COLUMNS = {"input_ids", "row_pos", "loss_mask"}


def describe_lengths(cache: Cache, split: str, seq_len: int, long_documents: str) -> str:
    """Return a line: documents and rows of a split, and what the setting does to those that are longer than seq_len.

    Cost: reads the token ids of at most SAMPLED_GROUPS row groups, spread over the split.
    """
    files = [entry for entry in cache.files(split=split) if entry.records]
    groups = [(entry, index) for entry in files for index in range(entry.row_groups)]
    chosen = sorted({int(at) for at in np.linspace(0, len(groups) - 1, SAMPLED_GROUPS).round()}) if groups else []
    documents = long = rows = beyond = of_long = 0
    for entry, index in (groups[at] for at in chosen):
        with cache.open_file(entry) as file:
            block = file.read_group(index, COLUMNS)
        for record in block.records():
            documents += 1
            used = record.row_pos[record.loss_mask]
            rows += len(used)
            if len(record.input_ids) > seq_len:
                long += 1
                of_long += len(used)
                beyond += int(np.count_nonzero(used >= seq_len))
    line = (
        f"data: {sum(entry.records for entry in files):,} records and {sum(entry.rows for entry in files):,} rows in split "
        f"{split}"
    )
    about = "" if len(chosen) == len(groups) else "about "
    basis = f", by {len(chosen)} of {len(groups):,} row groups" if about else ""
    if not long:
        return f"{line}; none of them is longer than data.seq_len = {seq_len:,}{basis}"
    share = f"{about}{long / documents:.1%} of the records are longer than data.seq_len = {seq_len:,}"
    if long_documents == "split":
        what = f"split into pieces, every row used, each with {min_context(seq_len):,} tokens of context or more"
    elif long_documents == "refuse":
        what = "data.long_documents=refuse stops at the first of them"
    else:
        lost = beyond if long_documents == "truncate" else of_long
        did = "cut off" if long_documents == "truncate" else "left out"
        what = f"{did} (data.long_documents={long_documents}), with {about}{lost / max(rows, 1):.1%} of the rows"
    return f"{line}; {share}: {what}{basis}"
