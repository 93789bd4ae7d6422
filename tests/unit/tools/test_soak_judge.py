from __future__ import annotations

import pytest

from kvtier.tools.soak_judge import (
    charge,
    draft_findings,
    mismatch_findings,
    name_suspects,
    steadiness_findings,
)

from .soak_fakes import answer_of, script

SCRIPT = script()
CHUNK = {"key": "aa-g0", "start_tokens": 0, "end_tokens": 64, "tier": "disk"}
OTHER = {"key": "bb-g0", "start_tokens": 64, "end_tokens": 128, "tier": "ram"}


def row(engine="kvtier", session="session-1", turn=2, **more):
    return {
        "engine": engine, "session": session, "turn": turn, "chunks": [], "earlier_chunks": [],
        "restored": {}, "device_tokens": 0, "position": 203, "answer_position": 3,
        "expected_token": 5, "got_token": 6, "logprob_difference": 0.25, "party": "", "why": "",
        "suspects": [], **more,
    }  # fmt: skip


def right(sessions):
    return [SCRIPT.truth[t[-1].session, t[-1].number] for t in sessions]


def wrong(sessions):
    return [answer_of((*t[-1].prompt, 1), 4) for t in sessions]


@pytest.mark.parametrize(
    ("rows", "without_cache", "own_cache", "parties"),
    [
        ([row(chunks=[CHUNK], restored={"disk": 64})], right, right, ["kvtier"]),
        ([row(earlier_chunks=[CHUNK], device_tokens=64)], right, right, ["kvtier"]),
        ([row()], right, right, ["unclear"]),
        ([row(chunks=[CHUNK])], right, wrong, ["vllm"]),
        ([row(chunks=[CHUNK])], wrong, right, ["vllm"]),
        ([row("vllm"), row(chunks=[CHUNK])], right, right, ["vllm", "vllm"]),
        ([row("vllm", turn=3), row(chunks=[CHUNK])], right, right, ["vllm", "vllm"]),
        ([row("vllm"), row(session="session-2", chunks=[CHUNK])], right, right, ["vllm", "kvtier"]),
        ([row(chunks=[CHUNK])], None, None, ["kvtier"]),
    ],
    ids=["loaded", "on the device", "nothing loaded", "vllm's cache", "not reproducible",
         "same turn", "stored by kvtier", "two faults", "nobody to ask"],
)  # fmt: skip
def test_a_wrong_answer_is_charged_to_whoever_made_it(rows, without_cache, own_cache, parties):
    """To vLLM where it is wrong without kvtier, to kvtier where it had a hand in it."""
    charge(rows, SCRIPT, 1e-3, without_cache, own_cache)
    assert [r["party"] for r in rows] == parties
    assert all(r["why"] for r in rows)


def test_a_turn_is_asked_again_with_all_turns_before_it():
    """The cache of vLLM must be warm where kvtier's was; without a cache the turn alone will do."""
    seen = []

    def noted(sessions):
        seen.append([[turn.number for turn in turns] for turns in sessions])
        return right(sessions)

    charge([row(turn=3, chunks=[CHUNK]), row(turn=3)], SCRIPT, 1e-3, noted, noted)
    assert seen == [[[1, 2, 3]], [[3]]]


def test_chunks_of_right_answers_are_no_suspects():
    """What remains is named; when nothing does, everything is."""
    rows = [row(chunks=[OTHER], earlier_chunks=[CHUNK]), row(chunks=[OTHER])]
    name_suspects(rows, {"bb-g0"})
    assert [r["suspects"] for r in rows] == [[CHUNK], [OTHER]]


def test_a_finding_names_turn_position_and_chunk():
    """One for each turn however often it was wrong."""
    rows = [row(chunks=[CHUNK]), row(chunks=[CHUNK]), row(turn=3, logprob_difference=None)]
    charge(rows, SCRIPT, 1e-3, None, None)
    name_suspects(rows, set())
    found = mismatch_findings(rows)
    assert [f["party"] for f in found] == ["kvtier", "unclear"]
    text = found[0]["text"]
    for part in ("session-1 turn 2", "position 203", "3 of the answer", "aa-g0", "tokens 0-64",
                 "disk", "2 times", "0.25", "token 6 instead of 5"):  # fmt: skip
        assert part in text
    assert "none" in found[1]["text"]


@pytest.mark.parametrize(
    ("accepted", "vllms", "party"),
    [(0, None, "unclear"), (1, None, "unclear"), (0, 0.5, "kvtier"), (0, 0, "vllm"),
     (0.5, 0, None)],
)  # fmt: skip
def test_draft_acceptance_of_none_or_all_is_flagged(accepted, vllms, party):
    """0 % and 100 % are findings, vLLM's when it has the same without kvtier."""
    other = None if vllms is None else {"draft_tokens": 200, "accepted_tokens": 200 * vllms}
    told, found = draft_findings({"draft_tokens": 300, "accepted_tokens": 300 * accepted}, other)
    assert told["flagged"] == (party is not None)
    assert [f["party"] for f in found] == ([party] if party else [])


def test_too_few_drafts_say_nothing():
    """A handful of drafts may all fail."""
    assert draft_findings({"draft_tokens": 10, "accepted_tokens": 0}, None)[1] == []


def test_growth_caps_and_what_is_held_are_findings():
    """Each once, in words."""
    growth = [
        {
            "name": "fds",
            "verdict": "grows",
            "first": 1,
            "last": 9,
            "watched_s": 5,
            "slope_per_h": 99,
            "allowed": 4,
        },
        {"name": "threads", "verdict": "flat"},
    ]
    caps = [{"name": "disk_bytes", "verdict": "over_cap", "most": 20, "cap": 10}]
    found = steadiness_findings(growth, caps, ["a page", "a page"])
    assert [f["kind"] for f in found] == ["grows", "over_cap", "held_at_rest"]
