"""The scenarios that `python -m proving.search` goes through, all of them to the end.

Two nodes, a shard, few messages and one fault: small enough that every order of events can be
tried, large enough for every step of a move to meet every fault. Where the coordinator's own
steps are not the matter it is `swift`, which leaves room for more messages.
"""

from __future__ import annotations

from dataclasses import replace

from proving.search.scenario import Msg, Scenario

X, Y = 0, 1

AWAY = ((X, 1),)
AWAY_AND_KEPT = ((X, 1), (X, -1))
THERE_AND_BACK = ((X, 1), (X, 0))
CHANGE_PLACES = ((X, 1), (Y, 0))


def tells(count: int, by: int = 2) -> tuple[Msg, ...]:
    """Tells to one entity, from the client unless said otherwise."""
    return (Msg(0, by=by),) * count


def swift(scenario: Scenario) -> Scenario:
    """The same, coordinated by a manager that needs no steps of its own."""
    leader = scenario.senders
    return replace(scenario, managers=1, leader=leader, candidates=(), swift=True)


NESTED = Scenario("", (), clients=0, homes=(0, 1), wishes=AWAY)
OWN_SHARD = replace(
    NESTED,
    name="a handler asks into its own shard",
    messages=(Msg(0, by=0, ask=True), Msg(1, parent=0, ask=True)),
    entities=(X, X),
    homes=(0,),
    running=(0,),
)
TELL_THEN_ASK = replace(
    NESTED,
    name="a handler tells, then asks",
    messages=(Msg(0, by=0, ask=True), Msg(1, parent=0), Msg(1, parent=0, ask=True)),
    entities=(X, Y),
    running=(0,),
    wishes=((Y, 0),),
)
BEHIND_A_ROOT = replace(
    NESTED,
    name="a handler waits behind one that asks back",
    messages=(
        Msg(0, by=0, ask=True),
        Msg(2, by=1, ask=True),
        Msg(2, parent=0, ask=True),
        Msg(1, parent=1, ask=True),
    ),
    entities=(X, X, Y),
    running=(0, 1),
)
ONE_KEY = Scenario("", (), clients=0, one_key=True)
UNKNOWN = ("commit unknown, landed", "commit unknown, lands later", "commit unknown, lost")

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("a move", tells(3)),
    Scenario("a node is drained", tells(1), wishes=(), drained=0),
    Scenario("a cold start", tells(1), homes=(-1,), wishes=()),
    Scenario("owners send too", (Msg(0, by=0), Msg(0, by=1)), clients=0),
    Scenario("two shards change places", (), homes=(0, 1), wishes=CHANGE_PLACES),
    Scenario("an owner asks for its shard back", (), reverts=1),
    swift(Scenario("an owner asks for it back, two messages", tells(2), reverts=1)),
    swift(Scenario("a wish is taken back", tells(2), wishes=AWAY_AND_KEPT)),
    swift(Scenario("there and back", tells(1), wishes=THERE_AND_BACK)),
    swift(Scenario("two senders", (Msg(0, by=2), Msg(0, by=3)), clients=2)),
    swift(Scenario("a window of one", tells(2), window=1)),
    swift(Scenario("Started travels", tells(2), starts_travel=True)),
    swift(Scenario("callers give up", (Msg(0, by=2, ask=True),) * 2, withdrawals=1)),
    OWN_SHARD,
    TELL_THEN_ASK,
    BEHIND_A_ROOT,
    Scenario("a node crashes", tells(1), faults=("crash",)),
    swift(Scenario("a node that sends crashes", (*tells(1, 0), *tells(1, 1)), clients=0,
                   faults=("crash",))),
    swift(Scenario("one of three nodes crashes", tells(1, 1), nodes=3, clients=0,
                   faults=("crash",))),
    Scenario("a link is lost", tells(1), faults=("link lost",)),
    swift(Scenario("a link is lost, two messages", tells(2), faults=("link lost",))),
    swift(Scenario("Flushed is overdue", tells(2, 1), clients=0, reverts=1,
                   faults=("overdue Flushed",))),
    Scenario("a commit's outcome is unknown", tells(1), faults=UNKNOWN),
    Scenario("the leader dies", tells(1, 1), clients=0, candidates=(1,), faults=("leader dies",)),
    Scenario("the leader dies, releases are noted", (), clients=0, notes=1,
             faults=("leader dies",)),
    Scenario("the leader is deposed", (), clients=0, faults=("leader deposed",)),
    Scenario("the leader is deposed, one message", tells(1, 1), clients=0, candidates=(1,),
             faults=("leader deposed",)),
    Scenario("a manager dies or is deposed", (), clients=0, managers=2, leader=2,
             candidates=(2, 3), faults=("leader deposed", "leader dies")),
    Scenario("Released comes again", tells(1), faults=("Released again",)),
    Scenario("Told is lost", tells(1), faults=("Told lost",)),
    Scenario("a watch breaks", tells(1), faults=("watch broken",)),
    Scenario("a watch breaks, there and back", (), wishes=THERE_AND_BACK,
             faults=("watch broken",)),
    replace(ONE_KEY, name="one key: a move", clients=1, messages=tells(1)),
    replace(ONE_KEY, name="one key: a cold start", homes=(-1,), wishes=()),
    replace(ONE_KEY, name="one key: the leader dies", candidates=(1,), notes=1,
            faults=("leader dies",)),
    replace(ONE_KEY, name="one key: a node crashes", faults=("crash",)),
    replace(ONE_KEY, name="one key: a commit's outcome is unknown", faults=UNKNOWN),
)  # fmt: skip
