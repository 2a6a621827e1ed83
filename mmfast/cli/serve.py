"""`mmfast serve`, whose options are the fields of `ServerConfig`, and `mmfast demo`."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from mmfast.cli.options import Device, Dtype, Json, Model
from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig, helps, resolve, types_of

_EXTRAS = {"fastapi", "uvicorn", "pydantic", "starlette", "websockets", "prometheus_client"}
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be served, and stop.")]
# given several times
_NAMES = {"api_keys": "--api-key", "remote_hosts": "--remote-host", "lora": "--lora"}


def serve(
    config: str | None = None, dry_run: bool = False, as_json: bool = False, **flags: Any
) -> None:
    """Answer questions over HTTP as OpenAI's API has it: chat, speech and realtime.

    Every option is also MMFAST_<OPTION> in the environment, and a key in the file of --config.
    """
    from mmfast.cli.output import print_json, print_rows
    from mmfast.models.quiet import quiet

    lists = {name: tuple(flags[name]) if flags[name] else None for name in _NAMES}
    resolved = resolve({**flags, **lists}, config)
    _check_specs(resolved)
    if dry_run and as_json:
        return print_json(resolved.public())
    if dry_run:
        return print_rows(("would serve", ""), _plan(resolved))
    if as_json:
        raise MmfastError("--json prints what --dry-run would serve; give both, or neither")
    quiet()
    if resolved.engine == "vllm":
        from mmfast.vllm.launch import launch

        launch(resolved, lambda: _warn_if_open(resolved))
    if resolved.engine == "ray":
        from mmfast.serve.ray.cluster import imported

        imported("--engine ray", "ray")  # a missing extra is told before anything is loaded
    try:
        from mmfast.serve.guard.logs import set_up
        from mmfast.serve.http.run import bind, url_of
        from mmfast.serve.http.run import serve as run
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise MmfastError(
            f'mmfast serve needs {error.name}, which is not installed; pip install "mmfast[serve]"'
        ) from error
    listening = bind(resolved.host, resolved.port)
    set_up(resolved)
    url = url_of(listening)
    _warn_if_open(resolved)
    _say(f"listening on {url} · loading the model …")
    run(resolved, listening, lambda: _say(_welcome(url, resolved)))
    _say("stopped")


# Options that `--dry-run` shows although they are the defaults, and what None means.
_SHOWN = {"engine": "", "slots": "", "queue": "", "max_tokens": "", "max_media": "", "context": ""}
_SHOWN |= {
    "model": "tiny-scenes (embedded)",
    "reduce": "all tokens",
    "cache": "all keys and values",
}


def _plan(config: ServerConfig) -> list[tuple[str, object]]:
    given, plain = config.public(), ServerConfig().public()
    names = [name for name in given if name in _SHOWN or given[name] != plain[name]]
    kinds = [f"{given[f'{kind}_replicas']} {kind}" for kind in ("encode", "prefill", "decode")]
    kinds = [f"{config.replicas} with the whole engine"] if config.replicas else kinds
    kinds = [f"{config.workers} whose roles follow the load"] if config.workers else kinds
    kinds = ["vLLM's own server"] if config.engine == "vllm" else kinds
    host = f"[{config.host}]" if ":" in config.host else config.host
    return [
        *((k, (_SHOWN[k] or "of the model") if given[k] is None else given[k]) for k in names),
        ("workers", "this process" if config.engine == "inproc" else ", ".join(kinds)),
        ("URL", f"http://{host}:{config.port or '<a free port>'}/v1"),
    ]


def _check_auto(config: ServerConfig) -> None:
    """Refuse plans where no process has the whole model, and checks beside a cache policy."""
    if not (config.engine == "inproc" or (config.engine == "ray" and config.replicas)):
        raise MmfastError(
            f"--reduce {config.reduce!r} plans every request on the whole model; name a reducer, "
            "or take --engine inproc, or ray with --replicas"
        )
    from mmfast.planner.target import Target, automatic

    automatic(config.reduce, Target(), config.cache)


def _warn_if_open(config: ServerConfig) -> None:
    from mmfast.serve.guard.caller import loopback

    if not (config.api_keys or loopback(config.host)):
        _say("warning: everyone who reaches this port may ask without a key; give --api-key")


def _check_specs(config: ServerConfig) -> None:
    """Refuse wrong specs before anything is loaded."""
    from mmfast.core.registry import listed
    from mmfast.core.sizes import parse_bytes
    from mmfast.core.spec import check_names, is_auto, parse

    check_names([config.reduce], [config.cache], [config.prefill])
    parse_bytes(config.reuse_memory, "--reuse-memory ")
    if parse_bytes(config.memory, "--memory ") == 0:
        raise MmfastError(f"--memory {config.memory!r} holds no answer; give a size such as 2GB")
    if auto := is_auto(config.reduce):
        _check_auto(config)
    _check_places(config)
    if config.cache is not None:
        from mmfast.caches.plan import call_plan

        call_plan(config.cache)
    if config.reuse is not None:
        from mmfast.caches.plan import call_plan
        from mmfast.streams.reuse.plan import check_beside, parse_reuse

        plan, cached = parse_reuse(config.reuse), call_plan(config.cache)
        check_beside(plan, None if auto else config.reduce, cached, prefill=config.prefill)
    if config.prefill is not None:
        from mmfast.prefill.plan import plan_prefill

        plan_prefill(config.prefill)
    if config.decode is not None:
        from mmfast.decoding.speculation import check_kind, check_place, plan_decode

        drafts = plan_decode(config.decode)
        check_kind(drafts)
        check_place(drafts)
    if config.engine == "ray" and not config.replicas:
        specs = parse(config.reduce, among=listed("reducer"))
        whole = config.cache or config.prefill or config.decode
        if whole or any(s.site not in ("pixel", "pre") for s in specs):
            from mmfast.serve.ray.engine import check_parts

            check_parts(config.reduce, config.cache, config.prefill, config.decode)
    if config.engine == "vllm":
        if config.attn is not None:
            raise MmfastError("--attn: vLLM chooses its attention itself; leave it out")
        from mmfast.vllm.launch import command

        command(config)
    elif config.weights is not None:
        from mmfast.serve.engine.model import check_form

        check_form(config.weights, config.lora)
    if config.attn is not None:
        from mmfast.models.attention import check_attn

        check_attn(config.attn)


def _check_places(config: ServerConfig) -> None:
    """Refuse models that are not there; a hub id is looked up when it is loaded."""
    from mmfast.core.files import check_directory

    given = [config.speech, config.listener, config.talker, config.translator]
    given += [] if config.engine == "vllm" else [config.model]  # which knows its own
    for where in filter(None, given):
        embedded = files("mmfast.assets") / "models" / where / "config.json"
        if not (embedded.is_file() or (Path(where) / "adapter_config.json").is_file()):
            check_directory(where)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _welcome(url: str, config: ServerConfig) -> str:
    from mmfast.serve.http.service import name_of

    key = ' -H "Authorization: Bearer $MMFAST_API_KEY"' if config.api_keys else ""
    content = '"Hello?"'
    if config.model is None:  # it knows nothing but what it sees
        from mmfast.demos.examples import CLIPS

        read = f"base64 < {quote(str(CLIPS / 'picture.jpg'))} | tr -d '\\n'"
        picture = f"data:image/jpeg;base64,'$({read})'"
        content = f'[{{"type": "image_url", "image_url": {{"url": "{picture}"}}}}, '
        content += '{"type": "text", "text": "What colour is the square?"}]'
    asked = f'"model": "{name_of(config)}", "messages": [{{"role": "user", "content": {content}}}]'
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json'"
    page = f", demo at {url}/demo" if config.demo else ""
    return f"ready: {url}/v1 (described by {url}/openapi.json{page})\n  {curl} -d '{{{asked}}}'"


def _parameters() -> list[inspect.Parameter]:
    """Return an option per field, with help from its docstring; its default is None."""
    texts, types = helps(), types_of()
    keyword = inspect.Parameter.KEYWORD_ONLY
    found = [
        _option("config", str, "--config", "TOML file of options."),
        inspect.Parameter("dry_run", keyword, default=False, annotation=_DryRun),
        inspect.Parameter("as_json", keyword, default=False, annotation=Json),
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


HOST, PORT = "127.0.0.1", 7860


def demo(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = PORT,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = "auto",
    share: Annotated[
        bool, typer.Option("--share", help="A public address through gradio.live: not private.")
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Serve the demo page: ask, compare, watch, talk; nothing leaves this machine."""
    from mmfast.models.quiet import quiet

    quiet()
    app, shelf = _application(model, device, dtype)
    from mmfast.serve.http.run import bind

    socket = bind(host, port)
    shelf.warm_soon()  # behind what may fail: no thread loads a model while the process ends
    number = socket.getsockname()[1]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    where = f"http://{f'[{shown}]' if ':' in shown else shown}:{number}/"
    print(f"mmfast demo: {where} (Ctrl-C ends it)", flush=True)
    if share:
        print(f"mmfast demo: {_tunnel(shown, number)} is public", flush=True)
    if open_page and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(where)
    _serve(app, socket)


def _application(model: str | None, device: str | None, dtype: str) -> tuple[Any, Any]:
    """Return an application with the page at its root, and its models.

    MmfastError without the extra or the model.
    """
    try:
        from fastapi import FastAPI

        from mmfast.demos.app import mount
        from mmfast.demos.shelf import Shelf
        from mmfast.serve.guard.media import read_upload
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "gradio", "starlette"):
            raise
        raise MmfastError(
            f'the demo needs {error.name}, which is not installed: pip install "mmfast[demo]"'
        ) from None
    shelf = Shelf(model, device, dtype, read_upload)
    if model is not None:
        shelf.visual("image")  # a wrong name fails now, not at the first visit
    return mount(FastAPI(openapi_url=None), "/", shelf=shelf), shelf


def _tunnel(host: str, port: int) -> str:
    """Open a public address at Gradio's servers."""
    import secrets

    from gradio.networking import setup_tunnel

    try:
        return str(setup_tunnel(host, port, secrets.token_urlsafe(32), None, None))
    except Exception as error:  # many kinds: no network, no program for the tunnel, refused
        raise MmfastError(f"cannot share: {error}; leave --share out") from None


def _serve(app: Any, socket: Any) -> None:
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", ws_max_size=1 << 20, timeout_graceful_shutdown=3
    )
    uvicorn.Server(config).run(sockets=[socket])
