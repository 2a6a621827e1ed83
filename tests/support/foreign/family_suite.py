"""Runs under pytest in a process of its own: transformers' model tests on a tiny attached model.

The folder of the suites (`tests` of transformers' sdist, stubs beside it) comes as
MMFAST_SUITES, the family as MMFAST_FAMILY and the spec as MMFAST_SPEC; an empty one is stock.
"""

from __future__ import annotations

import copy
import os
import sys
import unittest
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, os.environ["MMFAST_SUITES"])

from tests.test_modeling_common import ModelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from tiny_models import build

import mmfast

FAMILY, SPEC = os.environ["MMFAST_FAMILY"], os.environ["MMFAST_SPEC"]


def media(this: Any) -> dict[str, Any]:
    kind = "image" if "image" in this.facts.kinds else "video"
    prompts = [f"{{{kind}}} what is it?"] * 2
    given = {"images": this.images(2)} if kind == "image" else {"videos": this.videos(2)}
    return dict(this.inputs(prompts, **given))


TINY = build(FAMILY)
CONFIG, INPUTS = TINY.model.config, media(TINY)
STOCK = type(TINY.model)


def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    STOCK.__init__(self, config, *args, **kwargs)
    if SPEC:
        self.__dict__["_handle"] = mmfast.attach(self, SPEC)


# The suites build the class they are given; messages and files go by its name.
CLASS = type(STOCK.__name__, (STOCK,), {"__init__": begin, "__module__": STOCK.__module__})


class Tester(SimpleNamespace):
    """Sizes and inputs as the suites ask for them."""

    def get_config(self) -> Any:
        return copy.deepcopy(CONFIG)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        return copy.deepcopy(CONFIG), copy.deepcopy(INPUTS)


TEXT = CONFIG.get_text_config()


class FamilySuite(ModelTesterMixin, TrainingTesterMixin, unittest.TestCase):  # type: ignore[misc]
    all_model_classes = (CLASS,)
    _is_composite = True
    test_torch_exportable = False
    has_attentions = True

    def setUp(self) -> None:
        self.model_tester = Tester(
            parent=self,
            is_training=True,
            batch_size=2,
            seq_length=INPUTS["input_ids"].shape[1],
            num_hidden_layers=TEXT.num_hidden_layers,
            hidden_size=TEXT.hidden_size,
            num_attention_heads=TEXT.num_attention_heads,
            causal_lm_class=CLASS,
            base_model_class=type(TINY.model.base_model),
        )
