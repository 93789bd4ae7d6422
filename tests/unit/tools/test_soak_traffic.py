from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvtier.tools.soak_script import build_script
from kvtier.tools.soak_traffic import (
    RandomStream,
    TextStream,
    TrafficOptions,
    fitting_context,
    synthetic_sessions,
    trace_sessions,
)
from kvtier.tools.soak_truth import TruthStore
from kvtier.tools.traces import Request, Trace

from .soak_fakes import answer_of

SHAPE = TrafficOptions(context_tokens=1000, sessions=4, turns=3, seed=5)


def opener(seed=5):
    return lambda name: RandomStream(name, seed, 500)


def all_turns(sessions, answer=(9, 9, 9)):
    out = []
    for session in sessions:
        turns, told = [], ()
        while (turn := session.next_turn(told)) is not None:
            turns.append(turn)
            told = answer
        out.append(turns)
    return out


def test_synthetic_prompts_grow_inside_the_context_and_carry_the_answers():
    """Each prompt begins with the last one and its answer; none is longer than the context."""
    for turns in all_turns(synthetic_sessions(SHAPE, opener())):
        assert len(turns) == 3
        for before, after in pairwise(turns):
            assert after.prompt[: len(before.prompt) + 3] == (*before.prompt, 9, 9, 9)
        assert len(turns[-1].prompt) + turns[-1].answer_tokens <= 1000
        assert len(turns[-1].prompt) > 700


def test_system_prompts_are_shared_and_the_rest_is_not():
    """Sessions share a fifth of the context with every second one, and nothing more."""
    first = [turns[0].prompt for turns in all_turns(synthetic_sessions(SHAPE, opener()))]
    assert first[0][:200] == first[2][:200]
    assert first[0][:205] != first[2][:205]
    assert first[0][:200] != first[1][:200]


def test_a_seed_repeats_its_traffic():
    """The same seed gives the same turns, another one others."""
    a, b = (all_turns(synthetic_sessions(SHAPE, opener())) for _ in range(2))
    assert a == b
    assert a != all_turns(synthetic_sessions(SHAPE, opener(6)))


def test_text_streams_are_cut_to_length():
    """Text goes through the tokenizer and is cut to exact lengths, without a gap."""
    stream = TextStream("x", 1, lambda text: [ord(c) for c in text])
    again = TextStream("x", 1, lambda text: [ord(c) for c in text])
    assert stream.take(10) + stream.take(500) == again.take(510)


def trace():
    """Two sessions of four calls; the second call of each drops half of its history."""
    requests, node = [], 0
    for session in range(2):
        base = list(range(node, node + 40))
        node += 200
        chains = [base[:20], base[:10] + list(range(node - 50, node - 35)), base, base]
        for i, chain in enumerate(chains):
            nodes = np.array(chain, dtype=np.int32)
            requests.append(Request(60.0 * i, session, 64 * len(chain), 5, nodes))
    return Trace("t", 64, tuple(requests), node)


def test_trace_sessions_keep_shape_shared_history_and_pauses():
    """Prompts share exactly the blocks that the trace shares; pauses are compressed."""
    shape = TrafficOptions(context_tokens=408, sessions=2, turns=4, compress=60.0, seed=1)
    for turns in all_turns(trace_sessions(trace(), shape, opener())):
        lengths = [len(turn.prompt) for turn in turns]
        assert lengths == [200, 250, 400, 400]
        assert turns[1].prompt[:100] == turns[0].prompt[:100]
        assert turns[1].prompt[:110] != turns[0].prompt[:110]
        assert turns[2].prompt == turns[3].prompt
        assert [turn.think_s for turn in turns] == [0.0, 1.0, 1.0, 1.0]


def test_long_traces_are_thinned_not_cut():
    """A prompt of more blocks than the context has tokens still grows from turn to turn."""
    nodes = [np.arange(n, dtype=np.int32) for n in (1000, 2000, 3000)]
    requests = tuple(Request(i, 0, 64 * len(n), 5, n) for i, n in enumerate(nodes))
    shape = TrafficOptions(context_tokens=208, sessions=1, turns=3, seed=1)
    (turns,) = all_turns(trace_sessions(Trace("t", 64, requests, 3000), shape, opener()))
    lengths = [len(turn.prompt) for turn in turns]
    assert lengths[2] > 180
    assert lengths[0] < lengths[1] < lengths[2]
    assert turns[2].prompt[: lengths[0]] == turns[0].prompt


def test_the_packaged_trace_makes_sessions():
    """The agent sessions that come with kvtier can be soaked."""
    from kvtier.tools.traces_read import read_trace

    shape = TrafficOptions(context_tokens=1024, sessions=3, turns=4, seed=2)
    found = trace_sessions(read_trace("agent-sessions", share_prefix=True), shape, opener())
    turns = all_turns(found)
    assert [len(some) for some in turns] == [4, 4, 4]
    longest = [max(len(turn.prompt) for turn in some) for some in turns]
    assert max(longest) > 900
    assert min(longest) > 300


@pytest.mark.parametrize(
    ("speed", "budget_s", "context"), [(1e9, 60, 8192), (150, 120, 1024), (1, 1, 256)]
)
def test_the_context_fits_the_time(speed, budget_s, context):
    """Halved until computing everything once fits, and never below the least."""
    assert fitting_context(8192, speed, budget_s, 6, 4) == context


def test_a_script_asks_once_and_knows_it_afterwards(tmp_path):
    """The second run asks nothing; both have the same turns and answers."""
    asked = []

    class Ask:
        @staticmethod
        def alone(ask):
            asked.append(ask)
            return answer_of(ask.prompt, ask.answer_tokens)

    scripts = [
        build_script(
            synthetic_sessions(SHAPE, opener()),
            TruthStore(tmp_path, {}),
            lambda: Ask,
            60.0,
            lambda: False,
            lambda *_: None,
        )
        for _ in range(2)
    ]
    assert len(asked) == 12
    assert scripts[0].sessions == scripts[1].sessions
    assert len(scripts[0].turns) == 12
    turn = scripts[0].sessions[0][1]
    assert scripts[0].truth[turn.session, 2].tokens == answer_of(turn.prompt, 8).tokens


def test_a_script_ends_with_its_budget(tmp_path):
    """When the time is up no more is asked, but a few turns there are always."""
    now = [0.0]

    class Ask:
        @staticmethod
        def alone(ask):
            now[0] += 10.0
            return answer_of(ask.prompt, ask.answer_tokens)

    script = build_script(
        synthetic_sessions(SHAPE, opener()),
        TruthStore(tmp_path, {}),
        lambda: Ask,
        1.0,
        lambda: False,
        lambda *_: None,
        lambda: now[0],
    )
    assert len(script.turns) == 4
