"""Tables of `mmfast bench --stream`, `--speech`, `--serve`, `--encoder`, `--decode`, `--train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mmfast.bench.report.table import DERIVED, NOT_MEASURED, ReportTable, Rows, score, stamp
from mmfast.bench.results import Row


def _named(
    suite: str, keys: Sequence[str], tables: Mapping[str, tuple[str, str]]
) -> tuple[ReportTable, ...]:
    """A table for each benchmark of a suite and device; of rows that agree in `keys` the latest."""

    def title(name: str, text: str) -> Callable[[Rows], str]:
        return lambda rows: f"**{text}** (`--{suite} {name}`): {_basis(rows)}"

    return tuple(
        ReportTable(suite, columns, name, keys, ("device",), before=title(name, text), titled=True)
        for name, (text, columns) in tables.items()
    )


def _basis(rows: Rows) -> str:
    if not rows:
        return NOT_MEASURED
    row = rows[-1]
    clock = f", {row['clock']}" if "clock" in row else ""
    threads = f", {row['threads']} threads" if row.get("threads", 1) > 1 else ""
    noise = f", noise {100 * row['noise']:.1f} %" if "noise" in row else ""
    return f"{row['processor']}{clock}{threads}{noise}, {stamp(*rows)}."


def _accepted(row: Row) -> str:
    found = row["acceptance"]
    values = found.values() if isinstance(found, Mapping) else found
    return ", ".join(f"{100 * value:.0f} %" for value in values)


def _by_overlap(row: Row) -> str:
    return ", ".join(f"{band} {share:.0%}" for band, share in row["by_overlap"].items())


def _gain(row: Row) -> str:
    if row["speedup"] == 1.0:
        return "1"
    return "=" if abs(row["speedup"] - 1) <= row["noise"] else f"{row['speedup']:.2f}x"


def _overhead(row: Row) -> str:
    quiet = abs(row["overhead"]) <= row["noise"]
    return "=" if quiet else f"{100 * row['overhead']:+.1f} %"


_BUSY = 2.0  # work a core: beyond it the clock says more of other programs than of the server


def _answered(row: Row) -> str:
    late = " after its time" if row["allowed_ms"] else ""
    busy = f" (load {row['load']:.0f})" if row["load"] > _BUSY else ""
    return f"{row['ms']:.0f}{late}{busy}"


def _socket(key: str) -> Callable[[Row], str]:
    names = {"reply": "first_audio"}
    return lambda row: f"{row[names.get(row['job'], 'barge_in') + key]:.0f}"


_SPANS = {"reply": "end of a question to first sound"}
DERIVED.update(
    accepted=_accepted,
    bands=_by_overlap,
    gain=_gain,
    added=_overhead,
    answered_ms=_answered,
    attack=lambda r: " ".join(f"`{word}`" if "/" in word else word for word in r["job"].split()),
    errors=lambda row: score(row, "wer", 0),
    frame_ms=lambda row: row["median_ms"] / row["frames"],
    gigabytes=lambda row: row["mb"] / 1e3,
    knob_text=lambda row: ", ".join(f"{k}={v}" for k, v in row["knobs"].items()),
    merged=lambda row: row["merging_ms"] / row["median_ms"],
    minutes=lambda row: row["seconds"] / 60,
    order=lambda row: ", ".join(map(str, row["places"])),
    passes_at_once=lambda row: row["wide_ms"] / row["pass_ms"],
    pruned=lambda row: f"`{row['job']}`" if ":" in row["job"] else row["job"],
    same=lambda row: "yes" if row["same_tokens"] else "no",
    socket_ms=_socket("_ms"),
    socket_p95=_socket("_p95_ms"),
    span=lambda row: _SPANS.get(row["job"], "barge-in to silence"),
    tower_part=lambda r: f"{r['tower']}, {r['layers']} of {r['of_layers']} blocks, {r['device']}",
    work_text=lambda row: row["work"].replace("none", ""),
)
STREAM = {
    "frame-cache": (
        "Encoder that recomputes a quarter of the patches",
        "shape: {preset} | what: {note} | : [method]`{job}` or {job} | ms a call: {median_ms:.0f} "
        "| saved: [method]{saved:.1%}",
    ),
    "frame-cache-quality": (
        "Its features against the stock tower's, cosine, embedded clips",
        "knobs: {knob_text} | frames/s: {fps:g} | patches computed: {computed:.0%} | "
        "mean: {cosine:.4f} | worst frame: {cosine_worst_frame:.4f} | "
        "worst token: {cosine_worst_token:.4f}",
    ),
    "frame-cache-motion": (
        "Frame cache under a goal of 0.98 while the camera moves: cosine to stock features, and "
        "that of keeping those of the first frame",
        "tower: {model}, {note} | motion: {motion} | cosine: {cosine:.4f} | "
        "worst frame: {cosine_worst_frame:.4f} | first frame kept: {cosine_first_frame:.3f} | "
        "patches computed: {computed:.0%} | time of stock: {ratio:.2f} (noise {noise:.1%})",
    ),
    "prefill": (
        "Prefill of frames as they come",
        "shape: {preset} | what: {note} | : [method]`{job}` or {job} | ms: {median_ms:.0f} | "
        "saved: [method]{saved:.1%}",
    ),
    "reader": (
        "Reading 60 s of 720p, GOP 250, at 1 frame/s, identical frames",
        "reader: {job} | ms: {median_ms:.0f} | faster: {speedup:.2f}x | "
        "processor ms: {cpu_median_ms:.0f} | less work: {cpu_speedup:.2f}x",
    ),
    "reuse": (
        "Prefill with pictures that were seen at another place; the rest is text",
        "shape: {preset}, {dtype} | pictures: {note} or one | recomputed: `{job}` | "
        "tokens read: {computed} of {tokens} | ms: {median_ms:.0f} | "
        "of a full prefill: {of_full:.1%} | "
        "last hidden state off by: {hidden_gap:.1%} | keys and values off by: {kv_gap:.1%}",
    ),
    "reuse-questions": (
        "Questions about pictures seen before in another order, behind a picture of another case",
        "questions need: {questions} | recomputed: `{reuse}` or all | tokens read: {computed:.0%} "
        "| right: {accuracy:.1%} | of full: {of_full:.1%} | same answer: {same_answer:.1%} | "
        "first logits off by: {logit_gap:.1%} | questions: {n}",
    ),
    "reuse-agents": (
        "Agents that ask about the same pictures, each behind an opening of its own, "
        "of which the first alone has read them",
        "reuse: `{reuse}` or all read | agents: {agents} | tokens read: {computed:.0%} | "
        "right: {accuracy:.1%} | same answer: {same_answer:.1%} | first logits off by: "
        "{logit_gap:.1%} | keys and values off by: {kv_gap:.1%} | questions: {n}",
    ),
    "reuse-clip": (
        "A clip asked five questions",
        "reuse: `{reuse}` or none | calls of the tower: {tower_calls} | "
        "tokens read, first question: {tokens_first} | tokens, later: {tokens_later:.0f} | "
        "processor ms, first: {first_ms:.0f} | ms, later: {later_ms:.0f} | "
        "same answers: {identical}",
    ),
    "ask": (
        "What a question copies of a full window, its own rows not counted, those of frames are",
        "shape: {preset}, {dtype} | what: {note} | job: {job} | MB: {copied_mb:.1f} | "
        "ms: {median_ms:.1f}",
    ),
    "score": (
        "Random frames of the tiny shape under each score policy; what is held at every step",
        "memory: `{memory}` | frames: {n:,} | tokens, most: {most} | positions: {positions:,} | "
        "bytes since frame: {early:,} ({held_growth:+.2%}) | ms a frame, then: {early_ms:.1f} | "
        "ms a frame, last: {late_ms:.1f} ({slowdown:+.1%}) | "
        "operations a frame, then and last: [operations]{operations_early:,} and {operations:,}",
    ),
    "index": (
        "Index of one layer of the 7B shape after days of simulated video; what a question costs",
        "frames: {n:,}, {note} | memory: `{memory}` | index MB: {index_mb:,.1f} | "
        "of groups: {group_mb:.1f} | ms a question: {median_ms:.1f} | faster: {speedup:.1f}x | "
        "frames read that the flat search reads, %: {recall:.1%}",
    ),
    "bounded": (
        "An endless stream; growth since frame 2,000, time per frame against frames 1,000 to 2,000",
        "memory: `{memory}`, `{reduce}` | frames: {n:,} | "
        "session MB: {held_mb:.1f} ({held_growth:+.2%}) | "
        "process MB: {resident_mb:.0f} ({growth:+.2%}) | ms a frame, then: {early_ms:.1f} | "
        "ms a frame, last: {late_ms:.1f} ({slowdown:+.1%})",
    ),
}
SPEECH = {
    "codec": (
        "The embedded codec; medians, real-time factors of both ways",
        "sound: {job}, {bits_per_second} bit/s or {job} | word errors, %: {errors} | "
        "PESQ: {pesq:.2f} | STOI: {stoi:.3f} | log-mel: {mel_db:.1f} dB | "
        "encode, decode: {encode_rtf:.3f} and {decode_rtf:.3f} | sentences: [pesq]{n}",
    ),
    "modes": (
        "Audio tokens per second; ideal is by the weights read, acceptance per codebook",
        "mode (head): {job} | tokens/s: {tokens_per_second:.0f} | faster: {speedup:.2f}x | "
        "ideal: {ideal:.2f}x | tokens per pass: {tokens_per_pass:.2f} | "
        "drafts per pass: {drafts_per_pass:.2f} | accepted: {accepted} | "
        "as vanilla: {identical:.0%}",
    ),
    "shape": (
        "Drafting on the shape of a 7-billion model, random weights; ideal by the weights read",
        "shape: {preset}, {dtype} | mode: `{job}` | ms a token: {ms_per_token:.0f} | "
        "ms a pass: {main_ms:.0f} | module: [module_cost]{module_cost:.1%} | "
        "faster: {speedup:.2f}x | ideal: {ideal:.2f}x | of ideal: {of_ideal:.2f} | "
        "11 tokens at once, in passes: {passes_at_once:.2f} | ideal with that: {ideal_here:.2f}x "
        "| of that: {of_ideal_here:.2f}",
    ),
    "depth-drafts": (
        "Codes of a frame drafted at once and checked in depth passes; a small trained model",
        "drafter: {job} | choice: {mode} | codebooks: {codebooks} | "
        "passes a frame: {passes_per_frame:.2f} | accepted: {accepted} | "
        "as code by code: {identical:.0%} | frames: {n}",
    ),
    "depth-shape": (
        "The same on the depth decoder of CSM, random weights",
        "way: {job} | codes: {codebooks} | passes: {passes_per_frame} | "
        "ms a frame: {median_ms:.0f} | faster than code by code: {score:.2f}x",
    ),
    "first-sound": (
        "From the end of a spoken question, or from a text, to sound; median and 95th percentile",
        "what: {job} | mode: `{mode}` | first sound, ms: {first_ms:.0f} ({first_p95_ms:.0f}) | "
        "processor ms: {first_cpu_ms:.0f} | its length, ms: {chunk_ms:.0f} | "
        "passes: {passes_before:.0f} | real time (processor): {rtf:.2f} ({cpu_rtf:.2f}) | "
        "gaps, ms: {gap_ms:.0f}",
    ),
    "soak": (
        "Conversation with random interruptions: text heard against sound played",
        "minutes: {minutes:.0f} | turns: {turns:,} | interrupted: {interrupted:,} | "
        "checks: {checks:,} | faults: {faults} | MB (growth): {rss_mb:.0f} ({growth_mb:+.1f})",
    ),
    "replies": (
        "Replies to unseen spoken questions, to follow-ups, and to sound that asks nothing",
        "asked: {job} | right: {score:.1%} | by kind: {kinds} | of: {questions}",
    ),
    "turns": (
        "Turns of generated dialogues that an ear cuts inside, and the delay of their ends",
        "ear: {job} | cut inside: {false_cuts:.1%} | delay, ms: {delay_ms_p50:.0f} | "
        "95th percentile, ms: {delay_ms_p95:.0f} | turns: {n}",
    ),
    "translation": (
        "Translation of unseen sentences into the generated language, before they end",
        "policy: `{policy}` | source: {source} | right words: {score:.1%} | "
        "whole sentences: {whole:.1%} | average lagging: {lag:.2f} | "
        "of the source: {lag_share:.0%}",
    ),
    "overlap": (
        "Translation of two unseen sentences that are said at once; lagging in seconds",
        "policy: `{policy}` | heard by: {source} | right words: {score:.1%} | "
        "by overlap: {bands} | whole sentences: {whole:.1%} | average lagging: {lag:.2f}",
    ),
}
SERVE = {
    "load": (
        "Chats about an image, 32 tokens each; in brackets by processor time",
        "chats: {job} | tokens/s: {tokens_per_s:.0f} | "
        "faster: {speedup:.2f}x ({cpu_speedup:.2f}x) | "
        "longest gap in chunks of prefill: [gap_ms]{gap_chunks:.2f} ({cpu_gap_chunks:.2f})",
    ),
    "mix": (
        "16 chats at once, 40 tokens each: times of those without a spec, and of stock",
        "model: {model} | pictures each: {pictures} | chats: {pruned} | s: {seconds:.2f} | "
        "of no spec: {to_plain:.2f}x | of stock: {to_stock:.2f}x",
    ),
    "choosing": (
        "16 chats at once under policies that choose at every step and under own drafts, 40 tokens "
        "each; ratios of processor time",
        "model: {model} | pictures each: {pictures} | chats: {pruned} | "
        "processor s: {cpu_seconds:.2f} | of no spec: {to_plain:.2f}x | "
        "A/A noise: {noise:.1%} | of stock: {to_stock:.2f}x",
    ),
    "drafts": (
        "Descriptions of clips under each kind of drafts; `draft:` is the first two of five "
        "layers, taught for a minute; processor time of the whole request",
        "at once: {sessions} | drafts: {pruned} | ms a token: {cpu_ms_per_token:.2f} | "
        "of none: {to_plain:.2f}x | A/A noise: {noise:.1%} | proposed: [proposed]{proposed:,} | "
        "accepted: [proposed]{accepted_share:.0%} | of all tokens: [proposed]{drafted:.0%} | "
        "same text: {same}",
    ),
    "paged": (
        "16 texts at once, 40 tokens each, beside the continuous batching of transformers",
        "answered by: {job} | model: {model} | s: {seconds:.2f} | of stock: {to_stock:.2f}x",
    ),
    "open": (
        "Requests at random, six specs mixed; in brackets predicted from requests alone",
        "load: {job} | asked a second: {asked_per_s:.1f} | answers a second: {per_s:.1f} | "
        "median, ms: {p50_ms:.0f} ({told_p50_ms:.0f}) | "
        "p95, ms: {p95_ms:.0f} ({told_p95_ms:.0f}) | answered: {answered} | "
        "told to come back: {busy} ({told_busy}) | lost: {lost}",
    ),
    "memory": (
        "Memory of the process under the same specs",
        "requests: {n:,} | MB: {mb:.0f} | MB more per 1,000 of the later half: {mb_per_1000:.2f}",
    ),
    "fairness": (
        "Longest gap in a running answer when a prompt comes; in brackets by processor time",
        "beside it: [places]{job}: the last to ask is answered as {order} of {of} or {job} | "
        "ms: {gap_ms:.0f} | processor ms: {cpu_gap_ms:.0f} | "
        "in chunks of prefill: {gap_chunks:.2f} ({cpu_gap_chunks:.2f})",
    ),
    "start": (
        "Seconds from `mmfast serve` to the first answer",
        "question: {job} | median: {answer_s:.1f} | worst: {worst_s:.1f} | "
        "processor time: {cpu_s:.1f}",
    ),
    "realtime": (
        "Milliseconds on the Realtime socket",
        "from and to: {span} | sessions: {sessions} | median: {socket_ms} | p95: {socket_p95}",
    ),
    "faults": (
        "A worker of each role killed under load: its streams end, the rest complete",
        "engine: {engine} | killed: {role} | replicas: {replicas} | streams: {streams} | "
        "lost on it: {lost} | lost elsewhere: {wrongly_lost} | "
        "s to an answer: {seconds_to_answer:.1f} | s to all workers: {seconds_to_recover:.1f}",
    ),
    "batch": (
        "Clips a second of `mmfast batch`",
        "engine: {job} | clips/s: {clips_per_s:.1f} | faster: {speedup:.2f}x | "
        "s to the first: {start_s:.0f}",
    ),
    "vllm": (
        "vLLM on a small random Qwen2.5-VL, a clip and 16 tokens a request; in brackets by "
        "processor time",
        "at once: {sessions} | what: {pruned} | prompt tokens: {prompt_tokens} | "
        "requests/s: {requests_per_s:.2f} | faster: {speedup:.2f}x ({cpu_speedup:.2f}x) | "
        "ms to the first token: {ttft_ms:.0f}",
    ),
    "vllm-reducers": (
        "Every reducer in that vLLM, one request at a time, half of the tokens kept; the costliest "
        "with most of them",
        "what: {pruned} | prompt tokens: {prompt_tokens} | "
        "faster: {speedup:.2f}x ({cpu_speedup:.2f}x) | ms to the first token: {ttft_ms:.0f}",
    ),
    "bombs": (
        "Harmful input: answer, time, memory of the server and all its processes",
        "what: {attack} | bytes sent: [sent_bytes]{sent_bytes:,} or without end | "
        "status: {status} | ms: {answered_ms} | processor ms: {cpu_ms} | MB more: {mb:.0f}",
    ),
}
ENCODER = {
    "merge": (
        "Merging inside the tower; ideal by FLOPs of the blocks",
        "tower: {tower_part} | stage: [reduce]`{job}` or {job} | ms: {median_ms:.0f} | "
        "faster: {gain} | ideal: [reduce]{ideal:.2f}x | "
        "of it to choose and merge: [reduce]{merged:.1%}",
    ),
    "timm": (
        "A ViT of timm with merging inside, and the authors' own code",
        "encoder: {tower_part} | stage: [reduce]`{job}` or {job} | images/s: {images_per_s:.2f} | "
        "faster: {gain} | ideal: [reduce]{ideal:.2f}x | of the ideal: [reduce]{of_ideal:.0%}",
    ),
    "scene": (
        "An aggregator of VGGT's shape with merging in the attention over all frames; random "
        "weights, and pictures of noise",
        "frames: {frames} | tokens: {tokens:,} | blocks: {blocks} | stage: [reduce]`{job}` or "
        "{job} | ms: {median_ms:.0f} | faster: {gain} | ideal: [reduce]{ideal:.2f}x",
    ),
    "compile": (
        'Whole tower with `encoder="fast"` and `"compile"`',
        "tower: {tower_part} | mode: {job} | ms: {median_ms:.0f} | faster: {gain} | "
        "first call, s: {first_call_s:.0f}",
    ),
    "patch": (
        "Patch embedding by a matrix product",
        "patches: {shape}, {device} | numbers: {dtype} | way: {job} | ms: {median_ms:.1f} | "
        "faster: {gain}",
    ),
    "attention": (
        "Attention of one block over packed segments",
        "segments: {shape}, {segments} segments of {tokens:,} tokens, {device} | way: {job} | "
        "ms: {median_ms:.1f} | faster: {gain}",
    ),
    "batch": (
        "Frames a call",
        "tower: {tower_part} | way: {job} | ms a frame: {frame_ms:.0f} | faster: {gain} | "
        "peak MB: {peak_mb:.0f}",
    ),
}
_WEIGHTS = (
    "shape: {preset}, {device} | weights: `{job}` | step, ms: {median_ms:.0f} | faster: {gain} | "
    "prompt, ms: {prefill_ms:.0f} | prompt faster: {prefill_speedup:.2f}x | "
    "layers and head, MB: {weights_mb:.0f} | error of logits: {logit_error:.2%}"
)
_SELECTION = (
    "read at each step: `{job}` | of the entries: {read_share:.0%} | MB of keys and values read: "
    "{read_mb:.0f} of {cache_mb:.0f} | weights, MB: {weights_mb:,.0f} | stock, ms: {stock_ms:.0f} "
    "| step, ms: {step_ms:.0f} | faster: {speedup:.2f}x | ideal by bytes read: {ideal:.2f}x | "
    "and copied: {ideal_copied:.2f}x | without the rest of the step: {attention_speedup:.1f}x"
)
DECODE = {
    "selection": (
        "A decode step at 16,384 tokens, float32, of which policies read a part",
        _SELECTION,
    ),
    "selection-bfloat16": (
        "A decode step at 16,384 tokens, bfloat16, of which policies read a part",
        _SELECTION,
    ),
    "selection-32k": (
        "A decode step at 32,768 tokens, float32, of which policies read a part",
        _SELECTION,
    ),
    "hooks": (
        "Work that attach() adds to a decode step, beside a stock cache of the same lengths",
        "shape: {preset}, {device} | attached: `{job}` | work of its own: {work_text} | "
        "step, ms: {twin_ms:.1f} | added: {added} | us: {overhead_us:+.0f} | "
        "A/A noise, us: {noise:.1%}, {noise_us:.0f}",
    ),
    "compiled": (
        "Compiled decoding on a static cache behind a reduced prompt",
        "shape: {preset}, {device} | attached: `{reduce}` or stock | eager, ms: {eager_ms:.2f} | "
        "compiled, ms: {compiled_ms:.2f} | gain: {speedup:.2f}x | "
        "graphs / breaks / compiled again / attached anew: {graphs} / {breaks} / {recompiles} / "
        "{recompiles_attached_anew} | same tokens: {same} | first step, s: {compile_s:.0f}",
    ),
    "draft": (
        "Draft and verify: acceptance of one draft in descriptions of the embedded model, measured "
        "without labels, and the gain on a shape with 8,000 visual tokens",
        "shape: {preset} | draft: `{job}` | accepted: {acceptance:.0%} | "
        "step, ms: {step_ms:.0f} | draft, ms: {draft_ms:.0f} | drafts a pass: {drafts} | "
        "tokens a pass: {tokens_a_pass:.2f} | "
        "verifying pass, ms: {verify_ms:.0f} | faster: {speedup:.2f}x | "
        "ideal by bytes: {ideal:.2f}x | same tokens: {same}",
    ),
    "kvpress": (
        "Policies beside kvpress 0.5.5 on the same random weights: time that hooks add to a prompt",
        "shape: {note} | policy: `{job}` | press: {press} | ours, ms: {median_ms:.1f} | "
        "theirs, ms: {theirs_ms:.1f} | theirs / ours: {speedup:.2f}x | same entries: {alike:.1%}",
    ),
    "growing": (
        "A step on the cache of pipelines, which grows in place, beside the stock cache, which is "
        "copied at every step",
        "shape: {preset}, {dtype} | answers at once: {batch} | entries of each: {tokens:,} | "
        "cache: {job} | step, ms: {median_ms:.0f} | faster: {gain}",
    ),
    "weights": (
        "Weight-only rounding: a step and a prompt of the 0.5B shape on packed weights",
        _WEIGHTS,
    ),
    "weights-more": (
        "float16 weights, and activations rounded, too: the same",
        _WEIGHTS,
    ),
    "weights-joint": (
        "Layers that read the same input as one product, beside one product each; of queries, keys "
        "and values, and of gate and up",
        "shape: {preset}, {dtype} | weights: `{job}` | step of several, ms: {base_ms:.0f} | "
        "of one, ms: {median_ms:.0f} | faster: {speedup:.3f}x | A/A noise: {noise:.1%} | "
        "prompt, ms: {prefill_ms:.0f} | prompt faster: {prefill_speedup:.2f}x | "
        "its noise: {prefill_noise:.1%}",
    ),
    "few-rows": (
        "Steps of several answers at once in float32, with products in pieces",
        "shape: {preset} | answers at once: {batch} | entries of each: {tokens} | "
        "stock, ms: {base_ms:.0f} | in pieces, ms: {median_ms:.0f} | faster: {speedup:.2f}x | "
        "A/A noise: {noise:.1%}",
    ),
    "weight-kernels": (
        "One product of the 0.5B shape by kernel, those of torch that lose among them; names in "
        "code are what `weights=` runs",
        "outputs x inputs: {preset} | rows: {rows} | kernel: {job} | ms: {median_ms:.2f} | "
        "faster than float32: {gain} | error: {error:.2%}",
    ),
    "moshi-frame": (
        "A frame of Moshi (80 ms of sound in and out), beside the floor by bytes",
        "shape: {preset} | device: [median_ms]{device} | batch: {batch} | way: {job} | "
        "median, ms: {median_ms:.2f} or {not_measured} | p99, ms: {p99_ms:.2f} | "
        "floor by bytes: {floor_ms:.2f} ms or {gigabytes:.1f} GB | goal, ms: {goal_ms:.1f} | "
        "same codes: {same_codes:.0%}",
    ),
}
_SPARSE = (
    "read: `{job}` | mass kept: {mass:.1%} | pairs computed: {read_share:.0%} | "
    "dense, ms: {dense_ms:,.0f} | sparse, ms: {median_ms:,.0f} | of it choosing: "
    "{choose_ms:,.0f} | faster: {speedup:.2f}x | of rounds: {slowest:.2f} to {fastest:.2f} | "
    "A/A noise: {noise:.1%}"
)
PREFILL = {
    f"sparse-{size}k": (
        f"Attention of a prompt of {tokens} synthetic visual tokens, 7 heads of the 0.5B shape, "
        "float32, dense beside chosen blocks",
        _SPARSE,
    )
    for size, tokens in ((16, "16,384"), (32, "32,768"), (64, "65,536"))
}
TRAIN = {
    "speed": (
        "A step of LoRA on the embedded model, 16 questions; speed-up over all tokens",
        "tokens: `{job}` | ms a step: {median_ms:.0f} | steps/s: {steps_per_s:.2f} | "
        "faster: {gain} | kept for the gradient, MB: {saved_mb:.0f} | peak MB: {peak_mb:.0f}",
    ),
    "adapt": (
        "Accuracy before and after training at a budget, questions about unseen clips",
        "trained at: `{job}`, {steps} steps | asked with: [reduce]`{reduce}` or all | "
        "tokens: {kept:.0f} | before: {before:.1%} | after: {after:.1%} | questions: {n}",
    ),
}
_DRAFTERS = {
    "drafts": (
        "Tokens of held-out texts that a trained drafter says as its model does",
        "model: `{model}` | draft: `{job}` | recipe: `{options}` | after: {course} | "
        "drafted right: {drafted:.1%} | weights: {parameters:,} of {of:,} or {parameters:,}",
    ),
}
_STREAM_KEYS = (
    "job", "preset", "model", "motion", "knobs", "fps", "memory", "questions", "reuse", "note"
)  # fmt: skip
TABLES: dict[str, tuple[ReportTable, ...]] = {
    "stream": _named("stream", _STREAM_KEYS, STREAM),
    "speech_cost": _named("speech", ("job", "mode", "preset", "seed"), SPEECH),
    "serve": _named("serve", ("job", "sessions", "engine", "role", "model"), SERVE),
    "encoder": _named("encoder", ("job", "shape", "tower", "device", "dtype"), ENCODER),
    "train": _named("train", ("job", "reduce", "device"), TRAIN),
    "learned_drafts": _named("train", ("job", "course"), _DRAFTERS),
    "prefill": _named("prefill", ("job", "tokens"), PREFILL),
    "decode": _named(
        "decode", ("preset", "device", "job", "reduce", "batch", "rows", "tokens"), DECODE
    ),
}
