"""Registry of methods, which the CLI, tests, benchmarks and README tables read."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from mmfast.core.errors import SpecError, unknown

F = TypeVar("F", bound=Callable[..., Any])

# Every file of a kind's package is imported, which registers its methods.
PACKAGES = {"reducer": "mmfast.reducers", "cache": "mmfast.caches", "head": "mmfast.heads"}
# Installed packages add methods by an entry point of this group that names the module to import.
PLUGINS = "mmfast.plugins"


@dataclass(frozen=True)
class Method:
    """One registered method.

    Attributes:
        name: The name in spec strings.
        kind: `reducer`, `cache` or `head`.
        paper: arXiv id, or "" for a baseline.
        needs: Signals it reads from `Tokens` (`x`, `attn`, `query`, `grid`, `keys` …).
        summary: First line of its docstring.
        fn: The callable itself.
        sites: Where it may run, the default first: `pre`, `vit`, `llm` (needs a layer), `kv`.
        adaptive: It can choose its own budget (spec without a budget).
        layer: Default decoder layer K for a spec that names no site, methods of site `llm` only.
        stages: Relative depths in (0, 1) of the decoder layers before which a spec at `llm` that
            names no layer cuts, down to its budget in steps; () is a single cut at `layer`.
        scope: `item`, one image, video or sound at a time, or `prompt`, all of a prompt at once
            with the signal `image` telling them apart.
        revives: At `llm<K>` dropped tokens may come back while decoding.
        role: Kind of a KV policy: `position` (keeps by place and kind alone), `score` (keeps
            by keys or attention), `retrieve` (keeps all, reads a part), `store` (fewer bits).
        moment: Time at which a KV policy acts: `prefill` (once, after a prompt) or `always`.
        resizes: It keeps a smaller raster, so it may keep less than its budget; at `pixel` the
            pictures are resized to it.
        temporal: It compares the frames of a video, so it needs more than one frame.
        stream: The same method frame by frame: `(tokens of one frame, budget, state, **knobs) ->
            (Reduction, state)`, where the state is None at the start and then a mapping of
            tensors of fixed size.
        knobs: Keyword-only parameters of `fn` with their defaults.
    """

    name: str
    kind: str
    paper: str
    needs: tuple[str, ...]
    summary: str
    fn: Callable[..., Any] = field(repr=False)
    sites: tuple[str, ...] = ("pre",)
    adaptive: bool = False
    layer: int = 2
    stages: tuple[float, ...] = ()
    scope: str = "item"
    revives: bool = False
    role: str = ""
    moment: str = "prefill"
    resizes: bool = False
    temporal: bool = False
    stream: Callable[..., Any] | None = field(default=None, repr=False)
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def to_dict(self) -> dict[str, Any]:
        """The public columns: name, kind, paper, needs, summary."""
        row = {key: getattr(self, key) for key in ("name", "kind", "paper", "needs", "summary")}
        return {**row, "needs": list(self.needs)}


_METHODS: dict[tuple[str, str], Method] = {}
_LOADED: set[str] = set()
_LOADING: set[str] = set()
_LOCK = threading.RLock()  # a thread that asks while another one loads waits for all names


def register(
    name: str,
    *,
    kind: str = "reducer",
    paper: str = "",
    needs: tuple[str, ...] = ("x",),
    **traits: Any,
) -> Callable[[F], F]:
    """Register a method under `name`; its docstring's first line becomes the summary.

    Args:
        name: The name in spec strings.
        kind: `reducer`, `cache` or `head`.
        paper: arXiv id, or "" for a baseline.
        needs: Signals that it reads.
        **traits: Further fields of `Method`, from `sites` to `stream`.

    Raises:
        SpecError: The name is taken by another function, or the docstring is missing.
    """

    def enrol(fn: F) -> F:
        old = _METHODS.get((kind, name))
        if old is not None and old.fn.__qualname__ != fn.__qualname__:
            raise SpecError(f"{kind} {name!r} is already registered; choose another name")
        doc = inspect.getdoc(fn)
        if not doc:
            raise SpecError(f"{kind} {name!r} has no docstring; its first line is the summary")
        knobs = {
            p.name: p.default
            for p in inspect.signature(fn).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        summary = doc.splitlines()[0]
        _METHODS[kind, name] = Method(name, kind, paper, needs, summary, fn, knobs=knobs, **traits)
        return fn

    return enrol


# As `register`, for a KV policy.
policy = partial(register, kind="cache", sites=("kv",))


def get(name: str, kind: str = "reducer") -> Method:
    """Return a method; SpecError with the choices and the nearest match where there is none."""
    _load(kind)
    found = _METHODS.get((kind, name))
    if found is None:
        raise SpecError(unknown(kind, name, (n for k, n in _METHODS if k == kind)))
    return found


def methods(kind: str | None = None) -> list[Method]:
    """Return all registered methods, by kind and name."""
    if kind is not None and kind not in PACKAGES:
        raise SpecError(unknown("kind", kind, PACKAGES))
    for each in PACKAGES if kind is None else (kind,):
        _load(each)
    return [m for key, m in sorted(_METHODS.items()) if kind in (None, key[0])]


def unregister(name: str, kind: str = "reducer") -> None:
    """Remove a method, for tests and notebooks that define one again."""
    _METHODS.pop((kind, name), None)


def import_all(package: str) -> None:
    """Import every module of a package and of the packages in it, once; safe in threads."""
    if package in _LOADED:
        return
    with _LOCK:
        if package in _LOADED | _LOADING:  # loading: one of its own modules asks
            return
        _LOADING.add(package)
        try:
            home = importlib.import_module(package)
            for info in pkgutil.walk_packages(home.__path__, f"{package}."):
                importlib.import_module(info.name)
            _LOADED.add(package)
        finally:
            _LOADING.discard(package)


def _load(kind: str) -> None:
    if kind in PACKAGES:
        import_all(PACKAGES[kind])
    for entry in _plugins(tuple(sys.path)):
        if entry.value not in _LOADED:
            _LOADED.add(entry.value)  # first: a plugin may ask for methods while it loads
            _load_plugin(entry)


@lru_cache(maxsize=1)  # a search of the installed packages takes milliseconds
def _plugins(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=PLUGINS))


def _load_plugin(entry: EntryPoint) -> None:
    for package in PACKAGES.values():  # their names come first: a plugin cannot take one
        import_all(package)
    try:
        entry.load()
    except Exception as error:
        _LOADED.discard(entry.value)
        reason = f"{type(error).__name__}: {error}"
        raise SpecError(
            f"plugin {entry.name!r} ({entry.value}) does not load: {reason}; mend or uninstall it"
        ) from error
