"""Shards handed to a cluster's workers, and again where a worker or its node dies: each is counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferryman.porting.fleet import cluster, remote
from ferryman.porting.fleet.cluster import Claim, FleetError

MOST_DEATHS = 3  # of workers at one shard, before it is given up
ALONE_SECONDS = 60.0  # for a node with the claim to come back
POLL_SECONDS = 1.0


def agree(ray: Any, claim: Claim) -> None:
    """Raises FleetError where a node with the claim has no Ferryman, or another one than this process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here, asked = remote.identity(), {}
    for node in cluster.nodes(ray):
        if claim.fits(node["Resources"]):
            where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            options = {**claim.options(), "scheduling_strategy": where}
            asked[node["NodeManagerAddress"], node["NodeID"]] = ray.remote(remote.identity).options(**options).remote()
    for (place, _), answer in asked.items():
        try:
            there = ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            raise FleetError(
                f"node {place} cannot import Ferryman: {_said(error)}; install the same one there"
            ) from error
        except ray.exceptions.RayError as error:
            raise FleetError(f"node {place} does not answer: {_said(error)}") from error
        for fact, what in (("version", "Ferryman"), ("digest", "Ferryman's sources, SHA-256"), ("torch", "torch")):
            if there[fact] != here[fact]:
                raise FleetError(
                    f"node {place} ({there['host']}) has {what} {there[fact]}; required: {here[fact]}, as here. "
                    "Install the same one there"
                )


def once(ray: Any, claim: Claim, function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's value on one node, again where its worker dies. Raises what the function raised, FleetError else."""
    for death in range(MOST_DEATHS):
        task = ray.remote(function).options(**claim.options()).remote(*arguments)
        try:
            return ray.get(task)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except ray.exceptions.RayError as error:
            if death == MOST_DEATHS - 1:
                raise FleetError(f"{function.__name__} was lost {MOST_DEATHS} times: {_said(error)}") from error
    raise AssertionError("unreachable")


def spread(
    ray: Any,
    claim: Claim,
    function: Callable[..., Any],
    shards: Mapping[str, Sequence[Any]],
    take: Callable[[Sequence[Any], Any], Mapping[str, Sequence[Any]]],
    lost: Callable[[Sequence[Any], str], None],
) -> None:
    """Run ``function(*shards[name])`` for every shard, all of them at once as far as the claim allows.

    take(arguments, value): hears of each value once, and returns shards to run beside. lost(arguments, why): of a shard
    whose worker died MOST_DEATHS times. Raises FleetError where no node with the claim is left, and what a function
    raised.
    """
    ask = ray.remote(function).options(**claim.options())
    arguments = dict(shards)
    deaths = dict.fromkeys(arguments, 0)
    running = {ask.remote(*given): name for name, given in arguments.items()}
    alone: float | None = None
    while running:
        ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
        for task in ready:
            name = running.pop(task)
            try:
                value = ray.get(task)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            except ray.exceptions.RayError as error:  # its worker or its node died, or its value went with one
                deaths[name] += 1
                if deaths[name] < MOST_DEATHS:
                    running[ask.remote(*arguments[name])] = name
                else:
                    lost(arguments[name], f"{MOST_DEATHS} workers died at it: {_said(error)}")
                continue
            for more, given in take(arguments[name], value).items():
                arguments[more], deaths[more] = given, 0
                running[ask.remote(*given)] = more
        if ready or cluster.slots(ray, claim):
            alone = None
        elif alone is None:
            alone = time.monotonic()
        elif time.monotonic() - alone > ALONE_SECONDS:
            raise FleetError(
                f"no node with {claim} is left since {ALONE_SECONDS:.0f} s; {len(running)} shards are not done. "
                "What is done is kept: run the same command again when there is one"
            )


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0][:300]}"
