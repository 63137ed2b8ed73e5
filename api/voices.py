"""`/v1/audio/voices`: the voices that the loaded models speak with."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.client import OmniClient
from omni_async.api.config import ApiConfig
from omni_async.api.errors import Forbidden
from omni_async.api.exchange import read_body, send_json
from omni_async.config import SpeechConfig
from omni_async.errors import InvalidRequest, NotFound


class VoiceList(msgspec.Struct, frozen=True, kw_only=True):
    """Names that `voice` takes."""

    voices: list[str]
    uploaded_voices: list[str]


class VoicesEndpoint:
    """`GET` lists, `POST` uploads."""

    def __init__(self, omni: OmniClient, config: ApiConfig) -> None:
        self._omni = omni
        self._limit = config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["method"] == "POST":
            await read_body(scope, receive, self._limit)
            message = "The loaded model has no voice cloning, so voices cannot be uploaded."
            raise InvalidRequest(message, param="audio_sample", code="voice_cloning_unsupported")
        await send_json(send, VoiceList(voices=built_in_voices(self._omni), uploaded_voices=[]))


class VoiceEndpoint:
    """`DELETE /v1/audio/voices/{name}`."""

    def __init__(self, omni: OmniClient) -> None:
        self._omni = omni

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse: built-in voices stay, and there are no others."""
        name: str = scope["path_params"]["name"]
        if name.casefold() in {voice.casefold() for voice in built_in_voices(self._omni)}:
            raise Forbidden(f"Voice {name!r} is built in and cannot be deleted.", param="name")
        raise NotFound(f"There is no voice {name!r}.", param="name", code="voice_not_found")


def built_in_voices(omni: OmniClient) -> list[str]:
    """The names of all pipelines' voices, each once, in the order of the pipelines."""
    speaking: list[SpeechConfig] = [p.speech for p in omni.pipelines if p.speech is not None]
    return list(dict.fromkeys(voice for speech in speaking for voice in speech.voices))
