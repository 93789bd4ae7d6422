"""Which saves are dropped when another connector has failed to load in a step."""

from types import SimpleNamespace

from kvtier.connector.spoiled_steps import MAX_STEPS, SpoiledSteps


def saves(*keys):
    return [SimpleNamespace(chunks=[SimpleNamespace(key=key) for key in keys])]


def test_the_saves_of_steps_under_way_are_told_once():
    """Those of steps that are over are right; those planned later are on blocks computed anew."""
    steps = SpoiledSteps()
    steps.planned(saves(b"a"))
    steps.over()
    steps.planned(saves(b"b", b"c"))
    steps.planned([])
    steps.planned(saves(b"d"))
    assert steps.take() == [b"b", b"c", b"d"]
    assert steps.take() == []
    steps.over()
    steps.planned(saves(b"e"))
    for _ in range(2):
        steps.over()
    assert steps.take() == [b"e"]
    for _ in range(3):
        steps.over()
    assert steps.take() == []


def test_an_engine_that_tells_of_no_end_costs_bounded_memory():
    """Without statistics vLLM asks for none; then the last steps are taken for under way."""
    steps = SpoiledSteps()
    for number in range(100):
        steps.planned(saves(bytes([number])))
    assert steps.take() == [bytes([n]) for n in range(100 - MAX_STEPS, 100)]
