"""Every command with its options, as a page: ``python -m kvtier.tools.reference``.

Made from the commands themselves; `docs/commands.md` is its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from .cli import app
from .exit_codes import MEANING


def commands() -> Iterator[tuple[str, Any]]:
    """Yield name and command of every verb, groups opened up, by name."""
    root: Any = typer.main.get_command(app)
    for name, command in sorted(root.commands.items()):
        inner = getattr(command, "commands", None)
        if inner is None:
            yield f"kvtier {name}", command
        else:
            yield from ((f"kvtier {name} {sub}", inner[sub]) for sub in sorted(inner))


def spelling(option: Any) -> str:
    """Return an option as people type it, with what goes after it."""
    names = ", ".join(option.opts)
    if option.secondary_opts:
        names += " / " + ", ".join(option.secondary_opts)
    if getattr(option, "is_flag", False):
        return names
    return f"{names} {option.metavar or 'VALUE'}"


def markdown() -> str:
    """Return the page."""
    lines = [
        "# Commands",
        "",
        "Every command and every option, as `--help` tells them. What they are for is in",
        "[inspecting.md](inspecting.md), [replay-and-plan.md](replay-and-plan.md),",
        "[soak.md](soak.md) and [performance.md](performance.md). This page is made by",
        "`python -m kvtier.tools.reference`.",
        "",
        "| exit code | means |",
        "| --- | --- |",
        *(f"| {code.value} | {meaning} |" for code, meaning in MEANING.items()),
        "",
        "`kvtier --version` prints the version, `kvtier --install-completion` sets up completion",
        "for the shell, `kvtier --show-completion` prints what it would set up.",
    ]
    for name, command in commands():
        lines += ["", f"## {name}", "", *_command(command)]
    return "\n".join(lines) + "\n"


def _command(command: Any) -> list[str]:
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-")]
    lines = [_cell(command.help)]
    if arguments:
        lines += ["", "| argument | meaning |", "| --- | --- |"]
        for argument in arguments:
            name = argument.metavar or argument.name.upper()
            name = name if argument.required else f"[{name}]"
            lines.append(f"| `{name}` | {_cell(argument.help)}{_default(argument)} |")
    if options:
        lines += ["", "| option | meaning |", "| --- | --- |"]
        lines += [f"| `{spelling(o)}` | {_cell(o.help)}{_default(o)} |" for o in options]
    return lines


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _default(param: Any) -> str:
    if param.default is None or param.default == "" or isinstance(param.default, bool):
        return ""
    return f" Default: `{getattr(param.default, 'value', param.default)}`."


if __name__ == "__main__":
    print(markdown(), end="")
