"""Settings from environment variables and TOML files, and the token from the environment.

`Node`, `Manager`, `connect` and the command line call it if no settings or no token are given. The
values, their defaults and their checks are in `settings`. This module must not be imported by the
core, because it reads files and the environment.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from domicile.errors import ConfigError
from domicile.links.token import SHORT, secrets_of
from domicile.settings import PLAIN, Settings

log = logging.getLogger("domicile")

_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}

_PREFIX = "DOMICILE_"

_OTHERS = ("SETTINGS", "STORE", "TOKEN", "VERSION", "SEED", "FULL")
"""Variables that are not settings: of the command line, of processes and of the tests."""

_FOREIGN = re.compile(r"^TEST_|^REPLICA_|(^|_)(SERVICE_(HOST|PORT)|PORT)(_|$)")
"""Variables of the tests and of replica groups, and variables that Kubernetes sets for a service
named "domicile"."""

MOST_TOLD = 64
"""I6: short tokens that are remembered as warned of."""

_told: dict[str, None] = {}
_short: dict[str, None] = {}


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from `DOMICILE_<NAME>` variables and from a TOML file; a variable wins.

    `DOMICILE_SETTINGS` names the file; see `from_toml`. A setting that neither gives keeps its
    default. Each unknown variable name is logged once.
    """
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    path = source.get("DOMICILE_SETTINGS")
    if path:
        try:
            values = _read_toml(Path(path), {field.name for field in fields(Settings)})
        except ConfigError as error:
            raise ConfigError(f"DOMICILE_SETTINGS: {error}") from error
    _warn_of_strangers(source, [field.name for field in fields(Settings)])
    for field in fields(Settings):
        name = f"DOMICILE_{field.name.upper()}"
        if name in source:
            if field.type in PLAIN:
                values[field.name] = _plain(name, source[name], str(field.type))
                continue
            kind = int if field.type == "int" else float
            try:
                values[field.name] = kind(source[name])
            except ValueError as error:
                raise ConfigError(
                    f"{name}={source[name]!r} is not a number ({kind.__name__} expected)"
                ) from error
    return Settings(**values)


def from_toml(path: str | Path) -> Settings:
    """Settings from the table `[domicile]` of a TOML file; `[tool.domicile]` in pyproject."""
    return Settings(**_read_toml(Path(path), {field.name for field in fields(Settings)}))


def version_of(version: str | None, environ: Mapping[str, str] | None = None) -> str:
    """The version of a program: the given one, else `DOMICILE_VERSION`; empty if it has none."""
    if version is not None:
        return version
    return (os.environ if environ is None else environ).get("DOMICILE_VERSION", "").strip()


def token_of(token: str | None, environ: Mapping[str, str] | None = None) -> str:
    """The token of a process: the given one, or `DOMICILE_TOKEN`; raises `ConfigError`."""
    named = "token=''"
    if token is None:
        token = (os.environ if environ is None else environ).get("DOMICILE_TOKEN")
        named = "DOMICILE_TOKEN=''"
    if token is None:
        return ""
    if not token.strip():
        raise ConfigError(
            f"{named} is an empty token, which protects nothing. Give the cluster's token; or, for "
            "a cluster without one, leave token= out and do not set DOMICILE_TOKEN"
        )
    secrets = secrets_of(token)
    if any(len(secret) < SHORT for secret in secrets) and token not in _short:
        if len(_short) >= MOST_TOLD:
            _short.clear()
        _short[token] = None
        log.warning(
            "the token is short enough to be guessed: use one of at least %d characters, as "
            "`python -c 'import secrets; print(secrets.token_hex())'` makes it",
            SHORT,
        )
    return ",".join(secrets)


def _warn_of_strangers(source: Mapping[str, str], names: list[str]) -> None:
    """A variable that no setting reads is probably mistyped, and its value would be lost."""
    known = [*(name.upper() for name in names), *_OTHERS]
    for variable in sorted(source):
        prefix, found, name = variable.partition(_PREFIX)
        if prefix or not found or name in known or _FOREIGN.search(name) or variable in _told:
            continue
        _told[variable] = None
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {_PREFIX}{close[0]}?" if close else ""
        log.warning("%s is set in the environment, and nothing reads it%s", variable, hint)


def _plain(name: str, text: str, kind: str) -> str | bool:
    if kind == "str":
        return text
    if text.lower() not in _TRUTHS:
        raise ConfigError(f"{name}={text!r} is not one of {', '.join(_TRUTHS)}")
    return _TRUTHS[text.lower()]


def _read_toml(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        whole = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {path} can't be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"settings file {path} is not TOML: {error}") from error
    below: Any = whole.get("tool", {}) if path.name == "pyproject.toml" else whole
    found: Any = below.get("domicile", {})
    if not isinstance(found, dict):
        raise ConfigError(f"settings file {path}: `domicile` must be a table")
    found = cast("dict[str, Any]", found)
    unknown = sorted(found.keys() - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], sorted(known), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"settings file {path} has an unknown name {unknown[0]!r}{hint}")
    return dict(found)
