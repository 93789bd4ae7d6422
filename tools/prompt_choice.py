"""How people name a prompt on the command line: its token ids, or a recorded request's id."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .exit_codes import ExitCode
from .reporting import CommandError

if TYPE_CHECKING:
    from .explain import Prompt

RequestId = Annotated[
    Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
    typer.Option(metavar="ID", help="Instead of TOKENS: a request's id, as in vLLM's log."),
]
Recording = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="PATH", help="Where that request was recorded: the setting `record`."),
]


def read_asked(
    tokens: str | None,
    request: str | None,
    recording: str | None,
    cache_salt: str | None = None,
    tenant: str | None = None,
) -> Prompt:
    """Return the prompt that was named. Blocking.

    Args:
        tokens: file of token ids, or ``-``.
        request: a request's id.
        recording: file or folder that has it.
        cache_salt: what else goes into the hashes of token ids.
        tenant: likewise.

    Raises:
        CommandError: none was named, or several, or it is not there.
        OSError.
    """
    from .explain import MAX_PROMPT_BYTES, Prompt, read_prompt

    if (tokens is None) == (request is None):
        raise CommandError("give token ids, or --request with --recording", ExitCode.USAGE)
    if tokens is None:
        from .recorded import find_request

        if recording is None or cache_salt is not None or tenant is not None:
            raise CommandError(
                "--request needs --recording, and no salt: it is in the recorded hashes",
                ExitCode.USAGE,
            )
        assert request is not None
        return Prompt((), recorded=find_request(recording, request))
    if recording is not None:
        raise CommandError("--recording goes with --request", ExitCode.USAGE)
    if tokens == "-":
        text = sys.stdin.read(MAX_PROMPT_BYTES)
    else:
        with open(tokens, encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_PROMPT_BYTES)
    return Prompt(read_prompt(tokens, text), cache_salt, None, tenant)
