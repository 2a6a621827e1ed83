"""Moshi on buffers whose shape and place never change: recorded once, replayed per frame.

`MoshiSteps` makes a new state at every step, which is right for branching and for batches that
come and go, but costs about a thousand launches a frame. Here Mimi's encoder, the temporal
transformer, all steps of the depth transformer and Mimi's decoder are one graph each, replayed
for every frame of 80 ms. Keys lie in a ring of the window's length, at the places they were
rotated to.

A recorded function reads and writes tensors at fixed addresses and decides nothing on the host.
Without CUDA graphs the same function runs unrecorded, so that CPU tests cover it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import MediaError, ModelError
from mmfast.decoding.codebooks import CodeChoice
from mmfast.decoding.sampling import draw, not_finite
from mmfast.frontends.codecs.base import check_pcm
from mmfast.frontends.codecs.stages import FrameStage, tree_map, where_rows
from mmfast.heads.depth import Frame
from mmfast.models.cache_name import CACHE
from mmfast.models.reduction.cache_layers import Pair, cache_over
from mmfast.models.speech.moshi_steps import MoshiFrame, MoshiSteps, UserSound
from mmfast.ops.stream_cache import RowBuffer

WARM_UPS = 3  # lazy initialisation and choice of algorithms must be over before a recording
Run = Callable[[], None]


# Takes a function, which it may call several times, and returns a replay of it.
GraphRecorder = Callable[[Run], Run]


def eager(run: Run) -> Run:
    """No recording: a function is its own replay."""
    return run


def compile_run(run: Run, **options: Any) -> Run:
    """One graph of torch.compile with these options, or an error where it would be several."""
    return torch.compile(run, fullgraph=True, dynamic=False, **options)


class CudaGraphs:
    """CUDA graphs that share a pool: only buffers made outside of functions outlive a replay."""

    def __init__(self, device: torch.device | str = "cuda", cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = torch.device(device), cuda
        self.pool: Any = None

    def __call__(self, run: Run) -> Run:
        """Warm up on a side stream, capture, and return the replay."""
        cuda = self.cuda
        with cuda.device(self.device):
            side = cuda.Stream()
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
            cuda.current_stream().wait_stream(side)
            if self.pool is None:
                self.pool = cuda.graph_pool_handle()
            graph = cuda.CUDAGraph()
            # Other threads may go on with their own work on the device meanwhile.
            with cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                run()
        replay: Run = graph.replay  # holds the graph
        return replay


def graphs_for(device: torch.device | str) -> GraphRecorder:
    """Return a recorder of CUDA graphs on a CUDA device, `eager` elsewhere."""
    return CudaGraphs(device) if torch.device(device).type == "cuda" else eager


class MoshiStatic:
    """`MoshiSteps` for B conversations that go on and on; arguments and errors as there.

    It gives what `MoshiSteps` gives without a drafter: the same codes when greedy, and from the
    same seeds the same draws. `graphs` is what records, None: CUDA graphs on a CUDA device.

    `heard` `[B, K]` is the buffer of the user's newest codes; `active` `[B]` bool are the
    conversations that take the step, the others stay as they are; `finite` `[]` bool: no logits
    were NaN or infinite so far.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        batch: int = 1,
        *,
        text: CodeChoice | None = None,
        audio: CodeChoice | None = None,
        window: int | None = None,
        delays: tuple[int, ...] | None = None,
        graphs: GraphRecorder | None = None,
    ) -> None:
        self.steps = steps = MoshiSteps(model, text=text, audio=audio, delays=delays, window=window)
        self.model, self.books, self.batch = model, steps.books, batch
        self.core: Any = steps.frames.depth
        like = model.decoder.lm_head.weight
        # Place p of a stream lies at p modulo the window.
        shapes = _shapes(model.config, batch, steps.decoder.window)
        self.ring = [RowBuffer(data=like.new_zeros(2, *shape)) for shape in shapes]
        self._cache = cache_over(len(shapes), self._write_ring, lambda _: 0)
        self._buffers(like)
        graphs = graphs or graphs_for(like.device)
        self._hear, self._say = graphs(self._temporal), graphs(self._depth)
        self.reset()

    def _buffers(self, like: Tensor) -> None:
        batch, books, device = self.batch, self.books, like.device
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        self.seen, self.frames = whole(batch), whole(batch)
        self.text, self.codes, self.heard = whole(batch), whole(batch, books), whole(batch, books)
        self.active = torch.ones(batch, dtype=torch.bool, device=device)
        self.opening = torch.zeros_like(self.active)  # the step before the user's first frame
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.hidden = like.new_zeros(batch, self.model.config.hidden_size)
        rings = (self.steps.user_ring, self.steps.own_ring)
        self.user, self.own = (whole(batch, len(r.delays), r.longest + 1) for r in rings)
        self._user_at = torch.tensor([rings[0].longest - d for d in rings[0].delays], device=device)
        self._own_at = torch.tensor(rings[1].delays, device=device)
        self._places = torch.arange(int(self.steps.decoder.window or 1), device=device)
        self._at = torch.arange(batch, device=device)[:, None], whole(batch, 1)
        # Drawn outside of what is recorded, in the order in which `MoshiSteps` draws.
        self.dice = torch.zeros(1 + books, batch, device=device)
        blank = self.core.begin(self.hidden)
        self._frame = Frame(self.hidden, blank.layers)
        self.out = MoshiFrame(whole(batch), whole(batch, books), self.opening.clone())

    @torch.no_grad()
    def step(self, user: Tensor, active: Tensor | None = None) -> MoshiFrame:
        """Hear one frame of the user's codes `[B, K]`, say one frame of the same moment.

        `active` `[B]` bool are the conversations that take the step, None for all; the others give
        the frame before. The next step overwrites the buffers that this returns.
        """
        self.heard.copy_(user)
        if active is None:
            self.active.fill_(True)
        else:
            self.active.copy_(active)
        self.opening.fill_(False)
        self._write()
        return self.out

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Start conversations anew (`[B]` bool, None for all); runs the step before the first."""
        rows = torch.ones_like(self.active) if rows is None else rows.to(self.active.device)
        for counter in (self.seen, self.frames):
            counter.masked_fill_(rows, 0)
        for ring in (self.user, self.own):
            ring.masked_fill_(rows[:, None, None], self.steps.no_code)
        self.text.masked_fill_(rows, self.steps.no_text)
        self.codes.masked_fill_(rows[:, None], self.steps.no_code)
        self.active.copy_(rows)
        self.opening.copy_(rows)
        self.finite.fill_(True)
        self._write()

    def _write(self) -> None:
        for at, choice in enumerate([self.steps.text, *[self.steps.audio] * self.books]):
            if not choice.greedy:
                self.dice[at].copy_(choice.uniform(self.dice[at]))
        self._hear()
        self._say()

    def _temporal(self) -> None:
        early = self.frames[:, None] < self.steps.lags
        said = self.codes.masked_fill(early | self.opening[:, None], self.steps.no_code)
        speaking = self.active & ~self.opening
        _push(self.user, self.heard, speaking)
        late = self.user.gather(2, self._user_at[None, :, None].expand(self.batch, -1, 1))[:, :, 0]
        heard = late.masked_fill(self.opening[:, None], self.steps.no_code)
        both, decoder = torch.cat([said, heard], dim=1), self.model.decoder.model
        embeds = decoder.embed_tokens(self.text)
        embeds = embeds + sum(table(both[:, i]) for i, table in enumerate(self.model.embed_tokens))
        self._at[1].copy_((self.seen % len(self._places))[:, None])
        sees = self._places <= self.seen[:, None]  # [B, W] all of a ring that has gone round
        out = decoder(
            inputs_embeds=embeds[:, None],
            attention_mask=self.steps.decoder.mask(sees[:, None, None], embeds.dtype),
            position_ids=self.seen[:, None],
            **{CACHE: self._cache},
            use_cache=True,
        ).last_hidden_state
        self.hidden.copy_(out[:, -1])
        self.seen.add_(self.active)
        self.frames.add_(speaking)

    def _write_ring(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        """Write one entry `[B, H, 1, d]` per stream; attention reads the whole ring."""
        ring = self.ring[layer]
        ring.scatter(torch.stack((keys, values)), self._at)
        return ring.read(0, 0, len(self._places)), ring.read(1, 0, len(self._places))

    def _depth(self) -> None:
        logits = self.model.decoder.lm_head(self.hidden)
        text = self._pick(logits, self.steps.text, 0)
        token, codes = text, []
        for at in range(self.books):
            logits = self.core.run(self._frame, token[:, None], at)[:, 0]
            token = self._pick(logits, self.steps.audio, at + 1)
            codes.append(token)
        new = torch.stack(codes, dim=1)
        _push(self.own, torch.cat([text[:, None], new], dim=1), self.active)
        for old, mine in ((self.text, text), (self.codes, new)):
            old.copy_(torch.where(self.active.view(-1, *[1] * (old.dim() - 1)), mine, old))
        out = self.own.gather(2, self._own_at[None, :, None].expand(self.batch, -1, 1))[:, :, 0]
        self.out.text.copy_(out[:, 0])
        self.out.codes.copy_(out[:, 1:])
        self.out.whole.copy_(self.seen > self.steps.own_ring.longest)

    def _pick(self, logits: Tensor, choice: CodeChoice, at: int) -> Tensor:
        self.finite.logical_and_(logits.amax(-1).isfinite().all())
        if choice.greedy:
            return logits.argmax(-1)
        return draw(choice.probs(logits, check=False, at=max(at - 1, 0)), self.dice[at])


def _push(ring: Tensor, new: Tensor, rows: Tensor) -> None:
    """Append `[B, Q]` to rings `[B, Q, R]` of some streams, `[B]` bool; the oldest goes."""
    moved = torch.cat([ring[:, :, 1:], new[:, :, None]], dim=2)
    ring.copy_(torch.where(rows[:, None, None], moved, ring))


def _shapes(config: Any, batch: int, window: int | None) -> list[tuple[int, ...]]:
    shape = (batch, config.num_key_value_heads, int(window or 1), config.head_dim)
    return [shape] * config.num_hidden_layers


class StaticStage:
    """The stage of a codec whose layers are all in step (Mimi), recorded.

    Write a frame into the buffer `given` `[B, ..., n]`; `run` leaves what it became in `out` `[B,
    ..., m]`. `stage` is `codec.encoder` or `codec.decoder`; `graphs` is what records, None: CUDA
    graphs on a CUDA device. ModelError: a layer waits for later samples, so a frame in is not
    always a frame out.
    """

    @torch.no_grad()
    def __init__(
        self, stage: FrameStage, given: Tensor, graphs: GraphRecorder | None = None
    ) -> None:
        self.layers, self.given = stage.layers, given
        if not self.layers.in_step or stage.lookahead or stage.startup > 1:
            raise ModelError(
                "this codec holds samples back, so its steps have no fixed shape; use Mimi, or "
                "its stages as they are"
            )
        self._state = tree_map(torch.clone, self.layers.start(len(given)))
        state, out = self.layers.step(self._state, given)
        tree_map(_same_shape, self._state, state)
        self.out = torch.zeros_like(out)
        self._replay = (graphs or graphs_for(given.device))(self._run)
        self.reset()

    @torch.no_grad()
    def run(self) -> Tensor:
        """Take the frame in `given`; what it became is in `out`."""
        self._replay()
        return self.out

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Start streams anew (`[B]` bool, None for all)."""
        fresh = self.layers.start(len(self.given))
        if rows is not None:
            fresh = where_rows(rows, fresh, self._state)
        tree_map(lambda old, new: old.copy_(new), self._state, fresh)

    def _run(self) -> None:
        # Counts of frames stay at zero: layers in step do not look at them.
        state, out = self.layers.step(self._state, self.given)
        tree_map(lambda old, new: old.copy_(new), self._state, state)
        self.out.copy_(out)


def _same_shape(old: Tensor, new: Any) -> Tensor:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ModelError(
            f"a state of {list(old.shape)} became one of {list(new.shape)}: the codec has no fixed "
            "shape for one frame at a time"
        )
    return old


class MoshiFrames:
    """B conversations with Moshi in step; each frame is what `MoshiVoice.step` gives.

    `voice` is a `MoshiVoice`; its drafter is not used, as all codes of a frame are said one after
    the other inside one graph. `graphs` is what records, None: CUDA graphs on a CUDA device.
    ModelError: the codec has no steps of a fixed shape.
    """

    def __init__(self, voice: Any, batch: int = 1, graphs: GraphRecorder | None = None) -> None:
        steps = voice.steps
        codec = voice.codec
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
    def frame(self, pcm: Tensor) -> UserSound:
        """Hear one frame `[B, hop]` of the users' sound, say one frame of the same time.

        Returns sound `[B, hop]`, text `[B, 1]` and codes `[B, K, 1]` in buffers that the next frame
        overwrites. MediaError: not one frame of finite sound per conversation.
        """
        pcm = check_pcm(pcm, self.steps.batch)
        if pcm.shape[1] != self.hop:
            raise MediaError(f"{pcm.shape[1]} samples are no frame; give {self.hop}")
        self.ear.given.copy_(pcm)
        user = self.ear.run()[:, :, 0]
        said = self.steps.step(user)
        self.mouth.given.copy_(said.codes.where(said.whole[:, None], 0)[:, :, None])
        return UserSound(self.mouth.run(), said.text[:, None], self.mouth.given)

    def check(self) -> None:
        """Wait for the device; ModelError if logits since the last `reset` were NaN or infinite."""
        if not bool(self.steps.finite):
            raise ModelError(not_finite())

    def reset(self, rows: Tensor | None = None) -> None:
        """Start conversations anew (`[B]` bool, None for all)."""
        for part in (self.ear, self.steps, self.mouth):
            part.reset(rows)


def frame_bytes(model: Any, batch: int = 1) -> Mapping[str, int]:
    """Least bytes that a frame of Moshi reads, by part: `temporal`, `depth`, `codec`, `kv`.

    Every weight is read once, and all keys and values of a window in each of `batch` conversations.
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
    return {**found, "kv": entry * width * batch * int(config.sliding_window)}


def _bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())
