"""`kvtier soak --storage-only`: millions of operations on a tier, by a process that is killed.

Threads of a child put, replace, read, delete and evict records whose every version is known; one
more plays the scheduler half over catalog, RAM pages and transfer (`soak_storage_jobs`). Now and
then the child is killed at a random moment; then the store is opened anew and every key is
compared with what had been acknowledged. Every second life has room for everything, and nothing
acknowledged may be lost; the others evict without end, and the cap must hold.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..storage.disk_layout import iter_record_files
from ..storage.disk_verify import verify_file
from .redis_server import RedisServer
from .soak_chunks import STORE_BYTES
from .soak_judge import KVTIER, finding
from .soak_ledger import HURT, Ledger, key_of
from .soak_listener import Listener
from .soak_options import OWN_SERVER, SoakOptions
from .soak_steady import folder_bytes, judge_cap, judge_series, process_sample
from .soak_storage_child import Work, check, check_jobs
from .soak_types import SoakError
from .soak_watch import Watch

FORMAT, VERSION = "kvtier-soak-storage", 1
N_KEYS, THREADS, RECORD_BYTES = 2000, 8, 4 * 4096
FILE_BYTES = RECORD_BYTES + 4096
LIFE_S = (1.5, 15.0)  # shortest and longest, from the seed
LONG_LIFE_SHARE = 0.4  # of the soak, the first life: long enough to see what grows
TINY_SHARE = 0.3  # of all records, where a life evicts
STOP_S = 60.0
MIN_CAPACITY_BYTES = 4 << 20
SHRINK_S = 10.0  # how long a store may take to come below a cap that is new
FLIPS_EVERY_S = 2.0
LOOK_EVERY_S = 0.5
JOB_WRITERS = 2  # threads that write what jobs save


@dataclass(slots=True)
class Life:
    """One child, from its start to its end."""

    number: int
    roomy: bool
    began_s: float
    killed: bool = True
    ended_s: float = 0.0
    operations: int = 0
    flipped: int = 0
    check: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the fields of the report."""
        return {
            "life": self.number,
            "roomy": self.roomy,
            "at_s": round(self.began_s, 2),
            "until_s": round(self.ended_s, 2),
            "killed": self.killed,
            "operations": self.operations,
            "flipped": self.flipped,
            "there": self.check.get("there", 0),
            "missing": self.check.get("missing", 0),
            "damaged": self.check.get("damaged", 0),
            "chunks": self.check.get("chunks", 0),
            "wrong": len(self.check.get("wrong", ())),
        }


class StorageSoak:
    """One soak of the disk tier, or of Redis with ``--redis``.

    Args:
        options: what to run; faults: disk-corrupt alone.
        listener: told of progress.
        stopped: set to end early, with a report.
        operations: end after so many; None goes by the time.
    """

    def __init__(
        self,
        options: SoakOptions,
        listener: Listener,
        stopped: threading.Event,
        operations: int | None = None,
        n_keys: int = N_KEYS,
    ) -> None:
        self._options = options
        self._listener = listener
        self._stopped = stopped
        self._most_operations = operations
        self._began_s = time.monotonic()
        self._rng = random.Random(f"{options.seed}/lives")  # noqa: S311
        self._folder = options.report / "store"
        self._lives: list[Life] = []
        self._wrong: list[str] = []
        self._samples: list[dict[str, float]] = []
        self._caps: list[dict[str, Any]] = []
        self._flip = "disk-corrupt" in options.faults
        self._work = Work(
            folder=str(self._folder),
            ledger=str(options.report / "ledger"),
            capacity_bytes=0,
            redis=None,
            n_keys=n_keys,
            threads=THREADS,
            record_bytes=RECORD_BYTES,
            seed=options.seed,
            life=0,
        )

    def clock(self) -> float:
        """Seconds from the start."""
        return time.monotonic() - self._began_s

    def run(self) -> dict[str, Any]:
        """Run it; return the report. Blocking."""
        began_unix_s = time.time()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._work.ledger)
        ledger = Ledger(Path(self._work.ledger), self._work.n_keys)
        with self._redis():
            self._listener.phase("storage")
            while not self._over(ledger) and not self._wrong:
                self._one_life(ledger)
        found = self._report(ledger, began_unix_s)
        if found["ok"]:
            shutil.rmtree(self._folder, ignore_errors=True)
        os.unlink(self._work.ledger)
        return found

    @contextlib.contextmanager
    def _redis(self) -> Iterator[None]:
        if self._options.redis is None:
            yield
        elif self._options.redis != OWN_SERVER:
            self._work = replace(self._work, redis=self._options.redis)
            yield
        else:
            most = 2 * (self._work.n_keys * FILE_BYTES + STORE_BYTES)
            with RedisServer("--maxmemory", str(most), "--maxmemory-policy", "noeviction") as own:
                self._work = replace(self._work, redis=own.url)
                yield

    def _over(self, ledger: Ledger) -> bool:
        if self._stopped.is_set():
            return True
        if self._most_operations is not None:
            return sum(ledger.operations().values()) >= self._most_operations
        return self.clock() >= self._options.duration_s

    # -- one life ----------------------------------------------------------

    def _one_life(self, ledger: Ledger) -> None:
        number = len(self._lives) + 1
        roomy = number % 2 == 1 or self._work.redis is not None
        share = 2.0 if roomy else TINY_SHARE
        all_bytes = self._work.n_keys * FILE_BYTES + STORE_BYTES
        work = replace(
            self._work,
            capacity_bytes=max(MIN_CAPACITY_BYTES, int(share * all_bytes)),
            life=number,
            lossless=roomy,
        )
        life = Life(number, roomy, self.clock())
        self._lives.append(life)
        ledger.new_life()
        before = sum(ledger.operations().values())
        child = self._start(work)
        watch = Watch(lambda: self._look(child.pid, number, ledger), self.clock, LOOK_EVERY_S)
        watch.start()
        try:
            self._wait(ledger, work, life, child)
        finally:
            watch.stop()
            self._end(ledger, life, child)
        self._samples += watch.samples
        if watch.failure is not None:
            raise watch.failure
        life.ended_s = self.clock()
        life.operations = sum(ledger.operations().values()) - before
        if work.redis is None:
            # A walk over the folder sees a record that goes and the one that takes its room: when
            # it began there was at least what it found without what was written meanwhile.
            sure = [{**s, "disk_bytes": s["disk_bytes"] - s["moving_bytes"]} for s in watch.samples]
            samples = _once_below(sure, work.capacity_bytes)
            moving = (work.threads + JOB_WRITERS) * work.record_bytes
            cap = judge_cap("disk_bytes", samples, work.capacity_bytes, moving=moving)
            self._caps.append({**cap, "name": f"disk_bytes of life {number}"})
        life.check = check(work, ledger, lossless=roomy)
        chunks = check_jobs(work)
        life.check["chunks"] = chunks["there"]
        life.check["wrong"] += chunks["wrong"]
        self._wrong += life.check["wrong"] + self._leftovers(ledger)

    def _start(self, work: Work) -> subprocess.Popen[str]:
        child = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-m", "kvtier.tools.soak_storage_child", json.dumps(asdict(work))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the soak's to handle
        )
        assert child.stdout is not None
        if not child.stdout.readline():
            raise SoakError("the storage process did not start")
        return child

    def _wait(self, ledger: Ledger, work: Work, life: Life, child: subprocess.Popen[str]) -> None:
        """Let it work for a random time; flip bits meanwhile, if that is asked for."""
        end_s, end_operations = self._life_span(ledger, life)
        flip_s = self.clock() + FLIPS_EVERY_S
        while self.clock() < end_s and child.poll() is None and not self._over(ledger):
            done = sum(ledger.operations().values())
            if done >= end_operations:
                break
            text = f"{done:,} operations, {len(self._lives)} lives"
            self._listener.progress(self.clock(), self._options.duration_s, text)
            if self._flip and work.redis is None and self.clock() >= flip_s:
                flip_s = self.clock() + FLIPS_EVERY_S
                life.flipped += self._flip_one(ledger)
            self._stopped.wait(0.05)

    def _life_span(self, ledger: Ledger, life: Life) -> tuple[float, float]:
        """Return when it ends: seconds of the clock, operations in all; whichever is first."""
        if self._most_operations is not None:
            part = self._most_operations * self._rng.uniform(0.2, 0.4)
            return math.inf, sum(ledger.operations().values()) + part
        life_s = self._rng.uniform(*LIFE_S)
        if life.number == 1:
            life_s = max(life_s, LONG_LIFE_SHARE * self._options.duration_s)
        return min(self.clock() + life_s, self._options.duration_s), math.inf

    def _flip_one(self, ledger: Ledger) -> int:
        """Flip a bit of one record's file, the ledger told before."""
        number = self._rng.randrange(self._work.n_keys)
        name = key_of(number, self._work.seed)
        for file in iter_record_files(str(self._folder)):
            if file.key == name:
                ledger.keys[number][HURT] += 1
                with contextlib.suppress(OSError), open(file.path, "r+b") as opened:
                    # Again, before the bit: it may have been written anew, and cleared, until
                    # this very file was opened; whoever reads it now must know.
                    ledger.keys[number][HURT] += 1
                    opened.seek(self._rng.randrange(file.file_bytes))
                    old = opened.read(1) or b"\0"
                    opened.seek(-1, os.SEEK_CUR)
                    opened.write(bytes((old[0] ^ 1 << self._rng.randrange(8),)))
                # And after it: the clearing looks and writes, and may have looked before.
                ledger.keys[number][HURT] += 1
                return 1
        return 0

    def _end(self, ledger: Ledger, life: Life, child: subprocess.Popen[str]) -> None:
        """Kill it; the last life may close its tier by itself. Take in what it says."""
        last = self._over(ledger)
        assert child.stdin is not None
        assert child.stdout is not None
        if child.poll() is None and not last:
            child.kill()
        with contextlib.suppress(OSError):
            child.stdin.close()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._wrong.append(f"the process did not end within {STOP_S:.0f} s")
            child.kill()
            child.wait()
        life.killed = child.returncode != 0
        for line in child.stdout:
            with contextlib.suppress(ValueError):
                self._wrong += json.loads(line).get("failures", ())
        child.stdout.close()

    def _look(self, pid: int, number: int, ledger: Ledger) -> dict[str, float] | None:
        found = process_sample(pid)
        if not found:
            return None
        before = _written_bytes(ledger)
        disk_bytes = folder_bytes(str(self._folder))
        return {
            "incarnation": number,
            **found,
            "disk_bytes": disk_bytes,
            "moving_bytes": _written_bytes(ledger) - before,
            "operations": sum(ledger.operations().values()),
        }

    def _leftovers(self, ledger: Ledger) -> list[str]:
        """Verify every file that is left; temporary files may not be."""
        if self._work.redis is not None:
            return []
        numbers = {key_of(i, self._work.seed): i for i in range(self._work.n_keys)}
        out = []
        for file in iter_record_files(str(self._folder)):
            found = verify_file(file.path, file)
            hurt = file.key in numbers and ledger.keys[numbers[file.key]][HURT]
            if not found.ok and not hurt:
                out.append(f"{os.path.basename(file.path)}: {found.detail}")
        for root, _, names in os.walk(self._folder):
            out += [f"{name} is left in {root}" for name in names if name.endswith(".tmp")]
        return out

    # -- report ------------------------------------------------------------

    def _report(self, ledger: Ledger, began_unix_s: float) -> dict[str, Any]:
        growth = judge_series(self._samples)
        findings = [finding(KVTIER, "wrong", text) for text in self._wrong[:100]]
        findings += [
            finding(
                KVTIER, "grows", f"{row['name']} grows: {row['first']:.0f} to {row['last']:.0f}"
            )
            for row in growth
            if row["verdict"] == "grows"
        ]
        findings += [
            finding(KVTIER, "over_cap", f"{row['name']}: {row['most']:.0f} of {row['cap']:.0f}")
            for row in self._caps
            if row["verdict"] == "over_cap"
        ]
        operations = ledger.operations()
        interrupted = self._stopped.is_set()
        return {
            "format": FORMAT,
            "version": VERSION,
            "ok": not findings,
            "verdict": "nothing was wrong" if not findings else f"kvtier: {len(findings)} findings",
            "interrupted": interrupted,
            "began_unix_s": round(began_unix_s, 1),
            "duration_s": round(self.clock(), 1),
            "setup": {
                "tier": "redis" if self._work.redis else "disk",
                "minutes": self._options.minutes,
                "seed": self._options.seed,
                "faults": list(self._options.faults),
                "keys": self._work.n_keys,
                "threads": self._work.threads,
                "record_bytes": self._work.record_bytes,
            },
            "findings": findings,
            "operations": {"all": sum(operations.values()), **operations},
            "lives": [life.row() for life in self._lives],
            "steadiness": {"growth": growth, "caps": self._caps},
            "samples": self._samples,
        }


def _written_bytes(ledger: Ledger) -> int:
    """Return at most how many bytes of records were written so far."""
    done = ledger.operations()
    return FILE_BYTES * (done["put"] + done["replace"] + done["save"])


def _once_below(samples: Sequence[dict[str, float]], cap: float) -> Sequence[dict[str, float]]:
    """Return the samples from the first below the cap on: the life before had a larger one."""
    begun_s = samples[0]["at_s"] if samples else 0.0
    for i, sample in enumerate(samples):
        if sample["disk_bytes"] <= cap or sample["at_s"] > begun_s + SHRINK_S:
            return samples[i:]
    return ()
