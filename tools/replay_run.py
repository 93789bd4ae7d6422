"""Runs of one trace at several sizes and policies, on several cores. Blocking."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from ..storage.errors import KVTierError
from .replay import Replay
from .replay_bounds import bound, device_hits
from .replay_chunks import ChunkedTrace
from .replay_results import Result, Setup
from .replay_tiers import Policy, Sizes
from .traces_read import read_trace


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker needs to make the same trace.

    Attributes:
        source: file, or the packaged trace's name.
        n_users: agent sessions at a time.
        share_prefix: see `read_trace`.
        merge: see `ChunkedTrace`.
        setup: model and speeds.
    """

    source: str
    setup: Setup
    n_users: int = 16
    share_prefix: bool = False
    merge: int = 4


@dataclass(frozen=True, slots=True)
class Run:
    """One policy at one size; a bound at all sizes, which it gets in one walk."""

    policy: Policy
    sizes: tuple[Sizes, ...]


class ReplayError(KVTierError):
    """The replay cannot go on."""


class Runner:
    """Holds one trace and replays it.

    Args:
        job: the trace and the model.
    """

    def __init__(self, job: Job) -> None:
        trace = read_trace(job.source, n_users=job.n_users, share_prefix=job.share_prefix)
        self.job = job
        self.chunked = ChunkedTrace(trace, job.setup.shape, job.merge)
        self._local = device_hits(trace, job.setup)

    def run(self, run: Run) -> list[Result]:
        """Return one result for each size."""
        if run.policy.bound:
            return bound(self.chunked, self.job.setup, run.sizes, run.policy)
        results = []
        for sizes in run.sizes:
            # Millions of small objects that all stay: walking them for cycles finds none.
            gc.collect()
            gc.disable()
            try:
                one = Replay(self.chunked, self.job.setup, sizes, run.policy, self._local)
                results.append(one.run())
            finally:
                gc.enable()
        return results


_runner: Runner | Exception | None = None


def _open(job: Job) -> None:
    global _runner  # noqa: PLW0603 (one a worker process; made once, used by each run)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    try:
        _runner = Runner(job)
    except Exception as error:  # noqa: BLE001 - told by each run; else nobody would hear of it
        _runner = error


def _work(run: Run) -> list[Result]:
    assert _runner is not None
    if isinstance(_runner, Exception):
        raise _runner
    return _runner.run(run)


def run_all(
    job: Job,
    sizes: Sequence[Sizes],
    policies: Sequence[Policy],
    n_jobs: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Replay every policy at every size.

    Args:
        job: trace and model.
        sizes: what to try.
        policies: what to try at each.
        n_jobs: processes; 1 stays in this one.
        progress: hears how many results of how many are there.

    Raises:
        TraceError, OSError: of the trace.
        ReplayError: a process was ended.

    Returns:
        Results by policy, then by size, both in the order given.
    """
    runs = [Run(policy, tuple(sizes)) for policy in policies if policy.bound]
    runs += [Run(policy, (one,)) for one in sizes for policy in policies if not policy.bound]
    results: list[Result] = []
    for some in _results(job, runs, min(n_jobs, len(runs))):
        results += some
        if progress is not None:
            progress(len(results), len(sizes) * len(policies))
    names = [policy.name for policy in policies]
    places = [(one.ram_bytes, one.disk_bytes) for one in sizes]
    results.sort(key=lambda r: (names.index(r.policy), places.index((r.ram_bytes, r.disk_bytes))))
    return results


def _results(job: Job, runs: Sequence[Run], n_jobs: int) -> Iterator[list[Result]]:
    if n_jobs <= 1:
        runner = Runner(job)
        yield from map(runner.run, runs)
        return
    context = multiprocessing.get_context("spawn")  # no threads or locks of ours come along
    pool = ProcessPoolExecutor(n_jobs, context, _open, (job,))
    try:
        for done in as_completed([pool.submit(_work, run) for run in runs]):
            yield done.result()
    except BrokenProcessPool:
        raise ReplayError(
            "a process of the replay was ended, perhaps for its memory; --jobs 1 needs less"
        ) from None
    except BaseException:
        for process in list((pool._processes or {}).values()):  # noqa: SLF001 (3.14 has a way)
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
