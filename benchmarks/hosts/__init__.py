"""farcall, torch's RPC and plain TLS sockets between two hosts: `make bench-hosts`."""
