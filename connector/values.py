"""How each kind of setting is read, checked and printed."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

from ..storage.errors import ConfigError
from ..storage.keyring import looks_like_key
from ..storage.redis_url import OPTION_NAMES

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1 << (10 * i) for i, p in enumerate("kmgtp", 1)},
    **{f"{p}b": 1000**i for i, p in enumerate("kmgtp", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    Attributes:
        name: the key that people write.
        field: attribute of `Config`.
        kind: how its value is read (see `parse`).
        default: value when not given, as stored.
        doc: one sentence.
        choices: allowed words, for kind "choice".
        low, high: bounds for numbers, as stored.
        advanced: of no interest to most.
    """

    name: str
    field: str
    kind: str
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    advanced: bool = False

    def wrong(self, value: object, todo: str) -> ConfigError:
        """Return the one-line error for a value of this setting."""
        shown = "***" if self.kind == "secret" else shown_value(value)
        return ConfigError(f"kvtier setting {self.name!r} = {shown!r}: {todo}")

    def parse(self, value: Any) -> Any:
        """Read a value as people write it.

        Raises:
            ConfigError: wrong type or out of bounds.
        """
        parsed = _PARSERS[self.kind](self, value)
        if isinstance(parsed, (int, float)) and not isinstance(parsed, bool):
            if self.low is not None and parsed < self.low:
                raise self.wrong(value, f"must be at least {self._shown(self.low)}")
            if self.high is not None and parsed > self.high:
                raise self.wrong(value, f"must be at most {self._shown(self.high)}")
        return parsed

    def expects(self) -> str:
        """Return what a value looks like, for documentation."""
        return " or ".join(f"`{c}`" for c in self.choices) if self.choices else _EXPECTS[self.kind]

    def shown_default(self) -> str:
        """Return the default as people write it."""
        if self.kind == "deadline" and self.default is None:
            return "`auto`"
        if self.default is None:
            return "none"
        if isinstance(self.default, bool):
            return f"`{str(self.default).lower()}`"
        if isinstance(self.default, (int, float)):
            return f"`{self._shown(self.default)}`"
        return f"`{self.default}`"

    def _shown(self, bound: float) -> str:
        if self.kind == "size":
            return format_size(int(bound))
        if self.kind == "milliseconds":
            return f"{bound * 1000:g}"
        return f"{bound:g}"


def parse_size(text: int | str) -> int:
    """Return bytes for a number of bytes or a text like ``32GiB``, ``1.5 GiB``, ``10GB``.

    Raises:
        ValueError: not a size.
    """
    if isinstance(text, bool):
        raise ValueError("not a size")  # noqa: TRY004 (one error for all wrong sizes)
    if isinstance(text, int):
        if text < 0:
            raise ValueError("negative size")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or ("." in match[1] and unit == 1):
        raise ValueError("not a size")
    whole, _, part = match[1].partition(".")
    # Exact: 0.1GiB through floats would depend on rounding.
    fraction = int(part) * unit // int("1" + "0" * len(part)) if part else 0
    return int(int(whole) * unit + fraction)


def format_size(size_bytes: int) -> str:
    """Return a size as people write it; reading it back gives the same when it is round."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        scale = 1 << (10 * power)
        if size_bytes >= scale:
            return (
                f"{size_bytes / scale:.10g}{unit}"
                if size_bytes % scale == 0
                else (f"{size_bytes / scale:.2f}{unit}")
            )
    return str(size_bytes)


def redact_url(text: str) -> str:
    """Return ``text`` with the secrets of a URL replaced by ``***``.

    Rather too much than too little: a secret may hold characters that end a URL's
    host part, so that everything before the last ``@`` counts as user and password,
    and a misspelt option may be one that is secret, so that only known ones are shown.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text
    place, question, query = rest.partition("?")
    user, at, host = place.rpartition("@")
    if at:
        name, colon, _ = user.partition(":")
        place = f"{name}:***@{host}" if colon else f"***@{host}"
    elif "@" in query:  # perhaps a password with a ? in it, whose beginning looks like a host
        place = "***"
    options = "&".join(_redacted(option) for option in query.split("&"))
    return f"{scheme}://{place}{question}{options if question else ''}"


def shown_value(value: object) -> object:
    """Return a value that is not what it should be, fit for a message: without secrets.

    A URL that is none, and settings inside a setting, may hold a password too.
    """
    if not isinstance(value, str):
        return value if isinstance(value, (int, float, type(None))) else f"a {type(value).__name__}"
    if looks_like_key(value):
        return "***"
    _, at, place = value.rpartition("@")
    return redact_url(value) if "://" in value or not at else f"***@{place}"


def _redacted(option: str) -> str:
    name, equals, value = option.partition("=")
    if not equals:
        return "***" if option else ""
    known = name in OPTION_NAMES and "password" not in name and "@" not in value
    return option if known else f"{name if name in OPTION_NAMES else '***'}=***"


def _size(setting: Setting, value: Any) -> int:
    try:
        return parse_size(value)
    except ValueError:
        raise setting.wrong(value, 'give a size like "32GiB", "500MB" or bytes') from None


def _integer(setting: Setting, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise setting.wrong(value, "give a whole number")
    return value


def _number(setting: Setting, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise setting.wrong(value, "give a number")
    return float(value)


def _deadline(setting: Setting, value: Any) -> float | None:
    if value == "auto":
        return None
    if isinstance(value, str):
        raise setting.wrong(value, 'give seconds or "auto"')
    return _number(setting, value)


def _flag(setting: Setting, value: Any) -> bool:
    if not isinstance(value, bool):
        raise setting.wrong(value, "give true or false")
    return value


def _choice(setting: Setting, value: Any) -> str:
    if value not in setting.choices:
        raise setting.wrong(value, f"give one of {', '.join(setting.choices)}")
    return str(value)


def _text(setting: Setting, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise setting.wrong(value, "give a text")
    return value


def _path(setting: Setting, value: Any) -> str:
    text = _text(setting, value)
    if "\0" in text or "://" in text:
        raise setting.wrong(value, "give a folder")
    return os.path.abspath(os.path.expanduser(text))


def _path_or_off(setting: Setting, value: Any) -> str:
    return "" if value == "off" else _path(setting, value)


def _file(setting: Setting, value: Any) -> str:
    text = _text(setting, value)
    if "\0" in text or "://" in text or looks_like_key(text):
        raise setting.wrong(value, "give the path of a file")
    return os.path.abspath(os.path.expanduser(text))


def _variable(setting: Setting, value: Any) -> str:
    text = _text(setting, value)
    if not _NAME.fullmatch(text) or looks_like_key(text):
        raise setting.wrong(value, "give the name of an environment variable")
    return text


def _url(setting: Setting, value: Any) -> str:
    text = _text(setting, value)
    base, _, kind = text.partition("://")[0].lower().partition("+")
    kinds = {"redis": ("", "sentinel", "cluster"), "unix": ("",)}
    if "://" not in text or kind not in kinds.get("redis" if base == "rediss" else base, ()):
        raise setting.wrong(value, 'give a URL like "redis://host:6379/0"')
    return text


_EXPECTS = {
    "size": "size",
    "integer": "whole number",
    "number": "number",
    "milliseconds": "milliseconds",
    "deadline": "seconds or `auto`",
    "flag": "`true` or `false`",
    "choice": "word",
    "text": "text",
    "secret": "text",
    "path": "folder",
    "folder or off": "folder or `off`",
    "file": "file",
    "variable": "name",
    "url": "URL",
}

_PARSERS = {
    "size": _size,
    "integer": _integer,
    "number": _number,
    "milliseconds": lambda s, v: _number(s, v) / 1000,
    "deadline": _deadline,
    "flag": _flag,
    "choice": _choice,
    "text": _text,
    "secret": _text,
    "path": _path,
    "folder or off": _path_or_off,
    "file": _file,
    "variable": _variable,
    "url": _url,
}
