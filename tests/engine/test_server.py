"""A real vLLM server with kvtier, soaked and watched from outside, as its users do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from kvtier.connector.metric_table import METRICS
from kvtier.tools import cli
from kvtier.tools.scrape import scrape

from . import models

START_S = 300.0
RIGHT_ANSWERS = 14  # of the second test: ten to learn noise and server, then four turns
DEVICE_BLOCKS = 48  # of 32 tokens: less than the sessions have


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yield (URL, process id, folders) of a server over a tiny model with a tokenizer of bytes."""
    root = tmp_path_factory.mktemp("server")
    model = root / "model"
    shutil.copytree(models.LLAMA.folder(), model)
    byte_tokenizer().save_pretrained(model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "ram": "6MiB", "disk": str(root / "store"), "disk_capacity": "64MiB", "chunk_tokens": 128,
        "load_policy": "always", "record": str(root / "recording"),
    }  # fmt: skip
    transfer = {
        "kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.connector",
        "kv_role": "kv_both", "kv_connector_extra_config": settings,
    }  # fmt: skip
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip
    log = root / "server.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
             "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
             "--dtype", "float32", "--max-model-len", "1024", "--block-size", "32",
             "--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--enforce-eager",
             "--kv-transfer-config", json.dumps(transfer)],
            stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, process, log)
        yield url, process.pid, root
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session: the engine's process, too
        process.wait()


def byte_tokenizer():
    """A tokenizer that needs no files of anybody: a token for each byte."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(BPE(vocab={letter: 2 + i for i, letter in enumerate(letters)}, merges=[]))
    bare.add_special_tokens(["<s>", "</s>"])
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>")


def wait_for(url, process, log):
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def run(*arguments, code=0):
    done = CliRunner().invoke(cli.app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, (done.stdout[-3000:], done.stderr[-3000:], done.exception)
    return json.loads(done.stdout)


def test_a_server_is_soaked_watched_and_explained(server, tmp_path, monkeypatch):
    """Right answers through RAM and disk and a damaged record; `top` and `explain` agree."""
    monkeypatch.setenv("KVTIER_CACHE", str(tmp_path / "cache"))
    url, pid, root = server
    store = root / "store"
    found = run(
        "soak", "--url", url + "/v1", "--pid", pid, "--minutes", "0.45", "--report",
        tmp_path / "report", "--sessions", 3, "--turns", 2, "--context-tokens", 900,
        "--dtype", "float32", "--aborts", "0.4", "--faults", "disk-corrupt",
        "--kvtier", json.dumps({"disk": str(store)}),
    )  # fmt: skip
    assert found["ok"]
    log = (root / "server.log").read_text()
    for line in ("kvtier: settings ", "kvtier: namespace "):  # in vLLM's form: level and time
        assert re.search(rf"INFO [\d: -]+\[[^]]*\] {line}", log), line
    assert found["setup"]["model"] == "tiny"
    traffic = found["traffic"]
    assert traffic["wrong"] == 0
    assert traffic["answered"] > 6
    assert traffic["aborted"] > 0
    assert traffic["tokens"].get("ram", 0) + traffic["tokens"].get("disk", 0) > 0
    assert traffic["tokens"]["device"] > 0
    assert found["noise"]["repeats"] > 0
    assert found["samples"][-1]["rss_bytes"] > 1 << 28  # the engine's process, a child
    assert found["samples"][-1]["disk_bytes"] > 0
    assert found["faults"][0]["failed"] is None
    assert {row["kvtier_s"] is None for row in found["ttft_by_turn"]} == {False}

    page = scrape(f"{url}/metrics")
    ours = {name for name in page.names() if name.startswith("kvtier:")}
    known = {metric.prometheus_name for metric in METRICS}
    assert {n.removesuffix("_total").removesuffix("_created") for n in ours} <= known
    seen = run("top", url, "--once", "--every", "0.2")
    assert seen["tokens"]["restored"] == page.total("kvtier:hit_tokens_total")
    assert {tier["tier"] for tier in seen["tiers"]} == {"ram", "disk"}
    assert all(tier["breaker"] == "closed" for tier in seen["tiers"])

    prompt = [5 + i % 200 for i in range(300)]
    asked = ask(url, prompt)
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(prompt))
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:  # written behind
        (verdict,) = run("explain", store, path)["namespaces"]
        if verdict["hit_tokens"] >= 288:
            break
        time.sleep(0.2)
    assert (verdict["hit_tokens"], verdict["reason"]) == (288, "none")
    told = run("explain", store, "--request", asked["id"], "--recording", root / "recording")
    assert told["request"]["miss"] == "not_stored"
    assert told["namespaces"][0]["hit_tokens"] == 288


def ask(url, prompt):
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 2}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def answered(url):
    return scrape(f"{url}/metrics").total("vllm:request_success_total")


def test_a_server_that_is_killed_ends_a_soak_with_a_report(server, tmp_path, monkeypatch):
    """In the middle of answers: exit code 1, one finding that says so, a report. The last test."""
    monkeypatch.setenv("KVTIER_CACHE", str(tmp_path / "cache"))
    url, pid, _ = server
    before = answered(url)

    def kill():
        while answered(url) < before + RIGHT_ANSWERS + 4:
            time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    found = run(
        "soak", "--url", url, "--minutes", "5", "--report", tmp_path / "report", "--sessions", 2,
        "--turns", 2, "--context-tokens", 400, "--dtype", "float32", code=1,
    )  # fmt: skip
    assert found["findings"][0]["kind"] == "cut_short"
    assert {row["kind"] for row in found["findings"]} <= {"cut_short", "nothing_restored"}
    assert found["traffic"]["answered"] > 0
    assert (tmp_path / "report" / "report.html").exists()
