"""What a cache costs: GPU-hours, storage and money from a few formulas, printed as the table of docs/OPERATIONS.md.

    python benchmarks/sizing.py                                   the worked table
    python benchmarks/sizing.py --gpu-hour 3.5 --gb-month 0.023   your prices
    python benchmarks/sizing.py --tokens 20e9 --rate 9800         your corpus and the rate that you measured

One rate is measured: committed rows of an 8B Llama shape with a float32 head on one H200
(benchmarks/results/teacher_rows_h200.json). The others are scaled from it and are estimates. Replace them:
`python -m pipeline run` prints the real rate in its first minutes, and `python -m pipeline plan JOB --rate N` gives
GPU-hours from it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results/teacher_rows_h200.json"
MEASURED_PARAMETERS = 8.03e9
MEASURED_RATE = float(json.loads(RESULTS.read_text())["pipeline"]["tokens_per_s"])  # of one H200, committed rows
BYTES_PER_ROW = {"open": 280, "compact": 190}  # K = 100
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Teacher:
    """`active`: parameters that one token touches; `gpus` of one teacher; `efficiency` relative to the measured one."""

    name: str
    active: float
    gpus: int
    efficiency: float
    why: str

    @property
    def rate_per_gpu(self) -> float:
        """Tokens per second of one GPU: FLOP a token scale with the active parameters."""
        return MEASURED_RATE * MEASURED_PARAMETERS / self.active * self.efficiency

    def gpu_hours(self, tokens: float) -> float:
        return tokens / self.rate_per_gpu / SECONDS_PER_HOUR


TEACHERS = (
    Teacher("Llama-3.1-8B", 8.03e9, 1, 1.0, "measured shape"),
    Teacher("Qwen3-32B", 32.8e9, 2, 0.9, "scaled; tensor-parallel over 2 GPUs at 90 % (assumed)"),
    Teacher(
        "gpt-oss-120b", 5.1e9, 4, 0.35, "scaled by active parameters; mixture of experts over 4 GPUs at 35 % (assumed)"
    ),
)
TOKENS = (1e9, 10e9, 100e9)


def storage_bytes(tokens: float, codec: str, rows_per_token: float = 1.0) -> float:
    """One row a token, unless only masked positions are stored."""
    return tokens * rows_per_token * BYTES_PER_ROW[codec]


def short(number: float) -> str:
    """1234567 → 1.2 M; at most three digits."""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def rows(prices: argparse.Namespace) -> list[list[str]]:
    teachers = TEACHERS
    if prices.rate:
        efficiency = prices.rate / MEASURED_RATE
        teachers = (Teacher("measured by you", MEASURED_PARAMETERS, 1, efficiency, "--rate"),)
    table = []
    for teacher in teachers:
        for tokens in [prices.tokens] if prices.tokens else TOKENS:
            hours = teacher.gpu_hours(tokens)
            table.append(
                [
                    teacher.name,
                    short(tokens).replace(" G", " B"),
                    f"{teacher.rate_per_gpu:,.0f}",
                    f"{hours:,.0f}",
                    f"{hours / 24 / prices.pool:,.1f}",
                    f"{storage_bytes(tokens, 'open') / 1e12:.2f}",
                    f"{storage_bytes(tokens, 'compact') / 1e12:.2f}",
                    f"{hours * prices.gpu_hour:,.0f}",
                    f"{storage_bytes(tokens, 'open') / 1e9 * prices.gb_month:,.0f}",
                ]
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, help="tokens of your corpus (default: 1, 10 and 100 billion)")
    parser.add_argument("--rate", type=float, help="tokens/s of one GPU that you measured")
    parser.add_argument("--pool", type=int, default=16, help="GPUs that run at the same time")
    parser.add_argument("--gpu-hour", type=float, default=4.0, help="price of a GPU-hour")
    parser.add_argument("--gb-month", type=float, default=0.023, help="price of a GB-month of storage")
    prices = parser.parse_args()
    head = [
        "teacher", "tokens", "tokens/s a GPU", "GPU-hours", f"days on {prices.pool} GPUs", "TB open", "TB compact",
        f"teacher at {prices.gpu_hour:g} a GPU-hour", f"storage a month at {prices.gb_month:g} a GB",
    ]  # fmt: skip
    print("| " + " | ".join(head) + " |")
    print("|---|" + "---:|" * (len(head) - 1))
    for line in rows(prices):
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
