"""Where a server's options come from: flags, then `MMFAST_*`, then a file, then what is usual."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from mmfast.core.errors import MmfastError, unknown
from mmfast.serve.config import ServerConfig

PREFIX = "MMFAST_"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def resolve(
    flags: Mapping[str, Any],
    file: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ServerConfig:
    """All options.

    Args:
        flags: Fields of `ServerConfig` that were given on the command line; None was not.
        file: A TOML file of fields; `MMFAST_CONFIG` where None.
        environ: The environment.

    Raises:
        MmfastError: A value that is none, an option that does not exist, a file that is no TOML.
    """
    types, found = types_of(), dict[str, Any]()
    file = file or environ.get(f"{PREFIX}CONFIG") or None
    if file is not None:
        found |= _read(Path(file), types)
    for name, kind in types.items():
        text = environ.get(PREFIX + name.upper(), environ.get(_singular(name)))
        if text is not None:
            found[name] = _parsed(text, kind, PREFIX + name.upper())
    found |= {name: value for name, value in flags.items() if value is not None}
    return ServerConfig(**found)


def types_of() -> dict[str, Any]:
    """The type of every option; `X | None` is `X`."""
    hints = get_type_hints(ServerConfig)
    return {each.name: _plain(hints[each.name]) for each in fields(ServerConfig)}


def helps() -> dict[str, str]:
    """What every option is about, from the docstring of `ServerConfig`."""
    text = (ServerConfig.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {10,}.*)*)", text, re.MULTILINE)
    return {name: " ".join(line.replace("`", "").split()) for name, line in found}


def _plain(hint: Any) -> Any:
    if isinstance(hint, UnionType):
        return next(each for each in get_args(hint) if each is not NoneType)
    return tuple if get_origin(hint) is tuple else hint


def _singular(name: str) -> str:
    return PREFIX + (name[:-1] if name.endswith("s") else name).upper()


def _read(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MmfastError(f"--config {str(path)!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise MmfastError(f"--config {str(path)!r} is no TOML: {error}") from None
    found = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in types:
            raise MmfastError(f"--config {str(path)!r}: {unknown('option', key, types)}")
        found[name] = _checked(value, types[name], f"{key} in {str(path)!r}")
    return found


def _checked(value: Any, kind: Any, where: str) -> Any:
    """A value of TOML, if it is of the type."""
    if kind is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and whole:
        return float(value)
    if isinstance(value, kind) and (kind is not int or whole):
        return value
    raise MmfastError(f"{where} is {value!r}; give {_wanted(kind)}")


def _parsed(text: str, kind: Any, where: str) -> Any:
    """A value of the environment."""
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool and text.lower() in (*_YES, *_NO):
        return text.lower() in _YES
    if kind is str:
        return text or None
    try:
        if kind in (int, float):
            return kind(text)
    except ValueError:
        pass
    raise MmfastError(f"{where}={text!r} is wrong; give {_wanted(kind)}")


def _wanted(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", tuple: "texts"}
    return names.get(kind, "a text")
