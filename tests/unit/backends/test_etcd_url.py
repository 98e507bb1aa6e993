"""What the URL of an etcd store may say, and how it is told that something is wrong with it."""

from __future__ import annotations

import pytest

from domicile import ConfigError
from domicile.backends.registry import store_backend
from domicile.backends.wiring import check_urls
from domicile.stores.etcd.address import parse_etcd_url

SECRET = "s3cret"


def test_the_parts_of_a_url() -> None:
    found = parse_etcd_url(
        f"etcd://blue:{SECRET}%40@a:2379,b,[::1]:3379/infra/domicile?ca=/ca.pem&cert=/c.pem&key=/k.pem"
    )
    assert found.endpoints == ("a:2379", "b:2379", "[::1]:3379")
    assert (found.user, found.password, found.root) == ("blue", f"{SECRET}@", "infra/domicile")
    assert found.tls
    assert (found.ca, found.cert, found.key) == ("/ca.pem", "/c.pem", "/k.pem")
    assert found.shown == "etcd://a:2379,b:2379,[::1]:3379/infra/domicile"
    assert (found.data, found.leases) == (b"infra/domicile/clusters/", b"infra/domicile/leases/")
    assert SECRET not in repr(found)
    plain = parse_etcd_url("etcd://a")
    assert (plain.endpoints, plain.root, plain.tls) == (("a:2379",), "domicile", False)
    assert parse_etcd_url("etcd://a?tls=true").tls
    assert parse_etcd_url("etcd://u@a?password_file=/p").password_file == "/p"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("etcd://", "names no server"),
        ("etcd://,", "names no server"),
        ("etcd://a:b", "is no server of the store"),
        ("etcd://a:0", "is no server of the store"),
        ("etcd://::1:2379", "has brackets"),
        ("etcd://[::1:2379", "is no address"),
        (f"etcd://:{SECRET}@a", "without a user"),
        ("etcd://u@a", "a user and no password"),
        ("etcd://a?password_file=/p", "a password_file and no user"),
        (f"etcd://u:{SECRET}@a?password_file=/p", "one of them"),
        ("etcd://a?cert=/c", "cert= and key= together"),
        ("etcd://a?tls=yes", "tls='yes'"),
        ("etcd://a?tls=false&ca=/ca", "drop one of them"),
        ("etcd://a?cacert=/ca", "unknown option 'cacert'"),
        ("etcd://a?ca=", "must have a value for ca="),
        ("etcd://a?ca=/a&ca=/b", "one only"),
    ],
)
def test_what_is_wrong_is_told_without_the_password(url: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        store_backend(url)
    assert text in str(raised.value)
    assert SECRET not in str(raised.value)


def test_durable_entities_need_a_journal_with_a_name() -> None:
    check_urls("etcd://a:2379")
    check_urls("etcd://a:2379", "sqlite:///events.journal", ["Account"])
    with pytest.raises(ConfigError, match="journal="):
        check_urls("etcd://a:2379", None, ["Account"])


def test_what_must_be_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(store_backend("etcd://a")), "needs", ("no_grpc",))
    with pytest.raises(ConfigError, match=r"needs no_grpc.*pip install 'domicile\[etcd\]'"):
        store_backend("etcd://a")
