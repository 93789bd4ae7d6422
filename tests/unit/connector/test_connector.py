"""The class that vLLM loads: what it does where a half cannot work."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
    from kvtier.connector import connector as subject

from kvtier.connector import engine_api
from kvtier.storage.errors import ConfigError, GeometryError

SCHEDULER, WORKER = base.KVConnectorRole.SCHEDULER, base.KVConnectorRole.WORKER


class FakeHalf:
    def __init__(self):
        self.short_copies = SimpleNamespace(on=False)
        self.pages, self.stopped = {}, 0
        self.staging_pages, self.begins = 3, []

    def lookup(self, request, local_tokens):
        return 64, True

    def pages_ready(self, rank, ready_pages):
        self.pages[rank] = ready_pages

    def pages_begin(self, first_page):
        self.begins.append(first_page)
        return True

    def pending(self):
        return True

    def first_pages(self):
        return 7

    def shutdown(self):
        self.stopped += 1


class Names:
    def __init__(self, *_, **__):
        self.ranks, self.closed = None, 0

    current = changed = None

    def set_ranks(self, facts):
        self.ranks = facts

    def close(self):
        self.closed += 1


@pytest.fixture
def connect(monkeypatch, caplog):
    """Makes one half of a connector on an engine of two ranks, parts replaced."""
    geometry = SimpleNamespace(groups=())
    monkeypatch.setattr(subject, "from_kv_cache_config", lambda *_: geometry)
    monkeypatch.setattr(subject, "NamespaceSource", Names)
    monkeypatch.setattr(engine_api, "check_settings", lambda _: None)
    monkeypatch.setattr(engine_api, "layer_backends", lambda _: {})
    monkeypatch.setattr(subject.assembly, "build_scheduler", lambda *_: FakeHalf())
    monkeypatch.setattr(subject.assembly, "build_worker", lambda *_: FakeHalf())
    ours = logging.getLogger("kvtier")
    monkeypatch.setattr(ours, "handlers", [*ours.handlers, caplog.handler])

    def make(role, rank=0, unit=None):
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"ram": "1GiB"}),
            cache_config=SimpleNamespace(prefix_match_unit=unit),
            parallel_config=SimpleNamespace(
                world_size=2, rank=rank, pipeline_parallel_size=1, tensor_parallel_size=2
            ),
        )
        return subject.KVTierConnector(config, role, SimpleNamespace())

    return make


def raises(error):
    def build(*_):
        raise error

    return build


def is_off(connector):
    connector.on_new_request(None)
    return (
        connector.scheduler_half is None
        and connector.get_num_new_matched_tokens(None, 0) == (0, False)
        and not connector.has_pending_push_work()
        and not connector.build_connector_meta(None).plan.loads
        and connector.reset_cache() is True
        and connector.get_kv_connector_stats().data == {"misses.off": 1}
        and connector.get_kv_connector_stats() is None
    )


def lines(caplog):
    told = [r for r in caplog.records if r.levelno >= logging.WARNING and "kvtier" in r.name]
    return {r.getMessage() for r in told}


def hand_over(scheduler, *workers):
    scheduler.set_xfer_handshake_metadata_pp_aware(
        {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(workers)}
    )


def test_all_ranks_there(connect):
    """Ranks that work are used: the namespace knows their facts, the scheduler their pages."""
    scheduler, workers = connect(SCHEDULER), [connect(WORKER, rank) for rank in (0, 1)]
    half, names = scheduler.scheduler_half, scheduler._names
    for worker in workers:
        worker.register_kv_caches({})
    workers[1].worker_half.staging_pages = 5
    hand_over(scheduler, *workers)
    assert scheduler.scheduler_half is half
    assert sorted(names.ranks) == ["0", "1"]
    assert half.begins == [5], "pages that a rank stages in belong to nobody else"
    assert half.pages == {0: 7, 1: 7}
    scheduler.set_xfer_handshake_metadata({})
    assert half.begins == [5]


@pytest.mark.parametrize("unit", [None, 32])
@pytest.mark.parametrize("short", [False, True])
def test_copies_that_fall_short_are_told_where_there_are_any(
    connect, monkeypatch, caplog, unit, short
):
    """Only hits inside a block are copied; on any rank they may fall short. One line."""
    monkeypatch.setattr(engine_api, "copies_fall_short", lambda views: short and "x" in views)
    scheduler, workers = connect(SCHEDULER), [connect(WORKER, rank, unit) for rank in (0, 1)]
    workers[0].register_kv_caches({})
    workers[1].register_kv_caches({"x": SimpleNamespace(element_size=lambda: 2)})
    hand_over(scheduler, *workers)
    assert scheduler.scheduler_half.short_copies.on == (short and unit is not None)
    assert len(lines(caplog)) == scheduler.scheduler_half.short_copies.on


@pytest.mark.parametrize(
    "error",
    [GeometryError("layer 3 is not at its place"), AttributeError("untyped_storage"), KeyError(3)],
    ids=lambda error: type(error).__name__,
)
def test_a_rank_that_does_not_understand_its_memory_turns_the_engine_off(
    connect, monkeypatch, caplog, error
):
    """Else the scheduler would promise loads that this rank never reports. One line, no raise."""
    scheduler, workers = connect(SCHEDULER), [connect(WORKER, rank) for rank in (0, 1)]
    half, names = scheduler.scheduler_half, scheduler._names
    workers[0].register_kv_caches({})
    monkeypatch.setattr(subject.assembly, "build_worker", raises(error))
    workers[1].register_kv_caches({})
    assert workers[1].worker_half is None
    hand_over(scheduler, *workers)
    assert is_off(scheduler)
    assert half.stopped == names.closed == 1
    (line,) = lines(caplog)
    assert "off in this engine" in line
    assert str(error) in line


def test_a_rank_that_says_nothing_turns_the_engine_off(connect, caplog):
    """Fewer answers than ranks: nothing is promised."""
    scheduler, worker = connect(SCHEDULER), connect(WORKER)
    worker.register_kv_caches({})
    hand_over(scheduler, worker)
    assert is_off(scheduler)
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("error", [ConfigError("too little ram"), MemoryError()])
def test_settings_that_cannot_be_met_stop_the_start(connect, monkeypatch, error):
    """What people can mend is not served around."""
    worker = connect(WORKER)
    monkeypatch.setattr(subject.assembly, "build_worker", raises(error))
    with pytest.raises(type(error)):
        worker.register_kv_caches({})


@pytest.mark.parametrize("lacks", ["results", "tables", "root", "module"])
def test_an_engine_without_what_is_needed_is_named_in_one_line(connect, monkeypatch, caplog, lacks):
    """An older or newer interface: no hits, no exception, and the line says what is not there."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched import output

    if lacks == "results":
        monkeypatch.delattr(base, "KVConnectorTransferResults")
    elif lacks == "tables":
        monkeypatch.delitem(output.SchedulerOutput.__annotations__, "kv_connector_block_state")
    elif lacks == "root":
        monkeypatch.delitem(kv_cache_utils.__annotations__, "NONE_HASH")
        monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)
    else:
        monkeypatch.delattr(output, "SchedulerOutput")
    halves = [connect(SCHEDULER), connect(WORKER)]
    halves[1].register_kv_caches({})
    assert all(is_off(half) and half.worker_half is None for half in halves)
    assert halves[1].get_finished(set()) == (None, None)
    assert halves[1].build_connector_worker_meta() is None
    (line,) = lines(caplog)
    assert {
        "results": "which loads failed",
        "tables": "block tables",
        "root": "root of its prefix hashes",
        "module": "SchedulerOutput",
    }[lacks] in line
