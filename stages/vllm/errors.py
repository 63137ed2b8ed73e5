"""Which of vLLM's errors are the caller's fault."""

from __future__ import annotations

from vllm.exceptions import VLLMClientError

CLIENT_ERRORS = (VLLMClientError, ValueError, TypeError)
"""Raised while a request is taken in, before a step knows of it."""
