"""Why a prompt hits as far as it does: its chain of chunks, looked up in a store.

Only what a store shows can be told: what came and went lately, too, where it keeps a journal. That
a save was dropped, or that the gate said no, is in an engine's metrics (`kvtier top`), not here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..storage.errors import KVTierError, RecordMissing
from ..storage.key import chunk_key, key_name
from .exit_codes import ExitCode
from .explain_reason import RECURRENT, reason_of
from .reporting import CommandError
from .store_words import differences, part

if TYPE_CHECKING:
    from .recorded import Recorded
    from .store_base import Record, Space, Store

MAX_PROMPT_BYTES = 256 << 20
TOKEN_FIELDS = ("prompt_token_ids", "prompt", "tokens")  # "tokens" is of vLLM's /tokenize
MAX_RANKS = 4096  # more is no engine's description


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked about: token ids and what else is hashed; or a recorded request."""

    token_ids: Sequence[int]
    cache_salt: str | None = None
    lora: tuple[str, str] | None = None
    tenant: str | None = None
    recorded: Recorded | None = None

    @property
    def n_tokens(self) -> int:
        """Its length."""
        return len(self.token_ids) if self.recorded is None else self.recorded.prompt_tokens


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group as the namespace describes it."""

    number: int
    kind: str
    window_tokens: int | None

    def first_token(self, hit_tokens: int) -> int:
        """Return where what a hit needs of this group begins."""
        if self.window_tokens:
            return max(0, hit_tokens - self.window_tokens + 1)
        return 0


@dataclass(slots=True)
class Chain:
    """A prompt's chunks in one namespace.

    Attributes:
        ends: token counts at which records may end: whole chunks, then finer.
        root_hash: what the first block has for a parent.
        hashes: prefix hash at the end of each whole block; ``hash_from`` says who made them.
        at: token count to group to the ranks that have an intact-looking record.
    """

    space: Space
    chunk_tokens: int
    block_tokens: int
    ranks: int
    groups: list[Group]
    root_hash: bytes
    hashes: list[bytes] = field(default_factory=list)
    hash_from: str = ""
    at: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    found: dict[tuple[int, int, int], Record] = field(default_factory=dict)

    def key(self, end_tokens: int, group: int) -> bytes:
        """Return the key of a record that ends there."""
        return chunk_key(self.hashes[end_tokens // self.block_tokens - 1], group)

    def whole(self, end_tokens: int, group: int) -> bool:
        """Whether every rank has the record."""
        return len(self.at.get(end_tokens, {}).get(group, ())) >= self.ranks


def read_prompt(source: str, text: str) -> list[int]:
    """Return the token ids in a JSON list, a field of a JSON object, or plain numbers.

    The fields are those of vLLM's requests and of what its ``/tokenize`` answers.

    Raises:
        CommandError: none of these.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        words = re.findall(r"\d+", text) if _plain(text) else []
        value = [int(word) for word in words] if max(map(len, words), default=99) < 20 else None
    if isinstance(value, dict):
        value = next((value[name] for name in TOKEN_FIELDS if name in value), None)
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise CommandError(
            f"{source}: no token ids; give a JSON list of numbers, what vLLM's /tokenize answers, "
            "or numbers between spaces",
            ExitCode.USAGE,
        )
    return value


def _plain(text: str) -> bool:
    return re.fullmatch(r"[\s\d,]+", text) is not None


def chain_of(space: Space, prompt: Prompt) -> Chain:
    """Compute a prompt's hashes as the engines of one namespace do.

    Raises:
        KVTierError: the namespace does not say how, or hashes in a way that is not known here.
    """
    from ..connector.prefix_hash import block_hashes, hash_function
    from ..connector.request_options import PARAMS_KEY, SaltedHashes, read_options

    said = space.description or {}
    chain = _empty_chain(space, said)
    block, root = chain.block_tokens, chain.root_hash
    if said.get("hash_lookahead_tokens"):
        raise KVTierError(f"{space.name}: its hashes cover tokens to come; not known here")
    if prompt.recorded is not None:
        chain.hashes = _recorded_hashes(space, said, block, root.hex(), prompt.recorded)
        chain.hash_from = "recorded"
    else:
        hash_of, chain.hash_from = hash_function(str(said.get("hash_algorithm")))
        chain.hashes = block_hashes(
            hash_of,
            root,
            prompt.token_ids,
            block,
            cache_salt=prompt.cache_salt,
            lora=prompt.lora,
        )
        if prompt.tenant is not None:
            options = read_options({PARAMS_KEY: {"tenant": prompt.tenant}}, None)
            chain.hashes = list(SaltedHashes(chain.hashes, options.salt))
    return chain


def _empty_chain(space: Space, said: Mapping[str, Any]) -> Chain:
    """Return a chain without hashes, cut as a namespace describes it.

    Raises:
        KVTierError: it describes nothing that an engine writes.
    """
    cache, parallel = part(said, "cache"), part(said, "parallel")
    try:
        block = _number(cache["hash_block_tokens"], 1)
        chunk = _number(cache["chunk_tokens"], block)
        root = bytes.fromhex(said["root_hash"])
        tensor = _number(parallel.get("tensor_parallel_size", 1), 1, MAX_RANKS)
        pipeline = _number(parallel.get("pipeline_parallel_size", 1), 1, MAX_RANKS // tensor)
        replicas = _number(parallel.get("kv_replicas", 1), 1, tensor)
        groups = [
            Group(
                _number(g["group"], 0, 255),
                str(g.get("kind")),
                None if g.get("window_tokens") is None else _number(g["window_tokens"], 0),
            )
            for g in said.get("groups", ())
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        why = space.problem or "does not say how prompts are hashed"
        raise KVTierError(f"{space.name}: {why}") from None
    # Of ranks that hold the same, the first writes.
    ranks = tensor * pipeline // replicas
    return Chain(space, chunk, block, ranks, groups or [Group(0, "full", None)], root)


def _number(value: object, least: int, most: int = MAX_PROMPT_BYTES) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(value)
    return value


def _recorded_hashes(
    space: Space, said: dict[str, Any], block_tokens: int, root: str, recorded: Recorded
) -> list[bytes]:
    """Return a recorded request's hashes, if engines of this namespace hash in the same way.

    Raises:
        KVTierError: they do not.
    """
    theirs = (recorded.hash_algorithm, recorded.root_hash, recorded.block_tokens)
    if theirs != (said.get("hash_algorithm"), root, block_tokens):
        raise KVTierError(
            f"{space.name}: prompts are hashed in another way than in the recording; "
            "give the request's token ids"
        )
    return recorded.hashes


def look_up(store: Store, chain: Chain) -> None:
    """Ask the store for every record that the prompt could use. Blocking; reads no payload."""
    places = {}
    for number in range(1, len(chain.hashes) + 1):
        end = number * chain.block_tokens
        for group in chain.groups:
            for rank in range(chain.ranks):
                key = chain.key(end, group.number)
                places[chain.space.namespace, rank, key] = (end, group.number, rank)
    for record in store.sample(list(places)):
        end, group_number, rank = places[record.namespace, record.rank, record.key]
        chain.at.setdefault(end, {}).setdefault(group_number, set()).add(rank)
        chain.found[end, group_number, rank] = record


def hit_tokens(chain: Chain) -> int:
    """Return how many tokens the store's records would restore, all groups together.

    The engine keeps at least one token to compute; that is left to it.
    """
    for end in sorted(chain.at, reverse=True):
        if all(_serves(chain, group, end) for group in chain.groups):
            return end
    return 0


def _serves(chain: Chain, group: Group, end: int) -> bool:
    if group.kind == RECURRENT:
        return chain.whole(end, group.number)
    first = group.first_token(end)
    boundary = end // chain.chunk_tokens * chain.chunk_tokens
    if boundary < end and not chain.whole(end, group.number):
        return False
    chunks = range(chain.chunk_tokens, boundary + 1, chain.chunk_tokens)
    return all(chain.whole(at, group.number) for at in chunks if at > first)


def explain(
    store: Store, prompt: Prompt, namespace: bytes | None, *, check: bool = True
) -> list[dict[str, Any]]:
    """Return, for each namespace, how far the prompt hits and why not further.

    Args:
        store: the store.
        prompt: what is asked about.
        namespace: only this one, or None for all.
        check: read the payloads that a hit would use, and check them.
    """
    chains, out = [], []
    broken = {description.namespace for description in store.broken_descriptions()}
    for space in store.described():
        if namespace not in {None, space.namespace}:
            continue
        try:
            chain = chain_of(space, prompt)
        except KVTierError as error:
            reason = "damaged" if space.namespace in broken else "unknown"
            detail = str(error).removeprefix(f"{space.name}: ")
            out.append({"namespace": space.name, "hit_tokens": None, "reason": reason,
                        "detail": detail})  # fmt: skip
            continue
        look_up(store, chain)
        chains.append(chain)
    best = max(chains, key=hit_tokens, default=None)
    return [_verdict(store, chain, prompt, best, check=check) for chain in chains] + out


def _verdict(
    store: Store, chain: Chain, prompt: Prompt, best: Chain | None, *, check: bool
) -> dict[str, Any]:
    hit = hit_tokens(chain)
    bad = _damaged(store, chain, hit) if check else []
    if bad:
        first_bad = min(end for end, _ in bad)
        for end in [end for end in chain.at if end >= first_bad]:
            del chain.at[end]
        hit = hit_tokens(chain)
    reason, detail = reason_of(store, chain, prompt, hit, bad)
    verdict = {
        "namespace": chain.space.name,
        "model": part(chain.space.description or {}, "model").get("path"),
        "prompt_tokens": prompt.n_tokens,
        "hit_tokens": hit,
        "chunk_tokens": chain.chunk_tokens,
        "chunks": prompt.n_tokens // chain.chunk_tokens,
        "records_found": len(chain.found),
        "reason": reason,
        "detail": detail,
        "hash_function": chain.hash_from,
        "differs_from_best": None,
    }
    if best is not None and best is not chain and hit_tokens(best) > hit:
        changed = differences(chain.space.description or {}, best.space.description or {})
        verdict["differs_from_best"] = {
            "namespace": best.space.name,
            "hit_tokens": hit_tokens(best),
            "fields": {name: list(values) for name, values in changed.items()},
        }
    return verdict


def _damaged(store: Store, chain: Chain, hit: int) -> list[tuple[int, str | None]]:
    """Check the payloads that a hit would read; return (end, what is wrong; None: it is gone)."""
    bad: list[tuple[int, str | None]] = []
    for (end, _group, _rank), record in sorted(chain.found.items()):
        if end > hit:
            continue
        try:
            checked = store.check(record)
        except RecordMissing:
            bad.append((end, None))
            continue
        if not checked.ok:
            bad.append((end, f"{key_name(record.key)} of rank {record.rank}: {checked.detail}"))
    return bad
