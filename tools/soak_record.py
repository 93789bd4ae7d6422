"""Everything that a soak finds out, and the report that comes of it."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ..storage.disk_layout import iter_record_files
from ..storage.disk_verify import verify_file
from .soak_driver import Result, Tally, mismatch_row
from .soak_judge import (
    KVTIER,
    UNCLEAR,
    VLLM,
    draft_findings,
    finding,
    mismatch_findings,
    name_suspects,
    steadiness_findings,
)
from .soak_options import SoakOptions
from .soak_steady import judge_cap, judge_series
from .soak_truth import Noise
from .soak_types import Script

FORMAT = "kvtier-soak"
VERSION = 1
MAX_BUCKETS = 120
MAX_MISMATCHES = 500
KEPT_TIMES = 500
KEPT_CLEARED = 50_000
COMPUTED, DEVICE = "computed", "device"
_NOTHING_RESTORED = (
    "kvtier restored nothing: nothing is proved; give more --sessions, or the engine less cache"
)


class HitTimeline:
    """Prompt tokens by where they came from, over time; long soaks get wider buckets."""

    def __init__(self) -> None:
        self.bucket_s = 1.0
        self._buckets: dict[int, dict[str, int]] = {}
        self.totals: dict[str, int] = defaultdict(int)

    def add(self, at_s: float, tokens: dict[str, int]) -> None:
        """Count one prompt."""
        bucket = self._buckets.setdefault(int(at_s / self.bucket_s), {})
        for name, n in tokens.items():
            bucket[name] = bucket.get(name, 0) + n
            self.totals[name] += n
        while self._buckets and max(self._buckets) >= MAX_BUCKETS:
            self.bucket_s *= 2
            merged: dict[int, dict[str, int]] = {}
            for i, row in self._buckets.items():
                into = merged.setdefault(i // 2, {})
                for name, n in row.items():
                    into[name] = into.get(name, 0) + n
            self._buckets = merged

    def rows(self) -> list[dict[str, Any]]:
        """Return the buckets in order, empty ones among them."""
        last = max(self._buckets, default=-1)
        return [
            {"at_s": i * self.bucket_s, "tokens": self._buckets.get(i, {})} for i in range(last + 1)
        ]


class Times:
    """A bounded sample of times by turn."""

    def __init__(self) -> None:
        self._kept: dict[int, list[float]] = {}
        self._seen: dict[int, int] = {}
        self._rng = random.Random(1)  # noqa: S311

    def add(self, turn: int, seconds: float) -> None:
        """Take in one; all are equally likely to be kept."""
        kept = self._kept.setdefault(turn, [])
        n = self._seen[turn] = self._seen.get(turn, 0) + 1
        if len(kept) < KEPT_TIMES:
            kept.append(seconds)
        elif self._rng.random() < KEPT_TIMES / n:
            kept[self._rng.randrange(KEPT_TIMES)] = seconds

    def median(self, turn: int) -> float | None:
        """Return the median, or None where there is nothing."""
        kept = self._kept.get(turn)
        return round(statistics.median(kept), 5) if kept else None


@dataclass(slots=True)
class Record:
    """What happened. Filled by the soak, read once at its end."""

    options: SoakOptions
    began_unix_s: float = field(default_factory=time.time)
    setup: dict[str, Any] = field(default_factory=dict)
    noise: Noise = field(default_factory=Noise)
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    wrong_not_listed: int = 0
    cleared: dict[str, None] = field(default_factory=dict)  # chunks behind right answers
    hits: HitTimeline = field(default_factory=HitTimeline)
    times: dict[str, Times] = field(
        default_factory=lambda: {"none": Times(), VLLM: Times(), KVTIER: Times()}
    )
    tally: Tally = field(default_factory=Tally)
    own_tally: Tally | None = None
    own_counters: dict[str, float] | None = None
    counters: dict[str, float] = field(default_factory=dict)
    samples: list[dict[str, float]] = field(default_factory=list)
    caps: dict[str, float] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    held: list[str] = field(default_factory=list)
    rests: int = 0
    off: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # (party, what)
    duration_s: float = 0.0
    turn_numbers: list[int] = field(default_factory=list)
    folder: str | None = None
    verified: dict[str, Any] | None = None

    # -- filling -----------------------------------------------------------

    def script(self, script: Script, noise: Noise, computed: int, kept: int) -> None:
        """Note what will be asked, and how the right answers came to be."""
        self.noise = noise
        for turn in script.turns:
            self.times["none"].add(turn.number, script.truth[turn.session, turn.number].ttft_s)
        self.turn_numbers = sorted({turn.number for turn in script.turns})
        self.setup.update(
            sessions=len(script.sessions),
            turns=len(script.turns),
            longest_tokens=script.longest_tokens,
            working_tokens=script.working_tokens,
            right_answers_computed=computed,
            right_answers_kept=kept,
            tolerance=self.options.limit(noise),
        )

    def settings(self, settings: dict[str, Any], script: Script, folder: str | None) -> None:
        """Note how kvtier is set up."""
        del script
        shown = {k: v for k, v in settings.items() if k not in {"redis", "redis_password"}}
        if "redis" in settings:
            shown["redis"] = str(settings["redis"]).rpartition("@")[2]
        self.setup["kvtier"] = shown
        self.folder = folder
        capacity = settings.get("disk_capacity")
        if folder is not None and isinstance(capacity, int):
            self.caps["disk_bytes"] = capacity

    def answer(
        self, engine: str, result: Result, faults: list[str], *, count_hits: bool = True
    ) -> None:
        """Take in one answer; its hits too, where the engine tells them with it."""
        reply = result.reply
        self.times[engine].add(result.turn.number, reply.ttft_s)
        if engine == KVTIER and count_hits:
            known = reply.device_tokens + reply.restored_tokens
            tokens = {DEVICE: reply.device_tokens, **reply.restored}
            tokens[COMPUTED] = max(0, reply.prompt_tokens - known)
            self.hits.add(result.at_s, tokens)
        if result.difference is None:
            for load in reply.loads:
                self.cleared[load.key] = None
            while len(self.cleared) > KEPT_CLEARED:
                self.cleared.pop(next(iter(self.cleared)))
            return
        if len(self.mismatches) < MAX_MISMATCHES:
            self.mismatches.append(mismatch_row(result, engine, faults))
        else:
            self.wrong_not_listed += 1

    def own_cache(self, tally: Tally, counters: dict[str, float]) -> None:
        """Note how vLLM's own cache did."""
        self.own_tally, self.own_counters = tally, counters

    def anything_wrong(self) -> bool:
        """Whether something worth looking at was found so far."""
        return bool(self.mismatches or self.held or self.off or self.crashes or self._bad_files())

    # -- the report --------------------------------------------------------

    def _bad_files(self) -> list[str]:
        """Check every record that is left; return what nobody damaged on purpose."""
        if self.folder is None:
            return []
        bad, checked, known = [], 0, 0
        for file in iter_record_files(self.folder):
            checked += 1
            if not os.path.exists(file.path):
                continue
            found = verify_file(file.path, file)
            if not found.ok and os.path.basename(file.path) in self.damaged:
                known += 1
            elif not found.ok:
                bad.append(f"{os.path.basename(file.path)}: {found.detail}")
        if checked or self.verified is None:
            self.verified = {"records": checked, "damaged_by_us": known, "damaged": bad[:50]}
        return bad

    def finish(self, *, interrupted: bool) -> dict[str, Any]:
        """Return the report."""
        name_suspects(self.mismatches, self.cleared)
        growth = judge_series(self.samples)
        caps = [judge_cap(name, self.samples, cap) for name, cap in self.caps.items()]
        drafts, findings = draft_findings(self.counters, self.own_counters)
        findings = [
            *mismatch_findings(self.mismatches),
            *findings,
            *steadiness_findings(growth, caps, self.held),
            *self._other_findings(interrupted),
        ]
        ok = not findings
        return {
            "format": FORMAT,
            "version": VERSION,
            "ok": ok,
            "verdict": _verdict(findings, interrupted),
            "interrupted": interrupted,
            "began_unix_s": round(self.began_unix_s, 1),
            "duration_s": round(self.duration_s, 1),
            "setup": self._setup(),
            "noise": self.noise.as_dict(),
            "findings": findings,
            "traffic": {
                **self.tally.as_dict(),
                "prompt_tokens": sum(self.hits.totals.values()),
                "tokens": dict(self.hits.totals),
            },
            "traffic_vllm": None if self.own_tally is None else self.own_tally.as_dict(),
            "ttft_by_turn": [
                {
                    "turn": turn,
                    "none_s": self.times["none"].median(turn),
                    "vllm_s": self.times[VLLM].median(turn),
                    "kvtier_s": self.times[KVTIER].median(turn),
                }
                for turn in self.turn_numbers
            ],
            "hits": {"bucket_s": self.hits.bucket_s, "rows": self.hits.rows()},
            "mismatches": self.mismatches,
            "mismatches_not_listed": self.wrong_not_listed,
            "faults": self.faults,
            "steadiness": {"growth": growth, "caps": caps, "rests": self.rests,
                           "held_at_rest": sorted(set(self.held))},
            "store": self.verified,
            "drafts": drafts,
            "counters": {k: round(v, 4) for k, v in sorted(self.counters.items())},
            "samples": self.samples,
        }  # fmt: skip

    def _setup(self) -> dict[str, Any]:
        options = self.options
        return {
            "model": options.model or "SmolLM2-135M-Instruct",
            "dtype": options.dtype,
            "url": options.url,
            "minutes": options.minutes,
            "seed": options.seed,
            "traffic": options.traffic,
            "users": options.users,
            "faults": list(options.faults),
            **self.setup,
        }

    def _other_findings(self, interrupted: bool) -> list[dict[str, str]]:
        out = [finding(KVTIER, "tier_off", f"tier {tier} did not come back") for tier in self.off]
        out += [finding(party, "cut_short", text) for party, text in self.failures]
        out += [
            finding(KVTIER, "engine_ended", f"the engine ended by itself: {text}")
            for text in self.crashes
        ]
        out += [
            finding(UNCLEAR, "fault_failed", f"the fault {row['kind']} failed: {row['failed']}")
            for row in self.faults
            if row["failed"]
        ]
        out += [
            finding(KVTIER, "damaged_record", f"left on disk, damaged by no fault: {text}")
            for text in self._bad_files()[:20]
        ]
        if not self.tally.answered and not interrupted:
            out.append(finding(UNCLEAR, "no_answers", "not one request was answered"))
        restored = sum(n for name, n in self.hits.totals.items() if name not in {COMPUTED, DEVICE})
        if self.tally.answered and not restored and not interrupted:
            out.append(finding(UNCLEAR, "nothing_restored", _NOTHING_RESTORED))
        if self.noise.alone > self.options.limit(self.noise) / 2:
            out.append(
                finding(VLLM, "noise", f"equal requests differ by {self.noise.alone:.4f} already")
            )
        return out


def _verdict(findings: list[dict[str, str]], interrupted: bool) -> str:
    if not findings:
        return "nothing was wrong" + (", interrupted" if interrupted else "")
    by_party: dict[str, int] = {}
    for row in findings:
        by_party[row["party"]] = by_party.get(row["party"], 0) + 1
    return "; ".join(f"{party}: {n} finding{'s' * (n > 1)}" for party, n in by_party.items())
