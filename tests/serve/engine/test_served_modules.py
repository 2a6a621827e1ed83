"""Modules of a schema before a question of the engine: the answers of a pipeline."""

from __future__ import annotations

import copy
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from scheduling import Ear, ask, image, model_of

from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.models.prompt import Shot
from mmfast.serve.engine.base import Finish, Options, Request, SamplingOptions
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.modules import PromptModules
from mmfast.streams.reuse.plan import parse_reuse
from mmfast.streams.reuse.schema import PromptSchema
from mmfast.streams.reuse.store import ReuseStore

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Any:
    """An engine with a schema from a file, and the schema as a pipeline has it."""
    folder = tmp_path_factory.mktemp("modules")
    pixels = image(1).shot.pixels
    Image.fromarray(pixels).save(folder / "sea.png")
    document = {
        "modules": {
            "rules": ["be ", {"tone": 6}],
            "sea": [{"image": "sea.png"}, "the sea"],
            "hill": "no picture",
        },
        "unions": [["sea", "hill"]],
    }
    (folder / "schema.json").write_text(json.dumps(document))
    document["modules"]["sea"][0] = pixels
    path = folder / "schema.json"
    with closing(Scheduler(model_of(FAMILY), name=FAMILY, reuse="prefix", modules=path)) as made:
        yield made, PromptSchema.read(document)


def _ask(name: str, modules: Any, question: Any = "what is it", **more: Any) -> Request:
    arguments, tenant = more.pop("arguments", {}), more.pop("tenant", "")
    request = ask(name, question, tenant=tenant)
    options = Options(modules=tuple(modules), arguments=arguments, **more)
    return Request(name, request.messages, SamplingOptions(max_tokens=6), options, tenant)


def test_answers_are_those_of_a_pipeline(served: Any) -> None:
    made, schema = served
    model, processor = model_of(FAMILY)
    plan = parse_reuse("prefix")
    assert plan is not None
    reuse = MediaReuse(copy.deepcopy(model), processor, plan, ReuseStore())
    modules = PromptModules(reuse, lambda media: [Shot("image", media)])
    config = model.config
    blocked = [config.image_token_id, config.video_token_id]
    for number, (names, arguments, tenant, fresh) in enumerate(
        (
            (["sea", "rules"], {"tone": "dry"}, "", True),
            (["sea"], {}, "", False),
            (["rules", "sea"], {"tone": "wet"}, "other", False),  # the operator's are everyone's
        )
    ):
        trace = Trace()
        given = modules.inputs(schema.prompt(*names, **arguments), "what is it", trace=trace)
        with torch.inference_mode():
            output = reuse.model.generate(
                **given, max_new_tokens=6, do_sample=False, suppress_tokens=blocked
            )
        length = given["input_ids"].shape[1]
        expected = processor.batch_decode(output[:, length:], skip_special_tokens=True)[0]
        ear = Ear(made, _ask(f"m{number}", names, arguments=arguments, tenant=tenant))
        end = ear.wait()
        assert isinstance(end, Finish), end
        assert ear.text == expected and end.prompt_tokens == length
        rows = {row["stage"]: row for row in end.trace["rows"]}
        own = {row.stage: row for row in trace.rows}
        assert (rows["reuse modules"]["tokens_out"] > 0) == fresh
        assert rows["reuse kv"]["tokens_out"] == own["reuse kv"].tokens_out
        assert fresh or end.cached_tokens == length - 1 - own["reuse kv"].tokens_out


def test_what_does_not_act_is_refused(served: Any) -> None:
    made, _ = served
    for request, said in (
        (_ask("a", ["see"]), "did you mean 'sea'"),
        (_ask("b", ["sea", "hill"]), "of one union"),
        (_ask("c", [], arguments={"tone": "dry"}), "takes no module"),
        (_ask("d", ["sea"], image(2)), "text alone"),
        (_ask("e", ["sea"], reuse="encoder"), "leave reuse='encoder' out"),
        (_ask("f", ["sea"], cache="snapkv:8"), "cache policy"),
    ):
        with pytest.raises(MmfastError, match=said):
            made.submit(request, print)
    ear = Ear(made, _ask("long", ["rules"], arguments={"tone": "much too long"}))
    assert "shorten it" in str(ear.wait())
    assert isinstance(Ear(made, _ask("after", ["sea"])).wait(), Finish)  # harms no other


def test_engines_without_modules(tmp_path: Path) -> None:
    with pytest.raises(MmfastError, match="give reuse='prefix' too"):
        Scheduler(model_of(FAMILY), modules=tmp_path / "none.json")
    with pytest.raises(MmfastError, match="give a file with a schema"):
        Scheduler(model_of(FAMILY), reuse="prefix", modules=tmp_path / "none.json")
    for reuse in (None, "prefix"):
        with (
            closing(Scheduler(model_of(FAMILY), name=FAMILY, reuse=reuse)) as made,
            pytest.raises(MmfastError, match="this server has none"),
        ):
            made.submit(_ask("a", ["sea"]), print)
