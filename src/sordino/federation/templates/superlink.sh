#!/bin/sh
# The SuperLink. Its database outlives it: silos reconnect after a restart.
cd "$(dirname "$0")"
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flwr"
exec flower-superlink --host 0.0.0.0 --port {{ port }} --database link.db --enable-supernode-auth \
  --disable-runtime-dependency-installation --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key
