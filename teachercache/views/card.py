"""The data card: README.md of a data set, whose YAML the Hub and `datasets` read and whose text is for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from teachercache.format.objects import Commit
from teachercache.read.cache import Cache, incomplete_message
from teachercache.views.show import summary
from teachercache.views.statistics import costs

YOURS = "<!-- What follows is yours: `teachercache push` keeps it, and `license` above. -->"
LICENCE = (
    "the teacher's may bind what its rows are used for, and texts keep the licences of their sources (meta_ columns)"
)
Configs = Mapping[str, Mapping[str, Sequence[str]]]  # name of a configuration -> split -> patterns of files


def data_card(
    cache: Cache,
    configs: Configs,
    *,
    repo: str = "",
    commits: Iterable[Commit] = (),
    before: str = "",
    columns: str | None = None,
) -> str:
    """Return README.md of a data set made of a cache.

    configs   which files `datasets.load_dataset` reads; none where it cannot read them
    repo      ORG/NAME on the Hub: the card says how to load it from there
    commits   of the cache: the card says what the teacher cost
    before    the card that this one replaces: its licence, and what people added below the mark, are kept
    columns   what the columns are; default those of the open layout
    """
    data = summary(cache)
    teacher, tokenizer, rows_kind = data["teacher"], data["tokenizer"], cache.spec.rows
    parts = "\n".join(
        f"| {p['split']} | {p['source']} | {p['documents']:,} | {p['tokens']:,} | {p['rows']:,} |"
        for p in data["parts"]
    )
    licence = _licence(before)
    if rows_kind.kind == "sampled":
        title, outside = f"{data['top_k']} sampled weights", "exact entries"
        rows = (
            f"{data['top_k']} weights on distinct next tokens that sum to 1 and whose mean over draws is the teacher's\n"
            "probability of each token of the vocabulary"
        )
        order = "`exact` entries by descending log-probability, then drawn ids ascending, all with one weight"
    else:
        title, outside = f"Top-{data['top_k']} log-probabilities", str(data["top_k"])
        rows = (
            f"the teacher's {data['top_k']} most probable next tokens with their\nlog-probabilities of the full softmax"
        )
        order = "by descending log-probability; values rounded to float16"
    exact = "| exact | list<uint16>[r] | how many entries of a row are not drawn |\n" * (rows_kind.kind == "sampled")
    columns = (
        columns
        or f"""| column | type | meaning |
|---|---|---|
| doc_id, window, start | string, int32, int32 | document, index of the window, offset of its first token |
| input_ids | list<int32>[n] | the tokens that the teacher saw |
| row_pos | list<int32>[r] | positions that have a row; row i is the distribution of token row_pos[i] + 1 |
| topk_ids, topk_logprobs | list<fixed_size_list[{data["top_k"]}]>[r] | {order} |
| tail_logprob | list<float>[r] | log of the mass outside the {outside} |
| entropy | list<float>[r] | −Σ p log p of the teacher, in nats; null where the engine could not say |
| target_logprob | list<float>[r] | log-probability of the token that follows; null where it lies outside |
{exact}| loss_mask | list<bool>[r] | false where the next token must not be learnt |"""
    )
    head = {
        "pretty_name": f"{title} of {teacher['name']}",
        **({"license": licence} if licence else {}),
        "tags": ["knowledge-distillation", "logprobs", "teachercache"],
        **({"base_model": teacher["name"]} if re.fullmatch(r"[\w.-]+/[\w.-]+", teacher["name"]) else {}),
    }
    yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())
    state = "" if cache.manifest.complete else f"\n**{incomplete_message(cache)}**\n"
    return f"""---
{yaml}
{_configs(configs)}---
# Next-token log-probabilities of {_line(teacher["name"])}

For every position of {data["documents"]:,} documents: {rows}, the teacher's entropy, and the log-probability of the token
that followed (natural logarithms, temperature 1). From a teachercache, manifest {data["manifest"]} of {data["created"]}.
{state}{_use(cache, configs, repo) if repo else ""}
| | |
|---|---|
| teacher | {_teacher(teacher)} |
| licence | {licence or "not stated"}; {LICENCE} |
| tokenizer | {tokenizer["vocab_size"]:,} tokens, digest {tokenizer["digest"][:16]}; a student must have the same |
| rows | {rows_kind.kind}, {rows_kind.entries} entries; {data["rows"]:,} rows of {data["bytes_per_row"] or 0} bytes |
| cost | {_cost(commits, data["rows"])} |

| split | source | documents | tokens | rows |
|---|---|---|---|---|
{parts}

{columns}

The full identity of the teacher is in {"spec.json" if repo else "teacher.json"}.
{f"{chr(10)}{YOURS}{_added(before)}" if repo else ""}"""


def _teacher(teacher: Mapping[str, Any]) -> str:
    name = f"`{_line(teacher['name'])}`" + (f" revision `{_line(teacher['revision'])}`" if teacher["revision"] else "")
    weights = f"weights {teacher['weights_digest'][:16]}"
    return f"{name}, {weights}, engine {_line(teacher['engine'])}, {teacher['dtype']}, head in {teacher['head_dtype']}"


def _configs(configs: Configs) -> str:
    if not configs:
        return "viewer: false\n"
    lines = ["configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {json.dumps(name)}", "  data_files:"]
        for split, paths in splits.items():
            value = json.dumps(paths[0] if len(paths) == 1 else list(paths))
            lines += [f"  - split: {json.dumps(split_name(split))}", f"    path: {value}"]
    return "\n".join(lines) + "\n"


def split_name(split: str) -> str:
    """Return what `datasets` calls a split: it takes letters, digits and `_`."""
    return re.sub(r"\W", "_", split)


def _use(cache: Cache, configs: Configs, repo: str) -> str:
    url = f"hf://datasets/{repo}"
    split = "train" if "train" in cache.splits else cache.splits[0]
    text = f"""
## Use

With teachercache and its extra `hub`, every file checked against its digest; `@COMMIT` behind the name pins a commit:
```python
import teachercache

cache = teachercache.open("{url}")
for record in cache.records(split="{split}", limit=1):
    print(record.doc_id, record.topk_ids.shape)
```
Train a student: `teachercache fit train.yaml cache={url} student=…`
"""
    if not configs:
        return text + (
            "\nThe files are of the codec `compact`, whose columns are encoded: other readers need a push of a cache that\n"
            "`teachercache optimize --codec open` wrote.\n"
        )
    name = next(iter(configs))
    paths = configs[name].get(split) or next(iter(configs[name].values()))
    config = "" if name == "default" else f', "{name}"'
    return f"""{text}
With `datasets`, streamed:
```python
from datasets import load_dataset

rows = load_dataset("{repo}"{config}, split="{split_name(split)}", streaming=True)
```
With DuckDB:
```sql
-- a private data set first needs: create secret (type huggingface, provider credential_chain);
select doc_id, pos, ids[1] as top, lps[1] as logprob
from (select doc_id, unnest(row_pos) as pos, unnest(topk_ids) as ids, unnest(topk_logprobs) as lps
      from read_parquet({[f"{url}/{path}" for path in paths]}, union_by_name=true));
```
"""  # nosec B608: text of a page


def _cost(commits: Iterable[Commit], rows: int) -> str:
    """Return the teacher's time by engine and device, as the commits say it: seconds of its engine times GPUs."""
    lines = costs(commits)
    if not lines:
        return "not recorded"
    named = (f"{3600 * c.hours:,.0f} {'' if c.device == 'cpu' else 'GPU-'}seconds ({_line(c.device)})" for c in lines)
    return f"{', '.join(named)}; {3600e6 * sum(c.hours for c in lines) / max(rows, 1):,.1f} s a million rows"


def _licence(before: str) -> str:
    """Return the licence in the YAML of a card: an id of the Hub's, such as apache-2.0; nothing where it has none."""
    found = re.search(r"^license: *[\"']?([A-Za-z0-9.-]+)[\"']? *$", before.partition("\n---")[0], re.MULTILINE)
    return found[1] if found else ""


def _added(before: str) -> str:
    """Return what people wrote: all below the mark, or the whole text of a card that has none."""
    if YOURS in before:
        return before.partition(YOURS)[2]
    text = re.sub(r"\A---\n.*?\n---\n", "", before, flags=re.DOTALL).strip()
    return f"\n\n{text}\n" if text else "\n"


def _line(text: str) -> str:
    """Return a name for a cell of a table: on one line, without what ends a cell or a code span."""
    return " ".join(text.split()).replace("|", "/").replace("`", "'")
