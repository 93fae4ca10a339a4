#!/bin/sh
# The SuperLink, on the loopback: silos reach it through the gate. It runs no code; its database outlives it.
umask 077
cd "$(dirname "$0")"
[ -f link.secret ] || head -c 32 /dev/urandom > link.secret
export FLWR_TELEMETRY_ENABLED=0 FLWR_HOME="$PWD/flwr"
exec flower-superlink --host 127.0.0.1 --port {{ port }} --database link.db --enable-supernode-auth \
  --isolation process --superexec-auth-secret-file link.secret --disable-runtime-dependency-installation \
  --log-file superlink.log --log-rotation-interval-hours 24 --log-rotation-backup-count 14 \
  --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key
