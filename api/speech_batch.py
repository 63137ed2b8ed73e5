"""`POST /v1/audio/speech/batch`: several texts in one request, each answered or refused on its own."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from typing import Any, Literal, cast

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.errors import ErrorDetail, error_detail, http_status, invalid_json
from omni_async.api.exchange import WhileConnected, read_json, send_body
from omni_async.api.speech_fields import BatchBody, BatchItem, SpeechFields
from omni_async.api.speech_job import SpeechService
from omni_async.errors import InvalidRequest, OmniError

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(BatchBody)


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One item's answer: `audio_data` is the whole file in base64, of `media_type`; or `error`."""

    index: int
    status: Literal["success", "error"]
    audio_data: str | None = None
    media_type: str | None = None
    error: ErrorDetail | None = None


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answers in the order of the items."""

    id: str
    results: list[BatchResult]
    total: int
    succeeded: int
    failed: int


class BatchEndpoint:
    """An ASGI endpoint. Items run at once; the engine's queue bounds what they may take."""

    def __init__(self, service: SpeechService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one batch."""
        body = await read_json(scope, receive, self._service.config.max_body_bytes, _decoder)
        limit = self._service.config.max_batch_items
        if len(body.items) > limit:
            message = f"items has {len(body.items)} entries; at most {limit} are taken."
            raise InvalidRequest(message, param="items")
        async with WhileConnected(receive):
            answer = await self._answer(body, scope["request_id"])
            data = await self._service.media.run(lambda: msgspec.json.encode(answer))
        await send_body(send, data, b"application/json")

    async def _answer(self, body: BatchBody, batch_id: str) -> BatchAnswer:
        defaults = _given(body)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._item(index, item, defaults, f"{batch_id}.{index}"))
                for index, item in enumerate(body.items)
            ]
        results = [task.result() for task in tasks]
        good = sum(result.status == "success" for result in results)
        return BatchAnswer(
            id=batch_id, results=results, total=len(results), succeeded=good, failed=len(results) - good
        )

    async def _item(self, index: int, raw: Any, defaults: dict[str, Any], request_id: str) -> BatchResult:
        try:
            return await self._speak(index, _item_of(raw, defaults), request_id)
        except Exception as error:
            if not isinstance(error, OmniError) or http_status(error) == 500:
                log.error("request %s failed: %s", request_id, error, exc_info=error)
            return BatchResult(index=index, status="error", error=error_detail(error, request_id))

    async def _speak(self, index: int, item: BatchItem, request_id: str) -> BatchResult:
        job = self._service.prepare(item, item.input, gapless=False)
        data = await self._service.run(job, request_id, streaming=False).whole()
        audio = await self._service.media.run(lambda: b64encode(data).decode())
        return BatchResult(index=index, status="success", audio_data=audio, media_type=job.plan.media_type)


def _given(body: BatchBody) -> dict[str, Any]:
    values = {name: getattr(body, name) for name in SpeechFields.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def _item_of(raw: Any, defaults: dict[str, Any]) -> BatchItem:
    if not isinstance(raw, dict):
        raise InvalidRequest("An item must be an object.", code="invalid_value")
    given = cast("dict[str, Any]", raw)
    own = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert({**defaults, **own}, BatchItem)
    except msgspec.ValidationError as error:
        raise invalid_json(error) from None
