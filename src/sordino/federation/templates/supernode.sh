#!/bin/sh
# The node: it talks to the server, and runs nothing. ca.crt comes from the server. SERVER is its host:port.
cd "$(dirname "$0")"
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flwr"
exec flower-supernode --isolation process --host 127.0.0.1 --port {{ node }} --superexec-auth-secret-file node.secret \
  --superlink ${1:?usage: supernode.sh SERVER} --root-certificates ca.crt --auth-supernode-private-key node
