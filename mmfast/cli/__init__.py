"""The command `mmfast`.

A command is a function of a module in this package, named in `COMMANDS`. The module is imported
when it is called, and the module imports the heavy parts when the function runs, so that
`mmfast --help` and completion are instant. Results go to standard output, progress and the
decoration of tables to standard error.
"""

from __future__ import annotations

import ast
import getpass
import importlib
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mmfast import __version__
from mmfast.core.errors import MmfastError, refused, unknown

# Saved results of the running command: their number by what and where they are, for Ctrl-C.
KEPT: Counter[str] = Counter()
_WIDE = ("seed", "bytes", "pixels")  # ends of options that take larger numbers than others
BARE = "compare"  # an option that may stand without a value
# Module and function of each command, in the order of `mmfast --help`.
COMMANDS = {
    "ask": ("ask", "ask"),
    "batch": ("ask", "batch"),
    "demo": ("serve", "demo"),
    "watch": ("watch", "watch"),
    "say": ("voice", "say"),
    "serve": ("serve", "serve"),
    "talk": ("voice", "talk"),
    "transcribe": ("voice", "transcribe"),
    "translate": ("voice", "translate"),
    "codec": ("codec", "codec"),
    "methods": ("info", "methods"),
    "doctor": ("info", "doctor"),
    "verify": ("info", "verify"),
    "eval": ("measure", "evaluate"),
    "bench": ("measure", "bench"),
    "leaderboard": ("leaderboard", "leaderboard"),
    "plan": ("plan", "plan"),
    "profile": ("profile", "profile"),
    "peers": ("peers", "peers"),
    "calibrate": ("calibrate", "calibrate"),
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
        return name, found and load(str(name)), _with_spec(rest) if name == "ask" else rest


class FilledCommand(TyperCommand):
    """A command that refuses options that mean nothing: empty ones, and numbers out of reach.

    Empty are those of variables that the shell lacks.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; MmfastError for an option that is given and means nothing."""
        for param in self.params:
            value, source = ctx.params.get(param.name), ctx.get_parameter_source(param.name)
            given = source is not None and source.name == "COMMANDLINE"
            given = given and param.param_type_name == "option"
            values = value if isinstance(value, list | tuple) else [value]
            empty = any(isinstance(each, str) and not each.strip() for each in values)
            if given and empty and param.name != BARE:
                raise MmfastError(f"{param.opts[0]} is empty; give a value, or leave it out")
            for each in values if given else ():
                _check_reach(param.opts[0], each)
        return super().invoke(ctx)


def _check_reach(option: str, value: Any) -> None:
    """Refuse (MmfastError) a number of another order of magnitude than all that it can mean."""
    if isinstance(value, float) and not math.isfinite(value):
        raise MmfastError(f"{option} {value} is no finite number; give one, or leave it out")
    most = 2**63 - 1 if option.endswith(_WIDE) else 10**9
    if isinstance(value, int | float) and abs(value) > most:
        raise MmfastError(f"{option} {value} is out of reach; give at most {most:,}")


def load(name: str) -> Any:
    """Import a command."""
    module, function = COMMANDS[name]
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=FilledCommand, context_settings=_SETTINGS)(
        getattr(importlib.import_module(f"mmfast.cli.{module}"), function)
    )
    return typer.main.get_command(single)


def _with_spec(args: list[str]) -> list[str]:
    """Give `--compare` the empty spec where none follows: an option cannot have both forms."""
    from mmfast.core.registry import listed

    place = args.index(f"--{BARE}") if f"--{BARE}" in args else len(args)
    behind = next(iter(args[place + 1 :]), "-")
    alone = not any(each.startswith(("--reduce", "--cache")) for each in args)
    if (
        place == len(args)
        or re.split("[@:?+]", behind)[0] in {method.name for method in listed()}
        or (alone and not behind.startswith("-"))
    ):
        return args
    return [*args[:place], f"--{BARE}=", *args[place + 1 :]]


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
    """Entry point: 0 fine, 1 a check failed, 2 bad usage or input, 130 and 143 interrupted."""
    # click's UsageError, wherever this typer keeps it
    usage_error: type[typer.BadParameter] = typer.BadParameter.__bases__[0]
    KEPT.clear()
    _open_closed()
    plain: Any = warnings.formatwarning
    warnings.formatwarning = _warning  # type: ignore[assignment]  # no use for the place
    with _terminated() as signals:
        try:
            _check_folder()
            _name_user()
            code = app(args=args, prog_name="mmfast", standalone_mode=False)
            sys.stdout.flush()  # a full disk shows here, not when the interpreter ends
        except MmfastError as error:
            code = _fail(str(error))
        except usage_error as error:
            code = _fail(_usage(error, sys.argv[1:] if args is None else args))
        except BrokenPipeError:  # of `| head`, which has read enough
            code = _stop_output(1)
        except OSError as error:
            code = _stop_output(_fail(refused(error)))
        except (typer.Abort, KeyboardInterrupt):
            code = 130
        finally:
            warnings.formatwarning = plain
    if code == 130:  # versions of typer raise or return on Ctrl-C
        kept = "".join(f"; {number} {what}" for what, number in KEPT.items())
        print(f"mmfast: {'terminated' if signals else 'interrupted'}{kept}", file=sys.stderr)
        code = 143 if signals else 130
    sys.exit(code if isinstance(code, int) else 0)


def _open_closed() -> None:
    """Open what the caller has closed of the standard files, which the next file would replace.

    Letters that the encoding of the output lacks are escaped, as those of errors always are.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _stop_output(code: int) -> int:
    """Return the code, and write what is left nowhere: the interpreter would fail on it again."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    return code


def _check_folder() -> None:
    """Refuse a folder that is gone, in which libraries below torch abort the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise MmfastError("the current folder was deleted; change to one that exists") from None


def _name_user() -> None:
    """Name a user without a name, as containers have: torch asks for it when it is imported."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = str(os.getuid())


@contextmanager
def _terminated() -> Iterator[list[float]]:
    """Let SIGTERM end a command as Ctrl-C does; yields the times at which it came."""
    came: list[float] = []

    def stop(*_: object) -> None:
        came.append(time.monotonic())
        if len(came) == 1 or came[-1] - came[-2] > 1:  # timeout(1) sends two at once
            raise KeyboardInterrupt

    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield came
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _usage(error: Any, args: list[str]) -> str:
    """Return a usage error with the nearest option, and the command whose help says more."""
    context, text = error.ctx, error.format_message()
    if type(error).__name__ == "NoSuchOption" and context is not None:
        known = (name for each in context.command.params for name in each.opts)
        text = unknown("option", error.option_name, [n for n in known if n.startswith("-")])
    found: Any = getattr(error.__cause__, "errors", list)()  # typer leaves out the value
    if found:
        text = text.replace("Invalid value for", f"Invalid value {found[0]['input']!r} for", 1)
    if "requires 2 arguments" in text:  # `bench --compare` alone; its context is not known here
        kind = "leaderboard.json files" if "leaderboard" in args else "files of rows"
        text = f"{text.rstrip('.')}: two {kind}, the older one first"
    # An option without its value comes without a context.
    called = " ".join(["mmfast", *(args[:1] if args[:1] and args[0] in COMMANDS else ())])
    return f"{text} (see {context.command_path if context else called} --help)"


def _warning(message: Any, *_: Any) -> str:
    """Write a warning in one line: the place in the code says nothing at a prompt."""
    return f"mmfast: warning: {' '.join(str(message).split())}\n"


def _fail(message: str) -> int:
    print("mmfast: error: " + " ".join(message.split()), file=sys.stderr)
    return 2
