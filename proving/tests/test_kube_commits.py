"""When a commit was asked for, as the audit log of an API server tells it, cut off or not."""

from __future__ import annotations

import json
from pathlib import Path

from domicile.stores.commit_log import QueuedCommit
from domicile.stores.kubernetes.objects import WRITE
from proving.kube_commits import AuditLog, Untimed


def line(stage: str, number: str, at: int, **more: object) -> str:
    """One line of the log; `at` is a second of a certain minute."""
    stamp = f"2026-11-19T12:00:{at:02d}.000000Z"
    found = {
        "stage": stage, "auditID": number, "verb": "update", "requestReceivedTimestamp": stamp,
        "stageTimestamp": stamp, "objectRef": {"name": "k"}, **more,
    }  # fmt: skip
    return json.dumps(found) + "\n"


def put(text: str) -> dict[str, object]:
    return {"metadata": {"name": "k", "annotations": {WRITE: text}}}


def untimed(mark: str) -> Untimed:
    return Untimed(QueuedCommit(1, 0.0, "", [], [], expiry=False), mark, "k")


def seconds(at: float | None) -> float | None:
    return None if at is None else at % 60


def test_a_write_is_known_by_its_text_also_if_its_client_did_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_text(
        line("RequestReceived", "1", 1)
        + line("ResponseComplete", "1", 1, requestObject=put("a 1"), responseStatus={"code": 200})
        + line("RequestReceived", "2", 2)
        + line("ResponseComplete", "2", 2, requestObject=put("a 2"), responseStatus={"code": 409})
        + line("RequestReceived", "3", 3)
        + line("ResponseComplete", "3", 3, requestObject=put("a 3"), responseStatus={"code": 504})
    )
    log = AuditLog(path)
    log.read()
    found = {text: log.answered(untimed(text)) for text in ("a 1", "a 2", "a 3")}
    assert {text: one and seconds(one.came) for text, one in found.items()} == {
        "a 1": 1, "a 2": None, "a 3": 3
    }  # fmt: skip


def test_a_request_without_an_answer_counts_only_before_what_came_after_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    first = line("RequestReceived", "1", 1)
    path.write_text(first + line("RequestReceived", "2", 9) + '{"cut off by a kill')
    log = AuditLog(path)
    log.read()
    whole = json.loads(first)["requestReceivedTimestamp"]
    assert whole.endswith("01.000000Z")
    assert seconds(log.came(untimed("b 1"), float("inf"))) == 9
    before = log.came(untimed("b 1"), float("inf"))
    assert before is not None
    assert seconds(log.came(untimed("b 1"), before - 4)) == 1
    assert log.came(untimed("b 1"), before - 20) is None
