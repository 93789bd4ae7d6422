from __future__ import annotations

import pytest

from kvtier.tools.bench_sessions import session_plans
from kvtier.tools.demo import ANSWER_TOKENS, BLOCK_TOKENS, DEVICE_TOKENS, SESSIONS
from kvtier.tools.sessions import Session, SessionPlan


def encode(text):
    """One token a character, so that lengths are plain to see."""
    return [ord(letter) for letter in text]


def test_prompts_have_the_planned_lengths_and_continue_each_other():
    """A turn's prompt is the last one, its answer, then new text, cut to the token."""
    session = Session(SessionPlan("a", (300, 420, 500)), encode, seed=1)
    first = session.next_prompt()
    second = session.next_prompt([7, 8, 9])
    third = session.next_prompt([1])
    assert [len(first), len(second), len(third)] == [300, 420, 500]
    assert second[:303] == [*first, 7, 8, 9]
    assert third[:421] == [*second, 1]


def test_the_same_seed_makes_the_same_text_and_sessions_differ_from_the_start():
    """Runs ask for the same work, and no two sessions share a first block."""
    a = Session(SessionPlan("a", (400,)), encode, seed=1).next_prompt()
    again = Session(SessionPlan("a", (400,)), encode, seed=1).next_prompt()
    b = Session(SessionPlan("b", (400,)), encode, seed=1).next_prompt()
    other = Session(SessionPlan("a", (400,)), encode, seed=2).next_prompt()
    assert a == again
    assert a != other
    assert a[:64] != b[:64]


def test_a_plan_that_leaves_no_room_is_refused():
    """A turn shorter than what came before is a mistake in the plan."""
    session = Session(SessionPlan("a", (300, 301)), encode, seed=1)
    session.next_prompt()
    with pytest.raises(ValueError, match="leaves no room"):
        session.next_prompt([1] * 50)


def test_the_demo_can_show_what_it_promises():
    """Sessions reach 4,000 tokens, are evicted before they return, and grow by under a tenth."""
    assert max(max(plan.prompt_tokens) for plan in SESSIONS) >= 4000
    assert max(max(plan.prompt_tokens) for plan in SESSIONS) + ANSWER_TOKENS <= DEVICE_TOKENS
    for i, plan in enumerate(SESSIONS):
        first, second = plan.prompt_tokens
        between = [p.prompt_tokens[0] for p in SESSIONS[i + 1 :]]
        between += [p.prompt_tokens[1] for p in SESSIONS[:i]]
        assert sum(between) >= DEVICE_TOKENS - BLOCK_TOKENS
        assert (first + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS >= 0.9 * second


def test_the_sessions_benchmark_is_the_work_it_says():
    """Six sessions from 1,500 to 2,700 tokens whose returning prompts were nearly all seen."""
    plans = session_plans(6, 4)
    lengths = [n for plan in plans for n in plan.prompt_tokens]
    assert (min(lengths), max(lengths)) == (1500, 2700)
    for plan in plans:
        for before, after in zip(plan.prompt_tokens, plan.prompt_tokens[1:], strict=False):
            assert (before + 7) // 32 * 32 / after >= 0.85
