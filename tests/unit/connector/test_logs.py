"""kvtier's lines appear where vLLM's do, and where the application wants them."""

import io
import logging

import pytest

from kvtier.connector.logs import use_engine_log


@pytest.fixture
def loggers(monkeypatch):
    """Return what vLLM's logger writes to; it and kvtier's are as new."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    for name, handlers, level in (
        ("kvtier", [], logging.NOTSET),
        ("vllm", [handler], logging.INFO),
    ):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", handlers)
        monkeypatch.setattr(logger, "level", level)
        monkeypatch.setattr(logger, "propagate", name != "vllm")
    # Levels are cached by logger.
    logging.getLogger("kvtier")._cache.clear()
    logging.getLogger("kvtier.part")._cache.clear()
    yield out
    for name in ("kvtier", "kvtier.part", "vllm"):
        logging.getLogger(name)._cache.clear()


def test_lines_of_every_level_appear_once_in_vllms_form(loggers, monkeypatch):
    """Also those below WARNING, however often an engine is made, whatever collects later."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    use_engine_log()
    use_engine_log()
    later = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(later)])
    logging.getLogger("kvtier.part").info("a namespace")
    logging.getLogger("kvtier.part").warning("a tier is off")
    logging.getLogger("kvtier.part").debug("nothing")
    assert loggers.getvalue() == "INFO a namespace\nWARNING a tier is off\n"
    assert later.getvalue() == ""


def test_an_application_that_collects_at_the_root_gets_them_there_alone(loggers, monkeypatch):
    """As many as vLLM's level lets pass, and once."""
    out = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(out)])
    use_engine_log()
    logging.getLogger("kvtier.part").info("a namespace")
    assert (out.getvalue(), loggers.getvalue()) == ("a namespace\n", "")


@pytest.mark.parametrize("how", ["handler", "level", "vllm leaves it alone", "errors"])
def test_what_somebody_has_set_up_stays(loggers, monkeypatch, how):
    """Their handler, their level; and nothing where vLLM has none, or says errors only."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ours, out = logging.getLogger("kvtier"), io.StringIO()
    if how == "handler":
        ours.addHandler(logging.StreamHandler(out))
    elif how == "level":
        ours.setLevel(logging.ERROR)
    elif how == "errors":
        logging.getLogger("vllm").setLevel(logging.ERROR)
    else:
        logging.getLogger("vllm").handlers.clear()
    before = (list(ours.handlers), ours.level, ours.propagate)
    use_engine_log()
    assert (ours.handlers, ours.level, ours.propagate) == before
