"""Whose fault a wrong answer is, and everything else that was wrong: findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .soak_truth import compare
from .soak_types import Reply, Script, Turn

KVTIER, VLLM, UNCLEAR = "kvtier", "vllm", "unclear"
MAX_TRIED = 4
MIN_DRAFT_TOKENS = 50

AskTurns = Callable[[Sequence[Turn]], list[Reply]]
"""Plays turns in order and returns their replies."""


def finding(party: str, kind: str, text: str) -> dict[str, str]:
    """Return one thing that was wrong."""
    return {"party": party, "kind": kind, "text": text}


def charge(
    mismatches: Sequence[dict[str, Any]],
    script: Script,
    limit: float,
    without_cache: AskTurns | None,
    own_cache: AskTurns | None,
) -> None:
    """Fill in ``party`` and ``why`` of every wrong answer.

    The party is vLLM when the same turn is wrong in an engine that kvtier is not in; kvtier when
    it is right there, and kvtier had loaded part of the prompt (or of an earlier turn, which may
    still be in the device's cache); else it is unclear. The first few turns are tried again.

    Args:
        mismatches: rows of `mismatch_row`, changed in place.
        script: what was asked.
        limit: how far logprobs may lie apart.
        without_cache: asks an engine without any cache; None where there is none to ask.
        own_cache: asks one with vLLM's own prefix cache alone.
    """
    wrong_in_vllm = {(m["session"], m["turn"]) for m in mismatches if m["engine"] == VLLM}
    tried: dict[tuple[str, int], str | None] = {}
    for row in mismatches:
        where = (row["session"], row["turn"])
        if row["engine"] == VLLM:
            row["party"], row["why"] = VLLM, "wrong with vLLM's own prefix cache, without kvtier"
            continue
        if where in wrong_in_vllm:
            row["party"] = VLLM
            row["why"] = "the same turn is wrong with vLLM's own prefix cache, without kvtier"
            continue
        if where not in tried and len(tried) < MAX_TRIED:
            tried[where] = _try_again(where, script, limit, without_cache, own_cache)
        elsewhere = tried.get(where)
        if elsewhere is not None:
            row["party"], row["why"] = VLLM, elsewhere
        elif row["chunks"] or row["restored"]:
            row["party"], row["why"] = KVTIER, "right without kvtier; kvtier loaded these chunks"
        elif row["earlier_chunks"] and row["device_tokens"]:
            row["party"] = KVTIER
            row["why"] = (
                "right without kvtier; the device's cache holds what kvtier loaded for an "
                "earlier turn"
            )
        else:
            row["party"] = UNCLEAR
            row["why"] = "right without kvtier, but kvtier had loaded nothing of this session"


def _try_again(
    where: tuple[str, int],
    script: Script,
    limit: float,
    without_cache: AskTurns | None,
    own_cache: AskTurns | None,
) -> str | None:
    """Return what is wrong without kvtier, in words; None when the turn is right there."""
    session = next(s for s in script.sessions if s[0].session == where[0])
    turns = [turn for turn in session if turn.number <= where[1]]
    right = script.truth[where]
    if without_cache is not None:
        reply = without_cache(turns[-1:])[-1]
        if compare(right, reply, limit) is not None:
            return "asked again without any cache, vLLM gives another answer than before"
    if own_cache is not None:
        reply = own_cache(turns)[-1]
        if compare(right, reply, limit) is not None:
            return "asked again with vLLM's own prefix cache alone, the answer is wrong too"
    return None


def mismatch_findings(mismatches: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return one finding for each wrong turn of a session, with position and chunk."""
    seen: dict[tuple[str, str, int], int] = {}
    for row in mismatches:
        where = (row["party"], row["session"], row["turn"])
        seen[where] = seen.get(where, 0) + 1
    out, told = [], set()
    for row in mismatches:
        where = (row["party"], row["session"], row["turn"])
        if where in told:
            continue
        told.add(where)
        chunks = row["chunks"] or row["earlier_chunks"]
        names = ", ".join(
            f"{c['key']} (tokens {c['start_tokens']}-{c['end_tokens']}, {c['tier']})"
            for c in chunks[:8]
        )
        more = f" and {len(chunks) - 8} more" if len(chunks) > 8 else ""
        times = f", {seen[where]} times" if seen[where] > 1 else ""
        out.append(
            finding(
                row["party"],
                "wrong_answer",
                f"{row['session']} turn {row['turn']}, position {row['position']} "
                f"({row['answer_position']} of the answer): token {row['got_token']} instead of "
                f"{row['expected_token']}, logprobs {row['logprob_difference']} apart{times}; "
                f"{row['why']}; chunks: {names or 'none'}{more}",
            )
        )
    return out


def draft_findings(
    ours: Mapping[str, float], vllms: Mapping[str, float] | None
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return the share of accepted draft tokens, and findings where it is 0 or 1.

    Args:
        ours: counters of the engine with kvtier.
        vllms: of the one without, where there was one.
    """
    rates = {"kvtier": _rate(ours), "vllm": _rate(vllms or {})}
    rate, other = rates["kvtier"], rates["vllm"]
    told = {
        "draft_tokens": int(ours.get("draft_tokens", 0)),
        "accepted_share": rate,
        "accepted_share_vllm": other,
        "flagged": rate in (0.0, 1.0),
    }
    if not told["flagged"]:
        return told, []
    assert rate is not None
    party = VLLM if other == rate else KVTIER if other is not None else UNCLEAR
    text = (
        f"{100 * rate:.0f} % of {told['draft_tokens']} draft tokens were accepted"
        + (f", {100 * other:.0f} % without kvtier" if other is not None else "")
        + "; drafts are made from KV too, and what is wrong there shows in no token"
    )
    return told, [finding(party, "draft_acceptance", text)]


def _rate(counters: Mapping[str, float]) -> float | None:
    drafts = counters.get("draft_tokens", 0)
    if drafts < MIN_DRAFT_TOKENS:
        return None
    return round(counters.get("accepted_tokens", 0) / drafts, 4)


def steadiness_findings(
    growth: Sequence[Mapping[str, Any]], caps: Sequence[Mapping[str, Any]], held: Sequence[str]
) -> list[dict[str, str]]:
    """Return findings of what grows, what is over its cap, and what is still held at rest."""
    out = [
        finding(
            KVTIER,
            "grows",
            f"{row['name']} grows: {row['first']:.0f} to {row['last']:.0f} in "
            f"{row['watched_s']:.0f} s, {row['slope_per_h']:.0f} an hour "
            f"(allowed {row['allowed']:.0f} in all)",
        )
        for row in growth
        if row["verdict"] == "grows"
    ]
    out += [
        finding(
            KVTIER, "over_cap", f"{row['name']}: {row['most']:.0f}, the cap is {row['cap']:.0f}"
        )
        for row in caps
        if row["verdict"] == "over_cap"
    ]
    return out + [finding(KVTIER, "held_at_rest", text) for text in dict.fromkeys(held)]
