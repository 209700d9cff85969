"""The runtime of a worker: its threads, its connections, its references, and its membership in the group.

`agent` creates and closes all parts. `caller` makes calls, `client` and `server` are the two ends of a connection,
`executor` runs requests, `reference_store` keeps references, `cluster` tracks who is in the group.
"""
