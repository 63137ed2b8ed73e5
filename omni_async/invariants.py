"""What must hold between the scheduler's requests and its pools after every event."""

from __future__ import annotations

from collections.abc import Mapping

from omni_async.pool import StagePool
from omni_async.request import Phase, Request

Pools = Mapping[tuple[str, str], StagePool]


def check_requests(requests: Mapping[int, Request], attempts: Mapping[int, Request], pools: Pools) -> None:
    """Raises AssertionError when requests, their present attempts and the stages' slots disagree."""
    assert {request.wire for request in requests.values()} == set(attempts)
    for pool in pools.values():
        pool.check()
    for request in requests.values():
        _check_request(request, pools)


def _check_request(request: Request, pools: Pools) -> None:
    assert request.unfinished, "an ended request is remembered"
    for run in request.runs.values():
        pool = pools[request.submit.pipeline, run.stage]
        assert 0 <= run.credited <= run.produced
        over = run.produced - run.credited - request.plan.window[run.stage]
        assert over <= 0, f"stage {run.stage} overran its window"
        assert pool.runs(request, run.replica) == (run.phase is Phase.RUNNING)
        assert not run.held or run.phase is Phase.WAITING
