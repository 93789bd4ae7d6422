"""How people name a prompt on the command line: its token ids, or a recorded request's id."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .exit_codes import ExitCode
from .reporting import CommandError

if TYPE_CHECKING:
    from .explain import Chain, Prompt
    from .store_base import Record, Space, Store

RequestId = Annotated[
    Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
    typer.Option(metavar="ID", help="Instead of TOKENS: a request's id, as in vLLM's log."),
]
Tokens = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(metavar="TOKENS", help="File of token ids; - for standard input."),
]
CacheSalt = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="The request's cache_salt."),
]
Tenant = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="The request's tenant in kv_transfer_params."),
]
Everything = Annotated[
    bool, typer.Option("--all", help="Instead of a prompt: the whole --namespace.")
]
UpTo = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(metavar="N", help="Only the prompt's first N tokens.", min=1),
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
        try:
            return Prompt((), recorded=find_request(recording, request))
        except OSError as error:
            raise CommandError(f"{recording}: {error.strerror}", ExitCode.USAGE) from None
    if recording is not None:
        raise CommandError("--recording goes with --request", ExitCode.USAGE)
    if tokens == "-":
        text = sys.stdin.read(MAX_PROMPT_BYTES)
    else:
        try:
            with open(tokens, encoding="utf-8", errors="replace") as file:
                text = file.read(MAX_PROMPT_BYTES)
        except OSError as error:
            raise CommandError(f"{tokens}: {error.strerror}", ExitCode.USAGE) from None
    return Prompt(read_prompt(tokens, text), cache_salt, None, tenant)


@dataclass(frozen=True, slots=True)
class Choice:
    """Records of one namespace that a person has named.

    Attributes:
        space: the namespace.
        records: of all ranks, a prefix from its beginning.
        ends: token count at which each of them ends; 0 where that is not known.
        hit_tokens: how much of a prompt they restore; 0 for a whole namespace.
    """

    space: Space
    records: list[Record]
    ends: list[int]
    hit_tokens: int

    @property
    def stored_bytes(self) -> int:
        """What all of them take."""
        return sum(record.stored_bytes for record in self.records)


def choose(
    store: Store, asked: Prompt | None, namespace: str | None, up_to: int | None = None
) -> Choice:
    """Return the records that restore a prompt, or all of a namespace. Blocking; reads no payload.

    Of several namespaces that hold the prompt, the one that holds most of it counts.

    Args:
        store: the store.
        asked: the prompt; None for a whole namespace.
        namespace: only this one.
        up_to: only the prompt's first tokens.

    Raises:
        CommandError: nothing of it is stored.
    """
    chosen = store.pick(namespace)
    if asked is None:
        if chosen is None:
            raise CommandError("--all needs --namespace", ExitCode.USAGE)
        (space,) = (space for space in store.spaces() if space.namespace == chosen)
        found = {record.order: record for record in store.records(chosen)}
        records = [found[order] for order in sorted(found)]
        if not records:
            raise CommandError(f"namespace {space.name} has no record")
        return Choice(space, records, [0] * len(records), 0)
    best = _best_chain(store, asked, chosen, up_to)
    if best is None:
        raise CommandError("nothing of this prompt is stored; `kvtier explain` tells more")
    hit, chain = best
    found_at = sorted((end, group, rank) for end, group, rank in chain.found if end <= hit)
    records = [chain.found[place] for place in found_at]
    return Choice(chain.space, records, [end for end, _, _ in found_at], hit)


def _best_chain(
    store: Store, asked: Prompt, chosen: bytes | None, up_to: int | None
) -> tuple[int, Chain] | None:
    from ..storage.errors import KVTierError
    from .explain import chain_of, hit_tokens, look_up

    best: tuple[int, Chain] | None = None
    problem: KVTierError | None = None
    for space in store.described():
        if chosen not in {None, space.namespace}:
            continue
        try:
            chain = chain_of(space, asked)
        except KVTierError as error:
            problem = error
            continue
        look_up(store, chain)
        for end in [end for end in chain.at if up_to is not None and end > up_to]:
            del chain.at[end]
        hit = hit_tokens(chain)
        if hit and (best is None or hit > best[0]):
            best = (hit, chain)
    if best is None and problem is not None:
        raise CommandError(str(problem))
    return best
