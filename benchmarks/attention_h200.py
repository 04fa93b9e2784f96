"""Attention over packed documents on one GPU: forward and backward rates of every path, side by side in one process.

    python benchmarks/attention_h200.py [--device cpu --tiny] [--out FOLDER]

Work counts causal attention of each document, 2·n²·d_attn FLOP forward and 5/2 of that backward (the gradients' five
products to the two of the forward pass). The yardstick is SDPA cuDNN on one plain causal document of all tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.bench.measure import extra_gib, machine, save, seconds
from trainer.model.attention import KINDS, DocumentLayout, document_attention, sdpa_causal

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measure(
    attend: Attend, lengths: tuple[int, ...], heads: tuple[int, int, int], device: torch.device
) -> dict[str, float]:
    """Return forward and backward TFLOP/s of attend(q, k, v) -> [1, T, H, D] on heads = (H, H_kv, D).

    A time is the fastest of three runs of ten calls back to back, so that the host stays ahead.
    """
    num_heads, num_kv, size = heads

    def random(count: int) -> torch.Tensor:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return torch.randn(1, sum(lengths), count, size, device=device, dtype=dtype)

    # As a model lays them out: [1, T, H, D] seen as [1, H, T, D].
    q, k, v = (random(count).transpose(1, 2).requires_grad_() for count in (num_heads, num_kv, num_kv))
    grad = random(num_heads)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def both() -> None:
        attend(q, k, v).backward(grad)

    forward()
    forward_s = min(seconds(forward, device, calls=10) for _ in range(3))
    extra = extra_gib(both, device)
    both_s = min(seconds(both, device, calls=10) for _ in range(3))
    tflop = 2.0 * sum(float(n) ** 2 for n in lengths) * num_heads * size / 1e12
    return {
        "forward_ms": forward_s * 1e3,
        "both_ms": both_s * 1e3,
        "forward_tflops": tflop / forward_s,
        "backward_tflops": 2.5 * tflop / max(both_s - forward_s, 1e-9),
        "both_tflops": 3.5 * tflop / both_s,
        "extra_gib": extra,
    }


def log_normal_lengths(total: int) -> tuple[int, ...]:
    """Return about 50 lengths that add up to `total`, longest first."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        draw = torch.exp(torch.randn((), generator=generator) * 1.1 + torch.log(torch.tensor(total / 64.0)))
        lengths.append(min(max(int(draw), 1), total - sum(lengths)))
    return tuple(sorted(lengths, reverse=True))


def run(device: torch.device, *, tiny: bool = False, kinds: list[str] | None = None) -> list[dict[str, Any]]:
    """Return all rows, each printed as it is taken; an error becomes the row's text."""
    total, heads = (512, (4, 2, 16)) if tiny else (32_768, (24, 8, 128))
    if kinds is None:
        kinds = [kind for kind in KINDS if kind != "plain"] if device.type == "cuda" else ["documents", "plain"]
    mixed, scale = log_normal_lengths(total), heads[2] ** -0.5
    layouts = {
        "one document": (total,),
        "8 equal": (total // 8,) * 8,
        "64 equal": (total // 64,) * 64,
        "6 unequal": tuple(total * share // 64 for share in (30, 16, 9, 5, 3, 1)),
        f"{len(mixed)} log-normal": mixed,
    }
    rows: list[dict[str, Any]] = []

    def add(path: str, layout: str, attend: Attend) -> None:
        row: dict[str, Any] = {"path": path, "layout": layout}
        try:
            row |= measure(attend, layouts[layout], heads, device)
            shown = (
                "forward {forward_tflops:6.1f}, backward {backward_tflops:6.1f}, both {both_tflops:6.1f} TFLOP/s, "
                "{both_ms:8.2f} ms, {extra_gib:5.2f} GiB"
            ).format(**row)
        except Exception as error:
            shown = row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        print(f"{layout:>18} {path:>22}: {shown}", flush=True)
        rows.append(row)

    def packed(documents: DocumentLayout) -> Attend:
        return lambda q, k, v: document_attention(torch.nn.Module(), q, k, v, None, layout=documents)[0]

    add("plain causal, SDPA", "one document", lambda q, k, v: sdpa_causal(q, k, v, scale).transpose(1, 2))
    for layout, lengths in layouts.items():
        for kind in kinds:
            add(kind, layout, packed(DocumentLayout(lengths, kind, device)))
    return rows


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a smoke test of the script")
    parser.add_argument("--kinds", help="comma-separated; default all")
    parser.add_argument("--out", type=Path, help="folder for attention.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = run(device, tiny=arguments.tiny, kinds=arguments.kinds.split(",") if arguments.kinds else None)
    save(arguments.out, "attention.json", {"machine": machine(device), "rows": rows})


if __name__ == "__main__":
    main()
