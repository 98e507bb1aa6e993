"""How messages get from one incarnation to another in order, exactly once. Theory of operation.

A *link* goes from a dialling incarnation to an accepting one: requests one way, answers the other.
It outlives its connections. Each connection is a *session* of the link, with a number that rises
over all links from one incarnation to another. Each end numbers its frames from 1 on and keeps
every frame until the other end has acknowledged it. So after a broken connection both ends go on
with the next missing frame. A link joins two incarnations; a successor never takes it over.

**The dialling end** (`OutgoingLink`, shell `OutgoingSession`):

    new --first message--> dialling --Welcome--> up --connection broke or silent--> dialling
    dialling --not welcomed for link_timeout_s, resume refused, no frame gets through--> lost
    dialling --not welcomed for link_timeout_s, but its record says "blocked loop"--> dialling

**The accepting end** (`Acceptor`, `IncomingLink`, shell `IncomingSession`), one per dialler:

    none --Hello(new)--> up --connection over--> down --Hello(resume)--> up
    down --no Hello for 2 * link_timeout_s--> gone

- *Hello* names cluster, both incarnations, link, session, whether it resumes, and the last frame
  received. The acceptor refuses a wrong cluster, receiver, protocol or token (`token`) and a sender
  whose record is gone (`departed`, I1b). A session not newer than the last one is closed without an
  answer: the dialler would believe a refusal. A newer one closes the older connection.
- *Welcome* names the protocol and the last frame received. Then each end writes again what the
  other one misses. A link that was welcomed once can only be resumed: if the acceptor does not know
  it, or the numbers do not fit (`LinkVoid`), it is lost. Before the first welcome no frame was
  written, so a repeated "new" makes nothing run twice.
- *Acknowledge*: every frame carries the last number received. If no frame goes that way, a bare
  one without a number follows: after `ACK_DELAY_S`, after a quarter of the window, or at once for
  a peer that leaves (H14). A duplicate is dropped. A gap breaks the connection, not the link.
- *Window*: at most `link_frames` frames and `RETAINED_BYTES` are kept unacknowledged (I6). What
  does not fit waits in the queue. Control messages may use a few frames more, so they may pass
  queued messages. Answers that pile up for a peer that reads none drop that peer's link.
- *Silence*: a dialler that waits for an acknowledgement or a welcome and hears nothing for
  `SILENCE_S` redials, with a growing random delay.
- *Recall*: before the first welcome the sender may take a request back: it certainly never runs.
- *Blocked loop*: a peer whose record says that its loop is blocked (DX-10) is dialled until it
  answers or its record is gone. It keeps its shards meanwhile, so nothing is gained by giving up.
- *Loss*: `on_link_lost` gives the sender the messages that no connection ever carried; all other
  unanswered ones have an unknown outcome (H6). `on_link_gone` tells the owner that a link to it
  ended. The next message to that peer starts a new link. `forget` loses the links of an incarnation
  whose record is gone, both ways; its frames are never taken again (I1b).

Everything queued in one turn of the event loop leaves at its end, as few frames (`SessionBatches`);
a long batch leaves earlier, so that the peer can begin.

Invariants: I5 requests arrive in order, each at most once, and so do answers; L3 no byte goes to a
connection unless the guard was true just before; I1b nothing is taken from an incarnation after its
record was seen gone; I6 queues, retained frames, connections without a hello and remembered peers
are bounded. `machine` has no clock, I/O or randomness; the shells own connections and timers.
Reading order: `machine`, `session`, `outgoing`, `incoming`, `layer`, `token`, `departed`.
"""
