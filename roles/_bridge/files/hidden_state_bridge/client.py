# SPDX-License-Identifier: Apache-2.0
"""The extractor's one HTTP call: `POST /generate` for a prefill of given token ids."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import orjson

from .errors import ConfigError

MESSAGE_LENGTH = 300


class RecordRefused(Exception):
    """The server will never take this record (for example it is too long): HTTP 400, 413 or 422."""


class RequestFailed(Exception):
    """The server answered with an error of its own or not in time; another try may do."""


class ServerAway(Exception):
    """No server answers at the URL, or a proxy says so (502, 503, 504)."""


class Client:
    """Sends requests to one server. Use as an asynchronous context manager."""

    def __init__(self, url: str, api_key: str | None, timeout: float, connections: int) -> None:
        """url: base of the server. timeout: seconds for a whole request. connections: at once."""
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._connections = connections

    async def __aenter__(self) -> Client:
        # A connection a request: one that idled could be closed by the server just as it is used again.
        connector = aiohttp.TCPConnector(limit=self._connections, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def prefill(self, rid: str, input_ids: np.ndarray) -> None:
        """Run the record through the model once. input_ids: int32 [tokens].

        Raises RecordRefused, RequestFailed or ServerAway with what the server said, ConfigError where the URL or the
        key is wrong.
        """
        body = orjson.dumps(
            {"input_ids": input_ids, "rid": rid, "sampling_params": {"max_new_tokens": 0, "temperature": 0}},
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        try:
            async with self._session.post(f"{self.url}/generate", data=body) as response:
                content = await response.read()
                status = response.status
        except asyncio.TimeoutError as error:
            raise RequestFailed(f"no answer from {self.url} within {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerAway(str(error) or type(error).__name__) from error
        if status != 200:
            _raise(status, self.url, content)
        _check_answer(content)


def _raise(status: int, url: str, content: bytes) -> None:
    said = f"HTTP {status} from {url}: {_message(content)}"
    if status in (400, 413, 422):
        raise RecordRefused(said)
    if status in (401, 403):
        raise ConfigError(f"{said}; let api_key_file name a file with the server's API key")
    if status in (502, 503, 504):
        raise ServerAway(said)
    if 400 <= status < 500 and status not in (408, 429):
        raise ConfigError(f"{said}; is it the URL of an SGLang server?")
    raise RequestFailed(said)


def _check_answer(content: bytes) -> None:
    """An aborted request answers 200 in some releases; its reason is in the body."""
    try:
        reason = orjson.loads(content)["meta_info"]["finish_reason"]
    except (ValueError, KeyError, TypeError):
        return
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise RequestFailed(f"the server aborted the request: {reason.get('message', 'no reason given')}")


def _message(content: bytes) -> str:
    try:
        value = orjson.loads(content)
        error = value.get("error", value)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = content.decode(errors="replace")
    return " ".join(str(text).split())[:MESSAGE_LENGTH]
