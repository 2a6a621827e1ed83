"""Guard for images: CLIP's class token is compared with descriptions of harmful scenes.

SafeCLIP (Zhao et al., Findings of EMNLP 2025, arXiv 2503.00037) projects the class token, which a
LLaVA drops, into the space of CLIP's text, and refuses an image whose likeliest scene is harmful.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mmfast.core.errors import MediaError, MmfastError, ModelError, unknown, warn
from mmfast.core.locks import WholeLock

if TYPE_CHECKING:
    from torch import Tensor

    from mmfast.core.spec import Spec
    from mmfast.core.trace import Trace

NEUTRAL = "neutral"
ACTIONS = ("block", "warn")
SCENES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        NEUTRAL: ("an everyday photo", "a picture that anybody may see", "a chart or a document"),
        "nudity": ("a photo of naked people", "a pornographic picture", "people having sex"),
        "violence": ("a bloody wound", "a dead body", "people who hurt each other"),
        "weapons": ("a photo of a gun", "a knife held as a weapon", "a bomb or ammunition"),
        "drugs": ("illegal drugs", "a person taking drugs", "a syringe with a drug"),
        "self-harm": ("a person hurting themselves", "scars of cuts on an arm", "a suicide"),
        "hate": ("a swastika", "a symbol of hate", "a racist caricature"),
    }
)
_TOWERS = ("llava", "vipllava")  # families that encode one picture in one row of the tower
_BATCH = 16  # frames at once
_TURN = WholeLock()  # one encoding at a time, as threads of a server would all want the processor
_FIX = "give {'model': DIR, 'scenes': {'neutral': […], 'weapons': […]}, 'action': 'block'}"


@dataclass(frozen=True)
class ImageGuard:
    """Settings of a guard.

    Attributes:
        model: Directory or hub id of a CLIP, or SigLIP, of transformers.
        scenes: Descriptions by scene; those of `neutral` are of what may pass.
        action: `block` refuses a picture of a harmful scene; `warn` answers, and says so.
        least: Probability below which the likeliest scene does not count.

    Raises:
        MmfastError: No harmful scene, a scene without descriptions, or a wrong action or `least`.
    """

    model: str
    scenes: Mapping[str, Sequence[str]] = field(default_factory=lambda: SCENES, repr=False)
    action: str = "block"
    least: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot guard."""
        if self.action not in ACTIONS:
            raise MmfastError(unknown("action of a guard", self.action, ACTIONS))
        if type(self.least) not in (int, float) or not 0 <= self.least <= 1:
            raise MmfastError(f"least={self.least!r} of a guard is no probability; give 0 to 1")
        scenes = self.scenes if isinstance(self.scenes, Mapping) else {}
        if NEUTRAL not in scenes or len(scenes) < 2:
            raise MmfastError(f"a guard needs scenes, {NEUTRAL!r} and a harmful one; {_FIX}")
        for name, texts in scenes.items():
            given = texts if isinstance(texts, (list, tuple)) else ()
            if not given or not all(isinstance(text, str) and text.strip() for text in given):
                raise MmfastError(f"scene {name!r} of a guard is {texts!r}, not texts; {_FIX}")


def read_guard(given: Any) -> ImageGuard | None:
    """Read a guard: settings, a JSON file of them, or a directory or hub id of a CLIP alone.

    MmfastError: the file is missing or has other entries than `ImageGuard`.
    """
    if given is None or isinstance(given, ImageGuard):
        return given
    if not isinstance(given, (str, Path)):
        raise MmfastError(
            f"guard={given!r} is not allowed; give mmfast.ImageGuard(…), a JSON file of its "
            "settings, or the directory of a CLIP"
        )
    if not str(given).endswith(".json"):
        return ImageGuard(str(given))
    try:
        return ImageGuard(**json.loads(Path(given).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        own = f"guard {str(given)!r} cannot be read: {error}; {_FIX}"
        raise MmfastError(str(error) if isinstance(error, MmfastError) else own) from None


@dataclass(frozen=True)
class SceneVerdict:
    """The likeliest scene of a picture, its probability, and whether it is a harmful one."""

    scene: str
    chance: float
    harmful: bool


class SceneJudge:
    """A guard with its model loaded, and the descriptions embedded.

    Raises:
        ModelError: The model cannot be loaded, or compares no pictures with texts.
    """

    def __init__(self, guard: ImageGuard, device: Any = None) -> None:
        import torch
        from transformers import AutoModel, AutoProcessor

        from mmfast.models import loading

        self.guard, self.shared, place = guard, False, loading.pick_device(device)
        with loading.loading(f"guard {guard.model!r}"):
            self._clip = loading.from_pretrained(AutoModel, guard.model, place, torch.float32)
            self._processor = AutoProcessor.from_pretrained(guard.model, trust_remote_code=False)
        if not (hasattr(self._clip, "logit_scale") and hasattr(self._clip, "get_text_features")):
            raise ModelError(
                f"guard {guard.model!r} is a {type(self._clip).__name__}, which compares no "
                "pictures with texts; give a CLIP or SigLIP"
            )
        texts = [text for each in guard.scenes.values() for text in each]
        # SigLIP was trained on texts of one length
        padding = "max_length" if "siglip" in self._clip.config.model_type else True
        tokens = self._processor.tokenizer(texts, padding=padding, return_tensors="pt").to(place)
        found = self._clip.requires_grad_(False).get_text_features(**tokens).pooler_output
        self._texts = torch.nn.functional.normalize(found, dim=-1) * self._clip.logit_scale.exp()
        del self._clip.text_model

    def verdicts(self, embeds: Tensor) -> list[SceneVerdict]:
        """Judge embeddings of pictures `[N, D]`, in the space of the texts.

        The softmax goes over all descriptions, and a scene has the mean of its own.
        """
        import torch

        unit = torch.nn.functional.normalize(embeds.to(self._texts), dim=-1)
        chances = (unit @ self._texts.mT).softmax(-1)
        sizes = [len(texts) for texts in self.guard.scenes.values()]
        means = torch.stack([part.mean(-1) for part in chances.split(sizes, -1)], -1)
        scores, best = (means / means.sum(-1, keepdim=True)).max(-1)
        names = list(self.guard.scenes)
        return [
            SceneVerdict(names[i], chance, names[i] != NEUTRAL and chance >= self.guard.least)
            for i, chance in zip(best.tolist(), scores.tolist(), strict=True)
        ]

    def judge(self, pictures: Sequence[Any]) -> list[SceneVerdict]:
        """Encode and judge pictures or frames, uint8 `[H, W, 3]` each."""
        import torch

        found: list[SceneVerdict] = []
        how = {"return_tensors": "pt", "input_data_format": "channels_last"}
        for at in range(0, len(pictures), _BATCH):
            inputs = self._processor.image_processor(list(pictures[at : at + _BATCH]), **how)
            with _TURN, torch.inference_mode():
                values = inputs["pixel_values"].to(self._texts.device)
                found += self.verdicts(self._clip.get_image_features(values).pooler_output)
        return found

    def look(
        self,
        shots: Sequence[Any],
        trace: Trace | None = None,
        tell: Callable[[str], object] = warn,
    ) -> None:
        """Judge decoded images and clips (`Shot`), each by its worst frame, and act.

        `trace` gets a row `guard`, and `tell` is called with a warning. Nothing is done where the
        tower is shared. MediaError: one shows a harmful scene, and the guard blocks.
        """
        if self.shared or not shots:
            return
        start, worst = time.perf_counter(), []
        for shot in shots:
            frames = shot.pixels if shot.kind == "video" else shot.pixels[None]
            worst.append(max(self.judge(frames), key=lambda each: (each.harmful, each.chance)))
        self._act(worst, start, trace, tell)

    def _act(
        self,
        verdicts: Sequence[SceneVerdict],
        start: float,
        trace: Trace | None,
        tell: Callable[[str], object] = warn,
    ) -> None:
        bad = {number: each for number, each in enumerate(verdicts, 1) if each.harmful}
        if trace is not None:
            ms = (time.perf_counter() - start) * 1e3
            trace.add("guard", len(verdicts), len(verdicts) - len(bad), ms)
        for number, each in bad.items():
            of = f" {number} of {len(verdicts)}" if len(verdicts) > 1 else ""
            said = f"medium{of} looks like {each.scene!r} ({each.chance:.0%})"
            if self.guard.action == "block":
                raise MediaError(f"{said}, which the guard refuses; send another one")
            tell(f"guard: {said}")
            if trace is not None:
                trace.notes.append(f"guard: {said}")

    def share(self, model: Any) -> None:
        """Read the class tokens of a model's own tower from now on, if that is this CLIP's.

        Towers are compared weight by weight; the copy is let go of.
        """
        import torch

        if getattr(model.config, "model_type", "") not in _TOWERS:
            return
        own, theirs = (  # which some releases wrap
            getattr(tower, "vision_model", tower).state_dict()
            for tower in (self._clip.vision_model, model.base_model.get_encoder("image"))
        )
        self.shared = own.keys() == theirs.keys() and all(
            own[name].shape == each.shape and torch.equal(own[name].to(each), each)
            for name, each in theirs.items()
        )
        if self.shared:
            del self._clip.vision_model

    def tower_seen(self, output: Any, count: int, trace: Trace) -> None:
        """Judge the `count` images of a call by the class tokens of the shared tower, and act."""
        start = time.perf_counter()
        embeds = self._clip.visual_projection(output.pooler_output.to(self._texts))
        found = self.verdicts(embeds)[:: max(len(embeds) // count, 1)]  # beams repeat images
        self._act(found, start, trace)


def made_guard(given: Any, model: Any, specs: Sequence[Spec], *beside: Any) -> SceneJudge | None:
    """Load a guard beside a model, whose tower it reads where that is the same and runs as it is.

    It may not where a spec acts inside it, or with anything `beside`: reuse, an encoder, a target.
    """
    guard = read_guard(given)
    judge = None if guard is None else SceneJudge(guard, model.device)
    if judge is not None and not (any(beside) or any(each.site == "vit" for each in specs)):
        judge.share(model)
    return judge


@contextmanager
def watching(judge: SceneJudge | None, model: Any, trace: Trace, count: int) -> Iterator[None]:
    """Let a judge of a shared tower see the calls that this thread makes with `count` images."""
    if judge is None or not judge.shared:
        yield
        return
    mine = threading.get_ident()

    def hook(_: Any, __: Any, output: Any) -> None:
        if threading.get_ident() == mine:
            judge.tower_seen(output, count, trace)

    with model.base_model.get_encoder("image").register_forward_hook(hook):
        yield


@lru_cache(maxsize=2)
def judge_of(given: str, device: str | None = None) -> SceneJudge:
    """Return the judge of a guard, loaded once in a process."""
    guard = read_guard(given)
    assert guard is not None
    return SceneJudge(guard, device)
