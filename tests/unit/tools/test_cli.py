from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvtier import __version__
from kvtier.connector import config
from kvtier.connector.config import read_toml
from kvtier.storage.errors import ConfigError, KVTierError, TierUnavailable
from kvtier.tools import cli
from kvtier.tools.exit_codes import EXIT_CODES_HELP, ExitCode
from kvtier.tools.reporting import CommandError, age, exit_code_of, reported, size

run = CliRunner().invoke


def commands(app, path=()):
    """Yield the path of every command and group."""
    yield path
    for command in app.registered_commands:
        yield (*path, command.name or command.callback.__name__)
    for group in app.registered_groups:
        yield from commands(group.typer_instance, (*path, group.name))


ALL = sorted(set(commands(cli.app)))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_help_works_and_commands_name_the_exit_codes(path):
    """--help of every command and group ends with 0; each command's tells the exit codes."""
    result = run(cli.app, [*path, "--help"])
    assert result.exit_code == 0
    if path not in {("config",), ("bench",)}:
        assert " ".join(EXIT_CODES_HELP.split()) in " ".join(result.stdout.split())


@pytest.mark.parametrize("path", [(), ("config",), ("bench",)], ids=" ".join)
def test_what_a_command_does_fits_its_line(path, monkeypatch):
    """On a terminal of 80 columns no command's line in a list is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    listed = run(cli.app, [*path, "--help"]).stdout.partition("Commands:\n")[2]
    assert listed
    assert "..." not in listed


def test_help_imports_nothing_heavy():
    """`kvtier --help` loads neither torch, vllm, numpy nor rich's consoles."""
    code = (
        "import sys; from kvtier.tools.cli import app; app(['--help'], standalone_mode=False);"
        "heavy = {'torch', 'vllm', 'numpy', 'transformers', 'redis', 'rich.console'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"


def test_ctrl_c_while_the_command_starts_is_one_line():
    """Ctrl-C before anything is imported: 130, and no traceback."""
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from kvtier.tools.entry import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "kvtier: interrupted\n")


def test_version():
    """--version prints the version of the package."""
    assert run(cli.app, ["--version"]).stdout == f"kvtier {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("x", ExitCode.LOCKED), 6),
        (ConfigError("x"), 3),
        (TierUnavailable("x"), 4),
        (PermissionError(13, "Permission denied", "/x"), 4),
        (KVTierError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_end_in_one_line_and_their_code(error, code, capsys):
    """What a command raises on purpose becomes one line on stderr, and Ctrl-C 130."""
    assert exit_code_of(error) == code

    @reported
    def command():
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def test_an_unknown_error_is_not_swallowed():
    """A fault of ours keeps its traceback."""

    @reported
    def command():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()


def test_config_check_accepts_what_an_engine_would(tmp_path):
    """JSON text, a JSON file with a whole transfer config, and a TOML file give the same."""
    text = '{"ram": "1MiB"}'
    whole = tmp_path / "transfer.json"
    whole.write_text(
        json.dumps(
            {"kv_connector": "KVTierConnector", "kv_connector_extra_config": {"ram": "1MiB"}}
        )
    )
    toml = tmp_path / "kvtier.toml"
    toml.write_text('ram = "1MiB"\n')
    found = []
    for source in (text, str(whole), str(toml)):
        result = run(cli.app, ["config", "check", source, "--json"])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    assert found[0] == found[1] == found[2]
    assert found[0]["ok"] is True
    assert found[0]["effective"]["ram"] == "1MiB"
    assert run(cli.app, ["config", "check", text]).exit_code == 0


@pytest.mark.parametrize("tiers", [("ram",), ("ram", "disk"), ("ram", "disk", "redis")])
def test_config_check_prints_toml_that_means_the_same(tmp_path, tiers):
    """Only what is set or has a default, nothing of a tier that is not there; stderr says ok."""
    every = {
        "ram": {"ram": "1MiB", "promote": False, "lookup_deadline_ms": 12.5},
        "disk": {"disk": str(tmp_path / 'a "b"'), "disk_capacity": "64MiB"},
        "redis": {"redis": "redis://h:1"},
    }
    given = {k: v for tier in tiers for k, v in every[tier].items()}
    result = run(cli.app, ["config", "check", json.dumps(given)])
    assert result.exit_code == 0
    assert result.stderr == "ok: an engine would start with it\n"
    printed = tmp_path / "printed.toml"
    printed.write_text(result.stdout)
    read = read_toml(str(printed))
    assert {name: read[name] for name in given} == given
    assert (read["chunk_tokens"], read["lookup_deadline_ms"]) == (256, 12.5)
    assert (read["load_deadline"], read["audit_rate"]) == ("auto", 0)
    for tier in ("disk", "redis"):
        assert any(name.startswith(tier) for name in read) is (tier in tiers)
    assert ("redis_ttl" in read) is ("redis" in tiers)
    for word in ("None", "True", "False", "12.50", "record_size", "audit_tolerance"):
        assert word not in result.stdout
    config.load(read)
    unseen = run(cli.app, ["config", "check", "--no-machine", json.dumps(given)])
    assert unseen.stderr == "ok: the settings are right; this machine was not looked at\n"
    secret = run(cli.app, ["config", "check", json.dumps({**given, "tenant": "s3cret"})])
    assert 'tenant = "***"  # not shown\n' in secret.stdout
    as_json = run(cli.app, ["config", "check", "--json", json.dumps(given)])
    assert as_json.stderr == ""
    assert json.loads(as_json.stdout)["effective"]["chunk_tokens"] == 256


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ('{"rom": "1GiB"}', 3, "did you mean 'ram'"),
        ('{"ram": "much"}', 3, "'ram'"),
        ("{}", 3, "no tier"),
        ("{nonsense", 2, "no JSON"),
        ("/nowhere/at/all.toml", 2, "no such file"),
    ],
)
def test_config_check_says_what_is_wrong_in_one_line(source, code, words):
    """3 for a setting that an engine would refuse, 2 for what is no configuration."""
    result = run(cli.app, ["config", "check", source])
    assert result.exit_code == code
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


def test_sizes_and_ages_read_well():
    """Binary units, one digit; ages in the unit that fits."""
    assert [size(n) for n in (0, 1023, 1024, 5 << 30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB"]
    assert [age(0, s) for s in (5, 600, 7200, 172800)] == ["5 s", "10 min", "2 h", "2 d"]


def test_the_command_is_installed_beside_this_python():
    """The script that people call is this package's."""
    script = Path(sys.executable).parent / "kvtier"
    done = subprocess.run(
        [script, "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"kvtier {__version__}\n"
