"""How every `kvtier` command ends, for scripts."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes; each help text carries `EXIT_CODES_HELP`."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    FINDINGS = 3
    UNREACHABLE = 4
    WRONG_FORMAT = 5
    LOCKED = 6
    INTERRUPTED = 130


MEANING = {
    ExitCode.OK: "fine",
    ExitCode.FAILURE: "failure",
    ExitCode.USAGE: "wrong use",
    ExitCode.FINDINGS: "findings (damage, a wrong setting)",
    ExitCode.UNREACHABLE: "store cannot be reached",
    ExitCode.WRONG_FORMAT: "no kvtier store, or a format this build does not read",
    ExitCode.LOCKED: "store is locked by another process",
    ExitCode.INTERRUPTED: "interrupted",
}

EXIT_CODES_HELP = "Exit codes: " + ", ".join(f"{c.value} {m}" for c, m in MEANING.items()) + "."
