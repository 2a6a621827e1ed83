"""A real vLLM beside `mmfast.attach` on transformers, in one process of vLLM's own environment.

Run as a program it reads a job from standard input and writes what it found as one line of JSON,
since vLLM wants an environment of its own:

    {"family", "folder", "specs": [spec or null], "cases": {name: [[text, images, videos], …]},
     "options": {…of LLM}, "rounds", "answers", "fault", "interpreted"}

An image is `[height, width, seed]`, a video `[frames, height, width, seed]`, and `{image}` and
`{video}` in a text stand for them. The answer has for every spec and case, prompt by prompt, the
tokens of both, their log-probabilities and the lengths of both prompts, or the error of either
side. A prompt may be asked for several `answers`, and no cache is emptied between specs. With
`fault` the plugin forgets where the kept tokens were; `interpreted` takes vLLM's runner for GPUs.
With `serve` in place of specs and cases, a server is asked.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

for place in ("models", "families"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / place))
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
SHAPE = {"width": 128, "heads": 2, "kv_heads": 1, "layers": 3, "depth": 3}
TOKENS = 8
TEMPLATE = (
    "{% for message in messages %}{% for content in message['content'] %}"
    "{% if content['type'] == 'text' %}{{ content['text'] }}"
    "{% else %}<|vision_start|><|{{ content['type'] }}_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endfor %}"
)


def checkpoint(family: str, folder: Path) -> Any:
    """Save a random model once, and return it with its processor."""
    import tiny_models

    made = tiny_models.build(family, **SHAPE)
    parts = made.processor.image_processor, made.processor.video_processor
    for name in ("image_mean", "image_std"):  # one pair for both, as vLLM's towers have it
        setattr(parts[0], name, getattr(parts[1], name))
    if family.endswith("moe"):  # as in the published files; transformers always norms
        made.model.config.text_config.norm_topk_prob = True
    made.processor.chat_template = made.processor.tokenizer.chat_template = TEMPLATE
    if not (folder / "config.json").is_file():
        made.model.save_pretrained(folder)
        made.processor.save_pretrained(folder)
        if family.endswith("moe"):
            as_published(folder / "model.safetensors")
    return made


def as_published(path: Path) -> None:
    """Turn the products of experts round, as a model that was loaded saves them itself."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    for name, weight in weights.items():
        if ".experts." in name:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, path, metadata={"format": "pt"})


def pixels(items: list[list[int]]) -> list[Any]:
    """Smooth pictures and clips in which things move: `[height, width, 3]` or with frames."""
    import numpy as np

    out = []
    for *size, seed in items:
        rng = np.random.default_rng(seed)
        frames, (height, width) = (size[0] if len(size) == 3 else 1), size[-2:]
        picture = rng.integers(0, 256, (frames, height, width, 3)).astype(np.float64)
        for frame in range(1, frames):  # half of a frame is what was there before
            still = slice(0, width // 2)
            picture[frame, :, still] = picture[0, :, still] + rng.normal(
                0, 4, (height, width // 2, 3)
            )
        clip = picture.clip(0, 255).astype(np.uint8)
        out.append(clip if len(size) == 3 else clip[0])
    return out


def facts_of(clip: Any) -> dict[str, Any]:
    """What vLLM and the processor of transformers are told about a clip."""
    count = len(clip)
    return {
        "fps": 2.0,
        "duration": count / 2,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def framed(text: str) -> str:
    """A prompt as a chat template writes it."""
    for kind in ("image", "video"):
        text = text.replace(f"{{{kind}}}", f"<|vision_start|><|{kind}_pad|><|vision_end|>")
    return text


def attached(
    made: Any, spec: str | None, text: str, images: Any, videos: Any, fps: float = 2.0
) -> dict[str, Any]:
    """Tokens of transformers under `mmfast.attach`, one prompt alone."""
    from contextlib import nullcontext

    import mmfast

    inputs = made.inputs([framed(text)], images=images, videos=videos, fps=fps)
    with mmfast.attach(made.model, spec) if spec else nullcontext():
        out = made.model.generate(
            **inputs,
            max_new_tokens=TOKENS,
            do_sample=False,
            suppress_tokens=made.blocked(),
            return_dict_in_generate=True,
            output_logits=True,
        )
    length = inputs["input_ids"].shape[1]
    tokens = out.sequences[0, length:].tolist()
    pairs = zip(out.logits, tokens, strict=True)
    scores = [float(logits[0].log_softmax(-1)[token]) for logits, token in pairs]
    pads = [made.processor.image_token_id, made.processor.video_token_id]
    places = sum(int((inputs["input_ids"] == each).sum()) for each in pads)
    return {"length": length, "places": places, "tokens": tokens, "scores": scores}


def request(text: str, images: Any, videos: Any) -> dict[str, Any]:
    """A prompt for vLLM."""
    media: dict[str, Any] = {}
    if images:
        from PIL import Image

        media["image"] = [Image.fromarray(each) for each in images]
    if videos:
        media["video"] = [(each, facts_of(each)) for each in videos]
    return {"prompt": framed(text), "multi_modal_data": media}


def served(engine: Any, prompts: list[dict[str, Any]], n: int) -> list[list[dict[str, Any]]]:
    """Tokens of vLLM, all prompts at once: n answers of each, of which the i-th are a list."""
    from vllm import SamplingParams

    options = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    options |= {"temperature": 0} if n == 1 else {"n": n, "top_k": 1}  # the likeliest each time
    wish = SamplingParams(**options, allowed_token_ids=list(range(256)))
    found: list[list[dict[str, Any]]] = [[] for _ in range(n)]
    for out in engine.generate(prompts, wish, use_tqdm=False):
        for answers, one in zip(found, out.outputs, strict=True):
            tokens = list(one.token_ids)
            scores = [step[i].logprob for step, i in zip(one.logprobs, tokens, strict=True)]
            length = len(out.prompt_token_ids)
            answers.append({"length": length, "tokens": tokens, "scores": scores})
    return found


def line(error: BaseException) -> str:
    """The last line of an error, where it is ours or not."""
    return traceback.format_exception_only(error)[-1].strip()


def parts() -> dict[str, tuple[Any, dict[str, Any]]]:
    """A picture and a clip as a client sends them: pixels, part of a message."""
    import base64
    import io

    import numpy as np
    from PIL import Image

    def written(frame: Any, form: str) -> bytes:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, form)
        return file.getvalue()

    picture, clip = pixels([[40, 56, 1], [4, 56, 72, 1]])
    frames = [written(each, "JPEG") for each in clip]
    clip = np.stack([np.asarray(Image.open(io.BytesIO(each))) for each in frames])
    image = "data:image/png;base64," + base64.b64encode(written(picture, "PNG")).decode()
    video = "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in frames)
    return {
        "image": (picture, {"type": "image_url", "image_url": {"url": image}}),
        "video": (clip, {"type": "video_url", "video_url": {"url": video}}),
    }


def asked(made: Any, model: str, spec: str, port: int) -> dict[str, Any]:
    """Ask a server about a picture and a clip with OpenAI's client, streamed and not."""
    import openai

    def ask(part: dict[str, Any], key: str = "secret", **more: Any) -> Any:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
        content = [{"type": "text", "text": "a "}, part, {"type": "text", "text": " b"}]
        ours = {"ignore_eos": True, "return_token_ids": True, "allowed_token_ids": [*range(256)]}
        return client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=TOKENS,
            timeout=300,
            extra_body=ours,
            **more,
        )

    def refused(*words: Any, **more: Any) -> int:
        try:
            ask(*words, **more)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    found: dict[str, Any] = {}
    for kind, (what, part) in parts().items():
        reply = ask(part)
        pieces = [*ask(part, stream=True, stream_options={"include_usage": True})]
        streamed = [choice.model_dump() for each in pieces for choice in each.choices]
        media = ([what], []) if kind == "image" else ([], [what])
        mine = attached(made, spec, f"a {{{kind}}} b", *media, fps=1.0)  # vLLM's guess for frames
        found[kind] = {
            "attach": mine["tokens"],
            "whole": mine["length"],
            "places": mine["places"],
            "tokens": reply.choices[0].token_ids,
            "streamed": [i for each in streamed for i in each.get("token_ids") or ()],
            "prompt_tokens": [reply.usage.prompt_tokens, pieces[-1].usage.prompt_tokens],
        }
    far = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    return found | {"without_key": refused(part, key="wrong"), "remote": refused(far)}


def asked_over_http(made: Any, folder: Path, spec: str) -> dict[str, Any]:
    """Start `mmfast serve --engine vllm` and ask it."""
    import socket
    import subprocess
    import time
    import urllib.request

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--engine", "vllm", "--model", str(folder), "--reduce", spec]
    words += ["--port", str(port), "--context", "1024", "--dtype", "float32", "--api-key", "secret"]
    os.environ.setdefault("VLLM_CPU_CI_ENV", "1")  # traced, but not compiled in C++ for minutes
    server = subprocess.Popen([sys.executable, "-m", "mmfast", *words], stdout=sys.stderr)

    def ready() -> bool:
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5))
        except OSError:
            return False

    try:
        end = time.monotonic() + 700
        while not ready():
            assert server.poll() is None and time.monotonic() < end, "the server did not start"
            time.sleep(1)
        return asked(made, str(folder), spec, port)
    finally:
        server.terminate()
        server.wait(60)


def interpret() -> None:
    """Take vLLM's runner for GPUs, whose Triton kernels an interpreter runs on the CPU."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    from triton.backends import backends

    backends["cpu"] = backends["nvidia"]  # vLLM looks for one of that name


def run(job: dict[str, Any]) -> Any:
    """Answer a job."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if job.get("interpreted"):
        interpret()
    import torch

    torch.set_num_threads(1)
    folder = Path(job["folder"])
    made = checkpoint(job["family"], folder)
    if job.get("serve"):
        return asked_over_http(made, folder, job["spec"])
    if job.get("fault"):
        from mmfast.vllm import media

        media.number = lambda channels: channels.new_zeros(3, len(channels), dtype=torch.int64)
    from vllm import LLM

    options = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, **job["options"]}
    engine = LLM(str(folder), **options)
    found: dict[str, Any] = {}
    for spec in job["specs"]:
        if spec:
            os.environ["MMFAST_VLLM_REDUCE"] = spec
        mine = found.setdefault(str(spec), {})
        for name, case in job["cases"].items():
            media = [(text, pixels(images), pixels(videos)) for text, images, videos in case]
            row: dict[str, Any] = {"attach": [], "vllm": []}
            try:
                row["attach"] = [attached(made, spec, *each) for each in media]
            except Exception as error:
                row["attach_error"] = line(error)
            try:
                for _ in range(job.get("rounds", 1)):
                    prompts = [request(*each) for each in media]
                    row["vllm"] += served(engine, prompts, job.get("answers", 1))
            except Exception as error:
                traceback.print_exc()
                row["vllm_error"] = line(error)
            mine[name] = row
    return found


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(run(json.load(sys.stdin))), file=output)
