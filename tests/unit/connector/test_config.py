"""Settings: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.connector import config, settings
from kvtier.connector.geometry import DEFAULT_CHUNK_TOKENS
from kvtier.connector.values import format_size, parse_size, redact_url
from kvtier.storage.errors import ConfigError
from kvtier.storage.redis_url import OPTION_NAMES

GIB = 1 << 30
REPO = Path(__file__).parents[3]


def load(**extra: Any) -> config.Config:
    return config.load(extra, check_machine=False)


def refusal(**extra: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(extra, check_machine=False)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32GiB", 32 * GIB),
        ("32 GiB", 32 * GIB),
        ("  1.5GiB ", 3 * GIB // 2),
        ("10GB", 10 * 10**9),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("1TB", 10**12),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
        (0, 0),
        ("0.1GB", 10**8),
    ],
)
def test_sizes_as_people_write_them(text: str | int, size: int) -> None:
    """Binary and decimal units, fractions, plain bytes."""
    assert parse_size(text) == size
    assert load(ram=text, redis="redis://h").ram_bytes == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "12 parsecs", "1.5", "-1GiB", "1e9", "1,5GiB", "0x10", -1, 1.5, True, None]
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    """Anything else is no size; true is not one byte."""
    with pytest.raises(ValueError, match="size"):
        parse_size(text)
    if text is not None:
        assert "'ram'" in refusal(ram=text)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 256 << 20, 3 * GIB, 5 << 40])
def test_sizes_are_printed_as_they_are_read(size: int) -> None:
    """A round size survives printing and reading."""
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("rma", "ram"),
        ("disk_capcity", "disk_capacity"),
        ("ram_gib", "ram"),
        ("loadpolicy", "load_policy"),
        ("configs", "config"),
    ],
)
def test_a_wrong_key_names_the_nearest(given: str, near: str) -> None:
    """An unknown key stops the start and proposes the name that was meant."""
    text = refusal(ram="1GiB", **{given: 1})
    assert f"{given!r}" in text
    assert f"did you mean {near!r}?" in text


def test_a_key_like_nothing_lists_all() -> None:
    """When nothing is near, the known names are listed."""
    text = refusal(zzzzqqq=1)
    assert all(setting.name in text for setting in settings.SETTINGS)


WRONG = {
    "size": ["many", True, 1.5, [1], {}],
    "integer": ["4", 4.0, True, [4]],
    "number": ["4", True, float("nan"), float("inf"), None.__class__],
    "milliseconds": ["4", True],
    "deadline": ["soon", True],
    "flag": ["true", 1, 0],
    "choice": ["sometimes", 1, True],
    "text": [1, ""],
    "secret": [1, ""],
    "folder or off": [1, True, "", [], "redis://h", "a\0b"],
    "path": [1, "", "redis://x", "a\0b"],
    "file": [1, "", "redis://x", "a\0b"],
    "variable": [1, "", "A-B", "1A", "a\0b"],
    "url": [1, "", "http://x", "localhost:6379"],
}


@pytest.mark.parametrize("setting", settings.SETTINGS, ids=lambda s: s.name)
def test_a_wrong_type_says_setting_value_and_what_to_do(setting: Any) -> None:
    """Every setting refuses every wrong kind of value in one line with its name."""
    for value in WRONG[setting.kind]:
        text = refusal(**{"ram": "1GiB", setting.name: value})
        assert f"{setting.name!r} = " in text
        assert "give " in text
        if setting.kind != "secret" and isinstance(value, str) and value.isalnum():
            assert value in text


@pytest.mark.parametrize(
    "setting", [s for s in settings.SETTINGS if s.low or s.high], ids=lambda s: s.name
)
def test_bounds_are_kept_and_said(setting: Any) -> None:
    """A value past a bound is refused and the bound is named."""
    scale = 1000 if setting.kind == "milliseconds" else 1
    for bound, past, words in ((setting.low, -1, "at least"), (setting.high, 2, "at most")):
        if not bound:
            continue
        value = bound * scale * past if past > 0 else bound * scale / 2
        value = int(value) if setting.kind in ("size", "integer") else value
        assert words in refusal(**{"ram": "1GiB", "disk": "d", setting.name: value})


def test_tiers_alone_and_together() -> None:
    """RAM alone, disk alone and both are fine; none at all is not."""
    assert load(ram="1GiB").disk is None
    alone = load(disk="x", disk_capacity="1GiB")
    assert (alone.ram_bytes, alone.staging_bytes) == (0, 256 << 20)
    assert load(ram="1GiB", disk="x", disk_capacity="1GiB").disk == os.path.abspath("x")
    assert "no tier" in refusal()
    assert "no tier" in refusal(ram=0)


def test_a_disk_needs_a_capacity(tmp_path: Path) -> None:
    """Without a capacity the start stops and a size that fits is proposed."""
    with pytest.raises(ConfigError, match=r"'disk_capacity'.*free there, for example \"\d+GiB\""):
        config.load({"disk": str(tmp_path / "not" / "yet")})
    assert "no 'disk' beside it" in refusal(ram="1GiB", disk_capacity="1GiB")


def test_a_disk_must_be_a_folder_that_can_be_written(tmp_path: Path) -> None:
    """A file, or a folder below one, is refused before the engine starts."""
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"'disk' = .* is no folder"):
            config.load({"disk": str(path), "disk_capacity": "1GiB"})
    assert config.load({"disk": str(tmp_path / "new"), "disk_capacity": "1GiB"}).disk
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_disk_without_permission_is_refused(tmp_path: Path) -> None:
    """A folder that this user cannot write is refused and named."""
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="no permission"):
        config.load({"disk": str(tmp_path), "disk_capacity": "1GiB"})


def test_more_memory_than_there_is_is_refused() -> None:
    """A RAM tier larger than this process may use stops the start and names the knob."""
    with pytest.raises(ConfigError, match="ram"):
        config.load({"ram": "900TiB"})
    with pytest.raises(ConfigError, match="ram"):
        config.load({"ram": "225TiB", "size_scope": "per_rank"}, n_ranks=4)
    with pytest.raises(ConfigError, match="staging"):
        config.load({"redis": "redis://h", "staging": "900TiB"})


def test_sizes_count_for_all_ranks_unless_said() -> None:
    """In all is what people expect; per_rank says otherwise."""
    assert load(ram="8GiB").per_rank(8 * GIB, 4) == 2 * GIB
    assert load(ram="8GiB", size_scope="per_rank").per_rank(8 * GIB, 4) == 8 * GIB


def test_a_file_gives_settings_and_keys_beside_it_win(tmp_path: Path) -> None:
    """TOML at the top level or in a table [kvtier]; keys in the JSON override the file's."""
    for text in ('ram = "1GiB"\nload_threads = 3', '[kvtier]\nram = "1GiB"\nload_threads = 3'):
        file = tmp_path / "kvtier.toml"
        file.write_text(text)
        got = load(config=str(file), load_threads=5)
        assert (got.ram_bytes, got.load_threads) == (GIB, 5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ram = ", "no TOML"),
        ("\xff\xfe", "no TOML"),
        ('config = "other.toml"', "cannot name another"),
        ("[disk]\nx = 1", "'disk'"),
        ("rma = 1", "did you mean 'ram'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    """A file that is no TOML, or has wrong settings, stops the start."""
    file = tmp_path / "kvtier.toml"
    file.write_bytes(text.encode("latin-1"))
    assert says in refusal(config=str(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there stops the start and names the path."""
    path = str(tmp_path / "gone.toml")
    assert path in refusal(config=path)
    assert "'config' = 3" in refusal(config=3)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://user:pass@h:6379/0", "redis://user:***@h:6379/0"),
        ("redis://:p%40ss@h", "redis://:***@h"),
        ("rediss://token@h/1", "rediss://***@h/1"),
        ("redis://u:p@ss@h", "redis://u:***@h"),
        ("unix:///run/r.sock?password=hunter2&db=1", "unix:///run/r.sock?password=***&db=1"),
        ("redis://[bad:pass@h", "redis://[bad:***@h"),
        ("redis://u:p/a#ss@h/0", "redis://u:***@h/0"),
        ("redis://h?pasword=hunter2&ttl=1h", "redis://h?***=***&ttl=1h"),
        ("redis://h?sentinel_password=p&prefix=x", "redis://h?sentinel_password=***&prefix=x"),
        ("redis://u:a?hunter2@h:1", "redis://***?***"),
        ("redis://u:a?ttl=hunter2@h:1", "redis://***?ttl=***"),
        ("redis://h?password=a&b=hunter2", "redis://h?password=***&***=***"),
        ("no url", "no url"),
    ],
)
def test_secrets_in_urls_are_never_shown(url: str, shown: str) -> None:
    """Passwords are replaced wherever a URL is printed."""
    assert redact_url(url) == shown


def test_no_secret_in_any_output() -> None:
    """Neither the effective settings nor a refusal carry a password or a tenant's word."""
    got = load(ram="1GiB", redis="redis://u:hunter2@h", tenant="hunter2")
    assert "hunter2" not in str(got.effective())
    assert "hunter2" not in refusal(ram="1GiB", redis="http://u:hunter2@h")
    assert "hunter2" not in refusal(redsi="redis://u:hunter2@h")
    assert "hunter2" not in refusal(ram="1GiB", tenant="")


@pytest.mark.parametrize(
    "given",
    [
        {"redis_pasword": "hunter2"},
        {"redis_pass": "hunter2"},
        {"redis_password": {"value": "hunter2"}},
        {"redis_auth_secret": "hunter2"},
        {"redis": {"url": "redis://h", "password": "hunter2"}},
        {"redis": ["redis://u:hunter2@h"]},
        {"redis": "u:hunter2@h:6379"},
        {"redis": "redis:/u:hunter2@h:6379"},
        {"redis": "redis://h?pasword=hunter2"},
        {"redis": "redis://u:1?hunter2=x@h"},
        {"redsi": "u:hunter2@h"},
        {"redsi": {"password": "hunter2"}},
    ],
)
def test_no_secret_in_a_refusal(given: dict[str, Any]) -> None:
    """However a password gets into a setting that is refused, it is not repeated."""
    assert "hunter2" not in refusal(ram="1GiB", **given)


def test_a_key_given_as_a_setting_is_not_shown() -> None:
    """Who writes the key itself where a file or variable is named does not find it in a log."""
    for key in ("ab" * 32, "q" * 42 + "s="):
        for name in ("encryption_key_file", "encryption_key_env", "encryption_key"):
            assert key not in refusal(ram="1GiB", **{name: key})


def test_encryption_keys_are_checked_at_the_start(tmp_path: Path) -> None:
    """A key file that cannot be used stops the start; without the machine it is not looked at."""
    path = tmp_path / "key"
    got = load(ram="1GiB", encryption_key_file=str(path))
    with pytest.raises(ConfigError, match="encryption_key_file"):
        got.key_ring()
    with pytest.raises(ConfigError, match="encryption_key_file"):
        config.load({"ram": "64MiB", "encryption_key_file": str(path)})
    path.write_text("00" * 32)
    assert got.key_ring() is not None
    assert load(ram="1GiB").key_ring() is None
    assert "00" * 32 not in str(got.effective())


def test_effective_settings_can_be_read_again() -> None:
    """What is logged is a configuration: loading it gives the same settings."""
    first = load(ram="3GiB", disk="x", disk_capacity="7GiB", load_deadline=2.5, promote=False)
    again = load(**{k: v for k, v in first.effective().items() if v is not None})
    assert again == first
    assert first.effective()["load_deadline"] == 2.5
    assert load(ram="1GiB").effective()["load_deadline"] == "auto"


def test_settings_in_force_have_no_open_defaults() -> None:
    """What a setting left out stands for is told, that of the URL included, and no secret."""
    url = "redis://me:hunter2@h:1/3?ttl=12h&stripe=1MiB"
    got = load(ram="1GiB", disk="/d", disk_capacity="1GiB", redis=url, redis_timeout=5).in_force()
    assert got["chunk_tokens"] == DEFAULT_CHUNK_TOKENS
    assert got["control"] == "/d/control"
    assert (got["redis_ttl"], got["redis_stripe"], got["redis_db"]) == (43200.0, "1MiB", 3)
    assert (got["redis_prefix"], got["redis_connections"]) == ("kvtier", 4)
    assert (got["redis_timeout"], got["redis_connect_timeout"]) == (5.0, 1.0)
    assert got["redis_tls_verify"] is None  # no TLS there
    assert load(redis="rediss://h").in_force()["redis_tls_verify"] is True
    assert load(redis="redis://h?ttl=none").in_force()["redis_ttl"] == 0
    assert load(redis="redis://h").in_force()["redis_ttl"] == 7 * 86400
    assert load(redis="redis://h").in_force()["control"] is None  # nothing is warmed without RAM
    assert "hunter2" not in str(got)
    assert list(got) == [setting.name for setting in settings.SETTINGS]
    assert load(ram="1GiB").in_force()["redis_ttl"] is None


def test_the_documentation_is_made_from_the_table() -> None:
    """The table in the documentation lists every setting as the code has it."""
    assert settings.markdown_table() in (REPO / "docs" / "configuration.md").read_text()


def test_redis_settings_and_url_options_are_one() -> None:
    """What is a setting may stand in the URL; the setting wins; what nobody says has a default."""
    url = "redis+sentinel://u:p%40w@h1:1,h2:2/main/3?ttl=12h&timeout=5&prefix=q"
    got = load(
        redis=url, redis_prefix="k", redis_password="s3", redis_stripe="1MiB"
    ).redis_settings()
    assert (got.user, got.password, got.db, got.master) == ("u", "s3", 3, "main")
    assert (got.prefix, got.ttl_s, got.timeout_s) == ("k", 12 * 3600.0, 5.0)
    assert (got.stripe_bytes, got.connections) == (1 << 20, 4)
    assert load(redis="redis://h", redis_ttl=0).redis_settings().ttl_s is None


def test_every_redis_option_is_a_setting() -> None:
    """Settings and URL know the same options, but for TLS itself, which is the URL's scheme."""
    names = {s.name.removeprefix("redis_") for s in settings.SETTINGS if "redis_" in s.name}
    assert names - {"codec", "write"} == set(OPTION_NAMES) - {"tls", "username"}


@pytest.mark.parametrize(
    "given",
    [
        {"redis": "http://h"},
        {"redis": "unix+cluster:///x"},
        {"redis": "redis+sentinel://h:1"},
        {"redis": "redis+cluster://h", "redis_db": 1},
        {"redis": "redis://h", "redis_tls_ca": "/ca"},
        {"redis": "redis://h?tls_ca=/ca"},
        {"redis": "redis://h?oops=1"},
        {"redis": "redis://h", "redis_prefix": "a{b}"},
        {"redis": "redis://h", "redis_connections": 65},
        {"redis": "rediss://h", "redis_tls_key": "/key"},
    ],
)
def test_a_redis_that_cannot_be_is_refused_at_the_start(given: dict[str, Any]) -> None:
    """Not at the first step: one line that names the setting, without the password."""
    url = given["redis"].replace("://", "://u:hunter2@")
    text = refusal(ram="1GiB", **{**given, "redis": url})
    assert "redis" in text
    assert "hunter2" not in text


def test_certificates_are_looked_for_at_the_start() -> None:
    """A file for TLS that cannot be read stops the start."""
    with pytest.raises(ConfigError, match=r"'redis_tls_ca' = '/gone\.pem'"):
        config.load({"ram": "64MiB", "redis": "rediss://h", "redis_tls_ca": "/gone.pem"})


def test_no_redis_secret_in_any_output() -> None:
    """Passwords given as settings are hidden like those in the URL."""
    got = load(
        redis="redis+sentinel://h/m", redis_password="hunter2", redis_sentinel_password="hunter2"
    )
    assert "hunter2" not in str(got.effective()) + repr(got) + repr(got.redis_settings())
    assert "hunter2" not in refusal(redis="redis://h", redis_password="hunter2", redis_db=-1)
