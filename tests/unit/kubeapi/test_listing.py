"""Long lists are decoded as they arrive, whatever the pieces are (K5)."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domicile.kubeapi.listing import ListDecoder, MalformedList


def listed(items: list[dict[str, object]]) -> bytes:
    head = {"kind": "PartialObjectMetadataList", "metadata": {"resourceVersion": "42"}}
    return json.dumps({**head, "items": items, "after": 1.5}, ensure_ascii=False).encode()


TEXTS = st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.lists(st.dictionaries(TEXTS, VALUES, max_size=4), max_size=5), st.integers(1, 40))
def test_any_list_in_any_pieces(items: list[dict[str, object]], size: int) -> None:
    body = listed(items)
    decoder = ListDecoder()
    found = [
        item for at in range(0, len(body), size) for item in decoder.feed(body[at : at + size])
    ]
    decoder.close()
    assert found == items
    assert decoder.resource_version == "42"


def test_a_list_without_items() -> None:
    decoder = ListDecoder()
    assert list(decoder.feed(b'{"items": null, "metadata": {}}')) == []
    decoder.close()
    assert decoder.resource_version == ""


@pytest.mark.parametrize(
    "body", [b"[]", b'{"items":[1]}', b'{"items":[]}x', b'{"items":[{}]', b"", b'{"a" 1}']
)
def test_what_is_no_list_is_refused(body: bytes) -> None:
    decoder = ListDecoder()
    with pytest.raises(MalformedList):  # noqa: PT012 - either of them may notice
        list(decoder.feed(body))
        decoder.close()


def test_memory_does_not_grow_with_the_list() -> None:
    one = json.dumps({"metadata": {"name": "x" * 200, "labels": {"a": "b"}}}).encode()
    decoder = ListDecoder()
    list(decoder.feed(b'{"items":['))
    tracemalloc.start()
    count = 0
    for _ in range(2_000):
        for _ in decoder.feed(one + b","):
            count += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 2_000
    assert peak < 100_000
