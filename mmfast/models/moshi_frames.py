"""Sound in and sound out with Moshi, a frame at a time, in four graphs.

Mimi's encoder, the temporal transformer, all steps of the depth transformer and Mimi's decoder
are recorded once each (`ops.graphs`) and replayed for every frame of 80 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import MediaError, ModelError
from mmfast.decoding.sampling import not_finite
from mmfast.frontends.codecs.checks import check_pcm
from mmfast.models.moshi_static import MoshiStatic
from mmfast.models.moshi_voice import Heard, MoshiVoice
from mmfast.models.static_stage import StaticStage
from mmfast.ops.graphs import Graphs, graphs_for


class MoshiFrames:
    """B conversations with Moshi in step.

    Says what `MoshiVoice.step` says of the same frames.

    Args:
        voice: Model, codec and choices; its drafter is not used, as all codes of a frame are
            said one after the other inside one graph.
        batch: Conversations B.
        graphs: What records; None: CUDA graphs on a CUDA device.

    Raises:
        ModelError: The codec has no steps of a fixed shape.
    """

    def __init__(self, voice: MoshiVoice, batch: int = 1, graphs: Graphs | None = None) -> None:
        steps = voice.steps
        codec: Any = voice.codec
        device = steps.model.device
        graphs = graphs or graphs_for(device)
        self.hop, self.sample_rate = codec.hop, codec.sample_rate
        self.ear = StaticStage(codec.encoder, torch.zeros(batch, self.hop, device=device), graphs)
        self.steps = MoshiStatic(
            steps.model,
            batch,
            text=steps.text,
            audio=steps.audio,
            window=steps.decoder.window,
            delays=steps.user_ring.delays,
            graphs=graphs,
        )
        codes = torch.zeros(batch, steps.books, 1, dtype=torch.long, device=device)
        self.mouth = StaticStage(codec.decoder, codes, graphs)

    @torch.no_grad()
    def frame(self, pcm: Tensor) -> Heard:
        """Hear one frame, say one frame.

        Args:
            pcm: `[B, hop]` the user's sound.

        Returns:
            Moshi's sound `[B, hop]`, text `[B, 1]` and codes `[B, K, 1]` of the same time, in
            buffers that the next frame overwrites.

        Raises:
            MediaError: Not one frame of finite sound per conversation.
        """
        pcm = check_pcm(pcm, self.steps.batch)
        if pcm.shape[1] != self.hop:
            raise MediaError(f"{pcm.shape[1]} samples are no frame; give {self.hop}")
        self.ear.given.copy_(pcm)
        user = self.ear.run()[:, :, 0]
        said = self.steps.step(user)
        self.mouth.given.copy_(said.codes.where(said.whole[:, None], 0)[:, :, None])
        return Heard(self.mouth.run(), said.text[:, None], self.mouth.given)

    def check(self) -> None:
        """Wait for the device and look back.

        Raises:
            ModelError: Logits of some frame since the last `reset` were NaN or infinite.
        """
        if not bool(self.steps.finite):
            raise ModelError(not_finite())

    def reset(self, rows: Tensor | None = None) -> None:
        """Start conversations anew (`[B]` bool, None for all)."""
        for part in (self.ear, self.steps, self.mouth):
            part.reset(rows)


def frame_bytes(model: Any, batch: int = 1, window: int | None = None) -> Mapping[str, int]:
    """What a frame must read at least: every weight once, and all keys and values of a window.

    Args:
        model: `MoshiForConditionalGeneration`.
        batch: Conversations.
        window: Frames that it looks back; None for the configuration's.

    Returns:
        Bytes by part: `temporal`, `depth`, `codec`, `kv`.
    """
    config = model.config
    decoder, depth = model.decoder, model.depth_decoder
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    width = decoder.lm_head.weight.element_size()
    # A depth transformer reads the weights of every codebook once; of embeddings, one row each.
    parts = {
        "temporal": [*decoder.model.layers, decoder.lm_head],
        "depth": [*depth.layers, depth.input_projections, depth.lm_heads],
        "codec": [model.audio_encoder],
    }
    found = {name: sum(map(_bytes, modules)) for name, modules in parts.items()}
    return {**found, "kv": entry * width * batch * int(window or config.sliding_window)}


def _bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())
