"""What the engine tests run: every family of models, and Llama with whatever changes its KV."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.tools.models import made_once

from . import models
from .harness import CHUNK_TOKENS, Engine, forked_workers, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def draft_model():
    """A draft that is always right, if its KV is."""
    folder = str(models.LLAMA.folder())
    return {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}


@dataclass(frozen=True, eq=False)
class Family:
    """How to run one model.

    Args:
        label: what tells it from the same model run plainly.
        more: makes further arguments of the engine.
        plain: the family whose answers without any cache must be this one's, too.
        adapters: seeds of LoRA adapters; each prompt is asked with one after another. Never two
            in one batch, in which vLLM itself may answer wrongly on the CPU.
    """

    model: models.TinyModel
    block_tokens: int | None = 32
    blocks: int = 120
    recurrent: bool = False
    label: str = ""
    more: Callable[[], dict] = dict
    plain: Family | None = None
    adapters: tuple[int, ...] = ()

    @property
    def name(self):
        return self.model.name.removeprefix("tiny-") + self.label

    @property
    def block(self):
        return self.block_tokens or 128

    @property
    def ranks(self):
        return self.more().get("tensor_parallel_size", 1)

    @property
    def speculates(self):
        return "speculative_config" in self.more()

    @property
    def lengths(self):
        """One for each request that `ask_each` makes."""
        return [n for n, _ in self.requests]

    @property
    def requests(self):
        """Length and number of the adapter of each request that `ask_each` makes."""
        b, c = self.block, CHUNK_TOKENS
        lengths = {c - 1, c, c + 1}
        if self.label:
            lengths |= {c + 3 * b + 17}
        else:
            lengths |= {b - 1, b, b + 1, 700}
        if not self.label and not self.recurrent:  # bfloat16 is slow here
            lengths |= {c + 3 * b + 17, 2 * c}
        return [(n, i) for n in sorted(lengths) for i in range(len(self.adapters) or 1)]

    def engine(self, kvtier=None, **more):
        arguments = {
            "blocks": self.blocks,
            "block_tokens": self.block_tokens,
            **self.more(),
            **more,
        }
        return Engine(self.model, kvtier, **arguments)

    def workers(self):
        """The context in which its engines are started."""
        return forked_workers() if self.ranks > 1 else nullcontext()

    def lora(self, i):
        """The adapter of request ``i``."""
        if not self.adapters:
            return None
        from vllm.lora.request import LoRARequest

        number = i % len(self.adapters)
        seed = self.adapters[number]
        name = f"tiny-lora-{seed}"
        folder = made_once(name, lambda out: models.make_adapter(out, seed))
        return LoRARequest(name, number + 1, str(folder))

    def prompts(self):
        return [prompt(n, n) for n in self.lengths]

    def ask_each(self, engine, n, count=None):
        """Its prompts, or the first ``count``, one after another."""
        prompts = self.prompts()[:count]
        return [engine.ask(tokens, n, lora=self.lora(i)) for i, tokens in enumerate(prompts)]


LLAMA = Family(models.LLAMA)
GEMMA3 = Family(models.GEMMA3)
GPT_OSS = Family(models.GPT_OSS)
LLAMA4 = Family(models.LLAMA4, blocks=240)
QWEN3_NEXT = Family(models.QWEN3_NEXT, block_tokens=None, recurrent=True)
DRAFTED = Family(
    models.LLAMA,
    label="-draft-model",
    more=lambda: {"speculative_config": draft_model()},
    plain=LLAMA,
)
NGRAMS = Family(
    models.LLAMA, label="-ngram", more=lambda: {"speculative_config": NGRAM}, plain=LLAMA
)
ADAPTED = Family(
    models.LLAMA,
    label="-lora",
    more=lambda: {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    adapters=(1, 2),
)
SPLIT = Family(
    models.LLAMA,
    label="-tp2",
    more=lambda: {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    plain=LLAMA,
)

FAMILIES = (LLAMA, DRAFTED, NGRAMS, ADAPTED, SPLIT, GEMMA3, GPT_OSS, LLAMA4, QWEN3_NEXT)
