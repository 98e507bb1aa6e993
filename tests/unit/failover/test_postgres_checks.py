"""What an agent of PostgreSQL refuses before it touches a server: nothing runs here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from domicile.errors import ConfigError
from domicile.failover.database_kinds import ServerPlace
from domicile.failover.drivers.postgres.kind import PostgresKind
from domicile.failover.drivers.postgres.local_server import LocalServer


def test_a_folder_that_is_missing_is_a_wrong_setting(tmp_path: Path) -> None:
    """It ended the agent with a traceback, again and again."""
    place = ServerPlace(
        url="postgresql://keeper@127.0.0.1:5499/postgres", folder=tmp_path / "state",
        data=tmp_path / "nowhere" / "data",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere, in which .*'data'"):
        asyncio.run(PostgresKind().check(place, "async"))


@pytest.mark.parametrize("named", [False, True])
def test_settings_that_cannot_be_found_are_asked_for(tmp_path: Path, named: bool) -> None:
    """As with Debian's packages. The server would start without them, and let nobody in."""
    data, own = tmp_path / "main", tmp_path / "etc" / "postgresql.conf"
    data.mkdir()
    (data / "PG_VERSION").write_text("15\n")
    place = ServerPlace(
        url="postgresql://keeper@127.0.0.1:5499/postgres", folder=tmp_path / "state", data=data,
        command=("postgres", "-D", str(data), "-c", f"config_file={own}") if named else (),
    )  # fmt: skip
    server = LocalServer(place)
    missing = own if named else data / "postgresql.conf"
    assert server.without_settings().startswith(f"there is no {missing}, the server's own settings")
    missing.parent.mkdir(exist_ok=True)
    missing.touch()
    assert server.without_settings() == ""


def test_settings_that_come_with_a_copy_are_not_missed_before(tmp_path: Path) -> None:
    place = ServerPlace(
        url="postgresql://keeper@127.0.0.1:5499/postgres", folder=tmp_path / "state",
        data=tmp_path / "data",
    )  # fmt: skip
    assert LocalServer(place).without_settings() == ""


def test_another_server_at_the_address_is_noticed(tmp_path: Path) -> None:
    """As the distribution's own, which nobody has switched off."""

    async def scenario() -> None:
        listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        process = PostgresKind().process(
            ServerPlace(
                url=f"postgresql://keeper@127.0.0.1:{port}/postgres", folder=tmp_path / "state",
                data=tmp_path / "data",
            )
        )  # fmt: skip
        assert process is not None
        assert await process.stranger() == f"another server answers at 127.0.0.1:{port} already"
        listening.close()
        await listening.wait_closed()
        assert await process.stranger() == ""

    asyncio.run(scenario())
