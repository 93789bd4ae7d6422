"""Reading the metrics page of a running engine."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from .exit_codes import ExitCode
from .reporting import CommandError

MAX_PAGE_BYTES = 32 << 20
HTTP_ERRORS = (OSError, ValueError, OverflowError, http.client.HTTPException)
"""What a request may end with where nobody, or no HTTP server, answers (ports included)."""
_LINE = re.compile(
    r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)(?:\s+\S+)?"
)
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(slots=True)
class Page:
    """What a page says: sums over engines, by name and by the values of the labels that count."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of ``name`` that carry these labels."""
        return sum(
            value
            for (own, found), value in self.values.items()
            if own == name and labels.items() <= dict(found).items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the samples of ``name``, summed by one label."""
        out: dict[str, float] = {}
        for (own, found), value in self.values.items():
            if own == name and label in dict(found):
                which = dict(found)[label]
                out[which] = out.get(which, 0.0) + value
        return out

    def names(self) -> set[str]:
        """Return the names that have samples."""
        return {name for name, _ in self.values}


def parse(text: str) -> Page:
    """Read the Prometheus text format; lines that are not of it are passed over."""
    page = Page()
    for name, labels, value in _samples(text):
        key = (name, tuple(sorted(labels.items())))
        page.values[key] = page.values.get(key, 0.0) + value
    return page


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None or line.startswith("#"):
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = {
            name: re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), text)
            for name, text in _LABEL.findall(match["labels"] or "")
        }
        yield match["name"], labels, value


def call(url: str, timeout_s: float, body: object = None) -> Any:
    """Return the open answer of an HTTP server; ``body`` is posted as JSON. Blocking.

    A login in the URL goes into a header; without one the API key in ``OPENAI_API_KEY`` or
    ``VLLM_API_KEY`` does.

    Raises:
        One of `HTTP_ERRORS`; none of them tells the login.
    """
    parts = urlsplit(url)
    headers = {}
    user, _, host = parts.netloc.rpartition("@")
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY")
    if user:
        headers["Authorization"] = "Basic " + b64encode(unquote(user).encode()).decode()
    elif key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    bare = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
    request = urllib.request.Request(bare, data, headers)  # noqa: S310 - http, see `_http_parts`
    return urllib.request.urlopen(request, timeout=timeout_s)  # noqa: S310 - likewise


def metrics_url(url: str) -> str:
    """Return the address of the metrics page of a server that a person names.

    Raises:
        CommandError: no HTTP URL.
    """
    parts = _http_parts(url)
    if parts is None:
        raise CommandError("give the address of vLLM's server, as in http://host:8000",
                           ExitCode.USAGE)  # fmt: skip
    path = parts.path if parts.path.rstrip("/") else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _http_parts(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        return None
    return parts if usable else None


def server_root(url: str) -> str:
    """Return the address of a server that a person names, without ``/v1`` at its end.

    Raises:
        CommandError: no HTTP URL.
    """
    parts = _http_parts(url)
    if parts is None:
        raise CommandError("give the server's address, as in http://host:8000", ExitCode.USAGE)
    return urlunsplit(parts).rstrip("/").removesuffix("/v1")


def safe_url(url: str) -> str:
    """Return a URL without its login and query, for messages."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def plain(error: BaseException) -> str:
    """Return in words what one of `HTTP_ERRORS` says."""
    reason = getattr(error, "reason", error)  # urllib puts its own class around a socket's
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code} {error.reason}"
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__


def scrape(url: str, timeout_s: float = 5.0) -> Page:
    """Fetch and read a metrics page. Blocking.

    Raises:
        CommandError: nobody answers (unreachable), or no metrics (wrong format).
    """
    where = safe_url(url)
    try:
        with call(url, timeout_s) as answer:
            text = answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        raise CommandError(f"{where}: answers {error.code}", ExitCode.WRONG_FORMAT) from None
    except HTTP_ERRORS as error:
        raise CommandError(f"{where}: {plain(error)}", ExitCode.UNREACHABLE) from None
    page = parse(text)
    if not page.values:
        raise CommandError(f"{where}: no metrics page", ExitCode.WRONG_FORMAT)
    return page
