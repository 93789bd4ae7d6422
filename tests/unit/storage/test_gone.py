"""What a catalog remembers of what it no longer has."""

from __future__ import annotations

from kvtier.storage.gone import Gone, Why


def test_the_newest_are_remembered():
    """So many and no more; one that is noted again counts as new."""
    gone = Gone(2)
    gone.note(b"a", Why.EVICTED)
    gone.note(b"b", Why.DROPPED)
    gone.note(b"a", Why.DROPPED)
    gone.note(b"c", Why.EVICTED)
    assert [gone.why(key) for key in (b"a", b"b", b"c")] == [Why.DROPPED, None, Why.EVICTED]


def test_what_is_back_is_not_gone():
    """A chunk that is stored again, or that was cleared, is forgotten."""
    gone = Gone()
    gone.note(b"a", Why.EVICTED)
    gone.note(b"b", Why.EVICTED)
    gone.forget(b"a")
    gone.forget(b"never there")
    assert (gone.why(b"a"), gone.why(b"b")) == (None, Why.EVICTED)
    gone.clear()
    assert gone.why(b"b") is None
