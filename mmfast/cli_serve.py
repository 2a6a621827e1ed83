"""`mmfast serve`: every field of `ServerConfig` is an option."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig

_EXTRAS = {"fastapi", "uvicorn", "pydantic", "starlette", "websockets", "prometheus_client"}
_NAMES = {"api_keys": "--api-key", "remote_hosts": "--remote-host"}  # given several times


def serve(config: str | None = None, dry_run: bool = False, **flags: Any) -> None:
    """Answer questions over HTTP as OpenAI's API has it: chat, speech and realtime.

    Every option is also MMFAST_<OPTION> in the environment, and a key in the file of --config.
    """
    from mmfast.cli_output import print_json, quiet
    from mmfast.serve.config_sources import resolve

    lists = {name: tuple(flags[name]) if flags[name] else None for name in _NAMES}
    resolved = resolve({**flags, **lists}, config)
    _check_specs(resolved)
    if dry_run:
        return print_json(resolved.public())
    quiet()
    try:
        from mmfast.serve.guard.keys import loopback
        from mmfast.serve.http.run import bind, url_of
        from mmfast.serve.http.run import serve as run
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise MmfastError(
            f'mmfast serve needs {error.name}, which is not installed; pip install "mmfast[serve]"'
        ) from error
    listening = bind(resolved)
    _logs(resolved)
    url = url_of(listening)
    if not (resolved.api_keys or loopback(resolved.host)):
        _say("warning: whoever reaches this port may ask, without a key; give --api-key")
    _say(f"listening on {url} · loading the model …")
    run(resolved, listening, lambda: _say(_welcome(url, resolved)))
    _say("stopped")


def _check_specs(config: ServerConfig) -> None:
    """Refuse wrong specs before anything is loaded."""
    if config.model is not None and config.model.startswith((".", "/", "~")):
        path = Path(config.model).expanduser()
        if not (path / "config.json").is_file():
            raise MmfastError(f"model {config.model!r} is no directory of a checkpoint; give one")
    if config.reduce is not None:
        from mmfast.core.spec import parse

        parse(config.reduce)
    if config.cache is not None:
        from mmfast.models.kv_plan import call_plan

        call_plan(config.cache)


def _logs(config: ServerConfig) -> None:
    from mmfast.serve.guard.logs import set_up

    set_up(config)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _welcome(url: str, config: ServerConfig) -> str:
    from mmfast.serve.engine.choose import name_of

    key = ' -H "Authorization: Bearer $MMFAST_API_KEY"' if config.api_keys else ""
    body = (
        f'{{"model": "{name_of(config)}", "messages": [{{"role": "user", "content": "Hello?"}}]}}'
    )
    lines = [
        f"ready: {url}/v1 (described by {url}/openapi.json"
        + (f", demo at {url}/demo)" if config.demo else ")"),
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
    ]
    return "\n".join(lines)


def _parameters() -> list[inspect.Parameter]:
    """An option per field, its help from the docstring; what is not given stays None."""
    from mmfast.serve.config_sources import helps, types_of

    texts, types = helps(), types_of()
    keyword = inspect.Parameter.KEYWORD_ONLY
    found = [
        _option("config", str, "--config", "TOML file of options."),
        inspect.Parameter(
            "dry_run",
            keyword,
            default=False,
            annotation=Annotated[
                bool, typer.Option("--dry-run", help="Print all options and stop.")
            ],
        ),
    ]
    for each in fields(ServerConfig):
        flag = _NAMES.get(each.name, "--" + each.name.replace("_", "-"))
        kind: Any = types[each.name]
        if kind is bool:
            flag += f"/--no-{each.name.replace('_', '-')}"
        shown = f" [{each.default}]" if each.default not in (None, ()) else ""
        kind = list[str] if kind is tuple else kind
        found.append(_option(each.name, kind, flag, texts.get(each.name, "") + shown))
    return found


def _option(name: str, kind: Any, flag: str, text: str) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer.Option(flag, help=text)],
    )


def _with_options(function: Any) -> Any:
    parameters = _parameters()
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    return function


serve = _with_options(serve)
