"""Whose fault a wrong answer is, and everything else that was wrong: findings."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from .soak_truth import compare
from .soak_types import Reply, Script, Turn
from .soak_words import amount, series

KVTIER, VLLM, UNCLEAR = "kvtier", "vllm", "unclear"
MAX_TRIED = 6
MIN_DRAFT_TOKENS = 50

AskSessions = Callable[[Sequence[Sequence[Turn]]], list[Reply]]
"""Plays each list of turns in order, one list after the other; returns the last reply of each."""


def finding(party: str, kind: str, text: str) -> dict[str, str]:
    """Return one thing that was wrong."""
    return {"party": party, "kind": kind, "text": text}


def charge(
    mismatches: Sequence[dict[str, Any]],
    script: Script,
    limit: float,
    without_cache: AskSessions | None,
    own_cache: AskSessions | None,
    *,
    loads_known: bool = True,
) -> None:
    """Fill in ``party`` and ``why`` of every wrong answer.

    The party is vLLM when the session is wrong in an engine that kvtier is not in (what is wrong
    there is stored as it is); kvtier when it is right there, and kvtier had loaded part of the
    prompt or of what the device's cache may have hit; else it is unclear. The first few turns are
    tried again.

    Args:
        mismatches: rows of `mismatch_row`, changed in place.
        script: what was asked.
        limit: how far logprobs may lie apart.
        without_cache: asks an engine without any cache; None where there is none to ask.
        own_cache: asks one with vLLM's own prefix cache alone.
        loads_known: whether rows tell what kvtier loaded; a server at a URL does not.
    """
    bad_turns: dict[str, set[int]] = {}
    for row in mismatches:
        if row["engine"] == VLLM:
            bad_turns.setdefault(row["session"], set()).add(row["turn"])
    tried = _try_again(
        [row for row in mismatches if row["engine"] != VLLM and row["session"] not in bad_turns],
        script,
        limit,
        without_cache,
        own_cache,
    )
    for name, number in tried:
        bad_turns.setdefault(name, set()).add(number)
    for row in mismatches:
        bad = bad_turns.get(row["session"], set())
        row["party"], row["why"] = _party(row, bad, tried, loads_known=loads_known)


def _party(
    row: Mapping[str, Any],
    bad_turns: set[int],
    tried: Mapping[tuple[str, int], str],
    *,
    loads_known: bool,
) -> tuple[str, str]:
    if row["engine"] == VLLM:
        return VLLM, "wrong with vLLM's own prefix cache, without kvtier"
    elsewhere = tried.get((row["session"], row["turn"]))
    if elsewhere is not None:
        return VLLM, elsewhere
    if row["turn"] in bad_turns:
        return VLLM, "the same turn is wrong with vLLM's own prefix cache, without kvtier"
    if bad_turns:
        turns = ", ".join(str(turn) for turn in sorted(bad_turns))
        return VLLM, (
            f"this session is wrong without kvtier too (turn {turns}), "
            "and what was wrong may have been stored"
        )
    if row["chunks"] or row["restored"]:
        why = "right without kvtier; kvtier loaded part of this prompt"
    elif row["earlier_chunks"]:
        why = "right without kvtier; the device's cache hit what kvtier may have loaded before"
    elif not loads_known:
        why = "right without kvtier; a server does not tell which chunks it loaded"
    else:
        return UNCLEAR, "right without kvtier, but kvtier had loaded nothing of this prompt"
    return KVTIER, why


def _try_again(
    rows: Sequence[Mapping[str, Any]],
    script: Script,
    limit: float,
    without_cache: AskSessions | None,
    own_cache: AskSessions | None,
) -> dict[tuple[str, int], str]:
    """Return for the first few turns what is wrong with them without kvtier, if anything is."""
    by_session: dict[str, list[int]] = {}
    for name, number in dict.fromkeys((row["session"], row["turn"]) for row in rows):
        by_session.setdefault(name, []).append(number)
    ranked = [
        (i, name, number)
        for name, numbers in by_session.items()
        for i, number in enumerate(numbers)
    ]
    places = [(name, number) for _, name, number in sorted(ranked)[:MAX_TRIED]]  # all sessions
    sessions = {session[0].session: session for session in script.sessions}
    turns = [[t for t in sessions[name] if t.number <= number] for name, number in places]
    out: dict[tuple[str, int], str] = {}
    ways = (
        (own_cache, turns, "asked again with vLLM's own prefix cache alone, it is wrong too"),
        (
            without_cache,
            [some[-1:] for some in turns],
            "asked again without any cache, vLLM gives another answer than before",
        ),
    )
    for ask, asked, words in ways:
        if ask is None or not places:
            continue
        for place, reply in zip(places, ask(asked), strict=True):
            if compare(script.truth[place], reply, limit) is not None:
                out[place] = words
    return out


def name_suspects(mismatches: Sequence[dict[str, Any]], cleared: Container[str]) -> None:
    """Fill in ``suspects``: the chunks behind each wrong answer that no right answer was made with.

    Args:
        mismatches: rows of `mismatch_row`, changed in place.
        cleared: keys of chunks that were loaded for right answers.
    """
    for row in mismatches:
        chunks = {c["key"]: c for c in (*row["earlier_chunks"], *row["chunks"])}
        left = [chunk for key, chunk in chunks.items() if key not in cleared]
        row["suspects"] = left or list(chunks.values())


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
        chunks = row["suspects"]
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
                f"({row['answer_position']} of the answer): {_tokens(row)}, "
                f"{_apart(row['logprob_difference'])}{times}; "
                f"{row['why']}; chunks not seen in a right answer: {names or 'none'}{more}",
            )
        )
    return out


def _tokens(row: Mapping[str, Any]) -> str:
    if row["got_token"] == row["expected_token"]:
        return f"the right token {row['got_token']}"
    return f"token {row['got_token']} instead of {row['expected_token']}"


def _apart(difference: float | None) -> str:
    return "logprobs far apart or no numbers" if difference is None else (
        f"logprobs {difference:.4g} apart"
    )  # fmt: skip


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
            f"{series(row['name'])} grows: {amount(row['name'], row['first'])} to "
            f"{amount(row['name'], row['last'])} in {row['watched_s']:.0f} s "
            f"(allowed {amount(row['name'], row['allowed'])} in all)",
        )
        for row in growth
        if row["verdict"] == "grows"
    ]
    out += [
        finding(
            KVTIER,
            "over_cap",
            f"{series(row['name'])}: {amount(row['name'], row['most'])}, "
            f"the cap is {amount(row['name'], row['cap'])}",
        )
        for row in caps
        if row["verdict"] == "over_cap"
    ]
    return out + [finding(KVTIER, "held_at_rest", text) for text in dict.fromkeys(held)]
