from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractAsyncContextManager

import httpx
import numpy as np
import pytest
import serving
from fake_omni import CHUNK, FakeOmni, Gate, Seen, failing, tone
from numpy.typing import NDArray
from serving import decode, until

from omni_async.api.app import create_app
from omni_async.api.audio_encoder import to_int16
from omni_async.api.config import ApiConfig
from omni_async.api.media_plan import FORMATS
from omni_async.api.media_pool import Encoding
from omni_async.api.speech_fields import AudioFormat
from omni_async.errors import DeadlineExceeded, EngineDead, Overloaded, StageFailed
from omni_async.speech import Speech

TEXT = "Hello there, this is a text."
URL = "/v1/audio/speech"


def client_of(
    omni: FakeOmni, config: ApiConfig | None = None
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return serving.client_of(create_app(omni, config))


@pytest.mark.parametrize("fmt", FORMATS)
async def test_every_format_has_the_same_duration_whole_and_streamed(fmt: AudioFormat) -> None:
    async with client_of(FakeOmni()) as client:
        body = {"input": TEXT, "response_format": fmt}
        whole = await client.post(URL, json=body)
        stream = await client.post(URL, json={**body, "stream": True})
    assert whole.status_code == stream.status_code == 200
    assert whole.headers["content-type"] == stream.headers["content-type"]
    assert whole.headers["content-type"].startswith(FORMATS[fmt].media_type)
    assert whole.headers["x-sample-rate"] == "24000"
    assert whole.headers["x-channels"] == "1"
    assert f"speech.{fmt}" in whole.headers["content-disposition"]
    assert int(whole.headers["content-length"]) == len(whole.content)
    assert "content-length" not in stream.headers
    if fmt != "pcm":
        seconds = [len(audio) / rate for audio, rate in map(decode, (whole.content, stream.content))]
        assert seconds == pytest.approx([len(tone(TEXT)) / 24000] * 2, abs=(1024 + 1024) / 24000)
        assert abs(seconds[0] - seconds[1]) <= 576 / 24000


async def test_streamed_pcm_equals_whole_pcm_byte_for_byte() -> None:
    async with client_of(FakeOmni()) as client:
        body = {"input": TEXT, "response_format": "pcm"}
        whole = await client.post(URL, json=body)
        stream = await client.post(URL, json={**body, "stream": True})
    assert whole.content == stream.content == to_int16(tone(TEXT)).tobytes()
    assert whole.headers["content-type"] == "audio/pcm;rate=24000;channels=1"


@pytest.mark.parametrize("rate", [8000, 22050, 48000])
async def test_another_sample_rate_is_made_without_a_seam_while_streaming(rate: int) -> None:
    async with client_of(FakeOmni()) as client:
        body = {"input": TEXT, "response_format": "pcm", "sample_rate": rate}
        whole = await client.post(URL, json=body)
        stream = await client.post(URL, json={**body, "stream": True})
    assert whole.headers["x-sample-rate"] == str(rate)
    assert whole.headers["content-type"] == f"audio/pcm;rate={rate};channels=1"
    first, second = (np.frombuffer(answer.content, "<i2").astype(int) for answer in (whole, stream))
    assert len(first) == len(second) == round(len(tone(TEXT)) * rate / 24000)
    assert np.abs(first - second).max() <= 1
    slope = np.abs(np.diff(first[200:-200])).max()
    assert slope < 1.1 * 0.4 * 32767 * 2 * np.pi * 600 / rate, "no click anywhere"


async def test_the_first_bytes_leave_while_the_rest_is_not_made() -> None:
    omni, gate = FakeOmni(), Gate(open=1)
    omni.before_chunk = gate
    async with client_of(omni) as client:
        body = {"input": TEXT, "response_format": "pcm", "stream": True}
        async with client.stream("POST", URL, json=body) as answer:
            pieces = answer.aiter_raw()
            first = await anext(pieces)
            assert first == to_int16(tone(TEXT)[:CHUNK]).tobytes()
            gate.release()
            rest = b"".join([piece async for piece in pieces])
    assert first + rest == to_int16(tone(TEXT)).tobytes()


async def test_whole_files_yield_to_listeners_and_streams_are_listened_to() -> None:
    omni = FakeOmni()
    async with client_of(omni) as client:
        await client.post(URL, json={"input": TEXT})
        await client.post(URL, json={"input": TEXT, "stream": True})
    assert [isinstance(seen.request, Speech) and seen.request.gapless for seen in omni.seen] == [False, True]


async def test_every_field_reaches_the_engine() -> None:
    omni = FakeOmni()
    fields = {"voice": "DEEP", "speed": 1.5, "seed": 0, "language": "en", "model": "tts-1"}
    async with client_of(omni) as client:
        answer = await client.post(URL, json={"input": TEXT, **fields, "extra_params": {"temperature": 0.5}})
    assert answer.status_code == 200
    request = omni.seen[0].request
    assert isinstance(request, Speech)
    assert request.input == TEXT
    assert {name: getattr(request, name) for name in fields} == fields
    assert request.extra_params == {"temperature": 0.5}


async def test_null_is_the_same_as_absent() -> None:
    names = ["model", "voice", "response_format", "stream", "stream_format", "sample_rate", "speed", "seed"]
    names += ["instructions", "language", "task_type", "ref_audio", "extra_params", "max_new_tokens"]
    async with client_of(FakeOmni()) as client:
        answer = await client.post(URL, json={"input": TEXT, **dict.fromkeys(names)})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "audio/wav"


BAD_BODIES = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": ""}, "input"),
    ({"input": " \n"}, "input"),
    ({"input": "😀!?"}, "input"),
    ({"input": "x" * 101}, "input"),
    ({"input": "a", "gapless": False}, "gapless"),
    ({"input": "a", "colour": "red"}, "colour"),
    ({"input": "a", "voice": "nobody"}, "voice"),
    ({"input": "a", "voice": 3}, "voice"),
    ({"input": "a", "voice": "../../etc"}, "voice"),
    ({"input": "a", "response_format": "ogg"}, "response_format"),
    ({"input": "a", "response_format": "WAV"}, "response_format"),
    ({"input": "a", "stream": "yes"}, "stream"),
    ({"input": "a", "stream_format": "json"}, "stream_format"),
    ({"input": "a", "stream_format": "sse", "stream": False}, "stream_format"),
    ({"input": "a", "sample_rate": 7999}, "sample_rate"),
    ({"input": "a", "sample_rate": 48001}, "sample_rate"),
    ({"input": "a", "sample_rate": 24000.5}, "sample_rate"),
    ({"input": "a", "sample_rate": 12345, "response_format": "mp3"}, "sample_rate"),
    ({"input": "a", "sample_rate": 20000, "response_format": "aac"}, "sample_rate"),
    ({"input": "a", "speed": 0.2}, "speed"),
    ({"input": "a", "speed": 4.1}, "speed"),
    ({"input": "a", "speed": "fast"}, "speed"),
    ({"input": "a", "seed": -1}, "seed"),
    ({"input": "a", "seed": 2**63}, "seed"),
    ({"input": "a", "instructions": "whisper"}, "instructions"),
    ({"input": "a", "ref_audio": "data:,x"}, "ref_audio"),
    ({"input": "a", "task_type": "Other"}, "task_type"),
    ({"input": "a", "speaker_embedding": [1.0, "x"]}, "speaker_embedding[1]"),
    ({"input": "a", "max_new_tokens": 0}, "max_new_tokens"),
    ({"input": "a", "extra_params": []}, "extra_params"),
    ({"input": "a", "extra_params": {"beam": 2}}, "extra_params.beam"),
    ({"input": "a", "extra_params": {"temperature": 9}}, "extra_params.temperature"),
    ({"input": "a", "model": "echo"}, "model"),
    ([], None),
    ("text", None),
]


async def test_wrong_bodies_get_400_naming_the_field_and_reach_no_stage() -> None:
    omni = FakeOmni()
    async with client_of(omni, ApiConfig(max_input_chars=100)) as client:
        for body, param in BAD_BODIES:
            for extra in ({}, {"stream": True}) if isinstance(body, dict) and "stream" not in body else ({},):
                sent = {**body, **extra} if isinstance(body, dict) else body
                answer = await client.post(URL, json=sent)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), (sent, error)
                assert error["type"] == "invalid_request_error"
                assert error["code"]
                assert error["message"]
                assert error["request_id"] == answer.headers["x-request-id"]
    assert omni.seen == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"input": "a",}', b'{"input": "\xff"}', b'{"input": NaN}', b"\x00"]
)
async def test_what_is_not_json_gets_400(body: bytes) -> None:
    async with client_of(FakeOmni()) as client:
        answer = await client.post(URL, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


async def test_an_unknown_model_gets_404() -> None:
    async with client_of(FakeOmni()) as client:
        answer = await client.post(URL, json={"input": "a", "model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"


FAILURES = [
    (Overloaded("Full.", retry_after=2.2), 503, "3", "overloaded"),
    (EngineDead("Dead."), 503, "1", "engine_dead"),
    (StageFailed("Out of memory.", stage="tone"), 500, None, "stage_failed"),
    (DeadlineExceeded("Too late."), 504, None, "deadline_exceeded"),
    (ZeroDivisionError("secret"), 500, None, "internal_error"),
]


@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream_format": "sse"}])
@pytest.mark.parametrize(("error", "status", "retry_after", "code"), FAILURES)
async def test_a_failure_before_the_first_audio_has_its_own_status(
    error: Exception, status: int, retry_after: str | None, code: str, stream: dict[str, object]
) -> None:
    omni = FakeOmni()
    omni.before_chunk = failing(error)
    async with client_of(omni) as client:
        answer = await client.post(URL, json={"input": TEXT, **stream})
    body = answer.json()["error"]
    assert (answer.status_code, body["code"]) == (status, code)
    assert answer.headers.get("retry-after") == retry_after
    assert "secret" not in answer.text
    assert body["request_id"] == answer.headers["x-request-id"]


async def test_audio_of_no_samples_is_a_failure_and_not_an_empty_file() -> None:
    omni = FakeOmni()
    omni.audio = lambda text: np.zeros(0, np.float32)
    async with client_of(omni) as client:
        answers = [await client.post(URL, json={"input": TEXT, "stream": s}) for s in (True, False)]
    assert [answer.status_code for answer in answers] == [500, 500]


@pytest.mark.parametrize("fmt", ["pcm", "mp3"])
async def test_a_failure_in_mid_stream_breaks_the_connection(fmt: str) -> None:
    omni = FakeOmni()
    omni.before_chunk = failing(StageFailed("Gone."), after=2)
    async with client_of(omni) as client:
        body = {"input": TEXT, "response_format": fmt, "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(URL, json=body)
        omni.before_chunk = None
        assert (await client.post(URL, json=body)).status_code == 200


@pytest.mark.parametrize("fmt", ["wav", "mp3"])
@pytest.mark.parametrize("passed", [0, 1])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_cancels_the_request_at_once(fmt: str, passed: int, stream: bool) -> None:
    omni = FakeOmni()
    omni.before_chunk = Gate(open=passed)
    async with client_of(omni) as client:
        body = {"input": TEXT, "response_format": fmt, "stream": stream}
        asking = asyncio.create_task(client.post(URL, json=body))
        await until(lambda: omni.seen and omni.seen[0].chunks == passed)
        asking.cancel()
        await asyncio.wait({asking})
        await asyncio.wait_for(omni.seen[0].ended.wait(), 5)
    assert omni.seen[0].outcome == "abort"


async def test_many_disconnects_leave_nothing_behind() -> None:
    omni = FakeOmni()
    omni.before_chunk = Gate(open=1)
    async with client_of(omni) as client:  # serve() fails if a task is left
        for number in range(30):
            body = {"input": TEXT, "response_format": "opus", "stream": True}
            asking = asyncio.create_task(client.post(URL, json=body))
            await until(lambda n=number: len(omni.seen) > n and omni.seen[n].chunks)
            asking.cancel()
            await asyncio.wait({asking})
        await until(lambda: all(seen.outcome == "abort" and seen.ended.is_set() for seen in omni.seen))


async def test_a_slow_reader_slows_only_its_own_request() -> None:
    omni = FakeOmni()
    omni.audio = lambda text: np.zeros(24000 * 120, np.float32)
    async with client_of(omni) as client:
        body = {"input": TEXT, "response_format": "pcm", "stream": True, "sample_rate": 48000}
        async with client.stream("POST", URL, json=body) as slow:
            pieces = slow.aiter_raw()
            received = len(await anext(pieces))
            others = await asyncio.gather(*(client.post(URL, json=body) for _ in range(2)))
            assert [len(answer.content) for answer in others] == [2 * 48000 * 120] * 2
            assert not omni.seen[0].ended.is_set(), "what is not read is not made"
            async for piece in pieces:
                received += len(piece)
    assert received == 2 * 48000 * 120
    assert omni.seen[0].outcome == "stop"


async def test_codecs_and_resamplers_run_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[int]] = {}
    make = Encoding.__init__

    def spying(self: Encoding, pool: object, encoder: object, *, cheap: bool) -> None:
        make(self, pool, encoder, cheap=cheap)  # pyright: ignore[reportArgumentType]
        push = self._encoder.push  # pyright: ignore[reportPrivateUsage]

        def spied(pcm: NDArray[np.float32]) -> bytes:
            threads.setdefault(current[0], set()).add(threading.get_ident())
            return push(pcm)

        self._encoder.push = spied  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

    monkeypatch.setattr(Encoding, "__init__", spying)
    current = [""]
    async with client_of(FakeOmni()) as client:
        for fmt, rate in (("mp3", None), ("aac", None), ("opus", None), ("flac", None), ("wav", 16000)):
            current[0] = fmt
            await client.post(URL, json={"input": TEXT, "response_format": fmt, "sample_rate": rate})
    assert set(threads) == {"mp3", "aac", "opus", "flac", "wav"}
    assert all(threading.get_ident() not in used for used in threads.values())


async def test_requests_carry_the_clients_id_only_as_a_label() -> None:
    omni = FakeOmni()
    async with client_of(omni) as client:
        answer = await client.post(URL, json={"input": TEXT}, headers={"x-request-id": "my-id.1"})
    assert answer.headers["x-request-id"] == "my-id.1"
    assert omni.seen[0].request_id == "my-id.1"


async def test_requests_are_served_while_another_waits() -> None:
    omni, gate = FakeOmni(), Gate()

    async def hold_first(seen: Seen) -> None:
        if seen is omni.seen[0]:
            await gate(seen)

    omni.before_chunk = hold_first
    async with client_of(omni) as client:
        held = asyncio.create_task(client.post(URL, json={"input": TEXT}))
        await omni.arrived.wait()
        assert (await client.post(URL, json={"input": TEXT})).status_code == 200
        assert not held.done()
        gate.release()
        assert (await held).status_code == 200
