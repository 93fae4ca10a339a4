#!/bin/sh
# The server's certificate, signed by the federation's CA; HOST is how silos reach the server. Send them ca.crt.
# The CA's key stays in ../ca, which no process of the server needs: move it to another machine or user, and bring it
# back to sign the next certificate, after a year. A second CA is never made beside the first.
set -e
umask 077
cd "$(dirname "$0")"
HOST=${1:?usage: certificates.sh HOST}
CA=${SORDINO_CA:-../ca}
case $HOST in *[!0-9.]*) SAN="DNS:$HOST" ;; *) SAN="IP:$HOST" ;; esac
EC="ec -pkeyopt ec_paramgen_curve:P-384"
if [ -f ca.crt ] && [ ! -f "$CA/ca.key" ]; then
  echo "found ca.crt, whose key is not in $CA; needed $CA/ca.key, by which silos know this server" >&2
  exit 2
fi
mkdir -p "$CA"
[ -f "$CA/ca.key" ] || openssl req -x509 -newkey $EC -nodes -days 3650 -subj "/CN=sordino CA" -keyout "$CA/ca.key" -out "$CA/ca.crt"
openssl req -newkey $EC -nodes -subj "/CN=$HOST" -keyout server.key -out server.csr
# by the last two the processes of the server reach each other
printf 'subjectAltName=%s,DNS:localhost,IP:127.0.0.1\n' "$SAN" > server.ext
openssl x509 -req -in server.csr -CA "$CA/ca.crt" -CAkey "$CA/ca.key" -CAcreateserial -days 365 -extfile server.ext -out server.crt
cp "$CA/ca.crt" ca.crt
rm server.csr server.ext
mkdir -p flwr && cat > flwr/config.toml <<END
[superlink]
default = "federation"

[superlink.federation]
address = "127.0.0.1:{{ port }}"
root-certificates = "$PWD/ca.crt"
END
