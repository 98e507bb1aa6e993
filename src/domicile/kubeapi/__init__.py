"""How does Domicile talk to a Kubernetes API server? One small asynchronous client.

`client.KubeClient` is what the rest uses. `objects` has the few types that are decoded, `kinds`
says where each kind of object is served. `listing` decodes long lists as a stream, `follow` keeps a
watch. `credentials` finds the server and who we are. All bytes go through the port `exchange`: over
HTTP by `http_exchange`, which alone needs the extra `domicile[kubernetes]`, or to the server in
memory of `domicile.testing.kube`. Nothing here knows what a ring is.
"""
