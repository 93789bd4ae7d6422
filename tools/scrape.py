"""Reading the metrics page of a running engine."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from .exit_codes import ExitCode
from .reporting import CommandError

MAX_PAGE_BYTES = 32 << 20
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


def metrics_url(url: str) -> str:
    """Return the address of the metrics page of a server that a person names.

    Raises:
        CommandError: no HTTP URL.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise CommandError("give the address of vLLM's server, as in http://host:8000",
                           ExitCode.USAGE)  # fmt: skip
    path = parts.path if parts.path.rstrip("/") else "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def safe_url(url: str) -> str:
    """Return a URL without its login and query, for messages."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def scrape(url: str, timeout_s: float = 5.0) -> Page:
    """Fetch and read a metrics page. Blocking.

    Raises:
        CommandError: nobody answers (unreachable), or no metrics (wrong format).
    """
    where = safe_url(url)
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 - http checked
            text = answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        raise CommandError(f"{where}: answers {error.code}", ExitCode.WRONG_FORMAT) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CommandError(f"{where}: {reason}", ExitCode.UNREACHABLE) from None
    page = parse(text)
    if not page.values:
        raise CommandError(f"{where}: no metrics page", ExitCode.WRONG_FORMAT)
    return page
