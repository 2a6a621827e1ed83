"""Schemas of prompts from modules with reserved positions (Prompt Cache, Gim et al., 2311.04934).

A schema lays texts, pictures and clips out one behind the other, each at positions of its own, and
a prompt takes any of them. What is not taken leaves its positions empty, so what is taken stands
where it was when it was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfast.core.errors import MmfastError, an, unknown

MEDIA = ("image", "video")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class ModuleParameter:
    """A place in a module for a text of at most `tokens` tokens that each prompt gives."""

    name: str
    tokens: int


class PromptSchema:
    """Named modules that prompts put together without reading them again.

    Each module is encoded once, on its own, with the positions that the schema reserves for it, and
    kept in the store of a pipeline. Modules do not see each other, but for those of a scaffold.

    ```python
    schema = mmfast.PromptSchema(
        {"rules": ["Answer for ", {"reader": 6}, "."], "sea": Path("sea.png"), "hill": picture},
        unions=[("sea", "hill")],
    )
    pipe = mmfast.pipeline("image-qa", reuse="prefix")
    answer = pipe(schema.prompt("rules", "sea", reader="a child"), "What is in the picture?")
    ```

    Args:
        modules: Parts by name, in the order of their positions: a text, a picture or clip (an
            object, or a path as `Path` or `{"image": path}`, `{"video": path}`), a parameter
            `{"reader": 6}` with its largest number of tokens; or a list of these.
        unions: Names of neighbours of which a prompt has one at most: they share positions.
        scaffolds: Names of modules that see those before them where a prompt has all of them; they
            are kept once more for it. Of scaffolds that overlap the first acts.

    Raises:
        MmfastError: A name, part, union or scaffold that makes no sense.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        unions: Sequence[Sequence[str]] = (),
        scaffolds: Sequence[Sequence[str]] = (),
    ) -> None:
        if not isinstance(modules, Mapping) or not modules:
            raise MmfastError(
                "a schema has no modules; give parts by name, such as {'rules': 'Be brief.'}"
            )
        self.modules = {_named(name): _parts(name, given) for name, given in modules.items()}
        every = [part for parts in self.modules.values() for part in parts]
        found = [part for part in every if isinstance(part, ModuleParameter)]
        self.parameters = {each.name: each for each in found}
        if len(self.parameters) < len(found):
            names = [each.name for each in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise MmfastError(f"parameter {twice!r} is there twice; give each a name of its own")
        self.unions = [self._group("union", each) for each in unions]
        self.scaffolds = [self._group("scaffold", each) for each in scaffolds]
        self._check_groups()

    @classmethod
    def read(cls, document: Any) -> PromptSchema:
        """Read the document of a file: `modules`, and where there are any, `unions`, `scaffolds`.

        MmfastError where it is none.
        """
        if not isinstance(document, Mapping):
            raise MmfastError(f"a schema is {an(type(document).__name__)}; give {{'modules': …}}")
        for key in document.keys() - {"modules", "unions", "scaffolds"}:
            raise MmfastError(unknown("key of a schema", key, ("modules", "unions", "scaffolds")))
        return cls(document.get("modules") or {}, *(document.get(k) or () for k in _GROUPS))

    def prompt(self, *names: str, **arguments: str) -> ModulePrompt:
        """Take modules, whose order is the schema's, with arguments of their parameters.

        A parameter without an argument is left empty. MmfastError: a module that is unknown or
        there twice, two of a union, or an argument of no module that is taken.
        """
        for name in names:
            if not isinstance(name, str) or name not in self.modules:
                raise MmfastError(unknown("module", name, self.modules))
            if names.count(name) > 1:
                raise MmfastError(f"module {name!r} is there twice; a prompt has it once")
        if not names:
            raise MmfastError(f"a prompt takes no module; choices: {', '.join(self.modules)}")
        for union in self.unions:
            if len(both := [name for name in names if name in union]) > 1:
                raise MmfastError(
                    f"modules {both[0]!r} and {both[1]!r} are of one union, whose positions they "
                    "share; take one of them"
                )
        own = [p.name for n in names for p in self.modules[n] if isinstance(p, ModuleParameter)]
        for name, value in arguments.items():
            if name not in own:
                raise MmfastError(unknown("parameter of these modules", name, own))
            if not isinstance(value, str):
                raise MmfastError(f"{name}={value!r} is {an(type(value).__name__)}; give a text")
        ordered = tuple(name for name in self.modules if name in names)
        return ModulePrompt(self, ordered, dict(arguments))

    def groups(self) -> list[tuple[str, ...]]:
        """Names in the order of their positions, those of one place together."""
        shared = {name: tuple(union) for union in self.unions for name in union}
        return list(dict.fromkeys(shared.get(name, (name,)) for name in self.modules))

    def _group(self, kind: str, names: Any) -> tuple[str, ...]:
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise MmfastError(f"{kind} {names!r} is no list of modules; give their names")
        found = tuple(names)
        for name in found:
            if name not in self.modules:
                raise MmfastError(unknown(f"module of a {kind}", name, self.modules))
        if len(found) < 2 or len(set(found)) < len(found):
            raise MmfastError(f"{kind} {list(found)} needs at least two modules, each of them once")
        return tuple(name for name in self.modules if name in found)

    def _check_groups(self) -> None:
        order = list(self.modules)
        spoken: set[str] = set()
        for union in self.unions:
            first = order.index(union[0])
            if tuple(order[first : first + len(union)]) != union:
                raise MmfastError(
                    f"modules {list(union)} of a union are no neighbours, so they have no place to "
                    "share; write them one behind the other"
                )
            if both := spoken & set(union):
                raise MmfastError(f"module {min(both)!r} is of two unions; leave it in one")
            spoken |= set(union)
            for scaffold in self.scaffolds:
                if len(both := set(union) & set(scaffold)) > 1:
                    raise MmfastError(
                        f"scaffold {list(scaffold)} has {len(both)} modules of one union, which no "
                        "prompt has together; leave one"
                    )


_GROUPS = ("unions", "scaffolds")


@dataclass(frozen=True)
class ModulePrompt:
    """Modules of a schema in its order, and arguments by parameter: media of a question."""

    schema: PromptSchema
    names: tuple[str, ...]
    arguments: Mapping[str, str]

    def pieces(self) -> list[tuple[str, ...]]:
        """Modules that are encoded together: those of scaffolds of which all are here, or one."""
        together: dict[str, tuple[str, ...]] = {}
        for scaffold in self.schema.scaffolds:
            if set(scaffold) <= set(self.names) - together.keys():
                together |= dict.fromkeys(scaffold, scaffold)
        return list(dict.fromkeys(together.get(name, (name,)) for name in self.names))


def _named(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MmfastError(f"module {name!r} has no name of letters, digits and _; give one")
    return name


def _parts(name: str, given: Any) -> tuple[Any, ...]:
    """Parts of a module: texts, parameters, and media as they were given."""
    parts = given if isinstance(given, (list, tuple)) else [given]
    found = tuple(_part(name, part) for part in parts)
    if not any(part != "" for part in found if isinstance(part, str)) and not any(
        not isinstance(part, str) for part in found
    ):
        raise MmfastError(f"module {name!r} is empty; give it a text, a picture or a clip")
    return tuple(part for part in found if not (isinstance(part, str) and part == ""))


def _part(name: str, part: Any) -> Any:
    if part is None or isinstance(part, (bool, int, float)):
        raise MmfastError(
            f"a part of module {name!r} is {part!r}; give a text, a picture, a clip, or a "
            "parameter such as {'reader': 6}"
        )
    if not isinstance(part, Mapping):
        return part
    if len(part) != 1:
        raise MmfastError(f"a part of module {name!r} is {dict(part)!r}; give one key a part")
    ((key, value),) = part.items()
    if key in MEDIA:
        return Path(value) if isinstance(value, str) else value
    tokens = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not (tokens and isinstance(key, str) and _NAME.fullmatch(key)):
        raise MmfastError(
            f"{dict(part)!r} in module {name!r} is no parameter with its largest number of tokens, "
            "such as {'reader': 6}, and no 'image' or 'video'"
        )
    return ModuleParameter(key, value)
