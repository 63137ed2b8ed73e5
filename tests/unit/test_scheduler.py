"""Rules of the scheduler, with a manual clock and no process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from omni_async.config import EdgeConfig, PipelineConfig
from omni_async.errors import DeadlineExceeded, InvalidRequest, Overloaded, StageFailed
from omni_async.events import FromWorker, Send, Tick, WorkerDown, WorkerUp
from omni_async.messages import Abort, Credit, Input, Output, Submit
from tests.unit.builders import Harness, deliveries, ends, make_pipeline, make_stage, sent


def test_a_request_goes_through_the_stages_and_ends_once() -> None:
    h = Harness(make_pipeline())
    key = h.submit(text="hi")
    assert [s.replica for s in sent(h.log, Submit)] == ["p.talker.0"]
    forwarded = h.output(key, "talker", 0)
    assert [s.replica for s in sent(forwarded, Submit)] == ["p.vocoder.0"]
    assert len(sent(forwarded, Input)) == 1
    h.output(key, "talker", 1, final=True)
    assert len(deliveries(h.output(key, "vocoder", 0, duration=0.5))) == 1
    last = h.output(key, "vocoder", 1, duration=0.5, final=True)
    assert ends(last)[0].error is None
    assert ends(last)[0].record.media_seconds == 1.0
    assert not sent(h.log, Abort)
    assert not h.scheduler.requests


def test_the_arrays_of_a_request_go_to_each_stage_and_again_with_a_retry() -> None:
    h = Harness(make_pipeline(talker={"num_replicas": 2}))
    key = h.submit(frames=(b"pixels",))
    h.output(key, "talker", 0)
    opened = [each for each in h.log if isinstance(each, Send) and isinstance(each.message, Submit)]
    again = h.handle(WorkerDown("p.talker.0", "killed"))
    opened += [each for each in again if isinstance(each, Send) and isinstance(each.message, Submit)]
    assert [each.replica for each in opened] == ["p.talker.0", "p.vocoder.0", "p.talker.1"]
    for each in opened:
        assert isinstance(each.message, Submit)
        assert each.frames == (b"pixels",)
        assert each.message.tensors["image0"].shape == (6,)


def test_a_slot_given_back_goes_to_the_most_urgent_who_waits() -> None:
    h = Harness(make_pipeline(talker={"max_num_seqs": 1}))
    first = h.submit()
    whole_file = h.submit(gapless=False)
    listener = h.submit()
    actions = h.output(first, "talker", 0, final=True)
    started = [s.message.request for s in sent(actions, Submit) if s.replica == "p.talker.0"]
    assert started == [h.wire(listener)]
    actions = h.output(listener, "talker", 0, final=True)
    assert h.wire(whole_file) in [s.message.request for s in sent(actions, Submit)]


def test_a_full_queue_refuses_with_a_time_from_measured_throughput() -> None:
    h = Harness(make_pipeline(talker={"max_num_seqs": 1}), max_queue=1)
    for _ in range(3):
        key = h.submit()
        h.output(key, "talker", 0, final=True)
        h.now += 10.0
        h.output(key, "vocoder", 0, final=True)
    h.submit()
    h.submit()
    h.submit()
    (refused,) = ends(h.log)[3:]
    assert isinstance(refused.error, Overloaded)
    assert refused.error.retry_after == 20.0
    assert refused.record.reason == "refused"


def test_credits_reach_the_producer_only_when_every_consumer_is_done() -> None:
    h = Harness(make_pipeline(window=4))
    key = h.submit()
    h.output(key, "talker", 0)
    h.output(key, "talker", 1)
    actions = h.consumed(key, "vocoder", "talker", 1)
    assert [(s.replica, s.message.upto) for s in sent(actions, Credit)] == [("p.talker.0", 1)]
    h.output(key, "vocoder", 0)
    assert not sent(h.taken(key, 0), Credit)


def test_an_overrun_window_fails_the_request_of_the_stage_that_overran() -> None:
    h = Harness(make_pipeline(window=2))
    key, other = h.submit(), h.submit()
    h.output(key, "talker", 0)
    h.output(key, "talker", 1)
    (end,) = ends(h.output(key, "talker", 2))
    assert isinstance(end.error, StageFailed)
    assert "talker" in end.error.message
    assert other in h.scheduler.requests


def test_a_cancelled_request_is_aborted_in_every_stage_that_holds_it() -> None:
    h = Harness(make_pipeline())
    key = h.submit()
    h.output(key, "talker", 0)
    actions = h.cancel(key)
    assert sorted(s.replica for s in sent(actions, Abort)) == ["p.talker.0", "p.vocoder.0"]
    assert ends(actions)[0].record.reason == "abort"
    assert h.cancel(key) == []


def test_a_late_message_of_a_forgotten_request_is_dropped_and_counted() -> None:
    h = Harness(make_pipeline())
    key = h.submit()
    wire = h.wire(key)
    h.cancel(key)
    assert h.handle(FromWorker("p.talker.0", Output(request=wire, seq=0))) == []
    assert h.scheduler.late_messages == 1


def test_a_failed_row_ends_its_own_request_with_its_own_error() -> None:
    h = Harness(make_pipeline())
    bad, good = h.submit(), h.submit()
    (end,) = ends(h.failed(bad, "talker", InvalidRequest("no", param="input")))
    assert isinstance(end.error, InvalidRequest)
    assert end.error.param == "input"
    assert good in h.scheduler.requests


def test_a_deadline_touches_one_request() -> None:
    h = Harness(make_pipeline())
    short, long = h.submit(timeout=1.0), h.submit(timeout=100.0)
    assert h.scheduler.wake_at == h.now + 1.0
    h.now += 1.5
    actions = h.handle(Tick())
    assert [e.key for e in ends(actions)] == [short]
    assert isinstance(ends(actions)[0].error, DeadlineExceeded)
    assert long in h.scheduler.requests


def test_an_undelivered_request_of_a_dead_worker_runs_on_another_with_its_seed() -> None:
    h = Harness(make_pipeline(talker={"num_replicas": 2}))
    key = h.submit(text="hi")
    old = h.wire(key)
    before = sent(h.log, Submit)[0]
    actions = h.handle(WorkerDown(before.replica, "killed"))
    (again,) = sent(actions, Submit)
    assert again.replica != before.replica
    assert again.message.request != old
    assert again.message.seed == before.message.seed
    assert again.message.params == {"text": "hi"}
    assert not ends(actions)


def test_a_delivered_request_of_a_dead_worker_fails_with_stage_and_reason() -> None:
    h = Harness(make_pipeline())
    key, fresh = h.submit(), h.submit()
    h.output(key, "talker", 0)
    h.output(key, "vocoder", 0, duration=0.5)
    actions = h.handle(WorkerDown("p.talker.0", "it was killed"))
    (end,) = ends(actions)
    assert end.key == key
    assert isinstance(end.error, StageFailed)
    assert end.error.stage == "talker"
    assert "it was killed" in end.error.message
    assert [s.replica for s in sent(actions, Abort)] == ["p.vocoder.0"]
    up = h.handle(WorkerUp("p.talker.0"))
    assert [s.message.request for s in sent(up, Submit)] == [h.wire(fresh)]


def test_a_stage_that_will_not_come_back_fails_those_who_need_it() -> None:
    h = Harness(make_pipeline(talker={"max_num_seqs": 1}))
    h.submit()
    h.submit()
    actions = h.handle(WorkerDown("p.vocoder.0", "no budget", permanent=True))
    assert [e.error.stage for e in ends(actions) if e.error] == ["vocoder", "vocoder"]
    h.submit()
    assert isinstance(ends(h.log)[-1].error, StageFailed)


def test_whole_form_starts_the_target_when_the_source_is_done() -> None:
    h = Harness(make_pipeline(window=-1))
    key = h.submit()
    for seq in range(20):
        assert not sent(h.output(key, "talker", seq), Submit)
    actions = h.output(key, "talker", 20, final=True)
    assert len(sent(actions, Submit)) == 1
    assert [s.message.seq for s in sent(actions, Input)] == list(range(21))


def test_max_inflight_bounds_the_requests_on_an_edge() -> None:
    pipeline = make_pipeline()
    edge = pipeline.edges[0]
    h = Harness(replace(pipeline, edges=(replace(edge, max_inflight=1),)))
    a, b = h.submit(), h.submit()
    assert sent(h.output(a, "talker", 0), Submit)
    assert not sent(h.output(b, "talker", 0), Submit)
    h.output(a, "talker", 1, final=True)
    done = h.output(a, "vocoder", 0, final=True)
    assert [s.message.request for s in sent(done, Submit)] == [h.wire(b)]


def test_memory_lent_by_a_finished_stage_is_given_back_at_the_end() -> None:
    h = Harness(make_pipeline(window=8))
    key = h.submit()
    h.output(key, "talker", 0, shm=True, final=True)
    actions = h.output(key, "vocoder", 0, final=True)
    assert [s.replica for s in sent(actions, Abort)] == ["p.talker.0"]


def test_a_stage_that_ends_before_its_source_is_not_opened_again() -> None:
    thinker = make_stage("thinker", 0, final_output=True)
    talker = make_stage("talker", 1, inputs=("thinker",))
    vocoder = make_stage("vocoder", 2, inputs=("talker",), final_output=True)
    edge = EdgeConfig(source="thinker", target="talker", window_size=4)
    h = Harness(PipelineConfig(name="p", stages=(thinker, talker, vocoder), edges=(edge,)))
    key = h.submit()
    for seq in range(3):
        h.output(key, "thinker", seq, shm=True)
        h.taken(key, seq + 1, "thinker")
    h.output(key, "talker", 0, final=True)
    assert sent(h.log, Credit)[-1].message.upto == 3
    for seq in range(3, 12):
        late = h.output(key, "thinker", seq, shm=True, final=seq == 11)
        late += h.taken(key, seq + 1, "thinker")
        assert not sent(late, Submit) and not sent(late, Input)
        assert sent(late, Credit)
    last = h.output(key, "vocoder", 0, final=True)
    assert [end.error for end in ends(last)] == [None]
    assert len([s for s in sent(h.log, Submit) if s.replica == "p.talker.0"]) == 1


def test_underruns_are_measured_by_the_listeners_clock() -> None:
    h = Harness(make_pipeline())
    key = h.submit()
    h.output(key, "talker", 0, final=True)
    h.output(key, "vocoder", 0, duration=1.0)
    h.now += 1.5
    (end,) = ends(h.output(key, "vocoder", 1, duration=1.0, final=True))
    assert end.record.underrun_seconds == pytest.approx(0.5)


class AnyTraffic(RuleBasedStateMachine):
    """Any mix of arrivals, steps, cancels and deaths keeps every invariant, and ends each request once."""

    def __init__(self) -> None:
        super().__init__()
        self.h = Harness(
            make_pipeline(
                talker={"max_num_seqs": 2, "num_replicas": 2}, vocoder={"max_num_seqs": 2}, window=3
            ),
            max_queue=3,
        )
        self.made: dict[tuple[int, str], int] = {}

    def _runs(self, stage: str) -> list[int]:
        return [
            key
            for key, request in self.h.scheduler.requests.items()
            if (run := request.runs.get(stage)) and run.phase.value == "running"
        ]

    @rule(gapless=st.booleans())
    def submit(self, gapless: bool) -> None:
        self.h.submit(gapless=gapless)

    @precondition(lambda self: self._runs("talker"))
    @rule(data=st.data(), final=st.booleans(), shm=st.booleans())
    def talk(self, data: Any, final: bool, shm: bool) -> None:
        self._step(data, "talker", final, shm)

    @precondition(lambda self: self._runs("vocoder"))
    @rule(data=st.data(), final=st.booleans(), shm=st.booleans())
    def vocode(self, data: Any, final: bool, shm: bool) -> None:
        self._step(data, "vocoder", final, shm)

    def _step(self, data: Any, stage: str, final: bool, shm: bool) -> None:
        key = data.draw(st.sampled_from(self._runs(stage)))
        run = self.h.scheduler.requests[key].runs[stage]
        if run.produced - run.credited >= self.h.scheduler.plans["p"].window[stage]:
            if stage == "talker" and "vocoder" in self.h.scheduler.requests[key].runs:
                vocoder = self.h.scheduler.requests[key].runs["vocoder"]
                if vocoder.phase.value == "running":
                    self.h.consumed(key, "vocoder", "talker", run.produced)
            else:
                self.h.taken(key, run.produced)
            return
        index = int(run.replica.rsplit(".", 1)[1])
        self.h.output(key, stage, run.produced, replica=index, shm=shm, duration=0.1, final=final)

    @precondition(lambda self: self.h.scheduler.requests)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.h.cancel(data.draw(st.sampled_from(sorted(self.h.scheduler.requests))))

    @rule(replica=st.sampled_from(["p.talker.0", "p.talker.1", "p.vocoder.0"]))
    def die_and_return(self, replica: str) -> None:
        self.h.handle(WorkerDown(replica, "killed"))
        self.h.handle(WorkerUp(replica))

    @rule(seconds=st.floats(0.0, 30.0))
    def wait(self, seconds: float) -> None:
        self.h.now += seconds
        self.h.handle(Tick())

    @invariant()
    def each_request_ends_at_most_once(self) -> None:
        keys = [end.key for end in ends(self.h.log)]
        assert len(keys) == len(set(keys))
        assert set(keys) | set(self.h.scheduler.requests) == set(range(1, self.h.keys + 1))


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def chatty() -> Harness:
    """A thinker whose text and whose spoken form are both answers."""
    return Harness(make_pipeline(talker={"final_output": True}))


def test_a_final_stage_that_nobody_wants_never_runs() -> None:
    h = chatty()
    key = h.submit(outputs=("talker",))
    h.output(key, "talker", 0)
    assert len(deliveries(h.log)) == 1
    last = h.output(key, "talker", 1, final=True)
    assert ends(last)[0].error is None
    assert {each.replica for each in h.log if isinstance(each, Send)} == {"p.talker.0"}
    assert not h.scheduler.requests


def test_a_request_that_wants_all_final_stages_ends_with_the_last_of_them() -> None:
    h = chatty()
    key = h.submit(outputs=("talker", "vocoder"))
    h.output(key, "talker", 0, final=True)
    assert not ends(h.log)
    assert ends(h.output(key, "vocoder", 0, final=True))[0].error is None
    assert [delivery.stage for delivery in deliveries(h.log)] == ["talker", "vocoder"]


def test_what_one_request_does_not_want_another_may() -> None:
    h = chatty()
    text, speech = h.submit(outputs=("talker",)), h.submit(outputs=())
    for key in (text, speech):
        h.output(key, "talker", 0, final=True)
    assert ends(h.log)[0].key == text and len(ends(h.log)) == 1
    assert ends(h.output(speech, "vocoder", 0, final=True))[0].key == speech
