"""Which rows take the next step."""

from __future__ import annotations

from omni_async.stages.batcher import Batcher
from omni_async.stages.executor import StageRequest, State


class FixedCost(State):
    """A state whose every step costs the same, of a group that others may be of too."""

    def __init__(self, cost: int = 1, group: str = "") -> None:
        super().__init__(StageRequest(request=1, params={}, seed=0), has_upstream=False)
        self._cost = cost
        self._group = group

    @property
    def batch_key(self) -> str:
        return self._group

    @property
    def cost(self) -> int:
        return self._cost


def make_batcher(
    dues: list[float], policy: str = "due", size: int = 8, max_tokens: int = 0, cost: int = 1
) -> Batcher:
    batcher = Batcher(policy, size, max_tokens)  # type: ignore[arg-type]
    for index, due in enumerate(dues):
        batcher.add(index, FixedCost(cost), due=due, window=4)
    return batcher


def picked(batcher: Batcher, now: float = 0.0) -> list[float]:
    return [row.due for row in batcher.pick(now)]


def test_due_takes_the_most_urgent_first() -> None:
    assert picked(make_batcher([3.0, 1.0, 2.0], size=2)) == [1.0, 2.0]


def test_fcfs_keeps_the_order_of_arrival() -> None:
    assert picked(make_batcher([3.0, 1.0, 2.0], "fcfs", size=2)) == [3.0, 1.0]


def test_round_robin_serves_who_was_served_longest_ago() -> None:
    batcher = make_batcher([1.0, 2.0, 3.0], "round_robin", size=2)
    assert picked(batcher) == [1.0, 2.0]
    assert picked(batcher) == [3.0, 1.0]


def test_a_batch_grows_only_as_far_as_the_most_urgent_row_stays_on_time() -> None:
    batcher = make_batcher([0.25, 9.0, 9.0, 9.0])
    batcher.cost.learn(1, 0.1)
    assert len(batcher.pick(0.0)) == 2
    assert len(batcher.pick(-9.0)) == 4


def test_a_late_row_goes_with_few_others() -> None:
    batcher = make_batcher([-1.0, -0.5, 0.0, 0.1])
    batcher.cost.learn(1, 0.02)
    assert len(batcher.pick(0.0)) == 2


def test_a_budget_of_tokens_bounds_a_batch_but_never_starves_it() -> None:
    assert len(make_batcher([1.0] * 5, max_tokens=10, cost=4).pick(0.0)) == 2
    assert len(make_batcher([1.0] * 5, max_tokens=10, cost=40).pick(0.0)) == 1


def test_a_row_without_credit_waits() -> None:
    batcher = make_batcher([1.0, 2.0])
    batcher.rows[0].sent = 4
    assert picked(batcher) == [2.0]
    batcher.rows[0].credited = 1
    assert picked(batcher) == [1.0, 2.0]


def test_a_step_takes_rows_of_one_group_and_groups_take_turns() -> None:
    batcher = Batcher("round_robin", 8)
    for index, group in enumerate("aabab"):
        batcher.add(index, FixedCost(group=group), due=float(index), window=4)
    assert [picked(batcher) for _ in range(4)] == [[0.0, 1.0, 3.0], [2.0, 4.0]] * 2


def test_among_groups_that_wait_equally_long_the_most_urgent_goes_first() -> None:
    batcher = Batcher("round_robin", 8)
    for due, group in ((3.0, "a"), (1.0, "b"), (2.0, "a")):
        batcher.add(int(due), FixedCost(group=group), due=due, window=4)
    assert picked(batcher) == [1.0]
    assert picked(batcher) == [2.0, 3.0]


def test_a_row_that_joins_goes_before_those_that_were_served() -> None:
    batcher = Batcher("round_robin", 1)
    batcher.add(1, FixedCost(), due=1.0, window=9)
    assert picked(batcher) == picked(batcher) == [1.0]
    batcher.add(2, FixedCost(), due=2.0, window=9)
    assert [picked(batcher) for _ in range(3)] == [[2.0], [1.0], [2.0]]
