"""The documentation names every command and option, and its examples run.

A fence of shell commands is run as it stands, in a folder that has what the examples speak of,
unless a line ``<!-- not run: reason -->`` stands before it. Paths and hosts of examples are
replaced by ones that exist here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

import pytest

from kvtier.connector import config
from kvtier.connector.control import ControlServer
from kvtier.connector.lookup import MissReason
from kvtier.connector.metric_table import GAUGE, METRICS
from kvtier.connector.settings import SETTINGS
from kvtier.tools import reference
from kvtier.tools.redis_server import RedisServer

from . import stores
from .stores import Folder, Server
from .test_explain import record, save

REPO = Path(__file__).parents[3]
PAGES = {
    str(path.relative_to(REPO)): path.read_text(encoding="utf-8")
    for path in (REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")))
}
LANGUAGES = {"sh", "text", "json", "toml", "python"}
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\S*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NAMESPACE = bytes.fromhex("3fa9") + bytes(14)
NO_VERBS = {"setting", "key", "record"}  # how messages and a derived key begin
OF_OTHERS = {"--help", "--version", "--kv-transfer-config", "--no-enable-prefix-caching"}
REQUEST = "chatcmpl-8f0a"
SECONDS = 120


@dataclass(frozen=True)
class Fence:
    """A fence of a page."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def is_run(self):
        return self.language == "sh" and not self.mark.startswith("not run: ")

    def __str__(self):
        return f"{self.page}:{self.line}"


def fences():
    for page, text in PAGES.items():
        for found in FENCE.finditer(text):
            line = text[: found.start("language")].count("\n") + 1
            yield Fence(page, line, found["language"], found["mark"] or "", found["text"])


ALL = list(fences())
COMMANDS = dict(reference.commands())


def test_fences_are_found():
    """No fence escapes this test by the way it is written, and each says what it is."""
    for page, text in PAGES.items():
        assert text.count("```") == 2 * sum(fence.page == page for fence in ALL), page
    for fence in ALL:
        assert fence.language in LANGUAGES, fence
        if fence.mark.startswith("not run"):
            assert len(fence.mark) > len("not run: ") + 6, f"{fence}: no reason"
    assert sum(fence.is_run for fence in ALL) >= 8


# -- completeness --------------------------------------------------------------------------


def test_every_command_and_option_is_documented():
    """docs/commands.md is what the commands are; its first lines tell how it is made."""
    assert PAGES["docs/commands.md"] == reference.markdown()


def test_every_command_is_explained_beside_the_reference():
    """What a command is for stands in a page that people read, too."""
    rest = "\n".join(text for page, text in PAGES.items() if page != "docs/commands.md")
    for name in COMMANDS:
        assert re.search(rf"\b{re.escape(name)}\b", rest), name


def test_every_setting_and_metric_is_named():
    """Settings, metrics and reasons of misses: each is in the documentation."""
    for setting in SETTINGS:
        assert f"`{setting.name}`" in PAGES["docs/configuration.md"], setting.name
    for metric in METRICS:
        total = "" if metric.name.startswith(GAUGE) else "_total"
        assert f"`{metric.prometheus_name}{total}`" in PAGES["docs/metrics.md"], metric.name
    for reason in MissReason:
        if reason is not MissReason.NONE:
            assert f"`{reason.value}`" in PAGES["docs/metrics.md"], reason


def mentions():
    """Yield (where, words) of every command that a page writes down, run or not."""
    for page, text in PAGES.items():
        for number, line in enumerate(text.splitlines(), 1):
            for found in re.findall(r"`(kvtier [^`]+)`", line):
                yield f"{page}:{number}", found.split()
    for fence in ALL:
        for line in fence.text.splitlines():
            if line.startswith("kvtier "):
                yield str(fence), line.split("  #")[0].split()


@pytest.mark.parametrize("page", PAGES)
def test_no_command_or_option_is_made_up(page):
    """Whatever command a page writes down exists, with the options that it writes down."""
    for where, words in mentions():
        if not where.startswith(page + ":"):
            continue
        name = " ".join(words[:3]) if words[1] in {"bench", "config"} else " ".join(words[:2])
        if words[1] in NO_VERBS or not re.fullmatch(r"kvtier [a-z]+( [a-z]+)?", name):
            continue
        assert name in COMMANDS, where
        known = {
            spelling
            for option in COMMANDS[name].params
            for spelling in (*option.opts, *option.secondary_opts)
        }
        for word in words:
            option = re.match(r"-{1,2}[a-z][a-z-]*", word)
            if option:
                assert option[0] in known | {"--help"}, f"{where}: {name} {option[0]}"


def test_options_spoken_of_exist():
    """Options that stand alone in the text are of some command, or of vLLM."""
    known = {
        spelling
        for command in COMMANDS.values()
        for option in command.params
        for spelling in (*option.opts, *option.secondary_opts)
    }
    for page, text in PAGES.items():
        for option in re.findall(r"`(--[a-z][a-z-]*)", text):
            assert option in known | OF_OTHERS, f"{page}: {option}"


def test_links_lead_somewhere():
    """Every page and picture that a page links to is there."""
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (REPO / page).parent.joinpath(target).exists(), f"{page}: {target}"


# -- examples ------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", [f for f in ALL if f.language == "json"], ids=str)
def test_json_is_json(fence):
    """One value, or one a line."""
    try:
        json.loads(fence.text)
    except ValueError:
        for line in fence.text.splitlines():
            json.loads(line)


@pytest.mark.parametrize("fence", [f for f in ALL if "--kv-transfer-config" in f.text], ids=str)
def test_settings_in_examples_are_settings(fence):
    """What vLLM is told of kvtier is JSON, names the connector, and has settings that exist."""
    for text in re.findall(r"--kv-transfer-config '(.*?)'", fence.text, re.DOTALL):
        value = json.loads(text)
        assert value["kv_connector"] == "KVTierConnector"
        extra = value["kv_connector_extra_config"]
        if "config" not in extra:
            config.load(extra, check_machine=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all that examples speak of; and what to write in place of paths and hosts."""
    root = tmp_path_factory.mktemp("docs")
    tokens = [int.from_bytes(hashlib.sha256(b"%d" % n).digest()[:2], "little") for n in range(300)]
    (root / "system-prompt.json").write_text(json.dumps(tokens))
    with gzip.open(root / "conversation_trace.jsonl.gz", "wt") as file:
        for n in range(8):
            ids = [0, 1, n + 2]
            line = {"timestamp": 900 * n, "input_length": 1500, "output_length": 5, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    (root / "store").mkdir()
    record(root / "recordings", [(f"{REQUEST}-01ab", tokens, 0)], namespace=NAMESPACE)
    with RedisServer() as server:
        for store in (Folder(root / "store"), Server(server)):
            save(store, tokens, [64, 128, 192, 256, 288], namespace=NAMESPACE)
        engines = [ControlServer(str(root / "store" / "control")), ControlServer(str(root / "run"))]
        stop = threading.Event()
        helper = threading.Thread(target=answer, args=(engines, stop))
        helper.start()
        try:
            yield (
                root,
                {
                    "/nvme/kvtier": str(root / "store"),
                    "/var/lib/kvtier/recordings": str(root / "recordings"),
                    "redis://cache:6379/0": server.url,
                    "/run/kvtier": str(root / "run"),
                },
            )
        finally:
            stop.set()
            helper.join()
            for engine in engines:
                engine.close()


def answer(engines, stop):
    """Do what an engine does with a wish, without one."""
    while not stop.wait(0.02):
        for engine in engines:
            try:
                wish = engine.wishes.get_nowait()
            except Empty:
                continue
            wish.begin()
            wish.count("loaded", len(wish.keys))
            wish.end("done")


@pytest.mark.parametrize("fence", [f for f in ALL if f.is_run], ids=str)
def test_examples_run(fence, place, monkeypatch):
    """Every command of the example ends with 0."""
    root, here = place
    monkeypatch.chdir(root)
    text = fence.text
    for theirs, ours in here.items():
        text = text.replace(theirs, ours)
    lines = text.splitlines()
    if all(line.startswith("kvtier ") for line in lines):
        for line in lines:
            code, _, err = stores.here(*shlex.split(line, comments=True)[1:])
            assert code == 0, f"{line}: {err}"
        return
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
