"""An engine over Redis in a process of its own: prompts' seeds come in, answers go out."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from . import conftest  # noqa: F401 - sets what vLLM must find


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not an answer
    from . import models, test_redis_engine
    from .harness import Engine, prompt

    with Engine(models.LLAMA, test_redis_engine.settings(sys.argv[1])) as engine:
        for line in sys.stdin:
            for seed in json.loads(line):
                tokens = prompt(test_redis_engine.PROMPT_TOKENS, seed)
                answer = engine.ask(tokens, test_redis_engine.ANSWER_TOKENS)
                engine.drain()
                print(json.dumps(asdict(answer)), file=out, flush=True)


if __name__ == "__main__":
    main()
