# SPDX-License-Identifier: Apache-2.0
"""Tells others of an extraction: a Prometheus text file while it runs, a POST to a URL at its end."""

from __future__ import annotations

import http.client
import os
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

import orjson

import hs_progress

from .config import ExtractConfig, read_secret
from .errors import ConfigError

METRICS_NAME = "hidden_state_bridge_{run}.prom"
SECONDS = 10.0
# name, kind, help, key of status.json
_METRICS = (
    ("records_done", "gauge", "Records whose manifest line is durable.", "records_done"),
    ("records_total", "gauge", "Records of this host's share, done ones with them.", "records_total"),
    ("records_failed", "gauge", "Records that failed by themselves in this start.", "failed_total"),
    ("tokens_done", "gauge", "Tokens of the records that are done.", "tokens_done"),
    ("tokens_total", "gauge", "Tokens of this host's share, done ones with them.", "tokens_total"),
    ("tokens_per_second", "gauge", "Rate over the last minute.", "tok_s"),
    ("written_bytes", "counter", "Bytes written since this start.", "bytes_written"),
    ("output_free_bytes", "gauge", "Free bytes of the output's file system.", "bytes_free"),
)
STATES = ("starting", "running", *hs_progress.ENDED)


def metrics(status: dict[str, Any]) -> str:
    """A status as Prometheus' text exposition format 0.0.4."""
    lines = []
    for name, kind, text, key in _METRICS:
        if status.get(key) is not None:
            full = f"hidden_state_bridge_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f'{full}{{run="{status["run"]}"}} {status[key]}']
    full = "hidden_state_bridge_state"
    lines += [f"# HELP {full} 1 for the state that the extractor is in.", f"# TYPE {full} gauge"]
    lines += [f'{full}{{run="{status["run"]}",state="{state}"}} {int(status["state"] == state)}' for state in STATES]
    return "\n".join(lines) + "\n"


def write_metrics(directory: str, status: dict[str, Any]) -> None:
    """Replace the run's file in node_exporter's textfile directory, readable by all. Raises OSError."""
    path = os.path.join(directory, METRICS_NAME.format(run=status["run"]))
    # node_exporter reads names that end with .prom alone.
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".hidden_state_bridge_")
    try:
        with open(handle, "w", encoding="ascii") as stream:
            os.fchmod(handle, 0o644)
            stream.write(metrics(status))
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Telling:
    """Whom one extraction tells of itself."""

    def __init__(self, config: ExtractConfig) -> None:
        self._directory, self._url_file = config.metrics_dir, config.notify_url_file
        self._host = str(config.provenance.get("host", ""))
        self._url: str | None = None
        self._written = float("-inf")

    def check(self) -> None:
        """Raise ConfigError where the directory cannot be written to or the file of the URL not read."""
        url = read_secret("notify_url_file", self._url_file)
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError("extraction_notify_url must begin with http:// or https://")
        # Known first, so that it is told of what is refused next.
        self._url = url
        directory = self._directory
        if directory is not None and not (os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"metrics_dir {directory} is no directory that the extractor can write to; make it, owned by the extractor's user,"
                " or leave extraction_metrics_dir empty"
            )

    def tell(self, status: dict[str, Any], line: str, ended: bool) -> list[str]:
        """Write the metrics, every ten seconds and at the end, and POST the end; returns what went wrong, never raises."""
        wrong = []
        if self._directory is not None and (ended or time.monotonic() - self._written >= SECONDS):
            self._written = time.monotonic()
            try:
                write_metrics(self._directory, status)
            except OSError as error:
                wrong.append(f"the metrics cannot be written to {self._directory}: {error.strerror}")
        if ended and self._url:
            failure = notify(self._url, status, self._host, line)
            wrong += [f"the URL of extraction_notify_url could not be told: {failure}"] if failure else []
        return wrong


def notify(url: str, status: dict[str, Any], host: str, line: str) -> str:
    """POST the end of an extraction as JSON; returns what went wrong, empty where nothing did.

    The body holds event (the state), run, host, line and message. The URL may hold a secret and is not repeated.
    """
    body = {"event": status["state"], "run": status["run"], "host": host, "line": line, "message": status["message"]}
    try:
        request = urllib.request.Request(url, orjson.dumps(body), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        return str(reason).replace(url, "the URL")
