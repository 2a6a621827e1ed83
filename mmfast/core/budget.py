"""Budgets: a share of the tokens, or a number of them."""

from __future__ import annotations

from mmfast.core.errors import SpecError

Budget = int | float | None

BUDGETS = "a share with a dot in (0, 1] such as 0.25, or a whole number of tokens such as 64"


def check_budget(budget: Budget) -> Budget:
    """Refuse a budget that can never be met: 0, negative, a share above 1, NaN.

    Raises:
        SpecError: Names the budget and what is allowed.
    """
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise SpecError(f"budget {budget!r} is a {type(budget).__name__}; {BUDGETS}")
    if isinstance(budget, int):
        if budget < 1:
            raise SpecError(f"budget {budget} keeps nothing; {BUDGETS}")
    elif not 0.0 < budget <= 1.0:
        raise SpecError(f"budget {budget} is no share; {BUDGETS}")
    return budget


def count(budget: Budget, n: int) -> int | None:
    """Tokens to keep of `n`: a share is rounded half to even and keeps at least one.

    Raises:
        SpecError: A whole-number budget above `n`.
    """
    if budget is None:
        return None
    if isinstance(budget, float):
        return max(1, round(budget * n))
    if budget > n:
        raise SpecError(
            f"budget {budget} is more than the {n} tokens there are; choose at most {n}"
        )
    return budget
