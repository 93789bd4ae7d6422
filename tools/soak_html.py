"""The report as one page that needs nothing else: no network, no scripts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .soak_svg import (
    Band,
    Line,
    groups,
    lines_over_time,
    n_bytes,
    number,
    seconds,
    stacked_over_time,
)
from .soak_words import amount, an_hour, plain, series

PLOTS = ("ttft", "hits", "memory", "handles", "device", "queue", "stores")
"""What every report draws, as ``plot-NAME``."""

_STYLE = """
:root{--ink:#1b1f24;--soft:#5c6670;--line:#d9dee3;--paper:#fff;--card:#f6f8fa;--good:#0a7a4b;
--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4ae;--line:#394149;--paper:#14181c;
--card:#1d2228;--good:#4cc38a;--bad:#ff8b82}}
body{margin:0 auto;max-width:940px;padding:24px 20px 60px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:34px 0 8px}
.soft,figcaption{color:var(--soft)}figcaption b{color:var(--ink)}
.verdict{border-left:6px solid;padding:10px 14px;background:var(--card);margin:16px 0;
font-size:17px}
.ok{border-color:var(--good)}.bad{border-color:var(--bad)}
.tiles{display:flex;flex-wrap:wrap;gap:10px}.tiles div{background:var(--card);padding:8px 14px;
border-radius:6px;min-width:110px}.tiles b{display:block;font-size:20px}
figure{margin:18px 0}svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.grid{stroke:var(--line)}
.fault{fill:var(--bad);opacity:.16}
.legend span{margin-right:14px;font-size:13px;white-space:nowrap}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.legend i.dashed{height:0;width:18px;border-radius:0;border-top:2px dashed;margin-bottom:4px}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;font-weight:600;color:var(--soft)}
td,th{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td:last-child,code{overflow-wrap:anywhere}code{font-size:12px}.party{font-weight:600;color:var(--bad)}
details{margin:10px 0}summary{cursor:pointer;color:var(--soft)}
"""


def page(found: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    parts = [
        head(found, f"{found['setup']['model']}, {found['setup']['dtype']}"),
        tiles(_figures(found)),
        findings_table(found["findings"]),
        "<h2>Traffic</h2>",
        _plots_of_traffic(found),
        "<h2>Steadiness</h2>",
        _plots_over_time(found),
        steadiness_table(found["steadiness"]),
        _rests(found["steadiness"]),
        _faults(found["faults"]),
        _mismatches(found["mismatches"], found["mismatches_not_listed"]),
        details("Set-up", found["setup"].items()),
        details("Noise", found["noise"].items()),
        details("Counters", found["counters"].items()),
        "</body></html>",
    ]
    return "\n".join(parts)


def head(found: Mapping[str, Any], subtitle: str) -> str:
    """Return the page's beginning: what ran, and the verdict."""
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found["began_unix_s"]))
    ran = f"{began}, {found['duration_s'] / 60:.1f} minutes, seed {found['setup']['seed']}"
    colour = "ok" if found["ok"] else "bad"
    cut = " It was ended early." if found["interrupted"] else ""
    text = found["verdict"].replace("nothing was", "Nothing was")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvtier soak: {escape(found['verdict'])}</title><style>{_STYLE}</style></head>"
        f'<body><h1>kvtier soak</h1><div class="soft">{escape(subtitle)}; {escape(ran)}</div>'
        f'<div class="verdict {colour}" id="verdict">{escape(text)}.{cut}</div>'
    )


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    traffic = found["traffic"]
    tokens = traffic["tokens"]
    total = max(1, traffic["prompt_tokens"])
    restored = sum(n for name, n in tokens.items() if name not in {"computed", "device"})
    return [
        ("answers compared", f"{traffic['answered']:,}"),
        ("wrong", f"{traffic['wrong']:,}"),
        ("given up and asked again", f"{traffic['aborted']:,}"),
        ("faults", f"{len(found['faults'])}"),
        ("of prompt tokens restored", f"{100 * restored / total:.1f} %"),
        ("noise of logprobs", f"{max(found['noise']['alone'], found['noise']['together']):.2g}"),
    ]


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Return (name, value) pairs as a row of tiles."""
    shown = "".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for k, v in figures)
    return f'<div class="tiles">{shown}</div>'


def findings_table(findings: Sequence[Mapping[str, str]]) -> str:
    """Return what was wrong, by party; nothing where nothing was."""
    if not findings:
        return ""
    rows = [
        (f'<span class="party">{escape(f["party"])}</span>', escape(f["kind"].replace("_", " ")),
         escape(f["text"]))
        for f in findings
    ]  # fmt: skip
    return "<h2>Findings</h2>" + table(("charged to", "what", "details"), rows)


def _plots_of_traffic(found: Mapping[str, Any]) -> str:
    turns = [
        (f"turn {row['turn']}", (row["none_s"], row["vllm_s"], row["kvtier_s"]))
        for row in found["ttft_by_turn"]
    ]
    tiers = [name for name in ("ram", "disk", "redis") if name in found["traffic"]["tokens"]]
    others = sorted(set(found["traffic"]["tokens"]) - {"computed", "device", *tiers})
    keys = ["device", *tiers, *others, "computed"]
    rows = [(row["at_s"], row["tokens"]) for row in found["hits"]["rows"]]
    return groups(
        "ttft",
        "Time to first token by turn, median",
        ("without any cache, alone", "vLLM's own cache", "kvtier"),
        turns,
    ) + stacked_over_time(
        "hits",
        "Prompt tokens by where they came from",
        keys,
        rows,
        found["hits"]["bucket_s"],
        _bands(found),
    )


def _bands(found: Mapping[str, Any]) -> list[Band]:
    return [
        Band(f"{f['kind']}: {f['what']}", f["at_s"], f["until_s"] or f["at_s"])
        for f in found["faults"]
    ]


def _plots_over_time(found: Mapping[str, Any]) -> str:
    samples, bands = found["samples"], _bands(found)
    caps = {row["name"]: row["cap"] for row in found["steadiness"]["caps"]}

    def line(name: str, label: str) -> Line:
        return Line(label, [(s["at_s"], s[name]) for s in samples if name in s])

    def cap(name: str, label: str) -> Line:
        ends = [samples[0]["at_s"], samples[-1]["at_s"]] if samples and name in caps else []
        return Line(label, [(at, caps[name]) for at in ends], dashed=True)

    charts = (
        ("memory", "Memory of the engine", (line("rss_bytes", "resident"),), n_bytes),
        (
            "handles",
            "File descriptors and threads",
            (line("fds", "descriptors"), line("threads", "threads")),
            number,
        ),
        (
            "device",
            "Device block pool",
            (line("free_device_blocks", "free"), line("pinned_device_blocks", "pinned by saves")),
            number,
        ),
        (
            "queue",
            "RAM pages and queues",
            (
                line("pinned_ram_pages", "pinned RAM pages"),
                line("free_ram_pages", "free RAM pages"),
                line("waiting", "waiting requests"),
            ),
            number,
        ),
        (
            "stores",
            "Bytes below RAM and their caps",
            (
                line("disk_bytes", "disk"),
                cap("disk_bytes", "disk's cap"),
                line("redis_bytes", "Redis"),
                cap("redis_bytes", "Redis' cap"),
                line("save_queue_bytes", "waiting to be written"),
            ),
            n_bytes,
        ),
    )
    return "".join(
        lines_over_time(name, title, lines, y_format, bands)
        for name, title, lines, y_format in charts
    )


def steadiness_table(steady: Mapping[str, Any]) -> str:
    """Return the verdicts on what must be flat and below its cap."""
    rows = [
        (
            escape(series(row["name"])),
            escape(row["verdict"].replace("_", " ")),
            *(escape(amount(row["name"], row[k])) for k in ("first", "last", "growth", "allowed")),
            escape(seconds(row["watched_s"])),
            escape(an_hour(row)),
        )
        for row in steady["growth"]
    ]
    rows += [
        (escape(series(row["name"])), escape(row["verdict"].replace("_", " ")), "-",
         escape(amount(row["name"], row["most"])), "-", escape(amount(row["name"], row["cap"])),
         "-", "-")
        for row in steady["caps"]
    ]  # fmt: skip
    columns = ("series", "verdict", "first third", "last third", "growth", "allowed", "watched",
               "an hour")  # fmt: skip
    return table(columns, rows)


def _rests(steady: Mapping[str, Any]) -> str:
    held = steady["held_at_rest"]
    what = f"; held then: {escape('; '.join(held))}" if held else ", and nothing was held"
    return f"<p>Everything came to rest {steady['rests']} times{what}.</p>"


def _faults(faults: Sequence[Mapping[str, Any]]) -> str:
    if not faults:
        return ""
    rows = [
        (
            escape(row["kind"]),
            f"{row['at_s']:.1f}-{row['until_s'] or row['at_s']:.1f} s",
            escape(row["failed"] or row["what"]),
            escape(
                ", ".join(f"{k} {v:g}" for k, v in row["followed"].items()) or "nothing counted"
            ),
            f"{row['answers']['right']} right, {row['answers']['wrong']} wrong",
        )
        for row in faults
    ]
    return "<h2>Faults</h2>" + table(("fault", "when", "what", "followed", "answers"), rows)


def _mismatches(rows: Sequence[Mapping[str, Any]], more: int) -> str:
    if not rows:
        return ""
    body = [
        (
            f'<span class="party">{escape(m["party"])}</span>',
            escape(m["engine"]),
            f"{m['at_s']:.1f} s",
            f"{escape(m['session'])} turn {m['turn']}, round {m['round']}",
            f"{m['position']}",
            f"{m['got_token']} for {m['expected_token']}",
            "NaN" if m["logprob_difference"] is None else f"{m['logprob_difference']:.4g}",
            escape(", ".join(f"{n} {tier}" for tier, n in m["restored"].items()) or "none"),
            "<br>".join(
                f"<code>{escape(c['key'])}</code> {c['start_tokens']}-{c['end_tokens']} "
                f"{escape(c['tier'])}"
                for c in m["suspects"][:20]
            )
            or "none",
            escape(m["why"] + ("; during " + ", ".join(m["faults"]) if m["faults"] else "")),
        )
        for m in rows
    ]
    columns = ("charged to", "engine", "at", "turn", "position", "token", "logprobs apart",
               "restored", "suspected chunks", "why")  # fmt: skip
    note = f"<p>{more} more are not listed.</p>" if more else ""
    return "<h2>Wrong answers</h2>" + table(columns, body) + note


def details(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """Return a table that opens on a click."""
    body = [(escape(str(k)), escape(plain(str(k), v))) for k, v in rows if v is not None]
    return f"<details><summary>{title}</summary>{table(('name', 'value'), body)}</details>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are HTML already."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
