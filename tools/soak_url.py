"""A running OpenAI-compatible server, asked with token ids. Thread-safe; every call blocks."""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
from collections.abc import Iterator
from typing import Any, cast

from .exit_codes import ExitCode
from .reporting import CommandError
from .scrape import HTTP_ERRORS, Page, call, plain, safe_url, scrape, server_root
from .soak_engine import NO_KVTIER
from .soak_types import TOP_LOGPROBS, Ask, Reply, SoakError, Top

ANSWER_TIMEOUT_S = 900.0
MIN_TIMEOUT_S = 0.01
DEFAULT_MODEL_TOKENS = 8192  # of a server that does not say
PREFIX = "token_id:"
KVTIER = "kvtier:"
RENAMED = {"num_requests_running": "running", "num_requests_waiting": "waiting"}


class UrlEngine:
    """One server.

    Args:
        url: its address; ``/v1`` at the end may be left out.
        model: which of its models; the first when not given.
        uncached: give each request a salt of its own and keep kvtier out of it, so that
            everything is computed.

    Raises:
        CommandError: nobody answers there, or something else does.
    """

    def __init__(self, url: str, model: str | None = None, *, uncached: bool = False) -> None:
        self._root = server_root(url)
        self._uncached = uncached
        self._numbers = itertools.count()
        self._mark = f"{time.time_ns():x}"
        try:
            models = {str(r["id"]): r.get("max_model_len") for r in self._get("/v1/models")["data"]}
        except (*HTTP_ERRORS, KeyError, TypeError, AttributeError) as error:
            raise CommandError(
                f"{safe_url(self._root)}: no OpenAI-compatible server: {plain(error)}",
                ExitCode.UNREACHABLE,
            ) from None
        chosen = [name for name in models if model in (None, name)]
        if not chosen:
            raise CommandError(
                f"no model {model or ''!r} at {safe_url(self._root)}; there is "
                f"{', '.join(models) or 'none'}",
                ExitCode.USAGE,
            )
        self.model = chosen[0]
        self.max_model_tokens = int(models[self.model] or DEFAULT_MODEL_TOKENS)

    def _get(self, path: str) -> dict[str, Any]:
        with call(self._root + path, 30) as answer:
            return cast("dict[str, Any]", json.load(answer))

    def version(self) -> str:
        """Return what the server says it is, or nothing."""
        try:
            return str(self._get("/version")["version"])
        except (*HTTP_ERRORS, KeyError, TypeError):
            return ""

    def tokens(self, text: str) -> list[int]:
        """Return a text's token ids, by the server's own tokenizer.

        Raises:
            SoakError: it does not offer that.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            with call(f"{self._root}/tokenize", 30, body) as answer:
                return [int(token) for token in json.load(answer)["tokens"]]
        except (*HTTP_ERRORS, KeyError, TypeError) as error:
            raise SoakError(
                f"{safe_url(self._root)} makes no tokens of a text: {plain(error)}"
            ) from None

    def ask(self, ask: Ask) -> Reply:
        """Run one request to its end, or until it is given up.

        Raises:
            SoakError: the server refused it, or ended in the middle.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.answer_tokens,
            "min_tokens": ask.answer_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "logprobs": TOP_LOGPROBS,
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        salt = f"soak-{self._mark}-{next(self._numbers)}" if self._uncached else ask.salt
        if salt is not None:
            body["cache_salt"] = salt
        if self._uncached or not ask.kvtier:
            body["kv_transfer_params"] = NO_KVTIER
        began_s = time.perf_counter()
        timeout_s = max(MIN_TIMEOUT_S, ask.abort_after_s or ANSWER_TIMEOUT_S)
        try:
            with call(f"{self._root}/v1/completions", timeout_s, body) as answer:
                return self._read(answer, len(ask.prompt), began_s, ask.abort_after_s)
        except urllib.error.HTTPError as error:
            text = error.read(500).decode("utf-8", "replace")
            raise SoakError(f"{safe_url(self._root)} answers {error.code}: {text}") from None
        except (*HTTP_ERRORS, KeyError, TypeError, IndexError) as error:
            if ask.abort_after_s is not None and _is_timeout(error):
                return Reply((), (), len(ask.prompt), aborted=True)
            raise SoakError(f"{safe_url(self._root)} broke off: {plain(error)}") from None

    def _read(
        self, answer: Any, n_prompt: int, began_s: float, abort_after_s: float | None
    ) -> Reply:
        tokens: list[int] = []
        top: list[Top] = []
        first_s: float | None = None
        for event in _events(answer):
            for choice in event.get("choices", ()):
                told = choice.get("logprobs") or {}
                names = told.get("tokens") or ()
                if names and first_s is None:
                    first_s = time.perf_counter() - began_s
                for i, name in enumerate(names):
                    row = {_token(t): float(x) for t, x in (told["top_logprobs"][i] or {}).items()}
                    row.setdefault(_token(name), float(told["token_logprobs"][i]))
                    tokens.append(_token(name))
                    top.append(tuple(sorted(row.items(), key=lambda pair: -pair[1])))
            if abort_after_s is not None and time.perf_counter() - began_s > abort_after_s:
                return Reply(
                    (), (), n_prompt, aborted=True
                )  # closing the connection is what gives it up
        total_s = time.perf_counter() - began_s
        return Reply(tuple(tokens), tuple(top), n_prompt, first_s or total_s, total_s)

    def page(self) -> Page:
        """Return its metrics.

        Raises:
            CommandError: it serves none.
        """
        return scrape(self._root + "/metrics")

    def sample(self) -> dict[str, float]:
        """Return kvtier's counters and gauges (``gauge.``), and drafts, as `SoakEngine` does."""
        found: dict[str, float] = {}
        for (name, labels), value in self.page().values.items():
            values = [v for key, v in labels if key in {"tier", "reason", "state"}]
            ordered = sorted(values, key=lambda v: v not in {"ram", "disk", "redis"})
            if name.startswith(KVTIER) and not name.endswith("_created"):
                bare = name.removeprefix(KVTIER)
                kind = "" if bare.endswith("_total") else "gauge."
                full = ".".join([kind + bare.removesuffix("_total"), *ordered])
                found[full] = found.get(full, 0.0) + value
            elif name.startswith("vllm:num_requests_") and not labels_extra(labels):
                gauge = RENAMED.get(name.removeprefix("vllm:"))
                if gauge is not None:
                    found[f"gauge.{gauge}"] = found.get(f"gauge.{gauge}", 0.0) + value
            elif name == "vllm:spec_decode_num_draft_tokens_total":
                found["draft_tokens"] = found.get("draft_tokens", 0.0) + value
            elif name == "vllm:spec_decode_num_accepted_tokens_total":
                found["accepted_tokens"] = found.get("accepted_tokens", 0.0) + value
        return found


def labels_extra(labels: tuple[tuple[str, str], ...]) -> bool:
    """Return whether a sample is one of several parts of a family."""
    return bool({key for key, _ in labels} - {"engine", "model_name"})


def _events(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer:
        text = line.decode("utf-8", "replace").strip()
        if not text.startswith("data:"):
            continue
        data = text.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise SoakError(f"the server says: {event['error']}")
        yield event
    raise SoakError("an answer ended in the middle")


def _token(name: str) -> int:
    return int(name.removeprefix(PREFIX))


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or isinstance(
        getattr(error, "reason", None), TimeoutError
    )
