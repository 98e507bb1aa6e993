"""Settings: the defaults of the rules, what is derived, what is refused (L2), the environment."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile import ConfigError, Settings, config
from domicile.settings import CLOCK_DRIFT, MAX_TICK_S


def test_the_documented_defaults() -> None:
    settings = Settings()
    assert (settings.ttl_s, settings.margin_s, settings.renew_s) == (6.0, 1.0, 1.5)
    assert settings.op_timeout_s == 1.5
    assert settings.stop_budget_s == 0.5
    assert (settings.ask_timeout_s, settings.handler_timeout_s) == (10.0, 30.0)
    assert (settings.mailbox, settings.buffer, settings.window) == (1_000, 1_000, 1_024)
    assert (settings.message_bytes, settings.hold_bytes) == (4 << 20, 16 << 20)
    assert (settings.shards, settings.idle_s, settings.chain) == (256, 120.0, 16)
    assert (settings.link_timeout_s, settings.hold_timeout_s) == (5.0, 10.0)
    assert (settings.drain_deadline_s, settings.linger_s) == (10.0, 5.0)


def test_a_short_ttl_derives_its_timings() -> None:
    settings = Settings(ttl_s=2.0)
    assert settings.margin_s == 0.6
    assert settings.renew_s == pytest.approx(1.4 / 3)


@given(st.floats(0.8, 10_000))
def test_what_is_derived_is_always_valid(ttl_s: float) -> None:
    """L2."""
    settings = Settings(ttl_s=ttl_s)
    room_s = settings.ttl_s - settings.margin_s
    assert 2 * settings.renew_s + settings.op_timeout_s <= room_s + 1e-6
    needed_s = CLOCK_DRIFT * ttl_s + MAX_TICK_S + settings.stop_budget_s
    assert settings.margin_s + 1e-6 >= needed_s


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"ttl_s": 0}, "must be positive"),
        ({"ttl_s": -6}, "must be positive"),
        ({"window": 0}, "window must be positive"),
        ({"shards": -1}, "shards must be positive"),
        ({"renew_s": 3.0}, "Raise ttl_s or lower renew_s"),
        ({"margin_s": 3.0}, "no room for two renewals"),
        ({"margin_s": 0.3}, "margin_s=0.3 is too short"),
        ({"ttl_s": float("nan")}, "ttl_s must be positive"),
    ],
)
def test_impossible_settings_are_refused(given_: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings(**given_)


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(FrozenInstanceError):
        settings.ttl_s = 3.0  # type: ignore[misc]


def test_the_environment_overrides_defaults() -> None:
    settings = config.from_environment(
        {"DOMICILE_TTL_S": "12", "DOMICILE_WINDOW": "7", "OTHER": "x", "DOMICILE_SEED": "3"}
    )
    assert settings == Settings(ttl_s=12.0, window=7)
    assert settings.margin_s == 2.0
    assert isinstance(settings.window, int)


def test_the_process_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOMICILE_MAILBOX", "5")
    assert config.from_environment().mailbox == 5


NUMBERS = [field.name for field in fields(Settings) if field.type != "str"]
TEXTS = [field.name for field in fields(Settings) if field.type == "str"]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_can_come_from_the_environment(name: str) -> None:
    default = getattr(Settings(), name)
    variable = f"DOMICILE_{name.upper()}"
    assert getattr(config.from_environment({variable: repr(default)}), name) == default
    with pytest.raises(ConfigError, match=variable):
        config.from_environment({variable: "many"})


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_can_come_from_the_environment(name: str) -> None:
    text = {"fencing": "health"}.get(name, "blue")
    variable = f"DOMICILE_{name.upper()}"
    assert getattr(config.from_environment({variable: text}), name) == text
    with pytest.raises(ConfigError, match=f"{name} must be a text"):
        Settings(**{name: 3})  # type: ignore[arg-type]


def test_there_are_two_ways_to_fence() -> None:
    assert Settings().fencing == "lease"
    with pytest.raises(ConfigError, match=r"fencing='locks' must be one of 'lease', 'health'"):
        Settings(fencing="locks")
    with pytest.raises(ConfigError, match="fencing=''"):
        config.from_environment({"DOMICILE_FENCING": ""})


def strangers(caplog: pytest.LogCaptureFixture, environ: dict[str, str]) -> list[str]:
    caplog.clear()
    config.from_environment(environ)
    return [record.getMessage() for record in caplog.records]


def test_a_name_that_nothing_reads_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("domicile.config._told", {})
    environ = {"DOMICILE_TTL": "3", "DOMICILE_TOKN": "x", "DOMICILE_XYZQ": "1", "TTL": "3"}
    said = strangers(caplog, environ)
    assert [one.partition(" ")[0] for one in said] == sorted(environ)[:3]
    assert (
        "DOMICILE_TTL is set in the environment, and nothing reads it; did you mean "
        + ("DOMICILE_TTL_S?")
        in said
    )
    assert any("did you mean DOMICILE_TOKEN?" in one for one in said)
    assert said[-1].endswith("nothing reads it")
    assert strangers(caplog, environ) == []


def test_names_that_others_read_are_not_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("domicile.config._told", {})
    names = ["STORE", "TOKEN", "SEED", "FULL", "TEST_BROKEN", "TTL_S"]
    names += ["SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_7000_TCP_ADDR", "B_SERVICE_PORT"]
    assert strangers(caplog, {f"DOMICILE_{name}": "7" for name in names}) == []


def test_a_fraction_is_no_count() -> None:
    with pytest.raises(ConfigError, match=r"DOMICILE_WINDOW='1\.5' is not a number"):
        config.from_environment({"DOMICILE_WINDOW": "1.5"})


def test_a_file_is_read_below_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[domicile]\nttl_s = 12\nwindow = 7\n")
    assert config.from_toml(file) == Settings(ttl_s=12, window=7)
    environ = {"DOMICILE_SETTINGS": str(file), "DOMICILE_WINDOW": "9"}
    assert config.from_environment(environ) == Settings(ttl_s=12, window=9)


def test_a_project_file_has_its_own_table(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.domicile]\nmailbox = 5\n[domicile]\nmailbox = 6\n")
    assert config.from_toml(file).mailbox == 5
    file.write_text("[project]\nname = 'x'\n")
    assert config.from_toml(file) == Settings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[domicile]\nttls = 3\n", "unknown name 'ttls'; did you mean 'ttl_s'"),
        ("[domicile]\nttl_s = '3'\n", "ttl_s must be a number"),
        ("[domicile]\nwindow = 1.5\n", "window must be a whole number"),
        ("domicile = 3\n", "must be a table"),
        ("[domicile\n", "is not TOML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        config.from_toml(file)
    with pytest.raises(ConfigError, match=r"DOMICILE_SETTINGS: settings file .* can't be read"):
        config.from_environment({"DOMICILE_SETTINGS": str(tmp_path / "none.toml")})
