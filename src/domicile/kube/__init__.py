"""How do several instances of a Kubernetes controller share its objects? By a ring (K1 to K7).

Theory of operation. Each instance announces itself by a Lease with the ring's label. The *sharder*
watches these Leases and nothing else. It keeps a hash ring of the instances that are available. A
webhook of the sharder labels each new object with the instance that the ring names. An instance
watches only the objects with its own label, and acts on no other.

When the instances change, the acting sharder walks over the metadata of all objects. An object of a
living instance gets a drain label. The instance finishes its work and removes both labels, and the
webhook names the new instance. An object of an instance that is gone is given to another one, but
only while the sharder holds the Lease of the one that is gone: so that one cannot come back in
between.

Reading order: `conventions` (names on the wire), `hashring` (which instance), `leases` (is it
there), `sharder` (what is changed, and when), `admission` (what the webhook answers). All of these
are pure. `holding` keeps a Lease; `member` is an instance's side, with `controller` as a plain
loop. `sharding` drives the machine, `webhook` is its server, `certificates` are what that
needs. `serving` puts a sharder together.

`pod_health` and `pod_proof` are no part of rings: they prove to nodes of entities that a pod is
gone.
"""
