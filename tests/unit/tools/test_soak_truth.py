from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from kvtier.tools.soak_truth import Difference, Noise, TruthStore, compare, measure_noise
from kvtier.tools.soak_types import Reply

from .soak_fakes import answer_of

RIGHT = Reply((7, 8, 9), (((7, -0.1), (3, -2.0)), ((8, -0.5), (4, -0.51)), ((9, -0.2), (5, -3.0))))


def changed(at, token=None, logprob=None):
    """RIGHT with another token or logprob at a position."""
    tokens, top = list(RIGHT.tokens), [dict(place) for place in RIGHT.top]
    if logprob is not None:
        top[at][tokens[at]] = logprob
    if token is not None:
        tokens[at] = token
    return Reply(tuple(tokens), tuple(tuple(sorted(p.items(), key=lambda x: -x[1])) for p in top))


def test_the_same_answer_and_one_within_the_noise_are_right():
    """Equal tokens with logprobs inside the limit are no difference."""
    assert compare(RIGHT, RIGHT, 0.001) is None
    assert compare(RIGHT, changed(2, logprob=-0.2005), 0.001) is None


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (changed(1, logprob=-0.6), Difference(1, 8, 8, 0.1)),
        (changed(0, token=3), Difference(0, 7, 3, 0.0)),
        (changed(2, token=77), Difference(2, 9, 77, 0.0)),
        (changed(1, logprob=math.nan), Difference(1, 8, 8, math.inf)),
        (Reply(RIGHT.tokens[:2], RIGHT.top[:2]), Difference(2, None, None, 0.0)),
    ],
    ids=["logprob", "token", "unlikely token", "nan", "short"],
)
def test_a_difference_names_its_first_position(reply, expected):
    """Another logprob, another token, NaN and a short answer are found where they begin."""
    found = compare(RIGHT, reply, 0.05)
    assert found is not None
    assert (found.position, found.expected, found.got) == expected_place(expected)
    assert found.logprob_distance == pytest.approx(expected.logprob_distance)


def expected_place(difference):
    return difference.position, difference.expected, difference.got


def test_a_tie_is_no_difference_and_ends_the_comparison():
    """Tokens whose logprobs lie within the noise may swap; what follows is another prompt's."""
    swapped = changed(1, token=4)
    beyond = replace(swapped, tokens=(7, 4, 77))
    assert compare(RIGHT, swapped, 0.05) is None
    assert compare(RIGHT, beyond, 0.05) is None
    assert compare(RIGHT, swapped, 0.001) is not None


def test_answers_are_kept_between_runs(tmp_path):
    """What one store has kept, the next one of the same engine finds; another engine's does not."""
    store = TruthStore(tmp_path, {"model": "a"})
    reply = answer_of((1, 2, 3), 4)
    store.put((1, 2, 3), 4, reply)
    store.note("speed", 12.5)
    again = TruthStore(tmp_path, {"model": "a"})
    assert again.get((1, 2, 3), 4) == reply
    assert again.get((1, 2, 3), 5) is None
    assert again.fact("speed") == 12.5
    assert TruthStore(tmp_path, {"model": "b"}).get((1, 2, 3), 4) is None


def test_a_broken_line_loses_only_itself(tmp_path):
    """A line cut short by a crash is passed over."""
    store = TruthStore(tmp_path, {"model": "a"})
    store.put((1,), 4, answer_of((1,), 4))
    with open(store.path, "a") as file:
        file.write('{"prompt": "abc", "n": 1, "tok\n')
        file.write(json.dumps({"prompt": "abc", "n": 1, "tokens": [1, 2], "top": [[[1, -1]]],
                               "ttft_s": 0, "s": 0}) + "\n")  # fmt: skip
    store.put((2,), 4, answer_of((2,), 4))
    assert len(TruthStore(tmp_path, {"model": "a"})) == 2


def test_noise_is_what_equal_requests_differ_by():
    """Alone and together are told apart; the limit follows the larger, never below the dtype's."""
    calls = iter([0.0, 0.0, 0.25, 0.0])

    def alone(prompt):
        return answer_of(prompt, 3, next(calls))

    noise = measure_noise(alone, lambda some: [answer_of(p, 3, 0.5) for p in some], [(1,), (2,)])
    assert noise.alone == pytest.approx(0.25)
    assert noise.together == pytest.approx(0.5)
    assert noise.repeats == 4
    assert noise.tolerance("float32") == pytest.approx(2.5)
    assert Noise().tolerance("float32") == pytest.approx(1e-3)
