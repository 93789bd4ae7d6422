"""The long form, with atheris: ``python -m tests.property.fuzz [SECONDS [TARGET...]]``.

Each target runs in a process of its own for so many seconds (60), guided by coverage, within
bounds of memory and of time for each input. Exits 1 when one of them failed; the input is then
in the file that libFuzzer names, and ``python -m tests.property.fuzz 0 TARGET < FILE`` runs it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ONE_INPUT_S = 20
LONGEST_BYTES = 16_384


def child(name, seconds):
    """Fuzz one target in this process; does not return."""
    import atheris

    with atheris.instrument_imports(include=["kvtier"]):
        from tests.property.fuzz.targets import MAX_BYTES, TARGETS

    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            Path(corpus, str(number)).write_bytes(seed)
        limits = [
            f"-max_total_time={seconds}",
            f"-max_len={LONGEST_BYTES}",
            f"-timeout={ONE_INPUT_S}",
            f"-malloc_limit_mb={MAX_BYTES >> 20}",
            "-rss_limit_mb=1024",
            "-print_final_stats=1",
            "-verbosity=0",
        ]
        atheris.Setup([sys.argv[0], *limits, corpus], target)
        atheris.Fuzz()


def main(seconds="60", *names):
    """Fuzz every target named, or all, one after another; return the exit code."""
    from tests.property.fuzz.targets import TARGETS

    if seconds == "0":
        for name in names:
            TARGETS[name](sys.stdin.buffer.read())
        return 0
    failed = []
    for name in names or TARGETS:
        args = [sys.executable, "-m", "tests.property.fuzz", "--child", name, seconds]
        done = subprocess.run(args, check=False, capture_output=True, text=True)
        runs = [line for line in done.stderr.splitlines() if "number_of_executed_units" in line]
        print(name, *(line.split()[-1] for line in runs), "inputs", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stderr[-4000:], flush=True)
    print("failed:", *failed) if failed else print("none failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3])
    else:
        sys.exit(main(*sys.argv[1:]))
