from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator

import httpx
import pytest
from fake_omni import FakeOmni
from serving import DEADLINE, client_of, next_event, serve
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from omni_async.api.app import create_app
from omni_async.api.config import ApiConfig

URL = "/v1/audio/speech"
ROUTES = ["/v1/models", "/v1/audio/voices", "/metrics", "/version", "/openapi.json"]


@pytest.mark.parametrize("method", ["get", "post", "put", "delete"])
async def test_unknown_routes_get_404_in_the_common_shape(method: str) -> None:
    async with client_of(create_app(FakeOmni())) as client:
        answer = await client.request(method, "/v1/unknown")
        slashed = await client.request(method, "/v1/models/")
    assert answer.status_code == slashed.status_code == 404
    assert answer.json()["error"] == {
        "message": "There is no such route.",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_route",
        "request_id": answer.headers["x-request-id"],
    }


async def test_a_wrong_method_gets_405_and_the_allowed_ones() -> None:
    async with client_of(create_app(FakeOmni())) as client:
        answer = await client.get(URL)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("route", [URL, f"{URL}/batch", "/v1/echo"])
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/jsonp", "", None])
async def test_another_content_type_gets_415(route: str, kind: str | None) -> None:
    async with client_of(create_app(FakeOmni())) as client:
        headers = {} if kind is None else {"content-type": kind}
        answer = await client.post(route, content=b'{"input": "a"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "wrong_content_type")


async def test_json_with_a_charset_is_json() -> None:
    async with client_of(create_app(FakeOmni())) as client:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        answer = await client.post(URL, content='{"input": "é"}'.encode(), headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("route", [URL, f"{URL}/batch", "/v1/audio/voices", "/v1/echo"])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_is_too_large_gets_413(route: str, chunked: bool) -> None:
    async def parts() -> AsyncGenerator[bytes]:
        for _ in range(40):
            yield b"x" * 100

    async with client_of(create_app(FakeOmni(), ApiConfig(max_body_bytes=2000))) as client:
        content = parts() if chunked else b"x" * 4000
        answer = await client.post(route, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("given", ["a", "A-b_c.9", "x" * 128])
async def test_a_sane_request_id_comes_back(given: str) -> None:
    async with client_of(create_app(FakeOmni())) as client:
        for path in ("/health", "/nowhere"):
            answer = await client.get(path, headers={"x-request-id": given})
            assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a/b", "<script>", "é", 'a"b'])
async def test_an_insane_request_id_is_replaced(given: str) -> None:
    async with client_of(create_app(FakeOmni())) as client:
        answers = [await client.get("/health", headers=[(b"x-request-id", given.encode())]) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert given not in ids
    assert ids[0] != ids[1]
    assert all(re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]+", each) for each in ids)


@pytest.mark.parametrize("key", [None, "Bearer", "Bearer wrong", "Basic one", "Bearer onetwo", "Bearer \xff"])
async def test_without_a_known_key_every_route_but_the_probes_gets_401(key: str | None) -> None:
    headers = [] if key is None else [(b"authorization", key.encode("latin-1"))]
    omni = FakeOmni()
    async with client_of(create_app(omni, ApiConfig(api_keys=("one", "two")))) as client:
        answers = [await client.get(route, headers=headers) for route in (*ROUTES, "/nowhere")]
        answers.append(await client.post(URL, json={"input": "a"}, headers=headers))
        probes = [await client.get(path, headers=headers) for path in ("/health", "/health/ready")]
    assert {answer.status_code for answer in answers} == {401}
    assert {probe.status_code for probe in probes} == {200}
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert answers[0].json()["error"]["type"] == "authentication_error"
    assert omni.seen == []


async def test_any_of_the_keys_opens_every_route() -> None:
    async with client_of(create_app(FakeOmni(), ApiConfig(api_keys=("one", "two")))) as client:
        for key in ("Bearer one", "bearer two"):
            answers = [await client.get(route, headers={"authorization": key}) for route in ROUTES]
            assert {answer.status_code for answer in answers} == {200}


async def test_a_socket_without_a_key_is_told_why_and_closed_with_1008() -> None:
    async with serve(create_app(FakeOmni(), ApiConfig(api_keys=("one",)))) as address:
        async with connect(f"ws://{address}{URL}/stream", proxy=None) as socket:
            event = await next_event(socket)
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(socket.recv(), DEADLINE)
        headers = {"authorization": "Bearer one"}
        async with connect(f"ws://{address}{URL}/stream", proxy=None, additional_headers=headers) as socket:
            await socket.send('{"type": "ping"}')
            assert await next_event(socket) == {"type": "pong"}
    assert (event["type"], event["code"]) == ("error", "invalid_api_key")
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008


async def test_an_unexpected_error_is_logged_with_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    omni = FakeOmni()

    async def fail(seen: object) -> None:
        raise ZeroDivisionError("a bug")

    omni.before_chunk = fail
    async with client_of(create_app(omni)) as client:
        answer = await client.post(URL, json={"input": "a"}, headers={"x-request-id": "find-me"})
    assert answer.status_code == 500
    assert "a bug" not in answer.text
    record = next(record for record in caplog.records if getattr(record, "request_id", "") == "find-me")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_a_body_that_breaks_off_harms_nobody() -> None:
    async with serve(create_app(FakeOmni())) as address:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b'Content-Length: 100\r\n\r\n{"input": "a')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as client:
            assert (await client.post(URL, json={"input": "a"})).status_code == 200
