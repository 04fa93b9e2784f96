"""What to copy to use a cache: a training file, a loop, Hugging Face datasets, DuckDB."""

from __future__ import annotations

import json

from teachercache.read.cache import Cache

TRAIN = """\
cache: {url}
manifest: {manifest}
split: {train}
student: OWNER/MODEL  # with the same tokenizer
output: runs/first
"""
OPEN = """\
cache = teachercache.open({url}, manifest={manifest})
"""
FILES = """\
files = [cache.file_url(entry) for entry in cache.files({train})]
"""
LOOP = """\
import teachercache

{open}# One record a document; trainer.data.PackedCache packs them for torch.
with cache.stream(split={train}, seed=0) as stream:
    for record in stream:
        print(record.doc_id, record.topk_ids.shape)
        break
"""
DATASETS = """\
import datasets, teachercache

{open}{files}rows = datasets.load_dataset(
    "parquet", data_files=files, split="train", streaming=True,
    columns={columns},
)
"""
DUCKDB = """\
import duckdb, teachercache

{open}{files}duckdb.sql(f\"\"\"
    select doc_id, len(row_pos) as n_rows,
           exp(-list_avg(target_logprob)) as perplexity
    from read_parquet({{files}}, union_by_name=true)
    order by perplexity desc limit 20
\"\"\").show()
"""


def usage(cache: Cache) -> list[tuple[str, str]]:
    """Return (title, text to copy). The URL is quoted: no name leaves its string."""
    splits = cache.splits or ["train"]
    train = "train" if "train" in splits else splits[0]
    names = {"url": json.dumps(cache.url), "manifest": cache.manifest.number, "train": json.dumps(train)}
    opened, files = OPEN.format(**names), FILES.format(**names)
    held = next((split for split in splits if split != train), None)
    evaluation = f"eval: {{split: {held}, every_steps: 200}}\n" if held else ""
    plain = "compact" not in {entry.codec for entry in cache.manifest.files}
    columns = ["doc_id", "input_ids", "row_pos", *(["topk_ids", "topk_logprobs"] if plain else []), "loss_mask"]
    return [
        ("Train a student: teachercache fit train.yaml", TRAIN.format(**names) + evaluation),
        ("Your own loop", LOOP.format(open=opened, **names)),
        ("Hugging Face datasets", DATASETS.format(open=opened, files=files, columns=json.dumps(columns))),
        ("DuckDB", DUCKDB.format(open=opened, files=files)),
    ]
