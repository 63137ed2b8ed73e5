"""Deploy under plain uvicorn, with your own settings.

`uvicorn examples.uvicorn_app:app --port 8093`
"""

from __future__ import annotations

from omni_async import AsyncOmni, ServerConfig
from omni_async.api.app import create_app
from omni_async.api.config import ApiConfig

app = create_app(
    AsyncOmni(model="hibari", server=ServerConfig(max_queue=64, request_timeout=120.0)),
    ApiConfig(max_input_chars=20_000),
)
