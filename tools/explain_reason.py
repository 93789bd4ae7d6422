"""Why a prompt's chain of chunks ends where it does, as far as a store shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..storage.key import key_name

if TYPE_CHECKING:
    from .explain import Chain, Prompt
    from .store_base import Store

RECURRENT = "recurrent"


def reason_of(
    store: Store, chain: Chain, prompt: Prompt, hit: int, bad: list[tuple[int, str | None]]
) -> tuple[str, str]:
    """Return the best reason that the store shows for a hit that ends at ``hit``."""
    usable = max(0, prompt.n_tokens - 1) // chain.block_tokens * chain.block_tokens
    if not chain.hashes:
        return "prompt_short", f"no whole block of {chain.block_tokens} tokens"
    if bad:
        end, wrong = bad[0]
        if wrong is None:
            return "evicted", f"what ended at token {end} was there: evicted or deleted just now"
        return "damaged", f"{wrong}; `kvtier verify --fix` takes it out of use"
    if hit >= usable:
        return "none", "everything that can be restored is there"
    following = min(hit // chain.chunk_tokens * chain.chunk_tokens + chain.chunk_tokens, usable)
    return _missing(store, chain, hit, following)


def _missing(  # noqa: PLR0911 - a return for each reason
    store: Store, chain: Chain, hit: int, following: int
) -> tuple[str, str]:
    """Return why there is nothing whole that ends at ``following``."""
    for group in chain.groups:
        ranks = chain.at.get(following, {}).get(group.number, set())
        if 0 < len(ranks) < chain.ranks:
            missing = sorted(set(range(chain.ranks)) - ranks)
            return "rank_missing", f"at token {following} ranks {missing} have no record"
    quarantined = _in_quarantine(store, chain, following)
    if quarantined:
        return "quarantined", f"{quarantined} was damaged and taken out of use"
    if _went(store, chain, following):
        return "evicted", f"what ended at token {following} was there: evicted or deleted since"
    full = [g for g in chain.groups if not g.window_tokens and g.kind != RECURRENT]
    if any(g.kind == RECURRENT for g in chain.groups) and any(
        chain.whole(following, g.number) for g in full
    ):
        return "state_missing", f"no recurrent state is kept at token {following}"
    if any(end > following for end in chain.at):
        last = max(chain.at)
        return "gap", (
            f"nothing at token {following}, but records up to token {last}: evicted, "
            "dropped when the queue was full, or could not be written"
        )
    if not chain.found:
        return "never_stored", "no record of this prompt: never stored, evicted, or another salt"
    return "not_stored", f"nothing after token {hit}: never stored, dropped or evicted"


def _went(store: Store, chain: Chain, end: int) -> bool:
    """Whether the store remembers a record that ended there and is there no more."""
    return any(
        store.went(chain.space.namespace, rank, chain.key(end, group.number))
        for group in chain.groups
        for rank in range(chain.ranks)
        if rank not in chain.at.get(end, {}).get(group.number, ())
    )


def _in_quarantine(store: Store, chain: Chain, end: int) -> str | None:
    names: list[str] = getattr(store, "quarantined_names", list)()
    for group in chain.groups:
        name = key_name(chain.key(end, group.number))
        if any(name in file and chain.space.name in file for file in names):
            return name
    return None
