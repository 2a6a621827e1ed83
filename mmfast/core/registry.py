"""Registry of methods, which the CLI, tests, benchmarks and README tables read."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from mmfast.core.errors import SpecError, an, unknown
from mmfast.core.locks import WholeLock

F = TypeVar("F", bound=Callable[..., Any])

# Every file of a kind's package is imported, which registers its methods.
PACKAGES = {"reducer": "mmfast.reducers", "cache": "mmfast.caches", "head": "mmfast.heads"}
PACKAGES |= {"prefill": "mmfast.prefill", "compressor": "mmfast.compressors"}
PACKAGES |= {"ranker": "mmfast.rankers"}
# Kinds whose methods a spec of another kind may name.
NAMED_TOO = {"reducer": ("compressor", "ranker")}
# Options that take a spec of a kind, and what its methods are called.
OPTIONS = {"reducer": ("reduce", "reducer"), "cache": ("cache", "cache policy")}
OPTIONS |= {"prefill": ("prefill", "method of sparse prefill")}
# Installed packages add methods by an entry point of this group that names the module to import.
PLUGINS = "mmfast.plugins"


@dataclass(frozen=True)
class Method:
    """One registered method.

    Attributes:
        name: The name in spec strings.
        kind: `reducer`, `cache`, `head`, `prefill`, `compressor` or `ranker`.
        paper: Id on arXiv or OpenReview, or "" for a baseline.
        needs: Signals it reads from `Tokens` (`x`, `attn`, `query`, `grid`, `keys` …).
        summary: First line of its docstring.
        fn: The callable itself.
        sites: Where it may run, the default first: `pre`, `vit`, `llm` (needs a layer), `kv`.
        inner: Further signals that it reads at `llm<K>`, where the layer before has them.
        adaptive: It can choose its own budget (spec without a budget).
        layer: Default decoder layer K for a spec that names no site, methods of site `llm` only.
        stages: Relative depths in (0, 1) of the decoder layers before which a spec at `llm` that
            names no layer cuts, down to its budget in steps; () is a single cut at `layer`.
        scope: `item`, one image, video or sound at a time, or `prompt`, all of a prompt at once
            with the signal `image` telling them apart.
        revives: At `llm<K>` dropped tokens may come back while decoding.
        halts: A token that leaves at `llm<K>` keeps its state up to the end of the model, and one
            that is merged has the output of the token it joins, so logits have their full length.
        bypasses: At `llm<K>` tokens that are not kept go on through attention alone, and their keys
            and values leave when the prompt ends.
        fuses: At `pre` it changes the embeddings of the prompt's text, too (`Reduction.text`).
        text: Inside the LLM it also prunes text, by the knob `tokens`.
        role: Kind of a KV policy: `position` (keeps by place and kind alone), `score` (keeps
            by keys or attention), `retrieve` (keeps all, reads a part), `select` (as that, anew at
            every decode step), `store` (fewer bits). Of sparse prefill `mass` (reads what holds a
            share of the attention), `read` (a share of the keys) or `floor` (what has a least
            attention, as a share of that to the first and last keys).
        moment: Time at which a KV policy acts: `prefill` (once, after a prompt) or `always`.
        uneven: A KV policy whose budget is a mean over layers, so that one layer may keep more.
        resizes: It keeps a smaller raster, so it may keep less than its budget; at `pixel` the
            pictures are resized to it.
        temporal: It compares the frames of a video, so it needs more than one frame.
        scene: At `vit` it needs a model that attends to all frames together, such as VGGT.
        rate: A compressor of text before a question: a whole-number budget is the rate by which it
            shrinks, and the model side makes what it puts there.
        routes: It chooses one of several reductions by the question; a spec gives it no budget.
        coupled: With `parity=true` the items of a batch decide together, as in the reference.
        rough: The same scores as of `fn`, near enough in float32 and exact on demand:
            `(tokens, budget, **knobs) -> RoughScores`, or None where float32 does not do.
        stream: The same method frame by frame: `(tokens of one frame, budget, state, **knobs) ->
            (Reduction, state)`, where the state is None at the start and then a mapping of
            tensors of fixed size.
        knobs: Keyword-only parameters of `fn` with their defaults, `EVERY` or `TOKENS` for some.
    """

    name: str
    kind: str
    paper: str
    needs: tuple[str, ...]
    summary: str
    fn: Callable[..., Any] = field(repr=False)
    sites: tuple[str, ...] = ("pre",)
    inner: tuple[str, ...] = ()
    adaptive: bool = False
    layer: int = 2
    stages: tuple[float, ...] = ()
    scope: str = "item"
    revives: bool = False
    halts: bool = False
    bypasses: bool = False
    fuses: bool = False
    text: bool = False
    role: str = ""
    moment: str = "prefill"
    uneven: bool = False
    resizes: bool = False
    temporal: bool = False
    scene: bool = False
    rate: bool = False
    routes: bool = False
    coupled: bool = False
    rough: Callable[..., Any] | None = field(default=None, repr=False)
    stream: Callable[..., Any] | None = field(default=None, repr=False)
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def to_dict(self) -> dict[str, Any]:
        """The public columns: name, kind, paper, needs, summary."""
        row = {key: getattr(self, key) for key in ("name", "kind", "paper", "needs", "summary")}
        return {**row, "needs": list(self.needs)}

    @property
    def archive(self) -> tuple[str, str]:
        """Archive that has its paper, and the address there; both empty for a baseline."""
        if not self.paper:
            return "", ""
        if "." in self.paper:
            return "arXiv", f"https://arxiv.org/abs/{self.paper}"
        return "OpenReview", f"https://openreview.net/forum?id={self.paper}"

    @property
    def learned(self) -> bool:
        """A compressor: it needs weights, and a whole-number budget counts tokens of a frame."""
        return self.kind == "compressor"

    @property
    def gives_scores(self) -> bool:
        """A KV policy that returns scores `[..., H, N]`, of which the greatest stay."""
        return self.role == "score" and self.fn.__annotations__.get("return") == "Tensor"

    @property
    def takes(self) -> str:
        """Meaning of its budget, in words."""
        if self.routes:
            return "none: the ways that it chooses from have their own"
        if self.rate:
            return "rate by which text shrinks, as it was trained for"
        if self.learned:
            return "number of tokens a frame that it was trained for"
        if self.role in ("mass", "read"):
            return f"share of the {'attention' if self.role == 'mass' else 'keys'}"
        if self.role == "floor":
            return "1 less the least relative attention"
        if self.role in ("retrieve", "select") and self.adaptive:
            return "share of the attention"
        if self.role == "retrieve":
            return "number of frames"
        if self.role == "store":
            return "bits (8, 4 or 2)" if self.adaptive else "share or number of channels"
        return "share or number of tokens" + "; without one it decides itself" * self.adaptive

    @property
    def example(self) -> str:
        """A spec string of it; "" for a head."""
        if self.learned:
            return f"{self.name}:{2 if self.rate else 1}"
        repeats = self.adaptive and self.sites[0] == "pixel"  # it finds what repeats
        if self.kind == "head" or repeats or self.routes:
            return "" if self.kind == "head" else self.name
        budgets = {"retrieve": "16", "store": "4", "position": "64", "score": "0.5"}
        budgets |= {"select": "0.1", "mass": "0.95", "read": "0.3", "floor": "0.996"}
        if self.role == "store" and not self.adaptive:
            budgets = {"store": "0.6"}
        if self.role in ("retrieve", "select") and self.adaptive:
            budgets = {"retrieve": "0.3", "select": "0.85"}
        return f"{self.name}:{budgets.get(self.role, '0.25')}"


# A knob of every KV policy that scores behind a prompt, or retrieves: the new tokens after which it
# chooses again.
EVERY = "every"
# Signals that a prompt alone has.
PROMPT_SIGNALS = frozenset(
    {"query_mean", "attn_counted", "attn_mutual", "attn_repeated", "attn_vision"}
)
# A knob of schedules: the depth, in [0, 1), before which they make no cut.
START = "start"
# A knob of reducers that prune text as well: the tokens of a prompt that they may drop.
TOKENS = "tokens"
MEDIA, TEXT, ALL = TOKEN_KINDS = ("media", "text", "all")

Methods = dict[tuple[str, str], Method]  # by kind and name
_METHODS: Methods = {}
_LOADED: set[str] = set()
_LOADING: set[str] = set()
_LOCK = WholeLock()  # a thread that asks while another one loads waits for all names


def register(
    name: str,
    *,
    kind: str = "reducer",
    paper: str = "",
    needs: tuple[str, ...] = ("x",),
    into: Methods = _METHODS,
    **traits: Any,
) -> Callable[[F], F]:
    """Register a method under `name`; its docstring's first line becomes the summary.

    Args:
        name: The name in spec strings.
        kind: `reducer`, `cache`, `head`, `prefill`, `compressor` or `ranker`.
        paper: Id on arXiv or OpenReview, or "" for a baseline.
        needs: Signals that it reads.
        into: Where it is entered.
        **traits: Further fields of `Method`, from `sites` to `stream`.

    Raises:
        SpecError: The name is taken by another function, or the docstring is missing.
    """

    def enrol(fn: F) -> F:
        old = into.get((kind, name))
        if old is not None and _origin(old.fn) != _origin(fn):
            raise SpecError(f"{kind} {name!r} is already registered; choose another name")
        doc = inspect.getdoc(fn)
        if not doc:
            raise SpecError(f"{kind} {name!r} has no docstring; its first line is the summary")
        knobs = {
            p.name: p.default
            for p in inspect.signature(fn).parameters.values()
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        }
        scores = traits.get("role") == "score" and traits.get("moment", "prefill") == "prefill"
        if traits.get("role") == "retrieve" or (scores and not PROMPT_SIGNALS & set(needs)):
            knobs.setdefault(EVERY, 0)
        if traits.get("text"):
            knobs[TOKENS] = MEDIA
        summary = doc.splitlines()[0]
        into[kind, name] = Method(name, kind, paper, needs, summary, fn, knobs=knobs, **traits)
        return fn

    return enrol


def _origin(fn: Callable[..., Any]) -> tuple[str, str]:
    """Name and file of a function, or its module where it has none, as in a notebook."""
    file = getattr(sys.modules.get(fn.__module__), "__file__", None)
    return fn.__qualname__, file or fn.__module__


# As `register`, for a KV policy.
policy = partial(register, kind="cache", sites=("kv",))
# As `register`, for a method of sparse prefill.
prefill_method = partial(
    register, kind="prefill", needs=("keys",), sites=("prefill",), adaptive=True
)
# By which files enter their methods.
_ENROLLING: Mapping[str, Callable[..., Any]] = {
    "register": register,
    "policy": policy,
    "prefill_method": prefill_method,
}


def get(name: str, kind: str = "reducer", among: Sequence[Method] = ()) -> Method:
    """Return a method; SpecError with the choices and the nearest match where there is none."""
    kinds = (kind, *NAMED_TOO.get(kind, ()))
    for each in kinds if not among else ():
        _load(each)
    rows = {m.name: m for m in among or _METHODS.values() if m.kind in kinds}
    if name in rows:
        return rows[name]
    for other, (option, noun) in OPTIONS.items():
        if other != kind and any(m.name == name for m in listed(other)):
            mine = f"unknown {kind} {name!r}, which is {an(noun)}"
            raise SpecError(f"{mine}: give it to {option}= (--{option}) instead")
    raise SpecError(unknown(kind, name, rows))


def methods(kind: str | None = None) -> list[Method]:
    """Return all registered methods, by kind and name."""
    if kind is not None and (not isinstance(kind, str) or kind not in PACKAGES):
        raise SpecError(unknown("kind", kind, PACKAGES))
    for each in PACKAGES if kind is None else (kind,):
        _load(each)
    return [m for key, m in sorted(_METHODS.items()) if kind in (None, key[0])]


def listed(kind: str | None = None) -> list[Method]:
    """Return the rows of `methods` without an import of torch, where no other package adds any.

    Files that are not imported yet are read. The functions in such rows have a signature and a
    docstring, and do nothing.
    """
    kinds, rows = [kind] if kind else [*PACKAGES], Methods()
    if _plugins(tuple(sys.path)) or not set(kinds) <= {*PACKAGES}:
        return methods(kind)
    try:
        for package in {PACKAGES[each] for each in kinds} - _LOADED:
            _read(package, rows)
    except Exception:  # of any kind: what a declaration names may be made by other code
        return methods(kind)
    rows |= {key: method for key, method in _METHODS.items() if key[0] in kinds}
    return [rows[key] for key in sorted(rows)]


def _read(package: str, rows: Methods) -> None:
    """Enter the methods of a package by running the declarations of its files alone."""
    rows |= _declared(Path(__file__).parents[1], package)


@lru_cache(maxsize=len(PACKAGES))  # one command asks three times, and parsing takes a while
def _declared(home: Path, package: str) -> Methods:
    rows = Methods()
    names = {name: partial(run, into=rows) for name, run in _ENROLLING.items()}
    for path in sorted((home / package.rpartition(".")[2]).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if _hollowed(node)]
        module = ".".join(("mmfast", *path.relative_to(home).with_suffix("").parts))
        exec(compile(tree, str(path), "exec"), {**names, "__name__": module})
    return rows


def _hollowed(node: Any) -> bool:
    """Leave of a definition its head and docstring; return False where a file needs no node."""
    if isinstance(node, ast.Assign | ast.Expr):
        return isinstance(node.value, ast.Constant) or _enrols(getattr(node.value, "func", None))
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return False
    node.decorator_list = [each for each in node.decorator_list if _enrols(each)]
    kept = node.body[:1] if ast.get_docstring(node) else []
    if isinstance(node, ast.ClassDef) and node.decorator_list:
        start = next(part for part in node.body if getattr(part, "name", "") == "__init__")
        kept, node.bases = [*kept, *filter(_hollowed, [start])], []
    node.body = [*kept, ast.copy_location(ast.Pass(), node)]
    return isinstance(node, ast.FunctionDef) or bool(node.decorator_list)


def _enrols(call: Any) -> bool:
    return getattr(getattr(call, "func", None), "id", "") in _ENROLLING


def unregister(name: str, kind: str = "reducer") -> None:
    """Remove a method, for tests and notebooks that define one again."""
    _METHODS.pop((kind, name), None)


def import_all(package: str) -> None:
    """Import every module of a package and of the packages in it, once; safe in threads."""
    _once(package, partial(_import_every, package))


def _import_every(package: str) -> None:
    home = importlib.import_module(package)
    for info in pkgutil.walk_packages(home.__path__, f"{package}."):
        importlib.import_module(info.name)


def _once(name: str, load: Callable[[], None]) -> None:
    """Load what is named, once; a thread that asks meanwhile waits until it is there."""
    if name in _LOADED:
        return
    with _LOCK:
        if name in _LOADED | _LOADING:  # loading: one of its own modules asks
            return
        _LOADING.add(name)
        try:
            load()
            _LOADED.add(name)
        finally:
            _LOADING.discard(name)


def _load(kind: str) -> None:
    if kind in PACKAGES:
        import_all(PACKAGES[kind])
    for entry in _plugins(tuple(sys.path)):
        _once(entry.value, partial(_load_plugin, entry))


@lru_cache(maxsize=1)  # a search of the installed packages takes milliseconds
def _plugins(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=PLUGINS))


def _load_plugin(entry: EntryPoint) -> None:
    for package in PACKAGES.values():  # their names come first: a plugin cannot take one
        import_all(package)
    try:
        entry.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SpecError(
            f"plugin {entry.name!r} ({entry.value}) does not load: {reason}; mend or uninstall it"
        ) from error
