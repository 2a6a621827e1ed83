"""Starting the replicas of all roles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.serve.ray.cluster import Cluster, calm, share, sharing
from mmfast.serve.ray.deployments import ROLES, Decode, Encode, Plan, Prefill

BODIES = {"encode": Encode, "prefill": Prefill, "decode": Decode}


def deploy(
    cluster: Cluster, apps: Sequence[str], plan: Plan, replicas: Mapping[str, int]
) -> dict[str, Any]:
    """Start replicas, and wait until they are there.

    Args:
        cluster: Where.
        apps: Names of Serve's applications, in the order of `ROLES`.
        plan: What every replica is told.
        replicas: How many of each role.

    Returns:
        A handle per role; that of `decode` streams.

    Raises:
        MmfastError: One does not start.
    """
    from ray import serve

    have, count = cluster.resources(), sum(replicas.values())
    parts = share(have, count, plan.device, spare=0.1)  # for Serve's controller, and others there
    places = cluster.machines() if not parts["num_gpus"] else int(have["GPU"])
    plan = replace(plan, sharing=sharing(replicas["decode"], count, places))
    targets = []
    for role, app in zip(ROLES, apps, strict=True):
        deployment: Any = serve.deployment(
            BODIES[role],
            name=role,
            num_replicas=replicas[role],
            max_ongoing_requests=plan.slots if role == "decode" else 8,
            max_queued_requests=-1,  # the engine says when it is too much
            ray_actor_options=parts,
            health_check_period_s=1.0,
            health_check_timeout_s=30.0,  # a busy machine is not a dead one
            graceful_shutdown_timeout_s=2.0,
            graceful_shutdown_wait_loop_s=0.1,
        )
        targets.append(serve.RunTarget(deployment.bind(plan), name=app, route_prefix=None))
    try:
        with calm():
            handles = serve.run_many(targets)
    except RuntimeError as error:
        raise MmfastError(f"a replica does not start: {_reason(error)}") from None
    found = dict(zip(ROLES, handles, strict=True))
    found["decode"] = found["decode"].options(stream=True)
    return found


def _reason(error: Exception) -> str:
    """The line of a remote traceback that says what was wrong."""
    lines = re.findall(r"^\s*(?:[\w.]+\.)?(\w+Error: .+)$", str(error), re.M)
    return str(lines[-1] if lines else error).strip()[:300]
