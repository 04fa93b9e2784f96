"""What every bench shares: the machine's description, time, peak memory, the file and the plot of results."""

from __future__ import annotations

import datetime
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30


def machine(device: torch.device) -> dict[str, Any]:
    """Return where and when figures were taken."""
    today, threads = datetime.date.today().isoformat(), torch.get_num_threads()
    info: dict[str, Any] = {"date": today, "torch": torch.__version__, "python": platform.python_version()}
    info |= {"device": device.type, "cpu_threads": threads}
    if device.type == "cuda":
        import triton

        gpu = torch.cuda.get_device_properties(device).name
        return info | {"gpu": gpu, "cuda": torch.version.cuda, "triton": triton.__version__}
    return info | {"cpu": platform.machine()}


def synchronize(device: torch.device) -> None:
    """Wait for the GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Collect garbage and give the allocator's free blocks back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds(call: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Return the seconds of one call: by the host's clock, over `calls` of them back to back."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / calls


def time_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median milliseconds of a call, after one warm-up; on a GPU by its own clock."""
    call()
    times = []
    for _ in range(repeats):
        if device.type != "cuda":
            times.append(1e3 * seconds(call, device))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize(device)
        begin.record()
        call()
        end.record()
        synchronize(device)
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def _process_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: extra memory on CPU is measured on Linux only")


def extra_gib(call: Callable[[], object], device: torch.device) -> float:
    """Return the GiB that a call needs at its peak beyond those in use: allocated on a GPU, resident on a CPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - base) / GIB
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present
    base = _process_bytes("VmRSS")
    call()
    return (_process_bytes("VmHWM") - base) / GIB


def kernels(call: Callable[[], object], count: int = 22) -> list[dict[str, Any]]:
    """Print and return the kernels of one call on a GPU that take the most time, in ms."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
    total_ms = sum(event.self_device_time_total for event in events) / 1e3
    found = []
    for event in events[:count]:
        ms = event.self_device_time_total / 1e3
        print(f"   profile | {ms / total_ms:6.2%} {ms:9.2f} ms x{event.count:<5} {event.key[:110]}", flush=True)
        found.append({"kernel": event.key[:200], "ms": ms, "count": event.count})
    return found


def save(folder: Path | None, name: str, report: Mapping[str, Any]) -> None:
    """Write folder/name as JSON; nothing without a folder."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


def plot(path: Path, title: str, labels: tuple[str, ...], points: Sequence[tuple[Any, ...]], *, log_y: bool) -> None:
    """Write a figure of points (name, x, y, …), a panel for each y and a line for each name, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plots", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    xlabel, *ylabels = labels
    figure, axes = pyplot.subplots(1, len(ylabels), figsize=(6 * len(ylabels), 4), squeeze=False)
    for column, (axis, ylabel) in enumerate(zip(axes[0], ylabels, strict=True), start=2):
        for name in dict.fromkeys(point[0] for point in points):
            shown = [(point[1], point[column]) for point in points if point[0] == name and point[column] is not None]
            if shown:
                axis.plot(*zip(*shown, strict=True), marker="o", label=name)
        axis.set(xscale="log", yscale="log" if log_y else "linear", xlabel=xlabel, ylabel=ylabel, title=title)
        axis.grid(visible=True, alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
