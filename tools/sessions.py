"""Synthetic agent sessions: long prompts that grow turn by turn.

An agent's context is instructions, then tool calls and what they printed: listings, code,
test logs. The text here is made from a seed, reads like that, and is cut to exact lengths in
tokens, so that every run of the demo and the benchmarks asks for the same work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


NOUNS = [
    "order",
    "invoice",
    "ledger",
    "parser",
    "cache",
    "queue",
    "schema",
    "token",
    "index",
    "shard",
    "cursor",
    "batch",
    "session",
    "worker",
    "socket",
    "buffer",
    "digest",
    "header",
    "lease",
    "quota",
    "replica",
    "snapshot",
]
VERBS = [
    "load",
    "merge",
    "flush",
    "verify",
    "resolve",
    "encode",
    "decode",
    "rotate",
    "drain",
    "commit",
    "retry",
    "split",
]
TYPES = ["int", "str", "bytes", "float", "bool"]
ROLES = {
    "system": "<|im_start|>system\n{}<|im_end|>\n",
    "user": "<|im_start|>user\n{}<|im_end|>\n",
    "tool": "<|im_start|>tool\n{}<|im_end|>\n",
    "assistant": "<|im_start|>assistant\n",
}


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """How long one session's prompts are, turn by turn."""

    name: str
    prompt_tokens: tuple[int, ...]


class Session:
    """One session; `next_prompt` makes its prompts, each one a continuation of the last.

    Args:
        plan: lengths.
        encode: text to token ids, without special tokens added.
        seed: what the text is made from, together with the session's name.
    """

    def __init__(self, plan: SessionPlan, encode: Callable[[str], list[int]], seed: int) -> None:
        self.plan = plan
        self._encode = encode
        self._pieces = pieces(plan.name, random.Random(f"{seed}/{plan.name}"))  # noqa: S311
        self._cue = encode(ROLES["assistant"])
        self._token_ids: list[int] = []
        self._turn = 0

    def next_prompt(self, answer_token_ids: Sequence[int] = ()) -> list[int]:
        """Return the next turn's prompt: the last one, its answer, and new text to fill up.

        Raises:
            IndexError: the plan has no further turn.
        """
        want_tokens = self.plan.prompt_tokens[self._turn]
        self._turn += 1
        self._token_ids += answer_token_ids
        room_tokens = want_tokens - len(self._token_ids) - len(self._cue)
        if room_tokens < 0:
            raise ValueError(f"turn {self._turn} of {self.plan.name} leaves no room for new text")
        fresh: list[int] = []
        while len(fresh) < room_tokens:
            fresh += self._encode(next(self._pieces))
        self._token_ids += fresh[:room_tokens] + self._cue
        return list(self._token_ids)


def pieces(name: str, rng: random.Random) -> Iterator[str]:
    """Yield messages for ever: instructions once, then requests and tool output in turn."""
    noun = rng.choice(NOUNS)
    yield ROLES["system"].format(
        f"Session {name}. You maintain the {noun} service. Read before you change, run the "
        f"tests after each change, and answer with the next step only."
    )
    while True:
        yield ROLES["user"].format(
            f"The {rng.choice(NOUNS)} fails after {rng.randrange(2, 90)} {rng.choice(NOUNS)}s. "
            f"Find out why it does not {rng.choice(VERBS)} and mend it."
        )
        yield ROLES["tool"].format("\n".join(_listing(rng)))
        yield ROLES["tool"].format("\n".join(_code(rng)))
        yield ROLES["tool"].format("\n".join(_test_log(rng)))


def _listing(rng: random.Random) -> Iterator[str]:
    yield f"$ ls -l src/{rng.choice(NOUNS)}"
    for _ in range(rng.randrange(4, 10)):
        name = f"{rng.choice(NOUNS)}_{rng.choice(VERBS)}.py"
        yield f"-rw-r--r-- {rng.randrange(200, 90000):>6} {name}"


def _code(rng: random.Random) -> Iterator[str]:
    yield f"$ cat src/{rng.choice(NOUNS)}.py"
    for _ in range(rng.randrange(2, 5)):
        noun, verb, kind = rng.choice(NOUNS), rng.choice(VERBS), rng.choice(TYPES)
        limit = rng.randrange(1, 512)
        yield f"def {verb}_{noun}(self, {noun}: {kind}, limit: int = {limit}) -> {kind}:"
        yield f"    for {rng.choice('ijk')}, part in enumerate(self.{rng.choice(NOUNS)}s):"
        yield f"        if part.{rng.choice(NOUNS)} > limit or not part.{verb}({noun}):"
        yield f"            raise {noun.title()}Error(f'{rng.choice(VERBS)} {{part!r}}')"
        yield f"    return self.{rng.choice(NOUNS)}.{rng.choice(VERBS)}({noun})"


def _test_log(rng: random.Random) -> Iterator[str]:
    yield "$ python -m pytest -q"
    for _ in range(rng.randrange(3, 7)):
        outcome = rng.choice(("PASSED", "PASSED", "PASSED", "FAILED"))
        test = f"test_{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
        yield f"tests/test_{rng.choice(NOUNS)}.py::{test} {outcome}"
    yield f"E   assert {rng.randrange(1000)} == {rng.randrange(1000)}"


def encoder(model: str) -> Callable[[str], list[int]]:
    """Return text to token ids with the model's own tokenizer, nothing added."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
