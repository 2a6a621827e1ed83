"""Stage 1: teach tower and projector what every patch shows, then run them over the bank once."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlavaOnevisionForConditionalGeneration

from mmfast.tiny.optim import Mixed, schedule, split_parameters
from mmfast.tiny.video.clips import Bank
from mmfast.tiny.video.scene import SIZES, Dense, look_labels

Report = Callable[[dict[str, object]], None]


class LookHead(nn.Module):
    """Linear read-outs of one feature vector per patch; thrown away after training."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.parts = [*SIZES.values(), side, side, 2]
        self.read = nn.Linear(width, sum(self.parts))

    def loss(self, x: Tensor, truth: Dense) -> tuple[Tensor, dict[str, float]]:
        """Loss and share of patches right, things and digits only: x [n, P, D]."""
        outs = self.read(x).float().split(self.parts, -1)
        total, right = x.new_zeros(()), {}
        for out, (name, label) in zip(outs, truth.classes.items(), strict=False):
            weight = out.new_full((out.shape[-1],), 1.0)
            weight[0] = 0.2  # most patches show nothing
            total = total + cross_entropy(out.flatten(0, 1), label.flatten(), weight)
            some = label > 0
            right[name] = float((out.argmax(-1) == label)[some].float().mean())
        spot = torch.arange(self.side**2, device=x.device).expand(len(x), -1)
        for out, label in ((outs[3], spot // self.side), (outs[4], spot % self.side)):
            total = total + 0.2 * cross_entropy(out.flatten(0, 1), label.flatten())
        inside = ~truth.offset.isnan()
        gap = (outs[5] - truth.offset.nan_to_num())[inside].abs().mean()
        right["offset"] = float(gap.detach())
        return total + 0.5 * gap, right


def scale_pixels(frames: Tensor) -> Tensor:
    """uint8 pixels to the tower's range, as the processor does."""
    return frames.float() / 127.5 - 1.0


def tower_features(model: LlavaOnevisionForConditionalGeneration, pixels: Tensor) -> Tensor:
    """Features before the projector: [n, 3, S, S] -> [n, P, D]."""
    out = model.model.vision_tower(pixels, output_hidden_states=True)
    features: Tensor = out.hidden_states[model.config.vision_feature_layer]
    return features


def pooled_tokens(model: LlavaOnevisionForConditionalGeneration, features: Tensor) -> Tensor:
    """Projector and 2 x 2 pooling: [n, P, D] -> [n, P / 4, H]."""
    tokens: Tensor = model.model.apply_pooling(model.model.multi_modal_projector(features))
    return tokens


def _stack(parts: list[Dense]) -> Dense:
    names = parts[0].classes
    classes = {k: torch.stack([p.classes[k] for p in parts]) for k in names}
    return Dense(classes, torch.stack([p.offset for p in parts]))


def _draw(bank: Bank, size: int, rng: torch.Generator) -> tuple[Tensor, Dense, Dense]:
    clips = torch.randint(len(bank.tables), (size,), generator=rng).tolist()
    times = torch.randint(bank.frames.shape[1], (size,), generator=rng).tolist()
    fine: list[Dense] = []
    coarse: list[Dense] = []
    for clip, time_ in zip(clips, times, strict=True):
        for owners, found in ((bank.patches, fine), (bank.cells, coarse)):
            dense = look_labels(owners[clip], bank.tables[clip])
            classes = {k: v[time_] for k, v in dense.classes.items()}
            found.append(Dense(classes, dense.offset[time_]))
    return scale_pixels(bank.frames[clips, times]), _stack(fine), _stack(coarse)


def train_tower(
    model: LlavaOnevisionForConditionalGeneration,
    bank: Bank,
    steps: int,
    seed: int,
    report: Report,
    batch: int = 64,
) -> None:
    """Train tower and projector on single frames; both stay as they are from then on."""
    rng = torch.Generator().manual_seed(seed)
    vision, text = model.config.vision_config, model.config.text_config
    side = vision.image_size // vision.patch_size
    fine = LookHead(vision.hidden_size, side)
    coarse = LookHead(text.hidden_size, side // 2)
    body = nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])
    matrices, rest = split_parameters(body)
    heads = [*fine.parameters(), *coarse.parameters()]
    optimiser = Mixed(matrices, [*rest, *heads], lr=2e-3)
    model.train()
    start = time.monotonic()
    for step in range(steps):
        pixels, patch_truth, cell_truth = _draw(bank, batch, rng)
        features = tower_features(model, pixels)
        loss, right = fine.loss(features, patch_truth)
        cell_loss, cell_right = coarse.loss(pooled_tokens(model, features), cell_truth)
        (loss + cell_loss).backward()
        optimiser.step(schedule(step / steps))
        if step % 20 == 0 or step == steps - 1:
            row: dict[str, object] = {"stage": "tower", "step": step, "loss": float(loss.detach())}
            row["patches"], row["cells"] = right, cell_right
            report(row | {"seconds": time.monotonic() - start})


@torch.no_grad()
def settle_scale(model: LlavaOnevisionForConditionalGeneration, bank: Bank, rms: float) -> None:
    """Rescale the projector's output to a given size, which suits the untrained decoder."""
    tokens = pooled_tokens(
        model, tower_features(model, scale_pixels(bank.frames[:8].flatten(0, 1)))
    )
    factor = rms / float(tokens.pow(2).mean().sqrt())
    layer = model.model.multi_modal_projector.linear_2
    layer.weight.mul_(factor)
    layer.bias.mul_(factor)


@torch.no_grad()
def encode_bank(
    model: LlavaOnevisionForConditionalGeneration, bank: Bank, report: Report
) -> Tensor:
    """Pooled visual tokens of every clip: float16 [n, T, P, H]."""
    model.eval()
    start, parts = time.monotonic(), []
    for frames in bank.frames.split(32):
        tokens = pooled_tokens(model, tower_features(model, scale_pixels(frames.flatten(0, 1))))
        parts.append(tokens.unflatten(0, frames.shape[:2]).half())
    report({"stage": "encode", "clips": len(bank.tables), "seconds": time.monotonic() - start})
    return torch.cat(parts)
