"""The table of metrics: what is counted, under which name, with which labels.

Knows nothing of vLLM, so that tools and documentation can read it.
"""

from __future__ import annotations

from dataclasses import dataclass

GAUGE = "gauge."


@dataclass(frozen=True, slots=True)
class Metric:
    """One Prometheus family: its stats name, labels and help."""

    name: str
    labels: tuple[str, ...]
    help: str

    @property
    def prometheus_name(self) -> str:
        """Name as scraped (counters get ``_total`` from the client library)."""
        return f"kvtier:{self.name.removeprefix(GAUGE)}"


METRICS: tuple[Metric, ...] = (
    Metric("lookups", (), "Admitted requests whose prefix was looked up."),
    Metric("lookup_tokens", (), "Tokens of those requests."),
    Metric("local_hit_tokens", (), "Tokens that the device's own prefix cache held."),
    Metric("hits", (), "Requests with tokens to restore."),
    Metric("hit_tokens", ("tier",), "Tokens to restore, by the tier that they come from."),
    Metric("misses", ("reason",), "Requests whose hit ended early, by reason."),
    Metric("lookups_late", (), "Lookups that went on without a shared tier's answer."),
    Metric("gate_cut_tokens", (), "Tokens not loaded because computing was cheaper."),
    Metric("shared_round_trips", (), "Round trips to shared tiers for lookups."),
    Metric("loads_failed", (), "Loads that failed; the request computed instead."),
    Metric("load_deadline_missed", (), "Loads that ran past their deadline."),
    Metric("load_bytes", ("tier",), "Bytes loaded."),
    Metric("load_chunks", ("tier",), "Chunks loaded."),
    Metric("load_s", ("tier",), "Thread seconds spent loading."),
    Metric("load_failed_chunks", ("tier", "reason"), "Chunks that could not be loaded."),
    Metric("save_bytes", ("tier",), "Bytes saved."),
    Metric("save_chunks", ("tier",), "Chunks saved."),
    Metric("save_s", ("tier",), "Thread seconds spent saving."),
    Metric("save_failed_chunks", ("tier",), "Chunks that could not be copied."),
    Metric("save_skipped_chunks", ("reason",), "Chunks that could not be saved whole."),
    Metric("save_dropped_chunks", ("tier", "reason"), "Chunks dropped instead of waiting."),
    Metric("quarantine_failed", ("tier",), "Damaged records that could not be moved away."),
    Metric("touch_failed", ("tier",), "Times that a tier could not be told of uses."),
    Metric("ram_evicted_chunks", (), "Chunks evicted from RAM."),
    Metric("ram_evicted_lost_chunks", (), "Of those, chunks that no lower tier held."),
    Metric("audits", (), "Hits that were computed to be compared with what is stored."),
    Metric("audited_chunks", (), "Chunks compared on all ranks."),
    Metric("audited_values", (), "Values compared."),
    Metric("audited_exact_values", (), "Of those, values that were the same, bit for bit."),
    Metric("audit_differing_chunks", (), "Chunks that differed beyond the noise."),
    Metric("audit_dropped_chunks", (), "Chunks dropped for that, those after them included."),
    Metric("audit_skipped_chunks", ("reason",), "Chunks of audited hits that were not compared."),
    Metric("spoiled_chunks", (), "Saves dropped because another connector's load failed."),
    Metric("recorded_requests", (), "Requests written to the recording."),
    Metric("recording_dropped_requests", (), "Requests that the recording lacks."),
    Metric("warmed_chunks", ("tier",), "Chunks brought up into RAM because somebody asked."),
    Metric("warm_skipped_chunks", ("reason",), "Chunks asked for that were not brought up."),
    Metric("breaker_opened", ("tier",), "Times a tier was taken off."),
    Metric("breaker_closed", ("tier",), "Times a tier came back."),
    Metric("refusal_began", ("tier",), "Times a tier began to refuse saves."),
    Metric("refusal_ended", ("tier",), "Times a tier took saves again."),
    Metric("gauge.resident_chunks", ("tier",), "Chunks that can be served from a tier."),
    Metric(
        "gauge.resident_bytes", ("tier",), "Bytes on a tier, all ranks; of RAM, its pages in use."
    ),
    Metric("gauge.tier_online", ("tier",), "1 while a tier below RAM answers, summed over ranks."),
    Metric("gauge.ram_pages", ("state",), "RAM pages: free, held by chunks, pinned by jobs, all."),
    Metric("gauge.save_queue_bytes", (), "Bytes waiting to be written below RAM, all ranks."),
    Metric("gauge.pinned_device_blocks", (), "Device blocks held by saves in flight."),
    Metric("gauge.audit_worst_mean", (), "Largest mean relative difference taken for noise."),
)


def markdown_table() -> str:
    """Return the table of all metrics as documentation shows it."""
    lines = ["| metric | labels | meaning |", "| --- | --- | --- |"]
    for metric in METRICS:
        total = "" if metric.name.startswith(GAUGE) else "_total"
        labels = ", ".join(metric.labels)
        lines.append(f"| `{metric.prometheus_name}{total}` | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
