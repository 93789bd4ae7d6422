"""Counters and gauges, through vLLM's hooks.

Both halves hand out `KVTierStats`: flat names to numbers. A name is
``counter.label[.label]``; gauges begin with ``gauge.``. vLLM merges them over
ranks and steps, prints `reduce` in its log and hands the data to `PromMetrics`
in the front-end process.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from .metric_table import GAUGE, METRICS, Metric


class KVTierStats(KVConnectorStats):
    """Sums since the last hand-over, and gauges of now."""

    def reset(self) -> None:
        """Start anew."""
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or step's numbers; a later gauge of the same source wins.

        Gauges carry their rank (``gauge.name.label@rank``), so that steps replace
        and ranks add up (`totals`).
        """
        for name, value in other.data.items():
            if name.startswith(GAUGE):
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what the log line shows."""
        sums = totals(self.data)
        shown = ("lookups", "hits", "loads_failed")
        out: dict[str, int | float] = {name: _plain(sums[name]) for name in shown if name in sums}
        for name in sorted(sums):
            head = name.split(".")[0]
            if head in {"hit_tokens", "load_bytes", "save_bytes", "misses", "save_dropped_chunks"}:
                out[name] = _plain(sums[name])
        return out

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


def totals(data: dict[str, Any]) -> dict[str, float]:
    """Sum gauges over their ranks; counters stay as they are."""
    out: dict[str, float] = {}
    for name, value in data.items():
        plain = name.partition("@")[0]
        out[plain] = out.get(plain, 0.0) + value
    return out


def _plain(value: float) -> int | float:
    return int(value) if float(value).is_integer() else round(value, 4)


def _unregister_families() -> None:
    """Take an earlier engine's families out of this process's registry.

    vLLM does so with its own whenever an engine starts; a second registration of a name raises.
    """
    from prometheus_client import REGISTRY  # noqa: PLC0415 (only in the front-end process)

    names = {metric.prometheus_name for metric in METRICS}
    for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 (as vLLM does)
        if getattr(collector, "_name", None) in names:
            REGISTRY.unregister(collector)


class KVTierPromMetrics(KVConnectorPromMetrics):
    """Prometheus families of `METRICS`, one child for each engine and label set."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families: dict[str, tuple[Metric, Any]] = {}
        self._children: dict[tuple[str, int], Any] = {}
        self._gauges: dict[int, dict[str, float]] = {}
        _unregister_families()
        for metric in METRICS:
            cls = self._gauge_cls if metric.name.startswith(GAUGE) else self._counter_cls
            extra = {"multiprocess_mode": "mostrecent"} if metric.name.startswith(GAUGE) else {}
            family = cls(
                name=metric.prometheus_name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **extra,
            )
            self._families[metric.name] = (metric, family)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counters, set gauges."""
        gauges = self._gauges.setdefault(engine_idx, {})
        for name, value in transfer_stats_data.items():
            if name.startswith(GAUGE):
                gauges[name] = value
            elif value > 0:
                child = self._child(name, engine_idx)
                if child is not None:
                    child.inc(value)
        for name, value in totals(gauges).items():
            child = self._child(name, engine_idx)
            if child is not None:
                child.set(value)

    def _child(self, name: str, engine_idx: int) -> Any:
        key = (name, engine_idx)
        if key not in self._children:
            self._children[key] = self._make_child(name, engine_idx)
        return self._children[key]

    def _make_child(self, name: str, engine_idx: int) -> Any:
        for metric, family in self._families.values():
            head = metric.name
            if name != head and not name.startswith(head + "."):
                continue
            labels = name[len(head) + 1 :].split(".", max(0, len(metric.labels) - 1))
            labels = [label for label in labels if label]
            if len(labels) == len(metric.labels):
                return family.labels(*self.per_engine_labelvalues[engine_idx], *labels)
        return None
