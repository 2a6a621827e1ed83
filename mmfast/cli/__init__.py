"""The command `mmfast`.

A command is a function of a module in this package, named in `COMMANDS`. The module is imported
when it is called, and the module imports the heavy parts when the function runs, so that
`mmfast --help` and completion are instant. Results go to standard output, progress and the
decoration of tables to standard error.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mmfast import __version__
from mmfast.core.errors import MmfastError

# Module and function of each command, in the order of `mmfast --help`.
COMMANDS = {
    "ask": ("ask", "ask"),
    "batch": ("ask", "batch"),
    "demo": ("serve", "demo"),
    "watch": ("watch", "watch"),
    "say": ("voice", "say"),
    "serve": ("serve", "serve"),
    "talk": ("voice", "talk"),
    "methods": ("info", "methods"),
    "doctor": ("info", "doctor"),
    "verify": ("info", "verify"),
    "eval": ("measure", "evaluate"),
    "bench": ("measure", "bench"),
    "plan": ("plan", "plan"),
}


class CommandGroup(TyperGroup):
    """The commands by name; the one that is called is imported, of the others the help is read."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = dict.fromkeys(COMMANDS)  # names only, for suggestions

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a stand-in with the help of a command, which costs no import."""
        if name not in COMMANDS:
            return None
        return TyperCommand(name, help=_help(*COMMANDS[name]))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command itself."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and load(str(name)), rest


def load(name: str) -> Any:
    """Import a command."""
    module, function = COMMANDS[name]
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, context_settings=_SETTINGS)(
        getattr(importlib.import_module(f"mmfast.cli.{module}"), function)
    )
    return typer.main.get_command(single)


def _help(module: str, function: str) -> str:
    """Return the docstring of a function in a module that is not imported."""
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    nodes = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return next(ast.get_docstring(node) or "" for node in nodes if node.name == function)


_SETTINGS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=CommandGroup,
    name="mmfast",
    help="Image, video and speech models that answer sooner, remember longer and cost less.",
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)


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
