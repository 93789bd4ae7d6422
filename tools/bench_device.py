"""`kvtier bench device`: how fast blocks move between a CUDA device and pinned host memory.

Also runs as ``python -m kvtier.tools.bench_device`` where only torch and NumPy
are installed. Every figure stands beside what the same run measured for one
large copy, so that the ratios mean something on any machine. Without a device
only what needs none is measured (`bench_copies`).
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from .bench_copies import host_copies, plan_time
from .bench_device_copies import (
    GIB,
    Bench,
    Options,
    measure_model,
    measure_python_time,
    measure_sizes,
)


def bars(report: dict[str, Any]) -> dict[str, Any]:
    """What the project promises, with what a report says of it; only what was measured."""
    found = {"python_lock_held_ms": (report["plan_time"]["flat"]["lock_held_ms"], "<=", 2.0)}
    for row in report["host_copies"]:
        name = f"host_copies_{row['regions']}x{row['row_kib']}_kib_x{row['chunk_blocks']}"
        if row["row_kib"] >= 64:
            found[name] = (min(row["save_ratio"], row["load_ratio"]), ">=", 0.7)
    for row in report.get("sizes", ()):
        at_64 = row["flat"]
        if row["block_kib"] != 64 or "failed" in at_64:
            continue
        found["host_to_device_64_kib"] = (at_64["load_ratio"], ">=", 0.9)
        found["device_to_host_64_kib"] = (at_64["save_ratio"], ">=", 0.9)
        found["both_ways_64_kib"] = (at_64["both_ratio"], ">=", 0.8)
    for saves in report.get("model", ()):
        if (saves["way"], saves["copies"]) != ("flat", "save"):
            continue
        found["products_loss_percent"] = (saves["products"]["loss_percent"], "<=", 3.0)
    return {
        name: {
            "value": value,
            "bar": f"{sign} {bar}",
            "met": bool(value >= bar if sign == ">=" else value <= bar),
        }
        for name, (value, sign, bar) in found.items()
    }


def bar_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of a report as rows of a table."""
    return [{"figure": name, **bar} for name, bar in report["bars"].items()]


def run(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything; about a minute with a device, seconds without.

    ``say`` is told of each part's figures as they come.

    What cannot be measured on the device is named in ``failed``, and the rest goes on.
    """
    import torch

    report: dict[str, Any] = {
        "device": None,
        "torch": torch.__version__,
        "plan_time": plan_time(options.plan_blocks),
        "host_copies": host_copies(),
    }
    for part in ("plan_time", "host_copies"):
        say(json.dumps(report[part]))
    if torch.cuda.is_available():
        bench = Bench.open(options, say)
        bench.report = report
        report["device"] = torch.cuda.get_device_name(options.device)
        report["numa_node"] = bench.driver.numa_node()
        report["batched"] = bench.driver.can_batch
        report["failed"] = {}
        for measure in (measure_sizes, measure_model, measure_python_time):
            try:
                measure(bench)
            except Exception as error:  # noqa: BLE001 - a device is not to be had every day
                report["failed"][measure.__name__] = f"{type(error).__name__}: {error}"
                say(traceback.format_exc())
    report["bars"] = bars(report)
    return report


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m kvtier.tools.bench_device``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--gib", type=float, default=2.0, help="volume of each copy")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    options = Options(
        device=arguments.device,
        volume_bytes=int(arguments.gib * GIB),
        repeats=arguments.repeats,
    )
    report = run(options, _say)
    if arguments.json:
        print(json.dumps(report))
    else:
        print(f"device: {report['device'] or 'none, so only what needs none was measured'}")
        for name, bar in report["bars"].items():
            print(
                f"{name:28} {bar['value']:>8}  {bar['bar']:8} {'met' if bar['met'] else 'MISSED'}"
            )
    return 1 if report.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
