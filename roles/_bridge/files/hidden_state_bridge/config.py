# SPDX-License-Identifier: Apache-2.0
"""The extractor's configuration: one JSON object, written by the role, checked here once."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import sys
from dataclasses import dataclass, field
from typing import Any

import hs_manifest
from hs_capture.fingerprints import RID_SUFFIX

from .errors import ConfigError
from .formats import FORMATS, unfit

SCHEMA = 1
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FINAL_STATES = {"post_norm": 1, "pre_norm": 1, "both": 2, "none": 0}
GIB = 1 << 30
_TIME = "give a time with its zone, such as 2026-01-31T06:00:00+01:00"


@dataclass(frozen=True)
class ExtractConfig:
    """All that one extractor needs to know.

    share: ranges of records. url: base of the server. concurrency: requests in flight. retries: further tries after an
    HTTP error of the server. request_timeout, server_wait (how long a server may be away) and dump_timeout (from the
    answer to the dump) are in seconds. min_free_bytes: the output file system is never filled beyond it.
    workers: threads that convert and write, 0 for one chosen from the CPUs. group: who else may read the output.
    until: a time after which nothing is begun, as ISO 8601 with its zone. metrics_dir: where a Prometheus text file goes.
    notify_url_file: a file with a URL that is told how the extraction ended.
    format: one output format, or a list of them; each record then has a file in each.
    """

    schema: int
    run: str
    identity: dict[str, Any]
    dataset: str
    share: str
    url: str
    dump_dir: str
    output_dir: str
    format: str | list[str]
    layers: list[int]
    final: str
    hidden_size: int
    dtype: str
    provenance: dict[str, Any] = field(default_factory=dict)
    api_key_file: str | None = None
    state_dir: str | None = None
    rid_prefix: str = "hsb-"
    concurrency: int = 16
    retries: int = 3
    request_timeout: float = 600
    server_wait: float = 60
    dump_timeout: float = 30
    min_free_bytes: int = GIB
    workers: int = 0
    group: str | None = None
    until: str | None = None
    metrics_dir: str | None = None
    notify_url_file: str | None = None

    @property
    def until_time(self) -> float:
        """`until` in seconds since the epoch, infinity where it is not set."""
        return _time_of(self.until)

    @property
    def formats(self) -> tuple[str, ...]:
        """The output formats, by name."""
        return (self.format,) if isinstance(self.format, str) else tuple(self.format)

    @property
    def output_bytes_per_token(self) -> int:
        """Bytes of states that the output holds for each token, all formats together and none of them compressed."""
        state = self.hidden_size * STATE_BYTES[self.dtype]
        finals = [1 if FORMATS[name].KEEPS else FINAL_STATES[self.final] for name in self.formats]
        return sum((len(self.layers) + final) * state + 16 for final in finals)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of states and ids that a dump holds for each token."""
        states = len(self.layers) + FINAL_STATES[self.final]
        return states * self.hidden_size * STATE_BYTES[self.dtype] + 8

    @property
    def rid_stem(self) -> str:
        """What the rids of this run, and of no other, begin with."""
        return f"{self.rid_prefix}{self.run}-"

    @property
    def canary_stem(self) -> str:
        """What the rids of a canary begin with, outside of `rid_stem`: an extractor at work removes what it does not await there."""
        return f"{self.rid_prefix}canary-"

    @property
    def asking_stem(self) -> str:
        """As `canary_stem`, of requests that ask each rank for fingerprints."""
        return f"{self.rid_prefix}{RID_SUFFIX}canary-"


_TEXT = ("run", "dataset", "share", "url", "dump_dir", "output_dir", "final", "dtype", "rid_prefix")
_OPTIONAL_TEXT = ("api_key_file", "state_dir", "group", "until", "metrics_dir", "notify_url_file")
_LEAST = {"hidden_size": 1, "concurrency": 1, "retries": 0, "min_free_bytes": 0, "workers": 0}
_SECONDS = ("request_timeout", "server_wait", "dump_timeout")


def read_config(values: dict[str, Any]) -> ExtractConfig:
    """Check a configuration. Raises ConfigError naming the key and what it must be."""
    known = {item.name: item for item in dataclasses.fields(ExtractConfig)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)} in the extractor's configuration")
    required = [name for name, item in known.items() if item.default is item.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"the extractor's configuration lacks {', '.join(missing)}")
    if values["schema"] != SCHEMA:
        raise ConfigError(f"the configuration has schema {values['schema']!r}, this extractor reads {SCHEMA}")
    for name in _TEXT:
        if name in values and not isinstance(values[name], str):
            raise ConfigError(f"{name} is {values[name]!r}; it must be text")
    for name in _OPTIONAL_TEXT:
        if not isinstance(values.get(name), (str, type(None))):
            raise ConfigError(f"{name} is {values[name]!r}; it must be text or null")
    for name, least in _LEAST.items():
        if name in values and (values[name].__class__ is not int or values[name] < least):
            raise ConfigError(f"{name} is {values[name]!r}; it must be a whole number of at least {least}")
    for name in _SECONDS:
        if name in values and (type(values[name]) not in (int, float) or values[name] <= 0):
            raise ConfigError(f"{name} is {values[name]!r}; it must be a number of seconds above 0")
    for name in ("identity", "provenance"):
        if not isinstance(values.get(name, {}), dict):
            raise ConfigError(f"{name} must be an object")
    config = ExtractConfig(**values)
    _check_choices(config)
    return config


def _check_choices(config: ExtractConfig) -> None:
    check_formats(config.format)
    for name, choices in (("final", FINAL_STATES), ("dtype", STATE_BYTES)):
        if getattr(config, name) not in choices:
            raise ConfigError(f"{name} is {getattr(config, name)!r}; it must be one of {', '.join(choices)}")
    layers = config.layers
    if (
        not isinstance(layers, list)
        or not layers
        or any(layer.__class__ is not int or layer < 0 for layer in layers)
        or sorted(set(layers)) != layers
    ):
        raise ConfigError(f"layers is {layers!r}; it must be a list of ascending layer numbers")
    if unfit(config.formats, config.final):
        raise ConfigError(unfit(config.formats, config.final))
    _time_of(config.until)
    if not config.url.startswith(("http://", "https://")):
        raise ConfigError(f"url is {config.url!r}; it must begin with http:// or https://")
    for name in ("layers", "final", "dtype"):
        if config.identity.get(name) != getattr(config, name):
            raise ConfigError(f"identity.{name} is {config.identity.get(name)!r} and {name} {getattr(config, name)!r}")
    if config.run != hs_manifest.run_of(config.identity):
        raise ConfigError(f"run is {config.run!r}; by its identity it is {hs_manifest.run_of(config.identity)!r}")


def _time_of(until: str | None) -> float:
    """A time in seconds since the epoch, infinity for none. Raises ConfigError."""
    if not until:
        return float("inf")
    try:
        # Python 3.9 and 3.10 know no Z.
        moment = datetime.datetime.fromisoformat(until.replace("Z", "+00:00"))
    except ValueError as error:
        raise ConfigError(f"until is {until!r}; {_TIME}") from error
    if moment.tzinfo is None:
        raise ConfigError(f"until is {until!r} and names no zone; {_TIME}")
    return moment.timestamp()


def check_formats(value: object) -> None:
    """Raise ConfigError unless the value is the name of an output format, or a list of some of them."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or any(name.__class__ is not str or name not in FORMATS for name in names):
        raise ConfigError(f"format is {value!r}; it must be one of {', '.join(FORMATS)}, or a list of some of them")
    if len(set(names)) < len(names):
        raise ConfigError(f"format is {value!r}; name each format once")


def need_packages(formats: tuple[str, ...]) -> None:
    """Raise ConfigError where this interpreter cannot write one of the formats."""
    if "safetensors_zstd" in formats and not importlib.util.find_spec("zstandard"):
        raise ConfigError(
            f"format safetensors_zstd needs the Python package zstandard in {sys.executable}; install it there, or take safetensors"
        )


def read_secret(name: str, path: str | None) -> str | None:
    """The text in that file, or None without one. name: the setting, for the message. Raises ConfigError."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}; give a file that the extractor can read") from error
