#!/bin/sh
# A CA and the server's certificate; HOST is how silos reach the server. Send them ca.crt. For `flwr`: flwr/config.toml.
set -e
umask 077
cd "$(dirname "$0")"
HOST=${1:?usage: certificates.sh HOST}
case $HOST in *[!0-9.]*) SAN="DNS:$HOST" ;; *) SAN="IP:$HOST" ;; esac
EC="ec -pkeyopt ec_paramgen_curve:P-384"
openssl req -x509 -newkey $EC -nodes -days 3650 -subj "/CN=sordino CA" -keyout ca.key -out ca.crt
openssl req -newkey $EC -nodes -subj "/CN=$HOST" -keyout server.key -out server.csr
# by the last two the SuperLink reaches itself
printf 'subjectAltName=%s,DNS:localhost,IP:127.0.0.1\n' "$SAN" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext -out server.crt
mkdir -p flwr && cat > flwr/config.toml <<END
[superlink]
default = "federation"

[superlink.federation]
address = "$HOST:{{ port }}"
root-certificates = "$PWD/ca.crt"
END
