"""Fast KVzip: gates that tell what KVzip would say, with no second reading of the prompt."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap

_MOST = 4096  # recent tokens, as published


@policy("fastkvzip", paper="2601.17668", needs=("key_gate",), role="score")
def fastkvzip(tokens: Tokens, budget: int, *, sink: int = 4, recent: float = 0.02) -> Tensor:
    """Keep in each head what a small gate says that KVzip would keep, and both ends of the prompt.

    Kim, Han & Yun (2026): whether a token will be needed can be read from the state that enters the
    layer. A gate of low rank beside each attention module is trained once for a model on the scores
    of `kvzip`, here by `mmfast.calibrate_heads`, and no prompt is read twice. With `every=128`
    tokens of the answer are scored and evicted as well, 128 at a time.

    Args:
        tokens: `key_gate` `[..., H, N]`, what the gate of the layer says of each token, in (0, 1).
        budget: Tokens to keep in every head; a share is of all tokens.
        sink: First tokens that stay, 4 as published, at most a quarter of the budget.
        recent: Share of the tokens that stay at the end, 0.02 as published; at most 4,096 tokens,
            and at most a quarter of the budget.

    Raises:
        SpecError: A negative sink, or a `recent` outside [0, 1].
    """
    if sink < 0 or not 0 <= recent <= 1:
        raise SpecError(
            f"knobs sink={sink}, recent={recent} of 'fastkvzip': choose 0 or more, and a share "
            "from 0 to 1"
        )
    first, last = min(sink, budget // 4), min(int(recent * tokens.n), _MOST, budget // 4)
    score = snap(tokens.need("key_gate").double())
    return F.pad(score[..., first : tokens.n - last], (first, last), value=float("inf"))
