"""`mmfast`: ask, watch, say, talk, serve, demo, batch, methods, doctor, verify, eval, bench, plan.

The commands live in `cli_<topic>.py`; a new one is a function there and a line below. Every
command imports what it needs itself, so that `mmfast --help` and completion stay instant.
Results go to standard output, progress and tables' ornaments to standard error.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mmfast import __version__
from mmfast.cli.ask import ask, batch
from mmfast.cli.info import doctor, methods, verify
from mmfast.cli.measure import bench, evaluate
from mmfast.cli.plan import plan
from mmfast.cli.serve import demo, serve
from mmfast.cli.voice import say, talk
from mmfast.cli.watch import watch
from mmfast.core.errors import MmfastError

app = typer.Typer(
    name="mmfast",
    help="Image, video and speech models that answer sooner, remember longer and cost less.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(ask)
app.command()(batch)
app.command()(demo)
app.command()(watch)
app.command()(say)
app.command()(serve)
app.command()(talk)
app.command()(methods)
app.command()(doctor)
app.command()(verify)
app.command(name="eval")(evaluate)
app.command()(bench)
app.command()(plan)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: list[str] | None = None) -> None:
    """Entry point: 0 fine, 1 a check failed, 2 bad usage or input, 130 interrupted."""
    # click's UsageError, wherever this typer keeps it
    usage_error: type[typer.BadParameter] = typer.BadParameter.__bases__[0]
    try:
        code = app(args=args, prog_name="mmfast", standalone_mode=False)
    except MmfastError as error:
        code = _fail(str(error))
    except usage_error as error:
        code = _fail(f"{error.format_message()} (see mmfast --help)")
    except typer.Abort:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    print("mmfast: error: " + " ".join(message.split()), file=sys.stderr)
    return 2
