"""The `kvtier` command. Heavy modules are imported by the verb that needs them."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from .bench_commands import bench
from .exit_codes import EXIT_CODES_HELP, ExitCode
from .inspect_commands import add_inspect_verbs
from .pin_commands import add_pin_verbs
from .plan_commands import add_planning_verbs
from .reporting import finish, print_json, reported
from .soak_commands import add_soak_verb
from .store_commands import add_store_verbs
from .warm_commands import add_warm_verb

app = typer.Typer(
    name="kvtier",
    help=f"Look into kvtier's stores, check configurations, see it work.\n\n{EXIT_CODES_HELP}",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Configurations of the connector.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(bench, name="bench")
add_store_verbs(app)
add_pin_verbs(app)
add_warm_verb(app)
add_inspect_verbs(app)
add_planning_verbs(app)
add_soak_verb(app)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _show_version(value: bool) -> None:
    if value:
        from .. import __version__

        print(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Take the options of the command itself."""


@config_app.command("check", epilog=EXIT_CODES_HELP)
@reported
def config_check(
    source: Annotated[
        str, typer.Argument(metavar="FILE-OR-JSON", help="A TOML or JSON file, or JSON itself.")
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of one engine (TP x PP).", min=1)] = 1,
    machine: Annotated[
        bool, typer.Option(help="Also check paths and memory of this machine.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Check a configuration as an engine's start would.

    Prints what would be in force.
    """
    from .config_check import check_config

    finish(check_config(source, n_ranks=ranks, machine=machine, as_json=as_json))


class _BareRedis(TyperCommand):
    """A command whose ``--redis`` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare ``--redis`` its value, then parse as ever."""
        at = args.index("--redis") + 1 if "--redis" in args else 0
        if at and (at == len(args) or args[at].startswith("-")):
            args = [*args[:at], "start", *args[at:]]
        return super().parse_args(ctx, args)


@app.command(epilog=EXIT_CODES_HELP, cls=_BareRedis)
@reported
def demo(
    model: Annotated[
        Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
        typer.Option(help="Model folder or name; by default SmolLM2-135M-Instruct."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of weights and KV, as vLLM's --dtype.")
    ] = "float32",
    disk: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Folder of the disk tier, kept; by default a temporary one."),
    ] = None,
    redis: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="[URL]", help="Redis instead of a disk; without a URL a server of its own."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run agent sessions in vLLM, with and without kvtier.

    In the real engine, and after a restart, too.
    """
    from .demo import DemoOptions, run_demo
    from .demo_view import DemoView

    options = DemoOptions(model=model, dtype=dtype, disk=disk, redis=redis)
    options.check()
    with DemoView(quiet=as_json) as view:
        report = run_demo(options, view)
        view.summary(report)
    if as_json:
        print_json(report.as_dict())
    finish(ExitCode.FAILURE if report.problems else ExitCode.OK)


def main() -> None:
    """Run the command line."""
    app()
