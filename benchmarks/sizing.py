"""What a cache costs: GPU-hours, storage and money from a few formulas, printed as the table of docs/OPERATIONS.md.

    python benchmarks/sizing.py                                   the worked table
    python benchmarks/sizing.py --gpu-hour 3.5 --gb-month 0.023   your prices
    python benchmarks/sizing.py --tokens 20e9 --rate 9800         your corpus and the rate that you measured

One rate is measured: committed rows of an 8B Llama shape with a float32 head on one H200
(benchmarks/results/teacher_rows_h200.json). The others are scaled from it and are estimates. Replace them:
`teachercache run` prints the real rate in its first minutes, and `teachercache plan JOB --rate N` gives GPU-hours from
it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import RESULTS
from pipeline.watching.progress import human

MEASURED = json.loads((RESULTS / "teacher_rows_h200.json").read_text())
MEASURED_PARAMETERS = 8.03e9
MEASURED_RATE = float(MEASURED["pipeline"]["tokens_per_s"])  # of one H200, committed rows
BYTES_PER_ROW = {"open": 280, "compact": 190}  # K = 100
# name, parameters that one token touches, efficiency of a GPU relative to the measured one
TEACHERS = [
    ("Llama-3.1-8B", 8.03e9, 1.0),  # measured shape
    ("Qwen3-32B", 32.8e9, 0.9),  # scaled; tensor-parallel over 2 GPUs at 90 % (assumed)
    ("gpt-oss-120b", 5.1e9, 0.35),  # scaled by active parameters; mixture of experts over 4 GPUs at 35 % (assumed)
]
TOKENS = (1e9, 10e9, 100e9)


def line(prices: argparse.Namespace, name: str, rate: float, tokens: float) -> dict[str, str]:
    """Return the cells of a line by their column; `rate` is the tokens/s of one GPU, rows are one a token."""
    hours = tokens / rate / 3600
    stored, compact = (tokens * size for size in BYTES_PER_ROW.values())
    return {
        "teacher": name,
        "tokens": human(tokens).replace(" G", " B"),
        "tokens/s a GPU": f"{rate:,.0f}",
        "GPU-hours": f"{hours:,.0f}",
        f"days on {prices.pool} GPUs": f"{hours / 24 / prices.pool:,.1f}",
        "TB open": f"{stored / 1e12:.2f}",
        "TB compact": f"{compact / 1e12:.2f}",
        f"teacher, $ (at {prices.gpu_hour:g} a GPU-hour)": f"{hours * prices.gpu_hour:,.0f}",
        f"storage, $ a month (at {prices.gb_month:g} a GB)": f"{stored / 1e9 * prices.gb_month:,.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, help="tokens of your corpus (default: 1, 10 and 100 billion)")
    parser.add_argument("--rate", type=float, help="tokens/s of one GPU that you measured")
    parser.add_argument("--pool", type=int, default=16, help="GPUs that run at the same time")
    parser.add_argument("--gpu-hour", type=float, default=4.0, help="dollars for a GPU-hour")
    parser.add_argument("--gb-month", type=float, default=0.023, help="dollars for a GB of storage in a month")
    prices = parser.parse_args()
    # FLOP a token scale with the active parameters
    rates = {name: MEASURED_RATE * MEASURED_PARAMETERS / active * share for name, active, share in TEACHERS}
    if prices.rate:
        rates = {"measured by you": prices.rate}
    wanted = [prices.tokens] if prices.tokens else TOKENS
    lines = [line(prices, name, rate, tokens) for name, rate in rates.items() for tokens in wanted]
    print("| " + " | ".join(lines[0]) + " |")
    print("|---|" + "---:|" * (len(lines[0]) - 1))
    for cells in lines:
        print("| " + " | ".join(cells.values()) + " |")


if __name__ == "__main__":
    main()
